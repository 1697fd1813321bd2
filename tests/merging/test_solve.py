"""The solver per block equals a dense solve, for every structure and form of matrix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import MATRIX_FORMS, dense_block, random_psd, refused, small_curvature

import kfacpack as kp
from kfacpack.curvature.matrices.dense import OperatorCache
from kfacpack.merging import solve
from kfacpack.merging.solve import SolveSettings, SolveTerm, clipped, solve_block

EXACT = SolveSettings(0.05, tolerance=1e-12, iterations=2000)
TASKS = (1, 2, 3, 4)


def block_of(structure: kp.BlockStructure, rows: int, columns: int) -> kp.CurvatureBlock:
    join = kp.Join(rows=rows, columns=columns, pieces=(kp.Piece(parameter="w"),))
    return kp.CurvatureBlock("w", "linear", join, structure)


def dense_solution(terms, damping, mask=None):
    """D, and the objective of a change of the prior, from matrices over the flattened entries."""
    rows, columns = terms[0].target.shape
    matrices = [term.weight * dense_block(block_of(term.structure, rows, columns)) for term in terms]
    targets = [term.target.double().flatten() for term in terms]
    total = sum(matrices)
    epsilon = damping * total.trace() / (rows * columns)
    system = total + epsilon * torch.eye(rows * columns, dtype=torch.float64)
    right = sum(matrix @ target for matrix, target in zip(matrices, targets, strict=True))
    kept = torch.ones(rows * columns, dtype=torch.bool) if mask is None else mask.flatten().bool()
    change = torch.zeros_like(right)
    change[kept] = torch.linalg.solve(system[kept][:, kept], right[kept])

    def objective(d):
        d = d.double().flatten()
        drift = sum((d - t) @ matrix @ (d - t) for matrix, t in zip(matrices, targets, strict=True))
        return float(drift + epsilon * d @ d)

    return change.reshape(rows, columns), objective


def random_terms(structures, shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        SolveTerm(0.5 + 0.4 * k, structure, torch.randn(shape, generator=generator, dtype=torch.float64))
        for k, structure in enumerate(structures)
    ]


@pytest.fixture(params=["direct", "iterative"])
def path(request, monkeypatch):
    if request.param == "iterative":
        monkeypatch.setattr(solve, "DIRECT_ENTRIES", 0)
        monkeypatch.setattr(solve, "DIRECT_WHOLE_ENTRIES", 0)
    return request.param


def check(terms, settings=EXACT, mask=None, tolerance=1e-6):
    solution = solve_block("w", terms, settings, mask=mask)
    report = solution.report
    if report.repaired:
        terms = [SolveTerm(term.weight, clipped(term.structure), term.target) for term in terms]
    expected, objective = dense_solution(terms, settings.damping, mask)
    torch.testing.assert_close(solution.change.double(), expected, rtol=tolerance, atol=tolerance)
    assert report.before == pytest.approx(objective(torch.zeros_like(expected)), rel=1e-5)
    assert report.after == pytest.approx(objective(expected), rel=1e-5, abs=1e-9)
    assert report.residual < 1e-6
    return report


@pytest.mark.parametrize("tasks", TASKS)
@pytest.mark.parametrize("form", MATRIX_FORMS)
def test_every_structure_and_form_equals_a_dense_solve(form, tasks, path):
    curvatures = [small_curvature(form, seed=20 * k) for k in range(tasks)]
    for blocks in zip(*(curvature.blocks for curvature in curvatures), strict=True):
        shape = blocks[0].join.rows, blocks[0].join.columns
        report = check(random_terms([block.structure for block in blocks], shape))
        positive = all(matrix.psd for block in blocks for _, matrix in block.structure.matrices())
        assert not (positive and report.repaired)


def test_forms_can_be_mixed(path):
    structures = [
        kp.Kronecker.of(MATRIX_FORMS[b](random_psd(6, 2 * k)), MATRIX_FORMS[a](random_psd(7, 2 * k + 1)))
        for k, (b, a) in enumerate([("dense", "block"), ("lowrank", "diagonal"), ("packed-int8", "packed")])
    ]
    check(random_terms(structures, (6, 7)))


def test_sparse_and_low_rank_matrices_are_not_densified_for_their_diagonal():
    full = random_psd(40, 0, torch.float64)
    for form in MATRIX_FORMS:
        matrix = MATRIX_FORMS[form](full)
        operator = matrix.operator(torch.float64)
        torch.testing.assert_close(operator.diagonal(40), matrix.dense(torch.float64).diagonal())
        blocks = [block for part in operator.blocks(40) for block in part]
        torch.testing.assert_close(torch.block_diag(*blocks), matrix.dense(torch.float64))
    sparse = kp.Sparse.from_dense(full, fraction=0.02)
    torch.testing.assert_close(sparse.operator(torch.float64).diagonal(40), sparse.dense(torch.float64).diagonal())


@pytest.mark.parametrize("side", ["rows", "columns"])
def test_one_side_alone_has_a_direct_solution(side):
    """As in RegMean; the other sides differ by a factor only."""
    rows, columns = 40, 50
    structures = []
    for k in range(3):
        ones = kp.Diagonal.of(torch.full((rows if side == "columns" else columns,), 1.0 + k, dtype=torch.float64))
        other = kp.Dense.of(random_psd(columns if side == "columns" else rows, k, torch.float64))
        structures.append(kp.Kronecker.of(*((ones, other) if side == "columns" else (other, ones))))
    assert check(random_terms(structures, (rows, columns))).iterations == 0


@pytest.mark.parametrize("shared", ["both", "B", "A"])
def test_a_single_product_has_a_direct_solution(shared):
    B = [kp.Dense.of(random_psd(40, 1 if shared in ("both", "B") else 10 + k)) for k in range(3)]
    A = [kp.Dense.of(random_psd(50, 2 if shared in ("both", "A") else 20 + k)) for k in range(3)]
    if shared == "A":
        A = [A[0]] * 3
    elif shared == "B":
        B = [B[0]] * 3
    structures = [kp.Kronecker.of(b, a) for b, a in zip(B, A, strict=True)]
    if shared == "both":
        structures = structures[:1]
    assert check(random_terms(structures, (40, 50))).iterations == 0


@pytest.mark.parametrize("is_masked", [False, True])
def test_wide_blocks_are_computed_in_float32(is_masked):
    """Their sides are padded to multiples of 16 during the computation."""
    rows, columns = 530, 3
    structures = [
        kp.Kronecker.of(kp.Dense.of(random_psd(rows, k)), kp.Dense.of(random_psd(columns, 9 + k))) for k in range(3)
    ]
    terms, mask = random_terms(structures, (rows, columns)), torch.ones(rows, columns)
    mask[:, -1] = 0
    solution = solve_block("w", terms, SolveSettings(0.1, tolerance=1e-5), mask=mask if is_masked else None)
    expected, _ = dense_solution(terms, 0.1, mask if is_masked else None)
    assert solution.change.dtype is torch.float32
    assert solution.change.shape == (rows, columns)
    assert 0 < solution.report.iterations < 200
    assert solution.report.residual <= 1e-5
    torch.testing.assert_close(solution.change.double(), expected, rtol=1e-3, atol=1e-4)


def test_parameters_that_must_not_change(path):
    structures = [kp.Kronecker.of(kp.Dense.of(random_psd(5, k)), kp.Dense.of(random_psd(6, 9 + k))) for k in range(3)]
    mask = torch.ones(5, 6)
    mask[:, -1] = 0
    solution = solve_block("w", random_terms(structures, (5, 6)), EXACT, mask=mask)
    assert not solution.change[:, -1].any()
    check(random_terms(structures, (5, 6)), mask=mask)


def test_nothing_to_change_is_exactly_zero(path):
    structure = kp.Kronecker.of(kp.Dense.of(random_psd(5, 1)), kp.Dense.of(random_psd(6, 2)))
    solution = solve_block("w", [SolveTerm(1.0, structure, torch.zeros(5, 6))], EXACT)
    assert torch.equal(solution.change, torch.zeros(5, 6, dtype=torch.float64))
    assert (solution.report.iterations, solution.report.residual, solution.report.repaired) == (0, 0.0, False)
    nothing = kp.Kronecker.of(kp.Dense.of(torch.zeros(5, 5)), kp.Dense.of(random_psd(6, 2)))
    assert not solve_block("w", [SolveTerm(1.0, nothing, torch.ones(5, 6))], EXACT).change.any()


def test_the_iteration_limit_is_reported():
    structures = [kp.Kronecker.of(kp.Dense.of(random_psd(40, k)), kp.Dense.of(random_psd(50, 9 + k))) for k in range(4)]
    report = solve_block("w", random_terms(structures, (40, 50)), SolveSettings(1e-4, iterations=3)).report
    assert report.iterations == 3
    assert report.residual > 1e-4
    assert report.after < report.before


def indefinite(side: int, seed: int) -> kp.Matrix:
    matrix = random_psd(side, seed, torch.float64)
    return kp.Dense.of(matrix - 0.9 * matrix.diagonal().mean() * torch.eye(side, dtype=torch.float64), psd=False)


@pytest.mark.parametrize("structure", ["kronecker", "dense", "diagonal", "one side"])
def test_matrices_that_are_not_psd_are_repaired(structure, path):
    """Negative eigenvalues are set to zero in the whole block, and `repaired` is true in the report."""
    if structure == "kronecker":
        structures, shape = [kp.Kronecker.of(indefinite(5, k), indefinite(6, 9 + k)) for k in range(3)], (5, 6)
    elif structure == "dense":
        structures, shape = [kp.Whole(indefinite(12, k)) for k in range(3)], (4, 3)
    elif structure == "diagonal":
        values = torch.tensor([1.0, -2.0, 3.0, 0.5])
        structures, shape = [kp.Whole(kp.Diagonal.of(values, psd=False))], (2, 2)
    else:
        ones = kp.Diagonal.of(torch.ones(40))
        structures, shape = [kp.Kronecker.of(ones, indefinite(50, k)) for k in range(3)], (40, 50)
    assert check(random_terms(structures, shape)).repaired


def test_what_cannot_be_repaired_is_an_error(path):
    structures = [
        kp.Kronecker(((kp.Dense.of(random_psd(5, 1)), kp.Dense.of(random_psd(6, 2)), 1.0),)),
        kp.Kronecker(((kp.Dense.of(random_psd(5, 3)), kp.Dense.of(random_psd(6, 4)), -3.0),)),
    ]
    with refused(kp.KfacpackError, "block 'layer.weight'", "not positive definite", "negative weight"):
        solve_block("layer.weight", random_terms(structures, (5, 6)), EXACT)


def test_a_shared_matrix_is_unpacked_once():
    A = kp.Packed.from_dense(random_psd(6, 1))
    B = [kp.Packed.from_dense(random_psd(5, k)) for k in (2, 3)]
    cache = OperatorCache()
    operators = []
    for k in range(2):
        solve_block("w", random_terms([kp.Kronecker.of(B[k], A)], (5, 6)), EXACT, cache=cache)
        operators.append(cache(A, torch.float64))
    assert operators[0] is operators[1]
    assert len(cache._operators) == 2, "the matrix of the earlier block was dropped"


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 6), st.integers(0, 10**6), st.floats(-4, 1), st.booleans())
def test_no_other_matrix_has_a_smaller_objective(tasks, rows, columns, seed, magnitude, is_whole):
    """Neither the prior, nor any W_t, nor RegMean's solution, nor a small change of the result."""
    structures = [
        kp.Whole(kp.Dense.of(random_psd(rows * columns, seed + k, torch.float64)))
        if is_whole
        else kp.Kronecker.of(
            kp.Dense.of(random_psd(rows, seed + k, torch.float64)),
            kp.Dense.of(random_psd(columns, seed + 50 + k, torch.float64)),
        )
        for k in range(tasks)
    ]
    terms = random_terms(structures, (rows, columns), seed)
    damping = 10.0**magnitude
    solution = solve_block("w", terms, SolveSettings(damping))
    expected, objective = dense_solution(terms, damping)
    least = objective(solution.change)
    others = [torch.zeros_like(expected), *(term.target for term in terms)]
    others += [sum(term.target for term in terms), solution.change + 1e-3 * torch.randn_like(solution.change)]
    if not is_whole:
        A = [term.structure.sides[1][0].dense(torch.float64) for term in terms]
        summed = sum(term.weight * a for term, a in zip(terms, A, strict=True))
        summed = summed + 1e-6 * torch.eye(columns, dtype=torch.float64)
        right = sum(term.weight * term.target @ a for term, a in zip(terms, A, strict=True))
        others.append(torch.linalg.solve(summed, right, left=False))
    assert all(least <= objective(other) * (1 + 1e-9) + 1e-12 for other in others)
