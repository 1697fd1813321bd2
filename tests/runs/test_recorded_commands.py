"""The command that results.json records for a file, run by itself, gives the same file."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import torch
import yaml
from experiments.small_plan import TEXT
from kit import refused
from processes import python

import kfacpack as kp
from kfacpack.experiments.plan_file import parse
from kfacpack.experiments.run import Run
from kfacpack.models.functional import select_parameters

PATTERNS = ["visual.*resblocks.1.attn.*", "visual.*resblocks.0.mlp.c_fc.*"]


def digest(path):
    if path.suffix == ".kfac":
        return kp.Bundle(path).digest
    return kp.TaskVector.load(path).digest


def write_checkpoint(folder, seed):
    """Writes a checkpoint that was fine-tuned from the model of random weights, and returns its folder."""
    from safetensors.torch import save_file

    model = kp.load_model("tiny", weights="random")
    state, generator = dict(model.module.state_dict()), torch.Generator().manual_seed(seed)
    for name in select_parameters(model.module, None, model.frozen):
        state[name] = state[name] + 0.01 * torch.randn(state[name].shape, generator=generator)
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module", params=["bundles", "data", "methods", "extracted", "parameters"])
def finished(request, tmp_path_factory):
    """A finished run with a model of random weights, and its stages that write a bundle or a vector."""
    plan = yaml.safe_load(TEXT)
    plan["model"] = {"name": "tiny", "weights": "random", "head": "prototypes"}
    penalty = "kronecker" if request.param in ("bundles", "parameters") else "data"
    plan["arms"]["kfac"] = {"penalty": penalty, "strength": 3}
    plan["evaluation"] = {"examples": 4, "alphas": "0,1"}
    if request.param == "bundles":
        sparse = {"regime": "sparse", "mask": "bundles", "keep": 0.2, "clip": 2.0, "lr": 0.01}
        plan["arms"]["kfac"] |= {"every": 2, "compress": "block:8", "training": sparse}
    if request.param == "methods":
        del plan["arms"]["kfac"]
        plan["evaluation"]["methods"] = [
            {"name": "ties", "keep": 0.3, "mean": True},
            {"name": "curvature", "damping": 0.02, "label": "mine"},
            {"name": "regmean", "compress": "block:8+int8"},
        ]
    if request.param == "parameters":
        plan["model"]["params"] = PATTERNS
    plan["seeds"] = [3]
    root = tmp_path_factory.mktemp(request.param) / "run"
    if request.param == "extracted":
        vectors = {task: str(write_checkpoint(root.parent / task, seed)) for seed, task in enumerate(plan["tasks"])}
        plan["arms"] = {"found": {"vectors": vectors}}
        plan["evaluation"]["methods"] = ["curvature"]
    text = yaml.safe_dump(plan)
    run = Run(parse(text, "plan.yaml"), text, root, torch.device("cpu"))
    run.execute()
    return root, [stage for stage in run.stages if stage.path.suffix in (".kfac", ".safetensors")]


def words_of(command, folder):
    """Returns the words of a command as a shell expands them."""
    program = ["sh", "-c", f"printf '%s\\0' {command}"]
    output = subprocess.run(program, cwd=folder, capture_output=True, text=True, check=True).stdout
    return output.split("\0")[:-1]


def test_recorded_commands_give_the_recorded_files(finished, tmp_path, monkeypatch):
    root, stages = finished
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    monkeypatch.chdir(copy)
    assert {stage.kind for stage in stages} & {"vectors", "extracted"}
    assert "sums" in {stage.kind for stage in stages}
    assert all(stage.command() for stage in stages)
    for stage in stages:
        path = copy / stage.path.relative_to(root)
        expected = digest(path)
        path.unlink()
        name, *words = words_of(stage.command(), copy)
        assert name == "kfacpack"
        result = python("-m", "kfacpack_cli", *words)
        assert result.returncode == 0, result.stderr
        assert digest(path) == expected, stage.command()


def test_the_parameters_of_a_plan_are_those_of_its_bundles_and_vectors(tmp_path):
    plan = yaml.safe_load(TEXT)
    plan["model"]["params"] = PATTERNS
    plan["evaluation"] = {"examples": 4, "alphas": "1"}
    text = yaml.safe_dump(plan)
    run = Run(parse(text, "plan.yaml"), text, tmp_path / "run", torch.device("cpu"))
    run.execute()
    model = kp.load_model("tiny")
    chosen = set(select_parameters(model.module, PATTERNS, model.frozen))
    assert 0 < len(chosen) < len(select_parameters(model.module, None, model.frozen))
    bundles = [kp.load(stage.path) for stage in run.stages if stage.path.suffix == ".kfac"]
    vectors = [kp.TaskVector.load(stage.path) for stage in run.stages if stage.path.suffix == ".safetensors"]
    assert bundles
    assert vectors
    assert all(set(bundle.parameters) == chosen for bundle in bundles)
    assert all(set(vector) == chosen for vector in vectors)
    keys = {stage.key for stage in run.stages if stage.kind in ("bundles", "vectors")}
    del plan["model"]["params"]
    others = Run(parse(yaml.safe_dump(plan), "plan.yaml"), yaml.safe_dump(plan), tmp_path / "run", torch.device("cpu"))
    assert keys.isdisjoint(stage.key for stage in others.stages)


def test_patterns_that_match_nothing_are_refused(tmp_path):
    text = TEXT.replace("name: tiny,", "name: tiny, params: [nothing.*],")
    with refused(kp.KfacpackError, "nothing.*"):
        Run(parse(text, "plan.yaml"), text, tmp_path / "run", torch.device("cpu")).execute()
