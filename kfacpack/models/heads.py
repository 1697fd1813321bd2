"""A head, as it is used and as a vector's file keeps it; `kfacpack/heads.py` makes it. K classes, C the width of f.

Heads: frozen affine maps from f to logits. K classes, C the width of f, N examples.

    from texts        w_k = scale · normalised mean over templates of the class's text embeddings,  b = 0
    from words        w_k = the row of the output layer for the class's name as the next word,  b = 0
    from prototypes   w_k = scale · normalised (m_k - c),  b_k = -w_k·c

where m_k is the mean of f over the class's training examples, and c the mean of all m_k. `scale` is the model's own for
texts; for prototypes, which are further apart than texts are, it is the one, up to that, at which the cross-entropy of
those examples is least: a head that is too sure of itself makes the first steps of training too large. All are made at
the weights a model comes with, and stay as they are when its weights move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from kfacpack.errors import KfacpackError, printable
from kfacpack.models.data_loading import outputs
from kfacpack.models.functional import at_least_float32
from kfacpack.models.model import Model
from kfacpack.tasks.task import Split, Task, parent_task

if TYPE_CHECKING:
    from kfacpack.format.vector_manifest import HeadOrigin


@dataclass(frozen=True, eq=False)
class Head:
    weight: Tensor
    """(K, C), at least float32, on the model's device."""
    bias: Tensor
    """(K,)"""
    classes: tuple[str, ...]
    origin: HeadOrigin

    def logits(self, f: Tensor) -> Tensor:
        """(N, C) -> (N, K)."""
        return f.to(self.weight.dtype) @ self.weight.T + self.bias

    def to(self, device: torch.device) -> Head:
        return Head(self.weight.to(device), self.bias.to(device), self.classes, self.origin)

    def difference(self, other: Head) -> str | None:
        """How another head differs, in words, or None."""
        if self.classes != other.classes:
            first = next((pair for pair in zip(self.classes, other.classes, strict=False) if pair[0] != pair[1]), None)
            counts = f"{len(self.classes)} and {len(other.classes)} classes"
            return f"one calls a class {first[0]!r}, the other {first[1]!r}" if first else f"they have {counts}"
        if self.origin != other.origin:
            return f"one is from {self.origin}, the other from {other.origin}"
        for what, ours, theirs in (("weight", self.weight, other.weight), ("bias", self.bias, other.bias)):
            if ours.shape != theirs.shape or not torch.equal(ours.cpu().float(), theirs.cpu().float()):
                return f"their {what}s are not the same numbers"
        return None


HeadKind = Literal["auto", "text", "words", "prototypes"]
PER_CLASS = 256
"""How many training examples of a class its prototype is the mean of, at most."""


def head_for(
    model: Model,
    task: Task,
    kind: HeadKind = "auto",
    *,
    batch_size: int = 64,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Head:
    """`auto` takes texts where the model has a text tower and the task has templates; words where f predicts them and
    the classes begin with different ones; prototypes elsewhere.

    For prototypes, `on_progress` hears how many training examples are done, and how many there are.
    """
    found = _chosen(model, task, kind)
    if found == "text":
        return text_head(model, task)
    if found == "words":
        return word_head(model, task)
    return prototype_head(model, task, batch_size=batch_size, on_progress=on_progress)


def check_head(model: Model, task: Task, kind: HeadKind = "auto") -> None:
    """Refuse what `head_for` would refuse, without asking the model for anything that takes long."""
    found = _chosen(model, task, kind)
    if found == "text":
        _text_tower(model, task)
    elif found == "words":
        _word_rows(model, task)
    else:
        _members(task.split("train"), task, known_classes(task))


def _chosen(model: Model, task: Task, kind: HeadKind) -> HeadKind:
    """What `auto` stands for."""
    if kind == "text" or (kind == "auto" and model.encode_text and task.templates):
        return "text"
    if kind == "words" or (kind == "auto" and _is_single_token(model, task)):
        return "words"
    if kind in ("auto", "prototypes"):
        return "prototypes"
    raise KfacpackError(f"head {kind!r}: expected auto, text, words or prototypes")


def _text_tower(model: Model, task: Task) -> Callable[[Sequence[str]], Tensor]:
    known_classes(task)
    if model.encode_text is None:
        problem = f"{model.name} has no text tower, or the weights file has none of its weights"
        raise KfacpackError(f"{problem}; classes can have prototypes instead: --head prototypes")
    if not task.templates:
        raise KfacpackError(f"{printable(task.name)} has no templates to make texts from; choose --head prototypes")
    return model.encode_text


def text_head(model: Model, task: Task) -> Head:
    """CLIP's zero-shot classifier. An underscore in a class's name, as folders have them, is read as a space."""
    encode, classes = _text_tower(model, task), known_classes(task)
    texts = [template.replace("{}", name.replace("_", " ")) for name in classes for template in task.templates]
    embeddings = at_least_float32(encode(texts)).unflatten(0, (len(classes), -1))
    weight = model.logit_scale * normalize(embeddings.mean(1), dim=-1)
    return Head(weight, weight.new_zeros(len(classes)), classes, "text")


def word_head(model: Model, task: Task) -> Head:
    """The classes' names, as the model would say them."""
    weight, classes = _word_rows(model, task), known_classes(task)
    return Head(weight, weight.new_zeros(len(classes)), classes, "words")


def _word_rows(model: Model, task: Task) -> Tensor:
    classes = known_classes(task)
    if model.word_weights is None:
        raise KfacpackError(f"{model.name} predicts no words; classes can have prototypes instead: --head prototypes")
    weight = model.word_weights(_label_words(model, task))
    if (alike := _first_identical_rows(weight)) is not None:
        names = " and ".join(repr(printable(classes[k])) for k in alike)
        raise KfacpackError(f"{printable(task.name)}: the classes {names} begin with the same word for {model.name}")
    return weight


def _is_single_token(model: Model, task: Task) -> bool:
    """Whether the model tells the classes' names apart by the first word."""
    if model.word_weights is None:
        return False
    return _first_identical_rows(model.word_weights(_label_words(model, task))) is None


def _label_words(model: Model, task: Task) -> Sequence[str]:
    classes = known_classes(task)
    if model.label_words is None:
        return [name.replace("_", " ") for name in classes]
    return model.label_words(classes, task.name)


def _first_identical_rows(weight: Tensor) -> tuple[int, int] | None:
    """The first two rows of (K, C) that are the same."""
    for second in range(len(weight)):
        same = (weight[:second] == weight[second]).all(1).nonzero()
        if len(same):
            return int(same[0]), second
    return None


def prototype_head(
    model: Model,
    task: Task,
    *,
    batch_size: int = 64,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Head:
    """From the training split: of each class all examples, or `PER_CLASS` evenly spaced ones, in the split's order.

    A part of a task (NAME@k/n) has the prototypes of the whole: all classes, from the whole's training split.
    """
    task = parent_task(task)
    classes = known_classes(task)
    split = task.split("train")
    members = _members(split, task, classes)
    class_of = {number: k for k, numbers in enumerate(members) for number in numbers}
    # In float64 on the CPU, so that the order of the examples leaves no trace.
    labels, features, f = [], [], torch.zeros(0)
    on_progress(0, len(class_of))
    for chosen, f in outputs(model, split, task.name, sorted(class_of), batch_size):
        labels += [class_of[number] for number in chosen]
        features.append(f.cpu().double())
        on_progress(len(labels), len(class_of))
    known, found = torch.tensor(labels), torch.cat(features)
    sums = torch.zeros(len(classes), model.function.width, dtype=torch.float64).index_add_(0, known, found)
    means = sums / torch.tensor([[len(numbers)] for numbers in members])
    centre = means.mean(0)
    directions = normalize(means - centre, dim=-1)
    # For an f that is not normalised, the same scales are tried relative to its standard deviation.
    spread = 1.0 if model.function.normalized else float((found - centre).square().sum(1).mean().sqrt()) or 1.0
    weight = _best_scale((found - centre) @ directions.T / spread, known, model.logit_scale) / spread * directions
    return Head(weight.to(f), -(weight @ centre).to(f), classes, "prototypes")


def _best_scale(cosines: Tensor, labels: Tensor, most: float) -> float:
    """By what (N, K) is to be multiplied for the least cross-entropy, to a tenth; at most by `most`.

    There is no least one where every example is right already.
    """
    scales = 10 ** torch.arange(0, 3.01, 0.05, dtype=torch.float64)
    scales = scales[scales <= most]
    losses = torch.stack([cross_entropy(scale * cosines, labels) for scale in scales])
    return float(scales[losses.argmin()])


def known_classes(task: Task) -> tuple[str, ...]:
    if not task.classes:
        remedy = "Expected a column of type ClassLabel, or pictures in a folder for each class"
        raise KfacpackError(f"{printable(task.name)}: the names of its classes are not known. {remedy}")
    return task.classes


def require_several(task: Task, classes: Sequence[str]) -> None:
    """Refuse a task whose head could only ever say one thing."""
    if len(classes) < 2:
        only = printable(classes[0])
        raise KfacpackError(f"{printable(task.name)} has one class, {only!r}: there is nothing to learn")


def require_fitting(head: Head, task: Task) -> None:
    """Refuse a head whose classes are other ones, or in another order, than the labels mean."""
    if head.classes != task.classes:
        raise KfacpackError(f"the head's classes are not those of {printable(task.name)}: make it for this task")


def _members(split: Split, task: Task, classes: tuple[str, ...]) -> list[Sequence[int]]:
    """Of each class, the examples that its prototype is the mean of."""
    members: list[list[int]] = [[] for _ in classes]
    for number in range(len(split)):
        members[split.label(number)].append(number)
    if missing := [name for name, numbers in zip(classes, members, strict=True) if not numbers]:
        problem = f"class {printable(missing[0])!r} has no example in split {split.source.split!r}"
        raise KfacpackError(f"{printable(task.name)}: {problem}; a prototype needs at least one")
    return [_evenly_spaced(numbers, PER_CLASS) for numbers in members]


def _evenly_spaced(numbers: Sequence[int], most: int) -> Sequence[int]:
    if len(numbers) <= most:
        return numbers
    return [numbers[k * len(numbers) // most] for k in range(most)]
