"""`kp.TaskVector`: τ = θ − θ0 for each parameter, its provenance, and arithmetic on it."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from math import isfinite
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from kfacpack.curvature.curvature import weights_of_model
from kfacpack.curvature.saving import PretrainedMixin
from kfacpack.errors import TaskVectorError
from kfacpack.format.identity import difference, function_difference
from kfacpack.format.vector_manifest import AboutVector, HeadEntry, RegimeName
from kfacpack.vectors.parameter_change import (
    Factors,
    Remainder,
    SparseChange,
    add_change,
    check_factors,
    separate_sparse,
)
from kfacpack.vectors.storage import FileVector, InMemoryVector, VectorStorage, vector_digest, write_vector
from kfacpack.vectors.sums import SummedChanges, about_sum, check_addable, heads_of, joint_base, require_finite

if TYPE_CHECKING:
    from kfacpack.format.manifest import Base, Function
    from kfacpack.format.units import OnProgress
    from kfacpack.models.heads import Head
    from kfacpack.models.model import Model
    from kfacpack.vectors.extraction import FineTuned, OnNote


Edited = TypeVar("Edited", nn.Module, dict[str, Tensor])


class TaskVector(PretrainedMixin, Mapping[str, Tensor]):
    """A task vector: a mapping from state-dict names to parameter changes in float32.

    Sums and multiples are lazy: `vector[name]` returns a weighted sum of the addends' tensors with this name. Do not
    modify the returned tensors. A change may be stored as the factors of a low-rank matrix; see `factors`.

    Args:
        tensors: Changes to the parameters in `about.base` that are not in `factors`, by name. They are not copied.
        about: The provenance: base model, f, regime and tasks. Its entries for heads are filled in from `heads`.
        heads: Classification heads by task name, for the tasks that have a head.
        factors: Factors U (m, r) and V (r, n) of low-rank changes in float32, by name. The change is U V, reshaped to
            the shape of the parameter, whose first dimension is m.
        masks: Boolean tensors by parameter name, for parameters in `tensors` that change only where the mask is true.
            Elements outside of the mask are not stored if this saves space.

    Raises:
        TaskVectorError: If tensors, factors or heads do not match `about`, or if a mask does not match its tensor.

    Example:
        >>> cars, dtd = kp.TaskVector.load("cars.safetensors"), kp.TaskVector.load("dtd.safetensors")
        >>> edited = (cars + 0.5 * dtd).apply(model)
        >>> (-cars).save("forget_cars.safetensors")
    """

    __array_ufunc__: ClassVar[None] = None
    """Makes NumPy scalars leave multiplication to the vector instead of converting the vector to an array."""
    _multiple: tuple[float, TaskVector] | None = None
    """Factor and original vector, if this vector is the result of a multiplication."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        about: AboutVector,
        heads: Mapping[str, Head] | None = None,
        *,
        factors: Mapping[str, Factors] | None = None,
        masks: Mapping[str, Tensor] | None = None,
    ):
        heads, factors = dict(heads or {}), dict(factors or {})
        _check_tensors(tensors, factors, about)
        tensors, sparse, unchanged = separate_sparse(tensors, masks or {})
        _check_heads(heads, about)
        tasks = (
            task.model_copy(update={"head": _head_entry(heads[task.name]) if task.name in heads else None})
            for task in about.tasks
        )
        about = AboutVector.model_validate({**dict(about), "tasks": tuple(tasks)})
        storage = InMemoryVector(tensors, about, heads, factors | unchanged, sparse=sparse)
        self._terms: tuple[tuple[float, VectorStorage], ...] = ((1.0, storage),)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TaskVector:
        """Opens a task vector file. Tensors are memory-mapped; they are read and checked when they are accessed.

        Args:
            path: Path of the file, or `hf://owner/repo@revision/file`.

        Returns:
            The task vector.

        Raises:
            BundleError: If the file cannot be read or is not a task vector.
        """
        return cls.from_storage(FileVector(path))

    @classmethod
    def from_checkpoint(
        cls,
        base: Model | str,
        finetuned: FineTuned,
        *,
        task: str | None = None,
        on_note: OnNote = lambda note: None,
        on_progress: OnProgress = lambda done, total: None,
    ) -> TaskVector:
        """Returns the task vector of a model that was fine-tuned elsewhere.

        A vector extracted from a checkpoint is exact: `apply` returns the checkpoint's weights bit for bit, in the base
        model's dtype. A vector extracted from a LoRA adapter consists of the adapter's factors. Both have the regime
        "full". They cover the parameters that `kp.train` trains by default, and any others that fine-tuning changed.

        Args:
            base: The base model from `kp.load_model`, or its name.
            finetuned: A checkpoint of the same architecture or a PEFT adapter: a safetensors file, a folder (saved by
                transformers, with shards and an index, or with `adapter_config.json`), `hf://owner/repo[@revision]`, a
                state dict or a module.
            task: Name of the task, as used for its bundle and in evaluations.
            on_note: Called with a note on each difference that the user should know about, such as a prefix in the
                names, a head that is left out, a missing parameter, another dtype, or a change to a frozen parameter.
            on_progress: Called with the number of parameters compared and the total number.

        Returns:
            The task vector, in memory.

        Raises:
            TaskVectorError: If names, shapes or buffers do not match the base model, or if no parameter differs.
            BundleError: If a file cannot be read or is not in safetensors format, or if an adapter is not of type LoRA.

        Example:
            >>> model = kp.load_model("ViT-B-32")
            >>> cars = kp.TaskVector.from_checkpoint(model, "cars/open_clip_model.safetensors", task="cars")
            >>> cars.save("cars.safetensors")
        """
        from kfacpack.vectors.extraction import extract_storage

        return cls.from_storage(extract_storage(base, finetuned, task, on_note, on_progress))

    @classmethod
    def from_storage(cls, storage: VectorStorage) -> TaskVector:
        """Returns a task vector that reads its tensors from a storage.

        Args:
            storage: The object that reads the tensors, for example from a file.
        """
        return cls._from_terms([(1.0, storage)])

    def save(self, path: str | os.PathLike[str], *, on_progress: OnProgress = lambda done, total: None) -> None:
        """Writes the vector to a file atomically, one tensor at a time.

        Args:
            path: The file to write.
            on_progress: Called with the number of tensors written and the total number.

        Raises:
            BundleError: If a tensor contains NaN or Inf, or if the file cannot be written.
        """
        write_vector(path, self.about, self._changes, self.heads, on_progress)

    @classmethod
    def _from_terms(cls, terms: Iterable[tuple[float, VectorStorage]]) -> TaskVector:
        """Returns the sum of coefficient · storage over all terms. The coefficients of a repeated storage are added."""
        vector = cls.__new__(cls)
        totals: dict[int, tuple[float, VectorStorage]] = {}
        for coefficient, storage in terms:
            before = totals[id(storage)][0] if id(storage) in totals else 0.0
            totals[id(storage)] = require_finite(before + coefficient), storage
        vector._terms = tuple(totals.values())
        return vector

    @cached_property
    def about(self) -> AboutVector:
        """The provenance: base model, f, regime, tasks and addends."""
        return about_sum(self._terms)

    @cached_property
    def heads(self) -> dict[str, Head]:
        """Classification heads by task name."""
        return heads_of(self._terms)

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks that the vector contains."""
        return tuple(dict.fromkeys(task.name for _, storage in self._terms for task in storage.about.tasks))

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that the vector covers, in the order of the model's state dict."""
        return tuple(self._changes.shapes)

    @property
    def regime(self) -> RegimeName:
        """The regime in which the vector was trained: "full", "linear", "attention" or "sparse"."""
        return self._terms[0][1].about.regime

    @property
    def is_linear(self) -> bool:
        """Whether the vector was trained in the linearised model; see `kp.linearize`."""
        return self.regime == "linear"

    @cached_property
    def digest(self) -> str:
        """SHA-256 that identifies the content of the vector's file, or of the file that `save` would write."""
        if len(self._terms) == 1 and self._terms[0][0] == 1:
            return self._terms[0][1].digest
        return vector_digest(self.about, self._changes, self.heads)

    def __getitem__(self, name: str) -> Tensor:
        return self._changes.read(name)

    def rank(self, name: str) -> int | None:
        """Returns the rank of a parameter's factors. If the factors are in a file, they are not read.

        Args:
            name: Name of the parameter.

        Returns:
            The rank, or None if the change is not stored as factors.
        """
        return self._changes.rank(name)

    def factors(self, name: str) -> Factors | None:
        """Returns the factors of a parameter's change if the change is stored as a product of two matrices.

        The factors of a sum are the concatenated factors of its terms, as long as these take less space than the dense
        tensor.

        Args:
            name: Name of the parameter.

        Returns:
            U (m, r) and V (r, n) in float32, whose product is the change reshaped to (shape[0], -1), or None if the
            change is not stored as factors. Rank 0 means that the change is exactly zero. The factors must not be
            modified.
        """
        return self._changes.factors(name)

    def remainder(self, name: str) -> Remainder | None:
        """Returns the float64 corrections to individual elements that `apply` uses to restore a checkpoint exactly.

        Sums and multiples of vectors have no corrections, because they are themselves rounded to float32.

        Args:
            name: Name of the parameter.

        Returns:
            Flat indices and values, or None if no correction is needed.
        """
        return self._changes.remainder(name)

    def sparse(self, name: str) -> SparseChange | None:
        """Returns the stored elements of a parameter's change if it is stored as a sparse tensor.

        A sum of sparse changes is also stored as a sparse tensor, unless the dense tensor would take less space.

        Args:
            name: Name of the parameter.

        Returns:
            Flat indices in ascending order and float32 values, or None if the change is not sparse. All other
            elements are zero.
        """
        return self._changes.sparse(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)

    def __contains__(self, name: object) -> bool:
        return name in self._changes.shapes

    # Mapping would compare all tensors; vectors are compared by identity instead.
    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        base = self._terms[0][1].about.base.name  # computing `about` for a sum reads all tensors
        tasks = ", ".join(self.tasks) or "unknown task"
        return f"<TaskVector of {base}: {tasks}; regime={self.regime!r}, parameters={len(self)}>"

    @cached_property
    def _changes(self) -> SummedChanges:
        # Unlike `about`, this does not need the digests of the terms.
        return SummedChanges(self._terms, joint_base(storage.about.base for _, storage in self._terms))

    def covering(self, base: Base) -> TaskVector:
        """Returns this vector, extended to all parameters in `base`. The changes to the additional parameters are zero.

        Args:
            base: The base model of a sum that contains this vector. It lists the parameters of all terms of the sum.
        """
        vector = TaskVector._from_terms(self._terms)
        vector._multiple = self._multiple
        vector.__dict__["_changes"] = SummedChanges(self._terms, base)
        vector.__dict__["about"] = self.about.model_copy(update={"base": base})
        return vector

    def __add__(self, other: Any) -> TaskVector:
        if not isinstance(other, TaskVector):
            return NotImplemented
        for _, second in other._terms:
            for _, first in self._terms:
                if first is not second:
                    check_addable(first, second)
        return TaskVector._from_terms([*self._terms, *other._terms])

    def __radd__(self, other: Any) -> TaskVector:
        # sum([...]) starts with 0
        return self if type(other) is int and other == 0 else NotImplemented

    def __sub__(self, other: Any) -> TaskVector:
        return self + -other if isinstance(other, TaskVector) else NotImplemented

    def __neg__(self) -> TaskVector:
        return -1.0 * self

    def __mul__(self, factor: Any) -> TaskVector:
        number = _number(factor, "multiplied")
        if number is None:
            return NotImplemented
        return self._times(number, ((number * coefficient, storage) for coefficient, storage in self._terms))

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> TaskVector:
        number = _number(divisor, "divided")
        if number is None:
            return NotImplemented
        if number == 0:
            raise TaskVectorError("a task vector cannot be divided by 0")
        return self._times(1 / number, ((coefficient / number, storage) for coefficient, storage in self._terms))

    def _times(self, number: float, terms: Iterable[tuple[float, VectorStorage]]) -> TaskVector:
        vector = TaskVector._from_terms(terms)
        previous, direction = self.as_multiple()
        vector._multiple = number * previous, direction
        return vector

    def as_multiple(self) -> tuple[float, TaskVector]:
        """Returns (α, τ) such that this vector is α τ. For a vector that was not multiplied, α is 1.0.

        If a quantity is linear in τ, compute it for τ and multiply it by α. The rounding is then the same for every α.
        """
        return self._multiple or (1.0, self)

    def check(self, model: nn.Module | Mapping[str, Tensor], function: Function | None = None) -> None:
        """Checks that a model is the one from which the vector was trained.

        Args:
            model: The model or its state dict.
            function: The model's f, which is also checked if it is passed.

        Raises:
            TaskVectorError: If f or a parameter differs. The message names the first parameter that differs.
        """
        weights = weights_of_model(model)
        about, base = self._terms[0][1].about, self._changes.base
        if function and (change := function_difference(about.function, function)):
            problem = f"this vector and the model have different functions f: {change}"
            raise TaskVectorError(f"{problem}. Load the model as it was loaded for training, with the same image size")
        for parameter in base.parameters:
            if change := difference(parameter, weights):
                problem = f"parameter {parameter.name!r} {change}"
                raise TaskVectorError(
                    f"this vector was trained from {base.name}, but the model is a different one: {problem}. Load the "
                    "original weights of the model; to apply several vectors, first add them to each other"
                )

    def apply(self, model: Edited, *, in_place: bool = False) -> Edited:
        """Returns the model with the vector added to its weights: θ0 + τ.

        If the regime is "linear", use `kp.linearize(model)(x, vector)` to evaluate the linearised model for inputs x.

        Args:
            model: The base model or its state dict, with its original weights.
            in_place: Whether to modify the passed model instead of a copy of it.

        Returns:
            The edited model or state dict.

        Raises:
            TaskVectorError: If the model's weights are not θ0; this also prevents a vector from being applied twice.
        """
        self.check(model)
        if isinstance(model, nn.Module):
            edited = model if in_place else copy.deepcopy(model)
            self._add_to(edited.state_dict())
            return edited
        state = model if in_place else _copied(model, self)
        self._add_to(state)
        return state

    @contextmanager
    def applied(self, model: nn.Module, function: Function | None = None) -> Iterator[nn.Module]:
        """Context manager that adds the vector to the model's weights and restores the exact original weights on exit.

        Args:
            model: The base model, with its original weights.
            function: The model's f, which is also checked if it is passed.

        Yields:
            The model.

        Raises:
            TaskVectorError: If the model is not the one from which the vector was trained.
        """
        self.check(model, function)
        state = model.state_dict()
        original = {name: state[name].clone() for name in self}
        try:
            self._add_to(state)
            yield model
        finally:
            with torch.no_grad():
                for name, value in original.items():
                    state[name].copy_(value)

    @torch.no_grad()
    def _add_to(self, state: Mapping[str, Tensor]) -> None:
        for name in self:
            if self.rank(name) != 0:
                state[name].copy_(add_change(state[name], self[name], self.remainder(name)))


def _copied(state: dict[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Returns the state dict with copies of the named tensors; tied tensors stay tied."""
    copies = {_memory(state[name]): state[name].clone() for name in names}
    return {name: copies.get(_memory(value), value) for name, value in state.items()}


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    """Returns a key that is equal for two tensors if they are the same view of the same memory."""
    if not isinstance(tensor, Tensor):
        return (id(tensor),)
    return tensor.device, tensor.dtype, tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def _number(value: Any, operation: str) -> float | None:
    """Converts a real number, which may be a NumPy scalar, to a float; returns None for other types."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError as error:
        problem = "by a number that is too large for a float"
        raise TaskVectorError(f"a task vector cannot be {operation} {problem}") from error
    if not isfinite(number):
        raise TaskVectorError(f"a task vector cannot be {operation} by {number}")
    return number


def _check_tensors(tensors: Mapping[str, Tensor], factors: Mapping[str, Factors], about: AboutVector) -> None:
    shapes = {parameter.name: parameter.shape for parameter in about.base.parameters}
    for name in [*shapes, *tensors, *factors]:
        if (name not in tensors and name not in factors) or name not in shapes:
            where = "both tensors and factors" if name in shapes else "the base model's parameters"
            raise TaskVectorError(f"parameter {name!r} is missing from {where}")
        if name in factors:
            if name in tensors:
                raise TaskVectorError(f"parameter {name!r} has both a dense change and factors, expected only one")
            check_factors(name, factors[name], shapes[name])
            continue
        tensor = tensors[name]
        if tuple(tensor.shape) != shapes[name] or not tensor.is_floating_point():
            actual = f"{tensor.dtype} of shape {list(tensor.shape)}"
            expected = f"a floating-point tensor of shape {list(shapes[name])}"
            raise TaskVectorError(f"parameter {name!r}: expected {expected}, got {actual}")


def _check_heads(heads: Mapping[str, Head], about: AboutVector) -> None:
    tasks = [task.name for task in about.tasks]
    for name, head in heads.items():
        if name not in tasks:
            raise TaskVectorError(f"got a head for {name!r}, which is not a task of the vector (tasks: {tasks})")
        shape = (len(head.classes), about.function.width)
        if tuple(head.weight.shape) != shape or tuple(head.bias.shape) != shape[:1]:
            actual = f"{list(head.weight.shape)} and {list(head.bias.shape)}"
            expected = f"{list(shape)} and {list(shape[:1])}"
            raise TaskVectorError(f"head for {name!r}: expected a weight and a bias of shapes {expected}, got {actual}")


def _head_entry(head: Head) -> HeadEntry:
    return HeadEntry(origin=head.origin, classes=head.classes)
