"""The ways to hold a symmetric matrix, one file each. `bundle/layout.py` says what each looks like in a file."""

from __future__ import annotations

from kfacpack.curvature.matrices.dense import Dense, Packed
from kfacpack.curvature.matrices.matrix import Matrix
from kfacpack.curvature.matrices.sparse import Sparse
from kfacpack.curvature.matrices.structured import BlockDiagonal, Diagonal, LowRank

FORMS: dict[str, type[Matrix]] = {
    each.form: each
    for each in (
        Dense,
        Packed,
        BlockDiagonal,
        LowRank,
        Sparse,
        Diagonal,
    )
}

__all__ = ["FORMS", "BlockDiagonal", "Dense", "Diagonal", "LowRank", "Matrix", "Packed", "Sparse"]
