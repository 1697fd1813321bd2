"""`kp.TaskVector`: τ = θ − θ0 by parameter, what is said of it, and the arithmetic of it."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from math import isfinite
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from kfacpack.curvature.curvature import weights_of_model
from kfacpack.errors import TaskVectorError
from kfacpack.format.identity import difference, function_difference
from kfacpack.format.vector_manifest import AboutVector, HeadEntry
from kfacpack.vectors.storage import (
    FileVector,
    InMemoryVector,
    VectorStorage,
    about_sum,
    check_addable,
    heads_of,
    open_storage,
    require_finite,
    vector_digest,
    write_vector,
)

if TYPE_CHECKING:
    from kfacpack.format.manifest import Function
    from kfacpack.models.heads import Head


Edited = TypeVar("Edited", nn.Module, dict[str, Tensor])


class TaskVector(Mapping[str, Tensor]):
    """A mapping of state-dict names to changes, float32, which is a sum of vectors that were trained or loaded.

    Nothing is added up before it is asked for: `tv[name]` reads one tensor of each addend. What it gives is not to be
    changed in place.
    """

    __array_ufunc__: ClassVar[None] = None
    """A number of numpy's, times a vector, is asked of the vector; else numpy makes an array of it."""
    _multiple: tuple[float, TaskVector] | None = None
    """Of one that was made by multiplying: the number, and the vector it was multiplied by."""

    def __init__(self, tensors: Mapping[str, Tensor], about: AboutVector, heads: Mapping[str, Head] | None = None):
        """From the change of each parameter that `about.base` lists, and a head for each task that has one.

        What `about` says of heads is filled in from the heads themselves. The tensors are not copied.
        """
        heads = dict(heads or {})
        _check_tensors(tensors, about)
        _check_heads(heads, about)
        tasks = (
            task.model_copy(update={"head": _entry(heads[task.name]) if task.name in heads else None})
            for task in about.tasks
        )
        described = AboutVector.model_validate({**dict(about), "tasks": tuple(tasks)})
        self._terms: tuple[tuple[float, VectorStorage], ...] = ((1.0, InMemoryVector(dict(tensors), described, heads)),)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TaskVector:
        """Open a vector's file. Its tensors are mapped, and read and checked when touched."""
        return cls.of_leaf(FileVector(path))

    @classmethod
    def of_leaf(cls, leaf: VectorStorage) -> TaskVector:
        return cls._of([(1.0, leaf)])

    def save(
        self, path: str | os.PathLike[str], *, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> None:
        """Write it, whole or not at all, a tensor at a time.

        `progress` hears how many tensors are written, and how many there are.
        """
        write_vector(path, self.about, open_storage(self.__getitem__, self.about, self.heads), progress)

    @classmethod
    def _of(cls, terms: Iterable[tuple[float, VectorStorage]]) -> TaskVector:
        """The sum of leaves; one that is there twice counts once, with both coefficients."""
        made = cls.__new__(cls)
        totals: dict[int, tuple[float, VectorStorage]] = {}
        for coefficient, leaf in terms:
            before = totals[id(leaf)][0] if id(leaf) in totals else 0.0
            totals[id(leaf)] = require_finite(before + coefficient), leaf
        made._terms = tuple(totals.values())
        return made

    @cached_property
    def about(self) -> AboutVector:
        return about_sum(self._terms)

    @cached_property
    def heads(self) -> dict[str, Head]:
        """A task's name -> its head."""
        return heads_of(self._terms)

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of the tasks that are in it."""
        return tuple(dict.fromkeys(task.name for _, leaf in self._terms for task in leaf.about.tasks))

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters it changes, in the order of the model's state dict."""
        return tuple(parameter.name for parameter in self._terms[0][1].about.base.parameters)

    @property
    def regime(self) -> str:
        return self._terms[0][1].about.regime

    @property
    def is_linear(self) -> bool:
        """Whether it is used in the linearised model, as it was trained; else it is added to the weights."""
        return self.regime == "linear"

    @cached_property
    def digest(self) -> str:
        """Of the whole content of its file: the one it was loaded from, or the one it would be saved to."""
        if len(self._terms) == 1 and self._terms[0][0] == 1:
            return self._terms[0][1].digest
        return vector_digest(self.about, open_storage(self.__getitem__, self.about, self.heads))

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        if len(self._terms) == 1 and self._terms[0][0] == 1:
            return self._terms[0][1].read(name)
        total: Tensor | None = None
        for coefficient, leaf in self._terms:
            part = coefficient * leaf.read(name).double()
            total = part if total is None else total.to(part.device).add_(part)
        assert total is not None
        return total.float()

    def __iter__(self) -> Iterator[str]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    # Of numbers by the million, only being the same object is answered at once.
    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        base = self._terms[0][1].about.base.name  # of a sum, `about` has to read all of it
        return f"<TaskVector of {base}: {', '.join(self.tasks)}; {len(self)} parameters, {self.regime}>"

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self.parameters)

    def __add__(self, other: Any) -> TaskVector:
        if not isinstance(other, TaskVector):
            return NotImplemented
        for _, theirs in other._terms:
            for _, ours in self._terms:
                if ours is not theirs:
                    check_addable(ours, theirs)
        return TaskVector._of([*self._terms, *other._terms])

    def __radd__(self, other: Any) -> TaskVector:
        # sum([...]) begins with 0
        return self if type(other) is int and other == 0 else NotImplemented

    def __sub__(self, other: Any) -> TaskVector:
        return self + -other if isinstance(other, TaskVector) else NotImplemented

    def __neg__(self) -> TaskVector:
        return -1.0 * self

    def __mul__(self, factor: Any) -> TaskVector:
        number = _number(factor, "multiplied")
        if number is None:
            return NotImplemented
        return self._times(number, ((number * coefficient, leaf) for coefficient, leaf in self._terms))

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> TaskVector:
        number = _number(divisor, "divided")
        if number is None:
            return NotImplemented
        if number == 0:
            raise TaskVectorError("a task vector cannot be divided by 0")
        return self._times(1 / number, ((coefficient / number, leaf) for coefficient, leaf in self._terms))

    def _times(self, number: float, terms: Iterable[tuple[float, VectorStorage]]) -> TaskVector:
        made = TaskVector._of(terms)
        before, direction = self.as_multiple()
        made._multiple = number * before, direction
        return made

    def as_multiple(self) -> tuple[float, TaskVector]:
        """(α, τ) where this is α τ, as it was written; a vector that nobody has multiplied is 1.0 times itself.

        What is linear in τ can be had for every α from τ alone, and is then the same number whoever asks.
        """
        return self._multiple or (1.0, self)

    def check(self, model: nn.Module | Mapping[str, Tensor], function: Function | None = None) -> None:
        """Refuse a model that is not the one it was trained from, naming the first parameter that differs, or whose f,
        if it is given, is another."""
        weights = weights_of_model(model)
        about = self._terms[0][1].about
        base = about.base
        if function and (words := function_difference(about.function, function)):
            problem = f"this vector was trained for another f than the model's: {words}"
            raise TaskVectorError(f"{problem}. Load the model as it was for training, at the same image size")
        for parameter in base.parameters:
            if found := difference(parameter, weights):
                problem = f"parameter {parameter.name!r} {found}"
                raise TaskVectorError(
                    f"this vector was trained from {base.name}, which the model is not: {problem}. Load the weights "
                    "it was trained from, unchanged; to apply several vectors, add them up first"
                )

    def apply(self, model: Edited, *, in_place: bool = False) -> Edited:
        """θ0 + τ: a copy of the model (or of its state dict) with the vector added, or the model itself.

        Any model but θ0 is refused, so that no vector is added twice. A vector of the regime "linear" may also be used
        in the linearised model, as it was trained: `kp.linearize(model)(x, tv)`.
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
        """The model itself with the vector added, as long as the context lasts; then its very bytes as before.

        `function`: what its f is, which is then checked as well.
        """
        self.check(model, function)
        state = model.state_dict()
        before = {name: state[name].clone() for name in self}
        try:
            self._add_to(state)
            yield model
        finally:
            with torch.no_grad():
                for name, value in before.items():
                    state[name].copy_(value)

    @torch.no_grad()
    def _add_to(self, state: Mapping[str, Tensor]) -> None:
        for name in self:
            target = state[name]
            # In float32 at least, and rounded once to what the model is in.
            wide = torch.promote_types(target.dtype, torch.float32)
            target.copy_(target.to(wide) + self[name].to(target.device, wide))


def _copied(state: dict[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """The same state dict with copies of the named tensors, which are copied under their other names (tied), too."""
    copies = {_memory(state[name]): state[name].clone() for name in names}
    return {name: copies.get(_memory(value), value) for name, value in state.items()}


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    """What only tensors of the very same numbers in the very same memory have in common."""
    if not isinstance(tensor, Tensor):
        return (id(tensor),)
    return tensor.device, tensor.dtype, tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def _number(value: Any, done: str) -> float | None:
    """Any real number as Python's own, numpy's too; None for what is no number."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError as error:
        problem = "by a number that is larger than any float"
        raise TaskVectorError(f"a task vector cannot be {done} {problem}") from error
    if not isfinite(number):
        raise TaskVectorError(f"a task vector cannot be {done} by {number}")
    return number


def _check_tensors(tensors: Mapping[str, Tensor], about: AboutVector) -> None:
    shapes = {parameter.name: parameter.shape for parameter in about.base.parameters}
    for name in [*shapes, *tensors]:
        if name not in tensors or name not in shapes:
            where = "the vector" if name not in tensors else "the base model's parameters"
            raise TaskVectorError(f"parameter {name!r} is not in {where}")
        found = tensors[name]
        if tuple(found.shape) != shapes[name] or not found.is_floating_point():
            problem = f"found {found.dtype} of shape {list(found.shape)}"
            raise TaskVectorError(f"parameter {name!r}: expected floats of shape {list(shapes[name])}, {problem}")


def _check_heads(heads: Mapping[str, Head], about: AboutVector) -> None:
    tasks = [task.name for task in about.tasks]
    for name, head in heads.items():
        if name not in tasks:
            raise TaskVectorError(f"there is a head for {name!r}, which is none of the tasks: {', '.join(tasks)}")
        wanted = (len(head.classes), about.function.width)
        if tuple(head.weight.shape) != wanted or tuple(head.bias.shape) != wanted[:1]:
            found = f"{list(head.weight.shape)} and {list(head.bias.shape)}"
            expected = f"{list(wanted)} and {list(wanted[:1])}"
            raise TaskVectorError(f"the head for {name!r}: expected weight and bias of {expected}, found {found}")


def _entry(head: Head) -> HeadEntry:
    return HeadEntry(origin=head.origin, classes=head.classes)
