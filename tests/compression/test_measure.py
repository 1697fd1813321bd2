"""Reported errors equal those of the dense Kronecker products."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit import dense_block, random_psd, random_tau, small_curvature

import kfacpack as kp
from kfacpack.compression.compress import choose_codecs, compress_with
from kfacpack.compression.compression_report import Moments, compare, moments
from kfacpack.curvature.matrices.dense import Packed
from kfacpack.curvature.matrices.structured import Diagonal

SPECS = ["block:2", "block:2+int8", "svd:2", "svd:40%+fp16", "prune:15%", "prune:25%+int8", "int8", "fp16", "bf16"]
seeds = st.integers(0, 2**16)


def compressed(curvature, spec, **more):
    return compress_with(curvature, choose_codecs(curvature, spec, None), **more)


@pytest.mark.parametrize("spec", SPECS)
@given(seed=seeds)
def test_errors_equal_those_of_the_dense_kronecker_products(spec, seed):
    before = small_curvature("packed", seed, out=9, inputs=10)
    after, report = compressed(before, spec)
    losses, sizes, traces, lost_traces = [], [], [], []
    for old, new, block_report in zip(before.blocks, after.blocks, report.blocks, strict=True):
        G, compressed_G = dense_block(old), dense_block(new)
        lost, size = (G - compressed_G).square().sum(), G.square().sum()
        trace, lost_trace = G.trace(), (G - compressed_G).trace()
        assert block_report.moments.frobenius == pytest.approx(float((lost / size).sqrt()), rel=1e-4, abs=1e-9)
        expected = float(((2 * lost + lost_trace**2) / (2 * size + trace**2)).sqrt())
        assert block_report.moments.quadratic == pytest.approx(expected, rel=1e-4, abs=1e-9)
        along = float(((G - compressed_G) * G).sum().abs() / size)
        assert block_report.moments.along == pytest.approx(along, rel=1e-3, abs=1e-7)
        if block_report.step:
            assert new.losses[-1].step == block_report.step
            assert new.losses[-1].frobenius == pytest.approx(block_report.moments.frobenius, rel=1e-5)
            assert new.losses[-1].quadratic == pytest.approx(block_report.moments.quadratic, rel=1e-5)
        else:
            assert new.losses == old.losses
            assert torch.equal(G, compressed_G)
        losses, sizes = [*losses, lost], [*sizes, size]
        traces, lost_traces = [*traces, trace], [*lost_traces, lost_trace]
    assert report.moments.frobenius == pytest.approx(float((sum(losses) / sum(sizes)) ** 0.5), rel=1e-4)
    expected = float(((2 * sum(losses) + sum(lost_traces) ** 2) / (2 * sum(sizes) + sum(traces) ** 2)) ** 0.5)
    assert report.moments.quadratic == pytest.approx(expected, rel=1e-4)


def test_the_error_of_quadratic_agrees_with_many_random_task_vectors():
    before = small_curvature("packed", out=9, inputs=10)
    results = [compressed(before, spec) for spec in ("block:2", "svd:2", "int8")]
    errors, size = torch.zeros(len(results)), 0.0
    for seed in range(3000):
        tau = random_tau(before, seed)
        q = float(before.quadratic(tau))
        errors += torch.tensor([(q - float(after.quadratic(tau))) ** 2 for after, _ in results])
        size += q**2
    expected = (errors / size).sqrt().tolist()
    assert [report.moments.quadratic for _, report in results] == pytest.approx(expected, rel=0.1)


def test_the_error_on_a_given_task_vector():
    before = small_curvature("packed", out=9, inputs=10)
    tau = random_tau(before, 5)
    after, report = compressed(before, "block:2+int8", vector=tau.__getitem__)
    q, compressed_q = float(before.quadratic(tau)), float(after.quadratic(tau))
    assert report.on_vector == pytest.approx((q, compressed_q), rel=1e-5)


def test_very_small_errors_are_not_lost_in_rounding():
    """Values that float16 represents almost exactly: the relative error is 1e-7, its square 1e-14."""
    before = small_curvature("packed-f64")
    block = before.blocks[0]
    B = random_psd(5, 0).half().double()
    exact = block.structure.terms[0][1].dense(torch.float64).half().double()
    B[0, 0] *= 1 + 1e-7
    changed = kp.CurvatureBlock(
        block.name, block.operation, block.join, kp.Kronecker.of(Packed.from_dense(B), Packed.from_dense(exact))
    )
    curvature = kp.Curvature([changed, *before.blocks[1:]], before.about)
    _, report = compressed(curvature, "fp16")
    expected = 1e-7 * float(B[0, 0]) / float(B.norm())
    assert report.blocks[0].moments.frobenius == pytest.approx(expected, rel=1e-3)


def test_bytes_are_those_of_the_file(tmp_path):
    after, report = compressed(small_curvature("dense", out=20, inputs=24), "block:2+int8")
    after.save(tmp_path / "t.kfac")
    bundle = kp.Bundle(tmp_path / "t.kfac")
    assert report.bytes == after.nbytes == sum(tensor.nbytes for tensor in bundle.tensors.values())
    sides = {matrix.name: matrix.side for matrix in bundle.manifest.matrices if matrix.form != "diagonal"}
    assert report.dense_bytes == 4 * sum(side**2 for side in sides.values()) + 4


def test_losses_are_listed_in_the_order_of_the_steps():
    twice = kp.compress(kp.compress(small_curvature("packed", out=20, inputs=24), "block:2"), "int8")
    assert [loss.step for loss in twice.blocks[0].losses] == ["block:2", "int8"]


def test_the_error_of_a_zero_matrix_is_zero():
    assert Moments().frobenius == Moments().quadratic == 0
    before = small_curvature("packed")
    zeros = before.blocks[0].structure.map_matrices(lambda m: Packed.from_dense(torch.zeros(m.side, m.side)))
    block = kp.CurvatureBlock("one.weight", "linear", before.blocks[0].join, zeros)
    small = kp.compress(kp.Curvature([block, *before.blocks[1:]], before.about), "int8")
    assert small.blocks[0].losses[-1].frobenius == 0
    json.dumps([loss.model_dump() for loss in small.blocks[0].losses], allow_nan=False)


def test_diagonals_are_compared_as_vectors():
    """With a side at which the dense matrix would not fit into memory."""
    generator = torch.Generator().manual_seed(0)
    diagonal = torch.rand(300_000, generator=generator)
    before = [Diagonal.of(diagonal)]
    after = [Diagonal.of(diagonal.bfloat16())]
    side, lost = compare(before, after), diagonal.double() - diagonal.bfloat16().double()
    result = moments([1.0], [side])
    assert result.lost == pytest.approx(float(lost.square().sum()))
    assert result.lost_trace == pytest.approx(float(lost.sum()))
    assert result.size == pytest.approx(float(diagonal.double().square().sum()))
