"""A task's curvature: the GGN of f at the base parameters, block by block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kfacpack.bundle.consistency import coverage_problem
from kfacpack.curvature.fitting import require_fit
from kfacpack.curvature.saving import digest_of, save
from kfacpack.errors import KfacpackError

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
        require_fit(tau, self._shapes, "curvature")
        return [block for block in self.blocks if any(name in tau for name in block.parameters)]
