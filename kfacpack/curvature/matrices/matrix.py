"""Symmetric matrices: multiplication, size, and storage as named tensors (components).

Shapes: a matrix M is (n, n) with n = `side`, and `matmul` multiplies it by a tensor of shape (n, k). The values of M
are stored in the component `data`. If `data` is int8, the component `scale` contains one factor for each stored row.
The values in the row are multiplied by this factor.
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
"""Possible dimensions of the subspace in subspace iteration, as fractions of the side length of the matrix."""
_ACCURATE_FRACTION = 0.8
"""Fraction of the subspace dimensions that yield accurate eigenvectors. The other dimensions speed up convergence."""
_FULL_BELOW = 256
"""Matrices with a side length below this value are decomposed in full."""
_TOLERANCE, _MAX_ITERATIONS = 1e-5, 100
"""Iteration stops after a step that reduces the squared error by at most the fraction `_TOLERANCE`, or after
`_MAX_ITERATIONS` steps."""
_UNKNOWN_COUNT = 10_000
"""Number of examples over which a matrix is assumed to have been averaged, if the matrix does not record the number."""


def width_for(side: int, rank: int) -> int:
    """Returns the dimension of the subspace in which `leading_eigenpairs` computes `rank` accurate eigenpairs.

    The result is one of only a few values, so that the eigenpairs for one rank can be reused for other ranks.

    Args:
        side: Number of rows and of columns of the matrix.
        rank: Number of eigenpairs that must be accurate.
    """
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
    """A function that multiplies a tensor x of shape (n, k) by a fixed matrix M of shape (n, n).

    The tensors of M have already been read and converted. Several operators of the same form can be stacked. A stack
    of m operators maps (m, n, k) to (m, n, k), and multiplies each of the m slices by a different matrix.
    """

    is_diagonal: ClassVar[bool] = False
    """Whether M is a diagonal matrix."""

    def __init__(self, *tensors: Tensor):
        self.tensors = tensors

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Returns the product M x of the operator's matrix M and a tensor x."""

    def blocks(self, side: int) -> tuple[Tensor, ...]:
        """Returns the diagonal blocks of M in order. Outside these blocks, M is zero.

        Each tensor, (k, s, s), contains k consecutive blocks of s rows. Unless a subclass overrides this method, the
        only block is M itself.

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
        """Stacks operators of the same form and size into one. The tensors of a single operator are not copied."""
        columns = zip(*(operator.tensors for operator in operators), strict=True)
        first, *others = operators
        return first.with_tensors(torch.stack(tensors) if others else tensors[0][None] for tensors in columns)

    def with_tensors(self, tensors: Iterable[Tensor]) -> Self:
        """Returns a copy of the operator with different tensors of the same dtypes."""
        other = copy.copy(self)
        other.tensors = tuple(tensors)
        return other

    def unpacked(self, dtype: torch.dtype) -> Operator:
        """Returns an operator for repeated products. It does not change when the stored tensors are overwritten.

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
        matrix: The matrix. Its values are validated when the operator is created.
        dtype: Dtype to which floating-point tensors with wider elements are converted.
        device: Device to which the tensors are copied. Defaults to their current device.
    """

    def __init__(self, matrix: Matrix, dtype: torch.dtype, device: torch.device | None = None):
        matrix.require_valid()
        self._matrix, self._names = matrix, tuple(matrix.components.specs)
        stored = (matrix.components[name] for name in self._names)
        super().__init__(*(tensor.to(device=device, dtype=_narrower(tensor.dtype, dtype)) for tensor in stored))

    def __call__(self, x: Tensor) -> Tensor:
        """Unpacks the matrix M and returns the product M x."""
        return self._unpack(x.dtype)(x)

    def unpacked(self, dtype: torch.dtype) -> Operator:
        """Returns an operator with unpacked tensors that do not share memory with the stored tensors."""
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
    """Whether operators can be stacked if the components of their matrices have the same shapes."""
    rounding_keeps_psd: ClassVar[bool] = False
    """Whether a positive semi-definite matrix stays positive semi-definite when its values are rounded to int8."""

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
        """Returns an operator that multiplies tensors by the matrix. Reuse it for repeated products.

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
        """Returns an operator built from the components of one or several other matrices of the same form.

        The values are not validated, because validation would have to wait for pending work on the device.

        Args:
            tensors: Components of the other matrix, which must be valid. The components of several matrices are stacked
                along a leading dimension.
            dtype: Dtype of the tensors to multiply.
        """
        matrix = self._with_components(InMemoryTensors(**tensors), self.psd)
        matrix.skip_validation()
        return matrix._make_operator(dtype)

    def resident(self, dtype: torch.dtype, device: torch.device) -> Self:
        """Returns a copy of the matrix that keeps an operator on a device for later products.

        The copy shares the components of the original.

        Args:
            dtype: Dtype of the operator.
            device: Device of the operator.
        """
        matrix = copy.copy(self)
        matrix._resident = self.operator(dtype, device)
        return matrix

    def matmul(self, x: Tensor) -> Tensor:
        """Returns the product M x, (n, k), in the dtype and on the device of x.

        Args:
            x: A tensor, (n, k).
        """
        return self.operator(x.dtype, x.device)(x)

    @abstractmethod
    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the matrix as an (n, n) tensor. It may share memory with the components and must not be modified.

        Args:
            dtype: Dtype of the result.
        """

    @property
    def plain_shape(self) -> tuple[int, ...]:
        """Shape of the tensor that `plain` returns."""
        return (self.side, self.side)

    def plain(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the matrix as the tensor that `kfacpack.export` writes: (n, n), or (n,) for a diagonal matrix.

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
        """Returns the index of the stored row for each value of `data`. The row's factor in `scale` has the same index.

        The shape of the result broadcasts to the shape of `data`.
        """
        raise TypeError(f"a {self.form!r} matrix has no int8 variant")

    def violation(self) -> tuple[str, str] | None:
        """Checks that the values meet the requirements of the form, such as symmetry.

        Returns:
            The name of the invalid component and a description of the problem, or None if the values are valid.
        """
        if "scale" in self.components.specs and bool((self.components["scale"] < 0).any()):
            return "scale", "contains negative factors"
        return None

    def skip_validation(self) -> None:
        """Marks the values as valid because they were computed from validated values."""
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
        """Returns the matrix in the form in which it is saved. Dense matrices are packed; other forms are unchanged."""
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
        """Returns `data` as floating-point values, in the shape of `data`. int8 values are multiplied by their scale.

        Args:
            dtype: Dtype of the result.
            device: Device of the result. Defaults to the device of the components.
        """
        data, scale = self.stored_values(dtype, device)
        if scale is None:
            return data
        return data.to(dtype) * scale.reshape(-1)[self.row_index().to(data.device)]

    def stored_values(self, dtype: torch.dtype, device: torch.device | None = None) -> tuple[Tensor, Tensor | None]:
        """Returns the stored values and, for an int8 matrix, their scale.

        Args:
            dtype: Dtype of the floating-point values.
            device: Device of the result. Defaults to the device of the components.

        Returns:
            For an int8 matrix, `data` in int8 and `scale` in `dtype`. For other matrices, `data` in `dtype` and None.
        """
        self.require_valid()
        if "scale" not in self.components.specs:
            return self.components["data"].to(device=device, dtype=dtype), None
        return self.components["data"].to(device), self.components["scale"].to(device=device, dtype=dtype)

    def rounded(self, dtype: torch.dtype) -> Self:
        """Returns the matrix with its values in another floating-point dtype.

        The attribute `psd` is unchanged, because the check for positive semi-definiteness allows for rounding errors.

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
        """Returns the matrix with its values in int8. Each row is scaled so that its largest magnitude becomes 127."""
        data = self.float_values(torch.float64)
        index = self.row_index().to(data.device).expand_as(data)
        shape = LAYOUTS[self.form].shapes(self.side, tuple(data.shape))["scale"]
        largest = data.new_zeros(shape).reshape(-1)
        largest.scatter_reduce_(0, index.reshape(-1), data.abs().reshape(-1), "amax")
        scale = (largest / 127).float()
        # Divide by the stored float32 scale. If the scale of a row underflows to zero, its values become zero.
        steps = torch.where(scale[index] > 0, data / scale.double()[index], 0)
        components = InMemoryTensors(
            data=steps.round_().clamp_(-127, 127).to(torch.int8),
            scale=scale.reshape(shape),
            **self._index_components(),
        )
        return self._with_components(components, self.psd and self.rounding_keeps_psd)

    def _index_components(self) -> dict[str, Tensor]:
        """Returns the components other than `data` and `scale`, such as the coordinates of a sparse matrix."""
        return {name: self.components[name] for name in self.components.specs if name not in ("data", "scale")}

    def _with_components(self, components: MatrixTensors, psd: bool) -> Self:
        return type(self)(self.side, components, psd=psd, examples=self.examples, positions=self.positions)


def require_square(matrix: Tensor) -> int:
    """Checks that a tensor is a square floating-point matrix, and returns its number of rows.

    Raises:
        MatrixError: If the tensor is not (n, n) with n at least 1, or not of a floating-point dtype.
    """
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1] or 0 in matrix.shape or not matrix.is_floating_point():
        raise MatrixError(f"expected a square matrix of floats, got {matrix.dtype} of shape {list(matrix.shape)}")
    return matrix.shape[0]


def negative_eigenvalue_bound(matrix: Matrix) -> float | None:
    """Checks for eigenvalues that are more negative than rounding errors can explain.

    Rounding an entry for storage changes it by at most eps/2 times its magnitude. If its magnitude is below the
    smallest normal number, the bound is eps/2 times this number. Computing the entry as a sum of k terms in float32
    adds a relative error of about √k eps. No eigenvalue changes by more than the Frobenius norm of these errors.
    Diagonal entries are sums of squares, which rounding for storage cannot make negative. For them, only the summation
    error is allowed. The test uses a Cholesky factorisation, which takes a tenth of the time of an eigenvalue
    decomposition.

    Args:
        matrix: The matrix to check.

    Returns:
        A negative upper bound on the smallest eigenvalue; NaN if the matrix contains NaN or Inf; or None if the matrix
        is positive semi-definite up to rounding errors.
    """
    stored = torch.finfo(matrix.dtype if matrix.dtype.is_floating_point else torch.float32)
    summed = torch.finfo(torch.float32).eps * sqrt(matrix.positions or matrix.examples or _UNKNOWN_COUNT)
    for witness in matrix.psd_witnesses():
        size = float(witness.abs().amax())
        if size == 0:
            continue
        if not isfinite(size):
            return nan
        # Normalise the matrix so that the test does not depend on the magnitude of its values.
        unit = witness / size
        norm = torch.linalg.matrix_norm(unit)[..., None]
        smallest = stored.tiny * stored.eps * unit.shape[-1] / size
        slack = 2 * (stored.eps + summed) * norm + smallest
        shifted = unit + torch.diag_embed(slack.expand(unit.shape[:-1]))
        negative = bool((unit.diagonal(dim1=-2, dim2=-1) < -2 * summed * norm - smallest).any())
        if negative or bool(torch.linalg.cholesky_ex(shifted).info.any()):
            return -float((2 * summed * norm + smallest if negative else slack).amax()) * size
    return None
