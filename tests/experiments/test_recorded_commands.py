"""The command that results.json records for a file, run by itself, gives the same file."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
import yaml
from experiments.small_plan import TEXT

import kfacpack as kp
from kfacpack.experiments.plan_file import parse
from kfacpack.experiments.run import Run


def digest(path):
    if path.suffix == ".kfac":
        return kp.Bundle(path).digest
    return kp.TaskVector.load(path).digest


@pytest.fixture(scope="module", params=["bundles", "data"])
def finished(request, tmp_path_factory):
    """A finished run with a model of random weights, and its stages that write a bundle or a vector."""
    import torch

    plan = yaml.safe_load(TEXT)
    plan["model"] = {"name": "tiny", "weights": "random", "head": "prototypes"}
    plan["arms"]["kfac"] = {"penalty": "kronecker" if request.param == "bundles" else "data", "strength": 3}
    plan["evaluation"] = {"examples": 4, "alphas": "0,1"}
    plan["seeds"] = [3]
    text = yaml.safe_dump(plan)
    root = tmp_path_factory.mktemp(request.param)
    run = Run(parse(text, "plan.yaml"), text, root, torch.device("cpu"))
    run.execute()
    return root, [stage for stage in run.stages if stage.path.suffix in (".kfac", ".safetensors")]


def test_recorded_commands_give_the_recorded_files(finished, tmp_path):
    root, stages = finished
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    assert {stage.kind for stage in stages} >= {"vectors", "sums"}
    for stage in stages:
        path = copy / stage.path.relative_to(root)
        expected = digest(path)
        path.unlink()
        command = stage.command().replace("kfacpack ", f"{sys.executable} -m kfacpack_cli ", 1)
        result = subprocess.run(command, shell=True, cwd=copy, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr
        assert digest(path) == expected, stage.command()
