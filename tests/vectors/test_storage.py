"""Factored changes and remainders: arithmetic equals that of dense tensors, files are smaller, weights are restored."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import refused
from safetensors.torch import load_file
from torch import nn
from vectors.small_vectors import FUNCTION, forge

import kfacpack as kp
from kfacpack.format.vector_manifest import AboutVector, TaskEntry
from kfacpack.hub.repository import Artifact
from kfacpack.vectors.parameter_change import add_change, exact_difference
from kfacpack.vectors.storage import InMemoryVector


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 12), nn.Conv2d(3, 8, 3), nn.LayerNorm(5))


def about(model: nn.Module, names, task: str = "toy", regime: str = "full") -> AboutVector:
    base = kp.identify(model, list(names), family="test", name="network")
    return AboutVector(
        base=base, function=FUNCTION, regime=regime, tasks=(TaskEntry(source=kp.Source(task=task)),)
    )  # fmt: skip


def factored(task: str = "toy", seed: int = 1, rank: int = 2) -> kp.TaskVector:
    """A vector with factors for matrix and convolution, an unchanged bias and dense changes of the rest."""
    model, generator = network(), torch.Generator().manual_seed(seed)
    names = [name for name, _ in model.named_parameters()]

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    factors = {
        "0.weight": (random(12, rank), random(rank, 16)),
        "0.bias": (torch.zeros(12, 0), torch.zeros(0, 1)),
        "1.weight": (random(8, rank), random(rank, 27)),
    }
    tensors = {name: random(*model.state_dict()[name].shape) for name in names if name not in factors}
    return kp.TaskVector(tensors, about(model, names, task), factors=factors)


def dense(vector: kp.TaskVector) -> kp.TaskVector:
    return kp.TaskVector(dict(vector), vector.about)


def product(vector: kp.TaskVector, name: str) -> torch.Tensor:
    left, right = vector.factors(name)
    return (left.double() @ right.double()).reshape(vector[name].shape).float()


def test_saving_reports_every_tensor_and_the_end(tmp_path):
    calls = []
    factored().save(tmp_path / "t.safetensors", on_progress=lambda done, total: calls.append((done, total)))
    total = calls[0][1]
    assert total > 1
    assert calls == [(done, total) for done in range(total + 1)]


def test_factors_stand_for_their_product(tmp_path):
    tau = factored()
    assert [tau.rank(name) for name in tau] == [2, 0, 2, None, None, None]
    assert tau["1.weight"].shape == (8, 3, 3, 3)
    assert torch.equal(tau["0.bias"], torch.zeros(12))
    tau.save(tmp_path / "t.safetensors")
    read = kp.TaskVector.load(tmp_path / "t.safetensors")
    assert read.digest == tau.digest
    assert read.about == tau.about
    for name in tau:
        assert torch.equal(read[name], tau[name])
        assert read.rank(name) == tau.rank(name)
        if tau.rank(name) is not None:
            assert all(map(torch.equal, read.factors(name), tau.factors(name)))
            torch.testing.assert_close(product(read, name), tau[name])
    with pytest.raises(KeyError):
        read.factors("nothing")
    tensors = load_file(tmp_path / "t.safetensors")
    assert "0.weight" not in tensors
    assert "0.bias" not in tensors, "a change of zero has no bytes"
    assert tensors["kfacpack.factors.0.U"].shape == (12, 2)
    read.save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "t.safetensors").read_bytes()


def test_a_change_of_zero_keeps_the_weights_bit_for_bit():
    model, tau = network(), factored()
    with torch.no_grad():
        model[0].bias[:3] = -0.0
    names = list(tau)
    tau = kp.TaskVector({n: tau[n] for n in names if tau.rank(n) is None}, about(model, names), factors={
        n: tau.factors(n) for n in names if tau.rank(n) is not None})  # fmt: skip
    edited = tau.apply(model)
    assert torch.equal(edited[0].bias.view(torch.int32), model[0].bias.view(torch.int32))
    torch.testing.assert_close(edited[0].weight, model[0].weight + tau["0.weight"])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(-2, 2, width=32), st.integers(0, 3)), min_size=1, max_size=5))
def test_arithmetic_of_factored_vectors_equals_dense(terms):
    parts = [(c, factored(f"task {k}", seed=k, rank=rank)) for k, (c, rank) in enumerate(terms)]
    total = sum(c * part for c, part in parts)
    expected = sum(c * dense(part) for c, part in parts)
    rank = sum(rank for _, rank in terms)
    for name in total:
        torch.testing.assert_close(total[name], expected[name], atol=1e-5, rtol=1e-5)
    for name, m, n in (("0.weight", 12, 16), ("1.weight", 8, 27)):
        if len(terms) > 1:
            assert total.rank(name) == (rank if rank * (m + n) < m * n else None)
        if total.rank(name) is not None:
            torch.testing.assert_close(product(total, name), expected[name], atol=1e-5, rtol=1e-5)
            assert total.factors(name)[0].dtype is torch.float32
    assert total.rank("0.bias") == 0
    assert total.rank("1.bias") is None


def test_sums_stay_factored_in_the_file_while_that_is_smaller(tmp_path):
    vectors = [factored(f"task {k}", seed=k) for k in range(4)]
    path = tmp_path / "sum.safetensors"
    for count, is_factored in ((2, True), (3, True), (4, False)):
        total = sum(vectors[:count])
        total.save(path)
        tensors = load_file(path)
        assert ("kfacpack.factors.0.U" in tensors) is is_factored
        assert ("0.weight" in tensors) is not is_factored
        read = kp.TaskVector.load(path)
        assert read.digest == total.digest
        torch.testing.assert_close(read["0.weight"], sum(v["0.weight"] for v in vectors[:count]))


def test_dense_terms_make_a_sum_dense():
    one, two = factored("one", 1), factored("two", 2)
    total = one + dense(two)
    assert total.rank("0.weight") is None
    torch.testing.assert_close(total["0.weight"], one["0.weight"] + two["0.weight"])
    assert (3 * one).rank("0.weight") == 2


def test_merge_methods_read_factored_vectors(tmp_path):
    vectors = [factored("one", 1), factored("two", 2)]
    for method in ("ties", "tsv", "iso"):
        merged = kp.add(vectors, method)
        # Digests, and with them the drop masks of "dare", depend on the form; the tensors do not.
        expected = kp.add(map(dense, vectors), method)
        for name in merged:
            torch.testing.assert_close(merged[name], expected[name], atol=1e-5, rtol=1e-4)


def test_files_without_new_features_are_of_version_1_0(tmp_path):
    tau = factored()
    dense(tau).save(tmp_path / "t.safetensors")
    manifest = {}
    forge(tmp_path / "t.safetensors", lambda header, found: manifest.update(found))
    assert manifest["version"] == "1.0"
    assert not {"requires", "storage"} & set(manifest)
    tau.save(tmp_path / "t.safetensors")
    forge(tmp_path / "t.safetensors", lambda header, found: manifest.update(found))
    assert (manifest["version"], manifest["requires"]) == ("1.1", ["factors"])


def exact(base: nn.Module, tuned: nn.Module) -> kp.TaskVector:
    start, end = base.state_dict(), tuned.state_dict()
    changes = {name: exact_difference(start[name], end[name]) for name in start}
    remainders = {name: remainder for name, (_, remainder) in changes.items() if remainder}
    tensors = {name: change for name, (change, _) in changes.items()}
    return kp.TaskVector.from_storage(InMemoryVector(tensors, about(base, start), {}, None, remainders))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_remainders_bring_weights_back_bit_for_bit(tmp_path, dtype):
    base, tuned = network().to(dtype), network().to(dtype)
    with torch.no_grad():
        tuned[0].weight.copy_(base[0].weight * 1e-5)
        tuned[0].weight[3] = -0.0
        tuned[1].weight.add_(1e-3)
        tuned[1].bias.mul_(-1)
    tau = exact(base, tuned)
    assert tau.remainder("0.weight")
    assert tau.remainder("1.bias") is None
    tau.save(tmp_path / "t.safetensors")
    read = kp.TaskVector.load(tmp_path / "t.safetensors")
    assert read.digest == tau.digest
    integers = torch.int32 if dtype is torch.float32 else torch.int16
    for vector in (tau, read, 1.0 * read, kp.add([read])):
        edited = vector.apply(base).state_dict()
        for name, value in tuned.state_dict().items():
            assert torch.equal(edited[name].view(integers), value.view(integers)), name
        with vector.applied(base):
            assert torch.equal(base[0].weight, tuned[0].weight)
    assert (0.5 * read).remainder("0.weight") is None
    assert (read + exact(base, base)).remainder("0.weight") is None


def as_floats(bits: list[int], dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.tensor(bits, dtype=torch.int64)
    tensor = tensor.to(torch.int32).view(torch.float32) if dtype is torch.float32 else tensor.short().view(dtype)
    return torch.where(tensor.isfinite() & (tensor.abs() < 1e38), tensor, 0).to(dtype)


@settings(max_examples=300, deadline=None)
@given(st.data(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_any_two_weights_have_an_exact_difference(data, dtype):
    half = 2**31 if dtype is torch.float32 else 2**15
    numbers = st.lists(st.integers(-half, half - 1), min_size=8, max_size=8)
    base, tuned = (as_floats(data.draw(numbers), dtype) for _ in range(2))
    change, remainder = exact_difference(base, tuned)
    back = add_change(base, change, remainder)
    integers = torch.int32 if dtype is torch.float32 else torch.int16
    assert torch.equal(back.view(integers), tuned.view(integers))
    assert change.dtype is torch.float32


def test_differences_that_overflow_are_refused():
    with refused(kp.TaskVectorError, "overflow"):
        exact_difference(torch.tensor([-3e38]), torch.tensor([3e38]))


def save_every_form(path) -> None:
    """Writes a file with factors, a change of zero and a remainder."""
    tau = factored()
    tensors = {name: tau[name] for name in tau if tau.rank(name) is None}
    factors = {name: tau.factors(name) for name in tau if tau.rank(name) is not None}
    remainder = torch.tensor([1, 3, 4]), torch.tensor([1e-9, 2e-9, -1e-12], dtype=torch.float64)
    storage = InMemoryVector(tensors, tau.about, {}, factors, {"1.bias": remainder})
    kp.TaskVector.from_storage(storage).save(path)


@pytest.fixture
def path(tmp_path):
    save_every_form(tmp_path / "toy.safetensors")
    return tmp_path / "toy.safetensors"


def test_summaries_and_checks_know_the_storage(path):
    artifact = Artifact.of(path, path.name)
    assert dict(artifact.summary)["storage"] == (
        "2 parameters as factors of rank 2, 1 unchanged, 3 dense (1 with a remainder)"
    )
    checks = artifact.verify(path, lambda *_: None).checks
    assert [(check.name, check.failures) for check in checks] == [("sha256", ()), ("finite", ()), ("indices", ())]


@pytest.mark.parametrize(
    ("edit", "facts"),
    [
        (lambda m: m["storage"][0].update(rank=3), ("'kfacpack.factors.0.U'", "[12, 2]", "[12, 3]")),
        (lambda m: m["storage"][0].update(rank=13), ("manifest", "'0.weight'", "rank 13", "[12, 16]")),
        (lambda m: m["storage"][0].update(rank=-1), ("manifest: storage.0 '0.weight'.rank",)),
        (lambda m: m["storage"][0].update(rank=0), ("'kfacpack.factors.0.U'", "neither")),
        (lambda m: m["storage"][0].update(remainder=3), ("manifest: storage.0 '0.weight'", "exactly one of")),
        (lambda m: m["storage"][0].pop("rank"), ("manifest: storage.0 '0.weight'", "exactly one of")),
        (lambda m: m["storage"][1].update(rank=1), ("'kfacpack.factors.1.U'", "missing")),
        (lambda m: m["storage"].append(m["storage"][0]), ("manifest", "'0.weight' is listed twice")),
        (lambda m: m["storage"][0].update(name="x"), ("manifest", "'x'", "not a parameter")),
        (lambda m: m["storage"].pop(0), ("tensor '0.weight'", "missing")),
        (lambda m: m["storage"][3].update(remainder=2), ("'kfacpack.remainder.3.index'", "[3]", "[2]")),
        (lambda m: m["storage"][3].update(remainder=9), ("manifest", "'1.bias'", "9 entries", "at most 8")),
        (lambda m: m["storage"].pop(3), ("'kfacpack.remainder.3.value'", "neither")),
        (lambda m: m.update(requires=["factors"]), ("manifest", "'1.bias'", "'remainders'", "requires")),
        (lambda m: m.update(requires=["factors", "x"]), ("manifest: requires", "'x'", "Upgrade")),
    ],
)
def test_inconsistent_storage_is_rejected(path, edit, facts):
    forge(path, lambda header, manifest: edit(manifest))
    with refused(kp.BundleError, *facts) as caught:
        dict(kp.TaskVector.load(path))
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize(("index", "facts"), [((1, 3, 3), "element 2"), ((1, 2, 8), "8"), ((-1, 2, 3), "-1")])
def test_bad_indices_are_rejected(path, index, facts):
    tau = kp.TaskVector.load(path)
    tensors = {name: tau[name] for name in tau}
    remainder = torch.tensor(index), torch.ones(3, dtype=torch.float64)
    storage = InMemoryVector(tensors, tau.about, {}, None, {"1.bias": remainder})
    kp.TaskVector.from_storage(storage).save(path)
    checks = Artifact.of(path, path.name).verify(path, lambda *_: None).checks
    assert [failure.subject for failure in checks[2].failures] == ["tensor 'kfacpack.remainder.3.index'"]
    with refused(kp.BundleError, facts, where="tensor 'kfacpack.remainder.3.index'"):
        kp.TaskVector.load(path).apply(network())


def test_reserved_names_are_no_parameters():
    state = {"kfacpack.factors.0.U": torch.ones(2), "kfacpack.remainder.x": torch.ones(2)}
    for name in state:
        base = kp.identify({name: state[name]}, [name], family="test", name="network")
        with pytest.raises(ValueError, match="reserved"):
            about(network(), ["0.bias"]).model_validate({**dict(about(network(), ["0.bias"])), "base": base})


def test_wrong_factors_are_rejected():
    tau = factored()
    rest = {name: tau[name] for name in tau if name != "0.weight"}
    for wrong, *facts in (
        ((torch.ones(12, 2), torch.ones(3, 16)), "[12, r]", "[12, 2] and [3, 16]"),
        ((torch.ones(12, 2), torch.ones(2, 15)), "[r, 16]", "[2, 15]"),
        ((torch.ones(12), torch.ones(16)), "[12] and [16]"),
        ((torch.ones(12, 2).double(), torch.ones(2, 16)), "float32", "float64"),
    ):
        with refused(kp.TaskVectorError, "'0.weight'", *facts):
            kp.TaskVector(rest, tau.about, factors={"0.weight": wrong})
    with refused(kp.TaskVectorError, "'1.bias'", "both"):
        kp.TaskVector(dict(tau), tau.about, factors={"1.bias": (torch.zeros(8, 0), torch.zeros(0, 1))})
    with refused(kp.TaskVectorError, "'0.weight' is missing from both tensors"):
        kp.TaskVector(rest, tau.about)


def test_vectors_may_cover_different_parameters_of_one_model(tmp_path):
    model, tau = network(), factored()
    names = [name for name in tau if name not in ("0.bias", "1.bias")]
    fewer = kp.TaskVector({name: tau[name] for name in names}, about(model, names, "fewer"))
    for total in (tau + fewer, fewer + tau):
        assert total.parameters == tau.parameters
        assert total.about.base.sha256 == tau.about.base.sha256
        assert torch.equal(total["1.bias"], tau["1.bias"])
        torch.testing.assert_close(total["0.weight"], 2 * tau["0.weight"])
        total.apply(model)
    total.save(tmp_path / "sum.safetensors")
    assert kp.TaskVector.load(tmp_path / "sum.safetensors").digest == total.digest
    for method in ("ties", "iso", "dare"):
        merged = kp.add([fewer, tau], method)
        assert merged.parameters == tau.parameters
        dict(merged)


def test_another_model_is_not_taken_for_the_same_one():
    model, tau = network(), factored()
    only = kp.TaskVector({"0.bias": torch.ones(12)}, about(model, ["0.bias"]))
    rest = [name for name in tau if name != "0.bias"]
    disjoint = kp.TaskVector({name: tau[name] for name in rest}, about(model, rest))
    with refused(kp.TaskVectorError, "no parameter in common"):
        only + disjoint
    base = tau.about.base.model_copy(update={"name": "another"})
    other = kp.TaskVector({name: tau[name] for name in tau}, tau.about.model_copy(update={"base": base}))
    with refused(kp.TaskVectorError, "network and another", "only one of them has '0.weight'"):
        only + other
    linear = about(model, ["0.bias"], regime="linear"), about(model, tau, regime="linear")
    with refused(kp.TaskVectorError, "linearised", "cover different parameters"):
        kp.TaskVector({"0.bias": torch.ones(12)}, linear[0]) + kp.TaskVector(dict(tau), linear[1])
