"""`kp.Regularizer`: the penalty λ Σ τᵀ G τ over bundles, and its gradient in closed form.

    H = G τ  (B ΔW A for Kronecker factors)     value = λ/s <τ, H>     gradient = 2 λ/s H     s = scale of f

G is symmetric, so the gradient costs nothing that the value has not computed, and there is no graph to keep.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from kfacpack.curvature.blocks import accumulate, gather
from kfacpack.curvature.curvature import Curvature, covered_parameters, weights_of_model
from kfacpack.errors import KfacpackError, SubtractionError, TaskVectorError
from kfacpack.format.identity import base_task_name, difference, function_difference, share_classes
from kfacpack.merging.inputs import MergeInput, check_addable, mean_output_scale
from kfacpack.merging.subtract import merge_without
from kfacpack.models.model import Model
from kfacpack.training.factor_placement import FactorPlacement
from kfacpack.training.penalty_weights import Preset, block_factors, check_weights, published_strength, resolve_strength

if TYPE_CHECKING:
    from kfacpack.curvature.blocks import CurvatureBlock
    from kfacpack.format.manifest import Function
    from kfacpack.merging.inputs import Mergeable


class OwnTaskWarning(UserWarning):
    """The penalty holds the task that is trained back from changing its own outputs."""


class OutputScaleWarning(UserWarning):
    """A bundle does not record the scale of f and f is not normalised, so λ depends on that scale."""


class Regularizer:
    """λ/s Σ over bundles of τᵀ G τ. A merged bundle stands for Σ w_t G_t, with w_t that average one.

    s makes λ independent of the scale of f: 1 for a normalised f, otherwise the variance of f that bundles record.

    - bundles: curvatures or paths, one or several, of one base model and one f.
    - strength: λ; `preset="tak"` has the published ones, for the models they were published for.
    - weights: {group: factor}, for groups as "norm", "token", "projection", or an operation as the manifest calls it.
    - preset: "tak" is the published weighting and scaling; `weights` go before its own.
    - every: for a loop that asks `due(step)`, on every how many-th step the penalty is taken.
    - offload: factors stay on the CPU, and one block's at a time are brought to the device.
    - device, dtype: where and in what it computes; else τ's device, and τ's dtype but float32 at least.
    - leaving_out: the task that is trained. Its own bundle does not count, and is subtracted from the ones it was
      merged into by `tak`; where that cannot be, an `OwnTaskWarning` says so.
    """

    def __init__(
        self,
        bundles: Iterable[Mergeable] | Mergeable,
        strength: float | None = None,
        *,
        weights: Mapping[str, float] | None = None,
        preset: Preset | None = None,
        every: int = 1,
        offload: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        leaving_out: str | None = None,
    ):
        given = [bundles] if isinstance(bundles, Curvature | str | os.PathLike) else list(bundles)
        inputs = [MergeInput.of(each, place) for place, each in enumerate(given, start=1)]
        if not inputs:
            raise KfacpackError("a regularizer needs at least one bundle")
        if preset not in (None, "tak"):
            raise KfacpackError(f"there is no preset {preset!r}; there is 'tak'")
        if every < 1:
            raise KfacpackError(f"every {every}: expected a number of steps, at least 1")
        self.digests = tuple(each.curvature.digest for each in inputs)
        """Of the bundles that were given, for the vector that is trained under them."""
        pairs = _without_own_task(inputs, leaving_out) if leaving_out else [(each, each) for each in inputs]
        self._inputs = [each for _, each in pairs]
        self._left_out = leaving_out if pairs != [(each, each) for each in inputs] else None
        check_addable(self._inputs)
        check_weights(weights, [before.curvature for before, _ in pairs])
        self.strength = self._strength(strength, preset)
        self.output_scale = 1.0 if preset else _output_scale(self._inputs)
        """Scale of f over the held tasks, by which the drift is divided; 1 for a normalised f and for presets."""
        self.every = every
        self._weights, self._preset = dict(weights or {}), preset
        self._device = torch.device(device) if device is not None else None
        self._dtype = dtype
        self._offload = offload
        self._factors: FactorPlacement | None = None
        self._shapes = {p.name: p.shape for each in self.curvatures for p in each.about.base.parameters}
        self._blocks: list[CurvatureBlock] = []
        self._weight_of: dict[int, float] = {}
        for before, used in pairs:
            # As it was given it says over how many positions its means ran; after a subtraction it does not.
            factors = block_factors(before.curvature, weights, preset)
            counting = [block for block in used.curvature.blocks if factors[block.name]]
            self._blocks += counting
            self._weight_of |= {id(block): factors[block.name] for block in counting}

    @property
    def settings(self) -> dict[str, float | int | str]:
        """What a vector's file says of it."""
        weights = ", ".join(f"{group}={weight!r}" for group, weight in self._weights.items())
        said = {
            "strength": self.strength,
            "output_scale": self.output_scale if self.output_scale != 1 else None,
            "reg_every": self.every,
            "preset": self._preset,
            "weights": weights or None,
            "left_out": self._left_out,
        }
        return {key: value for key, value in said.items() if value is not None}

    @property
    def curvatures(self) -> tuple[Curvature, ...]:
        """What is added up; without the task that was left out."""
        return tuple(each.curvature for each in self._inputs)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters that are penalised; others may move freely."""
        return tuple(self._shapes)

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of the tasks whose outputs are held."""
        parents = (parent.task for each in self._inputs for parent in each.parents)
        return tuple(dict.fromkeys(task for task in parents if task))

    def due(self, step: int) -> bool:
        """Whether step number `step`, from 0, is one with a penalty."""
        return step % self.every == 0

    def check(self, model: Model | nn.Module | Mapping[str, Tensor], function: Function | None = None) -> None:
        """Refuse another base model than the bundles', naming the first parameter that differs, or another f.

        A kfacpack model says itself what its f is.
        """
        if isinstance(model, Model):
            function = function or model.function
        weights = weights_of_model(model.module if isinstance(model, Model) else model)
        for each in self._inputs:
            about = each.curvature.about
            if function and (words := function_difference(about.function, function)):
                raise KfacpackError(f"{each.name}: is of another f than the model's: {words}")
            for parameter in about.base.parameters:
                if found := difference(parameter, weights):
                    problem = f"is of {about.base.name}, which the model is not: parameter {parameter.name!r} {found}"
                    raise KfacpackError(f"{each.name}: {problem}. Estimate its curvature at these weights")

    def value(self, tau: Mapping[str, Tensor]) -> Tensor:
        """λ/s Σ τᵀ G τ, a 0-d tensor without a graph. Parameters that no bundle covers do not count."""
        return self._run(self._covered(tau), None)

    def loss(self, tau: Mapping[str, Tensor]) -> Tensor:
        """The value as a term of anybody's loss: 0-d, differentiable once in τ, wherever τ comes from.

        So for τ = s B A, `backward` gives B the gradient s (2 λ G τ) Aᵀ, and A s Bᵀ (2 λ G τ). Where τ are the leaves
        themselves, `add_grad` does the same without a graph.
        """
        known = self._covered(tau)
        value: Tensor = _Penalty.apply(self._run, tuple(known), *known.values())  # type: ignore[no-untyped-call]
        return value

    def add_grad(self, tau: Mapping[str, Tensor], grads: MutableMapping[str, Tensor] | None = None) -> Tensor:
        """The value; and its gradient, 2 λ G τ, added in place to each tensor's `.grad`, or to `grads[name]`.

        A gradient that is not there yet is made. Parameters that τ leaves out count as zero and get none.
        """
        known = self._covered(tau)
        if grads is None:
            self._require_lasting(tau, known)
            own = {name: torch.zeros_like(each) if each.grad is None else each.grad for name, each in known.items()}
            for name, each in known.items():
                each.grad = own[name]
            return self._run(known, own)
        if not isinstance(grads, MutableMapping):
            raise KfacpackError(f"grads: expected a dict that gradients are added to, found {type(grads).__name__}")
        for name, each in known.items():
            if grads.get(name) is None:
                grads[name] = torch.zeros_like(each)
            elif grads[name].shape != each.shape:
                problem = f"expected shape {list(each.shape)}, found {list(grads[name].shape)}"
                raise KfacpackError(f"the gradient of {name!r}: {problem}")
        return self._run(known, {name: grads[name] for name in known})

    @staticmethod
    def _require_lasting(tau: Mapping[str, Tensor], known: Mapping[str, Tensor]) -> None:
        """A `.grad` is lost on tensors that are made anew whenever they are asked for, as a task vector's are."""
        if any(tau[name] is not each for name, each in known.items()):
            problem = f"the tensors of a {type(tau).__name__} are made anew when asked for, and keep no .grad"
            raise TaskVectorError(f"{problem}. Pass a dict that gradients are added to: add_grad(tau, grads)")

    @torch.no_grad()
    def _run(self, tau: Mapping[str, Tensor], grads: Mapping[str, Tensor] | None) -> Tensor:
        """The value, and where `grads` are given, its gradient added to them. τ is known to fit."""
        factors = self._ready_for(tau)
        touched = [block for block in self._blocks if any(name in tau for name in block.parameters)]
        values = [torch.zeros((), dtype=factors.dtype, device=factors.device)]
        # In the middle of somebody's mixed-precision step, the penalty stays in its own precision.
        with torch.autocast(factors.device.type, enabled=False):
            for block, multiply in factors.along(touched):
                delta = gather(tau, block.join, self._shapes).to(factors.device, factors.dtype)
                H = block.structure.apply(delta, multiply)
                strength = self.strength / self.output_scale * self._weight_of[id(block)]
                values.append(strength * torch.dot(delta.reshape(-1), H.reshape(-1)))
                if grads is not None:
                    accumulate(H, block.join, self._shapes, grads, 2 * strength)
        return torch.stack(values).sum()

    def _covered(self, tau: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return covered_parameters(tau, self._shapes, "regularizer")

    def _ready_for(self, tau: Mapping[str, Tensor]) -> FactorPlacement:
        first = next(iter(tau.values()))
        device = self._device or first.device
        dtype = self._dtype or torch.promote_types(torch.float32, first.dtype)
        if self._factors is None or (self._factors.device, self._factors.dtype) != (device, dtype):
            self._factors = FactorPlacement(dtype, device, offload=self._offload)
        return self._factors

    def _strength(self, given: float | None, preset: Preset | None) -> float:
        return (
            published_strength(self.curvatures[0].about.base) if given is None and preset else resolve_strength(given)
        )


class _Penalty(torch.autograd.Function):
    """The value, whose gradient is there as soon as the value is."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], names: tuple[str, ...], *tau: Tensor) -> Tensor:
        grads = [torch.zeros_like(each) for each in tau] if any(ctx.needs_input_grad) else []
        ctx.save_for_backward(*grads)
        found = dict(zip(names, grads, strict=True)) if grads else None
        return run(dict(zip(names, tau, strict=True)), found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(u.to(grad) * grad for grad in ctx.saved_tensors)


def _output_scale(inputs: Sequence[MergeInput]) -> float:
    """Returns the variance of f over the tasks of all bundles, each task weighted as its G is; 1 for a normalised f.

    Bundles that do not record it take the mean of the others. Without any record, the drift is used as it is.
    """
    if inputs[0].curvature.about.function.normalized:
        return 1.0
    recorded = [each for each in inputs if each.curvature.about.output_scale]
    scale = mean_output_scale(recorded, [1.0] * len(recorded)) if recorded else None
    # The variance of a single example, or of a constant f, is zero.
    reference = (scale.variance or scale.mean_square) if scale else 0.0
    for each in inputs:
        if each not in recorded:
            instead = "that of the other bundles is used" if reference else "λ multiplies the absolute drift"
            problem = f"does not record the scale of f, which is not normalised; {instead}"
            warnings.warn(f"{each.name}: {problem}. Estimate it again", OutputScaleWarning, stacklevel=3)
    return reference or 1.0


def _without_own_task(inputs: Sequence[MergeInput], task: str) -> list[tuple[MergeInput, MergeInput]]:
    """The bundles as they were given and without the task that is trained, as far as it can be taken out."""
    _warn_of_common_classes(inputs, task)
    if not any(parent.task == task for each in inputs for parent in each.parents):
        return [(each, each) for each in inputs]
    others = [each for each in inputs if any(parent.task != task for parent in each.parents)]
    if not others:
        raise KfacpackError(
            f"nothing remains to hold without {task!r}, the task that is trained. Give other tasks' bundles"
        )
    try:
        return [(inputs[place], each) for place, each in merge_without(inputs, [task])]
    except SubtractionError as error:
        warnings.warn(
            f"the penalty holds back {task!r} itself, the task that is trained: {error}", OwnTaskWarning, stacklevel=3
        )
        return [(each, each) for each in others]


def _warn_of_common_classes(inputs: Sequence[MergeInput], task: str) -> None:
    """A part and its whole, or parts of other sizes, are tasks of other names: neither can be subtracted."""
    held = {parent.task: each for each in inputs for parent in each.parents if parent.task and parent.task != task}
    for other, each in held.items():
        if share_classes(other, task):
            problem = f"{each.name} is of {other!r}, which has classes of it"
            remedy = f"Give bundles of the other parts of {base_task_name(task)!r}, divided alike, and of other tasks"
            said = f"the penalty holds back {task!r} itself, the task that is trained: {problem}. {remedy}"
            warnings.warn(said, OwnTaskWarning, stacklevel=4)
            return
