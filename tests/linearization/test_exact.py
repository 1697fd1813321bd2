"""f + J τ and its gradient equal brute force on small networks, in every coding style."""

from __future__ import annotations

import pytest
import torch
from estimation.nets import TextEncoder, Transformer, images, jacobian, mlp, seeded, sentences, vectors
from linearization.jvp_reference import assert_exact, cost, random_tau
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import kfacpack as kp


def cnn():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, groups=4), nn.GroupNorm(2, 8), nn.SiLU(inplace=True), nn.ConvTranspose2d(8, 4, 2, stride=2),
        nn.Hardswish(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.5), nn.Linear(4, 3),
    ).double()  # fmt: skip


@pytest.mark.parametrize(("make", "x"), [(mlp, vectors(5)), (cnn, images(3)), (Transformer, images(3))])
def test_outputs_and_gradients_equal_brute_force(make, x):
    model = seeded(make).eval()
    lin = kp.linearize(model)
    tau = random_tau(lin)
    J = jacobian(model, x, lin.parameters)
    flat = torch.cat([value.detach().flatten() for value in tau.values()])
    out = lin(x, tau)
    torch.testing.assert_close(out, model(x) + J @ flat, rtol=1e-9, atol=1e-9)
    u = torch.func.grad(cost)(out.detach())
    cost(out).backward()
    gradient = torch.cat([value.grad.flatten() for value in tau.values()])
    torch.testing.assert_close(gradient, torch.einsum("nc,nci->i", u, J), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("attention", ["fused", "stacked", "separate"])
def test_attention_in_every_style(attention, batch_first, norm):
    assert_exact(seeded(lambda: Transformer(attention, batch_first, norm=norm)), images(4))


def test_masked_attention_in_evaluation_mode_or_not():
    """In evaluation mode, nn.TransformerEncoderLayer has a separate path without gradients."""
    for training in (True, False):
        assert_exact(seeded(TextEncoder).train(training), sentences())


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("mask", [None, "causal", "bool", "some see nothing"])
def test_scaled_dot_product_attention(mask, shared):
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.kv, self.out = nn.Linear(8, 8), nn.Linear(8, 8 if shared else 16), nn.Linear(8, 3)
            self.double()

        def forward(self, x):
            q = self.q(x).view(len(x), 5, 4, 2).transpose(1, 2)
            k, v = self.kv(x).view(len(x), 5, 2, -1, 2).permute(2, 0, 3, 1, 4)
            options = {"is_causal": True} if mask == "causal" else {}
            if mask not in (None, "causal"):
                options["attn_mask"] = torch.ones(5, 5, dtype=torch.bool).tril(0 if mask == "bool" else -1)
            h = F.scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=shared, **options)
            return self.out(h.transpose(1, 2).flatten(2)).mean(1)

    x = torch.randn(3, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    model = seeded(Attends)
    if mask != "some see nothing":
        assert_exact(model, x)
        return
    # Here the gradient through jvp is NaN, but J τ and Jᵀ u must still be adjoint.
    lin = kp.linearize(model)
    tau = random_tau(lin)
    point = lin.at(x, tau)
    u = torch.ones_like(point.f)
    back = point.gradient(u)
    assert float((u * point.change).sum()) == pytest.approx(
        sum(float((back[name] * value.detach()).sum()) for name, value in tau.items()), rel=1e-9
    )


class Doubled(torch.autograd.Function):
    """x² / 2 with a custom derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square().div_(2)

    @staticmethod
    def backward(ctx, u):
        (x,) = ctx.saved_tensors
        return u * x


def written_into(w, x):
    h = torch.zeros(len(x), 2, 4, dtype=x.dtype)
    h[:, 0] = x @ w
    h[:, 1, ::2] = (x @ w)[:, :2]
    h[:, 1, 1] += 3 * h[:, 0, 1]
    h[:, 0, 2].mul_(x[:, 0])
    h[:, 0, 3].zero_()
    return h.flatten(1)


def parts(w, x):
    a, b = (x @ w).chunk(2, dim=1)
    first, *_, last = torch.stack([a, b, a * b], dim=1).unbind(1)
    c, d = torch.split(w, [2, 3], dim=0)
    picked = (x @ w)[torch.tensor([0, 0, 1])[: len(x)]][:, [1, 3]]
    return torch.cat([first, last, a + (c.sum() * d.mean(0))[:2], picked], dim=1)


def turned_in_place(w, x):
    h = (x @ w).unsqueeze_(1).transpose_(1, 2)
    h = h.squeeze_(2).add_(1).mul_(x[:, :1]).t_().masked_fill_(x[:, 0] > 1, 0.0)
    return h.sigmoid_().t()[:, :3]


def products(w, x):
    h = torch.einsum("ni,ij,kj->nk", x, w, w) + torch.addmm(w.mean(1), x, w @ w.T, beta=0.5, alpha=2.0)
    h = h + torch.addmm(x @ (w @ w.T), x, w @ w.T, beta=2) + torch.mv(x, w[:, 0])[:, None]
    batched = torch.baddbmm((x @ w)[:, :1, None], x[:, :, None], (x @ w)[:, None, :], beta=0.3, alpha=0.7)
    return torch.cat([h, torch.outer(w[0] @ w[1] * x[:, 0], w[0]), batched.sum(1)], dim=1)


def numbers(w, x):
    h = F.softplus(x @ w).log() + torch.where(x[:, :4] > 0, w[0], w[1]) ** 2
    h = F.log_softmax(h, dim=-1) + h.cumsum(1) + torch.topk(h, 4).values + h.sort(dim=1).values.logsumexp(1, True)
    return h / h.norm(dim=1, keepdim=True).clamp_min(1e-6) + F.normalize(h.floor() + h, out=None)


def other_types(w, x):
    return (x @ w).float().double() + (x.float() @ w.float()).to(x.dtype) * w.view(-1)[:4]


def with_a_custom_function(w, x):
    return (x @ w) + Doubled.apply(x @ w)


def expanded(w, x):
    return (w[:1].expand(len(x), 4) * x[:, :1]).reshape(len(x), 2, 2).permute(0, 2, 1).reshape(len(x), -1)


def strided(w, x):
    return x @ torch.as_strided(w, (5, 2), (4, 2), 1) @ w[::2].T[:2] + w.new_zeros(3)


def normalised(w, x):
    h = (x @ w)[:, None, :] + w[:3] * x[:, :1, None]
    both, weight_only = F.layer_norm(h, (3, 4), w[:3], w[1:4]), F.layer_norm(x[:, :4], (4,), w[0])
    neither = F.layer_norm(x @ w, (4,)) + F.layer_norm(x[:, :4], (4,), bias=w[0])
    return both.flatten(1)[:, :4] + F.gelu(weight_only) + F.gelu(neither, approximate="tanh")


def sums(w, x):
    h = torch.add(x @ w, w[0], alpha=0.3) + torch.add(x[:, :4], w[1], alpha=-2) + torch.add(w[2], 1.5)
    h = (w[3] + x[:, :1]).clone(memory_format=torch.contiguous_format) * h
    return (h.T + w[:4, :1]).T.reshape(-1, 2).contiguous().view(len(x), 4) + (w[:1].float() + 1)


class Written(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 4, dtype=torch.float64))
        self.function = function

    def forward(self, x):
        return self.function(self.w, x)


@pytest.mark.parametrize(
    ("function", "tolerance"),
    [
        (written_into, 1e-9),
        (parts, 1e-9),
        (turned_in_place, 1e-9),
        (products, 1e-9),
        (numbers, 1e-9),
        (other_types, 1e-6),
        (expanded, 1e-9),
        (strided, 1e-9),
        (normalised, 1e-9),
        (sums, 1e-6),
    ],
)
def test_every_coding_style(function, tolerance):
    assert_exact(seeded(lambda: Written(function)), vectors(5, 3), tolerance)


def checkpointed(w, x):
    return (x @ w) + checkpoint(lambda h: (h @ w).square() / 2, x, use_reentrant=False)


@pytest.mark.parametrize("function", [with_a_custom_function, checkpointed])
def test_custom_functions_and_checkpoints(function):
    """jvp supports neither, so the reference is the same network without them."""
    model, plain = seeded(lambda: Written(function)), seeded(lambda: Written(lambda w, x: (x @ w) + (x @ w) ** 2 / 2))
    x = vectors(5, 3)
    assert_exact(plain, x)
    gradients = []
    for lin in (kp.linearize(model), kp.linearize(plain)):
        tau = random_tau(lin)
        out = lin(x, tau)
        gradients.append((out.detach(), *torch.autograd.grad(cost(out), tau["w"])))
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)


def test_constants_have_neither_tangents_nor_gradients():
    """Tensors that are detached or computed without gradients change neither J τ nor the gradient."""

    def with_constants(w, x):
        with torch.no_grad():
            scale = (x @ w).sum(1, keepdim=True)
        scale.requires_grad_()  # starts a separate graph that does not lead to w
        return (x @ w) * scale + (x @ w).detach() ** 2

    model = seeded(lambda: Written(with_constants))
    x = vectors(5, 3)
    lin = kp.linearize(model)
    tau = random_tau(lin)
    scale = (x @ model.w).sum(1, keepdim=True)
    _, change = lin.outputs(x, tau)
    torch.testing.assert_close(change, ((x @ tau["w"]) * scale).detach())
    lin(x, tau).sum().backward()
    torch.testing.assert_close(tau["w"].grad, (x * scale).sum(0)[:, None].expand(5, 4))


def test_tied_weights_have_one_tangent():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(5, 5), nn.Linear(5, 5)
            self.two.weight = self.one.weight
            self.double()

        def forward(self, x):
            return self.two(torch.tanh(self.one(x)))

    assert assert_exact(seeded(Tied), vectors(5)).parameters == ("one.weight", "one.bias", "two.bias")
