"""The leading eigenvalues of a symmetric matrix and their vectors, without the others where that is cheaper.

A symmetric matrix that knows how to multiply, what it weighs and how it is stored.

Shapes: the matrix is (n, n) with n = `side`; `matmul` takes and gives (n, k). Its numbers are the component `data`;
where those are int8, the component `scale` has one factor for each stored row, and a number is data · scale.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from kfacpack.curvature.matrices.components import TORCH_TYPES, InMemoryTensors, nbytes_of
from kfacpack.errors import MatrixError
from kfacpack.format.schema import LAYOUTS

if TYPE_CHECKING:
    from typing_extensions import Self

    from kfacpack.curvature.matrices.components import MatrixTensors


_WIDTHS = (1 / 32, 1 / 8, 1 / 3)
"""Widths of the subspace that is looked for, as shares of the side."""
_SPARE = 0.8
"""Of a subspace, this share is good; the spare dimensions speed up the iteration."""
_WHOLE_BELOW = 256
"""A matrix of a smaller side is decomposed as a whole."""
_ENOUGH, _MOST = 1e-5, 100
"""Iterations end when one has lessened the squared error by no more than this share of it, or after this many."""


def width_for(side: int, rank: int) -> int:
    """How many eigenvalues are looked for where `rank` are wanted. Few widths serve all ranks."""
    widths = (int(share * side) for share in _WIDTHS) if side >= _WHOLE_BELOW else ()
    return next((width for width in widths if rank <= _SPARE * width), side)


def leading(matrix: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Eigenvalues, the largest magnitudes first, and their vectors, (w,) and (n, w), of a (n, n) float64 matrix.

    Subspace iteration: a random subspace, multiplied by the matrix and made orthonormal over and over, turns towards
    the leading eigenvectors. That takes a fraction of the time of a whole decomposition.
    """
    if width == len(matrix):
        values, vectors = torch.linalg.eigh(matrix)
    else:
        values, vectors = _iterated(matrix, width)
    order = values.abs().argsort(descending=True, stable=True)
    return values[order], vectors[:, order]


def _iterated(matrix: Tensor, width: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(len(matrix), width, dtype=matrix.dtype, generator=generator).to(matrix.device)
    size, kept, good = float(matrix.square().sum()), 0.0, int(_SPARE * width)
    for _ in range(_MOST):
        basis = torch.linalg.qr(matrix @ image).Q
        image = matrix @ basis
        values, rotation = torch.linalg.eigh(basis.T @ image)
        found = float(values.square().sort(descending=True).values[:good].sum())
        if found - kept <= _ENOUGH * (size - found) + 1e-14 * size:
            break
        kept = found
    return values, basis @ rotation


class Operator(ABC):
    """x -> M x, (n, k) -> (n, k), of numbers that lie ready: nothing is read, unpacked or converted any more."""

    def __init__(self, *tensors: Tensor):
        self.tensors = tensors

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor: ...

    def to(self, device: torch.device) -> Self:
        """The same on another device; out of pinned memory, the copying does not wait."""
        return self._of(tensor.to(device, non_blocking=True) for tensor in self.tensors)

    def pinned(self) -> Self:
        """The same in memory that a GPU can fetch from while it computes."""
        return self._of(tensor.pin_memory() for tensor in self.tensors)

    def _of(self, tensors: Iterable[Tensor]) -> Self:
        other = copy.copy(self)
        other.tensors = tuple(tensors)
        return other


class Matrix(ABC):
    form: ClassVar[str]
    structure: ClassVar[Literal["dense", "diagonal"]] = "dense"
    """What a block is called whose whole G is held like this."""
    rounding_keeps_psd: ClassVar[bool] = False
    """Whether it stays positive semi-definite when its numbers are rounded."""

    def __init__(
        self,
        side: int,
        components: MatrixTensors,
        *,
        psd: bool = True,
        examples: int | None = None,
        positions: int | None = None,
    ):
        """`psd` promises positive semi-definiteness; `examples` and `positions` are what the mean ran over."""
        self.side = side
        self.components = components
        self.psd = psd
        self.examples = examples
        self.positions = positions
        self._sound = False

    @abstractmethod
    def operator(self, dtype: torch.dtype, device: torch.device | None = None) -> Operator:
        """What multiplies by M, to be kept by who does so more than once."""

    def matmul(self, x: Tensor) -> Tensor:
        """M x, (n, k) -> (n, k), in x's dtype and on x's device."""
        return self.operator(x.dtype, x.device)(x)

    @abstractmethod
    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """M itself, (n, n). It may be the matrix's own memory, and is not to be changed."""

    @property
    def plain_shape(self) -> tuple[int, ...]:
        """The shape of `plain`."""
        return (self.side, self.side)

    def plain(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """M as it is given to programs that know no forms: dense, or a vector where it is only its diagonal."""
        return self.dense(dtype)

    @abstractmethod
    def psd_witnesses(self) -> Iterator[Tensor]:
        """Symmetric float64 matrices, (n, n) or a batch (k, n, n), all positive semi-definite exactly when M is."""

    def leading(self, width: int) -> tuple[Tensor, Tensor]:
        """Its eigenvalues of largest magnitude, and their vectors, (w,) and (n, w)."""
        return leading(self.dense(torch.float64), width)

    def eigenvalues(self) -> Tensor:
        """All n of them, (n,), float64, in falling order."""
        rising: Tensor = torch.linalg.eigvalsh(self.dense(torch.float64))
        return rising.flip(0)

    def row_index(self) -> Tensor:
        """For each number of `data`, the stored row it belongs to, in a shape that broadcasts to data's."""
        raise TypeError(f"a {self.form!r} matrix has no int8 variant")

    def violation(self) -> tuple[str, str] | None:
        """(component, what is wrong with it), for what shapes cannot tell."""
        if "scale" in self.components.specs and bool((self.components["scale"] < 0).any()):
            return "scale", "has negative factors"
        return None

    def take_for_sound(self) -> None:
        """Its numbers are made of others that are looked at themselves."""
        self._sound = True

    def require_sound(self) -> None:
        """Refuse numbers that break the form's rules. Looked at once, before they are first computed with."""
        if not self._sound:
            if violation := self.violation():
                self.components.refuse(*violation)
            self._sound = True

    def for_storage(self) -> Matrix:
        """The smallest form that loses nothing."""
        return self

    @property
    def nbytes(self) -> int:
        return sum(map(nbytes_of, self.components.specs.values()))

    @property
    def dtype(self) -> torch.dtype:
        """The type its numbers are stored in."""
        return TORCH_TYPES[self.components.specs["data"][0]]

    def numbers(self, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """`data` in floating point, in its own shape, int8 scaled back."""
        self.require_sound()
        data = self.components["data"].to(device=device, dtype=dtype)
        if "scale" not in self.components.specs:
            return data
        scale = self.components["scale"].to(device=device, dtype=dtype).reshape(-1)
        return data * scale[self.row_index().to(data.device)]

    def stored_numbers(self, dtype: torch.dtype, device: torch.device | None = None) -> tuple[Tensor, Tensor | None]:
        """`data` in floating point and None, or `data` in int8 and the factors of its rows in floating point."""
        self.require_sound()
        if "scale" not in self.components.specs:
            return self.components["data"].to(device=device, dtype=dtype), None
        return self.components["data"].to(device), self.components["scale"].to(device=device, dtype=dtype)

    def rounded(self, dtype: torch.dtype) -> Self:
        """Its numbers in another floating-point type. That keeps the promise of `psd`, which allows for rounding."""
        others = {name: self.components[name] for name in self.components.specs if name not in ("data", "scale")}
        numbers = self.numbers(torch.promote_types(torch.float32, dtype)).to(dtype)
        return self._held_as(InMemoryTensors(data=numbers, **others), self.psd)

    @property
    def may_be_int8(self) -> bool:
        return "scale" in LAYOUTS[self.form].shapes(self.side, self.components.specs["data"][1])

    def quantized(self) -> Self:
        """Held in int8, each stored row scaled by its largest magnitude."""
        data = self.numbers(torch.float64)
        index = self.row_index().to(data.device).expand_as(data)
        shape = LAYOUTS[self.form].shapes(self.side, tuple(data.shape))["scale"]
        largest = data.new_zeros(shape).reshape(-1)
        largest.scatter_reduce_(0, index.reshape(-1), data.abs().reshape(-1), "amax")
        scale = (largest / 127).float()
        # Divided by the scale as it is stored; a row too small for float32 has scale zero and is zero.
        steps = torch.where(scale[index] > 0, data / scale.double()[index], 0)
        others = {name: self.components[name] for name in self.components.specs if name not in ("data", "scale")}
        rounded = InMemoryTensors(
            data=steps.round_().clamp_(-127, 127).to(torch.int8), scale=scale.reshape(shape), **others
        )
        return self._held_as(rounded, self.psd and self.rounding_keeps_psd)

    def _held_as(self, components: MatrixTensors, psd: bool) -> Self:
        return type(self)(self.side, components, psd=psd, examples=self.examples, positions=self.positions)


def require_square(matrix: Tensor) -> int:
    """The side of a (n, n) tensor of floats, n at least 1."""
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1] or 0 in matrix.shape or not matrix.is_floating_point():
        raise MatrixError(f"expected a square matrix of floats, found {matrix.dtype} of shape {list(matrix.shape)}")
    return matrix.shape[0]
