"""Whether a task vector fits what it is put to.

The identity of a base model, taken from the model itself.

A task's curvature: the GGN of f at the base parameters, block by block.

A bundle into a curvature. Nothing but the header is read until a tensor is touched.

What can only be checked of a bundle by computing with it: that its matrices are what they promise to be.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from math import isfinite, nan, sqrt
from typing import TYPE_CHECKING

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from kfacpack.curvature.blocks import STRUCTURES, CurvatureBlock
from kfacpack.curvature.matrices import FORMS
from kfacpack.curvature.matrices.components import BundleTensors, raw_bytes, spec_of
from kfacpack.curvature.saving import digest_of, save
from kfacpack.errors import KfacpackError, TaskVectorError
from kfacpack.format.identity import describe
from kfacpack.format.manifest import Base, base_digest, first_problem
from kfacpack.format.reader import Bundle, CheckFailure, CheckResult, run_check
from kfacpack.format.schema import coverage_problem

if TYPE_CHECKING:
    import os

    from kfacpack.curvature.blocks import CurvatureBlock
    from kfacpack.curvature.matrices.matrix import Matrix
    from kfacpack.format.identity import WeightReader
    from kfacpack.format.manifest import About
    from kfacpack.format.reader import CheckProgress
    from kfacpack.format.units import OnProgress


def covered_parameters(
    tau: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], whose: str
) -> dict[str, Tensor]:
    """What of τ is covered, once that is known to fit; other parameters are left aside."""
    _require_mapping(tau)
    known = {name: tau[name] for name in tau if name in shapes}
    if not known:
        some = ", ".join(list(shapes)[:3])
        raise TaskVectorError(f"the task vector has none of the parameters that this {whose} covers: {some}, …")
    check_task_vector(known, shapes, whose)
    return known


def check_task_vector(tau: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], whose: str) -> None:
    """`shapes` are those of all parameters covered, by name; `whose` they are, in one word, for the message."""
    _require_mapping(tau)
    if not tau:
        raise TaskVectorError("the task vector is empty, expected at least one of the covered parameters")
    for name, tensor in tau.items():
        if not isinstance(tensor, Tensor):
            raise TaskVectorError(f"parameter {name!r}: expected a tensor, found {type(tensor).__name__}")
        if name not in shapes:
            close = difflib.get_close_matches(name, shapes, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TaskVectorError(
                f"parameter {name!r} is not covered by this {whose}{hint}. To leave out what it does not cover: "
                f"{{name: value for name, value in tau.items() if name in {whose}.parameters}}"
            )
        if tuple(tensor.shape) != shapes[name] or not tensor.is_floating_point():
            found = f"{tensor.dtype} of shape {list(tensor.shape)}"
            raise TaskVectorError(f"parameter {name!r}: expected floats of shape {list(shapes[name])}, found {found}")


def _require_mapping(tau: object) -> None:
    if not isinstance(tau, Mapping):
        found = type(tau).__name__
        raise TaskVectorError(f"expected a task vector as a mapping of names to tensors, found {found}")


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


def weights_of_model(model: nn.Module | Mapping[str, Tensor]) -> WeightReader:
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
        self, path: str | os.PathLike[str], *, pack: bool = True, progress: OnProgress = lambda done, total: None
    ) -> None:
        """Write the bundle, whole or not at all; symmetric matrices as triangles unless `pack` is false.

        `progress` hears how many matrices are written, and how many there are.
        """
        save(self, path, pack=pack, progress=progress)

    def _touched_by(self, tau: Mapping[str, Tensor]) -> list[CurvatureBlock]:
        """The blocks that act on τ, once τ is known to fit."""
        check_task_vector(tau, self._shapes, "curvature")
        return [block for block in self.blocks if any(name in tau for name in block.parameters)]


def load(path: str | os.PathLike[str]) -> Curvature:
    """Open a bundle. Its tensors are mapped, and read and checked when touched."""
    return from_bundle(Bundle(path))


def from_bundle(bundle: Bundle) -> Curvature:
    matrices = {name: matrix_of(bundle, name) for name in bundle.matrices}
    blocks = (
        CurvatureBlock(
            entry.name,
            entry.operation,
            entry.join,
            STRUCTURES[entry.structure].from_entry(entry, matrices),
            entry.losses,
        )
        for entry in bundle.manifest.blocks
    )
    return Curvature(blocks, bundle.manifest.about(), bundle=bundle)


def matrix_of(bundle: Bundle, name: str) -> Matrix:
    entry = bundle.matrices[name]
    components = BundleTensors(bundle, entry.components)
    return FORMS[entry.form](entry.side, components, psd=entry.psd, examples=entry.examples, positions=entry.positions)


_UNKNOWN_COUNT = 10_000


def check_form(bundle: Bundle, progress: CheckProgress) -> CheckResult:
    """Symmetry, and whatever else a form asks of its tensors beyond their shapes."""

    def failure(name: str) -> CheckFailure | None:
        if violation := matrix_of(bundle, name).violation():
            component, problem = violation
            return CheckFailure(f"tensor {bundle.matrices[name].components[component]!r}", problem)
        return None

    return run_check("symmetry", bundle.matrices, failure, progress)


def check_psd(bundle: Bundle, progress: CheckProgress) -> CheckResult:
    """Positive semi-definiteness of the matrices that promise it, up to rounding."""

    def failure(name: str) -> CheckFailure | None:
        if (bound := negative_direction(matrix_of(bundle, name))) is None:
            return None
        tensor = bundle.matrices[name].components["data"]
        problem = f"is not positive semi-definite: it has an eigenvalue below {bound:.4g}, which is no rounding"
        return CheckFailure(f"tensor {tensor!r}", problem)

    promised = [name for name, entry in bundle.matrices.items() if entry.psd]
    found = run_check("psd", promised, failure, progress)
    return replace(found, exempt=len(bundle.matrices) - len(promised))


def negative_direction(matrix: Matrix) -> float | None:
    """If an eigenvalue is further below zero than rounding explains, how far below rounding reaches; else None.

    Storing an entry moves it by half an eps of itself (or of the smallest normal number), and adding up k terms in
    float32 by about √k eps; no eigenvalue moves by more than the Frobenius norm of all that. Sums of squares stay
    positive however they are stored, so of the diagonal only the adding-up is excused. A Cholesky factorisation tells,
    at a tenth of the price of the eigenvalues.
    """
    stored = torch.finfo(matrix.dtype if matrix.dtype.is_floating_point else torch.float32)
    added = torch.finfo(torch.float32).eps * sqrt(matrix.positions or matrix.examples or _UNKNOWN_COUNT)
    for witness in matrix.psd_witnesses():
        size = float(witness.abs().amax())
        if size == 0:
            continue
        if not isfinite(size):
            return nan
        # Scaled to unit size, so that numbers of any magnitude are judged alike.
        unit = witness / size
        norm = torch.linalg.matrix_norm(unit)[..., None]
        smallest = stored.tiny * stored.eps * unit.shape[-1] / size
        slack = 2 * (stored.eps + added) * norm + smallest
        lifted = unit + torch.diag_embed(slack.expand(unit.shape[:-1]))
        negative = bool((unit.diagonal(dim1=-2, dim2=-1) < -2 * added * norm - smallest).any())
        if negative or bool(torch.linalg.cholesky_ex(lifted).info.any()):
            return -float((2 * added * norm + smallest if negative else slack).amax()) * size
    return None
