"""Symmetric matrices: multiplication, size, and storage as named tensors (components).

Shapes: a matrix is (n, n) with n = `side`; `matmul` maps (n, k) to (n, k). The values are in the component `data`. If
`data` is int8, the component `scale` has one factor per stored row, and a value is data · scale.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite, nan, sqrt
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from kfacpack._torch import memory_address
from kfacpack.curvature.matrices.components import TORCH_TYPES, InMemoryTensors, nbytes_of
from kfacpack.errors import MatrixError
from kfacpack.format.schema import LAYOUTS

if TYPE_CHECKING:
    from typing_extensions import Self

    from kfacpack.curvature.matrices.components import MatrixTensors


_SUBSPACE_FRACTIONS = (1 / 32, 1 / 8, 1 / 3)
"""Possible dimensions of the subspace in subspace iteration, as fractions of the side."""
_ACCURATE_FRACTION = 0.8
"""Fraction of a subspace whose eigenvectors are accurate; the other dimensions speed up convergence."""
_FULL_BELOW = 256
"""Matrices with a smaller side are decomposed in full."""
_TOLERANCE, _MAX_ITERATIONS = 1e-5, 100
"""Iteration stops after a step that reduces the squared error by at most this fraction, or after this many steps."""
_UNKNOWN_COUNT = 10_000
"""Assumed number of terms in the sum for a matrix that does not record this number."""


def width_for(side: int, rank: int) -> int:
    """Returns the subspace dimension for `rank` eigenpairs. Only a few values occur, so that results can be cached."""
    widths = (int(fraction * side) for fraction in _SUBSPACE_FRACTIONS) if side >= _FULL_BELOW else ()
    return next((width for width in widths if rank <= _ACCURATE_FRACTION * width), side)


def leading_eigenpairs(matrix: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Computes the `width` eigenvalues of largest magnitude and their eigenvectors.

    Uses subspace iteration if `width` is smaller than n: a random subspace is repeatedly multiplied by the matrix and
    orthonormalised, which takes a fraction of the time of a full decomposition.

    Args:
        matrix: Symmetric float64 matrix, (n, n).
        width: Dimension w of the subspace; see `width_for`.

    Returns:
        Eigenvalues (w,), in descending order of magnitude, and eigenvectors (n, w).
    """
    if width == len(matrix):
        values, vectors = torch.linalg.eigh(matrix)
    else:
        values, vectors = _subspace_iteration(matrix, width)
    order = values.abs().argsort(descending=True, stable=True)
    return values[order], vectors[:, order]


def _subspace_iteration(matrix: Tensor, width: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(len(matrix), width, dtype=matrix.dtype, generator=generator).to(matrix.device)
    size, previous, accurate = float(matrix.square().sum()), 0.0, int(_ACCURATE_FRACTION * width)
    for _ in range(_MAX_ITERATIONS):
        basis = torch.linalg.qr(matrix @ image).Q
        image = matrix @ basis
        values, rotation = torch.linalg.eigh(basis.T @ image)
        captured = float(values.square().sort(descending=True).values[:accurate].sum())
        if captured - previous <= _TOLERANCE * (size - captured) + 1e-14 * size:
            break
        previous = captured
    return values, basis @ rotation


class Operator(ABC):
    """The map x -> M x, (n, k) -> (n, k), with tensors that have been read, unpacked and converted.

    Several operators of the same form can be stacked. The map is then (m, n, k) -> (m, n, k), with one matrix per x.
    """

    is_diagonal: ClassVar[bool] = False
    """Whether M is a diagonal matrix."""

    def __init__(self, *tensors: Tensor):
        self.tensors = tensors

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Returns M x."""

    def blocks(self, side: int) -> tuple[Tensor, ...]:
        """Returns the diagonal blocks of M in order, as tensors of shape (k, s, s). Outside the blocks, M is zero.

        M depends linearly on the blocks. By default, the only block is the whole matrix.

        Args:
            side: Number n of rows and of columns of M.
        """
        identity = torch.eye(side, dtype=self.tensors[-1].dtype, device=self.tensors[-1].device)
        return (self(identity)[None],)

    def diagonal(self, side: int) -> Tensor:
        """Returns the diagonal of M, (n,).

        Args:
            side: Number n of rows and of columns of M.
        """
        return torch.cat([part.diagonal(dim1=-2, dim2=-1).flatten() for part in self.blocks(side)])

    @classmethod
    def stack(cls, operators: Sequence[Self]) -> Self:
        """Stacks the operators of m matrices of equal shape. The tensors of a single operator are not copied."""
        columns = zip(*(operator.tensors for operator in operators), strict=True)
        first, *others = operators
        return first.with_tensors(torch.stack(tensors) if others else tensors[0][None] for tensors in columns)

    def with_tensors(self, tensors: Iterable[Tensor]) -> Self:
        """Returns the same operator with other tensors of the same dtypes."""
        other = copy.copy(self)
        other.tensors = tuple(tensors)
        return other

    def unpacked(self, dtype: torch.dtype) -> Operator:
        """Returns an operator for repeated products that stays valid when the stored tensors are overwritten.

        Args:
            dtype: Dtype of the tensors to multiply.
        """
        return self

    def matches(self, dtype: torch.dtype, device: torch.device | None) -> bool:
        """Returns whether the operator can multiply tensors of this dtype on this device."""
        values = self.tensors[-1]
        return values.dtype == dtype and values.device == device


class StoredOperator(Operator):
    """An operator that keeps a matrix in its stored form and unpacks it for each product.

    Args:
        matrix: The matrix, whose values are validated.
        dtype: Floating-point tensors with wider elements are converted to this dtype.
        device: Device to which the tensors are copied; None leaves them where they are.
    """

    def __init__(self, matrix: Matrix, dtype: torch.dtype, device: torch.device | None = None):
        matrix.require_valid()
        self._matrix, self._names = matrix, tuple(matrix.components.specs)
        stored = (matrix.components[name] for name in self._names)
        super().__init__(*(tensor.to(device=device, dtype=_narrower(tensor.dtype, dtype)) for tensor in stored))

    def __call__(self, x: Tensor) -> Tensor:
        """Returns M x."""
        return self._unpack(x.dtype)(x)

    def unpacked(self, dtype: torch.dtype) -> Operator:
        """Returns an operator that does not share memory with the stored tensors."""
        stored, operator = {memory_address(tensor) for tensor in self.tensors}, self._unpack(dtype)
        return operator.with_tensors(
            tensor.clone() if memory_address(tensor) in stored else tensor for tensor in operator.tensors
        )

    def _unpack(self, dtype: torch.dtype) -> Operator:
        return self._matrix.unpacked(dict(zip(self._names, self.tensors, strict=True)), dtype)


def _narrower(stored: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    return dtype if stored.is_floating_point and stored.itemsize > dtype.itemsize else stored


class Matrix(ABC):
    """A symmetric matrix in one of the forms of the file format.

    Args:
        side: Number n of rows and of columns.
        components: The tensors that store the matrix, by name.
        psd: Whether the matrix is declared to be positive semi-definite.
        examples: Number of examples over which the matrix was averaged, if known.
        positions: Number of positions (such as tokens) over which the matrix was averaged, if known.
    """

    form: ClassVar[str]
    """Name of the form in the file format."""
    structure: ClassVar[Literal["dense", "diagonal"]] = "dense"
    """Structure of a block whose G is a single matrix of this form."""
    stackable: ClassVar[bool] = True
    """Whether the operators of matrices whose components have equal shapes can be stacked."""
    rounding_keeps_psd: ClassVar[bool] = False
    """Whether the matrix stays positive semi-definite when its values are rounded."""

    def __init__(
        self,
        side: int,
        components: MatrixTensors,
        *,
        psd: bool = True,
        examples: int | None = None,
        positions: int | None = None,
    ):
        self.side = side
        self.components = components
        self.psd = psd
        self.examples = examples
        self.positions = positions
        self._validated = False
        self._resident: Operator | None = None

    def operator(self, dtype: torch.dtype, device: torch.device | None = None) -> Operator:
        """Returns an operator that multiplies by M. Reuse it for repeated products.

        Args:
            dtype: Dtype of the tensors to multiply.
            device: Device of the tensors to multiply. Defaults to the device of the components.
        """
        if self._resident is not None and self._resident.matches(dtype, device):
            return self._resident
        return self._make_operator(dtype, device)

    @abstractmethod
    def _make_operator(self, dtype: torch.dtype, device: torch.device | None = None) -> Operator: ...

    def unpacked(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Operator:
        """Returns an operator for other components of the same form, without synchronising with their device.

        Args:
            tensors: Valid components of one matrix, or of several matrices with a leading dimension.
            dtype: Dtype of the tensors to multiply.
        """
        matrix = self._with_components(InMemoryTensors(**tensors), self.psd)
        matrix.skip_validation()
        return matrix._make_operator(dtype)

    def resident(self, dtype: torch.dtype, device: torch.device) -> Self:
        """Returns the same matrix with an operator that is kept on a device. The components are shared.

        Args:
            dtype: Dtype of the operator.
            device: Device of the operator.
        """
        matrix = copy.copy(self)
        matrix._resident = self.operator(dtype, device)
        return matrix

    def matmul(self, x: Tensor) -> Tensor:
        """Returns M x, (n, k), in the dtype and on the device of x.

        Args:
            x: A matrix, (n, k).
        """
        return self.operator(x.dtype, x.device)(x)

    @abstractmethod
    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns M as an (n, n) tensor, which may share memory with the components and must not be modified.

        Args:
            dtype: Dtype of the result.
        """

    @property
    def plain_shape(self) -> tuple[int, ...]:
        """Shape of the tensor that `plain` returns."""
        return (self.side, self.side)

    def plain(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns M for export: (n, n), or (n,) for a diagonal matrix.

        Args:
            dtype: Dtype of the result.
        """
        return self.dense(dtype)

    @abstractmethod
    def psd_witnesses(self) -> Iterator[Tensor]:
        """Yields symmetric float64 matrices that are all positive semi-definite if and only if M is.

        Their shapes are (s, s) or, for several matrices at once, (k, s, s).
        """

    def leading_eigenpairs(self, width: int) -> tuple[Tensor, Tensor]:
        """Returns the eigenvalues (w,) of largest magnitude and their eigenvectors (n, w).

        Args:
            width: Number w of eigenvalues; see `width_for`.
        """
        return leading_eigenpairs(self.dense(torch.float64), width)

    def eigenvalues(self) -> Tensor:
        """Returns all eigenvalues in descending order, (n,), in float64."""
        ascending: Tensor = torch.linalg.eigvalsh(self.dense(torch.float64))
        return ascending.flip(0)

    def row_index(self) -> Tensor:
        """Returns the stored row of each value of `data`, as indices in a shape that broadcasts to that of `data`."""
        raise TypeError(f"a {self.form!r} matrix has no int8 variant")

    def violation(self) -> tuple[str, str] | None:
        """Checks the requirements of the form that depend on values.

        Returns:
            The invalid component and a description of the problem, or None.
        """
        if "scale" in self.components.specs and bool((self.components["scale"] < 0).any()):
            return "scale", "contains negative factors"
        return None

    def skip_validation(self) -> None:
        """Marks the values as valid because they were computed from validated ones."""
        self._validated = True

    def require_valid(self) -> None:
        """Validates the values once, before they are first used.

        Raises:
            MatrixError: If the values violate a requirement of the form.
            CorruptTensor: If the invalid values are in a tensor of a bundle.
        """
        if not self._validated:
            if violation := self.violation():
                self.components.raise_error(*violation)
            self._validated = True

    def for_storage(self) -> Matrix:
        """Returns the smallest lossless form of the matrix."""
        return self

    @property
    def nbytes(self) -> int:
        """Size of the components in bytes."""
        return sum(map(nbytes_of, self.components.specs.values()))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the stored values."""
        return TORCH_TYPES[self.components.specs["data"][0]]

    def float_values(self, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """Returns `data` as floating-point values, in the shape of `data`; int8 values are multiplied by their scale.

        Args:
            dtype: Dtype of the result.
            device: Device of the result. Defaults to that of the components.
        """
        data, scale = self.stored_values(dtype, device)
        if scale is None:
            return data
        return data.to(dtype) * scale.reshape(-1)[self.row_index().to(data.device)]

    def stored_values(self, dtype: torch.dtype, device: torch.device | None = None) -> tuple[Tensor, Tensor | None]:
        """Returns the stored values and, for an int8 matrix, their scale.

        Args:
            dtype: Dtype of the floating-point values.
            device: Device of the result. Defaults to that of the components.

        Returns:
            `data` in int8 and `scale` in `dtype` for an int8 matrix, and `data` in `dtype` and None for others.
        """
        self.require_valid()
        if "scale" not in self.components.specs:
            return self.components["data"].to(device=device, dtype=dtype), None
        return self.components["data"].to(device), self.components["scale"].to(device=device, dtype=dtype)

    def rounded(self, dtype: torch.dtype) -> Self:
        """Returns the matrix with its values in another floating-point dtype.

        The matrix keeps its declaration `psd`, because the check of this property allows for rounding errors.

        Args:
            dtype: Dtype of the stored values.
        """
        values = self.float_values(torch.promote_types(torch.float32, dtype)).to(dtype)
        return self._with_components(InMemoryTensors(data=values, **self._index_components()), self.psd)

    @property
    def is_int8(self) -> bool:
        """Whether the values are stored as int8."""
        return "scale" in self.components.specs

    @property
    def may_be_int8(self) -> bool:
        """Whether the form has an int8 variant."""
        return "scale" in LAYOUTS[self.form].shapes(self.side, self.components.specs["data"][1])

    def quantized(self) -> Self:
        """Returns the matrix in int8, with each stored row scaled by its largest magnitude."""
        data = self.float_values(torch.float64)
        index = self.row_index().to(data.device).expand_as(data)
        shape = LAYOUTS[self.form].shapes(self.side, tuple(data.shape))["scale"]
        largest = data.new_zeros(shape).reshape(-1)
        largest.scatter_reduce_(0, index.reshape(-1), data.abs().reshape(-1), "amax")
        scale = (largest / 127).float()
        # Divide by the stored float32 scale. Rows that underflow float32 have scale zero and become zero.
        steps = torch.where(scale[index] > 0, data / scale.double()[index], 0)
        components = InMemoryTensors(
            data=steps.round_().clamp_(-127, 127).to(torch.int8),
            scale=scale.reshape(shape),
            **self._index_components(),
        )
        return self._with_components(components, self.psd and self.rounding_keeps_psd)

    def _index_components(self) -> dict[str, Tensor]:
        """Returns the components other than the values, such as coordinates."""
        return {name: self.components[name] for name in self.components.specs if name not in ("data", "scale")}

    def _with_components(self, components: MatrixTensors, psd: bool) -> Self:
        return type(self)(self.side, components, psd=psd, examples=self.examples, positions=self.positions)


def require_square(matrix: Tensor) -> int:
    """Checks that a floating-point tensor is a square matrix, and returns its number of rows.

    Raises:
        MatrixError: If the tensor is not (n, n) with n at least 1, or not of a floating-point dtype.
    """
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1] or 0 in matrix.shape or not matrix.is_floating_point():
        raise MatrixError(f"expected a square matrix of floats, got {matrix.dtype} of shape {list(matrix.shape)}")
    return matrix.shape[0]


def negative_eigenvalue_bound(matrix: Matrix) -> float | None:
    """Checks for eigenvalues that are more negative than rounding errors can explain.

    Rounding an entry for storage changes it by at most eps/2 times its value (or the smallest normal number), and
    summing k terms in float32 by about √k eps. No eigenvalue changes by more than the Frobenius norm of these errors.
    Sums of squares stay positive in any dtype, so only the summation error is allowed on the diagonal. The test is a
    Cholesky factorisation, which takes a tenth of the time of an eigenvalue decomposition.

    Args:
        matrix: The matrix to check.

    Returns:
        A negative upper bound on the smallest eigenvalue, NaN if the matrix contains NaN or Inf, or None if the matrix
        is positive semi-definite up to rounding.
    """
    stored = torch.finfo(matrix.dtype if matrix.dtype.is_floating_point else torch.float32)
    summed = torch.finfo(torch.float32).eps * sqrt(matrix.positions or matrix.examples or _UNKNOWN_COUNT)
    for witness in matrix.psd_witnesses():
        size = float(witness.abs().amax())
        if size == 0:
            continue
        if not isfinite(size):
            return nan
        # Normalise, so that the test does not depend on the magnitude of the values.
        unit = witness / size
        norm = torch.linalg.matrix_norm(unit)[..., None]
        smallest = stored.tiny * stored.eps * unit.shape[-1] / size
        slack = 2 * (stored.eps + summed) * norm + smallest
        shifted = unit + torch.diag_embed(slack.expand(unit.shape[:-1]))
        negative = bool((unit.diagonal(dim1=-2, dim2=-1) < -2 * summed * norm - smallest).any())
        if negative or bool(torch.linalg.cholesky_ex(shifted).info.any()):
            return -float((2 * summed * norm + smallest if negative else slack).amax()) * size
    return None
