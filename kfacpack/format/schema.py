"""Which tensors each way to hold a matrix consists of, and the shape each must have.

The table is the file's side of a form, without torch; `kfacpack.curvature.matrices` is the side that computes.
A form's numbers are in its tensor `data`. When that is I8, a tensor `scale` gives one factor for each stored row.

Does a manifest fit itself and the tensors beside it? Decided from shapes alone, before any tensor is read.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kfacpack.errors import BundleError
from kfacpack.format.container import refuse_duplicate_keys

if TYPE_CHECKING:
    from kfacpack.format.container import TensorSpec
    from kfacpack.format.manifest import DenseEntry, Join, KroneckerEntry, Manifest, MatrixEntry, Piece
    from kfacpack.format.reference import FileLocation


Shape = tuple[int, ...]
FLOATS = ("F64", "F32", "F16", "BF16")
DTYPES = (*FLOATS, "I32", "I8")


def triangle_length(side: int) -> int:
    """How many numbers a packed triangle holds, its diagonal included."""
    return side * (side + 1) // 2


def widest_block(side: int, count: int) -> int:
    return -(-side // count)


Shapes = dict[str, Shape]


def _dense(n: int, data: Shape) -> Shapes:
    return {"data": (n, n)}


def _packed(n: int, data: Shape) -> Shapes:
    return {"data": (triangle_length(n),), "scale": (n,)}


def _block(n: int, data: Shape) -> Shapes:
    count = min(max(data[0], 1), n)
    side = widest_block(n, count)
    return {"data": (count, triangle_length(side)), "scale": (count, side)}


def _lowrank(n: int, data: Shape) -> Shapes:
    rank = data[-1]
    return {"data": (n, rank), "weights": (rank,), "scale": (n,)}


def _sparse(n: int, data: Shape) -> Shapes:
    entries = data[0]
    return {"data": (entries,), "rows": (entries,), "columns": (entries,), "scale": (n,)}


def _diagonal(n: int, data: Shape) -> Shapes:
    return {"data": (n,)}


@dataclass(frozen=True)
class MatrixLayout:
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


LAYOUTS: Mapping[str, MatrixLayout] = {
    "dense": MatrixLayout(_dense),
    "packed": MatrixLayout(_packed),
    "block": MatrixLayout(_block, count=0),
    "lowrank": MatrixLayout(_lowrank, count=1),
    "sparse": MatrixLayout(_sparse, may_be_psd=False),
    "diagonal": MatrixLayout(_diagonal, full=lambda n: n),
}


def check_layout(path: FileLocation, entry: MatrixEntry, tensors: Mapping[str, TensorSpec]) -> None:
    """Refuse a matrix whose tensors are not exactly what its form asks for. Reads no tensor."""
    components = entry.components
    if twice := refuse_duplicate_keys(tensor.component for tensor in entry.tensors):
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


Problem = tuple[str, str]
"""Where, and what is wrong there."""


class Joined(Protocol):
    """A block, in a manifest or in memory, as far as its parameters go."""

    @property
    def name(self) -> str: ...

    @property
    def join(self) -> Join: ...


def check_consistency(path: FileLocation, manifest: Manifest, tensors: Mapping[str, TensorSpec]) -> None:
    _check_tensors(path, manifest, tensors)
    if twice := refuse_duplicate_keys(matrix.name for matrix in manifest.matrices):
        raise BundleError(path, "there are two matrices of this name", f"matrix {twice!r}")
    for matrix in manifest.matrices:
        check_layout(path, matrix, tensors)
    matrices = {matrix.name: matrix for matrix in manifest.matrices}
    for block in manifest.blocks:
        for name, side in block.references():
            _check_reference(path, matrices, block, name, side)
    used = {name for block in manifest.blocks for name, _ in block.references()}
    if unused := matrices.keys() - used:
        raise BundleError(path, "no block refers to it", f"matrix {min(unused)!r}")
    shapes = {parameter.name: parameter.shape for parameter in manifest.base.parameters}
    if problem := coverage_problem(manifest.blocks, shapes):
        where, what = problem
        raise BundleError(path, what, where)


def coverage_problem(blocks: Sequence[Joined], shapes: Mapping[str, Shape]) -> Problem | None:
    """Pieces must tile their block's matrix, and each parameter must be covered once, whole."""
    if twice := refuse_duplicate_keys(block.name for block in blocks):
        return f"block {twice!r}", "there are two blocks of this name"
    covered: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for block in blocks:
        for piece in block.join.pieces:
            if piece.parameter not in shapes:
                return f"block {block.name!r}", f"covers {piece.parameter!r}, which the base model does not list"
            if problem := _piece_problem(piece, shapes[piece.parameter]):
                return f"block {block.name!r}", problem
            covered[piece.parameter].append(piece.rows or (0, _length(shapes[piece.parameter])))
        if problem := _tiling_problem(block.join, shapes):
            return f"block {block.name!r}", problem
    for name, shape in shapes.items():
        spans = sorted(covered[name])
        # Spans cover a parameter once and whole when each begins where the one before it ends.
        if [0, *(stop for _, stop in spans)] != [*(start for start, _ in spans), _length(shape)]:
            found = [list(span) for span in spans[:8]]
            return f"parameter {name!r}", f"must be covered once and whole, covered are rows {found} of {list(shape)}"
    return None


def _length(shape: Shape) -> int:
    """How many rows a parameter has; a scalar has one."""
    return shape[0] if shape else 1


def _piece_problem(piece: Piece, shape: Shape) -> str | None:
    if not shape and (piece.rows is not None or piece.view != "column"):
        return f"{piece.parameter!r} is a scalar, which needs the view 'column' and no rows"
    if piece.rows is not None and not piece.rows[0] < piece.rows[1] <= shape[0]:
        return f"cannot take rows {list(piece.rows)} of {piece.parameter!r}, of shape {list(shape)}"
    return None


def _tiling_problem(join: Join, shapes: Mapping[str, Shape]) -> str | None:
    tiles: list[tuple[str, tuple[int, int, int, int]]] = []
    for piece in join.pieces:
        height, width = piece.matrix_shape(shapes[piece.parameter])
        (top, left), bottom, right = piece.at, piece.at[0] + height, piece.at[1] + width
        if bottom > join.rows or right > join.columns:
            size = f"{join.rows}×{join.columns}"
            return f"{piece.parameter!r} ({height}×{width}) at {list(piece.at)} leaves the {size} matrix"
        for other, (o_top, o_left, o_bottom, o_right) in tiles:
            if top < o_bottom and o_top < bottom and left < o_right and o_left < right:
                return f"{piece.parameter!r} and {other!r} overlap"
        tiles.append((piece.parameter, (top, left, bottom, right)))
    area = sum((bottom - top) * (right - left) for _, (top, left, bottom, right) in tiles)
    if area != join.rows * join.columns:
        return f"its pieces fill {area} of the {join.rows * join.columns} places of its matrix"
    return None


def _check_tensors(path: FileLocation, manifest: Manifest, tensors: Mapping[str, TensorSpec]) -> None:
    uses = Counter(tensor.name for matrix in manifest.matrices for tensor in matrix.tensors)
    for name, spec in tensors.items():
        if spec.dtype not in DTYPES:
            raise BundleError(path, f"has dtype {spec.dtype}, a bundle holds {', '.join(DTYPES)}", f"tensor {name!r}")
        if uses[name] != 1:
            raise BundleError(path, f"the manifest lists it {uses[name]} times, expected once", f"tensor {name!r}")


def _check_reference(
    path: FileLocation, matrices: Mapping[str, MatrixEntry], block: KroneckerEntry | DenseEntry, name: str, side: int
) -> None:
    where = f"block {block.name!r}"
    if name not in matrices:
        raise BundleError(path, f"refers to the matrix {name!r}, which is not there", where)
    if matrices[name].side != side:
        size = f"{block.join.rows}×{block.join.columns}"
        problem = f"joins its parameters to {size}, so {name!r} needs side {side}, found {matrices[name].side}"
        raise BundleError(path, problem, where)
    if block.structure == "diagonal" and matrices[name].form != "diagonal":
        problem = f"is diagonal, but {name!r} is held as {matrices[name].form!r}, expected 'diagonal'"
        raise BundleError(path, problem, where)
