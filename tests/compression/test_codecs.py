"""Every codec and chain: what it makes acts as the matrix it stands for, is smaller, and keeps its promises."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit import HOLDS, random_psd, random_tau, small_curvature

import kfacpack as kp
from kfacpack.compression.chain import CodecChain
from kfacpack.curvature.curvature import negative_direction
from kfacpack.curvature.matrices.dense import Packed
from kfacpack.curvature.matrices.sparse import Sparse
from kfacpack.curvature.matrices.structured import Diagonal, LowRank

STRUCTURES = ["block:3", "svd:2", "svd:30%", "prune:20%"]
NUMBERS = ["int8", "fp16", "bf16"]
CHAINS = [*STRUCTURES, *NUMBERS, *(f"{first}+{then}" for first in STRUCTURES for then in NUMBERS)]

sides = st.integers(1, 40)
seeds = st.integers(0, 2**16)


def low_rank(side: int, seed: int) -> torch.Tensor:
    """What few examples give: a spectrum that falls off, and eigenvalues that are zero."""
    a = torch.randn(max(1, side // 3), side, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    full = a.T @ a / len(a)
    return ((full + full.T) / 2).float()


@pytest.mark.parametrize("spec", CHAINS)
@given(side=sides, columns=st.integers(1, 5), seed=seeds)
def test_what_a_codec_makes_multiplies_like_its_dense_matrix(spec, side, columns, seed):
    _, made = CodecChain.parse(spec).encode(Packed.from_dense(random_psd(side, seed)))
    x = torch.randn(columns, side, generator=torch.Generator().manual_seed(seed)).T
    expected = made.dense(torch.float64) @ x.double()
    torch.testing.assert_close(made.matmul(x).double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("spec", CHAINS)
@given(side=sides, seed=seeds)
def test_a_matrix_becomes_smaller_or_stays_the_same_object(spec, side, seed):
    source = Packed.from_dense(random_psd(side, seed))
    taken, made = CodecChain.parse(spec).encode(source)
    assert made.nbytes < source.nbytes if taken.steps else made is source
    assert made.side == side


@pytest.mark.parametrize("make", [random_psd, low_rank])
@pytest.mark.parametrize("spec", CHAINS)
@given(side=sides, seed=seeds)
def test_who_promises_to_be_psd_is(spec, make, side, seed):
    source = Packed.from_dense(make(side, seed))
    taken, made = CodecChain.parse(spec).encode(source)
    names = {step.name for step in taken.steps}
    keeps = "prune" not in names and ("int8" not in names or "svd" in names)
    assert made.psd is keeps
    if made.psd:
        assert negative_direction(made) is None


def test_a_matrix_that_does_not_promise_gets_no_promise():
    source = Packed.from_dense(random_psd(9, 0) - 0.8 * torch.eye(9), psd=False)
    for spec in ("block:3", "svd:3", "fp16", "svd:3+int8"):
        assert not CodecChain.parse(spec).encode(source)[1].psd


@pytest.mark.parametrize("spec", CHAINS)
@pytest.mark.parametrize("hold", HOLDS)
def test_every_form_can_be_compressed_again(hold, spec):
    source = HOLDS[hold](random_psd(24, 1))
    source.examples, source.positions = 7, 21
    _, made = CodecChain.parse(spec).encode(source)
    assert made.nbytes <= source.nbytes
    assert (made.examples, made.positions) == (7, 21)
    assert made.dense().isfinite().all()


@pytest.mark.parametrize("hold", ["dense", "packed", "block", "packed-f64"])
@pytest.mark.parametrize("spec", CHAINS)
def test_a_compressed_curvature_comes_back_from_its_file_the_same(tmp_path, hold, spec):
    small = kp.compress(small_curvature(hold, out=20, inputs=24), spec)
    small.save(tmp_path / "small.kfac")
    loaded = kp.load(tmp_path / "small.kfac")
    assert [block.losses for block in loaded.blocks] == [block.losses for block in small.blocks]
    tau = random_tau(small)
    torch.testing.assert_close(loaded.quadratic(tau), small.quadratic(tau), rtol=1e-6, atol=0)
    loaded.save(tmp_path / "again.kfac")
    assert (tmp_path / "again.kfac").read_bytes() == (tmp_path / "small.kfac").read_bytes()
    assert kp.verify(tmp_path / "small.kfac").holds


def test_a_file_and_what_was_saved_to_it_compress_to_the_same_bytes(tmp_path):
    curvature = small_curvature("dense", out=20, inputs=24)
    curvature.save(tmp_path / "t.kfac")
    for name, source in (("memory", curvature), ("file", kp.load(tmp_path / "t.kfac"))):
        kp.compress(source, "svd:25%+int8").save(tmp_path / name)
    assert (tmp_path / "memory").read_bytes() == (tmp_path / "file").read_bytes()


def test_a_shared_matrix_stays_shared():
    one, two = kp.compress(small_curvature("packed", out=20, inputs=24), "block:2+int8").blocks[:2]
    assert one.structure.terms[0][1] is two.structure.terms[0][1] is two.structure.terms[1][1]


def test_diagonals_take_types_of_numbers_alone():
    diagonal = Diagonal.of(torch.rand(64))
    for spec in ("block:2", "svd:1", "prune:1%", "int8", "svd:1+int8"):
        assert CodecChain.parse(spec).encode(diagonal)[1] is diagonal
    assert CodecChain.parse("svd:1+bf16").encode(diagonal)[1].dtype is torch.bfloat16


def test_a_step_that_saves_nothing_is_left_out():
    source = Packed.from_dense(random_psd(40, 0))
    for asked, taken in (
        ("svd:39", "none"),
        ("svd:39+int8", "int8"),
        ("block:41+fp16", "fp16"),
        ("block:1+fp16", "fp16"),
        ("prune:50%", "none"),
        ("prune:0.01%", "none"),
        ("svd:3+int8", "svd:3+int8"),
    ):
        assert str(CodecChain.parse(asked).encode(source)[0]) == taken
    int8 = source.quantized()
    for spec in ("int8", "fp16", "bf16"):
        assert CodecChain.parse(spec).encode(int8)[1] is int8


@pytest.mark.parametrize("size", [1e-9, 1e-4, 1.0, 1e6])
def test_fp16_is_held_as_bf16_where_its_range_is_too_small(size):
    source = Packed.from_dense(size * random_psd(12, 0))
    made = CodecChain.parse("fp16").encode(source)[1]
    assert made.dtype is (torch.float16 if size in (1e-4, 1.0) else torch.bfloat16)
    error = (made.dense() - source.dense()).norm() / source.dense().norm()
    assert float(error) < 0.004


@given(side=st.integers(1, 40), seed=seeds, percent=st.integers(1, 100))
def test_pruning_keeps_the_largest_and_among_equals_the_first(side, seed, percent):
    full = (random_psd(side, seed) * 3).round()
    values = torch.stack([full[i, j] for i in range(side) for j in range(i + 1)])
    places = [(i, j) for i in range(side) for j in range(i + 1)]
    count = min(round(percent / 100 * len(values)), int(values.count_nonzero()))
    kept = sorted(values.abs().argsort(descending=True, stable=True)[:count].tolist())
    made = Sparse.from_dense(full, percent / 100)
    found = zip(made.components["rows"].tolist(), made.components["columns"].tolist(), strict=True)
    assert list(found) == [places[k] for k in kept]
    assert torch.equal(made.components["data"], values[kept])


@pytest.mark.parametrize("signed", [False, True])
def test_a_large_matrix_gets_the_best_of_a_low_rank(signed):
    """Eckart-Young, where the eigenvectors are found by iteration."""
    full = low_rank(400, 0) + 0.3 * random_psd(400, 1)
    if signed:
        full = full - 2 * low_rank(400, 2)
    made = LowRank.from_dense(full, 12, psd=not signed)
    values = torch.linalg.eigvalsh(full.double()).abs().sort(descending=True).values
    error = torch.linalg.matrix_norm(made.dense(torch.float64) - full.double())
    assert float(error) == pytest.approx(float(values[12:].norm()), rel=1e-3)


@pytest.mark.parametrize("width", [1, 300])
def test_a_sparse_matrix_multiplies_the_same_however_it_is_done(width):
    for percent in (1, 30):
        made = Sparse.from_dense(random_psd(200, 0), percent / 100)
        x = torch.randn(width, 200, generator=torch.Generator().manual_seed(0)).T.requires_grad_()
        found = made.matmul(x)
        torch.testing.assert_close(found, made.dense() @ x)
        (gradient,) = torch.autograd.grad(found.sum(), x)
        torch.testing.assert_close(gradient, made.dense() @ torch.ones(200, width))


@pytest.mark.parametrize("spec", CHAINS)
def test_a_chain_is_written_as_it_is_read(spec):
    assert str(CodecChain.parse(spec)) == spec


def test_spaces_do_not_matter():
    assert str(CodecChain.parse(" block:8 + int8 ")) == "block:8+int8"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("", "expected one of block:K, svd:R or svd:P%, prune:P%, int8, fp16, bf16"),
        ("wavelet:8", "'wavelet:8' in 'wavelet:8': expected one of block:K"),
        ("block", "'block': expected block:K, K the number of diagonal blocks"),
        ("block:0", "'block:0': expected block:K"),
        ("block:-3", "'block:-3'"),
        ("block:8%", "'block:8%'"),
        ("block:", "'block:'"),
        ("svd:0", "'svd:0': expected svd:R or svd:P%"),
        ("svd:0%", "'svd:0%'"),
        ("svd:101%", "'svd:101%'"),
        ("svd:x", "'svd:x'"),
        ("prune:15", "'prune:15': expected prune:P%, the share of entries to keep"),
        ("int8:4", "'int8:4': expected int8, which takes no number"),
        ("int8+block:8", "at most one of structure, then at most one type of numbers"),
        ("block:8+svd:4", "'block:8\\+svd:4': expected at most one of structure"),
        ("int8+fp16", "at most one type of numbers: block:K.*; then int8, fp16, bf16"),
        ("block:8+int8+fp16", "at most one"),
        (8, "given as a text such as block:8\\+int8.*found int"),
    ],
)
def test_anything_else_is_refused_in_words(spec, words):
    with pytest.raises(kp.KfacpackError, match=words):
        kp.compress(small_curvature(), spec)
