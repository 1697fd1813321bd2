"""Accuracy of a model and a head on examples of a task, with or without a task vector."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import exp, isfinite
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kfacpack.errors import KfacpackError, NotFiniteError, printable
from kfacpack.evaluation.edited_model import OutputCache, device_of, forward_passes, linear_outputs, multiples
from kfacpack.format.identity import base_task_name
from kfacpack.format.units import OnProgress
from kfacpack.models.data_loading import name_task_in_errors, prepared_batches
from kfacpack.models.families import resolve_model
from kfacpack.models.functional import tensors_of
from kfacpack.models.heads import CompletionHead, Head, head_for, require_classes, require_matching_classes
from kfacpack.models.model import Batch, Model
from kfacpack.tasks.registry import resolve_task
from kfacpack.tasks.task import Split, Task, has_completions, parse_count, sample_indices
from kfacpack.vectors.task_vector import TaskVector

if TYPE_CHECKING:
    from kfacpack.evaluation.edited_model import BatchForwards


class ProgressCounter:
    """A counter that reports the combined progress of several computations.

    Args:
        total: Total number of examples that the computations process.
        on_progress: Called with the number of examples done and the total number.
    """

    def __init__(self, total: int, on_progress: OnProgress):
        self._done, self._total, self._on_progress = 0, total, on_progress
        on_progress(0, total)

    def add(self, examples: int) -> None:
        """Adds `examples` to the number of examples done, and reports the progress."""
        self._done += examples
        self._on_progress(self._done, self._total)

    def subcounter(self) -> OnProgress:
        """Returns a progress callback for the next computation. That computation counts its own examples from zero."""
        before = self._done
        return lambda done, total: self.add(before + done - self._done)


@dataclass(frozen=True)
class EvaluationSet:
    """Examples of a task on which a model is evaluated, and their labels."""

    task: Task
    """The task."""
    split: Split
    """The split that contains the examples."""
    numbers: Sequence[int]
    """Indices of the examples in the split."""
    labels: Sequence[int]
    """Labels of these examples, as indices into the task's classes. For a task without classes, all labels are zero."""
    outputs: OutputCache | None = field(default=None, compare=False, repr=False)
    """Cache of model outputs on these examples, shared by several measurements of linear vectors; None for no cache."""

    @classmethod
    def of(cls, task: Task, split: str = "test", examples: int | str = "all", seed: int = 0) -> EvaluationSet:
        """Selects examples of a split at random, and reads their labels.

        Args:
            task: The task.
            split: Name of the split.
            examples: "all", a number, or a percentage of the split such as "30%".
            seed: Seed for the random selection.

        Returns:
            The selected examples with their labels.

        Raises:
            KfacpackError: If the split is empty or unknown, if the task has neither class names nor completions, or if
                `examples` is invalid.
        """
        completions = has_completions(task)
        if not completions:
            require_classes(task)
        loaded = task.split(split)
        if not len(loaded):
            raise KfacpackError(f"{printable(task.name)}: split {split!r} has no examples")
        numbers = sample_indices(len(loaded), parse_count(str(examples), len(loaded)), seed)
        labels = [0 if completions else loaded.label(number) for number in numbers]
        return cls(task, loaded, numbers, labels)


@dataclass(frozen=True)
class Score:
    """Result of the evaluation of a model on examples of a task."""

    correct: int
    """Number of correctly classified examples or, for completions, correctly predicted tokens."""
    examples: int
    """Number of examples."""
    tokens: int | None = None
    """Number of tokens in all completions, or None for a task with classes."""
    log_likelihood: float | None = None
    """Log-likelihood of all completions in nats, or None for a task with classes."""

    @property
    def predictions(self) -> int:
        """Number of predictions: one per example, or one per token of the completions."""
        return self.tokens or self.examples

    @property
    def accuracy(self) -> float:
        """Fraction of the predictions that are correct."""
        return self.correct / self.predictions

    @property
    def perplexity(self) -> float | None:
        """Per-token perplexity of the completions, or None for a task with classes."""
        if self.tokens is None or self.log_likelihood is None:
            return None
        return exp(min(-self.log_likelihood / self.tokens, 700.0))

    def plus(self, other: Score | None) -> Score:
        """Returns the combined score on these examples and on other examples of the same task.

        Args:
            other: Score on the other examples, or None if there are no other examples.
        """
        if other is None:
            return self
        correct, examples = self.correct + other.correct, self.examples + other.examples
        if self.log_likelihood is None or other.log_likelihood is None:
            return Score(correct, examples)
        tokens = (self.tokens or 0) + (other.tokens or 0)
        return Score(correct, examples, tokens, self.log_likelihood + other.log_likelihood)


def evaluate(
    model: Model | str,
    task: Task | str,
    *,
    head: Head | None = None,
    split: str = "test",
    vector: TaskVector | None = None,
    alpha: float = 1.0,
    examples: int | str = "all",
    seed: int = 0,
    batch_size: int = 64,
    on_progress: OnProgress = lambda done, total: None,
) -> Score:
    """Evaluates a model on a task, optionally with α times a task vector added to the model.

    The predicted class of an example is the one with the largest logit.

    Args:
        model: A model from `kp.load_model`, or its name.
        task: A task from `kp.load_task`, or its name.
        head: Head to use. Defaults to the vector's head for this task, or else to `kp.head_for(model, task)`.
        split: Name of the split.
        vector: Task vector to add to the model, if any.
        alpha: Coefficient of the vector.
        examples: "all", a number, or a percentage of the split such as "30%".
        seed: Seed for the random selection of examples.
        batch_size: Examples per forward pass.
        on_progress: Called with the number of examples done and the total number.

    Returns:
        The score. Its property `accuracy` is the fraction of correct predictions.

    Raises:
        KfacpackError: If the model, head, vector and task are incompatible, or if the outputs contain NaN or Inf.

    Example:
        >>> kp.evaluate("tiny", "digits", vector=kp.TaskVector.load("digits.safetensors")).accuracy
    """
    model, head, evaluation_set = scoring_inputs(model, task, head, vector, split, examples, seed)
    return score(
        model, head, evaluation_set, vector=vector, alpha=alpha, batch_size=batch_size, on_progress=on_progress
    )


def scoring_inputs(
    model: Model | str,
    task: Task | str,
    head: Head | None,
    vector: TaskVector | None,
    split: str,
    examples: int | str,
    seed: int,
) -> tuple[Model, Head, EvaluationSet]:
    """Returns the model, the head and the examples that the arguments select; see `evaluate`."""
    task = resolve_task(task)
    evaluation_set = EvaluationSet.of(task, split, examples, seed)
    model = resolve_model(model)
    return model, head or head_of(model, task, vector), evaluation_set


def head_of(model: Model, task: Task, vector: TaskVector | None) -> Head:
    """Returns the vector's head for the task or, if the vector has no such head, the default head of the model."""
    return vector_head(task, vector) or head_for(model, task)


def vector_head(task: Task, vector: TaskVector | None) -> Head | None:
    """Returns the vector's head for a task, or None if the vector has no such head.

    If the vector has no head for the task itself, but has heads for class splits of the same task, such as "cars@1/4"
    for "cars", the head that these class splits share is returned.

    Raises:
        KfacpackError: If the heads of several class splits differ.
    """
    heads = vector.heads if vector else {}
    if task.name in heads:
        return heads[task.name]
    base_name = base_task_name(task.name)
    split_heads = [(name, head) for name, head in heads.items() if base_task_name(name) == base_name]
    if not split_heads:
        return None
    (first_name, first), *others = split_heads
    for name, head in others:
        if difference := first.difference(head):
            problem = f"the vector's heads for {printable(first_name)} and {printable(name)} differ: {difference}"
            raise KfacpackError(f"{printable(task.name)}: {problem}. Choose a head with --head (head=...)")
    return first


def score(
    model: Model,
    head: Head,
    evaluation_set: EvaluationSet,
    *,
    vector: TaskVector | None = None,
    alpha: float = 1.0,
    batch_size: int = 64,
    on_progress: OnProgress = lambda done, total: None,
) -> Score:
    """Returns the score of a model to which α times a task vector is added; see `scores`."""
    return scores(model, head, evaluation_set, vector, (alpha,), batch_size=batch_size, on_progress=on_progress)[0]


def scores(
    model: Model,
    head: Head,
    evaluation_set: EvaluationSet,
    vector: TaskVector | None,
    alphas: Sequence[float],
    *,
    batch_size: int = 64,
    on_progress: OnProgress = lambda done, total: None,
) -> list[Score]:
    """Returns the score of a model with α times a task vector added, for each α.

    Each score is bitwise equal to the score of a separate evaluation at the same α.

    Args:
        model: The model.
        head: Head to use.
        evaluation_set: Examples and labels.
        vector: Task vector, or None to evaluate the model itself, in which case `alphas` must be (1.0,).
        alphas: Coefficients of the vector.
        batch_size: Examples per forward pass.
        on_progress: Called with the number of examples done and the total number. Each example counts once if the
            vector is linear, and otherwise once per α.

    Raises:
        KfacpackError: If the arguments are incompatible, or if the outputs contain NaN or Inf.
    """
    task = evaluation_set.task
    if not isinstance(head, CompletionHead):
        require_matching_classes(head, task)
    check_alphas(vector, alphas)
    head = head.to(device_of(model))
    label_of = dict(zip(evaluation_set.numbers, evaluation_set.labels, strict=True))
    passes = _output_passes(model, evaluation_set, vector, alphas, batch_size)
    total = len(passes) * len(evaluation_set.numbers)
    results: list[Score] = []
    done = 0
    on_progress(done, total)
    for output_pass in passes:
        pass_scores: Sequence[Score] = ()
        for numbers, edited in output_pass:
            labels = torch.tensor([label_of[number] for number in numbers])
            with torch.no_grad(), name_task_in_errors(evaluation_set.split, task.name, numbers):
                if isinstance(head, CompletionHead):
                    batch = model.prepare([evaluation_set.split[number] for number in numbers], task.name)
                    scores = [_completion_score(head, f, batch, len(numbers)) for f in edited]
                else:
                    scores = [Score(int((_predictions(head, f) == labels).sum()), len(numbers)) for f in edited]
            previous: Sequence[Score | None] = pass_scores or [None] * len(scores)
            pass_scores = [more.plus(before) for before, more in zip(previous, scores, strict=True)]
            done += len(numbers)
            on_progress(done, total)
        results += pass_scores
    return results


def _completion_score(head: CompletionHead, f: Tensor, batch: Batch, examples: int) -> Score:
    log_likelihoods, correct = head.log_likelihoods(f, batch)
    if not bool(log_likelihoods.isfinite().all()):
        raise NotFiniteError("the logits contain NaN or Inf")
    return Score(correct, examples, len(f), float(log_likelihoods.double().sum()))


def _output_passes(
    model: Model, evaluation_set: EvaluationSet, vector: TaskVector | None, alphas: Sequence[float], batch_size: int
) -> list[Iterator[tuple[Sequence[int], list[Tensor]]]]:
    """Returns the passes over the examples that compute the outputs f with α times a vector added, for every α.

    A pass computes the outputs for one value of α or for all of them. For every batch, the pass yields the indices of
    the examples and a list with one tensor of outputs, (N, C), for each of these values. The passes are returned in the
    order of `alphas`.
    """
    if vector is not None and vector.is_linear:
        factor, direction = vector.as_multiple()
        outputs = linear_outputs(model, evaluation_set, [direction], batch_size)
        return [((numbers, multiples(f, change, factor, alphas)) for numbers, f, (change,) in outputs)]
    passes = forward_passes(model, vector, alphas)
    batches = _PreparedBatches(model, evaluation_set, batch_size, keep=len(passes) > 1)

    def outputs_of(forward_pass: AbstractContextManager[BatchForwards]) -> Iterator[tuple[Sequence[int], list[Tensor]]]:
        with forward_pass as forwards:
            for numbers, batch in batches:
                with torch.no_grad(), name_task_in_errors(evaluation_set.split, evaluation_set.task.name, numbers):
                    edited = forwards(batch)
                yield numbers, edited

    return [outputs_of(forward_pass) for forward_pass in passes]


def _predictions(head: Head, f: Tensor) -> Tensor:
    """Returns the class with the largest logit for each example, (N,), on the CPU."""
    logits = head.logits(f)
    if not bool(logits.isfinite().all()):
        raise NotFiniteError("the logits contain NaN or Inf")
    return logits.argmax(1).cpu()


def count_examples(
    model: Model, vector: TaskVector | None, alphas: Sequence[float], evaluation_sets: Iterable[EvaluationSet]
) -> int:
    """Returns the number of examples that `scores` processes for these evaluation sets, over all passes."""
    examples = sum(len(evaluation_set.numbers) for evaluation_set in evaluation_sets)
    return len(forward_passes(model, vector, alphas)) * examples


def check_alphas(vector: TaskVector | None, alphas: Sequence[float]) -> None:
    """Checks coefficients of a task vector.

    Raises:
        KfacpackError: If `alphas` is empty or contains NaN or Inf, or if there is no vector and `alphas` is not (1.0,).
    """
    if not alphas:
        raise KfacpackError("alphas is empty, expected at least one number")
    if vector is None and tuple(alphas) != (1.0,):
        raise KfacpackError(f"alpha is {alphas[0]}, but there is no task vector to multiply by it; pass a vector")
    if invalid := [alpha for alpha in alphas if not isfinite(alpha)]:
        raise KfacpackError(f"alpha is {invalid[0]}, expected a finite number")


class _PreparedBatches:
    """The batches of an evaluation set.

    If the batches are small enough, they are kept in memory for further passes over the examples.
    """

    MAX_BYTES = 512_000_000

    def __init__(self, model: Model, evaluation_set: EvaluationSet, batch_size: int, *, keep: bool) -> None:
        self._model, self._set, self._batch_size = model, evaluation_set, batch_size
        self._bytes_left = self.MAX_BYTES if keep else 0
        self._kept: list[tuple[Sequence[int], Batch]] | None = None

    def __iter__(self) -> Iterator[tuple[Sequence[int], Batch]]:
        """Yields the indices of the examples in each batch, and the batch itself."""
        if self._kept is not None:
            yield from self._kept
            return
        kept = []
        source = self._set.split, self._set.task.name, self._set.numbers
        for numbers, batch in prepared_batches(self._model, *source, self._batch_size):
            self._bytes_left -= sum(tensor.nbytes for tensor in tensors_of(batch))
            if self._bytes_left >= 0:
                kept.append((numbers, batch))
            else:
                kept.clear()
            yield numbers, batch
        if self._bytes_left >= 0:
            self._kept = kept
