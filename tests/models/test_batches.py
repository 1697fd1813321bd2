"""Batches from worker processes: the same bytes, order and errors, and no processes left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import numpy as np
import pytest
import torch
from kfacpack_cli.main import app
from kit import refused
from PIL import Image
from processes import Python
from typer.testing import CliRunner

import kfacpack as kp
from kfacpack.errors import KfacpackError
from kfacpack.models.data_loading import batches, use_workers
from kfacpack.tasks.local_task import LocalSplit

FEW = ["--params", "visual.transformer.resblocks.3.*", "--batch-size", "4"]


@pytest.fixture(autouse=True)
def _as_before():
    yield
    use_workers(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Twelve training images and four test images of two classes."""
    folder, generator = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for split, count in (("train", 6), ("test", 2)):
        for name in ("cat", "dog"):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 255, (30, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def tiny():
    return kp.load_model("tiny")


def test_batches_do_not_depend_on_the_number_of_workers(tiny, folder):
    sources = [(kp.load_task("mine", folder).split("train"), "mine"), (kp.load_task("digits").split("test"), "digits")]
    indices = [(0, [3, 1]), (1, [5]), (0, [0, 10, 2]), (1, [7, 6]), (0, [4])]
    expected = [tiny.prepare([sources[k][0][n] for n in numbers], sources[k][1]) for k, numbers in indices]
    for workers in (0, 1, 2):
        use_workers(workers)
        state = torch.random.get_rng_state()
        result = list(batches(tiny, sources, iter(indices)))
        assert len(result) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
        assert torch.equal(torch.random.get_rng_state(), state)
        assert not multiprocessing.active_children()


def test_commands_write_the_same_bytes(folder, tmp_path):
    """An estimate and a training with a data penalty, with and without workers."""
    contents = {}
    for workers in (0, 2):
        folder_of_workers = tmp_path / str(workers)
        folder_of_workers.mkdir()
        data = ["--data", folder, "--workers", workers, "-q"]
        options = ["--steps", 3, "--micro-batch-size", 2, "--lr", "1e-3", "--reg-data", "digits"]
        for line in (
            ["estimate", "--task", "mine", *FEW, "-o", folder_of_workers / "t.kfac", *data],
            ["train", "--task", "mine", *FEW, *options, "-o", folder_of_workers / "t.safetensors", *data],
        ):
            result = CliRunner().invoke(app, list(map(str, line)), catch_exceptions=False)
            assert result.exit_code == 0, result.stderr
        contents[workers] = [
            (folder_of_workers / name).read_bytes() for name in ("t.kfac", "t.safetensors", "t.metrics.jsonl")
        ]
    assert contents[0] == contents[2]
    assert not multiprocessing.active_children()


def test_a_run_reads_images_in_the_requested_workers(folder, tmp_path, monkeypatch):
    process_file, read_example = tmp_path / "processes", LocalSplit.__getitem__

    def record_process(split, index):
        with process_file.open("a") as file:
            print(os.getpid(), file=file)
        return read_example(split, index)

    monkeypatch.setattr(LocalSplit, "__getitem__", record_process)
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        f"name: small\ntasks: [{{name: mine, data: {folder}}}, faces]\narms: {{without: {{penalty: none}}}}\n"
        "model: {name: tiny, head: prototypes}\n"
    )
    for workers in (0, 1):
        process_file.unlink(missing_ok=True)
        line = ["run", str(plan), "-o", str(tmp_path / "out"), "--dry-run", "--workers", str(workers)]
        result = CliRunner().invoke(app, line, catch_exceptions=False)
        assert result.exit_code == 0, result.stderr
        others = set(process_file.read_text().split()) - {str(os.getpid())}
        assert bool(others) == bool(workers)


def test_a_broken_image_gives_the_same_error(tiny, folder, tmp_path):
    target = tmp_path / "bad"
    for name in ("cat", "dog"):
        (target / "test" / name).mkdir(parents=True)
        Image.new("L", (8, 8)).save(target / "test" / name / "1.png")
    (target / "test" / "dog" / "2.png").write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    messages = []
    for workers in (0, 2):
        use_workers(workers)
        with refused(KfacpackError, "dog/2.png: the image cannot be read") as caught:
            list(batches(tiny, [(kp.load_task("bad", target).split("test"), "bad")], [(0, [0, 1]), (0, [2])]))
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    line = ["eval", "--task", "bad", "--data", str(target), "--workers", "2", "--batch-size", "1"]
    result = CliRunner().invoke(app, line)
    assert (result.exit_code, "Traceback" in result.stderr) == (2, False)


def test_a_worker_that_dies_is_reported(tiny, folder):
    class DyingSplit:
        def __len__(self):
            return 1

        def __getitem__(self, index):
            os.kill(os.getpid(), signal.SIGKILL)

    use_workers(1)
    with refused(KfacpackError, "worker process", "--workers 0"):
        list(batches(tiny, [(DyingSplit(), "any")], [(0, [0])]))


def test_workers_are_used_automatically_only_for_image_files(folder, monkeypatch):
    from kfacpack.models import data_loading as module

    monkeypatch.setattr(module.os, "sched_getaffinity", lambda pid: set(range(3)), raising=False)
    monkeypatch.setattr(module.sys, "platform", "linux")
    pictures, pixels = kp.load_task("mine", folder).split("train"), kp.load_task("digits").split("train")
    use_workers(None)
    assert module._num_workers([(pixels, "digits"), (pictures, "mine")]) == 2
    assert module._num_workers([(pixels, "digits")]) == 0
    assert module._num_workers([([{"text": "words"}], "texts")]) == 0
    with refused(KfacpackError, "workers -1"):
        use_workers(-1)
    with refused(KfacpackError, "workers 257", "256"):
        use_workers(257)


def test_ctrl_c_stops_after_the_step_and_leaves_no_process(folder, tmp_path):
    """Signals the whole process group, as a terminal does."""
    line = ["train", "--task", "mine", "--data", folder, *FEW, "--steps", 100000, "--lr", "1e-6", "--workers", 2]
    line += ["-o", tmp_path / "t.safetensors", "-q"]
    metrics = tmp_path / "t.metrics.jsonl"
    deadline = time.monotonic() + 300
    with Python("-m", "kfacpack_cli", *line, new_session=True) as process:
        while not (metrics.exists() and metrics.stat().st_size) and process.returncode is None:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        result = process.wait()
    assert result.returncode == 130, result.stderr
    assert result.stderr.count("stopping after this batch") == 1
    assert (tmp_path / "t.safetensors.partial").exists()
    with pytest.raises(ProcessLookupError):  # no process of the group is left
        os.killpg(process.pid, 0)
