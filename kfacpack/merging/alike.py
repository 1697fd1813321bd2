"""What may be merged: curvatures of one base model and one f, scaled alike, from different data, in the same blocks."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, TypeVar

from kfacpack.bundle.identity import function_difference
from kfacpack.bundle.task_names import share_classes
from kfacpack.errors import KfacpackError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kfacpack.bundle.manifest import Parameter
    from kfacpack.merging.inputs import Input

Item = TypeVar("Item")
_ALLOW = "To add up each block over those that have it: --allow-partial (allow_partial=True)"


def check_alike(inputs: Sequence[Input], *, allow_partial: bool) -> None:
    """Refuse what does not belong together, naming both inputs and what differs."""
    check_addable(inputs)
    _check_blocks(inputs, allow_partial)


def check_addable(inputs: Sequence[Input]) -> None:
    """Refuse quadratic forms that have no common meaning, whatever blocks they are in."""
    first, *others = inputs
    for other in others:
        _check_function(first, other)
        theirs, ours = other.curvature.about.scaling, first.curvature.about.scaling
        if theirs != ours:
            raise _differ(first, other, f"are scaled differently: {ours.sharing!r} and {theirs.sharing!r}")
    _check_base(inputs)
    _check_parents(inputs)


def in_order(lists: Iterable[Sequence[Item]]) -> list[Item]:
    """Everything that is in any of the lists, once, each after what stands before it in its own list."""
    found: list[Item] = []
    for each in lists:
        if list(each) == found:
            continue
        place = 0
        for item in each:
            if item not in found:
                found.insert(place, item)
            place = found.index(item) + 1
    return found


def _differ(one: Input, other: Input, how: str, remedy: str = "") -> KfacpackError:
    return KfacpackError(f"{one.name} and {other.name} {how}" + (f". {remedy}" if remedy else ""))


def _check_function(one: Input, other: Input) -> None:
    if difference := function_difference(one.curvature.about.function, other.curvature.about.function):
        raise _differ(one, other, f"are of different f: {difference}")


def _check_base(inputs: Sequence[Input]) -> None:
    seen: dict[str, tuple[Input, Parameter]] = {}
    for each in inputs:
        parameters = each.curvature.about.base.parameters
        if seen and not any(parameter.name in seen for parameter in parameters):
            how = "cover no parameter in common, so that nothing shows that they are of the same base model"
            raise _differ(inputs[0], each, how)
        for parameter in parameters:
            other, known = seen.setdefault(parameter.name, (each, parameter))
            if known != parameter:
                models = " and ".join(i.curvature.about.base.name for i in (other, each))
                how = f"are of different base models ({models}): the parameter {parameter.name!r} is not the same"
                raise _differ(other, each, how)


def _check_parents(inputs: Sequence[Input]) -> None:
    seen: dict[str, Input] = {}
    for each in inputs:
        for parent in each.parents:
            if parent.sha256 in seen:
                called = f"the bundle {parent.sha256[:12]}…" + (f" of {parent.task}" if parent.task else "")
                other, task = seen[parent.sha256], parent.task or "TASK"
                merged = other.curvature.about.merge or each.curvature.about.merge
                remedy = f"To subtract it: --without {task} (without={task!r})" if merged else "Give it once"
                raise _differ(other, each, f"both contain {called}, which would count twice", remedy)
            seen[parent.sha256] = each


def check_tasks(inputs: Sequence[Input]) -> None:
    """The same task in two inputs is its curvature twice: compressed, say, or from other examples. So are a part of it
    (NAME@k/n) and the whole."""
    seen: dict[str, Input] = {}
    for each in inputs:
        for task in {parent.task: None for parent in each.parents if parent.task}:
            if task in seen:
                remedy = "Give one of them; parts of one task from different examples are joined by the rule 'shards'"
                raise _differ(seen[task], each, f"are both of the task {task!r}, which would count twice", remedy)
            others = (name for name, owner in seen.items() if owner is not each and share_classes(name, task))
            if other := next(others, None):
                how = f"are of {other!r} and {task!r}, whose common classes would count twice"
                raise _differ(seen[other], each, how, "Give one of them, or parts without a class in common")
            seen[task] = each


def _check_blocks(inputs: Sequence[Input], allow_partial: bool) -> None:
    owner: dict[str, Input] = {}
    partition: dict[str, tuple[Input, set[str]]] = {}
    for each in inputs:
        for parameter, names in _partition(each).items():
            other, known = partition.setdefault(parameter, (each, names))
            if known != names:
                raise _differ(other, each, f"divide the parameter {parameter!r} into different blocks")
        for name, block in each.blocks.items():
            other = owner.setdefault(name, each)
            known_block = other.blocks[name]
            if known_block.join != block.join:
                raise _differ(other, each, f"join other parameters in the block {name!r}")
            if len(known_block.structure.sides) != len(block.structure.sides):
                how = f"hold the block {name!r} differently, one as Kronecker factors and one as a whole matrix"
                raise _differ(other, each, how)
    for each in inputs:
        missing = [name for name in owner if name not in each.blocks]
        if missing and not allow_partial:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            has = owner[missing[0]]
            raise KfacpackError(f"{each.name} has no block {missing[0]!r}{more}, which {has.name} has. {_ALLOW}")


def _partition(each: Input) -> dict[str, set[str]]:
    """Which blocks cover a parameter."""
    found: dict[str, set[str]] = defaultdict(set)
    for block in each.curvature.blocks:
        for parameter in block.parameters:
            found[parameter].add(block.name)
    return found
