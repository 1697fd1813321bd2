"""Every codec and chain: the result multiplies as its dense matrix, is smaller, and is PSD if it is declared so."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit import MATRIX_FORMS, random_psd, random_tau, refused, small_curvature

import kfacpack as kp
from kfacpack.compression.codecs import CodecChain
from kfacpack.curvature.matrices.dense import Packed
from kfacpack.curvature.matrices.matrix import negative_eigenvalue_bound
from kfacpack.curvature.matrices.structured import Diagonal, LowRank, Sparse

STRUCTURES = ["block:3", "svd:2", "svd:30%", "prune:20%"]
NUMBERS = ["int8", "fp16", "bf16"]
CHAINS = [*STRUCTURES, *NUMBERS, *(f"{first}+{second}" for first in STRUCTURES for second in NUMBERS)]

sides = st.integers(1, 40)
seeds = st.integers(0, 2**16)


def low_rank(side: int, seed: int) -> torch.Tensor:
    """A matrix estimated from few examples: a decaying spectrum with zero eigenvalues."""
    a = torch.randn(max(1, side // 3), side, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    full = a.T @ a / len(a)
    return ((full + full.T) / 2).float()


@pytest.mark.parametrize("spec", CHAINS)
@given(side=sides, columns=st.integers(1, 5), seed=seeds)
def test_matmul_of_a_compressed_matrix_is_the_dense_product(spec, side, columns, seed):
    _, encoded = CodecChain.parse(spec).encode(Packed.from_dense(random_psd(side, seed)))
    x = torch.randn(columns, side, generator=torch.Generator().manual_seed(seed)).T
    expected = encoded.dense(torch.float64) @ x.double()
    torch.testing.assert_close(encoded.matmul(x).double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("spec", CHAINS)
@given(side=sides, seed=seeds)
def test_a_matrix_becomes_smaller_or_stays_the_same_object(spec, side, seed):
    source = Packed.from_dense(random_psd(side, seed))
    applied, encoded = CodecChain.parse(spec).encode(source)
    assert encoded.nbytes < source.nbytes if applied.steps else encoded is source
    assert encoded.side == side


@pytest.mark.parametrize("make", [random_psd, low_rank])
@pytest.mark.parametrize("spec", CHAINS)
@given(side=sides, seed=seeds)
def test_matrices_declared_psd_are_psd(spec, make, side, seed):
    source = Packed.from_dense(make(side, seed))
    applied, encoded = CodecChain.parse(spec).encode(source)
    names = {step.name for step in applied.steps}
    keeps = "prune" not in names and ("int8" not in names or "svd" in names)
    assert encoded.psd is keeps
    if encoded.psd:
        assert negative_eigenvalue_bound(encoded) is None


def test_codecs_do_not_declare_other_matrices_psd():
    source = Packed.from_dense(random_psd(9, 0) - 0.8 * torch.eye(9), psd=False)
    for spec in ("block:3", "svd:3", "fp16", "svd:3+int8"):
        assert not CodecChain.parse(spec).encode(source)[1].psd


@pytest.mark.parametrize("spec", CHAINS)
@pytest.mark.parametrize("stored_as", MATRIX_FORMS)
def test_every_form_can_be_compressed_again(stored_as, spec):
    source = MATRIX_FORMS[stored_as](random_psd(24, 1))
    source.examples, source.positions = 7, 21
    _, encoded = CodecChain.parse(spec).encode(source)
    assert encoded.nbytes <= source.nbytes
    assert (encoded.examples, encoded.positions) == (7, 21)
    assert encoded.dense().isfinite().all()


@pytest.mark.parametrize("stored_as", ["dense", "packed", "block", "packed-f64"])
@pytest.mark.parametrize("spec", CHAINS)
def test_save_and_load_of_a_compressed_curvature(tmp_path, stored_as, spec):
    small = kp.compress(small_curvature(stored_as, out=20, inputs=24), spec)
    small.save(tmp_path / "small.kfac")
    loaded = kp.load(tmp_path / "small.kfac")
    assert [block.losses for block in loaded.blocks] == [block.losses for block in small.blocks]
    tau = random_tau(small)
    torch.testing.assert_close(loaded.quadratic(tau), small.quadratic(tau), rtol=1e-6, atol=0)
    loaded.save(tmp_path / "again.kfac")
    assert (tmp_path / "again.kfac").read_bytes() == (tmp_path / "small.kfac").read_bytes()
    assert kp.verify(tmp_path / "small.kfac").holds


def test_compressing_a_file_or_the_curvature_in_memory_gives_the_same_bytes(tmp_path):
    curvature = small_curvature("dense", out=20, inputs=24)
    curvature.save(tmp_path / "t.kfac")
    for name, source in (("memory", curvature), ("file", kp.load(tmp_path / "t.kfac"))):
        kp.compress(source, "svd:25%+int8").save(tmp_path / name)
    assert (tmp_path / "memory").read_bytes() == (tmp_path / "file").read_bytes()


def test_a_shared_matrix_stays_shared():
    one, two = kp.compress(small_curvature("packed", out=20, inputs=24), "block:2+int8").blocks[:2]
    assert one.structure.terms[0][1] is two.structure.terms[0][1] is two.structure.terms[1][1]


def test_only_number_codecs_apply_to_diagonals():
    diagonal = Diagonal.of(torch.rand(64))
    for spec in ("block:2", "svd:1", "prune:1%", "int8", "svd:1+int8"):
        assert CodecChain.parse(spec).encode(diagonal)[1] is diagonal
    assert CodecChain.parse("svd:1+bf16").encode(diagonal)[1].dtype is torch.bfloat16


def test_steps_that_save_nothing_are_skipped():
    source = Packed.from_dense(random_psd(40, 0))
    for spec, applied in (
        ("svd:39", "none"),
        ("svd:39+int8", "int8"),
        ("block:41+fp16", "fp16"),
        ("block:1+fp16", "fp16"),
        ("prune:50%", "none"),
        ("prune:0.01%", "none"),
        ("svd:3+int8", "svd:3+int8"),
    ):
        assert str(CodecChain.parse(spec).encode(source)[0]) == applied
    int8 = source.quantized()
    for spec in ("int8", "fp16", "bf16"):
        assert CodecChain.parse(spec).encode(int8)[1] is int8


@pytest.mark.parametrize("size", [1e-9, 1e-4, 1.0, 1e6])
def test_fp16_falls_back_to_bf16_out_of_range(size):
    source = Packed.from_dense(size * random_psd(12, 0))
    encoded = CodecChain.parse("fp16").encode(source)[1]
    assert encoded.dtype is (torch.float16 if size in (1e-4, 1.0) else torch.bfloat16)
    error = (encoded.dense() - source.dense()).norm() / source.dense().norm()
    assert float(error) < 0.004


@given(side=st.integers(1, 40), seed=seeds, percent=st.integers(1, 100))
def test_pruning_keeps_the_largest_entries_and_the_first_of_equal_ones(side, seed, percent):
    full = (random_psd(side, seed) * 3).round()
    values = torch.stack([full[i, j] for i in range(side) for j in range(i + 1)])
    places = [(i, j) for i in range(side) for j in range(i + 1)]
    count = min(round(percent / 100 * len(values)), int(values.count_nonzero()))
    largest = sorted(values.abs().argsort(descending=True, stable=True)[:count].tolist())
    encoded = Sparse.from_dense(full, percent / 100)
    positions = zip(encoded.components["rows"].tolist(), encoded.components["columns"].tolist(), strict=True)
    assert list(positions) == [places[k] for k in largest]
    assert torch.equal(encoded.components["data"], values[largest])


@pytest.mark.parametrize("signed", [False, True])
def test_subspace_iteration_gives_the_best_low_rank_approximation(signed):
    """Eckart-Young, for a matrix large enough for subspace iteration."""
    full = low_rank(400, 0) + 0.3 * random_psd(400, 1)
    if signed:
        full = full - 2 * low_rank(400, 2)
    encoded = LowRank.from_dense(full, 12, psd=not signed)
    values = torch.linalg.eigvalsh(full.double()).abs().sort(descending=True).values
    error = torch.linalg.matrix_norm(encoded.dense(torch.float64) - full.double())
    assert float(error) == pytest.approx(float(values[12:].norm()), rel=1e-3)


@pytest.mark.parametrize("width", [1, 300])
def test_sparse_matmul_agrees_with_the_dense_product_and_its_gradient(width):
    for percent in (1, 30):
        encoded = Sparse.from_dense(random_psd(200, 0), percent / 100)
        x = torch.randn(width, 200, generator=torch.Generator().manual_seed(0)).T.requires_grad_()
        product = encoded.matmul(x)
        torch.testing.assert_close(product, encoded.dense() @ x)
        (gradient,) = torch.autograd.grad(product.sum(), x)
        torch.testing.assert_close(gradient, encoded.dense() @ torch.ones(200, width))


@pytest.mark.parametrize("spec", CHAINS)
def test_str_of_a_chain_is_its_spec(spec):
    assert str(CodecChain.parse(spec)) == spec


def test_spaces_in_a_spec_are_ignored():
    assert str(CodecChain.parse(" block:8 + int8 ")) == "block:8+int8"


ALL = ("block:K", "svd:R", "svd:P%", "prune:P%", "int8", "fp16", "bf16")


@pytest.mark.parametrize(
    ("spec", "facts"),
    [
        ("", ALL),
        ("wavelet:8", ("'wavelet:8'", *ALL)),
        ("block", ("'block'", "block:K", "block:8")),
        ("block:0", ("'block:0'", "block:K")),
        ("block:-3", ("'block:-3'",)),
        ("block:8%", ("'block:8%'",)),
        ("block:", ("'block:'",)),
        ("svd:0", ("'svd:0'", "svd:R or svd:P%")),
        ("svd:0%", ("'svd:0%'",)),
        ("svd:101%", ("'svd:101%'",)),
        ("svd:x", ("'svd:x'", "svd:32", "svd:25%")),
        ("prune:15", ("'prune:15'", "prune:P%", "prune:15%")),
        ("int8:4", ("'int8:4'", "expected int8")),
        ("int8+block:8", ("'int8+block:8'", "at most one", *ALL)),
        ("block:8+svd:4", ("'block:8+svd:4'", "at most one", *ALL)),
        ("int8+fp16", ("'int8+fp16'", "at most one", *ALL)),
        ("block:8+int8+fp16", ("'block:8+int8+fp16'", "at most one", *ALL)),
        (8, ("got int", "block:8+int8")),
    ],
)
def test_invalid_specs_are_refused(spec, facts):
    with refused(kp.KfacpackError, *facts):
        kp.compress(small_curvature(), spec)
