"""A wrong plan is refused with its line and key, before anything is loaded."""

from __future__ import annotations

import pytest
from experiments.small import TEXT
from kit import refused

import kfacpack as kp
from kfacpack.experiments.plan_file import parse, plan_text, read_plan
from kfacpack.training.penalty_weights import STRENGTH


def refusal(text: str) -> str:
    with pytest.raises(kp.KfacpackError) as caught:
        parse(text, "plan.yaml")
    return str(caught.value)


def changed(old: str, new: str) -> str:
    assert old in TEXT
    return TEXT.replace(old, new)


BOMB = "a0: &a0 [1]\n" + "".join(f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 9)}]\n" for k in range(1, 12))
"""Twelve lines that stand for 9¹¹ numbers."""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (changed("steps: 3", "steps: 0"), "plan.yaml, line 5: training.steps: "),
        (changed("steps: 3", "stepz: 3"), "plan.yaml, line 5: training.stepz: is no key of a plan there"),
        (changed("strength: 3", "strength: -1"), "plan.yaml, line 8: arms.kfac.strength: "),
        (changed("strength: 3", "strength: .nan"), "plan.yaml, line 8: arms.kfac.strength: "),
        (changed("strength: 3", "strength: 1e400"), "plan.yaml, line 8: arms.kfac.strength: "),
        (changed("strength: 3", "strength: 1e300"), "plan.yaml, line 8: arms.kfac.strength: "),
        (changed("steps: 3", "steps: 3, lr: 1e19"), "plan.yaml, line 5: training.lr: "),
        (changed("steps: 3", "steps: 3, weight_decay: 1e400"), "plan.yaml, line 5: training.weight_decay: "),
        (changed('alphas: "0,1"}', 'alphas: "-1:1:1"}'), "already; expected zero or more"),
        (changed("penalty: kronecker", "penalty: none"), "plan.yaml, line 8: arms.kfac: strength belongs to a penalty"),
        (
            changed("  without: {penalty: none}\n", "  without:\n"),
            "line 7: arms.without.penalty: is missing",
        ),
        (changed("kronecker, strength", "kronecker, rank: 2, strength"), "rank belongs to rule: optimal"),
        (changed("  without:", "  kfac:"), "plan.yaml, line 8: arms.kfac is there twice, first in line 7"),
        (changed("tasks: [faces, weaves]", "tasks: [faces]"), "plan.yaml, line 3: tasks: "),
        (
            changed("tasks: [faces, weaves]", "tasks: [faces, faces]"),
            "line 3: tasks.1: 'faces' is there twice",
        ),
        (
            changed("tasks: [faces, weaves]", "tasks: [weaves, weaves@1/2]"),
            "line 3: tasks.1: 'weaves@1/2' and 'weaves' have classes in common",
        ),
        (changed("tasks: [faces, weaves]\n", ""), "plan.yaml, line 1: tasks: is missing"),
        (
            changed("control: faces", "control: mnist"),
            "line 12: evaluation.negation.control: 'mnist' is none",
        ),
        (
            changed("control: faces", "control: faces, instead: mnist"),
            "line 12: evaluation.negation.instead: 'mnist' is none",
        ),
        (
            changed("control: faces", "control: faces, instead: faces"),
            "line 12: evaluation.negation.instead: 'faces' cannot be kept in its own place",
        ),
        (changed("alphas: 0,1\n", "alphas: 0:2\n"), "plan.yaml, line 11: evaluation.alphas: "),
        (changed("examples: 20", "examples: lots"), "plan.yaml, line 10: evaluation.examples: examples 'lots'"),
        (changed("examples: 20", "examples: 0"), "plan.yaml, line 10: evaluation.examples: "),
        (changed("examples: 20", "examples: [1]"), "plan.yaml, line 10: evaluation.examples: "),
        (
            changed("{examples: 8,", "{compress: zip, examples: 8,"),
            "line 4: curvature.compress: codec 'zip'",
        ),
        (changed("name: small", "name: small\n\tx: 1"), "plan.yaml, line 2: is no plan: "),
        (TEXT + "  methods: [sun]\n", "evaluation.methods.0: there is no method 'sun'"),
        (changed("[faces, weaves]", "&all [faces, *all]"), "plan.yaml, line 3: is no plan: an alias, *all"),
        (BOMB, "plan.yaml, line 2: is no plan: an alias, *a0"),
        ("[" * 100_000, "plan.yaml: is no plan: it is nested too deeply"),
        (TEXT + "name: \x00\n", "plan.yaml: is no plan: "),
        (
            changed("kronecker, strength", "diagonal, strength").replace("  drift: {examples: 4}\n", ""),
            "plan.yaml, line 15: evaluation.spectra: spectra are those of Kronecker factors",
        ),
        (
            changed("kronecker, strength", "diagonal, strength") + "  in_depth: []\n",
            "plan.yaml, line 16: evaluation.spectra: ",
        ),
        (changed('alphas: "0,1", examples: 5', "pairs: [[faces, faces]], examples: 5"), "found 'faces' twice"),
        (TEXT + "seeds: [true]\n", "seeds.0: expected a whole number"),
        (changed("steps: 3", "steps: true"), "plan.yaml, line 5: training.steps: expected a whole number"),
        (changed("strength: 3", "strength: true"), "plan.yaml, line 8: arms.kfac.strength: expected a number"),
        (TEXT + "seeds: [!!int foo]\n", "plan.yaml: is no plan"),
        (changed("name: small", "name: !foo small"), "plan.yaml, line 1: is no plan"),
        (changed("name: small", "name: &a [*a]"), "an alias, *a"),
        ("- a\n- b\n", "plan.yaml, line 1: expected keys"),
        ("", "plan.yaml, line 1: expected keys"),
        ("!!python/object/apply:os.system [true]", "plan.yaml, line 1"),
    ],
)
def test_what_is_wrong_is_named(text, expected):
    assert expected in refusal(text)


def test_a_file_that_is_not_there_or_no_text(tmp_path):
    with refused(kp.KfacpackError):
        read_plan(tmp_path / "plan.yaml")
    (tmp_path / "plan.yaml").write_bytes(b"\xff\xfe\x00")
    with refused(kp.KfacpackError):
        read_plan(tmp_path / "plan.yaml")


def test_paths_are_meant_from_the_plans_folder(tmp_path):
    (tmp_path / "plan.yaml").write_text(changed("[faces, weaves]", "[faces, {name: mine, data: some/where}]"))
    plan, _ = read_plan(tmp_path / "plan.yaml")
    assert plan.place(plan.task("mine").data) == tmp_path / "some/where"


def test_paths_may_be_of_the_environment(monkeypatch):
    plan = parse(TEXT, "plan.yaml")
    monkeypatch.setenv("KFACPACK_TEST", "/data")
    assert str(plan.place("$KFACPACK_TEST/mine")) == "/data/mine"
    with refused(kp.KfacpackError):
        plan.place("$KFACPACK_UNSET/mine")


def test_a_range_is_no_number_of_seconds():
    assert parse(changed("alphas: 0,1\n", "alphas: 0:2:0.1\n"), "plan.yaml").evaluation.alphas == "0:2:0.1"
    assert parse(changed("name: small", "name: no"), "plan.yaml").name == "no"
    assert parse(changed("strength: 3", "strength: 1e-3"), "plan.yaml").arms["kfac"].strength == 0.001


def test_an_arm_changes_only_what_it_says():
    plan = parse(changed("strength: 3}", "strength: 3, training: {steps: 7}}"), "plan.yaml")
    assert plan.training_of("kfac").steps == 7
    assert plan.training_of("kfac").batch_size == plan.training_of("without").batch_size == 8


@pytest.mark.parametrize(("penalty", "lam"), [("kronecker", STRENGTH), ("diagonal", STRENGTH), ("data", 1.0)])
def test_the_drift_on_data_is_the_whole_one_and_has_a_strength_of_its_own(penalty, lam):
    text = changed("penalty: kronecker, strength: 3", f"penalty: {penalty}").replace("  spectra: true\n", "")
    assert parse(text, "plan.yaml").arms["kfac"].lam == lam > 0
    assert parse(changed("penalty: kronecker", f"penalty: {penalty}"), "plan.yaml").arms["kfac"].lam == 3


@pytest.mark.parametrize("every", [False, True])
def test_the_demos_plan_is_one(every):
    assert len(parse(plan_text(every=every), "demo").tasks) == (8 if every else 3)
