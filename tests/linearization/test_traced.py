"""Recorded calls of a linearised model: the same bytes as untraced calls, whatever changes between calls."""

from __future__ import annotations

import random
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from estimation.nets import TextEncoder, Transformer, images, mlp, seeded, sentences, vectors
from kit import refused
from linearization.jvp_reference import assert_near, cost, random_tau
from torch import nn

import kfacpack as kp
from kfacpack.linearization import program_cache
from kfacpack.models.functional import MirroredTensor

USES = 4
"""Calls after which a program replaces the model: untraced, recorded, verified, replayed."""


def batches(shape=(7, 5), count=USES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(count)]


def step(lin, batch, tau, **kwargs):
    point = lin.at(batch, tau)
    gradients = point.gradient(torch.func.grad(cost)(point.f + point.change), **kwargs)
    return [point.f, point.change, *(gradients[name] for name in sorted(gradients))]


def assert_same_steps(model, inputs, tau=None, params=None, **kwargs):
    """Asserts that traced and untraced calls have the same bytes; returns the traced model."""
    lin = kp.linearize(model, params, **kwargs)
    plain = kp.linearize(model, params, trace=False, **kwargs)
    tau = random_tau(lin) if tau is None else tau
    for batch in inputs:
        expected = step(plain, batch, tau)
        actual = step(lin, batch, tau)
        assert len(actual) == len(expected)
        assert all(map(torch.equal, actual, expected))
    return lin


def test_the_fourth_call_replays_a_program():
    model = seeded(mlp)
    lin, tau = kp.linearize(model), None
    tau = random_tau(lin)
    calls = []
    model.forward = lambda x, forward=model.forward: calls.append(1) or forward(x)
    for number, batch in enumerate(batches(count=6), 1):
        step(lin, batch, tau)
        assert (len(calls), lin.programs) == (min(number, 3), int(number > 2))
    assert lin.untraced == ()


def test_another_shape_has_another_program():
    lin = assert_same_steps(seeded(mlp), [*batches(), *batches((3, 5)), *batches(), *batches((1, 5), count=1)])
    assert lin.programs == 2


def test_the_number_of_programs_is_bounded(monkeypatch):
    monkeypatch.setattr(program_cache, "_MAX_SIGNATURES", 2)
    lin = assert_same_steps(seeded(mlp), [batch for rows in (1, 2, 3, 4) for batch in batches((rows, 5))])
    assert lin.programs == 2


def test_weights_and_buffers_are_read_in_every_call():
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double().eval()
    lin = assert_same_steps(model, batches())
    tau = random_tau(lin)
    programs = lin.programs
    with torch.no_grad():
        model[0].weight.mul_(2)
        model[1].running_mean.add_(1)
        model[2].bias.data = model[2].bias.data + 1
    actual, expected = (step(which, vectors(5), tau) for which in (lin, kp.linearize(model, trace=False)))
    assert all(map(torch.equal, actual, expected))
    assert lin.programs == programs


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "1", nn.ReLU()),
        lambda model: setattr(model[0], "weight", nn.Parameter(2 * model[0].weight.detach())),
        lambda model: setattr(model[0], "factor", 3.0),
        lambda model: model[0].options.__setitem__("factor", 3.0),
        lambda model: model.float() and model.double(),
        lambda model: model[2].register_forward_hook(lambda module, args, output: 2 * output),
        lambda model: model.train(not model.training),
    ],
)
def test_a_changed_module_is_recorded_again_or_untraced(change):
    class Scaled(nn.Linear):
        factor = 1.0

        def __init__(self, *args):
            super().__init__(*args)
            self.options = {"factor": 1.0}

        def forward(self, x):
            return self.factor * self.options["factor"] * super().forward(x)

    model = nn.Sequential(Scaled(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    lin = kp.linearize(model, ["2.*", "0.bias"])
    tau = random_tau(lin)
    for batch in batches():
        step(lin, batch, tau)
    assert lin.programs == 1
    change(model)
    plain = kp.linearize(model, ["2.*", "0.bias"], trace=False)
    for batch in batches(seed=1):
        assert all(map(torch.equal, step(lin, batch, tau), step(plain, batch, tau)))


class Reads(nn.Module):
    """A model whose output depends on its batch through Python."""

    def __init__(self, read):
        super().__init__()
        self.inner, self.read = nn.Linear(5, 3).double(), read

    def forward(self, x):
        return self.read(x) * self.inner(x)


outside = {"mask": torch.ones(1, dtype=torch.float64)}


@pytest.mark.parametrize(
    "read",
    [
        lambda x: float(x[0, 0]),
        lambda x: x[0].tolist()[0],
        lambda x: float(x.numpy()[0, 0]),
        lambda x: torch.from_numpy(np.asarray(x)[0, :1]),
        lambda x: int(x.argmax()),
        lambda x: len(x[x > 0].unique()),
        lambda x: torch.rand(1, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
        lambda x: nn.functional.dropout(torch.ones(3).double(), training=True) * 0 + 1,
        lambda x: x.add_(1)[:, :1],
        lambda x: outside["mask"],
        lambda x: random.Random(int(1e6 * x[0, 0])).random(),
    ],
)
def test_a_model_that_depends_on_numbers_stays_untraced(read):
    model = seeded(lambda: Reads(read))
    lin = kp.linearize(model)
    plain = kp.linearize(model, trace=False)
    tau = random_tau(lin)
    for batch in batches(count=5):
        expected = step(plain, batch.clone(), tau)
        assert all(map(torch.equal, step(lin, batch.clone(), tau), expected))
    assert lin.programs == 0
    assert lin.untraced


@pytest.mark.parametrize(
    "read",
    [
        lambda x: 2 if bool((x[0] > 0).all()) else 3,
        lambda x: len(x[x > 0]),
        lambda x: (x > 0).sum(dim=1, keepdim=True) if (x > 9).any() else 2,
    ],
)
def test_booleans_of_the_batch_are_conditions_of_a_program(read):
    model = seeded(lambda: Reads(read))
    positive = torch.ones(7, 5, dtype=torch.float64)
    inputs = [positive, -positive, positive, 2 * positive, -3 * positive, 3 * positive, -positive, -positive]
    lin = assert_same_steps(model, inputs)
    assert lin.programs in (1, 2), lin.untraced
    assert lin.untraced == ()


@pytest.mark.parametrize(
    ("read", "from_copy"),
    [
        (lambda ids: bool((ids > 1).all()), True),
        (lambda ids: len(ids[:, 0].gt(1).nonzero()) == len(ids), True),
        (lambda ids: bool(ids.double().mean() > 1.5), False),
        (lambda ids: bool((ids.sort().values > 1).all()), False),
    ],
    ids=["integers", "nonzero", "rounded", "sorted"],
)
def test_conditions_on_integers_are_computed_from_their_copy(read, from_copy):
    """The copy of a mirrored tensor has other values here, so that the result shows which of them were read."""

    class ReadsIds(Reads):
        def forward(self, ids, x):
            return (2 if self.read(ids) else 3) * self.inner(x)

    model = seeded(lambda: ReadsIds(read))
    lin, ids = kp.linearize(model), torch.full((7, 4), 2)
    tau = random_tau(lin)
    for x in batches():
        step(lin, (MirroredTensor.of(ids, ids.clone()), x), tau)
    assert lin.programs == 1, lin.untraced
    f = lin.at((MirroredTensor.of(ids, torch.zeros_like(ids)), x), tau).f
    assert torch.equal(f, (3 if from_copy else 2) * model.inner(x).detach())
    assert torch.equal(lin.at((ids, x), tau).f, 2 * model.inner(x).detach())


def test_a_model_that_reads_its_own_output_stays_untraced():
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(5, 3).double()

        def forward(self, x):
            h = self.inner(x)
            return 2 * h if (h.sum() > 0) else h

    lin = assert_same_steps(seeded(Branch), batches(count=5))
    assert lin.programs == 0
    assert lin.untraced


def test_a_program_that_does_not_hold_for_another_batch_is_discarded():
    """A global variable is not noticed when a call is recorded, but f differs when the recording is verified."""
    scale = [1.0]
    model = seeded(lambda: Reads(lambda x: globals()["changing"]()))
    globals()["changing"] = lambda: scale[0]
    lin, plain = kp.linearize(model), kp.linearize(model, trace=False)
    tau = random_tau(lin)
    for number, batch in enumerate(batches(count=5)):
        scale[0] = float(number)
        assert all(map(torch.equal, step(lin, batch, tau), step(plain, batch, tau)))
    assert lin.programs == 0
    assert any("another batch" in reason for reason in lin.untraced)


def test_a_captured_variable_may_change():
    model, masks = seeded(mlp), batches((7, 3), count=8)
    mask = masks[0]

    def forward(x):
        return model(x) * mask

    lin, plain = (kp.linearize(model, forward=forward, trace=trace) for trace in (True, False))
    tau = random_tau(lin)
    for x, mask in zip(batches(count=8), [*masks[:1] * 4, *masks[4:]], strict=True):  # noqa: B007
        assert all(map(torch.equal, step(lin, x, tau), step(plain, x, tau)))


def test_autocast_and_other_names_have_their_own_programs():
    model = seeded(Transformer).float()
    lin, plain = kp.linearize(model), kp.linearize(model, trace=False)
    tau = random_tau(lin)
    few = {name: value for name, value in tau.items() if name.startswith("up.")}
    inputs = [images(4).float() + number for number in range(USES)]
    for part, enabled in ((tau, False), (tau, True), (few, False), (few, True), (tau, True)):
        for x in inputs:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                actual, expected = lin.at(x, part), plain.at(x, part)
            assert torch.equal(actual.f, expected.f)
            assert torch.equal(actual.change, expected.change)
            u = expected.f.cos()
            gradients = expected.gradient(u)
            assert all(torch.equal(value, gradients[name]) for name, value in actual.gradient(u).items())
    assert lin.programs == 4, lin.untraced


def test_gradients_of_replayed_calls():
    """Subsets of names, accumulation, a second call, autograd, and tensors that were modified in between."""
    model = seeded(mlp)
    lin, plain = kp.linearize(model), kp.linearize(model, trace=False)
    tau = random_tau(lin)
    for batch in batches():
        step(lin, batch, tau)
    assert lin.programs == 1
    x = vectors(5)
    u = torch.ones(7, 3, dtype=torch.float64)
    whole, expected = lin.at(x, tau).gradient(u), plain.at(x, tau).gradient(u)
    point = lin.at(x, tau)
    for name in whole:
        (result,) = point.gradient(u, [name], retain_graph=True).items()
        assert result[0] == name
        assert torch.equal(result[1], expected[name])
    sums = {name: torch.ones_like(value) for name, value in whole.items()}
    assert point.gradient(u.sum(0, keepdim=True).expand(7, 3) / 7, into=sums, retain_graph=True) is sums
    for name, value in sums.items():
        torch.testing.assert_close(value, expected[name] + 1)
    point.gradient(u)
    with refused(RuntimeError, "second time"):
        point.gradient(u)
    with refused(ValueError, "[7, 3]"):
        lin.at(x, tau).gradient(u[:2])
    value = cost(lin(x, tau))
    first = torch.autograd.grad(value, list(tau.values()), retain_graph=True)
    second = torch.autograd.grad(value, list(tau.values()))
    assert all(map(torch.equal, first, second))
    point = lin.at(x, tau)
    with torch.no_grad():
        model[2].weight.mul_(2)
    with refused(kp.KfacpackError, "modified in place"):
        point.gradient(u)


def test_a_tau_of_another_dtype_or_layout():
    model = seeded(mlp).bfloat16()
    lin = kp.linearize(model)
    tau = {name: value.detach().clone() for name, value in random_tau(lin).items()}
    tau["0.weight"] = tau["0.weight"].t().contiguous().t()
    lin = assert_same_steps(model, [batch.bfloat16() for batch in batches()], tau)
    assert lin.programs == 1, lin.untraced
    assert all(
        value.dtype == torch.float32 for value in lin.at(vectors(5).bfloat16(), tau).gradient(torch.ones(7, 3)).values()
    )


class Writes(nn.Module):
    """In-place operations, views and tied weights."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.second.weight = self.first.weight
        self.double()

    def forward(self, x):
        h = self.first(x).add_(1)
        h[:, :2] *= 2
        h.view(-1)[::3] += self.second.bias[0]
        rows = torch.zeros(2, *x.shape, dtype=x.dtype)
        rows[0] = h
        rows[1].copy_(self.second(h)).sin_()
        constant = torch.tensor([1.0, 2.0, 3.0], dtype=x.dtype)
        constant += 1
        return self.last(rows.sum(0)) * constant


def test_writes_views_and_tied_weights():
    lin = assert_same_steps(seeded(Writes), batches(count=6))
    assert lin.programs == 1, lin.untraced


def test_inputs_that_share_memory():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(5, 3).double()

        def forward(self, a, b):
            return self.inner(a) * self.inner(b)

    inputs = [(x[:3], x[1:4]) for x in batches()]
    assert assert_same_steps(seeded(Two), inputs).programs == 1


def test_threads_share_programs():
    model = seeded(TextEncoder)
    lin, plain = kp.linearize(model), kp.linearize(model, trace=False)
    tau = random_tau(lin)
    expected = step(plain, sentences(), tau)
    with ThreadPoolExecutor(4) as pool:
        for actual in pool.map(lambda _: step(lin, sentences(), tau), range(12)):
            assert all(map(torch.equal, actual, expected))


def test_trace_can_be_switched_off():
    lin = kp.linearize(seeded(mlp), trace=False)
    tau = random_tau(lin)
    for batch in batches():
        step(lin, batch, tau)
    assert (lin.programs, lin.untraced) == (0, ())


@pytest.mark.parametrize(("trace", "programs"), [(None, 0), (True, 1)])
def test_large_models_on_a_cpu_are_recorded_on_request(monkeypatch, trace, programs):
    model = seeded(Transformer)
    reference = kp.linearize(model, trace=False)
    monkeypatch.setattr("kfacpack.linearization.linearize._LARGE_MODEL", 100)
    lin, tau = kp.linearize(model, trace=trace), random_tau(reference)
    for _ in range(USES):
        for actual, expected in zip(step(lin, images(4), tau), step(reference, images(4), tau), strict=True):
            assert_near(actual, expected, 1e-9, "traced or not")
    assert (lin.programs, lin.untraced) == (programs, ())


needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler")


@needs_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_step():
    model = seeded(mlp)
    lin, plain = kp.linearize(model, compile=True), kp.linearize(model, trace=False)
    tau = random_tau(lin)
    for batch in batches(count=3):
        for actual, expected in zip(step(lin, batch, tau), step(plain, batch, tau), strict=True):
            assert_near(actual, expected, 1e-9, "compiled")
    assert lin.programs == 1, lin.untraced


def test_compilation_that_fails_is_reported(monkeypatch):
    def fail(*args, **kwargs):
        def call(*args):
            raise RuntimeError("no compiler")

        return call

    monkeypatch.setattr(torch, "compile", fail)
    lin = kp.linearize(seeded(mlp), compile=True)
    with refused(kp.KfacpackError, "torch.compile", "no compiler"):
        lin.at(vectors(5), random_tau(lin))


def test_only_the_linear_regime_is_compiled():
    with refused(kp.KfacpackError, "compile", "'full'"):
        kp.train("tiny", "digits", regime="full", compile=True, steps=1)
