"""Plans that compare merge methods: settings, bundles of the same seed, and every method at its best α."""

from __future__ import annotations

import json

import pytest
import torch
from experiments.small_plan import TEXT
from kit import refused

import kfacpack as kp
from kfacpack.evaluation.accuracy import scores
from kfacpack.experiments.artifact_stages import AddStage, CompressStage, EstimateStage, ExtractStage
from kfacpack.experiments.plan_file import parse
from kfacpack.experiments.report_accuracy import headline, over_alpha, summary
from kfacpack.experiments.report_content import joined_text
from kfacpack.experiments.results_schema import Results, read_results
from kfacpack.experiments.run import Run
from kfacpack.models.functional import select_parameters

BEGINNING = TEXT.partition("arms:")[0]
PLAN = f"""{BEGINNING}seeds: [0, 1]
arms:
  linear: {{penalty: none}}
evaluation:
  examples: 20
  alphas: 0,0.5
  methods: [sum, {{name: ties, keep: 0.5}}, curvature, {{name: curvature, compress: "block:8+int8", label: small}}]
"""


def run_of(root, text=PLAN):
    return Run(parse(text, "plan"), text, root, torch.device("cpu"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp("merge")
    run = run_of(root, PLAN + "  method_alphas: true\n")
    return run, run.execute()


def added_by(run, seed):
    return {stage.method.label: stage for stage in run.stages if isinstance(stage, AddStage) if seed_of(stage) == seed}


def seed_of(stage):
    return stage.vectors[0].seed


def test_methods_get_the_bundles_of_all_tasks_of_their_seed(tmp_path):
    run = run_of(tmp_path)
    for seed in (0, 1):
        added = added_by(run, seed)
        assert added["sum"].bundles == added["ties keep=0.5"].bundles == ()
        plain, small = added["curvature"].bundles, added["small"].bundles
        assert [(type(bundle), bundle.task, bundle.seed) for bundle in plain] == [
            (EstimateStage, task, seed) for task in ("faces", "weaves")
        ]
        assert [(type(stage), stage.bundle, stage.codec) for stage in small] == [
            (CompressStage, bundle, "block:8+int8") for bundle in plain
        ]
    positions = {stage.key: number for number, stage in enumerate(run.stages)}
    assert all(positions[item.key] < positions[stage.key] for stage in run.stages for item in stage.inputs)


def test_settings_and_bundles_are_part_of_the_key(tmp_path):
    keys = {label: stage.key for label, stage in added_by(run_of(tmp_path), 0).items()}
    assert len(set(keys.values())) == 4
    renamed = PLAN.replace("label: small", "label: tiny")
    assert added_by(run_of(tmp_path, renamed), 0)["tiny"].key == keys["small"]
    other = added_by(run_of(tmp_path, PLAN.replace("keep: 0.5", "keep: 0.4")), 0)
    assert other["ties keep=0.4"].key != keys["ties keep=0.5"]
    assert other["sum"].key == keys["sum"]
    # A name alone and a mapping without settings are the same method.
    same = added_by(run_of(tmp_path, PLAN.replace("[sum,", "[{name: sum, label: total},")), 0)
    assert same["total"].key == keys["sum"]


def test_merged_files_are_those_of_add(finished):
    run, _ = finished
    for stage in added_by(run, 0).values():
        vectors = [vector.path for vector in stage.vectors]
        bundles = [bundle.path for bundle in stage.bundles] or None
        expected = kp.add(vectors, stage.method.name, bundles=bundles, **stage.method.settings)
        assert kp.TaskVector.load(stage.path).digest == expected.digest
    small = kp.load(added_by(run, 0)["small"].bundles[0].path)
    assert small.nbytes < kp.load(added_by(run, 0)["curvature"].bundles[0].path).nbytes / 4


def test_every_method_has_its_best_alpha(finished):
    _, content = finished
    for seed in content["arms"][0]["seeds"]:
        first, *others = seed["added"].values()
        assert "sweep" not in first
        for sweep, at_one in ((seed, first), *((entry, entry) for entry in others)):
            assert sweep["sweep"]["alphas"] == [0.0, 0.5, 1.0]
            assert sweep["sweep"]["mean"][2] == pytest.approx(at_one["mean"]["accuracy"])
            index = sweep["sweep"]["alphas"].index(sweep["best"]["alpha"])
            assert sweep["best"]["test"] == sweep["sweep"]["mean"][index]
            assert seed["sweep"]["mean"][0] == sweep["sweep"]["mean"][0]  # the base model
    assert [line["method"] for line in content["summary"]] == ["sum", "ties keep=0.5", "curvature", "small"]
    assert all(line["best"] is not None for line in content["summary"])
    assert [(method["label"], method["needs_bundles"], method["compress"]) for method in content["methods"]] == [
        ("sum", False, None),
        ("ties keep=0.5", False, None),
        ("curvature", True, None),
        ("small", True, "block:8+int8"),
    ]
    assert sorted((bundle["task"], bundle["seed"], bundle["compress"] or "") for bundle in content["bundles"]) == [
        (task, seed, codec) for task in ("faces", "weaves") for seed in (0, 1) for codec in ("", "block:8+int8")
    ]


def test_only_the_first_method_is_swept_by_default(tmp_path):
    (arm_run, *_) = run_of(tmp_path).graph.arm_runs
    assert list(arm_run.validation) == ["sum"]
    assert {label: stages["faces"].alphas for label, stages in arm_run.sums.items()} == {
        "sum": (0.0, 0.5, 1.0),
        "ties keep=0.5": (1.0,),
        "curvature": (1.0,),
        "small": (1.0,),
    }


def test_the_report_shows_methods_and_their_bundles(finished):
    run, content = finished
    results = read_results(run.root)
    assert json.loads(results.model_dump_json(exclude_unset=True)) == content
    methods = summary(results).tables[2]
    assert [(row[0].value, str(row[3].value).partition(",")[0]) for row in methods.rows] == [
        ("sum", "no"),
        ("ties keep=0.5", "no"),
        ("curvature", "yes"),
        ("small", "yes"),
    ]
    assert "block:8+int8" in str(methods.rows[3][3].value)
    section = over_alpha(results)
    assert section.tables[0].columns[:2] == ["arm", "method"]
    assert [row[1].value for row in section.tables[0].rows] == ["sum", "ties keep=0.5", "curvature", "small"]
    assert [list(picture.data) for picture in section.pictures] == [
        ["linear"],
        [row[1].value for row in section.tables[0].rows],
    ]
    assert "own vector alone" in joined_text(headline(results))
    page = kp.report(run.root, run.root / "report.html")
    assert "needs bundles" in page.read_text(encoding="utf-8")


def test_results_without_methods_are_still_read(finished):
    """Results of earlier versions do not list the methods."""
    _, content = finished
    old = {key: value for key, value in content.items() if key != "methods"}
    results = Results.model_validate(old)
    assert headline(results)
    assert len(summary(results).tables) == 2


class TestExtraction:
    @pytest.fixture
    def checkpoints(self, tmp_path):
        """Two fine-tuned checkpoints of tiny: its weights, changed at random."""
        from safetensors.torch import save_file

        model = kp.load_model("tiny")
        trained = select_parameters(model.module, None, model.frozen)
        for number, name in enumerate(("one", "two")):
            generator = torch.Generator().manual_seed(number)
            state = {key: value.clone() for key, value in model.module.state_dict().items()}
            for key in trained:
                state[key] += 0.01 * torch.randn(state[key].shape, generator=generator)
            (tmp_path / name).mkdir()
            save_file(state, tmp_path / name / "model.safetensors")
        return tmp_path

    def text(self, folder):
        vectors = f"{{vectors: {{faces: {folder / 'one'}, weaves: {folder / 'two' / 'model.safetensors'}}}}}"
        text = PLAN.replace("{penalty: none}", "{penalty: none, training: {regime: full}}\n  extracted: " + vectors)
        return text.replace("seeds: [0, 1]", "seeds: [0]").replace(", {name: ties, keep: 0.5}", "")

    def test_vectors_are_extracted_and_merged(self, checkpoints):
        run = run_of(checkpoints / "out", self.text(checkpoints))
        content = run.execute()
        trained, extracted = content["arms"]
        assert ("vectors" in trained, set(extracted["vectors"])) == (False, {"faces", "weaves"})
        assert (extracted["regime"], extracted["penalty"]) == ("full", None)
        stages = [stage for stage in run.stages if isinstance(stage, ExtractStage)]
        assert [stage.task for stage in stages] == ["faces", "weaves"]
        model = kp.load_model("tiny")
        expected = kp.TaskVector.from_checkpoint(model, checkpoints / "one", task="faces")
        assert kp.TaskVector.load(stages[0].path).digest == expected.digest
        # The vectors have no heads, so the head of the plan is used.
        context = run.graph.context
        (result,) = scores(model, context.head("faces"), context.evaluation_set("faces"), expected, [1.0])
        assert extracted["seeds"][0]["individual"]["faces"] == result.accuracy
        report = summary(read_results(run.root)).tables[1]
        assert [row[1].value for row in report.rows] == ["none", "extracted, not trained"]

    def test_changed_checkpoints_are_extracted_again(self, checkpoints):
        def keys():
            stages = run_of(checkpoints / "out", self.text(checkpoints)).stages
            return [stage.key for stage in stages if isinstance(stage, ExtractStage)]

        first, second = keys()
        assert keys() == [first, second]
        (checkpoints / "one" / "note.txt").write_text("not part of the checkpoint")
        assert keys() == [first, second]
        file = checkpoints / "one" / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"\x01")
        assert keys()[0] != first
        assert keys()[1] == second

    def test_missing_checkpoints_are_refused_before_anything_runs(self, checkpoints):
        text = self.text(checkpoints).replace(str(checkpoints / "one"), str(checkpoints / "nowhere"))
        with refused(kp.KfacpackError, "arms.extracted.vectors.faces", "nowhere", "safetensors"):
            run_of(checkpoints / "out", text)
        assert not (checkpoints / "out").exists()
