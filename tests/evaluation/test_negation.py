"""Negation removes as much of a task as the control task permits."""

from __future__ import annotations

import pytest
import torch
from kit import refused
from random_vectors import random_vector
from toys import toy_model, toy_subjects

import kfacpack as kp
from kfacpack.errors import KfacpackError
from kfacpack.evaluation.accuracy import Score, score
from kfacpack.evaluation.sweep import SelectionTask, choose_negation_alpha, negate

ALPHAS = [0.2, 0.5, 1.0, 2.0, 4.0]


@pytest.fixture(scope="module")
def model():
    return toy_model(dtype=torch.float32)


@pytest.fixture(scope="module")
def subjects(model):
    return toy_subjects(model, {"one": 0, "two": 1, "control": 2})


@pytest.mark.parametrize(("regime", "keep"), [("linear", 0.95), ("linear", 0.6), ("full", 0.8)])
def test_by_brute_force(model, subjects, regime, keep):
    vector = random_vector(model, regime=regime, size=0.5)
    *targets, control = subjects
    progress = []
    on_progress = lambda done, total: progress.append((done, total))  # noqa: E731
    result = negate(model, targets, control, vector, ALPHAS, keep=keep, on_progress=on_progress)

    def accuracy(subject, alpha, split):
        return score(model, subject.head, getattr(subject, split), vector=-alpha * vector).accuracy

    base = accuracy(control, 0.0, "validation")
    permitted = [alpha for alpha in (0.0, *ALPHAS) if accuracy(control, alpha, "validation") >= keep * base]
    left = lambda alpha: sum(max(accuracy(target, alpha, "validation"), 1 / 3) for target in targets)  # noqa: E731
    alpha = min(permitted, key=lambda alpha: round(left(alpha), 9))
    assert (result["control"], result["keep"], list(result["tasks"])) == ("control", keep, ["one", "two"])
    for target in targets:
        before, after = accuracy(target, 0.0, "test"), accuracy(target, alpha, "test")
        assert result["tasks"][target.name] == {
            "alpha": alpha,
            "accuracy": after,
            "before": before,
            "chance": 1 / 3,
            "removed": pytest.approx((before - after) / (before - 1 / 3)),
            "control": accuracy(control, alpha, "test"),
            "control_before": accuracy(control, 0.0, "test"),
        }
    assert progress[-1][0] == progress[-1][1]


def test_the_selected_alpha():
    control = [Score(k, 100) for k in (80, 79, 76, 75, 90)]
    target = [Score(k, 50) for k in (40, 30, 20, 1, 20)]
    assert choose_negation_alpha([target], control, 0.95, [100]) == 2, (
        "76 is exactly 95 % of 80; 4 is as good, but further away"
    )
    assert choose_negation_alpha([target], control, 0.96, [100]) == 4
    assert choose_negation_alpha([target], control, 0.5, [100]) == 3
    assert choose_negation_alpha([target], control, 0.5, [2]) == 2, (
        "below one half, two classes have nothing more to lose"
    )
    assert choose_negation_alpha([target[:4]], control[:4], 1.0, [100]) == 0, "nothing may be lost"
    other = [Score(k, 10) for k in (1, 1, 9, 1, 9)]
    assert choose_negation_alpha([target, other], control, 0.95, [100, 100]) == 1, "the mean over the targets counts"


def test_without_a_margin_nothing_is_removed(model, subjects):
    worst = SelectionTask(
        kp.Head(torch.zeros(3, 6), torch.tensor([1.0, 0.0, 0.0]), subjects[0].head.classes, "prototypes"),
        subjects[0].validation,
        subjects[0].test,
    )
    entry = negate(model, [worst], subjects[2], random_vector(model), ALPHAS)["tasks"]["one"]
    assert (entry["accuracy"], entry["before"], entry["removed"], entry["alpha"]) == (1 / 3, 1 / 3, None, 0.0)


def test_invalid_settings_are_refused(model, subjects):
    vector = random_vector(model)
    with refused(KfacpackError, "alpha is -0.5", "already negated"):
        negate(model, subjects[:1], subjects[2], vector, [-0.5])
    for keep in (0.0, 1.5):
        with refused(KfacpackError, f"keep is {keep:g}", "the control's accuracy"):
            negate(model, subjects[:1], subjects[2], vector, ALPHAS, keep=keep)
    with refused(KfacpackError, "'two'", "to forget", "the control"):
        negate(model, subjects[:2], subjects[1], vector, ALPHAS)
