"""Accuracies of the shipped weights, with a margin; the README lists the exact values."""

from __future__ import annotations

from dataclasses import replace

import pytest

import tiny_scores
from kfacpack.evaluation.accuracy import evaluate
from kfacpack.models.families import load_model
from kfacpack.models.heads import head_for
from kfacpack.tasks.registry import TASKS, load_task

CHANCE = 0.1
"""For ten classes."""


@pytest.fixture(scope="module")
def scores():
    """Accuracies on all test examples; class means of about 500 training examples."""
    model, tasks = load_model("tiny"), [load_task(name) for name in TASKS]
    return {task.name: tiny_scores.scores(model, task, every=-(-task.sizes["train"] // 500)) for task in tasks}


def test_digits_are_recognised_zero_shot(scores):
    assert scores["mnist"].zero_shot >= 0.35
    assert scores["digits"].zero_shot >= 0.25


def test_digits_are_recognised_with_an_unseen_prompt(scores):
    assert scores["mnist"].other_words >= 3 * CHANCE
    assert scores["digits"].other_words >= 2 * CHANCE


def test_class_means_of_f_are_better_than_of_raw_pixels_on_most_tasks(scores):
    assert sum(score.means_of_f > score.means_of_pixels for score in scores.values()) >= 6


def test_unseen_tasks_are_not_recognised_zero_shot(scores):
    for name in ("hebrew", "syllabics", "emblems", "weaves"):
        assert scores[name].zero_shot < 0.35


@pytest.mark.parametrize("template", ["{}", "a poster of {}", "it may be {} or not", "seven words with {} among them"])
def test_digits_are_recognised_with_other_prompts(template):
    model, task = load_model("tiny"), replace(load_task("mnist"), templates=(template,))
    assert evaluate(model, task, head=head_for(model, task), examples="300").accuracy >= 2 * CHANCE
