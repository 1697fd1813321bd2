"""The penalty of many blocks: stacks, offloaded and int8 factors, factors that blocks share, and reduced precision."""

from __future__ import annotations

import pytest
import torch
from kit import MATRIX_FORMS, about, linear_join, random_psd, random_tau, refused
from training.test_regularizer import agree, brute

import kfacpack as kp
from kfacpack.curvature.matrices.matrix import StoredOperator
from kfacpack.training import factor_placement
from kfacpack.training.factor_placement import FactorPlacement, FactorStream
from kfacpack.training.penalty_weights import groups_of


def layers_of_equal_shape(stored_as="packed", seed=0, layers=3):
    """Three projections that share A, with rows of one parameter, another of their shape, a norm and a wider layer.

    All of it in each layer.
    """
    make, blocks, state = MATRIX_FORMS[stored_as], [], {}
    for layer in range(layers):
        fused, norm, wide = (f"{layer}.{name}" for name in ("qkv", "norm", "wide"))
        state |= {fused: (9, 4), f"{norm}.weight": (5,), f"{norm}.bias": (5,), f"{wide}.weight": (7, 4)}
        state |= {f"{wide}.bias": (7,), f"{layer}.token": (1, 4)}
        seeds = iter(range(100 * seed + 10 * layer, 10_000))
        A = make(random_psd(4, next(seeds)))
        for start in (0, 3, 6):
            pieces = (kp.Piece(parameter=fused, rows=(start, start + 3)),)
            G = kp.Kronecker.of(make(random_psd(3, next(seeds))), A)
            blocks.append(
                kp.CurvatureBlock(f"{fused}[{start}]", "linear", kp.Join(rows=3, columns=4, pieces=pieces), G)
            )
        state[f"{layer}.out"] = (3, 4)
        join = kp.Join(rows=3, columns=4, pieces=(kp.Piece(parameter=f"{layer}.out"),))
        G = kp.Kronecker.of(make(random_psd(3, next(seeds))), make(random_psd(4, next(seeds))))
        blocks.append(kp.CurvatureBlock(f"{layer}.out", "linear", join, G))
        pieces = (kp.Piece(parameter=f"{norm}.weight"), kp.Piece(parameter=f"{norm}.bias", at=(0, 1)))
        join = kp.Join(rows=5, columns=2, pieces=pieces)
        blocks.append(kp.CurvatureBlock(norm, "layer_norm", join, kp.Whole(make(random_psd(10, next(seeds))))))
        terms = tuple((make(random_psd(7, next(seeds))), make(random_psd(5, next(seeds))), w) for w in (0.5, 2.0))
        blocks.append(kp.CurvatureBlock(wide, "linear", linear_join(wide, 7, 4), kp.Kronecker(terms)))
        join = kp.Join(rows=4, columns=1, pieces=(kp.Piece(parameter=f"{layer}.token", view="column"),))
        blocks.append(kp.CurvatureBlock(f"{layer}.token", "token", join, kp.Whole(make(random_psd(4, next(seeds))))))
    weights = {name: torch.randn(shape, generator=torch.Generator().manual_seed(1)) for name, shape in state.items()}
    return kp.Curvature(blocks, about(weights))


PLACEMENTS = ("stacked", "single", "offloaded")


def placed(regularizer, placement, dtype):
    """Returns the regularizer with its factors streamed, as on a GPU, if they are to be offloaded."""
    if placement == "offloaded":
        factors = FactorPlacement(dtype, torch.device("cpu"))
        factors._offload = True
        regularizer._factors = factors
    return regularizer


@pytest.mark.parametrize("stored_as", MATRIX_FORMS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_blocks_of_equal_shape_are_computed_together(stored_as, placement, monkeypatch):
    """Value, gradient and loss of two bundles with weights equal the dense form, however blocks are batched."""
    if placement == "single":
        monkeypatch.setattr(factor_placement, "STACK_ELEMENTS", 0)
    curvatures = [layers_of_equal_shape(stored_as), layers_of_equal_shape(stored_as, seed=1)]
    weights = {"norm": 5.0, "token": 0.5}
    regularizer = kp.Regularizer(curvatures, 3.0, weights=weights)
    stacks = max(len(batch.blocks) for batch in regularizer._batches)
    assert stacks == (1 if placement == "single" or stored_as.startswith("sparse") else 9)
    tau = random_tau(curvatures[0], dtype=torch.float64)
    groups = groups_of(curvatures[0])
    expected = brute(curvatures, tau, 3.0, lambda block: weights.get(groups[block.name], 1.0))
    agree(placed(regularizer, placement, torch.float64), tau, expected)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in tau.items()}
    regularizer.loss(leaves).backward()
    for name, leaf in leaves.items():
        size = float(expected[1][name].abs().max())
        torch.testing.assert_close(leaf.grad, expected[1][name], rtol=1e-9, atol=1e-9 * size)
    some = {name: tau[name] for name in ("0.qkv", "1.norm.bias", "2.wide.weight")}
    expected = brute(curvatures, some, 3.0, lambda block: weights.get(groups[block.name], 1.0))
    agree(placed(kp.Regularizer(curvatures, 3.0, weights=weights), placement, torch.float64), some, expected)


def test_large_blocks_are_not_stacked(monkeypatch):
    curvature = layers_of_equal_shape()
    monkeypatch.setattr(factor_placement, "STACK_ELEMENTS", 40)
    batches = kp.Regularizer(curvature)._batches
    sizes = {batch.blocks[0].name: len(batch.blocks) for batch in batches}
    assert sizes["0.wide"] == 1
    assert sizes["0.qkv[0]"] == 3, "blocks that share a matrix stay together"
    assert sizes["0.out"] == 3, "blocks of their shape that do not are apart"
    assert sizes["0.token"] == 3
    order = [block.name for block in curvature.blocks]
    first = [order.index(batch.blocks[0].name) for batch in batches]
    assert first == sorted(first)


def stored_bytes(curvature):
    """The size of all matrices in a file, where a shared one is stored once."""
    matrices = {id(matrix): matrix for block in curvature.blocks for _, matrix in block.structure.matrices()}
    return sum(matrix.for_storage().nbytes for matrix in matrices.values())


FORMS = ["packed", "dense", "block-int8", "packed-int8", "packed-bf16", "sparse", "sparse-int8"]


@pytest.mark.parametrize("stored_as", FORMS)
@pytest.mark.parametrize("stacked", [True, False])
def test_offloaded_factors_are_copied_as_they_are_stored(stored_as, stacked, monkeypatch):
    """Every matrix is copied once, in the size of its tensors in a file; a shared one is not repeated."""
    if not stacked:
        monkeypatch.setattr(factor_placement, "STACK_ELEMENTS", 0)
    curvature, copied = layers_of_equal_shape(stored_as), []
    regularizer = placed(kp.Regularizer(curvature, 3.0), "offloaded", torch.float32)
    start = FactorStream._start_copy
    monkeypatch.setattr(
        FactorStream, "_start_copy", lambda self, host, slot: copied.append(host.pack.nbytes) or start(self, host, slot)
    )
    regularizer.value(random_tau(curvature))
    assert sum(copied) == stored_bytes(curvature)
    stream = regularizer._factors._stream
    assert [buffer.numel() for buffer in stream._buffers] == [max(copied)] * 2
    buffers = [buffer.data_ptr() for buffer in stream._buffers]
    regularizer.value(random_tau(curvature))
    assert regularizer._factors._stream is stream
    assert [buffer.data_ptr() for buffer in stream._buffers] == buffers


@pytest.mark.parametrize("stored_as", FORMS)
@pytest.mark.parametrize("placement", ["single", "offloaded"])
def test_a_shared_factor_is_unpacked_once(stored_as, placement, monkeypatch):
    """Single blocks of two layers, of which three share a factor each."""
    monkeypatch.setattr(factor_placement, "STACK_ELEMENTS", 0)
    curvature, calls = layers_of_equal_shape(stored_as, layers=2), []
    regularizer = placed(kp.Regularizer(curvature, 3.0), placement, torch.float32)
    regularizer.value(random_tau(curvature))
    unpack = StoredOperator._unpack
    monkeypatch.setattr(StoredOperator, "_unpack", lambda self, dtype: calls.append(self) or unpack(self, dtype))
    regularizer.value(random_tau(curvature))
    matrices = {id(matrix) for block in curvature.blocks for _, matrix in block.structure.matrices()}
    is_kept = placement == "single" and not stored_as.endswith("int8")
    assert len(calls) == (0 if is_kept else len(matrices))


def cross_attention(layers=3):
    """Keys of all layers are computed from the same inputs; other blocks are between them."""
    keys, others = [f"{layer}.key" for layer in range(layers)], [f"{layer}.other" for layer in range(layers)]
    A, make = MATRIX_FORMS["packed-int8"](random_psd(4, 100)), MATRIX_FORMS["packed-int8"]
    blocks = []
    for number, name in enumerate(name for pair in zip(keys, others, strict=True) for name in pair):
        own = A if name in keys else make(random_psd(4, 200 + number))
        join = kp.Join(rows=3, columns=4, pieces=(kp.Piece(parameter=name),))
        blocks.append(kp.CurvatureBlock(name, "linear", join, kp.Kronecker.of(make(random_psd(3, number)), own)))
    return kp.Curvature(blocks, about({block.name: torch.randn(3, 4) for block in blocks}))


@pytest.mark.parametrize("placement", ["single", "offloaded"])
def test_a_factor_that_distant_blocks_share_is_copied_and_unpacked_once(placement, monkeypatch):
    monkeypatch.setattr(factor_placement, "STACK_ELEMENTS", 0)
    curvature, unpacked, copied = cross_attention(), [], []
    tau = random_tau(curvature, dtype=torch.float64)
    agree(placed(kp.Regularizer(curvature, 3.0), placement, torch.float64), tau, brute([curvature], tau, 3.0))
    unpack, start = StoredOperator._unpack, FactorStream._start_copy
    monkeypatch.setattr(StoredOperator, "_unpack", lambda self, dtype: unpacked.append(self) or unpack(self, dtype))
    monkeypatch.setattr(
        FactorStream, "_start_copy", lambda self, host, slot: copied.append(host.pack.nbytes) or start(self, host, slot)
    )
    placed(kp.Regularizer(curvature, 3.0), placement, torch.float32).value(random_tau(curvature))
    assert len(unpacked) == 2 * len(curvature.blocks) - 2, "the keys of three layers share one factor"
    assert sum(copied) == (stored_bytes(curvature) if placement == "offloaded" else 0)


def test_int8_factors_stay_int8():
    curvature = layers_of_equal_shape("packed-int8")
    regularizer = kp.Regularizer(curvature, 3.0)
    regularizer.value(random_tau(curvature))
    operators = regularizer._factors._operators.values()
    assert all(operator.tensors[0].dtype is torch.int8 for operator in operators)


@pytest.mark.parametrize("stored_as", MATRIX_FORMS)
def test_reduced_precision_and_its_error(stored_as):
    curvature = layers_of_equal_shape(stored_as)
    tau = random_tau(curvature)
    rounded = kp.Regularizer(curvature, 3.0, precision="bf16")
    error = rounded.precision_loss(tau)
    value, grads = kp.Regularizer(curvature, 3.0).value(tau), {}
    assert error.value == pytest.approx(float(abs(rounded.value(tau) - value) / value), rel=1e-2, abs=1e-6)
    assert 1e-5 < error.gradient < 2e-2
    assert abs(error.value) < 2e-2
    rounded.add_grad(tau, grads)
    assert all(grads[name].dtype is torch.float32 for name in tau)
    assert rounded.settings["penalty_precision"] == "bf16"
    assert rounded.precision_loss({name: torch.zeros_like(tensor) for name, tensor in tau.items()}) == (0, 0)


def test_tf32_is_allowed_during_the_penalty_only():
    curvature = layers_of_equal_shape()
    tau = random_tau(curvature)
    before = torch.get_float32_matmul_precision()
    error = kp.Regularizer(curvature, 3.0, precision="tf32").precision_loss(tau)
    assert torch.get_float32_matmul_precision() == before
    assert max(error) < 1e-2
    with refused(kp.KfacpackError, "unknown precision 'fp8'", "'bf16'"):
        kp.Regularizer(curvature, precision="fp8")
