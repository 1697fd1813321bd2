"""Matches the tensor names of a checkpoint with those of a base model.

Fine-tuning code wraps models: `bert.encoder…` for `encoder…`, `module.…` after distributed training, or a vision tower
alone. A wrapper is one prefix that is removed from the checkpoint's names or added to them, and it is used only if no
other prefix matches as many parameters. Names that match as they are keep their meaning if removing a prefix from them
gives other names of the base model.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kfacpack.errors import TaskVectorError, abbreviate, printable

TOWERS = ("visual.", "vision_model.")
"""Prefixes of vision towers, which are also published alone."""
_HEAD = re.compile(
    r"(?:.*\.)?(?:classifier|classification_head|pre_classifier|heads?|head_dist|fc|score|cls|qa_outputs|lm_head|"
    r"vocab_\w+|pooler)(?:\.\w+)*\.(?:weight|bias)"
)
_CONSTANT = re.compile(
    r"(?:.*\.)?(?:position_ids|token_type_ids|attn_mask|relative_position_index|inv_freq|masked_bias)"
)
_OLD_NORMS = ((".gamma", ".weight"), (".beta", ".bias"))


class Prefix(NamedTuple):
    """A prefix that is removed from the names of a checkpoint, or added to them."""

    text: str
    is_added: bool

    def apply(self, name: str) -> str | None:
        """Returns the name in the base model, or None if the name lacks the prefix."""
        if self.is_added:
            return self.text + name
        return name.removeprefix(self.text) if name.startswith(self.text) else None

    def __str__(self) -> str:
        return f"{'without' if self.is_added else 'with'} the prefix {self.text!r}" if self.text else "unchanged"


@dataclass(frozen=True)
class NameMatch:
    """The tensors of a checkpoint by the names of the base model."""

    prefix: Prefix
    tensors: Mapping[str, str]
    """Names in the checkpoint by state-dict name of the base model."""
    unexpected: tuple[str, ...]
    """Names in the checkpoint that the base model lacks, other than heads and constants."""
    heads: tuple[str, ...]
    """Names of classification heads in the checkpoint that the base model lacks."""


def is_head(name: str) -> bool:
    """Returns whether a name is that of a classification head, as libraries call them.

    Args:
        name: Name of a tensor.
    """
    return _HEAD.fullmatch(name) is not None


def is_constant(name: str) -> bool:
    """Returns whether a name is that of a buffer that follows from the architecture, such as position_ids.

    Args:
        name: Name of a tensor.
    """
    return _CONSTANT.fullmatch(name) is not None


def match_names(
    source: str, names: Iterable[str], base: Collection[str], fits: Callable[[str, str], bool]
) -> NameMatch:
    """Finds the base model's name of every tensor of a checkpoint.

    Args:
        source: Location of the checkpoint, for errors.
        names: Names in the checkpoint.
        base: State-dict names of the base model.
        fits: Returns whether a tensor of the checkpoint has the shape of a tensor of the base model.

    Returns:
        The match.

    Raises:
        TaskVectorError: If no name matches, or if it is ambiguous which prefix is meant.
    """
    renamed = {name: _current_name(name, base) for name in names}
    prefix = _best_prefix(source, renamed, base, fits)
    tensors: dict[str, str] = {}
    unexpected, heads = [], []
    for name, current in renamed.items():
        target = prefix.apply(current)
        if target in base:
            assert target is not None
            tensors[target] = name
        elif is_head(name):
            heads.append(name)
        elif not is_constant(name):
            unexpected.append(name)
    return NameMatch(prefix, tensors, tuple(unexpected), tuple(heads))


def _current_name(name: str, base: Collection[str]) -> str:
    """Returns the present name of a parameter of a norm, which early versions of BERT called gamma and beta."""
    for old, new in _OLD_NORMS:
        if name.endswith(old) and not any(other.endswith(old) for other in base):
            return name.removesuffix(old) + new
    return name


def _best_prefix(
    source: str, names: Mapping[str, str], base: Collection[str], fits: Callable[[str, str], bool]
) -> Prefix:
    counts: Counter[Prefix] = Counter()
    by_current = {current: name for name, current in names.items()}
    for name, current in names.items():
        for prefix, rest in _splits(current):
            if rest in base and fits(name, rest):
                counts[Prefix(prefix, False)] += 1
    for target in base:
        for prefix, rest in _splits(target):
            if prefix and rest in by_current and fits(by_current[rest], target):
                counts[Prefix(prefix, True)] += 1
    if not counts:
        first = abbreviate((repr(printable(name)) for name in names), limit=3) or "none"
        problem = "has no tensor with the name and shape of a parameter of the base model"
        raise TaskVectorError(f"{source}: {problem}. Its tensors are {first}; is it of another architecture?")
    count = max(counts.values())
    best, *others = [prefix for prefix, matches in counts.items() if matches == count]
    unchanged = Prefix("", False)
    if others and unchanged in (best, *others) and not any(prefix.is_added for prefix in (best, *others)):
        # Names of the base model itself, such as visual.transformer… beside transformer…, are not a wrapper's.
        return unchanged
    if others:
        problem = f"{count} names match the base model both {best} and {others[0]}"
        raise TaskVectorError(f"{source}: {problem}. Pass a state dict with the names of the base model")
    return best


def _splits(name: str) -> Iterable[tuple[str, str]]:
    """Yields the name divided at each dot, beginning with an empty prefix."""
    yield "", name
    for dot in re.finditer(r"\.", name):
        yield name[: dot.end()], name[dot.end() :]
