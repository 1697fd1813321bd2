"""The identity of a base model, taken from the model itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from pydantic import ValidationError
from torch import Tensor, nn

from kfacpack.bundle.identity import describe
from kfacpack.bundle.manifest import Base, base_digest, first_problem
from kfacpack.curvature.matrices.components import raw_bytes, spec_of
from kfacpack.errors import KfacpackError

if TYPE_CHECKING:
    from kfacpack.bundle.identity import Weights


def identify(
    model: nn.Module | Mapping[str, Tensor],
    parameters: Collection[str],
    *,
    family: str,
    name: str,
    revision: str | None = None,
) -> Base:
    """Who θ0 is: the named parameters of a model or state dict, in state-dict order, with their digests."""
    state = _state(model)
    if missing := [each for each in parameters if each not in state]:
        raise KfacpackError(f"parameter {missing[0]!r} is not in the model's state dict")
    wanted = set(parameters)
    try:
        described = tuple(
            describe(each, *spec_of(tensor), raw_bytes(tensor)) for each, tensor in state.items() if each in wanted
        )
        digest = base_digest(described)
        return Base(family=family, name=name, revision=revision, sha256=digest, parameters=described)
    except ValidationError as error:
        keys, problem = first_problem(error)
        place = ".".join(map(str, keys))
        raise KfacpackError(f"a base model cannot be identified like this: {place}: {problem}") from error


def weights_of_model(model: nn.Module | Mapping[str, Tensor]) -> Weights:
    """The parameters of a model or state dict, as a bundle's are compared with."""
    state = _state(model)

    def read(name: str) -> tuple[str, tuple[int, ...], memoryview] | None:
        return None if name not in state else (*spec_of(state[name]), raw_bytes(state[name]))

    return read


def _state(model: nn.Module | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    if isinstance(model, nn.Module):
        return model.state_dict()
    if not isinstance(model, Mapping):
        own = "; of what kp.load_model gives, that is .module" if hasattr(model, "module") else ""
        raise KfacpackError(f"expected an nn.Module or a state dict, found {type(model).__name__}{own}")
    return model
