"""Merged vectors behave like other vectors: file, sums, invalid settings, memory use."""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections import Counter

import pytest
import torch
from kit import refused
from torch.utils._python_dispatch import TorchDispatchMode
from vectors.method_cases import drawn, every_method, vector_of
from vectors.small_vectors import head, network, vector

import kfacpack as kp
from kfacpack.vectors.methods import METHODS


@every_method
def test_the_file_records_the_method(method, settings, tmp_path):
    one, two = drawn(2)
    merged = kp.add([one, two], method, alpha=[1.0, 0.5], **settings)
    merged.save(tmp_path / "merged.safetensors")
    read = kp.TaskVector.load(tmp_path / "merged.safetensors")
    assert read.about == merged.about
    assert read.digest == merged.digest
    assert all(torch.equal(read[name], merged[name]) for name in merged)
    assert [(addend.sha256, addend.coefficient) for addend in read.about.addends] == [
        (one.digest, 1.0),
        (two.digest, 0.5),
    ]
    assert set(read.heads) == set(read.tasks) == {"task 0", "task 1"}
    if method == "sum":
        assert read.about.method is None
    else:
        assert read.about.method.name == method
        assert read.about.method.settings == METHODS[method](**settings).settings


def test_a_merged_vector_is_one_addend_of_a_sum(tmp_path):
    one, two, three = drawn(3)
    merged = kp.add([one, two], "ties")
    together = 2 * merged + three
    assert {addend.sha256: addend.coefficient for addend in together.about.addends} == {
        merged.digest: 2.0,
        three.digest: 1.0,
    }
    assert together.about.method is None
    negative = -merged
    assert negative.about.method == merged.about.method
    assert [addend.coefficient for addend in negative.about.addends] == [-1.0, -1.0]
    nested = kp.add([merged, three], "iso")
    assert [addend.sha256 for addend in nested.about.addends] == [merged.digest, three.digest]


@pytest.mark.parametrize(
    ("wrong", "facts"),
    [
        ({"method": "average"}, ("'average'", ", ".join(METHODS))),
        ({"method": "sum", "keep": 0.2}, ("'sum'", "'keep'", "no settings")),
        ({"method": "tsv", "keep": 0.2}, ("'tsv'", "'keep'", "settings are mean")),
        ({"method": "ties", "keep": 0}, ("ties: keep is 0", "(0, 1]")),
        ({"method": "ties", "keep": float("nan")}, ("ties: keep is nan",)),
        ({"method": "ties", "mean": 1}, ("ties: mean is 1", "true or false")),
        ({"method": "dare", "drop": 1.0}, ("dare: drop is 1.0", "[0, 1)")),
        ({"method": "dare", "seed": -1}, ("dare: seed is -1",)),
        ({"method": "iso-cts", "common": 1.5}, ("iso-cts: common is 1.5", "[0, 1]")),
        ({"alpha": float("inf")}, ("α is inf", "finite")),
        ({"alpha": [1.0]}, ("length 1", "of length 2")),
        ({"alpha": [1.0, True]}, ("α is True",)),
    ],
    ids=str,
)
def test_errors_name_invalid_settings(wrong, facts):
    with refused(kp.KfacpackError, *facts):
        kp.add(drawn(2), **wrong)


LAZY = [name for name in METHODS if name not in ("curvature", "regmean", "fisher", "actmat")]


@pytest.mark.parametrize("method", METHODS)
def test_vectors_that_do_not_belong_together_are_rejected(method, tmp_path):
    one = vector("one", 1)
    for other, *facts in (
        (vector("two", 2, base=1), "'one' and 'two'", "base models (network 0 and network 1)", "'0.weight'"),
        (vector("two", 2, regime="full"), "'one' and 'two'", "regimes: 'linear' and 'full'"),
        (vector("two", 2, width=4), "'one' and 'two'", "width 3", "width 4"),
        (kp.TaskVector(dict(vector("one", 2)), vector("one", 2).about, {"one": head(9)}), "heads for 'one'"),
    ):
        with refused(kp.TaskVectorError, *facts):
            kp.add([one, other], method)
    one.save(tmp_path / "one.safetensors")
    twice = [tmp_path / "one.safetensors", tmp_path / ".." / tmp_path.name / "one.safetensors"]
    with refused(kp.TaskVectorError, "one.safetensors are the same vector", "twice"):
        kp.add(twice, method)
    with refused(kp.TaskVectorError, "vector 1 and vector 2 are the same vector", "twice"):
        kp.add([one, one], method)
    for both in ([one + vector("two", 2), one], [one, one + vector("two", 2)]):
        with refused(kp.TaskVectorError, "vector 1 and vector 2 have an addend in common", "twice (tasks: one)"):
            kp.add(both, method)
    with refused(kp.KfacpackError, "at least one task vector"):
        kp.add([], method)
    with refused(kp.KfacpackError, "a list of task vectors", "got a single vector"):
        kp.add(one, method)


def test_a_merged_vector_can_be_applied():
    model = network()
    merged = kp.add([vector("one", 1), vector("two", 2)], "tsv", alpha=0.5)
    edited = merged.apply(model)
    torch.testing.assert_close(edited[0].weight, model[0].weight + merged["0.weight"])
    assert merged.regime == "linear"
    assert "one, two" in repr(merged)


class Alive(TorchDispatchMode):
    """Counts the bytes of tensors that are created inside of it and still alive."""

    def __init__(self):
        super().__init__()
        self.bytes = self.peak = 0
        self._known: Counter[int] = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        input_storages = {tensor.untyped_storage()._cdata for tensor in args if isinstance(tensor, torch.Tensor)}
        result = operation(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self._count(tensor, input_storages)
        return result

    def _count(self, tensor, input_storages):
        storage = tensor.untyped_storage()
        if storage._cdata in input_storages and storage._cdata not in self._known:
            return  # it existed before
        if storage._cdata not in self._known:
            self.bytes += storage.nbytes()
            self.peak = max(self.peak, self.bytes)
        self._known[storage._cdata] += 1
        weakref.finalize(tensor, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, storage, nbytes):
        self._known[storage] -= 1
        if not self._known[storage]:
            del self._known[storage]
            self.bytes -= nbytes


def peak(method: str, tasks: int, layers: int) -> int:
    """Peak number of bytes while all parameters are read, without the vectors themselves."""
    generator = torch.Generator().manual_seed(0)
    names = [f"layer {k}" for k in range(layers)]
    vectors = [
        vector_of(f"task {k}", {name: torch.randn(160, 120, generator=generator) for name in names})
        for k in range(tasks)
    ]
    merged = kp.add(vectors, method)
    with Alive() as alive:
        for name in merged:
            merged[name]
    return alive.peak


@pytest.mark.parametrize("method", LAZY)
def test_memory_is_one_layer_and_for_most_methods_of_one_vector(method):
    layer = 160 * 120 * 8
    few, many = peak(method, tasks=4, layers=2), peak(method, tasks=12, layers=2)
    assert peak(method, tasks=4, layers=6) == few
    if method in ("tsv", "iso-cts"):
        assert many < few + 12 * layer, "at most one layer of all vectors"
    else:
        assert many == few


_PEAKS = """
import resource, sys
import kfacpack as kp
output, *files = sys.argv[1:]
for count in (2, 2, len(files)):
    kp.add(files[:count]).save(output)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.parametrize("source", [3, None, {}])
def test_other_types_than_vectors_are_refused(source):
    with refused(kp.KfacpackError, "vector 2", type(source).__name__):
        kp.add([drawn(1)[0], source])


def test_files_are_not_held_in_memory(tmp_path):
    layer = 4 * 700 * 1000
    for k in range(8):
        tensors = {f"layer {n}": torch.full((700, 1000), float(k + n)) for n in range(4)}
        vector_of(f"task {k}", tensors).save(tmp_path / f"{k}.safetensors")
    files = [str(tmp_path / f"{k}.safetensors") for k in range(8)]
    line = [sys.executable, "-c", _PEAKS, str(tmp_path / "sum.safetensors"), *files]
    result = subprocess.run(line, capture_output=True, text=True, check=True)
    _, two, eight = map(int, result.stdout.split())
    assert eight < two + layer, f"8 vectors of 4 layers of {layer} bytes took {eight - two} bytes more than 2"
