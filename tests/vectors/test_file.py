"""Task vector files: round trips, atomic writes, and errors that name the damage."""

from __future__ import annotations

import pickle

import pytest
import torch
from kit import refused
from safetensors.torch import load_file, save_file
from vectors.small_vectors import FUNCTION, forge, network, vector

import kfacpack as kp
from kfacpack.format.container import VECTOR
from kfacpack.vectors.storage import read_vector_tensors


@pytest.fixture
def path(tmp_path):
    vector().save(tmp_path / "toy.safetensors")
    return tmp_path / "toy.safetensors"


def loading_fails(path, *facts) -> None:
    """Checks that loading raises an error that names the file and mentions each fact."""
    with refused(kp.BundleError, *facts) as caught:
        loaded = kp.TaskVector.load(path)
        for name in loaded:
            loaded[name]
    assert str(caught.value).startswith(str(path))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_round_trip(path):
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


def test_the_safetensors_library_reads_the_models_own_names(path):
    tensors = load_file(path)
    assert set(tensors) == {*vector(), "kfacpack.head.0.weight", "kfacpack.head.0.bias"}
    assert all(tensor.dtype is torch.float32 for tensor in tensors.values())


def test_a_file_may_be_saved_over_itself(path):
    tau = kp.TaskVector.load(path)
    (2 * tau).save(path)
    torch.testing.assert_close(kp.TaskVector.load(path)["0.weight"], 2 * vector()["0.weight"])


def test_nan_is_not_written(path):
    before = path.read_bytes()
    one = vector()
    tensors = dict(one)
    tensors["1.bias"] = torch.full((5,), float("nan"))
    with refused(kp.BundleError, "NaN", "Nothing was written", where="tensor '1.bias'"):
        kp.TaskVector(tensors, one.about).save(path)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_errors_name_truncated_and_damaged_files(path):
    raw = path.read_bytes()
    for length in (0, 5, 100, len(raw) - 1):
        path.write_bytes(raw[:length])
        loading_fails(path, "download it again")
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with refused(kp.CorruptTensor, "SHA-256"):
        loaded = kp.TaskVector.load(path)
        _ = dict(loaded), loaded.heads
    path.write_bytes(raw.replace(b'"seed', b'"sead', 1).replace(b"linear", b"lineal", 1))
    loading_fails(path, "header", "SHA-256")


def test_other_files_are_rejected(path, tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "weights.safetensors")
    loading_fails(tmp_path / "weights.safetensors", "safetensors", "task vector", VECTOR.manifest)
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    loading_fails(tmp_path / "a.pt", "torch.save")
    loading_fails(tmp_path / "nothing.safetensors", "No such file")


@pytest.mark.parametrize(
    ("edit", "facts"),
    [
        (lambda m: m.update(version="2.0"), ("manifest: version", "'2.0'")),
        (lambda m: m.update(regime="sideways"), ("manifest: regime", "'linear', 'full'")),
        (lambda m: m["base"].update(sha256="0" * 63 + "1"), ("manifest: base", "sha256")),
        (lambda m: m["tasks"][0].pop("source"), ("manifest: tasks.0.source",)),
        (lambda m: m["tasks"][0]["head"]["classes"].append("x"), ("'kfacpack.head.0.weight'", "[2, 3]", "[3, 3]")),
        (lambda m: m["tasks"][0].pop("head"), ("'kfacpack.head.0.weight'", "neither")),
        (lambda m: m.update(tensors=m["tensors"][1:]), ("tensor '0.weight'", "missing")),
        (lambda m: m.update(method={"name": "ties"}), ("manifest", "'ties'", "addends")),
        (lambda m: m.update(method={"settings": {}}), ("manifest: method.name",)),
        (lambda m: m["tasks"].append(m["tasks"][0]), ("manifest", "'toy' is listed twice")),
    ],
)
def test_inconsistent_manifests_are_rejected(path, edit, facts):
    forge(path, lambda header, manifest: edit(manifest))
    loading_fails(path, *facts)


def test_fields_of_later_versions_are_ignored(path):
    forge(path, lambda header, manifest: manifest.update(version="1.7", mood="good"))
    assert kp.TaskVector.load(path).tasks == ("toy",)


def test_compression_can_measure_on_a_vector_of_the_same_model(path):
    curvature = kp.estimate(network(), [torch.randn(6, 4)])
    read = read_vector_tensors(path, curvature)
    assert torch.equal(read("0.weight"), vector()["0.weight"])
    other = kp.estimate(network(1), [torch.randn(6, 4)])
    with refused(kp.BundleError, "another base model", where="tensor '0.weight'"):
        read_vector_tensors(path, other)


def test_save_pretrained_and_from_pretrained(tmp_path):
    tau = vector()
    assert tau.save_pretrained(tmp_path / "new") == tmp_path / "new" / "vector.safetensors"
    assert kp.TaskVector.from_pretrained(tmp_path / "new").digest == tau.digest
    (2 * tau).save_pretrained(tmp_path / "new", filename="double.safetensors")
    double = kp.TaskVector.from_pretrained(tmp_path / "new", filename="double.safetensors")
    assert torch.equal(double["0.weight"], 2 * tau["0.weight"])
    with refused(kp.KfacpackError, "vector.safetensors"):
        tau.save_pretrained(tmp_path / "new" / "vector.safetensors")
