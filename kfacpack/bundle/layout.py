"""Which tensors each way to hold a matrix consists of, and the shape each must have.

The table is the file's side of a form, without torch; `kfacpack.curvature.matrices` is the side that computes.
A form's numbers are in its tensor `data`. When that is I8, a tensor `scale` gives one factor for each stored row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kfacpack.bundle.container import repeated
from kfacpack.errors import BundleError

if TYPE_CHECKING:
    from kfacpack.bundle.container import TensorSpec
    from kfacpack.bundle.manifest import MatrixEntry
    from kfacpack.hub.files.reference import Place

Shape = tuple[int, ...]
FLOATS = ("F64", "F32", "F16", "BF16")
DTYPES = (*FLOATS, "I32", "I8")


def triangle(side: int) -> int:
    """How many numbers a packed triangle holds, its diagonal included."""
    return side * (side + 1) // 2


def widest_block(side: int, count: int) -> int:
    return -(-side // count)


Shapes = dict[str, Shape]


def _dense(n: int, data: Shape) -> Shapes:
    return {"data": (n, n)}


def _packed(n: int, data: Shape) -> Shapes:
    return {"data": (triangle(n),), "scale": (n,)}


def _block(n: int, data: Shape) -> Shapes:
    count = min(max(data[0], 1), n)
    side = widest_block(n, count)
    return {"data": (count, triangle(side)), "scale": (count, side)}


def _lowrank(n: int, data: Shape) -> Shapes:
    rank = data[-1]
    return {"data": (n, rank), "weights": (rank,), "scale": (n,)}


def _sparse(n: int, data: Shape) -> Shapes:
    entries = data[0]
    return {"data": (entries,), "rows": (entries,), "columns": (entries,), "scale": (n,)}


def _diagonal(n: int, data: Shape) -> Shapes:
    return {"data": (n,)}


@dataclass(frozen=True)
class Layout:
    """`shapes(side, data)` gives every tensor's shape, the right one of `data` among them.

    The shape that `data` has is given because it alone says how many blocks, columns or entries there are.
    """

    shapes: Callable[[int, Shape], Shapes]
    version: int = 1
    may_be_psd: bool = True
    count: int | None = None
    """The dimension of `data` that a short name of the form gives, as in block:8; None if there is none."""
    full: Callable[[int], int] = lambda n: n * n
    """How many numbers a side would take without any saving."""


LAYOUTS: Mapping[str, Layout] = {
    "dense": Layout(_dense),
    "packed": Layout(_packed),
    "block": Layout(_block, count=0),
    "lowrank": Layout(_lowrank, count=1),
    "sparse": Layout(_sparse, may_be_psd=False),
    "diagonal": Layout(_diagonal, full=lambda n: n),
}


def check_layout(path: Place, entry: MatrixEntry, tensors: Mapping[str, TensorSpec]) -> None:
    """Refuse a matrix whose tensors are not exactly what its form asks for. Reads no tensor."""
    components = entry.components
    if twice := repeated(tensor.component for tensor in entry.tensors):
        raise BundleError(path, f"has two tensors for {twice!r}", where=f"matrix {entry.name!r}")

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
    if not data.shape:
        raise refuse("'data' is a scalar", components["data"])

    expected = layout.shapes(entry.side, data.shape)
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
