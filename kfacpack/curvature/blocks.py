"""Blocks of a curvature: the parameters that a block covers, and how its matrices act on them.

Shapes: the `Join` of a block arranges the changes to the block's parameters in one matrix ΔW, (rows, columns). A join
consists of pieces. Each piece is the position in ΔW of a parameter or of a range of its rows. A bias is the last column
of ΔW, to the right of the weight. The rows of a fused projection may be divided among several blocks. A parameter that
the model uses as `x @ W` is transposed. The product G ΔW has the shape of ΔW. If G is a single matrix, it multiplies ΔW
flattened in row-major order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kfacpack._torch import add_each
from kfacpack.format.manifest import DenseEntry, KroneckerEntry, Term

if TYPE_CHECKING:
    from kfacpack.curvature.matrices.matrix import Matrix
    from kfacpack.format.manifest import Join, Loss, Piece

    ParameterShapes = Mapping[str, tuple[int, ...]]

    Multiply = Callable[[Matrix, Tensor], Tensor]


def gather(tau: Mapping[str, Tensor], join: Join, shapes: ParameterShapes) -> Tensor:
    """Joins the changes to parameters into the matrix ΔW of a block.

    Args:
        tau: Changes to parameters, by name. At least one parameter of the block is required. Missing parameters count
            as zero.
        join: Position of each parameter in the matrix.
        shapes: Shapes of the parameters, by name.

    Returns:
        ΔW, (rows, columns), in float32, or in float64 if one of the tensors is float64.
    """
    return gather_stack(tau, [join], shapes)[0]


def gather_stack(tau: Mapping[str, Tensor], joins: Sequence[Join], shapes: ParameterShapes) -> Tensor:
    """Joins the changes to parameters into the matrices ΔW of several blocks.

    Args:
        tau: Changes to parameters, by name. At least one parameter of the blocks is required. Missing parameters count
            as zero.
        joins: Join of each block. `join_layout` must return the same key for all joins.
        shapes: Shapes of the parameters, by name.

    Returns:
        ΔW of each block, (blocks, rows, columns), in float32, or in float64 if one of the tensors is float64.
    """
    names = [piece.parameter for join in joins for piece in join.pieces]
    tensors = [tau[name] for name in names if name in tau]
    dtype, device = torch.float32, tensors[0].device
    for tensor_dtype in {tensor.dtype for tensor in tensors}:
        dtype = torch.promote_types(dtype, tensor_dtype)
    if len(tensors) < len(names):
        zeros = {name: torch.zeros(shapes[name], dtype=dtype, device=device) for name in names if name not in tau}
        tau = {**tau, **zeros}
    # Corresponding pieces of all blocks, position by position.
    positions = list(zip(*(join.pieces for join in joins), strict=True))
    if len(positions) == 1:
        return _stack_pieces(tau, positions[0]).to(dtype)
    # The pieces tile the matrix, so it needs no initialisation.
    delta = torch.empty((len(joins), joins[0].rows, joins[0].columns), dtype=dtype, device=device)
    for pieces in positions:
        _region(delta, pieces[0], shapes).copy_(_stack_pieces(tau, pieces))
    return delta


def scatter(delta: Tensor, join: Join, shapes: ParameterShapes) -> dict[str, Tensor]:
    """Splits the matrix ΔW of a block into the changes to its parameters. This is the inverse of `gather`.

    Args:
        delta: ΔW, (rows, columns).
        join: Position of each parameter in the matrix.
        shapes: Shapes of the parameters, by name.

    Returns:
        The change to each parameter, by name, in the shape of the parameter. Rows that no piece covers are zero.
    """
    parameters: dict[str, Tensor] = {}
    for piece in join.pieces:
        shape = shapes[piece.parameter]
        values = _piece_values(delta, piece, shapes)
        if piece.rows is None:
            parameters[piece.parameter] = values.reshape(shape)
        else:
            start, stop = piece.rows
            parameter = parameters.setdefault(piece.parameter, delta.new_zeros(shape))
            parameter[start:stop] = values.reshape((stop - start, *shape[1:]))
    return parameters


def accumulate(
    delta: Tensor, joins: Sequence[Join], shapes: ParameterShapes, sums: Mapping[str, Tensor], factor: float
) -> None:
    """Splits the matrices ΔW of several blocks into changes to parameters, and adds them to running sums in place.

    Args:
        delta: ΔW of each block, (blocks, rows, columns).
        joins: Join of each block. `join_layout` must return the same key for all joins. No two blocks may cover the
            same elements of a parameter.
        shapes: Shapes of the parameters, by name.
        sums: Running sums, by parameter name. Parameters that are not in `sums` are skipped.
        factor: Factor by which each change is multiplied before it is added.
    """
    for pieces in zip(*(join.pieces for join in joins), strict=True):
        chosen = [index for index, piece in enumerate(pieces) if piece.parameter in sums]
        if not chosen:
            continue
        targets = [_rows_of(sums[pieces[index].parameter], pieces[index]) for index in chosen]
        values = _piece_values(delta, pieces[0], shapes).to(targets[0].device)
        values = values.reshape(len(joins), *targets[0].shape)
        if len(joins) == 1:
            targets[0].add_(values[0], alpha=factor)
        else:
            # Make the tensors contiguous, because multi-tensor kernels require equal strides.
            parts = values.contiguous().unbind()
            add_each(targets, [parts[index] for index in chosen], factor)


def join_layout(join: Join, shapes: ParameterShapes) -> Hashable:
    """Returns a key that is equal for joins whose pieces have the same shapes and positions.

    Args:
        join: Position of each parameter in the matrix of a block.
        shapes: Shapes of the parameters, by name.
    """
    pieces = tuple(
        (piece.at, piece.view, piece.matrix_shape(shapes[piece.parameter]), shapes[piece.parameter][1:])
        for piece in join.pieces
    )
    return join.rows, join.columns, pieces


def _region(delta: Tensor, piece: Piece, shapes: ParameterShapes) -> Tensor:
    """Returns a view of the region of ΔW, (..., rows, columns), that a piece covers."""
    height, width = piece.matrix_shape(shapes[piece.parameter])
    top, left = piece.at
    return delta[..., top : top + height, left : left + width]


def _piece_values(delta: Tensor, piece: Piece, shapes: ParameterShapes) -> Tensor:
    """Returns the region of ΔW that a piece covers, transposed if ΔW contains the transpose of the parameter."""
    region = _region(delta, piece, shapes)
    return region.mT if piece.view == "transposed" else region


def _rows_of(tensor: Tensor, piece: Piece) -> Tensor:
    """Returns the rows of a parameter that a piece covers."""
    return tensor if piece.rows is None else tensor[piece.rows[0] : piece.rows[1]]


def _stack_pieces(tau: Mapping[str, Tensor], pieces: Sequence[Piece]) -> Tensor:
    """Stacks the values of pieces with the same shape and `view`, (pieces, height, width).

    The values of a single piece are not copied.
    """
    tensors = [_rows_of(tau[piece.parameter], piece) for piece in pieces]
    stacked = torch.stack(tensors) if len(tensors) > 1 else tensors[0][None]
    if pieces[0].view == "column":
        return stacked.reshape(len(tensors), -1, 1)
    matrices = stacked.reshape(len(tensors), stacked.shape[1], -1)
    return matrices.mT if pieces[0].view == "transposed" else matrices


class BlockStructure(ABC):
    """Base class of block structures. A structure defines how the matrix G of a block is built from stored matrices."""

    @abstractmethod
    def apply(self, delta: Tensor, multiply: Multiply = lambda matrix, x: matrix.matmul(x)) -> Tensor:
        """Multiplies the matrix G of the block by a change ΔW to the parameters of the block.

        Args:
            delta: ΔW, (rows, columns). Leading batch dimensions are allowed if `multiply` supports them.
            multiply: Function that computes the product of a matrix and a tensor. Defaults to `Matrix.matmul`.

        Returns:
            G ΔW, in the shape of ΔW.
        """

    @abstractmethod
    def matrices(self) -> Iterator[tuple[str, Matrix]]:
        """Yields a pair (role, matrix) for every matrix, in the order in which the matrices are saved.

        The role is "A", "B" or "G". If G has several terms, the role includes the index of the term, as in "A.0".
        """

    @property
    @abstractmethod
    def weights(self) -> tuple[float, ...]:
        """Weights w_t of the terms of G = Σ_t w_t · B_t ⊗ A_t, or (1,) if G is a single matrix."""

    @property
    @abstractmethod
    def sides(self) -> tuple[tuple[Matrix, ...], ...]:
        """Matrices of all terms, as ((B_1, B_2, …), (A_1, A_2, …)), or as ((G,),) if G is a single matrix."""

    @classmethod
    @abstractmethod
    def of_sides(cls, weights: Sequence[float], sides: Sequence[Sequence[Matrix]]) -> BlockStructure:
        """Builds the structure from its `weights` and `sides`.

        Args:
            weights: Weight of each term.
            sides: Matrices of all terms, arranged as in the property `sides`.

        Returns:
            The structure.
        """

    @abstractmethod
    def map_matrices(self, function: Callable[[Matrix], Matrix]) -> BlockStructure:
        """Returns a copy of the structure with `function` applied to every matrix.

        Args:
            function: Function that returns the replacement for a matrix.
        """

    @abstractmethod
    def shape_problem(self, rows: int, columns: int) -> str | None:
        """Returns the reason why G cannot be applied to a (rows, columns) matrix ΔW, or None if the shapes match.

        Args:
            rows: Number of rows of ΔW.
            columns: Number of columns of ΔW.
        """

    @classmethod
    @abstractmethod
    def from_entry(cls, entry: Any, matrices: Mapping[str, Matrix]) -> BlockStructure:
        """Builds the structure from the entry of a block in the manifest of a bundle.

        Args:
            entry: The entry of the block.
            matrices: The matrices of the bundle, by name.

        Returns:
            The structure.
        """

    @abstractmethod
    def entry(self, identifiers: Mapping[str, str], **common: Any) -> KroneckerEntry | DenseEntry:
        """Returns the entry that describes the block in the manifest of a bundle.

        Args:
            identifiers: Names of the matrices in the bundle, by role.
            **common: Fields of the entry that do not depend on the structure.
        """

    @abstractmethod
    def plain(self, names: Mapping[str, str]) -> dict[str, Any]:
        """Returns a description of the structure as JSON data, which `kfacpack.export` writes to the exported file.

        Args:
            names: Names of the tensors, by role.
        """


@dataclass(frozen=True)
class Kronecker(BlockStructure):
    """A sum of Kronecker products, G = Σ weight · B ⊗ A.

    The curvature of a single task has one term per block. A merged curvature may have several.

    Example:
        >>> import torch
        >>> import kfacpack as kp
        >>> structure = kp.Kronecker.of(kp.Dense.of(torch.eye(2)), kp.Dense.of(torch.eye(3)))
        >>> structure.apply(torch.ones(2, 3)).shape
        torch.Size([2, 3])
    """

    terms: tuple[tuple[Matrix, Matrix, float], ...]
    """The terms of the sum, each as a tuple (B, A, weight)."""

    @classmethod
    def of(cls, B: Matrix, A: Matrix, weight: float = 1.0) -> Kronecker:
        """Builds a structure with one term.

        Args:
            B: Matrix of shape (rows, rows).
            A: Matrix of shape (columns, columns).
            weight: Weight of the term.

        Returns:
            The structure weight · B ⊗ A.
        """
        return cls(((B, A, weight),))

    def apply(self, delta: Tensor, multiply: Multiply = lambda matrix, x: matrix.matmul(x)) -> Tensor:
        """Computes the product G ΔW, which is the sum of weight · B ΔW A over the terms."""
        # A is symmetric, so ΔW A = (A ΔWᵀ)ᵀ.
        products = ((multiply(B, multiply(A, delta.mT).mT), weight) for B, A, weight in self.terms)
        return reduce(add, (product if weight == 1 else weight * product for product, weight in products))

    def matrices(self) -> Iterator[tuple[str, Matrix]]:
        """Yields B and A of every term. Their roles are "B" and "A", or "B.0", "A.0", "B.1", … for several terms."""
        for suffix, (B, A, _) in zip(self._suffixes(), self.terms, strict=True):
            yield f"B{suffix}", B
            yield f"A{suffix}", A

    @property
    def weights(self) -> tuple[float, ...]:
        """The weight of each term."""
        return tuple(weight for _, _, weight in self.terms)

    @property
    def sides(self) -> tuple[tuple[Matrix, ...], ...]:
        """The matrices B of all terms, and the matrices A of all terms."""
        return tuple(B for B, _, _ in self.terms), tuple(A for _, A, _ in self.terms)

    @classmethod
    def of_sides(cls, weights: Sequence[float], sides: Sequence[Sequence[Matrix]]) -> Kronecker:
        """Builds the structure from the weights of the terms and a pair (all B, all A) of their matrices."""
        B, A = sides
        return cls(tuple(zip(B, A, weights, strict=True)))

    def map_matrices(self, function: Callable[[Matrix], Matrix]) -> Kronecker:
        """Returns a copy of the structure with `function` applied to every matrix."""
        return Kronecker(tuple((function(B), function(A), weight) for B, A, weight in self.terms))

    def shape_problem(self, rows: int, columns: int) -> str | None:
        """Returns why G does not fit ΔW, or None if every B is (rows, rows) and every A is (columns, columns)."""
        if not self.terms:
            return "has no terms"
        for B, A, _ in self.terms:
            if (B.side, A.side) != (rows, columns):
                return f"expected B of side length {rows} and A of side length {columns}, got {B.side} and {A.side}"
        return None

    @classmethod
    def from_entry(cls, entry: KroneckerEntry, matrices: Mapping[str, Matrix]) -> Kronecker:
        """Builds the structure from a manifest entry and a mapping of names to matrices."""
        return cls(tuple((matrices[term.B], matrices[term.A], term.weight) for term in entry.terms))

    def entry(self, identifiers: Mapping[str, str], **common: Any) -> KroneckerEntry:
        """Returns the manifest entry of the block. `identifiers` maps each role to the name of its matrix."""
        terms = tuple(Term(**term) for term in self._named_terms(identifiers))
        return KroneckerEntry(structure="kronecker", terms=terms, **common)

    def plain(self, names: Mapping[str, str]) -> dict[str, Any]:
        """Returns the names and weights of all terms as `{"terms": [{"B": …, "A": …, "weight": …}, …]}`."""
        return {"terms": list(self._named_terms(names))}

    def _named_terms(self, names: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        for suffix, weight in zip(self._suffixes(), self.weights, strict=True):
            yield {"B": names[f"B{suffix}"], "A": names[f"A{suffix}"], "weight": weight}

    def _suffixes(self) -> list[str]:
        return [f".{k}" for k in range(len(self.terms))] if len(self.terms) > 1 else [""]


@dataclass(frozen=True)
class Whole(BlockStructure):
    """The structure of a block whose G is a single matrix, which multiplies the flattened ΔW.

    G is either diagonal or dense. Normalisation layers and class tokens, for example, have dense blocks.

    Example:
        >>> import torch
        >>> import kfacpack as kp
        >>> kp.Whole(kp.Diagonal.of(torch.ones(6))).apply(torch.ones(2, 3)).shape
        torch.Size([2, 3])
    """

    matrix: Matrix
    """G, of shape (rows · columns, rows · columns)."""

    def apply(self, delta: Tensor, multiply: Multiply = lambda matrix, x: matrix.matmul(x)) -> Tensor:
        """Computes G times the flattened ΔW, in the shape of ΔW."""
        return multiply(self.matrix, delta.reshape(*delta.shape[:-2], -1, 1)).reshape(delta.shape)

    def matrices(self) -> Iterator[tuple[str, Matrix]]:
        """Yields the single pair ("G", matrix)."""
        yield "G", self.matrix

    @property
    def weights(self) -> tuple[float, ...]:
        """The weights of the terms: always (1,), because G is a single matrix."""
        return (1.0,)

    @property
    def sides(self) -> tuple[tuple[Matrix, ...], ...]:
        """The single matrix G, as ((G,),)."""
        return ((self.matrix,),)

    @classmethod
    def of_sides(cls, weights: Sequence[float], sides: Sequence[Sequence[Matrix]]) -> Whole:
        """Builds the structure from the weights (1,) and the matrices ((G,),).

        Raises:
            ValueError: If the weights are not (1,).
        """
        ((matrix,),) = sides
        if tuple(weights) != (1,):
            raise ValueError(f"expected the weights (1,) for a single matrix, got {weights}")
        return cls(matrix)

    def map_matrices(self, function: Callable[[Matrix], Matrix]) -> Whole:
        """Returns a copy of the structure with `function` applied to the matrix."""
        return Whole(function(self.matrix))

    def shape_problem(self, rows: int, columns: int) -> str | None:
        """Returns why G does not fit ΔW, or None if the side length of G is rows · columns."""
        if self.matrix.side != rows * columns:
            return f"expected a matrix of side length {rows * columns}, got {self.matrix.side}"
        return None

    @classmethod
    def from_entry(cls, entry: DenseEntry, matrices: Mapping[str, Matrix]) -> Whole:
        """Builds the structure from a manifest entry and a mapping of names to matrices."""
        return cls(matrices[entry.matrix])

    def entry(self, identifiers: Mapping[str, str], **common: Any) -> DenseEntry:
        """Returns the manifest entry of the block. `identifiers` maps "G" to the name of the matrix."""
        return DenseEntry(structure=self.matrix.structure, matrix=identifiers["G"], **common)

    def plain(self, names: Mapping[str, str]) -> dict[str, Any]:
        """Returns `{"G": name}`, where `name` is the name of the matrix."""
        return {"G": names["G"]}


STRUCTURES: dict[str, type[BlockStructure]] = {"kronecker": Kronecker, "dense": Whole, "diagonal": Whole}
"""Structure classes, by the value of the field `structure` of a manifest entry."""


@dataclass(frozen=True)
class CurvatureBlock:
    """One block of a curvature: its parameters, their positions in ΔW, and its matrix G.

    Example:
        >>> import torch
        >>> import kfacpack as kp
        >>> join = kp.Join(rows=2, columns=3, pieces=(kp.Piece(parameter="fc.weight"),))
        >>> G = kp.Kronecker.of(kp.Dense.of(torch.eye(2)), kp.Dense.of(torch.eye(3)))
        >>> block = kp.CurvatureBlock("fc.weight", "linear", join, G)
        >>> float(block.quadratic({"fc.weight": torch.ones(2, 3)}, {"fc.weight": (2, 3)}))
        6.0
    """

    name: str
    """Unique name of the block, usually the name of its first parameter."""
    operation: str
    """The operation that uses the parameters, such as "linear"."""
    join: Join
    """Position of each parameter in ΔW."""
    structure: BlockStructure
    """The structure that defines the matrix G of the block."""
    losses: tuple[Loss, ...] = ()
    """Approximation errors of the lossy steps (codecs and merge rules) that produced the block."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that the block covers."""
        return tuple(dict.fromkeys(piece.parameter for piece in self.join.pieces))

    def apply(self, tau: Mapping[str, Tensor], shapes: ParameterShapes) -> dict[str, Tensor]:
        """Computes G τ for the parameters of this block.

        Args:
            tau: Changes to parameters, by name. At least one parameter of the block is required. Missing parameters
                count as zero.
            shapes: Shapes of the parameters, by name.

        Returns:
            G τ by parameter name, in at least float32.
        """
        return scatter(self._apply(gather(tau, self.join, shapes)), self.join, shapes)

    def quadratic(self, tau: Mapping[str, Tensor], shapes: ParameterShapes) -> Tensor:
        """Computes <τ, G τ> for the parameters of this block.

        Args:
            tau: Changes to parameters, by name. At least one parameter of the block is required. Missing parameters
                count as zero.
            shapes: Shapes of the parameters, by name.

        Returns:
            A 0-d tensor, in at least float32.
        """
        delta = gather(tau, self.join, shapes)
        return (delta * self._apply(delta)).sum()

    def _apply(self, delta: Tensor) -> Tensor:
        # The product is computed in at least float32, even inside a mixed-precision training step.
        with torch.autocast(delta.device.type, enabled=False):
            return self.structure.apply(delta)
