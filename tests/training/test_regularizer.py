"""The curvature penalty equals autograd of the dense quadratic form, for every form of a block."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from kit import (
    MATRIX_FORMS,
    dense_block,
    of_task,
    random_psd,
    random_tau,
    refused,
    small_curvature,
    warned,
)

import kfacpack as kp
from kfacpack.curvature.blocks import gather
from kfacpack.training.penalty_weights import groups_of
from kfacpack.training.regularizer import OwnTaskWarning


def brute(curvatures, tau, strength, factor=lambda block: 1.0):
    """Returns λ Σ factor τᵀ G τ and its gradient, from dense G by autograd."""
    leaves = {name: tensor.detach().double().requires_grad_() for name, tensor in tau.items()}
    total = torch.zeros((), dtype=torch.float64)
    for curvature in curvatures:
        shapes = {p.name: p.shape for p in curvature.about.base.parameters}
        for block in curvature.blocks:
            if any(name in leaves for name in block.parameters):
                x = gather(leaves, block.join, shapes).reshape(-1)
                total = total + strength * factor(block) * (x @ dense_block(block) @ x)
    gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    grads = {n: torch.zeros_like(leaves[n]) if g is None else g for n, g in zip(leaves, gradients, strict=True)}
    return total.detach(), grads


def agree(regularizer, tau, expected, rtol=1e-9):
    value, gradient = expected
    torch.testing.assert_close(regularizer.value(tau).double(), value, rtol=rtol, atol=0)
    grads: dict[str, torch.Tensor] = {}
    torch.testing.assert_close(regularizer.add_grad(tau, grads).double(), value, rtol=rtol, atol=0)
    size = max(float(g.abs().max()) for g in gradient.values())
    for name, actual in grads.items():
        torch.testing.assert_close(actual.double(), gradient[name], rtol=rtol, atol=rtol * size)
    assert all(not gradient[name].any() for name in gradient.keys() - grads.keys())


@pytest.mark.parametrize("stored_as", MATRIX_FORMS)
@pytest.mark.parametrize("offload", [False, True])
def test_every_form_equals_autograd_of_the_dense_form(stored_as, offload):
    curvature = small_curvature(stored_as)
    tau = random_tau(curvature, dtype=torch.float64)
    agree(kp.Regularizer(curvature, 3.0, offload=offload), tau, brute([curvature], tau, 3.0))


@pytest.mark.parametrize("stored_as", MATRIX_FORMS)
def test_as_a_term_of_a_loss_it_has_the_same_gradient(stored_as):
    """Gradients flow through what τ is computed from, and only to tensors that require them."""
    curvature = small_curvature(stored_as)
    tau = random_tau(curvature, dtype=torch.float64)
    value, expected = brute([curvature], tau, 3.0)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in tau.items()}
    still = next(iter(leaves))
    leaves[still].requires_grad_(False)
    doubled = {name: 2 * leaf for name, leaf in leaves.items()}
    loss = kp.Regularizer(curvature, 3.0).loss({**doubled, "other": torch.ones(2, requires_grad=True)})
    torch.testing.assert_close(loss.detach(), 4 * value, rtol=1e-9, atol=0)
    (0.5 * loss).backward()
    assert leaves[still].grad is None
    for name in leaves.keys() - {still}:
        size = float(expected[name].abs().max())
        torch.testing.assert_close(leaves[name].grad, 2 * expected[name], rtol=1e-9, atol=1e-9 * size)
    assert not kp.Regularizer(curvature, 3.0).loss(tau).requires_grad


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("stored_as", MATRIX_FORMS)
def test_offloaded_factors_give_the_same_result_on_a_gpu(stored_as):
    curvature = small_curvature(stored_as)
    tau = random_tau(curvature, dtype=torch.float64)
    expected = brute([curvature], tau, 3.0)
    for tensors, options in (({n: t.cuda() for n, t in tau.items()}, {}), (tau, {"device": "cuda"})):
        for offload in (False, True):
            regularizer = kp.Regularizer(curvature, 3.0, offload=offload, **options)
            grads: dict[str, torch.Tensor] = {}
            torch.testing.assert_close(regularizer.add_grad(tensors, grads).cpu(), expected[0])
            for name, actual in grads.items():
                torch.testing.assert_close(actual.cpu(), expected[1][name])


@pytest.mark.parametrize("stored_as", ["packed", "block", "block-int8", "sparse"])
def test_float32_is_accurate(stored_as):
    curvature = small_curvature(stored_as)
    tau = random_tau(curvature)
    agree(kp.Regularizer(curvature, 3.0), tau, brute([curvature], tau, 3.0), rtol=1e-5)


def test_blocks_of_uneven_length_and_few_entries():
    G = random_psd(41, 5)
    state = {"w": torch.randn(41, 41)}
    about = kp.About(
        base=kp.identify(state, ["w"], family="test", name="one"),
        function=kp.Function(output="other", normalized=True, width=41),
    )
    join = kp.Join(rows=41, columns=41, pieces=(kp.Piece(parameter="w"),))
    for matrix in (kp.BlockDiagonal.from_dense(G, 8), kp.Sparse.from_dense(G, 0.01), kp.Sparse.from_dense(G, 0.9)):
        curvature = kp.Curvature(
            [kp.CurvatureBlock("w", "linear", join, kp.Kronecker.of(matrix, kp.Dense.of(G)))], about
        )
        tau = random_tau(curvature, dtype=torch.float64)
        agree(kp.Regularizer(curvature, 1.0), tau, brute([curvature], tau, 1.0))


def test_bundles_from_files_add_up(tmp_path):
    curvatures = [of_task("one", seed=1), of_task("two", seed=2, stored_as="block"), of_task("three", seed=3)]
    paths = [tmp_path / f"{number}.kfac" for number in range(3)]
    for curvature, path in zip(curvatures, paths, strict=True):
        curvature.save(path)
    tau = random_tau(curvatures[0], dtype=torch.float64)
    regularizer = kp.Regularizer(paths, 0.5)
    agree(regularizer, tau, brute(curvatures, tau, 0.5))
    assert regularizer.tasks == ("one", "two", "three")
    assert regularizer.digests == tuple(kp.load(path).digest for path in paths)


def test_gradients_are_added_to_existing_ones():
    curvature = small_curvature("packed")
    tau = {name: tensor.requires_grad_() for name, tensor in random_tau(curvature, dtype=torch.float64).items()}
    tau["proj"].grad = torch.ones_like(tau["proj"])
    regularizer = kp.Regularizer(curvature, 2.0)
    value = regularizer.add_grad(tau)
    assert not value.requires_grad
    _, expected = brute([curvature], tau, 2.0)
    torch.testing.assert_close(tau["proj"].grad, 1 + expected["proj"])
    torch.testing.assert_close(tau["one.bias"].grad, expected["one.bias"])
    regularizer.add_grad(tau)
    torch.testing.assert_close(tau["one.bias"].grad, 2 * expected["one.bias"])


def test_gradients_that_would_be_lost_are_refused():
    """A task vector creates its tensors at each access, so their `.grad` would be lost."""
    from vectors.small_vectors import network, vector

    curvature, tau = kp.estimate(network(), [torch.randn(6, 4)]), vector()
    regularizer = kp.Regularizer(curvature, 2.0)
    with refused(kp.KfacpackError, "TaskVector", "add_grad(tau, grads)"):
        regularizer.add_grad(tau)
    grads = dict.fromkeys(tau)  # as a module's `.grad` are before the first backward
    value = regularizer.add_grad(tau, grads)
    assert torch.equal(value, regularizer.value(tau))
    for name, product in curvature.apply(tau).items():
        torch.testing.assert_close(grads[name], 4 * product / regularizer.output_scale)
    with refused(kp.KfacpackError, "grads: expected a dict", "got TaskVector"):
        regularizer.add_grad(tau, tau)
    with refused(kp.KfacpackError, "gradient of '0.bias'", "expected shape [5], got [3]"):
        regularizer.add_grad(tau, {"0.bias": torch.zeros(3)})


def test_a_subset_of_the_parameters_and_uncovered_ones():
    curvature = small_curvature("packed")
    whole = random_tau(curvature, dtype=torch.float64)
    tau = {name: whole[name] for name in ("one.bias", "attn.in_proj_weight", "scale")}
    regularizer = kp.Regularizer(curvature, 2.0)
    agree(regularizer, tau, brute([curvature], tau, 2.0))
    grads: dict[str, torch.Tensor] = {}
    regularizer.add_grad({**tau, "free.weight": torch.ones(3)}, grads)
    assert grads.keys() == tau.keys()


def test_autocast_does_not_affect_the_penalty():
    curvature = small_curvature("packed")
    tau = random_tau(curvature)
    with torch.autocast("cpu", torch.bfloat16):
        inside = kp.Regularizer(curvature, 1.0).value(tau)
    assert torch.equal(inside, kp.Regularizer(curvature, 1.0).value(tau))


def test_groups_and_weights():
    curvature = _with_width(small_curvature("packed"), 2)
    assert groups_of(curvature)["proj"] == "projection"
    assert groups_of(curvature)["norm"] == "norm"
    assert groups_of(small_curvature())["proj"] == "matmul", "not as wide as f"
    tau = random_tau(curvature, dtype=torch.float64)
    weights = {"norm": 5.0, "projection": 0.25, "linear": 0.0}
    expected = brute([curvature], tau, 3.0, lambda block: weights.get(groups_of(curvature)[block.name], 1.0))
    agree(kp.Regularizer(curvature, 3.0, weights=weights), tau, expected)
    with refused(kp.KfacpackError, "group 'norms'", "norm, projection"):
        kp.Regularizer(curvature, weights={"norms": 1.0})
    with refused(kp.KfacpackError, "weight of 'norm' is -1"):
        kp.Regularizer(curvature, weights={"norm": -1.0})


NORMS = {
    "batch norm": (lambda: torch.nn.BatchNorm2d(4), (6, 4, 3, 3)),
    "batch norm of vectors": (lambda: torch.nn.BatchNorm1d(4), (6, 4)),
    "group norm": (lambda: torch.nn.GroupNorm(2, 4), (6, 4, 3, 3)),
    "layer norm": (lambda: torch.nn.LayerNorm(4), (6, 4)),
    "RMS norm": (lambda: torch.nn.RMSNorm(4), (6, 4)),
}


@pytest.mark.parametrize("kind", NORMS)
def test_every_norm_is_in_the_group_of_norms(kind):
    """As an estimate names its operation, so that `--weight norm=` and preset "tak" reach it."""
    build, shape = NORMS[kind]
    norm = build()
    model = torch.nn.Sequential(norm, torch.nn.Flatten(), torch.nn.Linear(torch.Size(shape[1:]).numel(), 3)).eval()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    curvature = kp.estimate(model, [x])
    groups = groups_of(curvature)
    assert [groups[name] for name in groups if name.startswith("0.")] == ["norm"] * len(list(norm.parameters()))
    assert groups["2.weight"] == "linear"
    tau = {name: torch.ones_like(parameter) for name, parameter in norm.named_parameters(prefix="0")}
    plain, weighted = (kp.Regularizer(curvature, 1.0, weights=weights) for weights in (None, {"norm": 10.0}))
    torch.testing.assert_close(weighted.value(tau), 10 * plain.value(tau))
    published = kp.Regularizer(curvature, 1.0, preset="tak")
    torch.testing.assert_close(published.value(tau), 10 * plain.output_scale * plain.value(tau))


@pytest.mark.parametrize("operation", ["native_batch_norm", "cudnnbatchnorm", "native_group_norm", "fusedrmsnorm"])
def test_norms_of_other_devices_and_writers_are_in_the_group(operation):
    curvature = small_curvature("packed")
    blocks = [replace(block, operation=operation) if block.name == "norm" else block for block in curvature.blocks]
    assert groups_of(kp.Curvature(blocks, curvature.about))["norm"] == "norm"


class Tokens(torch.nn.Module):
    """A class token, positions, a norm, a layer, and a bare projection, as in CLIP's vision tower."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.token = torch.nn.Parameter(torch.randn(4))
        self.norm = torch.nn.LayerNorm(4)
        self.layer = torch.nn.Linear(4, 5)
        self.proj = torch.nn.Parameter(torch.randn(5, 3))

    def forward(self, x):
        return torch.tanh(self.layer(self.norm(self.with_token(x)))).mean(1) @ self.proj

    def with_token(self, x):
        return torch.cat([self.token.expand(len(x), 1, 4), x], 1)


def test_preset_is_the_published_weighting():
    """The published formulas, from inputs and gradients: A and B are means over examples and positions."""
    N, R, C = 6, 5, 3
    model, x = Tokens(), torch.randn(N, R - 1, 4, generator=torch.Generator().manual_seed(1))
    curvature = kp.estimate(
        model, [x], fisher="exact", function=kp.Function(output="embedding", normalized=False, width=C)
    )
    assert groups_of(curvature)["token"] == "token"
    normed = model.norm(model.with_token(x)).detach()
    hidden = model.layer(normed).detach().requires_grad_()
    pooled = torch.tanh(hidden).mean(1)
    f = pooled @ model.proj
    a = torch.cat([normed, torch.ones(N, R, 1)], -1).reshape(-1, 5)
    A = a.T @ a / (N * R)
    B = torch.zeros(5, 5)
    for c in range(C):
        (g,) = torch.autograd.grad(f[:, c].sum(), hidden, retain_graph=True)
        B += g.reshape(-1, 5).T @ g.reshape(-1, 5) / (N * R)
    tau = {name: torch.randn(p.shape) for name, p in model.named_parameters()}
    dw = torch.cat([tau["layer.weight"], tau["layer.bias"][:, None]], 1)
    layer = (dw * (B @ dw @ A)).sum()
    p = pooled.detach()
    projection = (tau["proj"].T * (tau["proj"].T @ (p.T @ p / N))).sum()
    norms = sum(
        curvature.quadratic({name: tau[name]}) for name in ("norm.weight", "norm.bias")
    )  # dense blocks are means over examples in both
    state = {name: p.detach() for name, p in model.named_parameters()}
    J = torch.func.jacrev(lambda token: torch.func.functional_call(model, {**state, "token": token}, (x,)))
    token = (J(state["token"]) @ tau["token"]).square().sum() / N
    penalty = kp.Regularizer(curvature, 7.0, preset="tak").value(tau)
    expected = 7.0 * (layer + 0.1 * projection + 10 * norms + 10 * token).detach()
    torch.testing.assert_close(penalty, expected, rtol=1e-4, atol=0)
    alone = kp.Regularizer(curvature, 7.0, preset="tak").value({"token": tau["token"]})
    torch.testing.assert_close(alone, 70.0 * token, rtol=1e-4, atol=0)


def test_preset_needs_positions_and_a_known_model():
    with refused(kp.KfacpackError, "'one.weight'", "number of positions", "'tak'"):
        kp.Regularizer(small_curvature("packed"), 1.0, preset="tak")
    with refused(kp.KfacpackError, "'tak'", "no published strength for small", "set --strength (strength)"):
        kp.Regularizer(small_curvature("packed"), preset="tak")
    with refused(kp.KfacpackError, "preset 'tek'", "expected 'tak'"):
        kp.Regularizer(small_curvature("packed"), preset="tek")


def test_another_model_or_another_f_is_refused():
    curvature = small_curvature("packed")
    generator = torch.Generator().manual_seed(0)
    state = {p.name: torch.randn(p.shape, generator=generator) for p in curvature.about.base.parameters}
    regularizer = kp.Regularizer(curvature)
    regularizer.check(state, curvature.about.function)
    state["norm.bias"] = state["norm.bias"] + 1
    with refused(kp.KfacpackError, "input 1: was estimated for small", "'norm.bias' has sha256"):
        regularizer.check(state)
    with refused(kp.KfacpackError, "different f", "normalised embedding of width 4; logits of width 9"):
        regularizer.check(state, kp.Function(output="logits", normalized=False, width=9))
    with refused(
        kp.KfacpackError, "input 1 and input 2", "normalised embedding of width 4; normalised embedding of width 2"
    ):
        kp.Regularizer([curvature, _with_width(of_task("other", seed=1), 2)])
    with refused(kp.KfacpackError, "input 1 and input 2", of_task("one").digest[:12], "twice"):
        kp.Regularizer([of_task("one"), of_task("one")])


def test_a_kfacpack_model_is_checked_with_its_own_f():
    curvature = small_curvature("packed")
    generator = torch.Generator().manual_seed(0)
    state = {p.name: torch.randn(p.shape, generator=generator) for p in curvature.about.base.parameters}

    class Holder(torch.nn.Module):
        def state_dict(self, *args, **kwargs):
            return state

    model = replace(kp.load_model("tiny"), module=Holder(), function=curvature.about.function)
    regularizer = kp.Regularizer(curvature)
    regularizer.check(model)
    with refused(kp.KfacpackError, "different f", "normalised embedding of width 4; logits of width 9"):
        regularizer.check(replace(model, function=kp.Function(output="logits", normalized=False, width=9)))
    state["norm.bias"] = state["norm.bias"] + 1
    with refused(kp.KfacpackError, "'norm.bias' has sha256"):
        regularizer.check(model)


def test_a_vector_that_does_not_fit_is_refused():
    regularizer = kp.Regularizer(small_curvature("packed"))
    with refused(kp.TaskVectorError, "none of the parameters", "one.weight, one.bias"):
        regularizer.value({"other": torch.ones(2)})
    with refused(kp.TaskVectorError, "mapping of names to tensors", "got list"):
        regularizer.value([torch.ones(2)])
    with refused(kp.TaskVectorError, "'proj': expected a tensor", "got list"):
        regularizer.add_grad({"proj": [1.0]})
    with refused(kp.TaskVectorError, "'proj': expected a floating-point tensor of shape [3, 2]", "[2, 3]"):
        regularizer.value({"proj": torch.ones(2, 3)})
    for bad in (-1.0, float("nan"), 1e300):
        with refused(kp.KfacpackError, f"strength {bad}"):
            kp.Regularizer(small_curvature("packed"), bad)
    with refused(kp.KfacpackError, "at least one bundle"):
        kp.Regularizer([])
    with refused(kp.KfacpackError, "every 0"):
        kp.Regularizer(small_curvature("packed"), every=0)


def test_the_trained_task_is_subtracted_if_possible():
    parts = [of_task(name, size, seed) for name, size, seed in (("one", 10, 1), ("two", 20, 2), ("three", 30, 3))]
    merged, others = kp.merge(parts), kp.merge(parts[1:])
    tau = random_tau(merged, dtype=torch.float64)
    exact = kp.Regularizer([merged, parts[0]], 1.0, exclude_task="one")
    assert exact.tasks == ("two", "three")
    torch.testing.assert_close(exact.value(tau), kp.Regularizer(others, 1.0).value(tau), rtol=1e-5, atol=0)
    untouched = kp.Regularizer(merged, 1.0, exclude_task="four")
    assert torch.equal(untouched.value(tau), kp.Regularizer(merged, 1.0).value(tau))
    separate = kp.Regularizer(parts, 1.0, exclude_task="two")
    assert separate.tasks == ("one", "three")


def test_a_trained_task_that_cannot_be_subtracted_causes_a_warning():
    parts = [of_task(name, 10, seed) for seed, name in enumerate(("one", "two"))]
    merged = kp.merge(parts)
    tau = random_tau(merged)
    with warned(OwnTaskWarning, "'one', the task being trained", "contains the task 'one'"):
        regularizer = kp.Regularizer(merged, 1.0, exclude_task="one")
    assert torch.equal(regularizer.value(tau), kp.Regularizer(merged, 1.0).value(tau))
    with refused(kp.KfacpackError, "contain only 'one'", "no tasks to protect"):
        kp.Regularizer(parts[0], exclude_task="one")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kp.Regularizer(parts, exclude_task="one")


def test_steps_with_a_penalty():
    regularizer = kp.Regularizer(small_curvature("packed"), every=4)
    assert [step for step in range(10) if regularizer.due(step)] == [0, 4, 8]


def _with_width(curvature, width):
    function = curvature.about.function.model_copy(update={"width": width})
    return kp.Curvature(curvature.blocks, curvature.about.model_copy(update={"function": function}))
