"""Sums of task vectors: which vectors can be added, and the provenance of their sum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

import torch

from kfacpack.errors import TaskVectorError, printable
from kfacpack.format.identity import function_difference
from kfacpack.format.manifest import Base, base_digest
from kfacpack.format.vector_manifest import AboutVector, Addend, TaskEntry
from kfacpack.vectors.parameter_change import (
    Factors,
    Remainder,
    SparseChange,
    add_factors,
    add_sparse,
    factors_are_smaller,
    sparse_is_smaller,
)

if TYPE_CHECKING:
    from torch import Tensor

    from kfacpack.format.manifest import Parameter
    from kfacpack.models.heads import Head
    from kfacpack.vectors.storage import VectorStorage

    WeightedVectors = Sequence[tuple[float, VectorStorage]]
    """The terms of a sum, as pairs of a coefficient and a vector."""


_MAX_FLOAT32 = (2 - 2**-23) * 2.0**127


class SummedChanges:
    """The parameter changes of a weighted sum of vectors, computed one parameter at a time.

    A term that does not cover a parameter contributes zero to the sum.

    Args:
        terms: Pairs of a coefficient and a vector.
        base: The manifest entry of the base model, which lists the parameters of all terms.
    """

    def __init__(self, terms: WeightedVectors, base: Base):
        self.base = base
        self.shapes = {parameter.name: parameter.shape for parameter in base.parameters}
        self._terms = terms

    def _terms_of(self, name: str) -> WeightedVectors:
        return [(coefficient, storage) for coefficient, storage in self._terms if name in storage.names]

    def read(self, name: str) -> Tensor:
        """Sums the dense changes to a parameter in float64 and returns the sum in float32.

        Raises:
            KeyError: If the base model does not list the parameter.
        """
        shape, terms = self.shapes[name], self._terms_of(name)
        if len(terms) == 1 and terms[0][0] == 1:
            return terms[0][1].read(name)
        total: Tensor | None = None
        for coefficient, storage in terms:
            part = coefficient * storage.read(name).double()
            total = part if total is None else total.to(part.device).add_(part)
        return torch.zeros(shape) if total is None else total.float()

    def rank(self, name: str) -> int | None:
        """Returns the rank of a parameter's factors, or None if the change is not stored as factors."""
        shape, terms = self.shapes[name], self._terms_of(name)
        if len(terms) == 1:
            return terms[0][1].rank(name)
        total = 0
        for _, storage in terms:
            if (rank := storage.rank(name)) is None:
                return None
            total += rank
        return total if factors_are_smaller(total, shape) else None

    def factors(self, name: str) -> Factors | None:
        """Returns the factors of a parameter's change, which are the concatenated factors of the terms.

        Returns None if a term is not stored as factors, or if the factors would take more space than the dense tensor.
        """
        if self.rank(name) is None:
            return None
        terms = []
        for coefficient, storage in self._terms_of(name):
            factors = storage.factors(name)
            assert factors is not None, name
            terms.append((coefficient, factors))
        return add_factors(terms, self.shapes[name])

    def remainder(self, name: str) -> Remainder | None:
        """Returns the remainder of a parameter's change (corrections in float64). Sums and multiples have none."""
        self.shapes[name]  # raises KeyError for an unknown parameter
        terms = self._terms_of(name)
        return terms[0][1].remainder(name) if len(terms) == 1 and terms[0][0] == 1 else None

    def sparse(self, name: str) -> SparseChange | None:
        """Returns the change to a parameter in sparse form.

        Returns None if a term is not sparse, or if the sparse form would take more space than the dense tensor.
        """
        shape, terms = self.shapes[name], []
        for coefficient, storage in self._terms_of(name):
            if storage.rank(name) == 0:
                continue
            if (sparse := storage.sparse(name)) is None:
                return None
            terms.append((coefficient, sparse))
        if not terms:
            return None
        total = add_sparse(terms)
        return total if sparse_is_smaller(len(total[0]), prod(shape)) else None


def check_addable(first: VectorStorage, second: VectorStorage) -> None:
    """Checks that two task vectors can be added.

    Vectors that were trained in the linearised model must cover the same parameters. Other vectors may cover different
    parameters of the same model; a vector does not change the parameters that it does not cover. The base models are
    compared by the parameters that both vectors cover. If the vectors cover different parameters, the family, name and
    revision of the base models must be equal as well.

    Raises:
        TaskVectorError: If the regimes, functions f or base models differ, or if the heads for a common task differ.
    """
    one, other = first.about, second.about
    names = "the vectors for " + " and ".join(
        repr(", ".join(task.name for task in about.tasks)) if about.tasks else "unknown tasks" for about in (one, other)
    )
    if one.regime != other.regime:
        raise TaskVectorError(f"{names} were trained in different regimes: {one.regime!r} and {other.regime!r}")
    if difference := function_difference(one.function, other.function):
        raise TaskVectorError(f"{names} are for different functions f: {difference}")
    first_parameters = {parameter.name: parameter for parameter in one.base.parameters}
    second_parameters = {parameter.name: parameter for parameter in other.base.parameters}
    models = f"{one.base.name} and {other.base.name}"
    for name, parameter in first_parameters.items():
        if name in second_parameters and parameter != second_parameters[name]:
            raise TaskVectorError(f"{names} have different base models ({models}): the parameter {name!r} differs")
    if unshared := [
        name for name in [*first_parameters, *second_parameters]
        if name not in first_parameters or name not in second_parameters
    ]:  # fmt: skip
        _check_unshared(one, other, names, unshared[0])
    for task, head in first.heads.items():
        if task in second.heads and (difference := head.difference(second.heads[task])):
            raise TaskVectorError(f"{names} have different heads for {printable(task)!r}: {difference}")


def _check_unshared(one: AboutVector, other: AboutVector, names: str, parameter: str) -> None:
    """Checks that two vectors that cover different parameters have the same base model."""
    difference = f"{names} cover different parameters: only one of them has {parameter!r}"
    if one.regime == "linear":
        raise TaskVectorError(f"{difference}. Vectors trained in the linearised model must cover the same parameters")
    if {p.name for p in one.base.parameters}.isdisjoint(p.name for p in other.base.parameters):
        reason = "they have no parameter in common, so their base models cannot be compared"
        raise TaskVectorError(f"{difference}, and {reason}")
    for key in ("family", "name", "revision"):
        values = getattr(one.base, key), getattr(other.base, key)
        if values[0] != values[1]:
            mismatch = f"the base models differ in their {key}: {values[0] or 'unknown'} and {values[1] or 'unknown'}"
            raise TaskVectorError(f"{difference}, and {mismatch}")


def joint_base(bases: Iterable[Base]) -> Base:
    """Returns the base model of a sum, with the parameters of all of its terms.

    Args:
        bases: The base models of the terms. Parameters that several of them list must be identical.
    """
    first, *others = bases
    parameters = {parameter.name: parameter for parameter in first.parameters}
    for base in others:
        if any(parameter.name not in parameters for parameter in base.parameters):
            parameters = _insert_missing(parameters, base.parameters)
    if len(parameters) == len(first.parameters):
        return first
    listed = tuple(parameters.values())
    return first.model_copy(update={"parameters": listed, "sha256": base_digest(listed)})


def _insert_missing(parameters: Mapping[str, Parameter], others: Iterable[Parameter]) -> dict[str, Parameter]:
    """Adds parameters that only the second list contains, each directly after its predecessor in the second list."""
    order = list(parameters.values())
    position = 0
    for other in others:
        if other.name in parameters:
            position = next(place for place, parameter in enumerate(order) if parameter.name == other.name) + 1
        else:
            order.insert(position, other)
            position += 1
    return {parameter.name: parameter for parameter in order}


def require_finite(coefficient: float) -> float:
    """Returns a coefficient after checking that it is within the range of float32.

    The check is needed because products of coefficients may exceed this range.

    Raises:
        TaskVectorError: If the coefficient is too large or NaN.
    """
    if not abs(coefficient) <= _MAX_FLOAT32:
        limit = f"expected a magnitude of at most {_MAX_FLOAT32:.2g}, the float32 maximum"
        raise TaskVectorError(f"an addend's coefficient would be {coefficient:g}, {limit}; use smaller factors")
    return coefficient


def about_sum(terms: WeightedVectors) -> AboutVector:
    """Returns the provenance of a sum. A single vector with coefficient 1 keeps its own provenance.

    A multiple of a merged vector keeps the entry for its merge method, because merging the multiplied inputs would give
    the same vector.
    """
    first = terms[0][1].about
    if len(terms) == 1 and terms[0][0] == 1:
        return first
    method = first.method.multiplied(terms[0][0]) if first.method and len(terms) == 1 else None
    base = joint_base(storage.about.base for _, storage in terms)
    checkpoints = dict.fromkeys(checkpoint for _, storage in terms for checkpoint in storage.about.checkpoints)
    changes = {
        "base": base,
        "tasks": _tasks(terms),
        "addends": _addends(terms),
        "method": method,
        "checkpoints": tuple(checkpoints),
    }
    return first.model_copy(update=changes)


def heads_of(terms: WeightedVectors) -> dict[str, Head]:
    """Returns the classification heads for all tasks in a sum of vectors, by task name."""
    heads: dict[str, Head] = {}
    for _, vector in terms:
        for task, head in vector.heads.items():
            heads.setdefault(task, head)
    return heads


def _tasks(terms: WeightedVectors) -> tuple[TaskEntry, ...]:
    tasks: dict[str, TaskEntry] = {}
    for _, vector in terms:
        for task in vector.about.tasks:
            first = tasks.setdefault(task.name, task)
            if first != task:
                # The task was trained twice; each addend's own file records how.
                training = first.training if first.training == task.training else None
                tasks[task.name] = first.model_copy(update={"training": training, "head": first.head or task.head})
    return tuple(tasks.values())


def _addends(terms: WeightedVectors) -> tuple[Addend, ...]:
    addends: dict[str, Addend] = {}
    for factor, vector in terms:
        # The result of a merge method is not the sum of its addends, so it is itself an addend.
        is_sum = vector.about.method is None or len(terms) == 1
        for addend in (vector.about.addends if is_sum else ()) or (_as_addend(vector),):
            before = addends[addend.sha256].coefficient if addend.sha256 in addends else 0.0
            total = require_finite(before + factor * addend.coefficient)
            addends[addend.sha256] = addend.model_copy(update={"coefficient": total})
    return tuple(addends.values())


def _as_addend(vector: VectorStorage) -> Addend:
    return Addend(sha256=vector.digest, coefficient=1.0, tasks=tuple(task.name for task in vector.about.tasks))
