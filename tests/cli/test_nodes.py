"""`kfacpack estimate` and `kfacpack train` on two nodes: two launchers that meet at an address, each with a process."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import contextmanager

import pytest
from processes import Python, python_twice

import kfacpack as kp

LAUNCHER = """
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

endpoint, *arguments = sys.argv[1:]
config = LaunchConfig(
    2, 2, 1, run_id="test", rdzv_backend="c10d", rdzv_endpoint=endpoint, max_restarts=0, start_method="fork"
)
elastic_launch(config, work)(arguments)
"""
"""Does what `torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint ADDRESS` does."""

FEW = ["--params", "visual.transformer.resblocks.3.*", "--batch-size", 6]


@contextmanager
def two_nodes(*arguments):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
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
    assert "process 0 of 2" in reported[0]
    assert "--resume" in reported[0]
    assert output.with_name(f"{output.name}.partial").exists()
    with two_nodes(*train, output, "--resume") as nodes:
        assert [node.wait(60).returncode for node in nodes] == [0, 0]
    whole = tmp_path / "whole.safetensors"
    assert [result.returncode for result in python_twice("-m", "kfacpack_cli", *train, whole)] == [0, 0]
    assert output.read_bytes() == whole.read_bytes()
