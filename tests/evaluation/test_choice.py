"""α is selected on validation examples; test examples are evaluated at that α only."""

from __future__ import annotations

import pytest
import torch
from kit import refused
from random_vectors import random_vector
from toys import ToyTask, ValidatedTask, toy_model, toy_subjects

import kfacpack as kp
from kfacpack.errors import KfacpackError
from kfacpack.evaluation.accuracy import EvaluationSet, score
from kfacpack.evaluation.sweep import SelectionTask, choose_alpha, evaluation_result, validation_set

ALPHAS = [0.0, 0.4, 0.8, 1.2, 1.6]


@pytest.fixture(scope="module")
def model():
    return toy_model(dtype=torch.float32)


@pytest.fixture(scope="module")
def subjects(model):
    return toy_subjects(model, {"one": 1, "two": 2})


@pytest.mark.parametrize("regime", ["linear", "full"])
def test_by_brute_force(model, subjects, regime):
    vector = random_vector(model, regime=regime, size=0.8)
    progress = []
    choice = choose_alpha(
        model, subjects, vector, ALPHAS, on_progress=lambda done, total: progress.append((done, total))
    )

    def accuracies(alpha, split):
        return [
            score(model, subject.head, getattr(subject, split), vector=alpha * vector).accuracy for subject in subjects
        ]

    means = {alpha: sum(accuracies(alpha, "validation")) / 2 for alpha in ALPHAS}
    largest = [alpha for alpha in ALPHAS if means[alpha] == max(means.values())]
    assert choice.alpha == min(largest, key=lambda alpha: abs(alpha - 1))
    assert [result.accuracy for result in choice.test.values()] == accuracies(choice.alpha, "test")
    assert choice.alphas == tuple(ALPHAS)
    for k, alpha in enumerate(ALPHAS):
        assert [choice.validation[name][k].accuracy for name in ("one", "two")] == accuracies(alpha, "validation")
    assert progress[-1][0] == progress[-1][1] == 120 * (1 if regime == "linear" else 5) + 120
    assert sorted(done for done, _ in progress) == [done for done, _ in progress]


def test_ties_are_broken_towards_one(model, subjects):
    nothing = random_vector(model, size=0.0)
    assert choose_alpha(model, subjects, nothing, [0.0, 0.5, 1.1, 2.0]).alpha == 1.1


def test_test_examples_are_evaluated_at_the_selected_alpha_only(model, subjects):
    read = []

    class Watching(ValidatedTask):
        def split(self, name):
            examples = super().split(name)
            if name == "test":
                label = examples.label
                examples.label = lambda index: (read.append(index), label(index))[1]
            return examples

    task = Watching("one", 1, 20)
    subject = SelectionTask(kp.head_for(model, task), validation_set(task), EvaluationSet.of(task))
    choice = choose_alpha(model, [subject], random_vector(model), ALPHAS)
    assert len(read) == 20, "each test label is read once"
    assert set(choice.test) == {"one"}
    assert len(choice.validation["one"]) == len(ALPHAS)


def test_a_task_without_a_validation_split_is_refused():
    with refused(KfacpackError, "toy", "'validation'", "train, test", "validation-*.parquet"):
        validation_set(ToyTask())


def test_normalised_by_the_individual_accuracies(model, subjects):
    scores = {subject.name: score(model, subject.head, subject.test) for subject in subjects}
    one, two = (task_score.accuracy for task_score in scores.values())
    result = evaluation_result(scores, {"one": 0.5, "two": 0.8})
    assert result["tasks"]["one"] == {"accuracy": one, "normalized": one / 0.5, "examples": 60}
    assert result["mean"]["accuracy"] == pytest.approx((one + two) / 2)
    assert result["mean"]["normalized"] == pytest.approx((one / 0.5 + two / 0.8) / 2)
    part = evaluation_result(scores, {"one": 0.5, "two": 0.0}, dict.fromkeys(scores, "text"))
    assert part["tasks"]["one"]["normalized"] == one / 0.5
    assert part["tasks"]["two"] == {"accuracy": two, "normalized": None, "examples": 60, "head": "text"}
    assert part["mean"]["normalized"] is None, "a mean over some of the tasks is none"
