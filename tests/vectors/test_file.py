"""The file of a task vector: what is written is read, whole or not at all, and damage is named."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from kit import refused
from safetensors.torch import load_file, save_file
from vectors.small import FUNCTION, network, vector

import kfacpack as kp
from kfacpack.format.container import UNSEALED, VECTOR, seal
from kfacpack.vectors.tensor_file import read_vector_tensors


@pytest.fixture
def path(tmp_path):
    vector().save(tmp_path / "toy.safetensors")
    return tmp_path / "toy.safetensors"


def forge(path, edit):
    """The file after `edit(header, manifest)`, sealed again."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    manifest = json.loads(header["__metadata__"][VECTOR.manifest])
    edit(header, manifest)
    header["__metadata__"] = {VECTOR.seal: UNSEALED, VECTOR.manifest: json.dumps(manifest)}
    text = json.dumps(header).encode()
    blank = len(text).to_bytes(8, "little") + text
    path.write_bytes(blank.replace(UNSEALED.encode(), seal(blank).encode(), 1) + raw[8 + length :])


def complaint(path) -> str:
    with pytest.raises(kp.BundleError) as caught:
        loaded = kp.TaskVector.load(path)
        for name in loaded:
            loaded[name]
    assert str(caught.value).startswith(str(path))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    return str(caught.value)


def test_what_is_written_is_read(path):
    written, read = vector(), kp.TaskVector.load(path)
    assert read.about == written.about
    assert read.digest == written.digest
    assert read.parameters == written.parameters
    assert all(torch.equal(read[name], written[name]) for name in written)
    assert read.heads["toy"].difference(written.heads["toy"]) is None
    assert read.about.function == FUNCTION
    assert read.about.tasks[0].training.settings == {"lr": 3e-4, "steps": 10, "regime": "linear"}


def test_the_same_vector_gives_the_same_bytes(path, tmp_path):
    kp.TaskVector.load(path).save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


def test_any_reader_of_safetensors_finds_the_models_own_names(path):
    found = load_file(path)
    assert set(found) == {*vector(), "kfacpack.head.0.weight", "kfacpack.head.0.bias"}
    assert all(tensor.dtype is torch.float32 for tensor in found.values())


def test_a_file_may_be_saved_over_itself(path):
    tau = kp.TaskVector.load(path)
    (2 * tau).save(path)
    torch.testing.assert_close(kp.TaskVector.load(path)["0.weight"], 2 * vector()["0.weight"])


def test_a_number_that_is_none_is_not_written(path):
    before = path.read_bytes()
    one = vector()
    tensors = dict(one)
    tensors["1.bias"] = torch.full((5,), float("nan"))
    with refused(kp.BundleError, "1.bias"):
        kp.TaskVector(tensors, one.about).save(path)
    assert path.read_bytes() == before
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_truncated_and_damaged_files_are_named(path):
    raw = path.read_bytes()
    for length in (0, 5, 100, len(raw) - 1):
        path.write_bytes(raw[:length])
        assert "fetch it again" in complaint(path)
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with refused(kp.CorruptTensor, "SHA-256"):
        loaded = kp.TaskVector.load(path)
        _ = dict(loaded), loaded.heads
    path.write_bytes(raw.replace(b'"seed', b'"sead', 1).replace(b"linear", b"lineal", 1))
    assert "header: its bytes do not give the SHA-256" in complaint(path)


def test_other_files_are_no_task_vectors(path, tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "weights.safetensors")
    assert "is a safetensors file, but no task vector" in complaint(tmp_path / "weights.safetensors")
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    assert "torch.save" in complaint(tmp_path / "a.pt")
    assert "No such file" in complaint(tmp_path / "nothing.safetensors")


def test_manifests_that_lie_are_refused(path):
    raw = path.read_bytes()
    lies = {
        "manifest: version: is format version '2.0'": lambda h, m: m.update(version="2.0"),
        "manifest: regime": lambda h, m: m.update(regime="sideways"),
        "manifest: base: sha256 is": lambda h, m: m["base"].update(sha256="0" * 63 + "1"),
        "manifest: tasks.0.source": lambda h, m: m["tasks"][0].pop("source"),
        "tensor 'kfacpack.head.0.weight': is F32 of shape": lambda h, m: m["tasks"][0]["head"]["classes"].append("x"),
        "tensor 'kfacpack.head.0.weight': is neither": lambda h, m: m["tasks"][0].pop("head"),
        "tensor '0.weight': is not there": lambda h, m: m.update(tensors=m["tensors"][1:]),
        "it was made by 'ties', but no vectors are listed": lambda h, m: m.update(method={"name": "ties"}),
        "manifest: method.name": lambda h, m: m.update(method={"settings": {}}),
        "the task 'toy' is there twice": lambda h, m: m["tasks"].append(m["tasks"][0]),
    }
    for words, lie in lies.items():
        path.write_bytes(raw)
        forge(path, lie)
        assert words in complaint(path), words


def test_what_a_later_version_adds_is_ignored(path):
    forge(path, lambda header, manifest: manifest.update(version="1.7", mood="good"))
    assert kp.TaskVector.load(path).tasks == ("toy",)


def test_compression_measures_on_it_and_knows_its_model(path):
    curvature = kp.estimate(network(), [torch.randn(6, 4)])
    read = read_vector_tensors(path, curvature)
    assert torch.equal(read("0.weight"), vector()["0.weight"])
    other = kp.estimate(network(1), [torch.randn(6, 4)])
    with refused(kp.BundleError, "0.weight"):
        read_vector_tensors(path, other)
