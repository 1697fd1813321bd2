"""A task vector in a safetensors file, to measure on: tensors by the parameters' names, read when asked for."""

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
    """The change of each parameter that the curvature covers; all must be there, others are not looked at."""
    container = Container(path)
    if VECTOR.manifest in container.metadata:
        return _check_model(path, curvature)
    found = container.tensors
    shapes = {parameter.name: parameter.shape for parameter in curvature.about.base.parameters}
    if missing := [name for name in shapes if name not in found]:
        problem = f"has no tensor {missing[0]!r}; {len(missing)} of the {len(shapes)} covered parameters are missing"
        raise BundleError(path, problem, None, "Expected a task vector under the model's own names")
    for name, shape in shapes.items():
        dtype = TORCH_TYPES.get(found[name].dtype)
        if found[name].shape != shape or dtype is None or not dtype.is_floating_point:
            problem = f"is {found[name].dtype} of shape {list(found[name].shape)}, expected floats of {list(shape)}"
            raise BundleError(path, problem, f"tensor {name!r}")

    def read(name: str) -> Tensor:
        # Copied, because other writers may lay tensors at odd places.
        data = bytearray(container.bytes_of(name))
        tensor = torch.frombuffer(data, dtype=TORCH_TYPES[found[name].dtype]).view(shapes[name])
        if not bool(tensor.isfinite().all()):
            raise BundleError(path, "has a number that is not finite", f"tensor {name!r}")
        return tensor

    return read


def _check_model(path: str | os.PathLike[str], curvature: Curvature) -> Callable[[str], Tensor]:
    """A file that says which model it is of, and whose bytes can be checked."""
    vector = TaskVector.load(path)
    own = {parameter.name: parameter for parameter in vector.about.base.parameters}
    for parameter in curvature.about.base.parameters:
        if own.get(parameter.name) != parameter:
            problem = "is not in it" if parameter.name not in own else "is of another base model"
            raise BundleError(path, f"{problem}, expected {curvature.about.base.name}'s", f"tensor {parameter.name!r}")
    return vector.__getitem__
