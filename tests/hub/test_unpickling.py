"""Files that nobody vouches for: nothing in them is run, and none takes more than a file of its size should."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path

import pytest
import torch

import kfacpack as kp
from kfacpack.hub.importer import read_pickle


class Payload:
    """Writes a file when it is unpickled by anybody who lets it."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


def refusal(path, tmp_path):
    before = sorted(tmp_path.iterdir())
    with pytest.raises(kp.KfacpackError) as caught, read_pickle({"aaT": path}, tmp_path):
        pass
    assert sorted(tmp_path.iterdir()) == before
    return str(caught.value)


def test_tensors_come_out_as_they_went_in(tmp_path):
    numbers = torch.randn(4, 3)
    torch.save({"a.weight": numbers.T, "b": numbers.bfloat16()}, tmp_path / "x.pt")
    torch.save(torch.tensor([7]), tmp_path / "n.pt")
    with read_pickle({"x": tmp_path / "x.pt", "n": tmp_path / "n.pt"}, tmp_path) as found:
        assert torch.equal(found["x"]["a.weight"], numbers.T)
        assert torch.equal(found["x"]["b"], numbers.bfloat16())
        assert found["n"]["tensor"].item() == 7
        assert found["x"].origin == tmp_path / "x.pt"


def test_a_malicious_pickle_runs_nothing(tmp_path):
    target, path = tmp_path / "was-here", tmp_path / "evil.pt"
    torch.save({"a": torch.eye(2), "b": Payload(target)}, path)
    said = refusal(path, tmp_path)
    assert "Nothing of it was run" in said
    assert "evil.pt" in said
    assert not target.exists()
    torch.load(path, weights_only=False)
    assert target.exists(), "the payload would have worked"


def test_a_bare_pickle_is_not_even_opened(tmp_path):
    target, path = tmp_path / "was-here", tmp_path / "evil.pt"
    path.write_bytes(pickle.dumps(Payload(target)))
    assert "looks like a pickle" in refusal(path, tmp_path)
    assert not target.exists()


def test_a_compressed_archive_is_refused(tmp_path):
    path = tmp_path / "bomb.pt"
    torch.save({"a": torch.zeros(2**20)}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for each in plain.infolist():
            packed.writestr(each.filename, plain.read(each))
    assert path.stat().st_size < 2**16
    assert "is compressed" in refusal(path, tmp_path)


def test_only_tensors_by_name_are_taken(tmp_path):
    path = tmp_path / "x.pt"
    for content, words in (([torch.eye(2)], "a list"), ({"a": "b"}, "is a str")):
        torch.save(content, path)
        assert words in refusal(path, tmp_path)


def test_a_tensor_larger_than_its_storage_is_refused(tmp_path):
    path = tmp_path / "bomb.pt"
    torch.save({"a": torch.zeros(1).expand(2**20, 2**20)}, path)
    assert "more than is stored" in refusal(path, tmp_path)


def test_a_pickle_that_never_ends_is_stopped(tmp_path, monkeypatch):
    """Of nothing but small objects, all of them allowed: seconds of work in a file of a few megabytes."""
    from kfacpack.hub import importer

    path = tmp_path / "slow.pt"
    endless = b"\x80\x02]" + b"Na" * (7 * 2**20) + b"."
    torch.save({"a": torch.zeros(2)}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(path, "w") as made:
        for each in plain.infolist():
            made.writestr(each.filename, endless if each.filename.endswith("data.pkl") else plain.read(each))
    monkeypatch.setattr(importer, "SECONDS", 2)
    said = refusal(path, tmp_path)
    assert "stopped by signal" in said or "not read within" in said
