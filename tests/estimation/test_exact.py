"""Exact factors and blocks equal those of brute force."""

from __future__ import annotations

import pytest
import torch
from estimation.nets import EXAMPLES, Transformer, deep_linear, factors, ggn, images, jacobian, mlp, seeded, vectors
from torch import nn

import kfacpack as kp


def block_of(curvature, name):
    return next(block for block in curvature.blocks if block.name == name)


def dense(block):
    """Returns the dense G of a block over its joined parameters."""
    matrices = dict(block.structure.matrices())
    if "G" in matrices:
        return matrices["G"].dense(torch.float64)
    return torch.kron(matrices["B"].dense(torch.float64), matrices["A"].dense(torch.float64))


def joined(G, block, model):
    """Reorders a brute-force G over [weight, bias], both flattened, to the order of the join."""
    shapes = {name: p.shape for name, p in model.named_parameters()}
    weight, *bias = block.parameters
    rows, columns = block.join.rows, block.join.columns
    index = torch.arange(shapes[weight].numel()).reshape(shapes[weight][0], -1)
    index = index.T if block.join.pieces[0].view == "transposed" else index
    if bias:
        index = torch.cat([index, shapes[weight].numel() + torch.arange(rows)[:, None]], dim=1)
    assert index.shape == (rows, columns)
    return G[index.flatten()][:, index.flatten()]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_blocks_of_deep_linear_nets_equal_the_ggn(bias):
    model = seeded(lambda: deep_linear(bias))
    x = vectors(5)
    curvature = kp.estimate(model, x.split(3), fisher="exact")
    assert len(curvature.blocks) == 3
    for block in curvature.blocks:
        expected = joined(ggn(model, x, block.parameters), block, model)
        torch.testing.assert_close(dense(block), expected, rtol=1e-9, atol=1e-12)


def test_blocks_of_one_example_with_one_position_equal_the_ggn():
    model, x = seeded(mlp), vectors(5, 1)
    for block in kp.estimate(model, [x], fisher="exact").blocks:
        expected = joined(ggn(model, x, block.parameters), block, model)
        torch.testing.assert_close(dense(block), expected, rtol=1e-9, atol=1e-12)


NETS = {
    "mlp": (mlp, lambda: vectors(5)),
    "mlp-no-bias": (lambda: mlp(False), lambda: vectors(5)),
    "split": (lambda: Transformer("split"), images),
    "stacked": (lambda: Transformer("stacked"), images),
}


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_factors_equal_their_definition(net, sharing):
    make, inputs = NETS[net]
    model, x = seeded(make), inputs()
    curvature = kp.estimate(model, x.split(3), fisher="exact", sharing=sharing)
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert layers
    for layer in layers:
        matrices = dict(block_of(curvature, f"{layer}.weight").structure.matrices())
        B, A = factors(model, x, layer, reduce=sharing == "reduce")
        torch.testing.assert_close(matrices["B"].dense(torch.float64), B, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(matrices["A"].dense(torch.float64), A, rtol=1e-9, atol=1e-12)


def test_reduce_is_exact_where_positions_are_averaged():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(5, 4), nn.Linear(4, 3)
            self.double()

        def forward(self, x):
            return self.two(self.one(x)).mean(1)

    model = seeded(Pooled)
    x = vectors(5, EXAMPLES * 4).reshape(EXAMPLES, 4, 5)
    for block in kp.estimate(model, [x], fisher="exact", sharing="reduce").blocks:
        expected = joined(ggn(model, x, block.parameters), block, model)
        torch.testing.assert_close(dense(block), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch-first", "sequence-first"])
def test_blocks_of_norms_tokens_positions_and_scales_equal_the_ggn(norm, batch_first):
    model, x = seeded(lambda: Transformer("fused", batch_first, norm=norm)), images()
    curvature = kp.estimate(model, x.split(3), fisher="exact")
    wholes = [block for block in curvature.blocks if isinstance(block.structure, kp.Whole)]
    names = {name for block in wholes for name in block.parameters}
    expected = {"token", "positions", "scale", "norm1.weight", "norm2.weight"}
    assert names == expected | ({"norm1.bias", "norm2.bias"} if norm == "layer" else set())
    for block in wholes:
        torch.testing.assert_close(dense(block), ggn(model, x, block.parameters), rtol=1e-9, atol=1e-12)


def test_fused_attention_equals_one_stacked_layer():
    fused, stacked = seeded(lambda: Transformer("fused")), seeded(lambda: Transformer("stacked"))
    state = stacked.state_dict()
    state["attn.in_proj_weight"], state["attn.in_proj_bias"] = state.pop("qkv.weight"), state.pop("qkv.bias")
    state["attn.out_proj.weight"], state["attn.out_proj.bias"] = state.pop("out.weight"), state.pop("out.bias")
    fused.load_state_dict(state)
    x = images()
    torch.testing.assert_close(fused(x), stacked(x))
    ours, theirs = (kp.estimate(model, [x], fisher="exact") for model in (fused, stacked))
    for name, other in (("attn.in_proj_weight", "qkv.weight"), ("attn.out_proj.weight", "out.weight")):
        assert block_of(ours, name).parameters == (name, name.replace("weight", "bias"))
        torch.testing.assert_close(dense(block_of(ours, name)), dense(block_of(theirs, other)), rtol=1e-9, atol=1e-12)


def test_a_convolution_is_a_product_with_its_patches():
    """A stem whose patches do not overlap is a linear layer on cut-up images."""
    conv = Transformer("split")
    x = images()

    class Cut(Transformer):
        def __init__(self):
            super().__init__("split", stem=False)
            self.patch = nn.Linear(48, 8)
            self.double()

        def forward(self, x):
            cut = nn.functional.unfold(x, 4, stride=4).transpose(1, 2)
            return super().forward(self.patch(cut))

    cut = Cut()
    state = {name: value for name, value in conv.state_dict().items() if not name.startswith("conv.")}
    state |= {"patch.weight": conv.conv.weight.detach().flatten(1), "patch.bias": conv.conv.bias.detach()}
    cut.load_state_dict(state)
    ours = block_of(kp.estimate(conv, [x], fisher="exact"), "conv.weight")
    theirs = block_of(kp.estimate(cut, [x], fisher="exact"), "patch.weight")
    assert ours.operation == "convolution"
    torch.testing.assert_close(dense(ours), dense(theirs), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("dilation", "stride", "padding"), [(1, 1, 1), (2, 1, 0), (1, 2, (1, 0))])
def test_overlapping_convolutions_count_every_patch(dilation, stride, padding):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, stride, padding, dilation)
            self.head = nn.Linear(4, 3)
            self.double()

        def forward(self, x):
            return self.head(self.conv(x).tanh().mean((2, 3)))

    model, x = seeded(Net), images()
    matrices = dict(block_of(kp.estimate(model, [x], fisher="exact"), "conv.weight").structure.matrices())
    patches = nn.functional.unfold(x, 3, dilation, padding, stride).transpose(1, 2).reshape(-1, 27)
    patches = torch.cat([patches, torch.ones_like(patches[:, :1])], dim=1)
    torch.testing.assert_close(matrices["A"].dense(torch.float64), patches.T @ patches / len(patches))
    assert matrices["A"].positions == len(patches)
    out = model.conv(x).detach().requires_grad_()
    g = [torch.autograd.grad(model.head(out.tanh().mean((2, 3)))[:, c].sum(), out)[0] for c in range(3)]
    g = torch.stack(g).movedim(2, -1).reshape(-1, 4)
    torch.testing.assert_close(matrices["B"].dense(torch.float64), g.T @ g / len(x))


@pytest.mark.parametrize("make", [mlp, lambda: Transformer("fused"), lambda: Transformer("split", norm="rms")])
def test_diagonal_structure_equals_the_diagonal_of_the_ggn(make):
    model = seeded(make)
    x = images() if isinstance(model, Transformer) else vectors(5)
    curvature = kp.estimate(model, x.split(2), fisher="exact", structure="diagonal")
    assert set(curvature.parameters) == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        expected = jacobian(model, x, [name]).square().sum(1).mean(0)
        diagonal = curvature.apply({name: torch.ones_like(parameter).detach()})[name].flatten()
        torch.testing.assert_close(diagonal, expected, rtol=1e-9, atol=1e-12)


def test_large_parameters_that_are_not_matrices_get_a_diagonal():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(5000))
            self.head = nn.Linear(5000, 3)
            self.double()

        def forward(self, x):
            return self.head((x @ x.new_ones(5, 5000) + self.table).tanh())

    model, x = seeded(Net), vectors(5, 3)
    block = block_of(kp.estimate(model, [x], fisher="exact"), "table")
    expected = jacobian(model, x, ["table"]).square().sum(1).mean(0)
    torch.testing.assert_close(block.structure.matrix.components["data"], expected, rtol=1e-9, atol=1e-12)


def test_block_diagonal_sums_equal_the_blocks_of_the_full_matrix():
    model, x = seeded(lambda: Transformer("split")), images()
    whole = kp.estimate(model, x.split(3), params=["up.*", "q.*", "proj"])
    blocks = kp.estimate(model, x.split(3), params=["up.*", "q.*", "proj"], compress="block:3")
    for ours, theirs in zip(blocks.blocks, whole.blocks, strict=True):
        for (_, matrix), (_, full) in zip(ours.structure.matrices(), theirs.structure.matrices(), strict=True):
            assert matrix.form == "block"
            expected = kp.BlockDiagonal.from_dense(full.dense(torch.float64), 3).dense(torch.float64)
            torch.testing.assert_close(matrix.dense(torch.float64), expected)


def test_wide_factors_are_block_diagonal_by_default(monkeypatch):
    """Only wide factors; their blocks are those of the whole factor, and the other entries are an unmeasured loss."""
    from kfacpack.estimation import collectors

    monkeypatch.setattr(collectors, "WIDE_SIDE", 9)
    monkeypatch.setattr(collectors, "WIDE_BLOCKS", 2)
    model, x = nn.Sequential(nn.Linear(12, 8, bias=False), nn.Tanh(), nn.Linear(8, 3)).double(), vectors(12)
    default, whole = (kp.estimate(model, [x], fisher="exact", compress=codec) for codec in (None, "block:1"))
    first, second = default.blocks
    wide, other = (dict(curvature.blocks[0].structure.matrices())["A"] for curvature in (default, whole))
    assert wide.form == "block"
    kept = torch.block_diag(torch.ones(6, 6), torch.ones(6, 6)).double()
    torch.testing.assert_close(wide.dense(torch.float64), kept * other.dense(torch.float64), rtol=1e-9, atol=1e-12)
    assert first.losses
    assert not second.losses
    assert {matrix.form for _, matrix in second.structure.matrices()} == {"packed"}
