"""Does a manifest fit itself and the tensors beside it? Decided from shapes alone, before any tensor is read."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from kfacpack.bundle.container import repeated
from kfacpack.bundle.layout import DTYPES, check_layout
from kfacpack.errors import BundleError

if TYPE_CHECKING:
    from kfacpack.bundle.container import TensorSpec
    from kfacpack.bundle.manifest import DenseEntry, Join, KroneckerEntry, Manifest, MatrixEntry, Piece
    from kfacpack.hub.files.reference import Place

Shape = tuple[int, ...]
Problem = tuple[str, str]
"""Where, and what is wrong there."""


class Joined(Protocol):
    """A block, in a manifest or in memory, as far as its parameters go."""

    @property
    def name(self) -> str: ...

    @property
    def join(self) -> Join: ...


def check_consistency(path: Place, manifest: Manifest, tensors: Mapping[str, TensorSpec]) -> None:
    _check_tensors(path, manifest, tensors)
    if twice := repeated(matrix.name for matrix in manifest.matrices):
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
    if twice := repeated(block.name for block in blocks):
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


def _check_tensors(path: Place, manifest: Manifest, tensors: Mapping[str, TensorSpec]) -> None:
    uses = Counter(tensor.name for matrix in manifest.matrices for tensor in matrix.tensors)
    for name, spec in tensors.items():
        if spec.dtype not in DTYPES:
            raise BundleError(path, f"has dtype {spec.dtype}, a bundle holds {', '.join(DTYPES)}", f"tensor {name!r}")
        if uses[name] != 1:
            raise BundleError(path, f"the manifest lists it {uses[name]} times, expected once", f"tensor {name!r}")


def _check_reference(
    path: Place, matrices: Mapping[str, MatrixEntry], block: KroneckerEntry | DenseEntry, name: str, side: int
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
