"""Invalid plans raise errors with the line and the key, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from experiments.small_plan import TEXT
from kit import refused

import kfacpack as kp
from kfacpack.experiments.plan_file import parse, plan_text, read_plan
from kfacpack.training.penalty_weights import STRENGTH, STRENGTH_KL


def changed(old: str, new: str) -> str:
    assert old in TEXT
    return TEXT.replace(old, new)


DRIFT = "  drift: {examples: 4, layer_examples: 0}\n"
BOMB = "a0: &a0 [1]\n" + "".join(f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 9)}]\n" for k in range(1, 12))
"""Twelve lines that expand to 9¹¹ numbers."""


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        (changed("steps: 3", "steps: 0"), ["plan.yaml, line 5: training.steps: ", "got 0"]),
        (changed("steps: 3", "stepz: 3"), ["plan.yaml, line 5: training.stepz: ", "regime, steps, batch_size"]),
        (changed("strength: 3", "strength: -1"), ["plan.yaml, line 8: arms.kfac.strength: ", "-1"]),
        (changed("strength: 3", "strength: .nan"), ["plan.yaml, line 8: arms.kfac.strength: "]),
        (changed("strength: 3", "strength: 1e400"), ["plan.yaml, line 8: arms.kfac.strength: "]),
        (changed("strength: 3", "strength: 1e300"), ["plan.yaml, line 8: arms.kfac.strength: "]),
        (changed("steps: 3", "steps: 3, lr: 1e19"), ["plan.yaml, line 5: training.lr: "]),
        (changed("steps: 3", "steps: 3, weight_decay: 1e400"), ["plan.yaml, line 5: training.weight_decay: "]),
        (changed('alphas: "0,1"}', 'alphas: "-1:1:1"}'), ["evaluation.negation.alphas: ", "alpha -1", "0:3:0.1"]),
        (
            changed("penalty: kronecker", "penalty: none"),
            ["plan.yaml, line 8: arms.kfac: ", "strength", "penalty: none"],
        ),
        (changed("  without: {penalty: none}\n", "  without:\n"), ["line 7: arms.without.penalty: ", "missing"]),
        (changed("kronecker, strength", "kronecker, rank: 2, strength"), ["rank", "rule: optimal", "rule: tak"]),
        (changed("  without:", "  kfac:"), ["plan.yaml, line 8: ", "arms.kfac", "line 7"]),
        (changed("tasks: [faces, weaves]", "tasks: [faces]"), ["plan.yaml, line 3: tasks: ", "at least 2"]),
        (changed("tasks: [faces, weaves]", "tasks: [faces, faces]"), ["line 3: tasks.1: ", "duplicate", "'faces'"]),
        (
            changed("tasks: [faces, weaves]", "tasks: [weaves, weaves@1/2]"),
            ["line 3: tasks.1: 'weaves@1/2' and 'weaves' have classes in common"],
        ),
        (changed("tasks: [faces, weaves]\n", ""), ["plan.yaml, line 1: tasks: ", "missing"]),
        (
            changed("control: faces", "control: mnist"),
            ["line 12: evaluation.negation.control: ", "'mnist'", "faces, weaves"],
        ),
        (
            changed("control: faces", "control: faces, instead: mnist"),
            ["line 12: evaluation.negation.instead: ", "'mnist'", "faces, weaves"],
        ),
        (
            changed("control: faces", "control: faces, instead: faces"),
            ["line 12: evaluation.negation.instead: ", "'faces'", "control"],
        ),
        (changed("alphas: 0,1\n", "alphas: 0:2\n"), ["plan.yaml, line 11: evaluation.alphas: "]),
        (changed("examples: 20", "examples: lots"), ["plan.yaml, line 10: evaluation.examples: ", "'lots'"]),
        (changed("examples: 20", "examples: 0"), ["plan.yaml, line 10: evaluation.examples: "]),
        (changed("examples: 20", "examples: [1]"), ["plan.yaml, line 10: evaluation.examples: "]),
        (changed("{examples: 8,", "{compress: zip, examples: 8,"), ["line 4: curvature.compress: ", "'zip'"]),
        (changed("name: small", "name: small\n\tx: 1"), ["plan.yaml, line 2: not a valid plan: "]),
        (TEXT + "  methods: [sun]\n", ["evaluation.methods.0: ", "'sun'", "sum, ties"]),
        (TEXT + "  methods: [3]\n", ["evaluation.methods.0: ", "3"]),
        (TEXT + "  methods: [{keep: 0.3}]\n", ["evaluation.methods.0.name: ", "missing"]),
        (
            TEXT + "  methods: [sum, {name: ties, keep: 3}]\n",
            ["line 17: evaluation.methods.1: ", "keep is 3", "(0, 1]"],
        ),
        (TEXT + "  methods: [{name: ties, kepp: 0.3}]\n", ["evaluation.methods.0: ", "'kepp'", "keep, mean"]),
        (TEXT + "  methods: [{name: ties, compress: int8}]\n", ["evaluation.methods.0: ", "compress", "curvature"]),
        (TEXT + "  methods: [{name: regmean, compress: zip}]\n", ["evaluation.methods.0.compress: ", "'zip'"]),
        (TEXT + "  methods: [ties, {name: iso, label: ties}]\n", ["evaluation.methods.1: ", "duplicate", "'ties'"]),
        (TEXT + "  methods: [{name: sum, label: ../up}]\n", ["evaluation.methods.0.label: ", "'../up'"]),
        (
            changed("{examples: 8,", "{compress: int8, examples: 8,")
            + "  methods: [{name: regmean, compress: fp16}]\n",
            ["line 17: evaluation.methods.0: ", "curvature.compress: int8"],
        ),
        (changed("{penalty: none}", "{vectors: {faces: a}}"), ["line 7: arms.without.vectors: ", "'weaves'"]),
        (
            changed("{penalty: none}", "{vectors: {faces: a, weaves: b, mnist: c}}"),
            ["line 7: arms.without.vectors: ", "'mnist'", "faces, weaves"],
        ),
        (
            changed("{penalty: none}", "{vectors: {faces: a, weaves: b}, penalty: data}"),
            ["line 7: arms.without: ", "penalty", "vectors"],
        ),
        (
            changed("{penalty: none}", "{vectors: {faces: a, weaves: b}, training: {steps: 3}}"),
            ["line 7: arms.without: ", "training", "vectors"],
        ),
        (changed("{penalty: none}", "{vectors: }"), ["line 7: arms.without"]),
        (changed("[faces, weaves]", "&all [faces, *all]"), ["plan.yaml, line 3: ", "alias *all"]),
        (BOMB, ["plan.yaml, line 2: ", "alias *a0"]),
        ("[" * 100_000, ["plan.yaml: ", "nested too deeply"]),
        (TEXT + "name: \x00\n", ["plan.yaml: not a valid plan: "]),
        (
            changed("kronecker, strength", "diagonal, strength").replace(
                "  drift: {examples: 4, layer_examples: 0}\n", ""
            ),
            ["plan.yaml, line 15: evaluation.spectra: ", "Kronecker factors", "penalty: kronecker"],
        ),
        (
            changed("kronecker, strength", "diagonal, strength") + "  in_depth: []\n",
            ["plan.yaml, line 16: evaluation.spectra: "],
        ),
        (
            changed('alphas: "0,1", examples: 5', "pairs: [[faces, faces]], examples: 5"),
            ["evaluation.disentanglement.pairs.0: ", "'faces'", "two"],
        ),
        (TEXT + "  in_depth: [kfak]\n", ["line 17: evaluation.in_depth.0: ", "'kfak'", "without, kfac"]),
        (TEXT + "seeds: [true]\n", ["seeds.0: ", "integer", "True"]),
        (changed("steps: 3", "steps: true"), ["plan.yaml, line 5: training.steps: ", "integer", "True"]),
        (changed("strength: 3", "strength: true"), ["plan.yaml, line 8: arms.kfac.strength: ", "number", "True"]),
        (TEXT + "seeds: [!!int foo]\n", ["plan.yaml: not a valid plan"]),
        (changed("name: small", "name: !foo small"), ["plan.yaml, line 1: not a valid plan"]),
        (changed("name: small", "name: &a [*a]"), ["not a valid plan", "alias *a"]),
        ("- a\n- b\n", ["plan.yaml, line 1: ", "model, tasks and arms"]),
        ("", ["plan.yaml, line 1: ", "model, tasks and arms"]),
        ("!!python/object/apply:os.system [true]", ["plan.yaml, line 1"]),
    ],
)
def test_errors_name_the_line_and_the_key(text, facts):
    with refused(kp.KfacpackError, *facts):
        parse(text, "plan.yaml")


def test_missing_and_binary_files_are_refused(tmp_path):
    with refused(kp.KfacpackError, tmp_path / "plan.yaml", "cannot be read", "No such file"):
        read_plan(tmp_path / "plan.yaml")
    (tmp_path / "plan.yaml").write_bytes(b"\xff\xfe\x00")
    with refused(kp.KfacpackError, tmp_path / "plan.yaml", "UTF-8"):
        read_plan(tmp_path / "plan.yaml")


def test_methods_have_settings_and_labels():
    entries = "sum, {name: ties, keep: 0.3, mean: true}, {name: fisher, compress: int8}, {name: iso, label: i}"
    text = f"{TEXT}  methods: [{entries}]\n"
    methods = parse(text, "plan.yaml").evaluation.methods
    assert [method.label for method in methods] == ["sum", "ties keep=0.3 mean=True", "fisher int8", "i"]
    assert [method.settings for method in methods] == [{}, {"keep": 0.3, "mean": True}, {}, {}]
    assert [method.needs_bundles for method in methods] == [False, False, True, False]


def test_spectra_may_use_the_bundles_of_a_method():
    text = changed("kronecker, strength", "diagonal, strength").replace(DRIFT, "")
    with refused(kp.KfacpackError, "evaluation.spectra"):
        parse(text, "plan.yaml")
    assert parse(text + "  methods: [sum, fisher]\n", "plan.yaml").evaluation.spectra


@pytest.mark.parametrize("plan", sorted((Path(__file__).parents[2] / "examples").glob("*.yaml")), ids=lambda p: p.stem)
def test_the_plans_in_examples_are_valid(plan):
    assert read_plan(plan)[0].arms


def test_paths_are_relative_to_the_folder_of_the_plan(tmp_path):
    (tmp_path / "plan.yaml").write_text(changed("[faces, weaves]", "[faces, {name: mine, data: some/where}]"))
    plan, _ = read_plan(tmp_path / "plan.yaml")
    assert plan.resolve_path(plan.task("mine").data) == tmp_path / "some/where"


def test_environment_variables_in_paths_are_expanded(monkeypatch):
    plan = parse(TEXT, "plan.yaml")
    monkeypatch.setenv("KFACPACK_TEST", "/data")
    assert str(plan.resolve_path("$KFACPACK_TEST/mine")) == "/data/mine"
    with refused(kp.KfacpackError, "KFACPACK_UNSET"):
        plan.resolve_path("$KFACPACK_UNSET/mine")


def test_ranges_and_no_are_read_as_text():
    assert parse(changed("alphas: 0,1\n", "alphas: 0:2:0.1\n"), "plan.yaml").evaluation.alphas == "0:2:0.1"
    assert parse(changed("name: small", "name: no"), "plan.yaml").name == "no"
    assert parse(changed("strength: 3", "strength: 1e-3"), "plan.yaml").arms["kfac"].strength == 0.001


def test_an_arm_overrides_only_its_own_settings():
    plan = parse(changed("strength: 3}", "strength: 3, training: {steps: 7}}"), "plan.yaml")
    assert plan.training_of("kfac").steps == 7
    assert plan.training_of("kfac").batch_size == plan.training_of("without").batch_size == 8


@pytest.mark.parametrize(("penalty", "lam"), [("kronecker", STRENGTH), ("diagonal", STRENGTH), ("data", 1.0)])
def test_default_strength_depends_on_the_penalty(penalty, lam):
    text = changed("penalty: kronecker, strength: 3", f"penalty: {penalty}").replace("  spectra: true\n", "")
    assert parse(text, "plan.yaml").arms["kfac"].lam == lam > 0
    assert parse(changed("penalty: kronecker", f"penalty: {penalty}"), "plan.yaml").arms["kfac"].lam == 3
    nats = parse(text.replace("examples: 8, batch", "examples: 8, metric: kl, batch"), "plan.yaml")
    assert nats.arms["kfac"].lam == (STRENGTH_KL if penalty != "data" else 1.0)


@pytest.mark.parametrize("every", [False, True])
def test_the_plan_of_the_demo_is_valid(every):
    assert len(parse(plan_text(all_tasks=every), "demo").tasks) == (8 if every else 3)
