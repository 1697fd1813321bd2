"""Parameters are matched with the operations that use them, in every coding style; other uses are refused."""

from __future__ import annotations

import warnings

import pytest
import torch
from estimation.nets import Transformer, ggn, images, mlp, seeded, vectors
from kit import refused
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import kfacpack as kp


class Net(nn.Module):
    """A function of x and parameters, under a linear head."""

    def __init__(self, use, width=4, **parameters):
        super().__init__()
        for name, value in parameters.items():
            setattr(self, name, nn.Parameter(value))
        self.use = use
        self.head = nn.Linear(width, 3)
        self.double()

    def forward(self, x):
        return self.head(self.use(self, x).tanh())


def net(use, **parameters):
    torch.manual_seed(0)
    return Net(use, **{name: torch.randn(shape) for name, shape in parameters.items()})


STYLES = {
    "linear": (lambda m, x: F.linear(x, m.w), {"w": (4, 5)}, "linear"),
    "x @ W": (lambda m, x: x @ m.w, {"w": (5, 4)}, "matmul"),
    "W @ x": (lambda m, x: (m.w @ x.T).T, {"w": (4, 5)}, "linear"),
    "W.T @ x": (lambda m, x: (m.w.T @ x.T).T, {"w": (5, 4)}, "matmul"),
    "addmm": (lambda m, x: torch.addmm(m.b, x, m.w), {"w": (5, 4), "b": (4,)}, "matmul"),
    "add afterwards": (lambda m, x: x @ m.w + m.b, {"w": (5, 4), "b": (4,)}, "matmul"),
    "einsum": (lambda m, x: torch.einsum("ni,io->no", x, m.w), {"w": (5, 4)}, "matmul"),
    "three dimensions": (lambda m, x: (x[:, None] @ m.w)[:, 0], {"w": (5, 4)}, "matmul"),
    "matrix of more dimensions": (lambda m, x: x @ m.w.flatten(1).T, {"w": (4, 1, 5)}, "linear"),
    "expanded": (lambda m, x: x @ m.w.expand(4, 5).T, {"w": (4, 5)}, "linear"),
}


@pytest.mark.parametrize("style", STYLES)
def test_products_in_every_style_give_the_same_factors(style):
    use, parameters, operation = STYLES[style]
    model, x = net(use, **parameters), vectors(5)
    block = next(block for block in kp.estimate(model, [x], fisher="exact").blocks if block.name == "w")
    assert block.operation == operation
    assert block.parameters == tuple(parameters)
    a = torch.cat([x, torch.ones(len(x), 1)], dim=1).double() if "b" in parameters else x
    matrices = dict(block.structure.matrices())
    torch.testing.assert_close(matrices["A"].dense(torch.float64), a.T @ a / len(x))
    out = use(model, x).detach().requires_grad_()
    g = torch.stack([torch.autograd.grad(model.head(out.tanh())[:, c].sum(), out)[0] for c in range(3)]).flatten(0, 1)
    torch.testing.assert_close(matrices["B"].dense(torch.float64), g.T @ g / len(x))


OTHERS = {
    "scaled weight": (lambda m, x: x @ (0.5 * m.w), {"w": (5, 4)}),
    "one plus scale": (lambda m, x: x[:, :4] * (1 + m.w), {"w": (4,)}),
    "scale of a scale": (lambda m, x: x[:, :4] * (2 * m.w), {"w": (4,)}),
    "difference": (lambda m, x: m.w - 2 * x[:, :4], {"w": (4,)}),
    "quotient": (lambda m, x: x[:, :4] / m.w.exp(), {"w": (4,)}),
    "prelu": (lambda m, x: F.prelu(x[:, :4], m.w), {"w": (4,)}),
    "group norm": (lambda m, x: F.group_norm(x[:, :4, None], 2, m.w)[..., 0], {"w": (4,)}),
    "batch norm": (
        lambda m, x: F.batch_norm(x[:, :4], torch.ones(4).double(), torch.ones(4).double(), m.w),
        {"w": (4,)},
    ),
    "grouped convolution": (lambda m, x: F.conv1d(x[:, :4, None], m.w, groups=2)[..., 0], {"w": (4, 2, 1)}),
    "bias of many frames": (
        lambda m, x: (
            F.conv1d(x[:, :4].reshape(-1, 2, 1), x.new_ones(4, 1, 1), m.w, groups=2)[..., 0]
            .tanh()
            .view(-1, 2, 4)
            .mean(1)
        ),
        {"w": (4,)},
    ),
    "weighted bias": (lambda m, x: torch.addmm(m.w, x, x.new_ones(5, 4), beta=0.5), {"w": (4,)}),
    "outer product": (lambda m, x: torch.outer(x[:, 0], m.w), {"w": (4,)}),
    "matrix times vector": (lambda m, x: (x @ m.w)[:, None].expand(-1, 4), {"w": (5,)}),
    "repeated token": (lambda m, x: m.w.repeat(len(x), 1) * x[:, :4], {"w": (1, 4)}),
    "in a composed matrix": (lambda m, x: x @ (m.w @ x.new_ones(2, 4)), {"w": (5, 2)}),
    "with a tiny factor": (lambda m, x: x[:, :4] + 1e-9 * x[:, 1:] * m.w.exp(), {"w": (4,)}),
    "scalar": (lambda m, x: x[:, :4] * m.w.exp(), {"w": ()}),
    "position table": (lambda m, x: F.embedding(torch.tensor([1, 0, 2, 2]), m.w).T[0] + x[:, :4], {"w": (3, 1)}),
}


@pytest.mark.parametrize("style", OTHERS)
def test_any_other_use_gives_the_dense_ggn(style):
    use, parameters = OTHERS[style]
    model, x = net(use, **parameters), vectors(5)
    block = next(block for block in kp.estimate(model, x.split(3), fisher="exact").blocks if block.name == "w")
    assert isinstance(block.structure, kp.Whole)
    G = block.structure.matrix.dense(torch.float64)
    torch.testing.assert_close(G, ggn(model, x, ["w"]), rtol=1e-9, atol=1e-12)


def test_a_projection_with_several_inputs_has_a_block_per_input():
    class Cross(nn.Module):
        """Queries from one sequence, keys and values from another: rows of in_proj_weight have different inputs."""

        def __init__(self):
            super().__init__()
            self.attn, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)
            self.double()

        def forward(self, x, y):
            return self.head(self.attn(x, y, y, need_weights=False)[0].mean(1))

    model = seeded(Cross)
    x, y = vectors(8, 20).reshape(5, 4, 8), vectors(8, 35).reshape(5, 7, 8)
    blocks = {block.name: block for block in kp.estimate(model, [(x, y)], fisher="exact").blocks}
    assert {"attn.in_proj_weight[0:8]", "attn.in_proj_weight[8:24]"} < set(blocks)
    for name, inputs in (("attn.in_proj_weight[0:8]", x), ("attn.in_proj_weight[8:24]", y)):
        assert set(blocks[name].parameters) == {"attn.in_proj_weight", "attn.in_proj_bias"}
        a = inputs.flatten(0, 1)
        A = dict(blocks[name].structure.matrices())["A"]
        assert A.positions == len(a)
        torch.testing.assert_close(A.dense(torch.float64)[:8, :8], a.T @ a / len(a))


def test_rows_that_are_used_separately_have_separate_blocks():
    model = net(lambda m, x: torch.cat([x @ m.w[:1].T, x.tanh() @ m.w[1:].T], dim=1), w=(4, 5))
    x = vectors(5)
    blocks = {block.name: dict(block.structure.matrices()) for block in kp.estimate(model, x.split(4)).blocks}
    torch.testing.assert_close(blocks["w[0:1]"]["A"].dense(torch.float64), x.T @ x / len(x))
    torch.testing.assert_close(blocks["w[1:4]"]["A"].dense(torch.float64), x.tanh().T @ x.tanh() / len(x))


def test_the_example_dimension_is_found_if_the_first_example_is_zero():
    """Its gradient is zero where the examples are merged with the positions, position by position."""
    model = net(lambda m, x: F.relu(x.transpose(0, 1).reshape(-1, 4) + m.w).view(6, -1, 4).sum(0), w=(4,))
    model.w.data = -model.w.data.abs()
    x = vectors(4, 5 * 6).reshape(5, 6, 4)
    x[0] = 0
    block = next(block for block in kp.estimate(model, [x], fisher="exact").blocks if block.name == "w")
    torch.testing.assert_close(block.structure.matrix.dense(torch.float64), ggn(model, x, ["w"]), rtol=1e-9, atol=1e-12)


def test_layers_with_the_same_input_share_a():
    curvature = kp.estimate(seeded(lambda: Transformer("split")), [images()])
    A = {block.name: dict(block.structure.matrices()).get("A") for block in curvature.blocks}
    assert A["q.weight"] is A["k.weight"] is A["v.weight"]
    assert A["q.weight"] is not A["up.weight"]


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        return 2 * w

    @staticmethod
    def backward(ctx, g):
        return 2 * g


REFUSED = {
    "custom function": (lambda m, x: Twice.apply(m.w) * x[:, :4], {"w": (4,)}, "custom autograd functions"),
    "used twice": (lambda m, x: x[:, :4] @ m.w @ m.w, {"w": (4, 4)}, "'w' is used 2 times"),
    "scale used twice": (lambda m, x: (x[:, :4] * m.w).tanh() * m.w, {"w": (4,)}, "'w' is used 2 times"),
    "mixed examples": (lambda m, x: (x @ m.w).softmax(0), {"w": (5, 4)}, "other examples of its batch"),
    "computed from itself": (lambda m, x: x @ F.normalize(m.w, dim=0), {"w": (5, 4)}, "shared by all examples"),
}


@pytest.mark.parametrize("style", REFUSED)
def test_unsupported_uses_are_named_and_refused(style):
    use, parameters, words = REFUSED[style]
    model, x = net(use, **parameters), vectors(5)
    with pytest.raises(kp.KfacpackError, match=words) as caught:
        kp.estimate(model, [x])
    assert style in ("mixed examples", "custom function") or "Exclude the parameter" in str(caught.value)


def test_tied_weights_are_refused_and_can_be_left_out():
    tied = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
    tied[4].weight = tied[2].weight
    with refused(kp.KfacpackError, "'2.weight'", "2 times", "Addmm, Addmm"):
        kp.estimate(tied, [vectors(5)])
    assert kp.estimate(tied, [vectors(5)], params=["0.*", "*.bias"]).parameters == (
        "0.weight",
        "0.bias",
        "2.bias",
        "4.bias",
    )


def test_parameters_are_chosen_by_name_or_pattern():
    model, x = seeded(Transformer), images()
    assert kp.estimate(model, [x], params="norm?.weight").parameters == ("norm1.weight", "norm2.weight")
    assert kp.estimate(model, [x], params=["up.*", "token"]).parameters == ("token", "up.weight", "up.bias")
    assert kp.estimate(model, [x], params=["up.bias"]).blocks[0].structure.matrix.side == 16
    with refused(kp.KfacpackError, "no parameter", "'nothing'"):
        kp.estimate(model, [x], params=["nothing"])


def test_tables_of_different_size_do_not_share_a():
    class Tables(nn.Module):
        def __init__(self):
            super().__init__()
            self.small, self.large, self.head = nn.Embedding(4, 5), nn.Embedding(9, 5), nn.Linear(5, 3)
            self.double()

        def forward(self, ids):
            return self.head((self.small(ids) * self.large(ids)).tanh().mean(1))

    ids = torch.tensor([[0, 1], [3, 1], [2, 2]])
    blocks = {block.name: dict(block.structure.matrices()) for block in kp.estimate(seeded(Tables), [ids]).blocks}
    counts = torch.tensor([1, 2, 2, 1, 0, 0, 0, 0, 0]).float() / 6
    torch.testing.assert_close(blocks["large.weight"]["A"].components["data"].float(), counts)
    torch.testing.assert_close(blocks["small.weight"]["A"].components["data"].float(), counts[:4])


def test_parameters_that_f_does_not_depend_on_are_left_out():
    model = seeded(mlp)
    model.unused = nn.Linear(3, 3).double()
    model.forward = lambda x: nn.Sequential.forward(model[:5], x)
    curvature = kp.estimate(model, [vectors(5)])
    assert not any(name.startswith("unused") for name in curvature.parameters)
    with refused(kp.KfacpackError, "does not depend", "unused.weight, unused.bias"):
        kp.estimate(model, [vectors(5)], params="unused.*")
    with refused(kp.KfacpackError, "does not depend", "'unused.weight'", "'unused.*'"):
        kp.estimate(model, [vectors(5)], params=["0.weight", "unused.*"])


class Checkpointed(nn.Module):
    """A first layer, if there is one, and a checkpointed one."""

    def __init__(self, reentrant, first):
        super().__init__()
        self.reentrant = reentrant
        self.first, self.inner, self.last = nn.Linear(5, 5) if first else None, nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        h = x if self.first is None else self.first(x)
        return self.last(checkpoint(lambda h: self.inner(h).tanh(), h, use_reentrant=self.reentrant))


@pytest.mark.parametrize("first", [True, False])
def test_reentrant_checkpoints_are_refused(first):
    """Autograd's graph does not contain the parameters of the checkpointed part."""
    model = seeded(lambda: Checkpointed(True, first)).double()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with refused(kp.KfacpackError, "use_reentrant=True", "disable checkpointing", "use_reentrant=False"):
            kp.estimate(model, [vectors(5)])
        with refused(kp.KfacpackError, "use_reentrant=True", "use_reentrant=False"):
            lin = kp.linearize(model)
            lin(vectors(5), lin.zeros())
    model(vectors(5).requires_grad_()).sum().backward()  # still possible elsewhere
    assert model.inner.weight.grad is not None


def test_other_checkpoints_are_accepted_or_refused():
    """With `use_reentrant=False`, kp.linearize is exact; kp.estimate cannot read the inputs of an inner layer."""
    model = seeded(lambda: Checkpointed(False, True)).double()
    with refused(kp.KfacpackError, "torch.utils.checkpoint", "disable checkpointing"):
        kp.estimate(model, [vectors(5)])
    lin = kp.linearize(model)
    tau = {name: torch.randn_like(value).requires_grad_() for name, value in lin.zeros().items()}
    lin(vectors(5), tau).square().sum().backward()
    assert all(value.grad.any() for value in tau.values())


def test_wrong_inputs_are_refused():
    model = seeded(mlp)
    for batches, words in (
        ([], "no batches"),
        (["text"], "expected the batch to be a tensor.*got str"),
        (vectors(5), r"iterable of batches, got a single Tensor.*\[batch\]"),
        ({"input": vectors(5)}, r"iterable of batches, got a single dict.*\[batch\]"),
        ([(vectors(5), torch.zeros(7))], "without labels"),
        (
            [vectors(5).reshape(1, 7, 5)],
            r"got torch.float64 of shape \[2, 7, 3\]|got torch.float64 of shape \[1, 7, 3\]",
        ),
    ):
        with pytest.raises(kp.KfacpackError, match=words):
            kp.estimate(model, batches)
    for params in ([], [3]):
        with refused(kp.KfacpackError, f"params {params}", "one or more"):
            kp.estimate(model, [vectors(5)], params=params)
    with refused(kp.KfacpackError, "two evaluations", "random"):
        # Dropout of three outputs is the same for two examples too often.
        kp.estimate(model, [vectors(5)], forward=lambda x: model(x) + torch.rand(len(x), 3))
    with refused(kp.KfacpackError, "[2, 3]", "batch of size 7"):
        kp.estimate(model, [vectors(5)], forward=lambda x: model(x)[:2])
    with refused(kp.KfacpackError, "'weight'", "not initialised"):
        kp.estimate(nn.LazyLinear(3), [vectors(5)])
    with refused(kp.KfacpackError, "'wavelet:3'", "block:K"):
        kp.estimate(model, [vectors(5)], compress="wavelet:3")


def test_the_rounding_of_a_float32_model_is_accepted_if_f_is_converted_to_float64():
    model = seeded(mlp).float()
    batches = [vectors(5, 64).float()]
    curvature = kp.estimate(model, batches, forward=lambda x: model(x).double(), fisher="exact")
    tau = {name: torch.ones(p.shape) for name, p in model.named_parameters()}
    torch.testing.assert_close(
        curvature.quadratic(tau), kp.estimate(model, batches, fisher="exact").quadratic(tau), check_dtype=False
    )


def test_another_use_of_a_parameter_in_a_later_batch_is_refused():
    use = lambda m, x: torch.bmm(x.transpose(0, 1), m.w.expand(x.shape[1], 5, 4)).mean(0)  # noqa: E731
    first, later = vectors(5, 4).reshape(4, 1, 5), vectors(5, 12).reshape(4, 3, 5)
    with refused(kp.KfacpackError, "block 'w'", "20", "60"):
        kp.estimate(net(use, w=(1, 5, 4)), [first, later])


def test_f_may_be_any_function_of_the_model():
    model, x = seeded(mlp), vectors(5)
    hidden = kp.estimate(model, [x], forward=lambda x: model[:2](x))
    assert hidden.parameters == ("0.weight", "0.bias")
    assert hidden.about.function.width == 6
