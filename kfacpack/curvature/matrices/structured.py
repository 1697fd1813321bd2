"""Matrices with structure: `Diagonal`, `BlockDiagonal`, `LowRank` and `Sparse`.

`Diagonal` keeps only the diagonal.

`BlockDiagonal` keeps K diagonal blocks. It needs about 1/K of the memory and of the arithmetic of a full matrix. The
first n mod K blocks have q + 1 rows, where q = ⌊n / K⌋, and the other blocks have q rows. All blocks are stored as
triangles of the same length; shorter blocks are padded with a last row of zeros.

`LowRank` is M = U diag(w) Uᵀ with U of shape (n, r). It stores about n · r values instead of n². It is positive
semi-definite if no weight in w is negative.

`Sparse` keeps some entries of the lower triangle and their coordinates, in row-major order. The entries of the upper
triangle follow from the symmetry of the matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

import torch
from torch import Tensor

from kfacpack.curvature.matrices.components import InMemoryTensors, pack, row_indices, unpack
from kfacpack.curvature.matrices.dense import DenseOperator
from kfacpack.curvature.matrices.matrix import Matrix, Operator, leading_eigenpairs, require_square, width_for
from kfacpack.errors import MatrixError
from kfacpack.format.schema import widest_block


class DiagonalOperator(Operator):
    """An operator for a diagonal matrix, which multiplies each row of x by a factor."""

    is_diagonal = True

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the product M x, where M is the diagonal matrix."""
        (factors,) = self.tensors
        return factors[..., None] * x

    def blocks(self, side: int) -> tuple[Tensor, ...]:
        """Returns the diagonal as n blocks of one element each, (n, 1, 1)."""
        (factors,) = self.tensors
        return (factors[:, None, None],)


class Diagonal(Matrix):
    """A diagonal matrix. The component `data`, (n,), contains its diagonal.

    Example:
        >>> import torch
        >>> import kfacpack as kp
        >>> kp.Diagonal.of(torch.ones(3)).dense().shape
        torch.Size([3, 3])
    """

    form = "diagonal"
    structure = "diagonal"

    @classmethod
    def of(
        cls, diagonal: Tensor, *, psd: bool = True, examples: int | None = None, positions: int | None = None
    ) -> Diagonal:
        """Wraps the diagonal of a matrix without copying it.

        Args:
            diagonal: Floating-point tensor, (n,).
            psd: Whether the matrix is declared to be positive semi-definite.
            examples: Number of examples over which the matrix was averaged, if known.
            positions: Number of positions over which the matrix was averaged, if known.

        Returns:
            The matrix.

        Raises:
            MatrixError: If `diagonal` is not a vector of floats.
        """
        if diagonal.dim() != 1 or not len(diagonal) or not diagonal.is_floating_point():
            raise MatrixError(f"expected a vector of floats, got {diagonal.dtype} of shape {list(diagonal.shape)}")
        return cls(len(diagonal), InMemoryTensors(data=diagonal), psd=psd, examples=examples, positions=positions)

    def _make_operator(self, dtype: torch.dtype, device: torch.device | None = None) -> DiagonalOperator:
        return DiagonalOperator(self.float_values(dtype, device))

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the matrix as an (n, n) tensor."""
        return self.float_values(dtype).diag()

    @property
    def plain_shape(self) -> tuple[int, ...]:
        """Shape of the tensor that `plain` returns."""
        return (self.side,)

    def plain(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the diagonal, (n,)."""
        return self.float_values(dtype)

    def eigenvalues(self) -> Tensor:
        """Returns all eigenvalues in descending order, (n,), in float64."""
        return self.float_values(torch.float64).sort(descending=True).values

    def psd_witnesses(self) -> Iterator[Tensor]:
        """Yields one diagonal matrix, (2, 2), with the smallest and the largest value on the diagonal of M."""
        # The largest value is included so that the tolerance for the smallest is relative to it.
        yield torch.stack(self.float_values(torch.float64).aminmax()).diag()


class BlockDiagonalOperator(Operator):
    """An operator for a block-diagonal matrix. All blocks have the same size, or one of two sizes that differ by one.

    All blocks of the same size are multiplied in one batched product, without padding.
    """

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the product M x, where M is the block-diagonal matrix."""
        heights = [blocks.shape[-3] * blocks.shape[-2] for blocks in self.tensors]
        parts = [
            (blocks @ rows.reshape(*blocks.shape[:-1], -1)).reshape(rows.shape)
            for blocks, rows in zip(self.tensors, x.split(heights, dim=-2), strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)

    def blocks(self, side: int) -> tuple[Tensor, ...]:
        """Returns a tensor with all blocks, or a tensor with the longer blocks and a tensor with the shorter blocks."""
        return self.tensors


class BlockDiagonal(Matrix):
    """A block-diagonal matrix. Its component `data`, (K, s(s+1)/2), contains the lower triangles of K blocks.

    The largest blocks have s rows.

    Example:
        >>> import torch
        >>> import kfacpack as kp
        >>> kp.BlockDiagonal.from_dense(torch.ones(4, 4), count=2).dense()[0]
        tensor([1., 1., 0., 0.])
    """

    form = "block"

    @classmethod
    def from_dense(cls, matrix: Tensor, count: int, *, psd: bool = True) -> BlockDiagonal:
        """Builds a block-diagonal matrix from the diagonal blocks of an (n, n) tensor.

        Args:
            matrix: Square floating-point tensor; only the lower triangles of the blocks are read.
            count: Number of blocks, from 1 to n.
            psd: Whether the matrix is declared to be positive semi-definite.

        Returns:
            The block-diagonal matrix.

        Raises:
            MatrixError: If `matrix` is not square or `count` is out of range.
        """
        side = require_square(matrix)
        if not 1 <= count <= side:
            expected = f"expected a number of diagonal blocks from 1 to {side}"
            raise MatrixError(f"{expected} for a matrix of side length {side}, got {count}")
        width = widest_block(side, count)
        blocks = matrix.new_zeros((count, width, width))
        for block, (start, stop) in zip(blocks, spans(side, count), strict=True):
            block[: stop - start, : stop - start] = matrix[start:stop, start:stop]
        return cls(side, InMemoryTensors(data=pack(blocks)), psd=psd)

    @property
    def count(self) -> int:
        """Number of blocks."""
        return self.components.specs["data"][1][-2]

    def blocks(self, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """Returns the blocks, (K, s, s). The shorter blocks are padded with zeros.

        Args:
            dtype: Dtype of the result.
            device: Device of the result. Defaults to the device of the components.
        """
        data, scale = self.stored_values(dtype, device)
        return unpack(data, widest_block(self.side, self.count), scale)

    def _make_operator(self, dtype: torch.dtype, device: torch.device | None = None) -> BlockDiagonalOperator:
        blocks, longer = self.blocks(dtype, device), self.side % self.count
        if not longer:
            return BlockDiagonalOperator(blocks)
        return BlockDiagonalOperator(blocks[..., :longer, :, :], blocks[..., longer:, :-1, :-1].contiguous())

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the matrix as an (n, n) tensor."""
        sizes = (stop - start for start, stop in spans(self.side, self.count))
        parts = (block[:size, :size] for block, size in zip(self.blocks(dtype), sizes, strict=True))
        full: Tensor = torch.block_diag(*parts)
        return full

    def eigenvalues(self) -> Tensor:
        """Returns all eigenvalues in descending order, (n,), in float64."""
        of_blocks = (torch.linalg.eigvalsh(blocks).flatten() for blocks in self.operator(torch.float64).tensors)
        return torch.cat(list(of_blocks)).sort(descending=True).values

    def psd_witnesses(self) -> Iterator[Tensor]:
        """Yields one tensor, (K, s, s), with all blocks."""
        yield self.blocks(torch.float64)

    def row_index(self) -> Tensor:
        """Returns the index of the stored row for each value. The rows of all blocks are numbered consecutively."""
        width = widest_block(self.side, self.count)
        return torch.arange(0, self.count * width, width)[:, None] + row_indices(width)

    def violation(self) -> tuple[str, str] | None:
        """Checks that the padding of the shorter blocks is zero, and that no scale factor is negative."""
        longer = self.side % self.count
        padding = self.components["data"][longer:, -widest_block(self.side, self.count) :]
        if longer and bool(padding.any()):
            return "data", "contains nonzero values in the padding of the shorter blocks"
        return super().violation()


def spans(side: int, count: int) -> list[tuple[int, int]]:
    """Returns the range (start, stop) of rows that each block covers in a block-diagonal matrix with `side` rows."""
    size, longer = divmod(side, count)
    starts = [k * size + min(k, longer) for k in range(count + 1)]
    return list(pairwise(starts))


class LowRankOperator(Operator):
    """An operator for a low-rank matrix M = U diag(w) Uᵀ. It computes products without forming the (n, n) matrix M."""

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the product M x, computed as U (w · (Uᵀ x))."""
        u, w = self.tensors
        return u @ (w[..., None] * (u.mT @ x))

    def diagonal(self, side: int) -> Tensor:
        """Returns the diagonal of M, (n,), without computing all of M."""
        u, w = self.tensors
        return u.square() @ w


class LowRank(Matrix):
    """A low-rank matrix M = U diag(w) Uᵀ. Its component `data` is U, (n, r), and its component `weights` is w, (r,).

    Example:
        >>> import torch
        >>> import kfacpack as kp
        >>> kp.LowRank.from_dense(torch.ones(3, 3), rank=1).dense().round()[0]
        tensor([1., 1., 1.])
    """

    form = "lowrank"
    rounding_keeps_psd = True  # rounding U leaves U diag(w) Uᵀ a sum of squares

    @classmethod
    def from_dense(cls, matrix: Tensor, rank: int, *, psd: bool = True) -> LowRank:
        """Computes the best low-rank approximation of a matrix.

        The approximation keeps the `rank` eigenvalues of largest magnitude and their eigenvectors.

        Args:
            matrix: Symmetric floating-point tensor, (n, n).
            rank: Rank r, from 0 to n.
            psd: Whether the matrix is declared to be positive semi-definite; negative eigenvalues are then set to zero.

        Returns:
            The low-rank matrix.

        Raises:
            MatrixError: If `matrix` is not square or `rank` is out of range.
        """
        side = require_square(matrix)
        if not 0 <= rank <= side:
            raise MatrixError(f"expected a rank from 0 to {side} for a matrix of side length {side}, got {rank}")
        values, vectors = leading_eigenpairs(matrix.double(), width_for(side, rank))
        return cls.from_spectrum(values, vectors, rank, matrix.dtype, psd=psd)

    @classmethod
    def from_spectrum(
        cls, values: Tensor, vectors: Tensor, rank: int, dtype: torch.dtype, *, psd: bool = True
    ) -> LowRank:
        """Builds a low-rank matrix from the first `rank` eigenpairs of another matrix.

        Args:
            values: Eigenvalues (w,), in descending order of magnitude.
            vectors: Eigenvectors (n, w).
            rank: Number of eigenpairs to keep.
            dtype: Dtype of the stored values.
            psd: Whether the matrix is declared to be positive semi-definite; negative eigenvalues are then set to zero.

        Returns:
            The low-rank matrix.
        """
        kept = values[:rank].clamp(min=0) if psd else values[:rank]
        data = vectors[:, :rank].to(dtype).contiguous()
        return cls(len(vectors), InMemoryTensors(data=data, weights=kept.to(dtype)), psd=psd)

    def _make_operator(self, dtype: torch.dtype, device: torch.device | None = None) -> LowRankOperator:
        return LowRankOperator(*self._factors(dtype, device))

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the matrix as an (n, n) tensor."""
        u, w = self._factors(dtype)
        return (u * w) @ u.T

    def eigenvalues(self) -> Tensor:
        """Returns all eigenvalues in descending order, (n,), in float64."""
        inner = torch.linalg.eigvalsh(self._inner())
        return torch.cat([inner, inner.new_zeros(self.side - len(inner))]).sort(descending=True).values

    def psd_witnesses(self) -> Iterator[Tensor]:
        """Yields a small matrix with the nonzero eigenvalues of M, or nothing if no weight in w is negative."""
        _, w = self._factors(torch.float64)
        if bool((w < 0).any()):
            yield self._inner()

    def _inner(self) -> Tensor:
        """Returns R diag(w) Rᵀ, where Q R is the QR decomposition of U. Its nonzero eigenvalues are those of M."""
        u, w = self._factors(torch.float64)
        r: Tensor = torch.linalg.qr(u, mode="r").R
        return (r * w) @ r.T

    def row_index(self) -> Tensor:
        """Returns the row index of every value in U, as a column (n, 1)."""
        return torch.arange(self.side)[:, None]

    def _factors(self, dtype: torch.dtype, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        data, scale = self.stored_values(dtype, device)
        u = data if scale is None else data.to(dtype) * scale[..., None]
        return u, self.components["weights"].to(device=device, dtype=dtype)


_SPARSE_COST = 16
"""Cost of multiplying by one entry of a sparse matrix, relative to the cost for one entry of a dense matrix.

Writing one sparse entry to a dense matrix costs about as much as multiplying by it. Measurements on 2 cores gave a
ratio of 8 to 14. The ratio grows with the number of cores, because dense products benefit more from additional cores.
The product with a wide matrix is computed with a dense copy if more than one entry in sixteen is stored. The product
with a single vector is almost never computed with a dense copy.
"""


class SparseOperator(Operator):
    """An operator for a sparse matrix. It uses the entries of both triangles in row-major order.

    The tensors of the operator are the coordinates, (2, entries), and the values, (entries,).
    """

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the product M x, where M is the sparse matrix."""
        coordinates, values = self.tensors
        shape = (len(x), len(x))
        matrix = torch.sparse_coo_tensor(coordinates, values, shape, check_invariants=False, is_coalesced=True)
        # The kernel reads x row by row, which is slow unless the rows are contiguous.
        product: Tensor = torch.sparse.mm(matrix, x.contiguous())
        return product

    def diagonal(self, side: int) -> Tensor:
        """Returns the diagonal of M, (n,), without computing all of M."""
        (rows, columns), values = self.tensors
        on_diagonal = rows == columns
        return values.new_zeros(side).index_put_((rows[on_diagonal],), values[on_diagonal])


class Sparse(Matrix):
    """A sparse symmetric matrix. Only some entries of its lower triangle are stored.

    The components `data`, `rows` and `columns`, each (entries,), contain the values and the coordinates of the entries.

    Example:
        >>> import torch
        >>> import kfacpack as kp
        >>> kp.Sparse.from_dense(torch.tensor([[2.0, 0.1], [0.1, 3.0]]), fraction=0.7).dense().diag()
        tensor([2., 3.])
    """

    form = "sparse"
    stackable = False

    @classmethod
    def from_dense(cls, matrix: Tensor, fraction: float) -> Sparse:
        """Builds a sparse matrix from the entries of largest magnitude in a dense matrix.

        Args:
            matrix: Square floating-point tensor, (n, n); only its lower triangle is read.
            fraction: Fraction of the entries of the triangle to keep, from 0 to 1. Zeros are never kept.

        Returns:
            The sparse matrix. It is not declared to be positive semi-definite.

        Raises:
            MatrixError: If `matrix` is not square or `fraction` is out of range.
        """
        side = require_square(matrix)
        if not 0 <= fraction <= 1:
            raise MatrixError(f"the fraction of entries to keep is {fraction}, expected a number from 0 to 1")
        values = pack(matrix)
        count = min(round(fraction * len(values)), int(values.count_nonzero()))
        kept = _largest(values.abs().to(torch.promote_types(values.dtype, torch.float32)), count)
        rows, columns = _coordinates_of(kept)
        components = InMemoryTensors(data=values[kept], rows=rows.int(), columns=columns.int())
        return cls(side, components, psd=False)

    def _make_operator(self, dtype: torch.dtype, device: torch.device | None = None) -> Operator:
        # A dense copy is made once per operator, so only the cost of the product counts. The kernel for sparse products
        # requires at least float32.
        if 2 * self.entries * _SPARSE_COST > self.side**2 or dtype.itemsize < 4:
            return DenseOperator(self._full(dtype, device))
        return self._sparse_operator(dtype, device)

    def unpacked(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Operator:
        """Returns an operator that multiplies by a full (n, n) tensor; see `Matrix.unpacked`.

        A `SparseOperator` is not used here, because it would require sorting the entries of both triangles.
        """
        matrix = self._with_components(InMemoryTensors(**tensors), self.psd)
        matrix.skip_validation()
        return DenseOperator(matrix._full(dtype))

    def matmul(self, x: Tensor) -> Tensor:
        """Returns the product M x. A dense copy of M is used if this is faster."""
        width = x.shape[1]
        if self._resident is not None and self._resident.matches(x.dtype, x.device):
            return self._resident(x)
        if 2 * self.entries * _SPARSE_COST * width > self.side**2 * (width + _SPARSE_COST):
            return self._full(x.dtype, x.device) @ x
        return self._sparse_operator(x.dtype, x.device)(x)

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the matrix as an (n, n) tensor."""
        return self._full(dtype)

    def psd_witnesses(self) -> Iterator[Tensor]:
        """Yields nothing, because a sparse matrix is never declared to be positive semi-definite.

        The format does not allow this, because a matrix may become indefinite when entries are dropped.
        """
        return iter(())

    def row_index(self) -> Tensor:
        """Returns the row index of every entry."""
        return self._coordinates()[0]

    def violation(self) -> tuple[str, str] | None:
        """Checks that the coordinates are sorted, unique and in the lower triangle, and that no factor is negative."""
        rows, columns = (self.components[name].long() for name in ("rows", "columns"))
        if not bool(((columns >= 0) & (columns <= rows) & (rows < self.side)).all()):
            return "rows", f"contains coordinates outside the lower triangle of side length {self.side}"
        if not bool((rows * self.side + columns).diff().gt(0).all()):
            return "rows", "contains coordinates that are not sorted by row and then by column, or are not unique"
        return super().violation()

    @property
    def entries(self) -> int:
        """Number of stored entries."""
        return self.components.specs["data"][1][0]

    def _full(self, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        rows, columns = self._coordinates(device)
        values = self.float_values(dtype, device)
        full = torch.zeros(self.side**2, dtype=dtype, device=values.device)
        full[rows * self.side + columns] = values
        full[columns * self.side + rows] = values
        return full.view(self.side, self.side)

    def _sparse_operator(self, dtype: torch.dtype, device: torch.device | None) -> SparseOperator:
        rows, columns = self._coordinates(device)
        values = self.float_values(dtype, device)
        off_diagonal = rows != columns
        mirrored = columns[off_diagonal], rows[off_diagonal]
        coordinates = torch.stack([torch.cat([rows, mirrored[0]]), torch.cat([columns, mirrored[1]])])
        order = (coordinates[0] * self.side + coordinates[1]).argsort()
        return SparseOperator(coordinates[:, order], torch.cat([values, values[off_diagonal]])[order])

    def _coordinates(self, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        # Validate first, because an index out of range may crash a kernel.
        self.require_valid()
        rows, columns = (self.components[name].to(device).long() for name in ("rows", "columns"))
        return rows, columns


def _largest(magnitudes: Tensor, count: int) -> Tensor:
    """Returns the indices of the `count` largest values, in ascending order. Ties go to the smaller index."""
    if not count:
        return torch.zeros(0, dtype=torch.int64, device=magnitudes.device)
    threshold = magnitudes.kthvalue(len(magnitudes) - count + 1).values
    above = magnitudes > threshold
    equal = (magnitudes == threshold).nonzero().squeeze(1)[: count - int(above.sum())]
    above[equal] = True
    return above.nonzero().squeeze(1)


def _coordinates_of(indices: Tensor) -> tuple[Tensor, Tensor]:
    """Converts indices in a packed triangle, row (row + 1) / 2 + column, to the rows and columns of the entries."""
    # Exact in float64: at the start of a row, 8 · index + 1 is a perfect square, and indices are far below 2^53 / 8.
    rows = ((8 * indices.double() + 1).sqrt() - 1).div(2).floor().long()
    return rows, indices - rows * (rows + 1) // 2
