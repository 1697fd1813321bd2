"""ξ over a grid equals evaluating every combination of two vectors by itself."""

from __future__ import annotations

import pytest
import torch
from evaluation.toy import EVALUATION_SETS, TASKS, emulate_device, inputs, task_vector
from kit import refused
from toys import on_device, toy_model

import kfacpack as kp
from kfacpack.evaluation.disentanglement import disentanglement
from kfacpack.evaluation.edited_model import edited_model

ALPHAS = [-1.0, 0.0, 0.5, 2.0]


@pytest.fixture(scope="module")
def model():
    return toy_model()


def pair(model, regime):
    return tuple(task_vector(model, TASKS[name], regime, size=0.2) for name in ("one", "two"))


def answers(model, vectors, task, a, b):
    with edited_model(model, a * vectors[0] + b * vectors[1]) as forward:
        head = vectors[("one", "two").index(task)].heads[task]
        return head.logits(forward(inputs(model, EVALUATION_SETS[task]))).argmax(1)


@pytest.mark.parametrize("regime", ["linear", "full"])
@pytest.mark.parametrize("batch_size", [7, 64])
def test_the_grid_equals_separate_evaluations(model, regime, batch_size):
    vectors = pair(model, regime)
    result = disentanglement(
        model, (EVALUATION_SETS["one"], EVALUATION_SETS["two"]), vectors, alphas=ALPHAS, batch_size=batch_size
    )
    assert (result["tasks"], result["alphas"], result["examples"]) == (["one", "two"], ALPHAS, {"one": 20, "two": 20})
    expected = [
        [
            sum(
                float((answers(model, vectors, task, *alone) != answers(model, vectors, task, a, b)).double().mean())
                for task, alone in (("one", (a, 0.0)), ("two", (0.0, b)))
            )
            for b in ALPHAS
        ]
        for a in ALPHAS
    ]
    torch.testing.assert_close(torch.tensor(result["xi"]), torch.tensor(expected))
    assert max(map(max, result["xi"])) > 0.3
    assert result["xi"][1][1] == 0


def test_the_model_is_restored(model):
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    for regime in ("linear", "full"):
        disentanglement(model, (EVALUATION_SETS["one"], EVALUATION_SETS["two"]), pair(model, regime), alphas=[1.0])
    assert all(torch.equal(value, before[name]) for name, value in model.module.state_dict().items())


# Outside the linear regime, each example is processed with all four combinations and with its own vector alone, twice.
@pytest.mark.parametrize(("regime", "looks"), [("linear", 1), ("full", 6)])
def test_progress_ends_at_its_total(model, regime, looks):
    progress = []
    disentanglement(
        model,
        (EVALUATION_SETS["one"], EVALUATION_SETS["two"]),
        pair(model, regime),
        alphas=[1.0, 2.0],
        on_progress=lambda done, total: progress.append((done, total)),
    )
    assert progress[0] == (0, 40 * looks)
    assert progress[-1] == (40 * looks, 40 * looks)


def test_heads_can_be_replaced(model):
    vectors = pair(model, "linear")
    own = vectors[0].heads["one"]
    zero_head = kp.Head(torch.zeros_like(own.weight), own.bias, own.classes, own.origin)
    heads = {"one": zero_head, "two": kp.Head(zero_head.weight, zero_head.bias, TASKS["two"].classes, "prototypes")}
    result = disentanglement(
        model, (EVALUATION_SETS["one"], EVALUATION_SETS["two"]), vectors, alphas=ALPHAS, heads=heads
    )
    assert result["xi"] == [[0.0] * 4] * 4


@pytest.mark.parametrize("regime", ["linear", "full"])
def test_a_device_without_float64_gives_the_same_grid(regime, monkeypatch):
    model = toy_model(dtype=torch.float32)
    vectors, both = pair(model, regime), (EVALUATION_SETS["one"], EVALUATION_SETS["two"])
    expected = disentanglement(model, both, vectors, alphas=ALPHAS)
    heads = {
        name: kp.Head(*on_device(head.weight, head.bias), head.classes, head.origin)
        for vector in vectors
        for name, head in vector.heads.items()
    }
    emulate_device(monkeypatch)
    assert disentanglement(model, both, vectors, alphas=ALPHAS, heads=heads) == expected


def test_incompatible_inputs_are_refused(model):
    one, two = pair(model, "linear")
    both = (EVALUATION_SETS["one"], EVALUATION_SETS["two"])
    with refused(kp.KfacpackError, "'one' and 'two'", "regimes: 'linear' and 'full'"):
        disentanglement(model, both, (one, task_vector(model, TASKS["two"], "full")), alphas=ALPHAS)
    with refused(kp.KfacpackError, "(two)", "got one"):
        disentanglement(model, both, (two, one), alphas=ALPHAS)
    with refused(kp.KfacpackError, "different tasks", "got one, one"):
        disentanglement(model, (EVALUATION_SETS["one"], EVALUATION_SETS["one"]), (one, one), alphas=ALPHAS)
    with refused(kp.KfacpackError, "alphas is []", "one or more"):
        disentanglement(model, both, (one, two), alphas=[])
    with refused(kp.TaskVectorError, "trained from attentive", "'attn.in_proj_weight'", "sha256"):
        disentanglement(toy_model(seed=3), both, (one, two), alphas=ALPHAS)
