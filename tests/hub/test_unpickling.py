"""Untrusted pickles: no code is executed, and resources are limited."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from kit import refused

import kfacpack as kp
from kfacpack.hub.importer import read_pickle


class Payload:
    """Creates a file when it is unpickled without restrictions."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


def reading_fails(path, *facts):
    """Checks that reading raises an error that names the file and each fact, and that it leaves no files behind."""
    before = sorted(path.parent.iterdir())
    with refused(kp.KfacpackError, path, *facts), read_pickle({"aaT": path}, path.parent):
        pass
    assert sorted(path.parent.iterdir()) == before


def test_tensors_are_read_unchanged(tmp_path):
    numbers = torch.randn(4, 3)
    torch.save({"a.weight": numbers.T, "b": numbers.bfloat16()}, tmp_path / "x.pt")
    torch.save(torch.tensor([7]), tmp_path / "n.pt")
    with read_pickle({"x": tmp_path / "x.pt", "n": tmp_path / "n.pt"}, tmp_path) as tensors:
        assert torch.equal(tensors["x"]["a.weight"], numbers.T)
        assert torch.equal(tensors["x"]["b"], numbers.bfloat16())
        assert tensors["n"]["tensor"].item() == 7
        assert tensors["x"].origin == tmp_path / "x.pt"


def test_a_malicious_pickle_runs_nothing(tmp_path):
    target, path = tmp_path / "was-here", tmp_path / "evil.pt"
    torch.save({"a": torch.eye(2), "b": Payload(target)}, path)
    reading_fails(path, "Nothing was executed")
    assert not target.exists()
    torch.load(path, weights_only=False)
    assert target.exists(), "the payload would have worked"


def test_a_bare_pickle_is_not_opened(tmp_path):
    target, path = tmp_path / "was-here", tmp_path / "evil.pt"
    path.write_bytes(pickle.dumps(Payload(target)))
    reading_fails(path, "pickle")
    assert not target.exists()


def test_a_compressed_archive_is_refused(tmp_path):
    path = tmp_path / "bomb.pt"
    torch.save({"a": torch.zeros(2**20)}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for member in plain.infolist():
            packed.writestr(member.filename, plain.read(member))
    assert path.stat().st_size < 2**16
    reading_fails(path, "is compressed")


def test_only_named_tensors_are_accepted(tmp_path):
    path = tmp_path / "x.pt"
    for content, *facts in (([torch.eye(2)], "type list"), ({"a": "b"}, "'a' has type str")):
        torch.save(content, path)
        reading_fails(path, *facts)


def test_a_tensor_larger_than_its_storage_is_refused(tmp_path):
    path = tmp_path / "bomb.pt"
    torch.save({"a": torch.zeros(1).expand(2**20, 2**20)}, path)
    reading_fails(path, "'a'", "[1048576, 1048576]", "storage")


def test_a_pickle_that_takes_too_long_is_stopped(tmp_path, monkeypatch):
    """A file of a few megabytes with many small objects, all of them allowed, takes seconds to read."""
    from kfacpack.hub import importer

    path = tmp_path / "slow.pt"
    endless = b"\x80\x02]" + b"Na" * (7 * 2**20) + b"."
    torch.save({"a": torch.zeros(2)}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(path, "w") as archive:
        for member in plain.infolist():
            archive.writestr(member.filename, endless if member.filename.endswith("data.pkl") else plain.read(member))
    monkeypatch.setattr(importer, "TIMEOUT_SECONDS", 2)
    with (
        pytest.raises(kp.KfacpackError, match=r"stopped by signal|took longer than"),
        read_pickle({"a": path}, tmp_path),
    ):
        pass
