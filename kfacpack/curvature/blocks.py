"""Between parameters by name and the one matrix ΔW (rows, columns) their block acts on.

A bias stands as last column beside its weight; a fused projection's rows may belong to several blocks; a parameter used
as `x @ W` stands transposed. The pieces say so; these two functions do it.

A block of curvature: the parameters it covers, and how it acts on them.

Shapes: the parameters of a block join to one matrix ΔW of (rows, columns), see `join.py`. A structure maps (rows,
columns) to (rows, columns); for the flattened view, rows come first (row-major).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kfacpack.format.manifest import DenseEntry, KroneckerEntry, Term

if TYPE_CHECKING:
    from kfacpack.curvature.matrices.matrix import Matrix
    from kfacpack.format.manifest import Join, Loss, Piece

    ParameterShapes = Mapping[str, tuple[int, ...]]

    Shapes = Mapping[str, tuple[int, ...]]

    Multiply = Callable[[Matrix, Tensor], Tensor]


def gather(tau: Mapping[str, Tensor], join: Join, shapes: ParameterShapes) -> Tensor:
    """The parameters' matrix, at least in float32. A parameter that `tau` leaves out is zero."""
    given = [tau[piece.parameter] for piece in join.pieces if piece.parameter in tau]
    dtype = torch.float32
    for tensor in given:
        dtype = torch.promote_types(dtype, tensor.dtype)
    if len(join.pieces) == 1 and given:
        return _as_matrix(given[0], join.pieces[0]).to(dtype)
    # Pieces tile the matrix, so that with all of them there, nothing of it stays as it is made.
    blank = torch.empty if len(given) == len(join.pieces) else torch.zeros
    delta = blank((join.rows, join.columns), dtype=dtype, device=given[0].device)
    for piece in join.pieces:
        if piece.parameter in tau:
            _place(delta, piece, shapes).copy_(_as_matrix(tau[piece.parameter], piece))
    return delta


def scatter(delta: Tensor, join: Join, shapes: ParameterShapes) -> dict[str, Tensor]:
    """The matrix's parameters, each in its own shape. Rows of a parameter that no piece covers are zero."""
    found: dict[str, Tensor] = {}
    for piece in join.pieces:
        shape = shapes[piece.parameter]
        place = _place(delta, piece, shapes)
        values = place.T if piece.view == "transposed" else place
        if piece.rows is None:
            found[piece.parameter] = values.reshape(shape)
        else:
            start, stop = piece.rows
            whole = found.setdefault(piece.parameter, delta.new_zeros(shape))
            whole[start:stop] = values.reshape((stop - start, *shape[1:]))
    return found


def accumulate(delta: Tensor, join: Join, shapes: ParameterShapes, sums: Mapping[str, Tensor], factor: float) -> None:
    """Add `factor` times the matrix's parameters to those of `sums`, in place. Those it lacks are left out."""
    for piece in join.pieces:
        if piece.parameter in sums:
            place = _place(delta, piece, shapes)
            values = place.T if piece.view == "transposed" else place
            whole = sums[piece.parameter]
            target = whole if piece.rows is None else whole[piece.rows[0] : piece.rows[1]]
            target.add_(values.reshape(target.shape).to(target.device), alpha=factor)


def _place(delta: Tensor, piece: Piece, shapes: ParameterShapes) -> Tensor:
    height, width = piece.matrix_shape(shapes[piece.parameter])
    top, left = piece.at
    return delta[top : top + height, left : left + width]


def _as_matrix(tensor: Tensor, piece: Piece) -> Tensor:
    if piece.rows is not None:
        tensor = tensor[piece.rows[0] : piece.rows[1]]
    if piece.view == "column":
        return tensor.reshape(-1, 1)
    matrix = tensor.reshape(tensor.shape[0], -1)
    return matrix.T if piece.view == "transposed" else matrix


class BlockForm(ABC):
    """How a block's matrices make up its G."""

    @abstractmethod
    def apply(self, delta: Tensor, multiply: Multiply = lambda matrix, x: matrix.matmul(x)) -> Tensor:
        """G ΔW, (rows, columns) -> (rows, columns). `multiply` may know a quicker way to the products with matrices."""

    @abstractmethod
    def matrices(self) -> Iterator[tuple[str, Matrix]]:
        """(role, matrix) of every matrix, in the order they are written."""

    @property
    @abstractmethod
    def weights(self) -> tuple[float, ...]:
        """w of each term: G = Σ w · (the Kronecker product of one matrix from each side)."""

    @property
    @abstractmethod
    def sides(self) -> tuple[tuple[Matrix, ...], ...]:
        """For each side of the product, its matrix in every term."""

    @classmethod
    @abstractmethod
    def of_sides(cls, weights: Sequence[float], sides: Sequence[Sequence[Matrix]]) -> BlockForm:
        """From what `weights` and `sides` say."""

    @abstractmethod
    def replaced(self, change: Callable[[Matrix], Matrix]) -> BlockForm:
        """The same structure, of other matrices."""

    @abstractmethod
    def misfit(self, rows: int, columns: int) -> str | None:
        """Why its matrices cannot act on (rows, columns), in words, or None."""

    @classmethod
    @abstractmethod
    def from_entry(cls, entry: Any, matrices: Mapping[str, Matrix]) -> BlockForm:
        """From the manifest's words for it."""

    @abstractmethod
    def entry(self, identifiers: Mapping[str, str], **common: Any) -> KroneckerEntry | DenseEntry:
        """The manifest's words for it; `identifiers` names the matrix in each role."""

    @abstractmethod
    def plain(self, names: Mapping[str, str]) -> dict[str, Any]:
        """The same for programs that know no manifest, in JSON; `names` has the tensor in each role."""


@dataclass(frozen=True)
class Kronecker(BlockForm):
    """G = Σ weight · B ⊗ A. One term for one task; a merged curvature may keep several."""

    terms: tuple[tuple[Matrix, Matrix, float], ...]
    """(B, A, weight) of each term."""

    @classmethod
    def of(cls, B: Matrix, A: Matrix, weight: float = 1.0) -> Kronecker:
        return cls(((B, A, weight),))

    def apply(self, delta: Tensor, multiply: Multiply = lambda matrix, x: matrix.matmul(x)) -> Tensor:
        # A is symmetric, so ΔW A = (A ΔWᵀ)ᵀ and one way to multiply serves both sides.
        products = ((multiply(B, multiply(A, delta.T).T), weight) for B, A, weight in self.terms)
        return reduce(add, (product if weight == 1 else weight * product for product, weight in products))

    def matrices(self) -> Iterator[tuple[str, Matrix]]:
        for suffix, (B, A, _) in zip(self._suffixes(), self.terms, strict=True):
            yield f"B{suffix}", B
            yield f"A{suffix}", A

    @property
    def weights(self) -> tuple[float, ...]:
        return tuple(weight for _, _, weight in self.terms)

    @property
    def sides(self) -> tuple[tuple[Matrix, ...], ...]:
        return tuple(B for B, _, _ in self.terms), tuple(A for _, A, _ in self.terms)

    @classmethod
    def of_sides(cls, weights: Sequence[float], sides: Sequence[Sequence[Matrix]]) -> Kronecker:
        B, A = sides
        return cls(tuple(zip(B, A, weights, strict=True)))

    def replaced(self, change: Callable[[Matrix], Matrix]) -> Kronecker:
        return Kronecker(tuple((change(B), change(A), weight) for B, A, weight in self.terms))

    def misfit(self, rows: int, columns: int) -> str | None:
        if not self.terms:
            return "has no terms"
        for B, A, _ in self.terms:
            if (B.side, A.side) != (rows, columns):
                return f"needs B of side {rows} and A of side {columns}, found {B.side} and {A.side}"
        return None

    @classmethod
    def from_entry(cls, entry: KroneckerEntry, matrices: Mapping[str, Matrix]) -> Kronecker:
        return cls(tuple((matrices[term.B], matrices[term.A], term.weight) for term in entry.terms))

    def entry(self, identifiers: Mapping[str, str], **common: Any) -> KroneckerEntry:
        terms = tuple(Term(**term) for term in self._named(identifiers))
        return KroneckerEntry(structure="kronecker", terms=terms, **common)

    def plain(self, names: Mapping[str, str]) -> dict[str, Any]:
        return {"terms": list(self._named(names))}

    def _named(self, names: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        for suffix, weight in zip(self._suffixes(), self.weights, strict=True):
            yield {"B": names[f"B{suffix}"], "A": names[f"A{suffix}"], "weight": weight}

    def _suffixes(self) -> list[str]:
        return [f".{k}" for k in range(len(self.terms))] if len(self.terms) > 1 else [""]


@dataclass(frozen=True)
class Whole(BlockForm):
    """G as one matrix over the flattened parameters: dense for norms and tokens, or only the diagonal."""

    matrix: Matrix

    def apply(self, delta: Tensor, multiply: Multiply = lambda matrix, x: matrix.matmul(x)) -> Tensor:
        return multiply(self.matrix, delta.reshape(-1, 1)).reshape(delta.shape)

    def matrices(self) -> Iterator[tuple[str, Matrix]]:
        yield "G", self.matrix

    @property
    def weights(self) -> tuple[float, ...]:
        return (1.0,)

    @property
    def sides(self) -> tuple[tuple[Matrix, ...], ...]:
        return ((self.matrix,),)

    @classmethod
    def of_sides(cls, weights: Sequence[float], sides: Sequence[Sequence[Matrix]]) -> Whole:
        ((matrix,),) = sides
        if tuple(weights) != (1,):
            raise ValueError(f"a whole matrix has no weight, found {weights}")
        return cls(matrix)

    def replaced(self, change: Callable[[Matrix], Matrix]) -> Whole:
        return Whole(change(self.matrix))

    def misfit(self, rows: int, columns: int) -> str | None:
        if self.matrix.side != rows * columns:
            return f"needs a matrix of side {rows * columns}, found {self.matrix.side}"
        return None

    @classmethod
    def from_entry(cls, entry: DenseEntry, matrices: Mapping[str, Matrix]) -> Whole:
        return cls(matrices[entry.matrix])

    def entry(self, identifiers: Mapping[str, str], **common: Any) -> DenseEntry:
        return DenseEntry(structure=self.matrix.structure, matrix=identifiers["G"], **common)

    def plain(self, names: Mapping[str, str]) -> dict[str, Any]:
        return {"G": names["G"]}


STRUCTURES: dict[str, type[BlockForm]] = {"kronecker": Kronecker, "dense": Whole, "diagonal": Whole}


@dataclass(frozen=True)
class CurvatureBlock:
    """One block of a curvature, ready to act on the parameters it covers."""

    name: str
    operation: str
    join: Join
    structure: BlockForm
    losses: tuple[Loss, ...] = ()

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(piece.parameter for piece in self.join.pieces))

    def apply(self, tau: Mapping[str, Tensor], shapes: Shapes) -> dict[str, Tensor]:
        """G τ for the parameters of this block; one that τ leaves out counts as zero."""
        return scatter(self._apply(gather(tau, self.join, shapes)), self.join, shapes)

    def quadratic(self, tau: Mapping[str, Tensor], shapes: Shapes) -> Tensor:
        """<τ, G τ>, a 0-d tensor."""
        delta = gather(tau, self.join, shapes)
        return (delta * self._apply(delta)).sum()

    def _apply(self, delta: Tensor) -> Tensor:
        # A penalty is computed in float32 at least, also in the middle of somebody's mixed-precision training step.
        with torch.autocast(delta.device.type, enabled=False):
            return self.structure.apply(delta)
