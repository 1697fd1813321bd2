"""Does a manifest fit itself and the tensors beside it? Decided from shapes alone, before any tensor is read."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING

from kfacpack.bundle.layout import DTYPES, check_layout
from kfacpack.bundle.manifest import repeated
from kfacpack.errors import BundleError

if TYPE_CHECKING:
    from pathlib import Path

    from kfacpack.bundle.container import TensorSpec
    from kfacpack.bundle.manifest import DenseEntry, Join, KroneckerEntry, Manifest, MatrixEntry, Piece

Shape = tuple[int, ...]


def check_consistency(path: Path, manifest: Manifest, tensors: Mapping[str, TensorSpec]) -> None:
    _check_tensors(path, manifest, tensors)
    if twice := repeated(matrix.name for matrix in manifest.matrices):
        raise BundleError(path, "there are two matrices of this name", where=f"matrix {twice!r}")
    matrices = {matrix.name: matrix for matrix in manifest.matrices}
    for matrix in manifest.matrices:
        check_layout(path, matrix, tensors)
    if twice := repeated(block.name for block in manifest.blocks):
        raise BundleError(path, "there are two blocks of this name", where=f"block {twice!r}")
    for block in manifest.blocks:
        for identifier, side in block.references():
            _check_reference(path, matrices, block, identifier, side)
    used = {identifier for block in manifest.blocks for identifier, _ in block.references()}
    if unused := matrices.keys() - used:
        raise BundleError(path, "no block refers to it", where=f"matrix {min(unused)!r}")
    shapes = {parameter.name: parameter.shape for parameter in manifest.base.parameters}
    for where, problem in coverage_problems(manifest, shapes):
        raise BundleError(path, problem, where=where)


def view_shape(piece: Piece, shape: Shape) -> tuple[int, int]:
    """Rows and columns of a piece, once its parameter is sliced and seen as a matrix."""
    if piece.rows is not None:
        shape = (piece.rows[1] - piece.rows[0], *shape[1:])
    if piece.view == "column":
        return prod(shape), 1
    rows, columns = shape[0], prod(shape[1:])
    return (columns, rows) if piece.view == "transposed" else (rows, columns)


def coverage_problems(manifest: Manifest, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, str]]:
    """Pieces must tile their block's matrix, and each parameter must be covered once, whole."""
    covered: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for block in manifest.blocks:
        where = f"block {block.name!r}"
        for piece in block.join.pieces:
            if piece.parameter not in shapes:
                yield where, f"covers {piece.parameter!r}, which base.parameters does not list"
                return
            shape = shapes[piece.parameter]
            start, stop = piece.rows or (0, shape[0] if shape else 1)
            if (not shape and (piece.rows or piece.view != "column")) or not start < stop <= (shape or (1,))[0]:
                problem = f"cannot take rows {piece.rows} as {piece.view!r} of {piece.parameter!r}"
                yield where, f"{problem}, of shape {list(shape)}"
                return
            covered[piece.parameter].append((start, stop))
        if gap := _tiling_problem(block.join, shapes):
            yield where, gap
    for name, shape in shapes.items():
        spans = sorted(covered[name])
        ends = [0, *(stop for _, stop in spans)]
        starts = [*(start for start, _ in spans), shape[0] if shape else 1]
        if ends != starts:
            problem = f"must be covered once and whole, its rows are covered as {[list(span) for span in spans[:8]]}"
            yield f"parameter {name!r}", f"{problem}, of shape {list(shape)}"


def _tiling_problem(join: Join, shapes: Mapping[str, Shape]) -> str | None:
    tiles: list[tuple[str, tuple[int, int, int, int]]] = []
    for piece in join.pieces:
        height, width = view_shape(piece, shapes[piece.parameter])
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


def _check_tensors(path: Path, manifest: Manifest, tensors: Mapping[str, TensorSpec]) -> None:
    uses = Counter(tensor.name for matrix in manifest.matrices for tensor in matrix.tensors)
    for name, spec in tensors.items():
        if spec.dtype not in DTYPES:
            problem = f"has dtype {spec.dtype}, a bundle holds {', '.join(DTYPES)}"
            raise BundleError(path, problem, where=f"tensor {name!r}")
        if uses[name] != 1:
            problem = f"the manifest lists it {uses[name]} times, expected once"
            raise BundleError(path, problem, where=f"tensor {name!r}")


def _check_reference(
    path: Path,
    matrices: Mapping[str, MatrixEntry],
    block: KroneckerEntry | DenseEntry,
    identifier: str,
    side: int,
) -> None:
    where = f"block {block.name!r}"
    entry = matrices.get(identifier)
    if entry is None:
        raise BundleError(path, f"refers to the matrix {identifier!r}, which is not there", where=where)
    if entry.side != side:
        size = f"{block.join.rows}×{block.join.columns}"
        problem = f"joins its parameters to {size}, so {identifier!r} needs side {side}, found {entry.side}"
        raise BundleError(path, problem, where=where)
    if block.structure == "diagonal" and entry.form != "diagonal":
        problem = f"is diagonal, but {identifier!r} is held as {entry.form!r}, expected 'diagonal'"
        raise BundleError(path, problem, where=where)
