"""Which tensors each way to hold a matrix consists of, and the shape each must have.

The table is the file's side of a form, without torch; `kfacpack.curvature.matrices` is the side that computes.
A form's numbers are in its tensor `data`. When that is I8, a tensor `scale` gives one factor for each stored row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kfacpack.errors import BundleError

if TYPE_CHECKING:
    from pathlib import Path

    from kfacpack.bundle.container import TensorSpec
    from kfacpack.bundle.manifest import MatrixEntry

Shape = tuple[int, ...]
FLOATS = ("F64", "F32", "F16", "BF16")
DTYPES = (*FLOATS, "I32", "I8")


def triangle(side: int) -> int:
    """How many numbers a packed triangle holds, its diagonal included."""
    return side * (side + 1) // 2


def widest_block(side: int, count: int) -> int:
    return -(-side // count)


@dataclass(frozen=True)
class Layout:
    """`shapes(side, first)` gives every tensor's shape; `first` is data's first dimension and `last` its last,
    for the forms that let data say how many blocks, columns or entries there are."""

    shapes: Callable[[int, int, int], dict[str, Shape]]
    dimensions: int
    version: int = 1
    may_be_psd: bool = True


LAYOUTS: Mapping[str, Layout] = {
    "dense": Layout(lambda n, _first, _last: {"data": (n, n)}, dimensions=2),
    "packed": Layout(lambda n, _first, _last: {"data": (triangle(n),), "scale": (n,)}, dimensions=1),
    "block": Layout(
        lambda n, count, _last: {
            "data": (count, triangle(widest_block(n, count))),
            "scale": (count, widest_block(n, count)),
        },
        dimensions=2,
    ),
    "lowrank": Layout(
        lambda n, _first, rank: {"data": (n, rank), "weights": (rank,), "scale": (n,)}, dimensions=2
    ),
    "sparse": Layout(
        lambda n, entries, _last: {"data": (entries,), "rows": (entries,), "columns": (entries,), "scale": (n,)},
        dimensions=1,
        may_be_psd=False,
    ),
    "diagonal": Layout(lambda n, _first, _last: {"data": (n,)}, dimensions=1),
}


def check_layout(path: Path, entry: MatrixEntry, tensors: Mapping[str, TensorSpec]) -> None:
    """Refuse a matrix whose tensors are not exactly what its form asks for. Reads no tensor."""
    components = entry.components

    def refuse(problem: str, tensor: str | None = None) -> BundleError:
        return BundleError(path, problem, where=f"tensor {tensor!r}" if tensor else f"matrix {entry.name!r}")

    layout = LAYOUTS.get(entry.form)
    if layout is None or entry.version > layout.version:
        known = ", ".join(f"{form} {each.version}" for form, each in LAYOUTS.items())
        problem = f"is held as {entry.form!r} version {entry.version}; known here: {known}"
        raise BundleError(path, problem, where=f"matrix {entry.name!r}", remedy="Upgrade kfacpack to read it")
    if entry.psd and not layout.may_be_psd:
        raise refuse(f"promises to be positive semi-definite, which a {entry.form!r} matrix may not")
    for component, tensor in components.items():
        if tensor not in tensors:
            raise refuse(f"is {component!r} of matrix {entry.name!r}, but not in the file", tensor)
    if "data" not in components:
        raise refuse("has no 'data'")
    data = tensors[components["data"]]
    if len(data.shape) != layout.dimensions or 0 in data.shape[:1] and entry.form == "block":
        problem = f"'data' of a {entry.form!r} matrix has {layout.dimensions} dimensions, found {list(data.shape)}"
        raise refuse(problem, components["data"])

    expected = layout.shapes(entry.side, data.shape[0], data.shape[-1])
    if data.dtype != "I8":
        expected.pop("scale", None)
    if expected.keys() != components.keys():
        problem = f"a {entry.form!r} matrix of {data.dtype} consists of {sorted(expected)}"
        raise refuse(f"{problem}, found {sorted(components)}")
    for component, shape in expected.items():
        tensor = components[component]
        spec, allowed = tensors[tensor], _allowed_dtypes(component, scaled="scale" in expected)
        if spec.shape != shape:
            problem = f"{component!r} of a {entry.form!r} matrix of side {entry.side}"
            raise refuse(f"{problem} has shape {list(shape)}, found {list(spec.shape)}", tensor)
        if spec.dtype not in allowed:
            raise refuse(f"{component!r} is {spec.dtype}, expected one of {', '.join(allowed)}", tensor)


def _allowed_dtypes(component: str, scaled: bool) -> tuple[str, ...]:
    if component in ("rows", "columns"):
        return ("I32",)
    return ("I8",) if component == "data" and scaled else FLOATS
