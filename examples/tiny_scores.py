"""Measures the accuracy of `tiny` on the eight tasks before any fine-tuning, as in docs/results.md.

    python examples/tiny_scores.py [FOLDER]

FOLDER is the output folder of pretrain_tiny.py; the default is the weights in the package. The columns are test
accuracies: zero-shot with the class names, zero-shot with a sentence that was not used in pretraining, nearest class
mean of f, and nearest class mean of raw pixels.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import kfacpack as kp
from kfacpack.demo import EMBEDDED_MODELS
from kfacpack.models.data_loading import outputs
from kfacpack.models.model import Model
from kfacpack.tasks.registry import TASKS
from kfacpack.tasks.task import Split, Task

UNSEEN = ("could you find me the one with {} in it, please?",)
"""Not one of the sentences in examples/tiny/captions.py; most of its words occur in no caption."""


class Scores(NamedTuple):
    """Test accuracies, from 0 to 1."""

    zero_shot: float
    other_words: float
    means_of_f: float
    means_of_pixels: float


def labels(split: Split, numbers: Sequence[int]) -> Tensor:
    """Returns the labels of some examples, (N,)."""
    return torch.tensor([split.label(number) for number in numbers])


def pixels(split: Split, numbers: Sequence[int]) -> Tensor:
    """Returns the pixels of every image as a vector, (N, D)."""
    pictures = [np.asarray(split[number]["image"], dtype=np.float32).ravel() for number in numbers]
    return torch.from_numpy(np.stack(pictures))


def features(model: Model, split: Split, numbers: Sequence[int], task: Task) -> Tensor:
    """Returns f of every image, (N, D)."""
    return torch.cat([f for _, f in outputs(model, split, task.name, numbers, 64)])


def zero_shot(model: Model, task: Task, f: Tensor, true: Tensor) -> float:
    """Returns the accuracy of the head of the task's templates."""
    return (kp.head_for(model, task).logits(f).argmax(1) == true).float().mean().item()


def nearest_mean(train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor) -> float:
    """Returns the accuracy of the nearest class mean."""
    means = torch.stack([train[train_labels == k].mean(0) for k in range(int(train_labels.max()) + 1)])
    return (torch.cdist(test, means).argmin(1) == test_labels).float().mean().item()


def scores(model: Model, task: Task, every: int = 1) -> Scores:
    """Measures all accuracies on one task; the class means are those of each `every`-th training example."""
    train, test = task.split("train"), task.split("test")
    some, all_test = range(0, len(train), every), range(len(test))
    train_labels, test_labels = labels(train, some), labels(test, all_test)
    f = features(model, test, all_test, task)
    return Scores(
        zero_shot(model, task, f, test_labels),
        zero_shot(model, replace(task, templates=UNSEEN), f, test_labels),
        nearest_mean(features(model, train, some, task), train_labels, f, test_labels),
        nearest_mean(pixels(train, some), train_labels, pixels(test, all_test), test_labels),
    )


def main() -> None:
    """Prints the table."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    if folder and (folder / "merges.txt.gz").read_bytes() != EMBEDDED_MODELS["tiny"].merges.read_bytes():
        raise SystemExit(f"{folder}/merges.txt.gz: differs from the vocabulary in the package, so tokens would differ")
    model = kp.load_model("tiny", weights=folder and folder / "tiny.safetensors")
    table = Table("task", "classes", "zero-shot", "unseen sentence", "class means of f", "class means of pixels")
    for name in track(TASKS, description="measuring", transient=True, console=Console(stderr=True)):
        task = kp.load_task(name)
        table.add_row(name, str(len(task.classes or ())), *(f"{value:.3f}" for value in scores(model, task)))
    Console().print(table)


if __name__ == "__main__":
    main()
