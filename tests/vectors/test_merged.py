"""What a method made is a vector like others: its file, its part in sums, what is refused, what it takes of memory."""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections import Counter

import pytest
import torch
from kit import refused
from torch.utils._python_dispatch import TorchDispatchMode
from vectors.methods import drawn, every_method, made
from vectors.small import head, network, vector

import kfacpack as kp
from kfacpack.vectors.methods import METHODS


@every_method
def test_its_file_says_how_it_was_made(method, settings, tmp_path):
    one, two = drawn(2)
    merged = kp.add([one, two], method, [1.0, 0.5], **settings)
    merged.save(tmp_path / "merged.safetensors")
    read = kp.TaskVector.load(tmp_path / "merged.safetensors")
    assert read.about == merged.about
    assert read.digest == merged.digest
    assert all(torch.equal(read[name], merged[name]) for name in merged)
    assert [(each.sha256, each.coefficient) for each in read.about.addends] == [(one.digest, 1.0), (two.digest, 0.5)]
    assert set(read.heads) == set(read.tasks) == {"task 0", "task 1"}
    if method == "sum":
        assert read.about.method is None
    else:
        assert read.about.method.name == method
        assert read.about.method.settings == METHODS[method](**settings).settings


def test_what_a_method_made_counts_as_one_in_a_sum(tmp_path):
    one, two, three = drawn(3)
    merged = kp.add([one, two], "ties")
    together = 2 * merged + three
    assert {each.sha256: each.coefficient for each in together.about.addends} == {merged.digest: 2.0, three.digest: 1.0}
    assert together.about.method is None
    negative = -merged
    assert negative.about.method == merged.about.method
    assert [each.coefficient for each in negative.about.addends] == [-1.0, -1.0]
    nested = kp.add([merged, three], "iso")
    assert [each.sha256 for each in nested.about.addends] == [merged.digest, three.digest]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"method": "average"}, "no method 'average'; there are sum, ties, dare, tsv, iso, iso-cts"),
        ({"method": "sum", "keep": 0.2}, "'sum' has no setting 'keep'; it has none"),
        ({"method": "tsv", "keep": 0.2}, "'tsv' has no setting 'keep'; it has mean"),
        ({"method": "ties", "keep": 0}, "keep is 0, expected a number above 0 to 1"),
        ({"method": "ties", "keep": float("nan")}, "keep is nan"),
        ({"method": "ties", "mean": 1}, "mean is 1, expected true or false"),
        ({"method": "dare", "drop": 1.0}, "drop is 1.0, expected a number from 0 and below 1"),
        ({"method": "dare", "seed": -1}, "seed is -1"),
        ({"method": "iso-cts", "common": 1.5}, "common is 1.5, expected a number from 0 to 1"),
        ({"alpha": float("inf")}, "α is inf, expected a finite number"),
        ({"alpha": [1.0]}, "found 1 α for 2 vectors"),
        ({"alpha": [1.0, True]}, "α is True"),
    ],
    ids=str,
)
def test_wrong_settings_are_named(wrong, words):
    with pytest.raises(kp.KfacpackError) as caught:
        kp.add(drawn(2), **wrong)
    assert words in str(caught.value)


@pytest.mark.parametrize("method", METHODS)
def test_vectors_that_do_not_belong_together_are_refused(method, tmp_path):
    one = vector("one", 1)
    for other, words in (
        (vector("two", 2, base=1), r"different base models \(network 0 and network 1\): '0.weight' is not the same"),
        (vector("two", 2, regime="full"), "different regimes: 'linear' and 'full'"),
        (vector("two", 2, width=4), "different f"),
        (kp.TaskVector(dict(vector("one", 2)), vector("one", 2).about, {"one": head(9)}), "both have a head for 'one'"),
    ):
        with pytest.raises(kp.TaskVectorError, match=words):
            kp.add([one, other], method)
    one.save(tmp_path / "one.safetensors")
    twice = [tmp_path / "one.safetensors", tmp_path / ".." / tmp_path.name / "one.safetensors"]
    with refused(kp.TaskVectorError):
        kp.add(twice, method)
    with refused(kp.TaskVectorError, "1", "2"):
        kp.add([one, one], method)
    for both in ([one + vector("two", 2), one], [one, one + vector("two", 2)]):
        with refused(kp.TaskVectorError, "1", "2"):
            kp.add(both, method)
    with refused(kp.KfacpackError):
        kp.add([], method)
    with refused(kp.KfacpackError):
        kp.add(one, method)


def test_it_is_a_vector_like_others():
    model = network()
    merged = kp.add([vector("one", 1), vector("two", 2)], "tsv", 0.5)
    edited = merged.apply(model)
    torch.testing.assert_close(edited[0].weight, model[0].weight + merged["0.weight"])
    assert merged.regime == "linear"
    assert "one, two" in repr(merged)


class Alive(TorchDispatchMode):
    """Counts the bytes of tensors that are made while it lasts, as long as they live."""

    def __init__(self):
        super().__init__()
        self.bytes = self.peak = 0
        self._known: Counter[int] = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        given = {each.untyped_storage()._cdata for each in args if isinstance(each, torch.Tensor)}
        made = operation(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else [made]:
            if isinstance(each, torch.Tensor):
                self._count(each, given)
        return made

    def _count(self, tensor, given):
        storage = tensor.untyped_storage()
        if storage._cdata in given and storage._cdata not in self._known:
            return  # it was there before
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
    """How many bytes are held at once while all parameters are read, the vectors themselves not counted."""
    generator = torch.Generator().manual_seed(0)
    names = [f"layer {k}" for k in range(layers)]
    vectors = [
        made(f"task {k}", {name: torch.randn(160, 120, generator=generator) for name in names}) for k in range(tasks)
    ]
    merged = kp.add(vectors, method)
    with Alive() as alive:
        for name in merged:
            merged[name]
    return alive.peak


@pytest.mark.parametrize("method", METHODS)
def test_one_layer_at_a_time_and_of_most_methods_one_vector(method):
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


def test_files_are_not_held_in_memory(tmp_path):
    layer = 4 * 700 * 1000
    for k in range(8):
        tensors = {f"layer {n}": torch.full((700, 1000), float(k + n)) for n in range(4)}
        made(f"task {k}", tensors).save(tmp_path / f"{k}.safetensors")
    files = [str(tmp_path / f"{k}.safetensors") for k in range(8)]
    line = [sys.executable, "-c", _PEAKS, str(tmp_path / "sum.safetensors"), *files]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    _, two, eight = map(int, done.stdout.split())
    assert eight < two + layer, f"8 vectors of 4 layers of {layer} bytes took {eight - two} bytes more than 2"
