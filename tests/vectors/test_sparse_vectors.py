"""Sparse changes: arithmetic equals that of dense tensors, files are smaller, and damaged bitmaps are refused."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from kit import refused
from safetensors.numpy import load_file
from vectors.test_storage import about, dense, factored, network

import kfacpack as kp

GOLDEN = Path(__file__).parents[2] / "spec" / "golden" / "sparse.safetensors"


def sparse(task="toy", seed=1, share=0.1):
    """A vector with a sparse matrix and convolution, an unchanged bias and dense changes of the rest."""
    model, generator = network(), torch.Generator().manual_seed(seed)
    names = [name for name, _ in model.named_parameters()]
    tensors = {name: torch.randn(model.state_dict()[name].shape, generator=generator) for name in names}
    masks = {name: torch.rand(tensors[name].shape, generator=generator) < share for name in ("0.weight", "1.weight")}
    masks["0.bias"] = torch.zeros(12, dtype=torch.bool)
    tensors |= {name: tensors[name] * mask for name, mask in masks.items()}
    return kp.TaskVector(tensors, about(model, names, task, "sparse"), masks=masks)


def test_a_file_has_the_elements_of_the_mask_only(tmp_path):
    tau = sparse()
    tau.save(tmp_path / "t.safetensors")
    dense(tau).save(tmp_path / "dense.safetensors")
    read = kp.TaskVector.load(tmp_path / "t.safetensors")
    assert read.digest == tau.digest
    assert all(torch.equal(read[name], tau[name]) for name in tau)
    tensors = load_file(tmp_path / "t.safetensors")
    assert "0.weight" not in tensors
    assert "0.bias" not in tensors, "a mask without elements has no bytes"
    bits = np.unpackbits(tensors["kfacpack.sparse.0.mask"], bitorder="little")
    values = np.zeros(12 * 16, dtype=np.float32)
    values[np.flatnonzero(bits)] = tensors["kfacpack.sparse.0.value"]
    assert np.array_equal(values.reshape(12, 16), tau["0.weight"].numpy())
    stored = sum(tensors[f"kfacpack.sparse.0.{part}"].nbytes for part in ("mask", "value"))
    assert stored == 24 + 4 * int(bits.sum()) < 4 * 12 * 16


def test_arithmetic_equals_that_of_dense_vectors(tmp_path):
    parts = [(coefficient, sparse(f"task {k}", k)) for k, coefficient in enumerate((1.0, -0.5, 2.0))]
    total, expected = sum(c * part for c, part in parts), sum(c * dense(part) for c, part in parts)
    for name in total:
        torch.testing.assert_close(total[name], expected[name])
    index, value = total.sparse("0.weight")
    torch.testing.assert_close(total["0.weight"].flatten()[index], value)
    total.save(tmp_path / "sum.safetensors")
    read = kp.TaskVector.load(tmp_path / "sum.safetensors")
    assert read.digest == total.digest
    assert all(torch.equal(read[name], total[name]) for name in total)
    negated = -parts[0][1]
    assert torch.equal(negated["1.weight"], -parts[0][1]["1.weight"])
    assert len(negated.sparse("1.weight")[0]) == len(parts[0][1].sparse("1.weight")[0])
    edited, model = total.apply(network()), network()
    torch.testing.assert_close(edited[0].weight, model[0].weight + expected["0.weight"])


def test_sums_become_dense_when_that_is_smaller(tmp_path):
    one, many = sparse("one", 1, 0.6), [sparse(f"task {k}", k, 0.6) for k in range(8)]
    assert one.sparse("0.weight") is not None
    assert sum(many).sparse("0.weight") is None
    assert sparse("full", 1, 1.1).sparse("0.weight") is None
    kp.TaskVector.load(_saved(sum(many), tmp_path / "sum.safetensors"))
    assert "0.weight" in load_file(tmp_path / "sum.safetensors")


def _saved(vector, path):
    vector.save(path)
    return path


@pytest.mark.parametrize("method", ["ties", "tsv", "iso", "actmat"])
def test_merge_methods_accept_sparse_vectors(method):
    vectors = [sparse(f"task {k}", k) for k in range(2)]
    merged, expected = (kp.add(list(some), method=method) for some in (vectors, map(dense, vectors)))
    for name in merged:
        torch.testing.assert_close(merged[name], expected[name])


def test_masks_that_do_not_fit_are_refused():
    tau = sparse()
    tensors = {name: tau[name] for name in tau}
    for mask, words in (
        (torch.ones(12, 15, dtype=torch.bool), "0.weight"),
        (torch.ones(12, 16), "torch.float32"),
        (torch.zeros(12, 16, dtype=torch.bool), "outside"),
    ):
        with refused(kp.TaskVectorError, words):
            kp.TaskVector(tensors, tau.about, masks={"0.weight": mask})
    with refused(kp.TaskVectorError, "nothing"):
        kp.TaskVector(tensors, tau.about, masks={"nothing": torch.ones(1, dtype=torch.bool)})


@pytest.mark.parametrize("damage", ["too many bits", "missing"])
def test_a_bitmap_that_does_not_match_its_values_is_refused(damage, tmp_path):
    path = _saved(sparse(), tmp_path / "t.safetensors")
    _forge_bitmap(path, damage)
    vector = kp.TaskVector.load(path)
    with refused(kp.BundleError, "kfacpack.sparse.0.mask", "bits"):
        vector["0.weight"]


def _forge_bitmap(path, damage):
    """Changes the first bitmap of a file, with correct digests."""
    from vectors.small_vectors import forge

    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    begin, end = json.loads(raw[8:start])["kfacpack.sparse.0.mask"]["data_offsets"]
    bitmap = (b"\xff" if damage == "too many bits" else b"\0") * (end - begin)
    path.write_bytes(raw[: start + begin] + bitmap + raw[start + end :])

    def edit(header, manifest):
        entry = next(entry for entry in manifest["tensors"] if entry["name"] == "kfacpack.sparse.0.mask")
        entry["sha256"] = sha256(bitmap).hexdigest()

    forge(path, edit)


def test_the_golden_file_is_read_by_the_library_and_with_numpy():
    vector, tensors = kp.TaskVector.load(GOLDEN), load_file(GOLDEN)
    assert vector.digest == "e72cca6753108e3e13a3f8e9f055dd39f08f6ae010ed1cd057ae5ad96e8c4c1c"
    bits = np.unpackbits(tensors["kfacpack.sparse.2.mask"], bitorder="little")[: 8 * 27]
    change = np.zeros(8 * 27, dtype=np.float32)
    change[bits.astype(bool)] = tensors["kfacpack.sparse.2.value"]
    assert np.array_equal(change.reshape(8, 3, 3, 3), vector["1.weight"].numpy())


def test_factored_and_sparse_terms_add_up_to_dense_ones():
    model = network()
    lora = factored()
    one = kp.TaskVector({n: lora[n] for n in lora}, about(model, list(lora), "lora", "sparse"))
    total = sparse() + one
    assert total.sparse("0.weight") is None
    torch.testing.assert_close(total["0.weight"], sparse()["0.weight"] + lora["0.weight"])
