"""Accuracy: the fraction of examples whose class has the largest logit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from image_folders import write_images
from kit import refused

import kfacpack as kp
from kfacpack.errors import KfacpackError
from kfacpack.evaluation.accuracy import EvaluationSet, Score, evaluate
from kfacpack.models.families import load_model
from kfacpack.models.heads import Head, head_for
from kfacpack.tasks.registry import load_task

CLASSES = ("blue_sky", "green", "red")


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("colours")
    counts = {"train": dict.fromkeys(CLASSES, 6), "test": {"red": 4, "green": 3, "blue_sky": 5}}
    write_images(folder, counts)
    # Two red images with the label green.
    for number in (0, 1):
        (folder / "test" / "red" / f"{number:03}.png").rename(folder / "test" / "green" / f"wrong{number}.png")
    return load_task("colours", folder)


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny", weights="random", seed=2)


@pytest.fixture
def colour_model(tiny):
    """A model whose f is the mean colour: red, green, blue."""
    return replace(tiny, forward=lambda images: images.mean((2, 3)), function=replace_width(tiny.function, 3))


def replace_width(function, width):
    return function.model_copy(update={"width": width})


@pytest.fixture
def by_colour():
    return Head(torch.eye(3).flip(0), torch.zeros(3), CLASSES, "prototypes")


def test_the_score_equals_counting_by_hand(colour_model, task, by_colour):
    score = evaluate(colour_model, task, head=by_colour)
    assert score == Score(correct=10, examples=12)
    assert score.accuracy == 10 / 12
    assert evaluate(colour_model, task, head=by_colour, split="train").accuracy == 1
    always_blue = Head(torch.zeros(3, 3), torch.tensor([1.0, 0.0, 0.0]), CLASSES, "prototypes")
    assert evaluate(colour_model, task, head=always_blue).correct == 5


def test_the_score_does_not_depend_on_the_batch_size(tiny, task):
    head = head_for(tiny, task, kind="text")
    assert len({evaluate(tiny, task, head=head, batch_size=size) for size in (1, 5, 12, 100)}) == 1


def test_prototypes_separate_colours_with_random_weights(tiny, task):
    assert evaluate(tiny, task, head=head_for(tiny, task, kind="prototypes")).correct == 10


def test_a_selection_of_examples_is_reproducible(colour_model, task, by_colour):
    evaluation_sets = [EvaluationSet.of(task, examples="50%") for _ in range(2)]
    assert evaluation_sets[0].numbers == evaluation_sets[1].numbers
    assert len(set(evaluation_sets[0].numbers)) == 6
    assert evaluate(colour_model, task, head=by_colour, examples="5").examples == 5


def test_the_number_of_examples_may_be_an_integer(task):
    assert EvaluationSet.of(task, examples=5).numbers == EvaluationSet.of(task, examples="5").numbers


def test_progress_counts_the_examples(colour_model, task, by_colour):
    progress = []
    evaluate(
        colour_model, task, head=by_colour, batch_size=8, on_progress=lambda done, total: progress.append((done, total))
    )
    assert progress == [(0, 12), (8, 12), (12, 12)]


def test_invalid_arguments_and_outputs_are_refused(colour_model, task, by_colour, tmp_path):
    with refused(KfacpackError, "unknown split 'dev'", "train, validation, test"):
        evaluate(colour_model, task, head=by_colour, split="dev")
    with refused(KfacpackError, "head", "classes", "colours"):
        evaluate(colour_model, task, head=replace(by_colour, classes=("a", "b", "c")))
    for use_module in (kp.evaluate, kp.train, kp.estimate_task):
        with refused(KfacpackError, "got Linear", "kp.load_model", "kp.estimate", "kp.Regularizer"):
            use_module(torch.nn.Linear(2, 2), task)
    with refused(KfacpackError, "examples 'some'"):
        evaluate(colour_model, task, head=by_colour, examples="some")
    nan_model = replace(colour_model, forward=lambda images: images.mean((2, 3)) / 0 * 0)
    with refused(KfacpackError, "colours, split 'test', examples 0 to 11: f contains NaN"):
        evaluate(nan_model, task, head=by_colour)


@pytest.mark.parametrize("labelled", [False, True])
def test_texts_without_labels_are_refused(colour_model, by_colour, tmp_path, labelled):
    import datasets

    features = {"text": datasets.Value("string")}
    rows = {"text": ["one", "two"]}
    if labelled:
        features["label"] = datasets.ClassLabel(names=["good", "bad"])
        rows["label"] = [0, -1]
    data = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
    for split in ("train", "test"):
        data.to_parquet(tmp_path / f"{split}-00000-of-00001.parquet")
    words = "row 1: label -1 is not a class" if labelled else "words: the class names are unknown"
    with pytest.raises(KfacpackError, match=words):
        evaluate(colour_model, load_task("words", tmp_path), head=by_colour)


def test_a_model_and_a_task_may_be_named():
    by_name = evaluate("tiny", "digits", examples=16)
    assert by_name == evaluate(load_model("tiny"), load_task("digits"), examples=16)
    with refused(KfacpackError, "no-such-task"):
        evaluate("tiny", "no-such-task")
