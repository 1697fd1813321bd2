"""Every matrix form: products, sizes, rounding errors, and checks for positive semi-definiteness."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit import MATRIX_FORMS, random_psd, refused

import kfacpack as kp
from kfacpack.curvature.matrices import FORMS
from kfacpack.curvature.matrices.components import InMemoryTensors, pack, unpack
from kfacpack.curvature.matrices.dense import Dense, Packed
from kfacpack.curvature.matrices.matrix import negative_eigenvalue_bound
from kfacpack.curvature.matrices.structured import BlockDiagonal, Diagonal, LowRank, Sparse, spans
from kfacpack.format.schema import LAYOUTS

sides = st.integers(1, 40)
seeds = st.integers(0, 2**16)


@pytest.mark.parametrize("stored_as", MATRIX_FORMS)
@given(side=sides, columns=st.integers(1, 5), seed=seeds)
def test_matmul_is_the_product_with_the_dense_matrix(stored_as, side, columns, seed):
    matrix = MATRIX_FORMS[stored_as](random_psd(side, seed))
    x = torch.randn(side, columns, generator=torch.Generator().manual_seed(seed))
    expected = matrix.dense(torch.float64) @ x.double()
    torch.testing.assert_close(matrix.matmul(x).double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("stored_as", MATRIX_FORMS)
@given(side=sides, seed=seeds)
def test_dense_is_symmetric(stored_as, side, seed):
    full = MATRIX_FORMS[stored_as](random_psd(side, seed)).dense(torch.float64)
    assert torch.allclose(full, full.T, rtol=0, atol=1e-12)


@given(side=sides, seed=seeds)
def test_packing_is_lossless(side, seed):
    full = random_psd(side, seed)
    assert torch.equal(Packed.from_dense(full).dense(), full)
    assert torch.equal(Dense.of(full).for_storage().dense(), full)


def test_packing_stores_the_lower_triangle_row_by_row():
    full = torch.tensor([[1.0, 2.0, 4.0], [2.0, 3.0, 5.0], [4.0, 5.0, 6.0]])
    assert pack(full).tolist() == [1, 2, 3, 4, 5, 6]
    assert torch.equal(unpack(pack(full), 3), full)


def test_packing_a_matrix_larger_than_one_tile():
    full = random_psd(600, 0)
    assert torch.equal(unpack(pack(full), 600), full)


@given(side=sides, count=st.integers(1, 9), seed=seeds)
def test_block_keeps_only_its_diagonal_blocks(side, count, seed):
    count = min(count, side)
    full = random_psd(side, seed)
    expected = torch.zeros_like(full)
    sizes = [stop - start for start, stop in spans(side, count)]
    assert sum(sizes) == side
    assert max(sizes) - min(sizes) <= 1
    for start, stop in spans(side, count):
        expected[start:stop, start:stop] = full[start:stop, start:stop]
    assert torch.equal(BlockDiagonal.from_dense(full, count).dense(), expected)


@given(side=st.integers(2, 30), seed=seeds)
def test_lowrank_is_the_best_approximation_of_its_rank(side, seed):
    """Eckart-Young: the squared error is the sum of the squared eigenvalues left out."""
    full, rank = random_psd(side, seed), side // 2
    error = torch.linalg.matrix_norm(LowRank.from_dense(full, rank).dense(torch.float64) - full.double())
    left_out = torch.linalg.eigvalsh(full.double())[: side - rank].norm()
    assert float(error) == pytest.approx(float(left_out), rel=1e-3, abs=1e-5)


@given(side=sides, seed=seeds)
def test_sparse_keeps_the_largest_entries(side, seed):
    full = random_psd(side, seed)
    sparse = Sparse.from_dense(full, 0.5)
    entries = pack(full).abs().sort(descending=True).values
    count = sparse.components.specs["data"][1][0]
    assert count == round(0.5 * len(entries))
    if count:
        assert float(sparse.components["data"].abs().min()) >= float(entries[count - 1])


@pytest.mark.parametrize("stored_as", ["packed", "block", "lowrank", "sparse"])
@given(side=sides, seed=seeds)
def test_int8_is_off_by_at_most_half_a_step_of_its_row(stored_as, side, seed):
    matrix = MATRIX_FORMS[stored_as](random_psd(side, seed))
    exact, rounded = matrix.float_values(torch.float64), matrix.quantized()
    scale = rounded.components["scale"].double().reshape(-1)[rounded.row_index()]
    assert bool(((rounded.float_values(torch.float64) - exact).abs() <= scale * 0.5001).all())


def test_int8_of_zeros_is_zero():
    assert torch.equal(Packed.from_dense(torch.zeros(4, 4)).quantized().dense(), torch.zeros(4, 4))


@pytest.mark.parametrize("stored_as", MATRIX_FORMS)
def test_shapes_are_those_of_the_format(stored_as):
    matrix = MATRIX_FORMS[stored_as](random_psd(10, 0))
    _, shape = matrix.components.specs["data"]
    stated = LAYOUTS[matrix.form].shapes(matrix.side, shape)
    shapes = {name: shape for name, (_, shape) in matrix.components.specs.items()}
    assert shapes.items() <= stated.items()


def test_every_form_of_the_format_has_a_class():
    assert FORMS.keys() == LAYOUTS.keys()


@pytest.mark.parametrize(("stored_as", "share"), [("packed", 0.55), ("block", 0.20), ("packed-int8", 0.16)])
def test_nbytes_of_a_form(stored_as, share):
    full = random_psd(48, 0)
    assert MATRIX_FORMS[stored_as](full).nbytes <= share * full.nbytes


def test_an_asymmetric_matrix_is_refused():
    full = random_psd(5, 0)
    full[1, 3] += 0.5
    with refused(ValueError, "symmetric", "m[i,j] and m[j,i]", "0.5"):
        Dense.of(full)
    assert Dense.of(random_psd(5, 0)).violation() is None


@pytest.mark.parametrize("places", [[(1, 3)], [(3, 1)], [(1, 3), (3, 1)], [(2, 2)]])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_matrix_that_is_not_finite_is_refused(places, value):
    full = random_psd(5, 0)
    for place in places:
        full[place] = value
    with refused(kp.MatrixError, "NaN or Inf"):
        Dense.of(full)


def test_asymmetry_within_rounding_uses_the_lower_triangle():
    full = random_psd(5, 0)
    lopsided = full.clone()
    lopsided[1, 3] = torch.nextafter(full[1, 3], torch.tensor(9.0))
    assert torch.equal(Dense.of(lopsided).dense(), full)
    half = full.bfloat16()
    half[1, 3] = torch.nextafter(half[1, 3], torch.tensor(9.0, dtype=torch.bfloat16))
    with refused(kp.MatrixError, "symmetric"):
        Dense.of(half)


def test_bad_arguments_are_refused():
    with refused(ValueError, "square", "[2, 3]"):
        Dense.of(torch.zeros(2, 3))
    with refused(ValueError, "from 1 to 4", "got 5"):
        BlockDiagonal.from_dense(random_psd(4, 0), 5)
    with refused(ValueError, "rank from 0 to 4", "got 5"):
        LowRank.from_dense(random_psd(4, 0), 5)
    with refused(TypeError, "'dense'", "int8"):
        Dense.of(random_psd(4, 0)).quantized()
    with refused(kp.MatrixError, "square", "[0, 0]"):
        Dense.of(torch.zeros(0, 0))
    with refused(kp.MatrixError, "vector", "[2, 2]"):
        Diagonal.of(torch.zeros(2, 2))
    with refused(kp.MatrixError, "from 0 to 1", "-0.2"):
        Sparse.from_dense(random_psd(4, 0), -0.2)


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1.0, 1e20, 1e30])
def test_int8_at_any_magnitude(size):
    full = random_psd(6, 0, torch.float64)
    dense = Packed.from_dense((full * size).float()).quantized().dense(torch.float64) / size
    assert float((dense - full).abs().max()) < 0.01 * float(full.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-41, 1e-20, 1e-6, 1.0, 1e3])
def test_a_rank_deficient_matrix_is_positive_semi_definite(dtype, size):
    """The second moment of ten examples at side 300, at any magnitude that the dtype can represent."""
    a = torch.randn(10, 300, generator=torch.Generator().manual_seed(0))
    full = (size * (a.T @ a) / 10).to(dtype)
    assert negative_eigenvalue_bound(Packed.from_dense(full)) is None


def test_a_long_float32_sum_is_positive_semi_definite():
    """60 000 centred inputs added up one at a time: the zero eigenvalue is off by the sum's own rounding."""
    rows = torch.randn(60_000, 32, generator=torch.Generator().manual_seed(0))
    rows -= rows.mean(dim=1, keepdim=True)
    total = torch.zeros(32, 32)
    for chunk in rows.split(1):
        total.addmm_(chunk.T, chunk)
    A = Packed(32, Packed.from_dense(total / len(rows)).components, positions=len(rows))
    assert negative_eigenvalue_bound(A) is None


@pytest.mark.parametrize("stored_as", ["dense", "packed", "block", "diagonal", "lowrank-signed"])
def test_a_negative_eigenvalue_is_detected(stored_as):
    matrix = MATRIX_FORMS[stored_as](random_psd(9, 0) - 0.8 * torch.eye(9))
    expected = float(torch.linalg.eigvalsh(matrix.dense(torch.float64))[0])
    assert expected < -0.01
    assert expected < negative_eigenvalue_bound(matrix) < 0


def test_zeros_are_positive_semi_definite():
    assert negative_eigenvalue_bound(Packed.from_dense(torch.zeros(4, 4))) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("side", [1, 300, 2048])
def test_a_negative_diagonal_is_not_taken_for_rounding(dtype, side):
    full = torch.eye(side, dtype=dtype)
    full[side // 2, side // 2] = -0.25
    assert negative_eigenvalue_bound(Packed.from_dense(full)) is not None
    assert negative_eigenvalue_bound(Packed.from_dense(-torch.eye(side, dtype=dtype))) is not None


def test_the_check_does_not_depend_on_magnitude():
    for size in (1e-200, 1e200):
        full = size * torch.eye(3, dtype=torch.float64)
        assert negative_eigenvalue_bound(Packed.from_dense(full)) is None
        assert negative_eigenvalue_bound(Packed.from_dense(-full)) is not None


def test_many_small_blocks_are_checked_at_once():
    many = BlockDiagonal(100_000, InMemoryTensors(data=torch.ones(100_000, 1)))
    assert negative_eigenvalue_bound(many) is None
