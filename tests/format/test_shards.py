"""Bundles in several files are opened as one; incomplete and mixed ones are refused in one line."""

from __future__ import annotations

import errno
import json
import os
import shutil

import pytest
from kfacpack_cli.main import app
from kit import of_task, random_tau, refused, small_curvature
from typer.testing import CliRunner

import kfacpack as kp


@pytest.fixture
def index(tmp_path):
    """The index of a bundle in several files, beside the same bundle in one."""
    small_curvature("packed").save(tmp_path / "whole.kfac")
    small_curvature("packed").save(tmp_path / "parts.kfac.index.json", max_shard_size=200)
    return tmp_path / "parts.kfac.index.json"


def shards(folder):
    return sorted(folder.glob("*.kfac.shard"))


def edited(index, edit):
    content = json.loads(index.read_text())
    edit(content)
    index.write_text(json.dumps(content))


def test_several_files_are_one_bundle(index, tmp_path):
    whole, parts = kp.load(tmp_path / "whole.kfac"), kp.load(index)
    assert len(shards(tmp_path)) > 1
    assert parts.digest == whole.digest
    assert kp.verify(index).holds
    tau = random_tau(whole)
    assert float(parts.quadratic(tau)) == float(whole.quadratic(tau))
    assert parts.bundle.nbytes == sum(path.stat().st_size for path in shards(tmp_path))
    parts.save(tmp_path / "joined.kfac")
    assert (tmp_path / "joined.kfac").read_bytes() == (tmp_path / "whole.kfac").read_bytes()


def test_every_shard_is_a_bundle_of_some_blocks(index, tmp_path):
    parts = [kp.load(path) for path in shards(tmp_path)]
    assert all(kp.verify(path).holds for path in shards(tmp_path))
    assert sorted(block.name for part in parts for block in part.blocks) == sorted(
        block.name for block in kp.load(index).blocks
    )


def test_a_merge_of_sharded_bundles_names_the_digests_of_the_whole(tmp_path):
    for task in ("one", "two"):
        of_task(task, seed=len(task)).save(tmp_path / f"{task}.kfac")
        of_task(task, seed=len(task)).save(tmp_path / f"{task}.kfac.index.json", max_shard_size=200)
    plain = kp.merge([tmp_path / "one.kfac", tmp_path / "two.kfac"])
    sharded = kp.merge([tmp_path / "one.kfac.index.json", tmp_path / "two.kfac"])
    assert sharded.digest == plain.digest


def test_a_new_bundle_replaces_the_old_shards_last(index, tmp_path):
    old = kp.load(index)
    before = set(shards(tmp_path))
    small_curvature("packed", seed=1).save(index, max_shard_size="1GB")
    assert kp.verify(index).holds
    assert not before & set(shards(tmp_path))
    assert len(shards(tmp_path)) == 1
    assert kp.load(index).digest != old.digest
    old.quadratic(random_tau(old))  # its open files are still readable


def missing(index, folder):
    shards(folder)[0].unlink()


def truncated_index(index, folder):
    index.write_bytes(index.read_bytes()[:-40])


def truncated_shard(index, folder):
    shards(folder)[0].write_bytes(shards(folder)[0].read_bytes()[:-8])


def of_another(index, folder):
    other = folder / "other"
    other.mkdir()
    small_curvature("packed", seed=4).save(other / "parts.kfac.index.json", max_shard_size=200)
    shutil.copy(shards(other)[0], shards(folder)[0])


def without_a_shard(index, folder):
    edited(index, lambda content: content["shards"].pop())


def in_another_folder(index, folder):
    edited(index, lambda content: content["shards"][0].update(file="../" + content["shards"][0]["file"]))


def later_version(index, folder):
    edited(index, lambda content: content.update(version="2.0"))


def edited_header(index, folder):
    edited(index, lambda content: content.update(header=content["header"].replace("linear", "lineal", 1)))


@pytest.mark.parametrize(
    ("damage", "fact"),
    [
        (missing, "of-0000"),
        (truncated_index, "JSON"),
        (truncated_shard, "of-0000"),
        (of_another, "another bundle"),
        (without_a_shard, "none of the shards"),
        (in_another_folder, "shards"),
        (later_version, "2.0"),
        (edited_header, "seal"),
    ],
)
def test_incomplete_bundles_are_refused_in_one_line(index, tmp_path, damage, fact):
    damage(index, tmp_path)
    with refused(kp.BundleError, fact, path=index):
        kp.load(index)
    for command in ("inspect", "verify"):
        result = CliRunner().invoke(app, [command, str(index)], catch_exceptions=False)
        assert result.exit_code == 2
        assert str(index) in result.stderr.replace("\n", "")


def test_the_index_is_suggested_for_the_name_of_one_file(index, tmp_path):
    with refused(kp.BundleError, index.name, path=tmp_path / "parts.kfac"):
        kp.load(tmp_path / "parts.kfac")


def test_only_own_shards_are_removed_with_an_old_index(index, tmp_path):
    """An index from somebody else may name any file, also itself."""
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "parts.kfac.shard").write_text("mine")
    entry = {"bytes": 4, "sha256": "0" * 64}
    names = ("notes.txt", "parts.kfac.shard", "whole.kfac", index.name)
    obsolete = shards(tmp_path)
    edited(index, lambda content: content["shards"].extend({"file": name, **entry} for name in names))
    small_curvature("packed").save(index, max_shard_size="1GB")
    assert kp.verify(index).holds
    assert all((tmp_path / name).exists() for name in names)
    assert not any(path.exists() for path in obsolete if path.name != "parts.kfac.shard")


@pytest.mark.parametrize("size", ["10%", "0", "large", True])
def test_invalid_sizes_are_refused(tmp_path, size):
    with refused(kp.KfacpackError, repr(size)):
        small_curvature().save(tmp_path / "parts.kfac.index.json", max_shard_size=size)
    assert not list(tmp_path.iterdir())


def test_a_shard_of_an_input_is_never_overwritten(index, tmp_path):
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for command in (["compress", str(index), "int8"], ["merge", str(index)], ["export", str(index)]):
        result = CliRunner().invoke(app, [*command, "-o", str(shards(tmp_path)[0])], catch_exceptions=False)
        assert result.exit_code == 2
        assert shards(tmp_path)[0].name in result.stderr.replace("\n", "")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_full_disk_leaves_no_shards_without_an_index(index, tmp_path, monkeypatch):
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    copied, link_file = [], os.link

    def link(source, target, **descriptors):
        if not descriptors:
            raise OSError(errno.EPERM, "no hard links")
        link_file(source, target, **descriptors)

    def copy(source, target):
        copied.append(target)
        if len(copied) > 1:
            target.write_bytes(b"half of a sha")
            raise OSError(errno.ENOSPC, "No space left on device")
        target.write_bytes(source.read_bytes())

    monkeypatch.setattr(os, "link", link)
    monkeypatch.setattr(shutil, "copyfile", copy)
    for target in (index, tmp_path / "new.kfac.index.json"):
        copied.clear()
        with refused(kp.BundleError, "No space left", path=target):
            small_curvature("packed", seed=1).save(target, max_shard_size=200)
        assert len(copied) == 2
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("path", [None, 5, ""])
def test_what_is_no_path_is_refused(path):
    for load in (kp.load, kp.TaskVector.load):
        with refused(kp.KfacpackError, "an empty string" if path == "" else type(path).__name__):
            load(path)
