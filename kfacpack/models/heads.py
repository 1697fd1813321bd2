"""Heads: frozen maps from f to the logits of a task's classes or, for completions, of the tokens in the vocabulary.

K is the number of classes, C is the width of f, and N is the number of examples. The logit of class k is w_k·f + b_k.

    from texts        w_k = scale · normalised mean over templates of the class's text embeddings,  b = 0
    from words        w_k = the row of the output layer that predicts the first token of the class's answer,  b = 0;
                      if an answer has several tokens, the logits are the log-likelihoods of the whole answers
    from prototypes   w_k = scale · normalised (m_k - c),  b_k = -w_k·c

where m_k is the mean of f over the class's training examples, and c is the mean of all m_k. For texts, `scale` is the
logit scale of the model. For prototypes, this scale would make the first training steps too large, because the angles
between prototypes are larger than those between text embeddings. For prototypes, `scale` is therefore the value that
minimises the cross-entropy on the training examples, with the model's logit scale as the upper bound. Heads are
computed from the pretrained weights and do not change during training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from kfacpack.errors import KfacpackError, printable
from kfacpack.models.data_loading import outputs
from kfacpack.models.functional import answer_positions, at_least_float32
from kfacpack.models.model import Batch, Model
from kfacpack.tasks.task import Split, Task, has_completions, parent_task

if TYPE_CHECKING:
    from kfacpack.format.vector_manifest import HeadKind, HeadOrigin


@dataclass(frozen=True, eq=False)
class Head:
    """A frozen classifier on top of f.

    Example:
        >>> head = kp.head_for(model, task)
        >>> predictions = head.logits(model.forward(batch)).argmax(1)
    """

    weight: Tensor
    """Weights, (K, C), in at least float32, on the model's device."""
    bias: Tensor
    """Biases, (K,)."""
    classes: tuple[str, ...]
    """Names of the K classes."""
    origin: HeadOrigin
    """What the head was built from: text, words or prototypes."""

    def logits(self, f: Tensor) -> Tensor:
        """Returns the logits of the classes.

        Args:
            f: Model outputs, (N, C), of any float dtype.

        Returns:
            Logits, (N, K), in the dtype of the head.
        """
        return f.to(self.weight.dtype) @ self.weight.T + self.bias

    def loss(self, f: Tensor, labels: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the sum of the examples' cross-entropies, and the number of correct predictions.

        Args:
            f: Model outputs, (P, C). Language models may have several rows per example.
            labels: Classes of the N examples, (N,).
            batch: The batch that f was computed from.
        """
        logits = self.logits(f)
        return cross_entropy(logits, labels, reduction="sum"), (logits.argmax(1) == labels).sum()

    @property
    def is_stored(self) -> bool:
        """Whether task vector files contain the head. If False, the head is rebuilt from the model."""
        return True

    def of_classes(self, classes: range) -> Head:
        """Returns a head for a range of this head's classes. The tensors of both heads share memory.

        Args:
            classes: Range of class indices.
        """
        rows = slice(classes.start, classes.stop)
        return replace(self, weight=self.weight[rows], bias=self.bias[rows], classes=self.classes[rows])

    def to(self, device: torch.device) -> Head:
        """Returns a copy of the head on a device.

        Args:
            device: Target device.
        """
        return replace(self, weight=self.weight.to(device), bias=self.bias.to(device))

    def difference(self, other: Head) -> str | None:
        """Returns a description of the first difference between two heads, or None if they are equal.

        Args:
            other: The head to compare with.
        """
        if self.classes != other.classes:
            first = next((pair for pair in zip(self.classes, other.classes, strict=False) if pair[0] != pair[1]), None)
            if first is None:
                return f"the heads have {len(self.classes)} and {len(other.classes)} classes"
            return f"class {first[0]!r} in one head is {first[1]!r} in the other"
        if self.origin != other.origin:
            return f"one head was built from {self.origin}, the other from {other.origin}"
        for attribute, own, others in (("weight", self.weight, other.weight), ("bias", self.bias, other.bias)):
            if own.shape != others.shape or not torch.equal(own.cpu().float(), others.cpu().float()):
                return f"the heads' {attribute} tensors differ"
        return None


@dataclass(frozen=True, eq=False)
class AnswerHead(Head):
    """A head that scores each class by the log-likelihood of its answer. It is used if any answer has several tokens.

    `weight` is the output layer, (vocabulary, C). For each example, f has one row per token of each answer.
    """

    answers: tuple[tuple[int, ...], ...] = ()
    """Tokens of each answer, in the order of the rows of f."""
    answer_of: tuple[int, ...] = ()
    """For each class, the index of its answer."""

    def logits(self, f: Tensor) -> Tensor:
        """Returns the log-likelihoods of the classes.

        Args:
            f: Model outputs, (N · T, C), where T is the total number of tokens in all answers.

        Returns:
            Log-likelihoods, (N, K), in the dtype of the head.
        """
        tokens, order = self._indices
        rows = super().logits(f).log_softmax(1).unflatten(0, (-1, len(tokens)))
        chosen = rows.gather(2, tokens.expand(len(rows), -1)[..., None])[..., 0]
        scores = torch.stack([part.sum(1) for part in chosen.split([len(answer) for answer in self.answers], 1)], 1)
        return scores[:, order]

    @cached_property
    def _indices(self) -> tuple[Tensor, Tensor]:
        """The tokens of all answers, and `answer_of`, as tensors on the device of the head."""
        tokens = [token for answer in self.answers for token in answer]
        device = self.weight.device
        return torch.tensor(tokens, device=device), torch.tensor(self.answer_of, device=device)

    def of_classes(self, classes: range) -> Head:
        """Returns a head for a range of this head's classes."""
        rows = slice(classes.start, classes.stop)
        return replace(self, classes=self.classes[rows], answer_of=self.answer_of[rows])

    @property
    def is_stored(self) -> bool:
        """Always False: the weight is the output layer of the model, so the head can be rebuilt from the model."""
        return False


@dataclass(frozen=True, eq=False)
class CompletionHead(Head):
    """A head that predicts the tokens of completions and has no classes.

    `weight` is the output layer, (vocabulary, C).
    """

    def loss(self, f: Tensor, labels: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the sum of the examples' mean cross-entropies per token, and the sum of their token accuracies."""
        examples, targets = (tensor.to(f.device) for tensor in answer_positions(batch, len(f)))
        counts = torch.zeros_like(labels, dtype=f.dtype).index_add_(
            0, examples, torch.ones_like(examples, dtype=f.dtype)
        )
        weights, logits = (1 / counts)[examples], self.logits(f)
        losses = cross_entropy(logits, targets, reduction="none")
        return (losses * weights).sum(), ((logits.argmax(1) == targets) * weights).sum()

    def log_likelihoods(self, f: Tensor, batch: Batch) -> tuple[Tensor, int]:
        """Returns the log-likelihood of each token of the completions, and the number of correct predictions."""
        logits, targets = self.logits(f), answer_positions(batch, len(f))[1].to(f.device)
        return -cross_entropy(logits, targets, reduction="none"), int((logits.argmax(1) == targets).sum())

    @property
    def is_stored(self) -> bool:
        """Always False: the weight is the output layer of the model, so the head can be rebuilt from the model."""
        return False


MAX_PER_CLASS = 256
"""Maximum number of training examples per class from which prototypes are computed."""


def head_for(
    model: Model,
    task: Task,
    *,
    kind: HeadKind = "auto",
    batch_size: int = 64,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Head:
    """Builds the head of a task for a model.

    Args:
        model: Pretrained model.
        task: Task with class names, or with prompts and completions. In the second case, `kind` is ignored.
        kind: `"text"`, `"words"`, `"prototypes"` or `"auto"`. `"auto"` selects `"text"` if the model has a text tower
            and the task has templates. Otherwise, it selects `"words"` if f predicts words that distinguish the
            classes. In all other cases, it selects `"prototypes"`.
        batch_size: Examples per batch; used only for prototypes.
        on_progress: Called with the number of processed examples and the total number; used only for prototypes.

    Returns:
        A frozen head.

    Raises:
        KfacpackError: If the model or the task does not support this kind of head.

    Example:
        >>> head = kp.head_for(kp.load_model("tiny"), kp.load_task("digits"))
        >>> head.origin
        'text'
    """
    if has_completions(task):
        return completion_head(model, task)
    resolved = _resolve_kind(model, task, kind)
    if resolved == "text":
        return text_head(model, task)
    if resolved == "words":
        return word_head(model, task)
    return prototype_head(model, task, batch_size=batch_size, on_progress=on_progress)


def check_head(model: Model, task: Task, kind: HeadKind = "auto") -> None:
    """Checks that `head_for` would succeed, without running the model.

    Raises:
        KfacpackError: If the model or the task does not support this kind of head.
    """
    if has_completions(task):
        completion_head(model, task)
        return
    resolved = _resolve_kind(model, task, kind)
    if resolved == "text":
        _require_text_tower(model, task)
    elif resolved == "words":
        word_head(model, task)
    else:
        whole = parent_task(task)  # the prototypes for a class split are those of the whole task
        _examples_by_class(whole.split("train"), whole, require_classes(whole))


def _resolve_kind(model: Model, task: Task, kind: HeadKind) -> HeadKind:
    """Returns the kind of head to build. For `"auto"`, the kind depends on the model and the task."""
    if kind == "text" or (kind == "auto" and model.encode_text and task.templates):
        return "text"
    if kind == "words" or (kind == "auto" and _has_distinct_words(model, task)):
        return "words"
    if kind in ("auto", "prototypes"):
        return "prototypes"
    raise KfacpackError(f"unknown kind of head {kind!r}; expected auto, text, words or prototypes")


def _require_text_tower(model: Model, task: Task) -> Callable[[Sequence[str]], Tensor]:
    require_classes(task)
    if model.encode_text is None:
        problem = f"{model.name} has no text tower, or the weights file does not contain it"
        raise KfacpackError(f"{problem}; use --head prototypes (head='prototypes' or kind='prototypes')")
    if not task.templates:
        problem = f"the task {printable(task.name)} has no prompt templates"
        raise KfacpackError(f"{problem}; use --head prototypes (head='prototypes' or kind='prototypes')")
    return model.encode_text


def text_head(model: Model, task: Task) -> Head:
    """Builds CLIP's zero-shot classifier. Underscores in class names are replaced by spaces.

    Raises:
        KfacpackError: If the model has no text tower, or the task has no classes or templates.
    """
    encode, classes = _require_text_tower(model, task), require_classes(task)
    texts = [template.replace("{}", name.replace("_", " ")) for name in classes for template in task.templates]
    embeddings = at_least_float32(encode(texts)).unflatten(0, (len(classes), -1))
    weight = model.logit_scale * normalize(embeddings.mean(1), dim=-1)
    return Head(weight, weight.new_zeros(len(classes)), classes, "text")


def word_head(model: Model, task: Task) -> Head:
    """Builds a head that scores class names, or the answers in the task's template, as continuations of the prompt.

    Args:
        model: Language model.
        task: Task with class names.

    Raises:
        KfacpackError: If the model does not predict words, the template has no answer for a class, or the words of two
            classes start with the same token. If any answer in the template has several tokens, two answers may start
            with the same token, but must not be equal.
    """
    if answers := _answers(model, task):
        return _answer_head(model, task, answers)
    weight, classes = _word_rows(model, task), require_classes(task)
    return Head(weight, weight.new_zeros(len(classes)), classes, "words")


def completion_head(model: Model, task: Task) -> Head:
    """Builds the head of a task with prompts and completions: the output layer of a causal language model.

    Args:
        model: Causal language model.
        task: Task with the columns `prompt` and `completion`.

    Raises:
        KfacpackError: If the model is not a causal language model.
    """
    if model.answer_tokens is None or model.output_layer is None:
        problem = f"the task {printable(task.name)} has prompts and completions"
        raise KfacpackError(f"{problem}, which require a causal language model (lm:NAME); got {model.name}")
    weight = at_least_float32(model.output_layer())
    return CompletionHead(weight, weight.new_zeros(len(weight)), (), "words")


def _answers(model: Model, task: Task) -> tuple[tuple[int, ...], ...]:
    """Returns the tokens of each answer in the task's template, or () if f has one row per example."""
    tokens = model.answer_tokens(task.name) if model.answer_tokens else None
    return tuple(map(tuple, tokens or ()))


def _answer_head(model: Model, task: Task, answers: tuple[tuple[int, ...], ...]) -> Head:
    assert model.output_layer is not None
    assert model.answer_classes is not None
    classes, named = require_classes(task), list(model.answer_classes(task.name))
    if unnamed := [name for name in classes if name not in named]:
        problem = f"the template has no answer for class {printable(unnamed[0])!r}, only for {', '.join(named)}"
        raise KfacpackError(f"{printable(task.name)}: {problem}")
    answer_of = tuple(named.index(name) for name in classes)
    for second, own in enumerate(answer_of):
        if any(answers[own] == answers[other] for other in answer_of[:second]):
            raise KfacpackError(
                f"{printable(task.name)}: class {printable(classes[second])!r} has the same answer as another class"
            )
    weight = at_least_float32(model.output_layer())
    return AnswerHead(weight, weight.new_zeros(len(weight)), classes, "words", answers, answer_of)


def _word_rows(model: Model, task: Task) -> Tensor:
    classes = require_classes(task)
    if model.word_weights is None:
        problem = f"{model.name} predicts no words"
        raise KfacpackError(f"{problem}; use --head prototypes (head='prototypes' or kind='prototypes')")
    weight = model.word_weights(_label_words(model, task))
    if (identical := _first_identical_rows(weight)) is not None:
        names = " and ".join(repr(printable(classes[k])) for k in identical)
        problem = f"the words for {names} start with the same token in {model.name}"
        remedy = "use --head prototypes (head='prototypes' or kind='prototypes')"
        raise KfacpackError(f"{printable(task.name)}: {problem}; {remedy}")
    return weight


def _has_distinct_words(model: Model, task: Task) -> bool:
    """Returns whether a head from words can distinguish the classes.

    If the head scores only the first token of each word, these tokens must differ. A head that scores all tokens of the
    answers (see `AnswerHead`) has no such requirement.
    """
    if model.word_weights is None:
        return False
    if _answers(model, task):
        return True
    return _first_identical_rows(model.word_weights(_label_words(model, task))) is None


def _label_words(model: Model, task: Task) -> Sequence[str]:
    classes = require_classes(task)
    if model.label_words is None:
        return [name.replace("_", " ") for name in classes]
    return model.label_words(classes, task.name)


def _first_identical_rows(weight: Tensor) -> tuple[int, int] | None:
    """Returns the indices of the first two equal rows of a matrix, (K, C), or None if all rows differ."""
    for second in range(len(weight)):
        equal = (weight[:second] == weight[second]).all(1).nonzero()
        if len(equal):
            return int(equal[0]), second
    return None


def prototype_head(
    model: Model,
    task: Task,
    *,
    batch_size: int = 64,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Head:
    """Builds a head from the class means of f over the training split.

    Uses at most `MAX_PER_CLASS` evenly spaced examples of each class. For a class split (`NAME@k/n`), the head has the
    prototypes of all classes of the whole task.

    Args:
        model: Pretrained model.
        task: Task with class names.
        batch_size: Examples per batch.
        on_progress: Called with the number of processed training examples and their total number.

    Raises:
        KfacpackError: If the class names are unknown, or a class has no training example.
    """
    task = parent_task(task)
    classes = require_classes(task)
    split = task.split("train")
    members = _examples_by_class(split, task, classes)
    class_of = {index: k for k, indices in enumerate(members) for index in indices}
    # Sum in float64 on the CPU, so that the result does not depend on the order of the examples.
    label_list, parts, f = [], [], torch.zeros(0)
    on_progress(0, len(class_of))
    for chosen, f in outputs(model, split, task.name, sorted(class_of), batch_size):
        if len(f) != len(chosen):
            problem = f"f of {model.name} has several rows for each example of the task {printable(task.name)!r}"
            raise KfacpackError(f"{problem}; prototypes require one row per example. Use --head words (kind='words')")
        label_list += [class_of[number] for number in chosen]
        parts.append(f.cpu().double())
        on_progress(len(label_list), len(class_of))
    labels, features = torch.tensor(label_list), torch.cat(parts)
    sums = torch.zeros(len(classes), model.function.width, dtype=torch.float64).index_add_(0, labels, features)
    means = sums / torch.tensor([[len(indices)] for indices in members])
    centre = means.mean(0)
    directions = normalize(means - centre, dim=-1)
    # If f is not normalised, the scales are divided by its standard deviation.
    spread = 1.0 if model.function.normalized else float((features - centre).square().sum(1).mean().sqrt()) or 1.0
    weight = _best_scale((features - centre) @ directions.T / spread, labels, model.logit_scale) / spread * directions
    return Head(weight.to(f), -(weight @ centre).to(f), classes, "prototypes")


def _best_scale(cosines: Tensor, labels: Tensor, limit: float) -> float:
    """Returns the factor that turns cosines, (N, K), into the logits with the smallest cross-entropy.

    The candidate factors range from 1 to `limit` in steps of 12%. Without a limit, the cross-entropy would have
    no minimum if all examples were classified correctly.
    """
    scales = 10 ** torch.arange(0, 3.01, 0.05, dtype=torch.float64)
    scales = scales[scales <= limit]
    losses = torch.stack([cross_entropy(scale * cosines, labels) for scale in scales])
    return float(scales[losses.argmin()])


def require_classes(task: Task) -> tuple[str, ...]:
    """Returns the class names of a task.

    Raises:
        KfacpackError: If the names are unknown.
    """
    if not task.classes:
        labelled = "a column of type ClassLabel, images in one folder per class"
        remedy = f"Expected {labelled}, or texts in the columns 'prompt' and 'completion'"
        raise KfacpackError(f"{printable(task.name)}: the class names are unknown. {remedy}")
    return task.classes


def require_several_classes(task: Task, classes: Sequence[str]) -> None:
    """Checks that there are at least two classes.

    Raises:
        KfacpackError: If there is only one class.
    """
    if len(classes) < 2:
        only = printable(classes[0])
        raise KfacpackError(f"the task {printable(task.name)} has only one class, {only!r}; expected at least two")


def require_matching_classes(head: Head, task: Task) -> None:
    """Checks that a head has the classes of a task, in the same order.

    Raises:
        KfacpackError: If the classes or their order differ.
    """
    if head.classes != task.classes:
        raise KfacpackError(
            f"the head's classes differ from those of the task {printable(task.name)}; build a head for this task"
        )


def _examples_by_class(split: Split, task: Task, classes: tuple[str, ...]) -> list[Sequence[int]]:
    """Returns, for each class, the indices of the examples from which its prototype is computed."""
    members: list[list[int]] = [[] for _ in classes]
    for number in range(len(split)):
        members[split.label(number)].append(number)
    if missing := [name for name, indices in zip(classes, members, strict=True) if not indices]:
        problem = f"class {printable(missing[0])!r} has no examples in split {split.source.split!r}"
        raise KfacpackError(f"{printable(task.name)}: {problem}; a prototype needs at least one example")
    return [_evenly_spaced(indices, MAX_PER_CLASS) for indices in members]


def _evenly_spaced(indices: Sequence[int], limit: int) -> Sequence[int]:
    if len(indices) <= limit:
        return indices
    return [indices[k * len(indices) // limit] for k in range(limit)]
