"""Reads the tensors of a task vector from any safetensors file, for measuring approximation errors on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kfacpack.curvature.matrices.components import TORCH_TYPES
from kfacpack.errors import BundleError
from kfacpack.format.container import VECTOR, Container
from kfacpack.vectors.task_vector import TaskVector

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from torch import Tensor

    from kfacpack.curvature.curvature import Curvature


def read_vector_tensors(path: str | os.PathLike[str], curvature: Curvature) -> Callable[[str], Tensor]:
    """Opens a file with the change of each parameter that a curvature covers.

    Args:
        path: A task vector, or any safetensors file with tensors under the parameters' names. Additional tensors
            are ignored.
        curvature: The curvature; if the file is a task vector, its base model must be the same.

    Returns:
        A function that reads the tensor of a parameter.

    Raises:
        BundleError: If the file cannot be read, or if a tensor is missing, has a wrong shape or type, or belongs to
            another base model. The returned function raises it for values that are not finite.
    """
    container = Container(path)
    if VECTOR.manifest in container.metadata:
        return _read_task_vector(path, curvature)
    specs = container.tensors
    shapes = {parameter.name: parameter.shape for parameter in curvature.about.base.parameters}
    if missing := [name for name in shapes if name not in specs]:
        problem = f"has no tensor {missing[0]!r}; {len(missing)} of the {len(shapes)} covered parameters are missing"
        raise BundleError(path, problem, None, "Expected a task vector under the model's own parameter names")
    for name, shape in shapes.items():
        dtype = TORCH_TYPES.get(specs[name].dtype)
        if specs[name].shape != shape or dtype is None or not dtype.is_floating_point:
            problem = f"is {specs[name].dtype} of shape {list(specs[name].shape)}, expected floats of {list(shape)}"
            raise BundleError(path, problem, f"tensor {name!r}")

    def read(name: str) -> Tensor:
        # Copied, because other writers may not align tensors.
        data = bytearray(container.bytes_of(name))
        tensor = torch.frombuffer(data, dtype=TORCH_TYPES[specs[name].dtype]).view(shapes[name])
        if not bool(tensor.isfinite().all()):
            raise BundleError(path, "contains NaN or Inf", f"tensor {name!r}")
        return tensor

    return read


def _read_task_vector(path: str | os.PathLike[str], curvature: Curvature) -> Callable[[str], Tensor]:
    """Opens a task vector and checks that it has the curvature's base model."""
    vector = TaskVector.load(path)
    parameters = {parameter.name: parameter for parameter in vector.about.base.parameters}
    for parameter in curvature.about.base.parameters:
        if parameters.get(parameter.name) != parameter:
            problem = "belongs to another base model" if parameter.name in parameters else "is missing"
            expected = f"expected the parameter of {curvature.about.base.name}"
            raise BundleError(path, f"{problem}, {expected}", f"tensor {parameter.name!r}")
    return vector.__getitem__
