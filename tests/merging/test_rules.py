"""Every rule approximates Σ w_t G_t and reports its error, compared with explicit Kronecker products."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit import MATRIX_FORMS, dense_block, of_task, random_psd, random_tau

import kfacpack as kp
from kfacpack.merging.merge import merge_and_report
from kfacpack.merging.rules import RULES

seeds = st.integers(0, 2**16)
counts = st.integers(1, 5)


def some_tasks(count, seed, stored_as="packed"):
    return [of_task(f"task{t}", 100 + 70 * t, seed + 31 * t, stored_as) for t in range(count)]


def targets(curvatures, weights):
    """Σ w_t G_t of every block, dense."""
    return [
        sum(weight * dense_block(block) for weight, block in zip(weights, blocks, strict=True))
        for blocks in zip(*(curvature.blocks for curvature in curvatures), strict=True)
    ]


def data_set_weights(curvatures):
    sizes = [curvature.about.source.dataset_size for curvature in curvatures]
    return [len(sizes) * size / sum(sizes) for size in sizes]


def errors(merged):
    return [float(block.losses[-1].frobenius) if block.losses else 0.0 for block in merged.blocks]


@pytest.mark.parametrize("stored_as", MATRIX_FORMS)
@given(seed=seeds, by=st.sampled_from([("tak", 1), ("stack", 1), ("optimal", 1), ("optimal", 2)]))
def test_the_reported_errors_are_those_of_brute_force(stored_as, seed, by):
    curvatures = some_tasks(3, seed, stored_as)
    merged = merge_and_report(curvatures, by[0], rank=by[1])
    expected = targets(curvatures, data_set_weights(curvatures))
    lost = [dense_block(block) - target for block, target in zip(merged.curvature.blocks, expected, strict=True)]
    sizes = [float(target.norm()) for target in expected]
    for block, difference, size in zip(merged.report.blocks, lost, sizes, strict=True):
        assert block.frobenius * size == pytest.approx(float(difference.norm()), rel=1e-4, abs=2e-6 * size)
    total = torch.cat([difference.flatten() for difference in lost]).norm() / torch.tensor(sizes).norm()
    assert merged.report.total.frobenius == pytest.approx(float(total), rel=1e-4, abs=2e-6)
    rule, rank = by
    written = RULES[rule](rank).error_in(merged.curvature.about.losses)
    assert written == pytest.approx(merged.report.total.frobenius, abs=2e-6)


@given(seed=seeds, count=counts)
def test_optimal_is_at_least_as_close_as_tak_which_is_within_its_bound(seed, count):
    curvatures = some_tasks(count, seed)
    tak = merge_and_report(curvatures, "tak").report
    optimal = merge_and_report(curvatures, "optimal").report
    for ours, theirs in zip(optimal.blocks, tak.blocks, strict=True):
        assert ours.frobenius <= theirs.frobenius + 1e-7
        assert theirs.frobenius <= theirs.relative_bound + 1e-7


@given(seed=seeds, count=counts)
def test_the_error_decreases_with_the_rank_and_vanishes_at_full_rank(seed, count):
    curvatures = some_tasks(count, seed)
    # One of the blocks has two terms for each task, all others one.
    errors_by_rank = [errors(kp.merge(curvatures, "optimal", rank=rank)) for rank in range(1, 2 * count + 1)]
    for block in zip(*errors_by_rank, strict=True):
        assert all(later <= before + 1e-7 for before, later in pairwise(block))
        assert block[-1] == 0
    everything = kp.merge(curvatures, "optimal", rank=2 * count)
    tau = random_tau(everything, seed)
    assert everything.quadratic(tau) == kp.merge(curvatures, "stack").quadratic(tau)


@given(seed=seeds)
def test_no_sum_of_two_products_is_closer_than_the_optimal_one(seed):
    """By Van Loan and Pitsianis: singular values of G, rearranged so that a Kronecker product is an outer product."""
    curvatures = some_tasks(3, seed)
    target = targets(curvatures, data_set_weights(curvatures))[0]
    rearranged = target.reshape(5, 7, 5, 7).permute(0, 2, 1, 3).reshape(25, 49)
    s = torch.linalg.svdvals(rearranged)
    nearest = float(s[2:].norm() / s.norm())
    assert errors(kp.merge(curvatures, "optimal", rank=2))[0] == pytest.approx(nearest, rel=1e-5)


@given(seed=seeds, count=counts)
def test_one_optimal_product_is_positive_semi_definite(tmp_path_factory, seed, count):
    path = tmp_path_factory.mktemp("merged") / "m.kfac"
    kp.merge(some_tasks(count, seed), "optimal").save(path)
    assert all(matrix.psd for matrix in kp.Bundle(path).manifest.matrices)
    assert kp.verify(path).holds


def test_among_equally_close_products_a_positive_one_is_chosen():
    """For two orthogonal tasks of equal weight, every rotation of the two is equally close."""
    curvatures = []
    for t in range(2):
        place = torch.zeros(7, 7).index_put_((torch.tensor(t), torch.tensor(t)), torch.tensor(1.0))
        task = of_task(f"task{t}", 100, 31 * t)
        blocks = list(task.blocks)
        factors = kp.Kronecker.of(kp.Packed.from_dense(place[:5, :5]), kp.Packed.from_dense(place))
        blocks[0] = replace(blocks[0], structure=factors)
        curvatures.append(kp.Curvature(blocks, task.about))
    block = kp.merge(curvatures, "optimal").blocks[0]
    ((B, A, _),) = block.structure.terms
    assert B.psd
    assert A.psd
    assert float(torch.linalg.eigvalsh(dense_block(block)).min()) >= 0
    assert block.losses[0].frobenius == pytest.approx(2**-0.5)


@pytest.mark.parametrize("stored_as", MATRIX_FORMS)
@given(seed=seeds)
def test_a_stack_is_the_sum_of_its_inputs_and_shares_their_matrices(stored_as, seed):
    curvatures = some_tasks(3, seed, stored_as)
    stacked = kp.merge(curvatures, "stack")
    tau = random_tau(stacked, seed, torch.float64)
    parts = [float(curvature.quadratic(tau)) for curvature in curvatures]
    expected = sum(weight * part for weight, part in zip(data_set_weights(curvatures), parts, strict=True))
    size = sum(map(abs, parts))
    assert float(stacked.quadratic(tau)) == pytest.approx(expected, rel=1e-5, abs=1e-5 * size)
    assert stacked.blocks[0].structure.terms[1][0] is curvatures[1].blocks[0].structure.terms[0][0]


def test_tak_is_the_rule_of_the_paper():
    curvatures = some_tasks(3, 0)
    shares = [weight / 3 for weight in data_set_weights(curvatures)]
    ((B, A, weight),) = kp.merge(curvatures, "tak").blocks[0].structure.terms
    factors = [curvature.blocks[0].structure.terms[0] for curvature in curvatures]
    assert weight == 1
    torch.testing.assert_close(B.dense(), sum(b.dense() for b, _, _ in factors))
    mean = sum(share * a.dense() for share, (_, a, _) in zip(shares, factors, strict=True))
    torch.testing.assert_close(A.dense(), mean)


def test_equal_weights_give_the_papers_bound():
    """T σ_A σ_B, with deviations from the mean in the Frobenius norm."""
    curvatures = some_tasks(4, 9)
    block = merge_and_report(curvatures, "tak", weights=[1, 1, 1, 1]).report.blocks[0]
    factors = [curvature.blocks[0].structure.terms[0] for curvature in curvatures]

    def sigma(matrices):
        points = torch.stack([matrix.dense(torch.float64).flatten() for matrix in matrices])
        return (points - points.mean(0)).square().sum(1).mean().sqrt()

    bound = 4 * sigma([A for _, A, _ in factors]) * sigma([B for B, _, _ in factors])
    assert block.bound == pytest.approx(float(bound), rel=1e-5)


@pytest.mark.parametrize("rule", ["tak", "optimal", "stack"])
def test_dense_blocks_and_diagonals_add_up_exactly(rule):
    curvatures = some_tasks(3, 2)
    merged = kp.merge(curvatures, rule)
    for block, target in zip(merged.blocks, targets(curvatures, data_set_weights(curvatures)), strict=True):
        if isinstance(block.structure, kp.Whole):
            torch.testing.assert_close(dense_block(block), target, rtol=1e-6, atol=0)
            assert not block.losses
    assert merged.blocks[-2].structure.matrix.form == "diagonal"


@pytest.mark.parametrize(
    ("stored_forms", "form"),
    [
        (["packed", "packed-f16"], "packed"),
        (["block", "block-int8"], "block"),
        (["block", "packed"], "packed"),
        (["diagonal", "diagonal"], "diagonal"),
        (["diagonal", "lowrank-int8", "sparse"], "packed"),
        (["sparse-int8", "dense"], "packed"),
    ],
)
def test_sums_use_the_smallest_form_that_represents_all_inputs(stored_forms, form):
    curvatures = [of_task(f"task{t}", 100, 31 * t, stored_as) for t, stored_as in enumerate(stored_forms)]
    merged = kp.merge(curvatures, "tak")
    B, A, _ = merged.blocks[0].structure.terms[0]
    assert (B.form, A.form) == (form, form)
    assert B.dtype == torch.float32
    expected = sum(curvature.blocks[0].structure.terms[0][0].dense(torch.float64) for curvature in curvatures)
    torch.testing.assert_close(B.dense(torch.float64), expected, rtol=1e-6, atol=1e-6)
    assert B.psd == all(curvature.blocks[0].structure.terms[0][0].psd for curvature in curvatures)


def test_layers_keep_sharing_a_factor():
    merged = kp.merge(some_tasks(2, 0), "tak")
    upper, lower = merged.blocks[2], merged.blocks[3]
    assert upper.structure.terms[0][1] is lower.structure.terms[0][1]


def test_float64_stays_float64():
    merged = kp.merge(some_tasks(2, 0, "packed-f64"), "tak")
    assert merged.blocks[0].structure.terms[0][0].dtype == torch.float64


def test_long_matrices_are_read_in_strips(monkeypatch):
    """The result does not depend on the strip length."""
    curvatures = [
        kp.Curvature(
            [
                kp.CurvatureBlock(
                    "w",
                    "linear",
                    kp.Join(rows=40, columns=30, pieces=(kp.Piece(parameter="w"),)),
                    kp.Kronecker.of(*(make(random_psd(side, 7 * t + side)) for make, side in ((b, 40), (a, 30)))),
                )
            ],
            of_task("t").about.model_copy(
                update={
                    "base": kp.identify({"w": torch.zeros(40, 30)}, ["w"], family="t", name="t"),
                    "source": kp.Source(task=f"task{t}", dataset_size=10),
                }
            ),
        )
        for t, (b, a) in enumerate(
            [
                (MATRIX_FORMS["packed"], MATRIX_FORMS["lowrank-int8"]),
                (MATRIX_FORMS["block-int8"], MATRIX_FORMS["sparse"]),
            ]
        )
    ]
    whole = merge_and_report(curvatures, "optimal")
    monkeypatch.setattr("kfacpack.merging.strips.STRIP_ENTRIES", 100)
    narrow = merge_and_report(curvatures, "optimal")
    assert narrow.report.total.frobenius == pytest.approx(whole.report.total.frobenius, rel=1e-9)
    torch.testing.assert_close(dense_block(narrow.curvature.blocks[0]), dense_block(whole.curvature.blocks[0]))
