"""Forms of a symmetric matrix. `kfacpack/format/schema.py` defines the layout of each form in a file."""

from __future__ import annotations

from kfacpack.curvature.matrices.dense import Dense, Packed
from kfacpack.curvature.matrices.matrix import Matrix
from kfacpack.curvature.matrices.structured import BlockDiagonal, Diagonal, LowRank, Sparse

FORMS: dict[str, type[Matrix]] = {cls.form: cls for cls in (Dense, Packed, BlockDiagonal, LowRank, Sparse, Diagonal)}
"""Matrix classes by the name of their form."""

__all__ = ["FORMS", "BlockDiagonal", "Dense", "Diagonal", "LowRank", "Matrix", "Packed", "Sparse"]
