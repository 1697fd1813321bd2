"""Checks that a manifest is consistent with itself and with the tensors in its file. Tensor data is not read.

`LAYOUTS` lists the tensors and shapes of every form in which a matrix can be stored. It is the torch-free counterpart
of `kfacpack.curvature.matrices`. The values of a matrix are stored in its tensor `data`. If `data` has the dtype I8, a
tensor `scale` contains one scaling factor for each stored row.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kfacpack.errors import BundleError, abbreviate
from kfacpack.format.container import first_duplicate

if TYPE_CHECKING:
    from kfacpack.format.container import TensorSpec
    from kfacpack.format.manifest import DenseEntry, Join, KroneckerEntry, Manifest, MatrixEntry, Piece
    from kfacpack.format.reference import FileLocation


Shape = tuple[int, ...]
FLOATS = ("F64", "F32", "F16", "BF16")
DTYPES = (*FLOATS, "I32", "I8")


def triangle_length(side: int) -> int:
    """Returns the number of elements in the lower triangle of a `side` × `side` matrix, including the diagonal."""
    return side * (side + 1) // 2


def widest_block(side: int, count: int) -> int:
    """Returns the side length ⌈side / count⌉ of the largest block if a matrix is split into `count` diagonal blocks."""
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
    """The layout of a form in which matrices are stored, such as `packed`: its tensors and their shapes."""

    shapes: Callable[[int, Shape], Shapes]
    """Function that computes the expected shape of every tensor from the side length and the actual shape of `data`.

    The actual shape of `data` is needed because it determines the number of blocks, columns or entries.
    """
    version: int = 1
    """Highest supported version of the form."""
    may_be_psd: bool = True
    """Whether a matrix of this form may be declared positive semi-definite."""
    count: int | None = None
    """Index of the dimension of `data` whose size is the number in short names such as block:8.

    None if short names of this form contain no number.
    """
    full: Callable[[int], int] = lambda n: n * n
    """Function that computes the number of elements of an uncompressed matrix from its side length."""


LAYOUTS: Mapping[str, MatrixLayout] = {
    "dense": MatrixLayout(_dense),
    "packed": MatrixLayout(_packed),
    "block": MatrixLayout(_block, count=0),
    "lowrank": MatrixLayout(_lowrank, count=1),
    "sparse": MatrixLayout(_sparse, may_be_psd=False),
    "diagonal": MatrixLayout(_diagonal, full=lambda n: n),
}


def check_layout(path: FileLocation, entry: MatrixEntry, tensors: Mapping[str, TensorSpec]) -> None:
    """Checks that a matrix has exactly the tensors that its form requires, without reading their data.

    Args:
        path: The file, for error messages.
        entry: The manifest entry of the matrix.
        tensors: All tensors in the file, by name.

    Raises:
        BundleError: If a tensor is missing or unexpected, or has the wrong shape or dtype.
    """
    components = entry.components
    if duplicate := first_duplicate(tensor.component for tensor in entry.tensors):
        raise BundleError(path, f"has two tensors for {duplicate!r}, expected one", where=f"matrix {entry.name!r}")

    def invalid(problem: str, tensor: str | None = None) -> BundleError:
        return BundleError(path, problem, where=f"tensor {tensor!r}" if tensor else f"matrix {entry.name!r}")

    layout = LAYOUTS.get(entry.form)
    if layout is None or entry.version > layout.version:
        supported = ", ".join(f"{form} {supported.version}" for form, supported in LAYOUTS.items())
        problem = f"has the form {entry.form!r}, version {entry.version}; expected one of {supported}"
        raise BundleError(path, problem, where=f"matrix {entry.name!r}", remedy="Upgrade kfacpack to read this file")
    if entry.psd and not layout.may_be_psd:
        raise invalid(f"is declared positive semi-definite, which is not allowed for a {entry.form!r} matrix")
    for component, tensor in components.items():
        if tensor not in tensors:
            raise invalid(f"is listed as {component!r} of matrix {entry.name!r}, but is not in the file", tensor)
    if "data" not in components:
        raise invalid("has no tensor for 'data'")
    data = tensors[components["data"]]
    if not data.shape:
        raise invalid(f"is the 'data' of matrix {entry.name!r}, but is a scalar", components["data"])

    expected = layout.shapes(entry.side, data.shape)
    if data.dtype != "I8":
        expected.pop("scale", None)
    if expected.keys() != components.keys():
        problem = f"a {entry.form!r} matrix of dtype {data.dtype} requires tensors for {sorted(expected)}"
        raise invalid(f"{problem}, got {sorted(components)}")
    for component, shape in expected.items():
        tensor = components[component]
        spec, allowed = tensors[tensor], _allowed_dtypes(component, scaled="scale" in expected)
        if spec.shape != shape:
            problem = f"{component!r} of a {entry.form!r} matrix with side length {entry.side}"
            raise invalid(f"{problem} must have shape {list(shape)}, got {list(spec.shape)}", tensor)
        if spec.dtype not in allowed:
            raise invalid(f"{component!r} has dtype {spec.dtype}, expected one of {', '.join(allowed)}", tensor)


def _allowed_dtypes(component: str, scaled: bool) -> tuple[str, ...]:
    if component in ("rows", "columns"):
        return ("I32",)
    return ("I8",) if component == "data" and scaled else FLOATS


Problem = tuple[str, str]
"""The location of an inconsistency and its description."""


class JoinedBlock(Protocol):
    """The common interface of blocks in a manifest and blocks in memory."""

    @property
    def name(self) -> str:
        """Name of the block."""

    @property
    def join(self) -> Join:
        """The arrangement of the block's parameters in one joined matrix."""


def check_consistency(path: FileLocation, manifest: Manifest, tensors: Mapping[str, TensorSpec]) -> None:
    """Checks that a manifest is consistent with itself and with the tensors in its file.

    Args:
        path: The file, for error messages.
        manifest: The validated manifest.
        tensors: All tensors in the file, by name.

    Raises:
        BundleError: If the tensors, matrices, blocks and parameters are not consistent with each other.
    """
    _check_listed_once(path, manifest, tensors)
    if duplicate := first_duplicate(matrix.name for matrix in manifest.matrices):
        raise BundleError(path, "there are two matrices with this name", f"matrix {duplicate!r}")
    for matrix in manifest.matrices:
        check_layout(path, matrix, tensors)
    matrices = {matrix.name: matrix for matrix in manifest.matrices}
    for block in manifest.blocks:
        for name, side in block.references():
            _check_reference(path, matrices, block, name, side)
    used = {name for block in manifest.blocks for name, _ in block.references()}
    if unused := matrices.keys() - used:
        raise BundleError(path, "is not used by any block", f"matrix {min(unused)!r}")
    shapes = {parameter.name: parameter.shape for parameter in manifest.base.parameters}
    if problem := coverage_problem(manifest.blocks, shapes):
        where, description = problem
        raise BundleError(path, description, where)


def coverage_problem(blocks: Sequence[JoinedBlock], shapes: Mapping[str, Shape]) -> Problem | None:
    """Checks that the pieces of each block tile its matrix and that every parameter is covered exactly once.

    Args:
        blocks: All blocks.
        shapes: Shapes of the base model's parameters by name.

    Returns:
        The location and description of the first problem, or None if there is no problem.
    """
    if duplicate := first_duplicate(block.name for block in blocks):
        return f"block {duplicate!r}", "there are two blocks with this name"
    covered: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for block in blocks:
        for piece in block.join.pieces:
            if piece.parameter not in shapes:
                return f"block {block.name!r}", f"covers {piece.parameter!r}, a parameter that `base` does not list"
            if problem := _piece_problem(piece, shapes[piece.parameter]):
                return f"block {block.name!r}", problem
            covered[piece.parameter].append(piece.rows or (0, _length(shapes[piece.parameter])))
        if problem := _tiling_problem(block.join, shapes):
            return f"block {block.name!r}", problem
    for name, shape in shapes.items():
        spans = sorted(covered[name])
        # Spans cover a parameter exactly once if each begins where the previous one ends.
        if [0, *(stop for _, stop in spans)] != [*(start for start, _ in spans), _length(shape)]:
            rows = abbreviate((str(list(span)) for span in spans), limit=8) or "none"
            problem = f"must be covered exactly once; shape: {list(shape)}, covered row ranges: {rows}"
            return f"parameter {name!r}", problem
    return None


def _length(shape: Shape) -> int:
    """Returns the size of the first dimension of a parameter with this shape, or 1 if the parameter is a scalar."""
    return shape[0] if shape else 1


def _piece_problem(piece: Piece, shape: Shape) -> str | None:
    if not shape and (piece.rows is not None or piece.view != "column"):
        return f"{piece.parameter!r} is a scalar; expected the view 'column', without `rows`"
    if piece.rows is not None and not piece.rows[0] < piece.rows[1] <= shape[0]:
        expected = f"expected start < stop <= {shape[0]}"
        return f"invalid rows {list(piece.rows)} for {piece.parameter!r} of shape {list(shape)}, {expected}"
    return None


def _tiling_problem(join: Join, shapes: Mapping[str, Shape]) -> str | None:
    tiles: list[tuple[str, tuple[int, int, int, int]]] = []
    for piece in join.pieces:
        height, width = piece.matrix_shape(shapes[piece.parameter])
        (top, left), bottom, right = piece.at, piece.at[0] + height, piece.at[1] + width
        if bottom > join.rows or right > join.columns:
            size = f"{join.rows}×{join.columns}"
            return f"{piece.parameter!r} ({height}×{width}) at {list(piece.at)} exceeds the {size} matrix"
        for other, (o_top, o_left, o_bottom, o_right) in tiles:
            if top < o_bottom and o_top < bottom and left < o_right and o_left < right:
                return f"{piece.parameter!r} and {other!r} overlap"
        tiles.append((piece.parameter, (top, left, bottom, right)))
    area = sum((bottom - top) * (right - left) for _, (top, left, bottom, right) in tiles)
    if area != join.rows * join.columns:
        return f"its pieces fill only {area} of the {join.rows * join.columns} elements of the joined matrix"
    return None


def _check_listed_once(path: FileLocation, manifest: Manifest, tensors: Mapping[str, TensorSpec]) -> None:
    """Checks that every tensor in the file has an allowed dtype and belongs to exactly one matrix."""
    uses = Counter(tensor.name for matrix in manifest.matrices for tensor in matrix.tensors)
    for name, spec in tensors.items():
        if spec.dtype not in DTYPES:
            problem = f"has dtype {spec.dtype}, expected one of {', '.join(DTYPES)}"
            raise BundleError(path, problem, f"tensor {name!r}")
        if uses[name] != 1:
            problem = f"the manifest lists it {uses[name]} times, expected exactly once"
            raise BundleError(path, problem, f"tensor {name!r}")


def _check_reference(
    path: FileLocation, matrices: Mapping[str, MatrixEntry], block: KroneckerEntry | DenseEntry, name: str, side: int
) -> None:
    """Checks that the matrix `name` exists and has the side length and form that the block requires."""
    where = f"block {block.name!r}"
    if name not in matrices:
        raise BundleError(path, f"refers to the missing matrix {name!r}", where)
    if matrices[name].side != side:
        size = f"{block.join.rows}×{block.join.columns}"
        problem = f"its parameters form a {size} matrix"
        problem += f", so the matrix {name!r} must have side length {side}, got {matrices[name].side}"
        raise BundleError(path, problem, where)
    if block.structure == "diagonal" and matrices[name].form != "diagonal":
        problem = f"is diagonal, but the matrix {name!r} has the form {matrices[name].form!r}, expected 'diagonal'"
        raise BundleError(path, problem, where)
