"""How operations use parameters: by the name of the operation in autograd's graph, and the input that it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfacpack.errors import KfacpackError
from kfacpack.estimation.operations.base import RowOperation, VectorOperation
from kfacpack.estimation.operations.convolution import Convolution
from kfacpack.estimation.operations.elementwise import ConvolutionBias, LayerNormScale, LayerNormShift, Scale, Shift
from kfacpack.estimation.operations.embedding import Embedding
from kfacpack.estimation.operations.other import Other
from kfacpack.estimation.operations.products import Linear, Product, ProductFromLeft

if TYPE_CHECKING:
    from kfacpack.estimation.graph import Step

__all__ = ["Other", "RowOperation", "VectorOperation", "alike", "operation_of", "row_operation_of"]

ROW_OPERATIONS: dict[tuple[str, int], RowOperation] = {
    ("AddmmBackward0", 1): ProductFromLeft("_saved_mat2"),
    ("AddmmBackward0", 2): Product("_saved_mat1", bias_slot=0),
    ("MmBackward0", 0): ProductFromLeft("_saved_mat2"),
    ("MmBackward0", 1): Product("_saved_self"),
    ("BmmBackward0", 0): ProductFromLeft("_saved_mat2"),
    ("BmmBackward0", 1): Product("_saved_self"),
    ("LinearBackward0", 1): Linear(),
    ("ConvolutionBackward0", 1): Convolution(),
    ("EmbeddingBackward0", 0): Embedding(),
}
VECTOR_OPERATIONS: dict[tuple[str, int], VectorOperation] = {
    ("AddBackward0", 0): Shift(),
    ("AddBackward0", 1): Shift("_saved_alpha"),
    ("SubBackward0", 0): Shift(),
    ("SubBackward0", 1): Shift("_saved_alpha", sign=-1.0),
    ("AddmmBackward0", 0): Shift("_saved_beta"),
    ("LinearBackward0", 2): Shift(),
    ("ConvolutionBackward0", 2): ConvolutionBias(),
    ("MulBackward0", 0): Scale("_saved_other"),
    ("MulBackward0", 1): Scale("_saved_self"),
    ("NativeLayerNormBackward0", 1): LayerNormScale(),
    ("NativeLayerNormBackward0", 2): LayerNormShift(),
}
KINDS = {"ExpandBackward0": "token", "RepeatBackward0": "token"}


_PRODUCTS = frozenset(key for key, operation in ROW_OPERATIONS.items() if operation.kind == "linear")


def alike(key: tuple[str, int]) -> frozenset[tuple[str, int]] | None:
    """The operations that a product may turn into when its rows lie otherwise in memory; None if it is no product."""
    return _PRODUCTS if key in _PRODUCTS else None


def row_operation_of(step: Step) -> RowOperation:
    """The operation of a step that is known to be one of these."""
    operation = ROW_OPERATIONS[step.node.name(), step.slot]
    if not operation.takes(step.node):
        raise KfacpackError(f"{step.node.name()!r} is not the simple product any more that it was in the first batch")
    return operation


def operation_of(step: Step) -> RowOperation | VectorOperation:
    """What the operation of this step is; there is none that is not anything."""
    key = (step.node.name(), step.slot)
    if (rows := ROW_OPERATIONS.get(key)) and rows.takes(step.node):
        return rows
    if key in VECTOR_OPERATIONS:
        return VECTOR_OPERATIONS[key]
    return Other(KINDS.get(key[0], key[0].removesuffix("Backward0").lower()))
