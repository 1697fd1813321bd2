"""Bundles are written atomically, and any safetensors reader can open them."""

from __future__ import annotations

import os
import random
import signal
import stat
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE, Popen

import pytest
import torch
from kit import MATRIX_FORMS, refused, small_curvature
from safetensors import safe_open

import kfacpack as kp
from kfacpack.format import writer

KILLS = 50


_WRITE_FOREVER = """
import os, sys
from kit import small_curvature

versions = [small_curvature("packed", seed, out=400, inputs=500) for seed in (1, 2)]
for _ in sys.stdin:
    process = os.fork()
    while process == 0:
        for version in versions:
            version.save(sys.argv[1])
    print(process, flush=True)
    os.waitpid(process, 0)
"""
"""Starts a process for each line of its input that writes two versions of a file, a few megabytes, in turns."""


def test_a_writer_killed_at_any_moment_leaves_the_old_file_or_the_new_one(tmp_path):
    expected = set()
    for seed in (1, 2):
        small_curvature("packed", seed, out=400, inputs=500).save(tmp_path / "expected.kfac")
        expected.add((tmp_path / "expected.kfac").read_bytes())
    path = tmp_path / "out" / "t.kfac"
    path.parent.mkdir()
    start = time.perf_counter()
    small_curvature("packed", 1, out=400, inputs=500).save(path)
    one_write = time.perf_counter() - start

    chosen, seen = random.Random(0), set()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with Popen(
        [sys.executable, "-c", _WRITE_FOREVER, path], stdin=PIPE, stdout=PIPE, text=True, env=environment
    ) as parent:
        for _ in range(KILLS):
            parent.stdin.write("start\n")
            parent.stdin.flush()
            process = int(parent.stdout.readline())
            time.sleep(chosen.uniform(0, 4 * one_write))
            os.kill(process, signal.SIGKILL)
            content = path.read_bytes()
            assert content in expected
            seen.add(content)
        parent.stdin.close()
        assert parent.wait(60) == 0
    assert seen == expected, "no write was finished before its process was killed, so nothing was tested"
    leftovers = [file for file in path.parent.iterdir() if file != path]
    assert len(leftovers) < KILLS / 5, "a file is left only by a process that is killed between naming and renaming"
    assert all(file.read_bytes() in expected for file in leftovers)


def test_a_file_is_on_the_disk_before_it_replaces_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "t.kfac"
    path.write_bytes(b"old")
    synced = []

    def sync(descriptor):
        kind = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else os.fstat(descriptor).st_size
        synced.append((kind, path.read_bytes() == b"old"))

    monkeypatch.setattr(os, "fsync", sync)
    small_curvature().save(path)
    assert synced == [(path.stat().st_size, True), ("folder", False)]


def test_files_of_killed_writers_are_removed_by_later_ones(tmp_path, monkeypatch):
    small_curvature().save(tmp_path / "other.kfac")
    (tmp_path / "folder").mkdir()
    link, left = os.link, []

    def killed(source, name, **more):
        link(source, name, **more)
        left.append(name)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "link", killed)
        patched.setattr(writer.Path, "unlink", lambda *arguments, **more: None)
        with pytest.raises(KeyboardInterrupt):
            small_curvature().save(tmp_path / "t.kfac")
    names = {"other.kfac", "folder", *left}
    assert {file.name for file in tmp_path.iterdir()} == names
    small_curvature().save(tmp_path / "t.kfac")
    assert {file.name for file in tmp_path.iterdir()} == names | {"t.kfac"}, "it may belong to a slow writer"
    monkeypatch.setattr(writer, "ABANDONED_AFTER", -1)
    small_curvature().save(tmp_path / "t.kfac")
    assert {file.name for file in tmp_path.iterdir()} == {"other.kfac", "folder", "t.kfac"}


def test_concurrent_writers_all_finish(tmp_path):
    curvatures = [small_curvature("packed", seed) for seed in range(8)]
    expected = set()
    for curvature in curvatures:
        curvature.save(tmp_path / "alone.kfac")
        expected.add((tmp_path / "alone.kfac").read_bytes())
    path = tmp_path / "out" / "t.kfac"
    path.parent.mkdir()
    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(curvature.save, path) for curvature in curvatures * 20]:
            future.result()
    assert path.read_bytes() in expected
    assert list(path.parent.iterdir()) == [path]


def test_an_interrupted_write_leaves_nothing_behind(tmp_path, monkeypatch):
    small_curvature("packed", 1).save(tmp_path / "t.kfac")
    before = (tmp_path / "t.kfac").read_bytes()

    def interrupted(descriptor, data, position):
        raise KeyboardInterrupt

    monkeypatch.setattr(writer, "_write_at", interrupted)
    with pytest.raises(KeyboardInterrupt):
        small_curvature("packed", 2).save(tmp_path / "t.kfac")
    assert (tmp_path / "t.kfac").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["t.kfac"]


@pytest.mark.parametrize("nameless", [True, False], ids=["O_TMPFILE", "named"])
def test_writing_works_with_and_without_nameless_files(tmp_path, monkeypatch, nameless):
    if nameless and not hasattr(os, "O_TMPFILE"):
        pytest.skip("this system has no nameless files")
    if not nameless:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    small_curvature().save(tmp_path / "t.kfac")
    assert [p.name for p in tmp_path.iterdir()] == ["t.kfac"]
    assert kp.verify(tmp_path / "t.kfac").holds


def test_a_full_disk_is_reported_and_changes_nothing(tmp_path, monkeypatch):
    def full(descriptor, data, position):
        raise OSError(28, "No space left on device")

    (tmp_path / "t.kfac").write_text("the old file")
    monkeypatch.setattr(os, "pwrite", full)
    with refused(kp.BundleError, "could not be written", "No space left on device", path=tmp_path / "t.kfac"):
        small_curvature().save(tmp_path / "t.kfac")
    assert (tmp_path / "t.kfac").read_text() == "the old file"
    assert [p.name for p in tmp_path.iterdir()] == ["t.kfac"]


def test_short_writes_are_continued(tmp_path, monkeypatch):
    small_curvature().save(tmp_path / "whole.kfac")
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, position: pwrite(descriptor, data[:100], position))
    small_curvature().save(tmp_path / "parts.kfac")
    assert (tmp_path / "parts.kfac").read_bytes() == (tmp_path / "whole.kfac").read_bytes()


def test_unwritable_paths_are_reported(tmp_path):
    with refused(kp.BundleError, "No such file or directory", path=tmp_path / "nowhere" / "t.kfac"):
        small_curvature().save(tmp_path / "nowhere" / "t.kfac")
    with refused(kp.BundleError, "it is a directory", path=tmp_path):
        small_curvature().save(tmp_path)


def test_a_curvature_can_be_saved_over_the_file_it_is_read_from(tmp_path):
    small_curvature("dense").save(tmp_path / "t.kfac", pack=False)
    loaded = kp.load(tmp_path / "t.kfac")
    expected = [m.dense() for b in small_curvature("dense").blocks for _, m in b.structure.matrices()]
    loaded.save(tmp_path / "t.kfac")
    again = kp.load(tmp_path / "t.kfac")
    for source in (loaded, again):
        matrices = [m.dense() for b in source.blocks for _, m in b.structure.matrices()]
        assert all(torch.equal(a, b) for a, b in zip(matrices, expected, strict=True))
    assert {m.form for m in kp.Bundle(tmp_path / "t.kfac").manifest.matrices} == {"packed", "diagonal"}


def test_writing_to_a_link_replaces_its_target(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link.kfac").symlink_to(tmp_path / "real" / "t.kfac")
    small_curvature().save(tmp_path / "link.kfac")
    assert (tmp_path / "link.kfac").is_symlink()
    assert kp.verify(tmp_path / "real" / "t.kfac").holds


def test_special_files_are_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name, problem in (("pipe", "special file"), ("loop", "Symlink loop"), ("nul\0", "embedded null")):
        with refused(kp.BundleError, "could not be written", problem, path=tmp_path / name):
            small_curvature().save(tmp_path / name)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_long_file_names_are_supported(tmp_path):
    small_curvature().save(tmp_path / ("n" * 255))
    assert kp.verify(tmp_path / ("n" * 255)).holds


def test_permissions_of_an_existing_file_are_kept(tmp_path):
    small_curvature().save(tmp_path / "t.kfac")
    (tmp_path / "t.kfac").chmod(0o600)
    small_curvature().save(tmp_path / "t.kfac")
    assert stat.S_IMODE((tmp_path / "t.kfac").stat().st_mode) == 0o600


def test_permissions_follow_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        small_curvature().save(tmp_path / "t.kfac")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "t.kfac").stat().st_mode) == 0o640


@pytest.mark.parametrize("stored_as", MATRIX_FORMS)
def test_safetensors_itself_opens_every_bundle(tmp_path, stored_as):
    small_curvature(stored_as).save(tmp_path / "t.kfac")
    bundle = kp.Bundle(tmp_path / "t.kfac")
    with safe_open(tmp_path / "t.kfac", framework="pt") as file:
        assert set(file.keys()) == set(bundle.tensors)
        assert set(file.metadata()) == {"kfac", "kfac.sha256"}
        for name, spec in bundle.tensors.items():
            tensor = file.get_tensor(name)
            assert tuple(tensor.shape) == spec.shape
            assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == bytes(bundle.bytes_of(name))
            assert spec.start % tensor.element_size() == 0
