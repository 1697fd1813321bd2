"""The ways to hold a symmetric matrix, one file each. `bundle/layout.py` says what each looks like in a file."""

from kfacpack.curvature.matrices.base import Matrix
from kfacpack.curvature.matrices.block_diagonal import BlockDiagonal
from kfacpack.curvature.matrices.dense import Dense
from kfacpack.curvature.matrices.diagonal import Diagonal
from kfacpack.curvature.matrices.lowrank import LowRank
from kfacpack.curvature.matrices.packed import Packed
from kfacpack.curvature.matrices.sparse import Sparse

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
