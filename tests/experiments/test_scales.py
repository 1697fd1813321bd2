"""Plans with scales and with settings per arm, and the check of a plan without weights and data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from experiments.small_plan import TEXT
from kit import refused

import kfacpack as kp
from kfacpack.experiments.artifact_stages import CompressStage, MergeStage
from kfacpack.experiments.offline_check import check_offline, encoded_bytes
from kfacpack.experiments.plan_file import parse, read_plan, scales_of
from kfacpack.experiments.run import Run

PAPER = Path(__file__).parents[2] / "examples" / "paper"
PLANS = sorted(PAPER.glob("*.yaml"))


def plan_with(arms, **more):
    content = yaml.safe_load(TEXT)
    return {**content, "arms": arms, "evaluation": {"examples": 4, "alphas": "0,1"}, **more}


def run_of(content, root):
    text = yaml.safe_dump(content)
    return Run(parse(text, "plan"), text, root, torch.device("cpu"), threads=1)


def test_a_scale_overrides_settings_and_null_removes_them(tmp_path):
    content = {**yaml.safe_load(TEXT), "scales": {"other": ["more.yaml", {"arms": {"without": None}}]}}
    (tmp_path / "more.yaml").write_text(yaml.safe_dump({"training": {"steps": 9}, "arms": {"kfac": {"strength": 7}}}))
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(content))
    plain, _ = read_plan(path)
    scaled, text = read_plan(path, "other")
    assert (plain.training.steps, scaled.training.steps, scaled.training.batch_size) == (3, 9, 8)
    assert list(scaled.arms) == ["kfac"]
    assert scaled.arms["kfac"].strength == 7
    assert parse(text, "text").model_dump() == scaled.model_dump(), "the text of a scaled plan is complete"
    assert scales_of(path) == ["other"]
    with refused(kp.KfacpackError, "huge", "other"):
        read_plan(path, "huge")


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_every_plan_of_the_paper_is_valid_at_every_scale(path):
    scales = scales_of(path)
    assert any(scale.startswith("full") for scale in scales)
    small, _ = read_plan(path)
    assert len(small.seeds) == 3
    for scale in scales:
        plan, _ = read_plan(path, scale)
        assert plan.arms.keys() >= small.arms.keys(), "a larger scale may add arms, but not leave out any"


def test_settings_of_an_arm_reach_its_stages(tmp_path):
    arms = {
        "plain": {"penalty": "kronecker"},
        "small": {"penalty": "kronecker", "compress": "block:2", "curvature": {"samples": 2}, "every": 2},
        "sized": {"penalty": "kronecker", "budget": "50%"},
        "other": {"penalty": "kronecker", "protects": ["digits"]},
        "talos": {"penalty": "none", "training": {"regime": "sparse", "mask": "bundles", "keep": 0.2, "lr": 0.01}},
    }
    content = plan_with(arms, references=["digits"], penalty={"strength": 5})
    run = run_of(content, tmp_path)
    vectors = {arm_run.arm: arm_run.vectors["faces"] for arm_run in run.graph.arm_runs}
    (bundle,) = vectors["small"].merged.bundles
    assert isinstance(bundle, CompressStage)
    assert (bundle.codec, bundle.bundle.options.samples, bundle.task) == ("block:2", 2, "weaves")
    assert vectors["small"].settings()["every"] == 2
    assert "every" not in vectors["plain"].settings()
    assert vectors["plain"].settings()["strength"] == 5
    assert vectors["sized"].merged.bundles[0].is_budget
    assert [bundle.task for bundle in vectors["other"].merged.bundles] == ["digits"]
    assert isinstance(vectors["talos"].mask, MergeStage)
    assert vectors["talos"].mask.key == vectors["plain"].merged.key, "the bundle is computed once"
    assert len({f"{stage.kind}/{stage.name}" for stage in run.stages}) == len(run.stages)


def test_results_state_the_settings_of_an_arm(tmp_path):
    sparse = {"regime": "sparse", "mask": "bundles", "keep": 0.2, "lr": 0.01}
    arms = {"it": {"penalty": "kronecker", "compress": "block:2", "every": 2, "training": sparse}}
    content = plan_with(arms, training={"steps": 1, "batch_size": 4}, curvature={"examples": 2, "batch_size": 2})
    content["evaluation"] = {"examples": 2, "alphas": "1"}
    run = run_of(content, tmp_path)
    (arm,) = run.execute()["arms"]
    assert arm["penalty"]["every"] == 2
    assert arm["settings"] == {"compress": "block:2", "training": sparse}
    (arm_run,) = run.graph.arm_runs
    sizes = [bundle.path.stat().st_size for bundle in run.graph.compressed.values()]
    assert arm["bundle_bytes"] == pytest.approx(sum(sizes) / 2, rel=0.1)
    talos = kp.TaskVector.load(arm_run.vectors["faces"].path)
    assert talos.regime == "sparse"
    assert talos.about.tasks[0].training.settings["keep"] == 0.2


def test_the_control_of_negation_may_be_a_task_without_a_vector(tmp_path):
    content = plan_with({"without": {"penalty": "none"}}, references=["digits"])
    content["evaluation"]["negation"] = {"control": "digits"}
    (arm_run,) = run_of(content, tmp_path).graph.arm_runs
    assert {stage.control for stage in arm_run.negated.values()} == {"digits"}


@pytest.mark.parametrize(
    ("arm", "words"),
    [
        ({"penalty": "none", "every": 2}, "every"),
        ({"penalty": "diagonal", "compress": "int8"}, "compress"),
        ({"penalty": "kronecker", "compress": "int8", "budget": "5%"}, "both"),
        ({"penalty": "kronecker", "preset": "tak"}, "strength"),
        ({"penalty": "kronecker", "protects": ["nothing"]}, "nothing"),
        ({"penalty": "kronecker", "budget": "much"}, "much"),
    ],
)
def test_settings_that_do_not_apply_are_refused(arm, words):
    with refused(kp.KfacpackError, "arms.it", words):
        parse(yaml.safe_dump(plan_with({"it": arm})), "plan")


def test_a_plan_is_checked_without_weights_and_data():
    arms = {"kfac": {"penalty": "kronecker"}, "small": {"penalty": "kronecker", "compress": "block:8+int8"}}
    content = plan_with(arms, tasks=["dtd", "eurosat@1/5", "digits"], references=["imagenet"])
    content["arms"]["kfac"]["protects"] = ["imagenet"]
    plan = parse(yaml.safe_dump(content), "plan")
    forecast = check_offline(plan, "a100")
    kinds = {kind.kind: kind for kind in forecast.kinds}
    assert forecast.gpu == "A100-40GB"
    assert kinds["vectors"].stages == 6
    assert kinds["vectors"].bytes == 6 * 4 * forecast.parameters
    assert kinds["compressed"].bytes < 0.15 * kinds["bundles"].bytes
    assert forecast.hours > 0
    assert check_offline(plan, "H100").hours < forecast.hours
    with refused(kp.KfacpackError, "abacus", "A100"):
        check_offline(plan, "abacus")
    with refused(kp.KfacpackError, "tasks.0", "mine"):
        check_offline(parse(yaml.safe_dump({**content, "tasks": ["mine", "dtd"]}), "plan"), "A100")


@pytest.mark.parametrize("codec", ["block:8", "svd:16", "svd:25%", "prune:30%", "int8", "block:8+int8", "fp16"])
def test_predicted_sizes_of_codecs_are_those_of_the_encoded_matrix(codec):
    from kfacpack.compression.codecs import CodecChain

    chain, side = CodecChain.parse(codec), 96
    x = torch.randn(side, side, generator=torch.Generator().manual_seed(0))
    _, encoded = chain.encode(kp.Dense.of(x @ x.T))
    assert encoded_bytes(chain, side) == pytest.approx(encoded.for_storage().nbytes, rel=0.02)
