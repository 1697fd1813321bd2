"""The identity of a base model, taken from the model itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from kfacpack.bundle.identity import describe
from kfacpack.bundle.manifest import Base, base_digest
from kfacpack.curvature.components import raw_bytes, spec_of
from kfacpack.errors import KfacpackError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


def identify(
    model: nn.Module | Mapping[str, Tensor],
    parameters: Collection[str],
    *,
    family: str,
    name: str,
    revision: str | None = None,
) -> Base:
    """Who θ0 is: the named parameters of a model or state dict, in state-dict order, with their digests."""
    state = model.state_dict() if isinstance(model, nn.Module) else model
    if missing := [each for each in parameters if each not in state]:
        raise KfacpackError(f"parameter {missing[0]!r} is not in the model's state dict")
    wanted = set(parameters)
    described = tuple(
        describe(each, *spec_of(tensor), raw_bytes(tensor)) for each, tensor in state.items() if each in wanted
    )
    digest = base_digest(described)
    return Base(family=family, name=name, revision=revision, sha256=digest, parameters=described)
