"""Whether a task vector fits what it is put to."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from torch import Tensor

from kfacpack.errors import TaskVectorError


def covered_part(tau: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], whose: str) -> dict[str, Tensor]:
    """What of τ is covered, once that is known to fit; other parameters are left aside."""
    _require_mapping(tau)
    known = {name: tau[name] for name in tau if name in shapes}
    if not known:
        some = ", ".join(list(shapes)[:3])
        raise TaskVectorError(f"the task vector has none of the parameters that this {whose} covers: {some}, …")
    require_fit(known, shapes, whose)
    return known


def require_fit(tau: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], whose: str) -> None:
    """`shapes` are those of all parameters covered, by name; `whose` they are, in one word, for the message."""
    _require_mapping(tau)
    if not tau:
        raise TaskVectorError("the task vector is empty, expected at least one of the covered parameters")
    for name, tensor in tau.items():
        if not isinstance(tensor, Tensor):
            raise TaskVectorError(f"parameter {name!r}: expected a tensor, found {type(tensor).__name__}")
        if name not in shapes:
            close = difflib.get_close_matches(name, shapes, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TaskVectorError(
                f"parameter {name!r} is not covered by this {whose}{hint}. To leave out what it does not cover: "
                f"{{name: value for name, value in tau.items() if name in {whose}.parameters}}"
            )
        if tuple(tensor.shape) != shapes[name] or not tensor.is_floating_point():
            found = f"{tensor.dtype} of shape {list(tensor.shape)}"
            raise TaskVectorError(f"parameter {name!r}: expected floats of shape {list(shapes[name])}, found {found}")


def _require_mapping(tau: object) -> None:
    if not isinstance(tau, Mapping):
        found = type(tau).__name__
        raise TaskVectorError(f"expected a task vector as a mapping of names to tensors, found {found}")
