"""A sweep is bitwise equal to separate evaluations; in the linear regime it evaluates f + α J τ."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kit import refused
from random_vectors import random_vector
from torch.nn.attention import SDPBackend, sdpa_kernel
from toys import CLASSES, WIDTH, ToyTask, toy_model

import kfacpack as kp
from kfacpack.errors import KfacpackError
from kfacpack.evaluation.accuracy import EvaluationSet, Score, score, scores
from kfacpack.evaluation.edited_model import edited_model
from kfacpack.evaluation.sweep import as_table, best, mean
from kfacpack.format.units import parse_alphas

ALPHAS = parse_alphas("-1:2:0.15")


@pytest.fixture(scope="module")
def model():
    return toy_model(dtype=torch.float32)


@pytest.fixture(scope="module")
def head():
    generator = torch.Generator().manual_seed(5)
    return kp.Head(torch.randn(len(CLASSES), WIDTH, generator=generator), torch.zeros(3), CLASSES, "prototypes")


@pytest.fixture(scope="module")
def evaluation_set():
    return EvaluationSet.of(ToyTask(size=90))


def batch_of(model, evaluation_set):
    return model.prepare([evaluation_set.split[number] for number in evaluation_set.numbers], evaluation_set.task.name)


@pytest.mark.parametrize("regime", ["linear", "full"])
def test_a_sweep_equals_separate_evaluations(model, head, evaluation_set, regime):
    vector = random_vector(model, regime=regime, size=1.5)
    results = scores(model, head, evaluation_set, vector, ALPHAS, batch_size=32)
    assert len({result.correct for result in results}) > 2, "α makes a difference"
    for alpha, result in zip(ALPHAS, results, strict=True):
        assert result == score(model, head, evaluation_set, vector=vector, alpha=alpha, batch_size=32)
        assert result == score(model, head, evaluation_set, vector=alpha * vector, batch_size=32)
    halves = scores(model, head, evaluation_set, 0.5 * vector, ALPHAS, batch_size=32)
    assert halves == [
        score(model, head, evaluation_set, vector=0.5 * alpha * vector, batch_size=32) for alpha in ALPHAS
    ]
    public = kp.sweep(model, evaluation_set.task, vector, ALPHAS, head=head, batch_size=32)
    assert public == results
    assert public[3] == kp.evaluate(
        model, evaluation_set.task, head=head, vector=vector, alpha=ALPHAS[3], batch_size=32
    )


@pytest.mark.parametrize("regime", ["linear", "full"])
def test_alpha_and_a_multiple_are_bitwise_equal(model, evaluation_set, regime):
    sum_ = 0.7 * random_vector(model, regime=regime) + 0.3 * random_vector(model, "other", regime, seed=2)
    x = batch_of(model, evaluation_set)
    for alpha in (0.3, -1.1, 1 / 3):
        with edited_model(model, sum_, alpha) as one:
            first = one(x)
        with edited_model(model, alpha * sum_) as other:
            assert torch.equal(first, other(x))


def test_a_linear_vector_is_evaluated_as_f_plus_alpha_j_tau(evaluation_set):
    model = toy_model(dtype=torch.float64)
    vector = random_vector(model)
    x = batch_of(model, evaluation_set)
    names = dict(model.module.named_parameters())

    def f(*values):
        return torch.func.functional_call(model.module, dict(zip(names, values, strict=True)), (x,))

    tau = tuple(vector[name].double() for name in names)
    with sdpa_kernel(SDPBackend.MATH):
        f0, change = torch.autograd.functional.jvp(f, tuple(names.values()), tau)
    for alpha in (0.0, 0.4, -2.0):
        with edited_model(model, vector, alpha) as forward:
            torch.testing.assert_close(forward(x), (f0 + alpha * change).detach())


def test_alpha_zero_is_the_model_itself(model, head, evaluation_set):
    for regime in ("linear", "full"):
        assert scores(model, head, evaluation_set, random_vector(model, regime=regime), [0.0, 1.0])[0] == score(
            model, head, evaluation_set
        )


def test_examples_are_read_once(model, head):
    read = []

    class Counting(ToyTask):
        def split(self, name):
            numbers = super().split(name)
            return replace(numbers, x=Watched(numbers.x))

    class Watched:
        def __init__(self, x):
            self.x = x

        def __getitem__(self, index):
            read.append(index)
            return self.x[index]

    evaluation_set = EvaluationSet.of(Counting())
    results = scores(model, head, evaluation_set, random_vector(model, regime="full"), [0.0, 0.5, 1.0], batch_size=8)
    assert read == list(range(30))
    assert [result.examples for result in results] == [30] * 3


def test_progress_counts_every_pass(model, head):
    evaluation_set = EvaluationSet.of(ToyTask())
    for regime, passes in (("linear", 1), ("full", 3)):
        progress = []
        vector, on_progress = (
            random_vector(model, regime=regime),
            lambda *counts, progress=progress: progress.append(counts),
        )
        scores(model, head, evaluation_set, vector, [0, 1, 2], batch_size=20, on_progress=on_progress)
        assert progress[0] == (0, 30 * passes)
        assert progress[-1] == (30 * passes, 30 * passes)
        assert len(progress) == 1 + 2 * passes


def test_another_f_is_refused(model, head, evaluation_set):
    function = model.function.model_copy(update={"detail": "of 64x64 pixels"})
    other = replace(model, function=model.function.model_copy(update={"detail": "of 96x96 pixels"}))
    for regime in ("linear", "full"):
        vector = random_vector(model, regime=regime, function=function)
        with refused(kp.TaskVectorError, "different functions f", "64x64", "96x96"):
            score(other, head, evaluation_set, vector=vector)


def test_invalid_alphas_and_vectors_are_refused(model, head, evaluation_set):
    vector = random_vector(model)
    with refused(KfacpackError, "alphas is empty", "at least one"):
        scores(model, head, evaluation_set, vector, [])
    with refused(KfacpackError, "alpha is nan", "finite"):
        scores(model, head, evaluation_set, vector, [1.0, float("nan")])
    with refused(KfacpackError, "alpha is 0.5", "no task vector"):
        score(model, head, evaluation_set, alpha=0.5)
    with refused(KfacpackError, "toy, split 'test', examples 0 to 63: J τ, ", "contains NaN"):
        score(model, head, evaluation_set, vector=random_vector(model, size=float("inf")))


def test_overflow_of_outputs_or_logits_is_reported(model, head, evaluation_set):
    """J τ is finite, but α J τ or the logits overflow float32."""
    _, change = kp.linearize(model).outputs(batch_of(model, evaluation_set), dict(random_vector(model)))
    vector = random_vector(model, size=1e36 / float(change.abs().max()))
    for alpha, wide in ((1000.0, head), (1.0, replace(head, weight=1e3 * head.weight))):
        with refused(KfacpackError, "toy, split 'test', examples 0 to 63: the logits contain NaN"):
            scores(model, wide, evaluation_set, vector, [0.0, alpha])


@pytest.mark.parametrize(
    ("text", "alphas"),
    [
        ("1.0", [1.0]),
        ("0:2:0.1", [float(f"{k // 10}.{k % 10}") for k in range(21)]),
        ("-0.3:0:0.1", [-0.3, -0.2, -0.1, 0.0]),
        ("0.3, 0.5", [0.3, 0.5]),
        ("0:1:0.3", [0.0, 0.3, 0.6, 0.9]),
        ("2,0:1:0.5", [2.0, 0.0, 0.5, 1.0]),
        ("1:1:0.1", [1.0]),
        ("1e-1", [0.1]),
    ],
)
def test_valid_alphas(text, alphas):
    assert parse_alphas(text) == alphas


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "'' is not a number"),
        ("a lot", "'a lot' is not a number"),
        ("0:2", "a range has three numbers, got 2"),
        ("0:2:0", "the step of a range must be greater than zero, got 0"),
        ("2:0:-0.1", "the step of a range must be greater than zero, got -0.1"),
        ("2:0:0.1", "a range must be increasing, got 2 to 0"),
        ("0:1:0.0001", "more than 1,000 values"),
        ("0:1:1e-999999", "1e-999999 is out of range"),
        ("nan", "nan is out of range"),
        ("1e999999", "1e999999 is out of range"),
        ("0.5,0.50", "0.50 occurs twice"),
        ("0:1:0.5,", "'' is not a number"),
    ],
)
def test_invalid_alphas_are_refused(text, words):
    with refused(KfacpackError, f"alpha {text!r}: ", words, "expected a number"):
        parse_alphas(text)


def test_the_best_alpha():
    results = [[Score(k, 10) for k in (3, 8, 8, 5)], [Score(k, 5) for k in (5, 2, 2, 4)]]
    assert mean([results[0][0], results[1][0]]) == pytest.approx(0.65)
    assert best([0.5, 0.7, 1.0, 2.0], results) == 0, "the means are 0.65, 0.6, 0.6, 0.65; 0.5 is nearer to 1 than 2"
    assert best([2.5, 0.7, 1.0, 1.2], results) == 3, "of equal means, the α nearest to 1"
    same = [[Score(1, 3)] * 3]
    assert best([1.3, 0.7, 5.0], same) == 1, "as near as 1.3, and smaller"
    thirds = [[Score(1, 3), Score(2, 3)], [Score(2, 3), Score(1, 3)], [Score(1, 10)] * 2]
    assert best([1.0, 0.0], thirds) == 0, "equal as fractions, whatever floats say"
    table = as_table([0.5, 1.0], {"one": results[0][:2], "two": results[1][:2]})
    assert table == {"alphas": [0.5, 1.0], "tasks": {"one": [0.3, 0.8], "two": [1.0, 0.4]}, "mean": [0.65, 0.6]}


def test_a_model_and_a_task_may_be_named():
    model, task = kp.load_model("tiny"), kp.load_task("digits")
    vector = random_vector(model, regime="linear")
    by_name = kp.sweep("tiny", "digits", vector, [0.0, 1.0], examples=16)
    assert by_name == kp.sweep(model, task, vector, [0.0, 1.0], examples=16)
