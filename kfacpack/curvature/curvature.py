"""A task's curvature: the GGN of f at the base parameters, block by block."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kfacpack.bundle.consistency import coverage_problem
from kfacpack.curvature.saving import digest_of, save
from kfacpack.errors import KfacpackError, TaskVectorError

if TYPE_CHECKING:
    import os

    from kfacpack.bundle.manifest import About
    from kfacpack.bundle.reader import Bundle
    from kfacpack.curvature.block import CurvatureBlock
    from kfacpack.curvature.saving import Progress


class Curvature:
    """Blocks of curvature, and what is said of them.

    `blocks` is a tuple of `CurvatureBlock`; `about` says of which model, f, task and estimate it is. Loaded from a
    file, it reads a tensor when that is touched.
    """

    def __init__(self, blocks: Iterable[CurvatureBlock], about: About, *, bundle: Bundle | None = None):
        self.blocks = tuple(blocks)
        self.about = about
        self.bundle = bundle
        """The file it was loaded from."""
        self._shapes = {parameter.name: parameter.shape for parameter in about.base.parameters}
        if problem := coverage_problem(self.blocks, self._shapes):
            raise KfacpackError(": ".join(problem))
        for block in self.blocks:
            if misfit := block.structure.misfit(block.join.rows, block.join.columns):
                raise KfacpackError(f"block {block.name!r} of {block.join.rows}×{block.join.columns}: {misfit}")

    def __repr__(self) -> str:
        task = f" on {self.about.source.task}" if self.about.source else ""
        size = f"{len(self.blocks)} blocks, {len(self.parameters)} parameters, {self.nbytes} bytes"
        return f"<Curvature of {self.about.base.name}{task}: {size}>"

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names covered, in the order of the model's state dict."""
        return tuple(self._shapes)

    @property
    def nbytes(self) -> int:
        """What its matrices weigh as they are held now; one shared by several blocks counts once."""
        matrices = {id(matrix): matrix for block in self.blocks for _, matrix in block.structure.matrices()}
        return sum(matrix.nbytes for matrix in matrices.values())

    @cached_property
    def digest(self) -> str:
        """That of its bundle: the file it was loaded from, or the one that it would be saved to.

        Without a file, all of its numbers are made and hashed for it, once.
        """
        return self.bundle.digest if self.bundle else digest_of(self)

    def quadratic(self, tau: Mapping[str, Tensor]) -> Tensor:
        """Σ over blocks of <τ, G τ>, a 0-d tensor, differentiable in τ. Parameters that τ leaves out count as zero."""
        return torch.stack([block.quadratic(tau, self._shapes) for block in self._touched_by(tau)]).sum()

    def apply(self, tau: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """G τ by parameter name, each in the dtype that τ has it in.

        Parameters that τ leaves out count as zero, and get what their block computes, in float32 at least. Those in no
        block that τ touches are left out: G τ is zero there.
        """
        found: dict[str, Tensor] = {}
        for block in self._touched_by(tau):
            for name, value in block.apply(tau, self._shapes).items():
                found[name] = found[name] + value if name in found else value
        order = (name for name in self._shapes if name in found)
        return {name: found[name].to(tau[name].dtype) if name in tau else found[name] for name in order}

    def save(
        self, path: str | os.PathLike[str], *, pack: bool = True, progress: Progress = lambda done, total: None
    ) -> None:
        """Write the bundle, whole or not at all; symmetric matrices as triangles unless `pack` is false.

        `progress` hears how many matrices are written, and how many there are.
        """
        save(self, path, pack=pack, progress=progress)

    def _touched_by(self, tau: Mapping[str, Tensor]) -> list[CurvatureBlock]:
        """The blocks that act on τ, once τ is known to fit."""
        if not isinstance(tau, Mapping):
            found = type(tau).__name__
            raise TaskVectorError(f"expected a task vector as a mapping of names to tensors, found {found}")
        if not tau:
            raise TaskVectorError("the task vector is empty, expected at least one of the covered parameters")
        for name, tensor in tau.items():
            if not isinstance(tensor, Tensor):
                raise TaskVectorError(f"parameter {name!r}: expected a tensor, found {type(tensor).__name__}")
            if name not in self._shapes:
                close = difflib.get_close_matches(name, self._shapes, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise TaskVectorError(
                    f"parameter {name!r} is not covered by this curvature{hint}. To leave out what it does not cover: "
                    "{name: value for name, value in tau.items() if name in curvature.parameters}"
                )
            if tuple(tensor.shape) != self._shapes[name] or not tensor.is_floating_point():
                found = f"{tensor.dtype} of shape {list(tensor.shape)}"
                raise TaskVectorError(
                    f"parameter {name!r}: expected floats of shape {list(self._shapes[name])}, found {found}"
                )
        return [block for block in self.blocks if any(name in tau for name in block.parameters)]
