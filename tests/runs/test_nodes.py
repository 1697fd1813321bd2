"""`kfacpack estimate` and `kfacpack train` on two nodes: two launchers that meet at an address, each with a process."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from contextlib import contextmanager

import pytest
from kit import random_tau
from processes import Python, python, python_twice

import kfacpack as kp

WORK = """
import os, sys
from pathlib import Path
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

def work(arguments):
    from kfacpack_cli.main import app
    Path(os.environ["RANKS"], os.environ["RANK"]).write_text(str(os.getpid()))
    try:
        app(arguments, prog_name="kfacpack")
    except SystemExit as end:
        sys.stdout.flush()
        if end.code:
            os._exit(end.code)
"""
LAUNCHER = f"""{WORK}
endpoint, *arguments = sys.argv[1:]
config = LaunchConfig(
    2, 2, 1, run_id="test", rdzv_backend="c10d", rdzv_endpoint=endpoint, max_restarts=0, start_method="fork"
)
elastic_launch(config, work)(arguments)
"""
"""Does what `torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint ADDRESS` does."""
ACCELERATE = f"""{WORK}
from kfacpack._compat import make_torchvision_importable
make_torchvision_importable()
import torch.distributed.run
from accelerate.commands.accelerate_cli import main

def launch(config, entrypoint):
    assert entrypoint == sys.executable
    config.start_method = "fork"
    return lambda *words: elastic_launch(config, work)(list(words[words.index("kfacpack_cli") + 1 :]))

torch.distributed.run.elastic_launch = launch
sys.argv[0] = "accelerate"
main()
"""
"""Does what `accelerate` does, with processes that are forked from this one instead of new interpreters."""

FEW = ["--params", "visual.transformer.resblocks.3.*", "--batch-size", 6]


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def two_nodes(*arguments):
    endpoint = f"127.0.0.1:{free_port()}"
    with Python("-c", LAUNCHER, endpoint, *arguments) as first, Python("-c", LAUNCHER, endpoint, *arguments) as second:
        yield first, second


@pytest.fixture(autouse=True)
def ranks(tmp_path_factory, monkeypatch):
    """A folder with the process ids by rank: either launcher may have the first rank."""
    folder = tmp_path_factory.mktemp("ranks")
    monkeypatch.setenv("RANKS", str(folder))
    return folder


def test_an_estimate_on_two_nodes(tmp_path):
    arguments = ["estimate", "--task", "digits", "--examples", 16, *FEW, "-o"]
    with two_nodes(*arguments, tmp_path / "nodes.kfac", "--json") as nodes:
        results = [node.wait(60) for node in nodes]
    assert [result.returncode for result in results] == [0, 0], results
    assert sorted(bool(result.stdout) for result in results) == [False, True], "only the first process prints"
    assert kp.Bundle(tmp_path / "nodes.kfac").manifest.source.examples == 16
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nodes.kfac"]


def test_accelerate_launches_an_estimate(tmp_path):
    pytest.importorskip("accelerate", reason="needs accelerate")
    options = ["--multi_gpu", "--num_machines", 1, "--num_processes", 2, "--main_process_port", free_port()]
    options += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    arguments = ["estimate", "--task", "digits", "--examples", 16, *FEW, "--json", "-o"]
    result = python("-c", ACCELERATE, "launch", *options, "-m", "kfacpack_cli", *arguments, tmp_path / "two.kfac")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["examples"] == 16, "only the first process prints"
    assert [path.name for path in tmp_path.iterdir()] == ["two.kfac"]
    alone = tmp_path / "one.kfac"
    assert python("-m", "kfacpack_cli", *arguments, alone).returncode == 0
    actual, expected = (kp.load(path) for path in (tmp_path / "two.kfac", alone))
    tau = random_tau(expected)
    assert float(actual.quadratic(tau)) == pytest.approx(float(expected.quadratic(tau)), rel=1e-5)


def test_a_lost_process_is_reported_and_the_run_resumes(tmp_path, ranks):
    output = tmp_path / "digits.safetensors"
    train = ["train", "--task", "digits", "--head", "text", *FEW, "--steps", 20, "-q", "-o"]
    metrics = output.with_name("digits.metrics.jsonl")
    with two_nodes(*train, output) as nodes:
        end = time.monotonic() + 60
        while not (metrics.exists() and len(metrics.read_text().splitlines()) > 2):
            assert time.monotonic() < end
            time.sleep(0.01)
        os.kill(int((ranks / "1").read_text()), signal.SIGKILL)
        results = [node.wait(60) for node in nodes]
    assert all(result.returncode for result in results)
    assert not output.exists()
    reported = [result.stderr for result in results if "another process was lost" in result.stderr]
    assert len(reported) == 1
    assert "rank 0 of 2" in reported[0]
    assert "--resume" in reported[0]
    assert output.with_name(f"{output.name}.partial").exists()
    with two_nodes(*train, output, "--resume") as nodes:
        assert [node.wait(60).returncode for node in nodes] == [0, 0]
    whole = tmp_path / "whole.safetensors"
    assert [result.returncode for result in python_twice("-m", "kfacpack_cli", *train, whole)] == [0, 0]
    assert output.read_bytes() == whole.read_bytes()
