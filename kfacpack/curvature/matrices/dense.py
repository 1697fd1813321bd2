"""Matrices without structure: `Packed` stores the lower triangle, and `Dense` stores all n² values.

`Packed` is the default form in files. It is lossless and takes about half as many bytes as `Dense`. `Dense` is used for
matrices that are being computed or multiplied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import isfinite

import torch
from torch import Tensor

from kfacpack.curvature.matrices.components import (
    InMemoryTensors,
    LazyPackedTensors,
    asymmetry,
    pack,
    row_indices,
    unpack,
)
from kfacpack.curvature.matrices.matrix import Matrix, Operator, require_square
from kfacpack.errors import MatrixError

_ALIGNED_ELEMENTS = 2**16
"""Products with more than this many elements are computed with aligned rows."""


class DenseOperator(Operator):
    """An operator that multiplies by a full (n, n) tensor."""

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the product M x. On a CPU, the rows of a large product are aligned unless gradients are enabled."""
        (full,) = self.tensors
        width = aligned(x.shape[-1])
        if width == x.shape[-1] or x.numel() <= _ALIGNED_ELEMENTS or x.device.type != "cpu" or torch.is_grad_enabled():
            return full @ x
        # A product takes up to 1.3 times as long if the rows of its result are not aligned, as with 769 columns.
        out = x.new_empty((*x.shape[:-1], width))[..., : x.shape[-1]]
        product: Tensor = torch.matmul(full, x, out=out)
        return product

    def blocks(self, side: int) -> tuple[Tensor, ...]:
        """Returns the whole matrix as one block, (1, n, n), without a copy."""
        (full,) = self.tensors
        return (full[None],)


class AlignedOperator(DenseOperator):
    """An operator that multiplies by a full (n, n) tensor with padded rows, so that each row is aligned in memory.

    A product with unaligned rows of 769 elements takes about 1.5 times as long as one with aligned rows of 768.
    """

    def __init__(self, full: Tensor):
        side = aligned(len(full))
        self.padded = full if side == len(full) else torch.nn.functional.pad(full, (0, side - len(full)) * 2)
        super().__init__(self.padded[: len(full), : len(full)])


def aligned(side: int) -> int:
    """Rounds a side length up to a multiple of 16, so that rows of float32 values start at multiples of 64 bytes.

    Args:
        side: Number of rows or columns.
    """
    return -(-side // 16) * 16


class OperatorCache:
    """A cache of operators on the CPU, for blocks that are processed one after the other.

    The cache saves time because consecutive blocks often share a factor A. The operators of full matrices in float32
    are replaced by `AlignedOperator`.
    """

    def __init__(self) -> None:
        # Keep a reference to each matrix, because its id, which is part of the key, must not be reused.
        self._operators: dict[tuple[int, torch.dtype], tuple[Matrix, Operator]] = {}

    def keep_only(self, matrices: Iterable[Matrix]) -> None:
        """Drops all operators except those of the given matrices."""
        kept = {id(matrix) for matrix in matrices}
        self._operators = {key: value for key, value in self._operators.items() if key[0] in kept}

    def __call__(self, matrix: Matrix, dtype: torch.dtype) -> Operator:
        """Returns the operator for a matrix and a dtype. The operator is created when it is first requested."""
        key = id(matrix), dtype
        if key not in self._operators:
            operator = matrix.operator(dtype, torch.device("cpu"))
            if dtype is torch.float32 and isinstance(operator, DenseOperator):
                operator = AlignedOperator(*operator.tensors)
            self._operators[key] = matrix, operator
        return self._operators[key][1]


def full_matrix(operator: Operator, side: int) -> Tensor:
    """Returns the matrix by which an operator multiplies, as an (n, n) tensor.

    Args:
        operator: Operator of an (n, n) matrix.
        side: Number n of rows and of columns.
    """
    blocks = operator.blocks(side)
    if len(blocks) == 1 and len(blocks[0]) == 1:
        return blocks[0][0]
    full: Tensor = torch.block_diag(*(block for part in blocks for block in part))
    return full


def common_blocks(operators: Sequence[Operator], side: int) -> list[tuple[Tensor, ...]]:
    """Returns the diagonal blocks of each operator, or the full matrices if the block shapes of the operators differ.

    Args:
        operators: Operators that multiply vectors of the same length.
        side: Length of the vectors.
    """
    blocks = [operator.blocks(side) for operator in operators]
    if len({tuple(part.shape for part in parts) for parts in blocks}) == 1:
        return blocks
    return [(full_matrix(operator, side)[None],) for operator in operators]


class Packed(Matrix):
    """A symmetric matrix whose component `data`, (n(n+1)/2,), contains its lower triangle, row by row.

    Example:
        >>> import torch
        >>> import kfacpack as kp
        >>> kp.Packed.from_dense(torch.eye(3)).nbytes
        24
    """

    form = "packed"

    @classmethod
    def from_dense(cls, matrix: Tensor, *, psd: bool = True) -> Packed:
        """Builds a packed matrix from the lower triangle of an (n, n) tensor.

        Args:
            matrix: Square floating-point tensor. Values above the diagonal are not read.
            psd: Whether the matrix is declared to be positive semi-definite.

        Returns:
            The packed matrix.

        Raises:
            MatrixError: If `matrix` is not square or not of a floating-point dtype.
        """
        return cls(require_square(matrix), InMemoryTensors(data=pack(matrix)), psd=psd)

    def _make_operator(self, dtype: torch.dtype, device: torch.device | None = None) -> DenseOperator:
        return DenseOperator(self._full(dtype, device))

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the matrix as an (n, n) tensor."""
        return self._full(dtype)

    def psd_witnesses(self) -> Iterator[Tensor]:
        """Yields the whole matrix M."""
        yield self.dense(torch.float64)

    def row_index(self) -> Tensor:
        """Returns the row index of every value in the triangle."""
        return row_indices(self.side)

    def _full(self, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        data, scale = self.stored_values(dtype, device)
        return unpack(data, self.side, scale)


class Dense(Matrix):
    """A symmetric matrix whose component `data`, (n, n), contains all values.

    Example:
        >>> import torch
        >>> import kfacpack as kp
        >>> kp.Dense.of(torch.eye(3)).nbytes
        36
    """

    form = "dense"

    @classmethod
    def of(
        cls, matrix: Tensor, *, psd: bool = True, examples: int | None = None, positions: int | None = None
    ) -> Dense:
        """Wraps a symmetric (n, n) tensor, which must not be modified afterwards.

        The tensor is not copied, unless m[i,j] and m[j,i] differ by a rounding error. In this case, the values of the
        lower triangle are used for both triangles.

        Args:
            matrix: Symmetric floating-point tensor.
            psd: Whether the matrix is declared to be positive semi-definite.
            examples: Number of examples over which the matrix was averaged, if known.
            positions: Number of positions over which the matrix was averaged, if known.

        Returns:
            The matrix.

        Raises:
            MatrixError: If `matrix` is not square, not floating-point or not symmetric, or if it contains NaN or Inf.
        """
        side = require_square(matrix)
        if not isfinite(difference := asymmetry(matrix)):
            raise MatrixError("the matrix contains NaN or Inf")
        if difference:
            # Some kernels compute m[i,j] and m[j,i] as sums in different orders, so a few rounding errors are allowed.
            eps = min(torch.finfo(matrix.dtype).eps, torch.finfo(torch.float32).eps)
            if difference > 8 * eps * float(matrix.abs().amax()):
                problem = f"the matrix is not symmetric: m[i,j] and m[j,i] differ by up to {difference:.3g}"
                raise MatrixError(f"{problem}. If this is a rounding error, pass (m + m.T) / 2")
            matrix = unpack(pack(matrix), side)
        wrapped = cls(side, InMemoryTensors(data=matrix), psd=psd, examples=examples, positions=positions)
        wrapped.skip_validation()
        return wrapped

    def _make_operator(self, dtype: torch.dtype, device: torch.device | None = None) -> DenseOperator:
        return DenseOperator(self.float_values(dtype, device))

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the matrix as an (n, n) tensor. The values are not copied if they are stored in `dtype`."""
        return self.float_values(dtype)

    def psd_witnesses(self) -> Iterator[Tensor]:
        """Yields the whole matrix M."""
        yield self.float_values(torch.float64)

    def violation(self) -> tuple[str, str] | None:
        """Checks that the matrix is symmetric."""
        if difference := asymmetry(self.components["data"]):
            return "data", f"is not symmetric: m[i,j] and m[j,i] differ by up to {difference:.3g}"
        return None

    def for_storage(self) -> Matrix:
        """Returns the matrix in packed form. Its values are packed only when they are read."""
        triangle = LazyPackedTensors(self.components)
        return Packed(self.side, triangle, psd=self.psd, examples=self.examples, positions=self.positions)
