"""The change to one parameter: dense, dense with a remainder, sparse, or as the factors of a low-rank matrix.

Conventions: a parameter of shape (m, …) is treated as a matrix of shape (m, n), a vector as a single column, and a
scalar as a 1×1 matrix. The factors U (m, r) and V (r, n) are float32 tensors that represent the change U V; r = 0 means
that the change is exactly zero.

With a remainder, θ0 + τ reproduces the fine-tuned parameter θ exactly. τ is the difference θ − θ0 rounded to float32.
Where |θ| is much smaller than |θ0|, adding τ to θ0 may not give exactly θ. For such elements, a remainder contains the
flat indices in ascending order and the values ρ = (θ − θ0) − τ in float64. Then (θ0 + τ) + ρ, evaluated in float64 and
rounded once, is exactly θ.

A sparse change contains the values of some elements; all other elements are zero. In files, a bitmap marks the elements
whose values are stored. The lowest bit of its first byte represents the first element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from kfacpack.errors import TaskVectorError

Factors = tuple[Tensor, Tensor]
"""U (m, r) and V (r, n) in float32."""
Remainder = tuple[Tensor, Tensor]
"""Flat indices (k,) in ascending order, int64, and values (k,), float64."""
SparseChange = tuple[Tensor, Tensor]
"""Flat indices (k,) in ascending order, int64, and values (k,), float32."""

# A negative value too small for float32: the sum of +0 and this value is rounded to −0.
_NEGATIVE_ZERO = -(2.0**-1000)


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Returns the shape (m, n) of the matrix that represents a parameter.

    Args:
        shape: Shape of the parameter.
    """
    return (shape[0], prod(shape[1:])) if shape else (1, 1)


def factors_are_smaller(rank: int, shape: Sequence[int]) -> bool:
    """Returns whether factors take less space than the dense tensor: r (m + n) < m n.

    Args:
        rank: The rank r.
        shape: Shape of the parameter.
    """
    m, n = matrix_shape(shape)
    return rank * (m + n) < m * n


def no_change(shape: Sequence[int]) -> Factors:
    """Returns factors of rank 0, which represent a change of exactly zero.

    Args:
        shape: Shape of the parameter.
    """
    m, n = matrix_shape(shape)
    return torch.zeros(m, 0), torch.zeros(0, n)


def dense_change(factors: Factors, shape: Sequence[int]) -> Tensor:
    """Multiplies factors in float64 and returns the product in float32.

    Args:
        factors: U and V.
        shape: Shape of the parameter.

    Returns:
        The dense change, in the shape of the parameter.
    """
    left, right = factors
    return (left.double() @ right.to(left.device).double()).float().reshape(tuple(shape))


def add_factors(terms: Sequence[tuple[float, Factors]], shape: Sequence[int]) -> Factors:
    """Computes a weighted sum of factored changes by concatenating their factors.

    Args:
        terms: Pairs of a coefficient and the factors of a change.
        shape: Shape of the parameter.

    Returns:
        The factors of the sum. Each U is multiplied by its coefficient; terms with coefficient 0 are included.
    """
    if not terms:
        return no_change(shape)
    return concatenated([((factor * U.double()).float(), V) if factor != 1 else (U, V) for factor, (U, V) in terms])


def concatenated(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Concatenates the factors of several matrices, which gives the factors of the sum of these matrices.

    Args:
        pairs: At least one pair of U and V. The result is on the device of the first pair.
    """
    if len(pairs) == 1:
        return pairs[0]
    device = pairs[0][0].device
    return torch.cat([U.to(device) for U, _ in pairs], 1), torch.cat([V.to(device) for _, V in pairs])


def sparse_is_smaller(entries: int, size: int) -> bool:
    """Returns whether a bitmap and the stored values take fewer bytes than the dense tensor.

    Args:
        entries: Number of stored elements.
        size: Number of elements of the parameter.
    """
    return -(-size // 8) + 4 * entries < 4 * size


def separate_sparse(
    tensors: Mapping[str, Tensor], masks: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, SparseChange], dict[str, Factors]]:
    """Separates changes by the form in which they are stored: dense, sparse or unchanged.

    Args:
        tensors: Dense changes by name.
        masks: Boolean tensors by name, for some of the changes. A mask has the shape of its change and is true for the
            elements that may be nonzero.

    Returns:
        Three dicts by name: the changes that remain dense, because they have no mask or because the sparse form would
        not be smaller; the sparse changes; and factors of rank 0 for changes whose mask is false everywhere.

    Raises:
        TaskVectorError: If a mask does not match its change, or if a change is not zero outside of its mask.
    """
    dense, sparse, unchanged = dict(tensors), dict[str, SparseChange](), dict[str, Factors]()
    for name, mask in masks.items():
        change = tensors.get(name)
        if change is None or mask.dtype != torch.bool or mask.shape != change.shape:
            problem = "the parameter has no dense change; expected no mask"
            if change is not None:
                actual = f"{mask.dtype} of shape {[*mask.shape]}"
                problem = f"got {actual}, expected a boolean tensor of the parameter's shape"
            raise TaskVectorError(f"mask of parameter {name!r}: {problem}")
        index = mask.flatten().nonzero().squeeze(1)
        if int(change.count_nonzero()) != int(change.flatten()[index].count_nonzero()):
            raise TaskVectorError(f"parameter {name!r}: the change is not zero outside of the mask")
        if not len(index):
            unchanged[name] = no_change(change.shape)
        elif sparse_is_smaller(len(index), change.numel()):
            sparse[name] = index, change.flatten()[index].float()
        if name in sparse or name in unchanged:
            del dense[name]
    return dense, sparse, unchanged


def from_sparse(sparse: SparseChange, shape: Sequence[int]) -> Tensor:
    """Returns a sparse change as a dense tensor in float32.

    Args:
        sparse: Indices and values.
        shape: Shape of the parameter.
    """
    index, value = sparse
    dense = torch.zeros(prod(shape), device=value.device)
    dense[index.to(value.device)] = value.float()
    return dense.reshape(tuple(shape))


def add_sparse(terms: Sequence[tuple[float, SparseChange]]) -> SparseChange:
    """Sums sparse changes in float64. The result contains every element that any of the terms contains.

    Args:
        terms: At least one pair of a coefficient and a sparse change.
    """
    if len(terms) == 1 and terms[0][0] == 1:
        return terms[0][1]
    index, place = torch.cat([index.cpu() for _, (index, _) in terms]).unique(return_inverse=True)
    values = torch.cat([coefficient * value.cpu().double() for coefficient, (_, value) in terms])
    return index, torch.zeros(len(index), dtype=torch.float64).index_add_(0, place, values).float()


def pack_bitmap(index: Tensor, size: int) -> Tensor:
    """Returns a uint8 bitmap of shape (⌈size / 8⌉,) in which the bits of the given elements are set.

    Args:
        index: Flat indices of the elements.
        size: Number of elements of the parameter.
    """
    bits = np.zeros(size, dtype=np.uint8)
    bits[index.cpu().numpy()] = 1
    return torch.from_numpy(np.packbits(bits, bitorder="little"))


def unpack_bitmap(bitmap: Tensor) -> Tensor:
    """Returns the flat indices of the set bits in ascending order, as int64.

    Args:
        bitmap: The bitmap, a uint8 tensor.
    """
    return torch.from_numpy(np.flatnonzero(np.unpackbits(bitmap.cpu().numpy(), bitorder="little")))


def check_factors(name: str, factors: Factors, shape: Sequence[int]) -> None:
    """Checks that factors match a parameter of a given shape.

    Args:
        name: Name of the parameter.
        factors: U and V.
        shape: Shape of the parameter.

    Raises:
        TaskVectorError: If a shape or dtype is wrong.
    """
    m, n = matrix_shape(shape)
    left, right = factors
    rank = right.shape[0] if right.dim() == 2 else None
    if tuple(left.shape) != (m, rank) or tuple(right.shape) != (rank, n):
        actual = f"{list(left.shape)} and {list(right.shape)}"
        raise TaskVectorError(f"parameter {name!r}: expected factors of shape [{m}, r] and [r, {n}], got {actual}")
    if left.dtype != torch.float32 or right.dtype != torch.float32:
        raise TaskVectorError(f"parameter {name!r}: expected factors in float32, got {left.dtype} and {right.dtype}")


@torch.no_grad()
def add_change(base: Tensor, change: Tensor, remainder: Remainder | None = None) -> Tensor:
    """Returns θ0 + τ, added in at least float32 and rounded once to the dtype of θ0.

    Args:
        base: The parameter θ0.
        change: The dense change τ.
        remainder: The remainder of the change, if any. The elements that it lists are added in float64.

    Returns:
        θ0 + τ, as a new tensor in the dtype of θ0.
    """
    wide = torch.promote_types(base.dtype, torch.float32)
    change = change.to(base.device, wide)
    total = (base.to(wide) + change).to(base.dtype).contiguous()
    if remainder is not None:
        index, value = (part.to(base.device) for part in remainder)
        exact = (base.flatten()[index].double() + change.flatten()[index].double()) + value
        # Round to float32 first, because a conversion to a narrower type may go through float32 anyway.
        total.view(-1)[index] = exact.to(wide).to(base.dtype)
    return total


@torch.no_grad()
def exact_difference(base: Tensor, tuned: Tensor) -> tuple[Tensor, Remainder | None]:
    """Returns a change τ and a remainder, from which `add_change` restores θ bit for bit.

    Args:
        base: The parameter θ0, in float32 or a narrower floating-point type.
        tuned: The parameter θ, of the same shape. It is first converted to the dtype of θ0.

    Returns:
        τ = θ − θ0 in float32, and the remainder, or None if θ0 + τ reproduces θ exactly without a remainder.

    Raises:
        TaskVectorError: If θ cannot be reproduced exactly even with a remainder, for example because of an overflow.
    """
    target = tuned.to(base.dtype)
    change = (target.float() - base.float()).contiguous()
    index = (_bits(add_change(base, change)) != _bits(target)).flatten().nonzero().squeeze(1)
    if len(index):
        # −0 + −0 is −0, whereas −0 + 0 is 0.
        kept = index[_bits(target).flatten()[index] == _bits(base).flatten()[index]]
        change.view(-1)[kept] = -0.0
        index = index[~torch.isin(index, kept)]
    if not len(index):
        return change, None
    exact = target.flatten()[index].double()
    value = (exact - base.flatten()[index].double()) - change.flatten()[index].double()
    partial = base.flatten()[index].double() + change.flatten()[index].double()
    # Where the exponents are far apart, the first value is rounded in float64, but `exact - partial` is not.
    value = torch.where(partial + value == exact, value, exact - partial)
    value[(exact == 0) & exact.signbit()] += _NEGATIVE_ZERO
    remainder = index, value
    if not torch.equal(_bits(add_change(base, change, remainder)), _bits(target)):
        raise TaskVectorError("the difference between the weights cannot be represented: it overflows or is not finite")
    return change, remainder


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Returns whether two tensors have the same dtype, shape and bits. The bits of −0 and 0 differ."""
    same_kind = first.dtype == second.dtype and first.shape == second.shape
    return same_kind and torch.equal(_bits(first), _bits(second))


def _bits(tensor: Tensor) -> Tensor:
    """Returns the bits of floating-point numbers as integers, which distinguish −0 from 0."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(integers)
