"""The curvature penalty λ/s Σ τᵀ G τ over bundles, with its gradient in closed form.

    H = G τ     value = λ/s <τ, H>     gradient = 2 λ/s H

s is the scale of f. For a block with the Kronecker factors B and A, H is B ΔW A, where ΔW is the part of τ that belongs
to the block. G is symmetric, so the value and the gradient are computed from the same H, without an autograd graph.
Similar blocks are computed together; see `factor_placement`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from kfacpack.curvature.blocks import accumulate, gather_stack
from kfacpack.curvature.curvature import Curvature, covered_parameters, weights_of_model
from kfacpack.errors import KfacpackError, SubtractionError, TaskVectorError
from kfacpack.format.identity import difference, function_difference, share_classes
from kfacpack.merging.inputs import MergeInput, check_addable, scale_of_f
from kfacpack.merging.subtract import merge_without
from kfacpack.models.model import Model
from kfacpack.training.factor_placement import FactorPlacement, plan_batches
from kfacpack.training.penalty_weights import (
    PenaltyPrecision,
    Preset,
    block_factors,
    check_weights,
    published_strength,
    resolve_strength,
)

if TYPE_CHECKING:
    from kfacpack.curvature.blocks import CurvatureBlock
    from kfacpack.format.manifest import Base, Function
    from kfacpack.merging.inputs import Mergeable


class OwnTaskWarning(UserWarning):
    """Issued if the penalty also restricts changes of f on the task being trained."""


class OutputScaleWarning(UserWarning):
    """Issued if f is not normalised and a bundle does not record the scale of f, on which a suitable λ then depends."""


class PrecisionLoss(NamedTuple):
    """The relative errors of a penalty whose products are computed in reduced precision."""

    value: float
    """Relative error |v' - v| / v of the value v, where v' is computed in reduced precision."""
    gradient: float
    """Relative error ‖g' - g‖ / ‖g‖ of the gradient g for all parameters."""


class Regularizer:
    """The quadratic penalty λ/s Σ τᵀ G τ over one or several curvature bundles.

    A merged bundle represents Σ w_t G_t with weights w_t whose mean is 1. The divisor s makes λ independent of the
    scale of f. It is 1 if a preset is used, if the metric is `kl`, or if f is normalised. Otherwise, it is the variance
    of f that the bundles record (`OutputScale.reference`), or 1 if no bundle records it.

    Args:
        bundles: One or several curvatures, paths or `hf://` references. All must have the same base model and the same
            f.
        strength: λ. Defaults to 80, or to 3 for bundles with the metric `kl`. With `preset="tak"`, defaults to the λ
            that was published for the model.
        weights: Factors by which the penalty of a group of blocks is multiplied, by name of the group. The groups are
            "norm", "projection" and, for all other blocks, the name of their operation in the manifest, such as
            "token".
        preset: "tak" for the published weighting and scaling. `weights` takes precedence over the weights of the
            preset.
        every: The penalty is applied at every `every`-th step. Only for training loops that use `due`.
        offload: Whether to keep factors on the CPU in their stored form and copy them to the device a few blocks at a
            time.
        device: Device of the computation. Defaults to the device of τ.
        dtype: Dtype of the computation. Defaults to the dtype of τ, at least float32.
        precision: Precision of the products with factors: "bf16" keeps the factors in bfloat16 and multiplies in
            bfloat16; "tf32" uses TF32 on GPUs that support it. By default, the products are computed in the dtype of
            the computation. `precision_loss` measures the effect.
        exclude_task: Name of the task being trained. A bundle for this task alone is not used. The task is subtracted
            from bundles that were merged with the rule `tak`. If this is not possible, an `OwnTaskWarning` is issued.

    Raises:
        KfacpackError: If the bundles are incompatible, or an option is out of range.

    Example:
        >>> penalty = kp.Regularizer(["cars.kfac", "svhn.kfac"], strength=80.0)
        >>> loss = loss + penalty.loss(tau)
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
        precision: PenaltyPrecision | None = None,
        exclude_task: str | None = None,
    ):
        sources = [bundles] if isinstance(bundles, Curvature | str | os.PathLike) else list(bundles)
        inputs = [MergeInput.of(source, position) for position, source in enumerate(sources, start=1)]
        if not inputs:
            raise KfacpackError("expected at least one bundle for the penalty, got none")
        if preset not in (None, "tak"):
            raise KfacpackError(f"unknown preset {preset!r}; expected 'tak'")
        if precision not in (None, "tf32", "bf16"):
            raise KfacpackError(f"unknown precision {precision!r}; expected 'tf32' or 'bf16'")
        if every < 1:
            raise KfacpackError(f"every {every}: expected an interval of at least 1 step")
        self.digests = tuple(bundle.curvature.digest for bundle in inputs)
        """Digests of the original bundles, which are recorded in the vector's file."""
        unchanged = [(bundle, bundle) for bundle in inputs]
        pairs = _without_own_task(inputs, exclude_task) if exclude_task else unchanged
        self._inputs = [reduced for _, reduced in pairs]
        self._left_out = exclude_task if pairs != unchanged else None
        check_addable(self._inputs)
        check_weights(weights, [original.curvature for original, _ in pairs])
        self.strength = self._resolve_strength(strength, preset)
        self.output_scale = 1.0 if preset else _output_scale(self._inputs)
        """The divisor s of the penalty."""
        self.every = every
        self._weights, self._preset = dict(weights or {}), preset
        self._device = torch.device(device) if device is not None else None
        self._dtype = dtype
        self.precision = precision
        """Precision of the products, or None for the dtype of the computation."""
        self._offload = offload
        self._factors: FactorPlacement | None = None
        self._shapes = {p.name: p.shape for curvature in self.curvatures for p in curvature.about.base.parameters}
        penalised: list[tuple[CurvatureBlock, float]] = []
        for original, reduced in pairs:
            # Only the original bundle records the number of positions. It is lost in a subtraction.
            factors = block_factors(original.curvature, weights, preset)
            penalised += [(block, factors[block.name]) for block in reduced.curvature.blocks if factors[block.name]]
        self._batches = plan_batches(
            [block for block, _ in penalised], [weight for _, weight in penalised], self._shapes
        )

    @property
    def settings(self) -> dict[str, float | int | str]:
        """Settings of the penalty, which are recorded in the vector's file."""
        weights = ", ".join(f"{group}={weight!r}" for group, weight in self._weights.items())
        settings = {
            "strength": self.strength,
            "output_scale": self.output_scale if self.output_scale != 1 else None,
            "reg_every": self.every,
            "preset": self._preset,
            "weights": weights or None,
            "left_out": self._left_out,
            "penalty_precision": self.precision,
        }
        return {key: value for key, value in settings.items() if value is not None}

    @property
    def curvatures(self) -> tuple[Curvature, ...]:
        """Curvatures over which the penalty is summed. The task being trained is removed from them if possible."""
        return tuple(bundle.curvature for bundle in self._inputs)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the penalised parameters."""
        return tuple(self._shapes)

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks that the penalty protects."""
        parents = (parent.task for bundle in self._inputs for parent in bundle.parents)
        return tuple(dict.fromkeys(task for task in parents if task))

    def due(self, step: int) -> bool:
        """Returns whether the penalty applies to a step.

        Args:
            step: Index of the step, from 0.
        """
        return step % self.every == 0

    def check(
        self,
        model: Model | nn.Module | Mapping[str, Tensor],
        function: Function | None = None,
        *,
        base: Base | None = None,
    ) -> None:
        """Checks that the bundles were estimated for this model at its current weights, and for the same f.

        Each parameter is hashed at most once, even if several bundles cover it.

        Args:
            model: A kfacpack model, a module or a state dict.
            function: Description of f. Defaults to the function of a kfacpack model. For a module or a state dict, f is
                not checked by default.
            base: Result of `Model.base` or `kp.identify` for `model`, if already computed. The parameters that it
                contains are not hashed again.

        Raises:
            KfacpackError: If a bundle is for a different f or base model. The message names the first parameter that
                differs.
        """
        if isinstance(model, Model):
            function = function or model.function
        weights = weights_of_model(model.module if isinstance(model, Model) else model)
        identified = {parameter.name: parameter for parameter in base.parameters} if base else {}
        for bundle in self._inputs:
            about = bundle.curvature.about
            if function and (words := function_difference(about.function, function)):
                problem = "was estimated for a different f"
                raise KfacpackError(f"{bundle.name}: {problem}. The f of the bundle and of the model: {words}")
            for parameter in about.base.parameters:
                if identified.get(parameter.name) == parameter:
                    continue
                if words := difference(parameter, weights):
                    problem = f"was estimated for {about.base.name} with weights that differ from those of the model"
                    remedy = "Estimate the bundle again at the current weights of the model"
                    raise KfacpackError(f"{bundle.name}: {problem}: parameter {parameter.name!r} {words}. {remedy}")
                identified[parameter.name] = parameter

    def value(self, tau: Mapping[str, Tensor]) -> Tensor:
        """Returns the penalty λ/s Σ τᵀ G τ.

        Args:
            tau: Task vector, {state-dict name: tensor of the parameter's shape}. Parameters that no bundle covers are
                ignored. Missing parameters count as zero.

        Returns:
            A 0-d tensor without a graph.

        Raises:
            TaskVectorError: If τ does not match the bundles.
        """
        return self._compute(self._covered(tau), None)

    def loss(self, tau: Mapping[str, Tensor]) -> Tensor:
        """Returns the penalty as a loss term that is differentiable once with respect to τ.

        τ may be computed from other tensors, for example as a low-rank product τ = c L R. With H = 2 λ/s G τ, the
        gradient with respect to L is then c H Rᵀ, and the gradient with respect to R is c Lᵀ H. If the tensors of τ are
        leaves, `add_grad` computes their gradients without a graph.

        Args:
            tau: Task vector by parameter name; see `value`.

        Returns:
            A 0-d tensor.

        Raises:
            TaskVectorError: If τ does not match the bundles.
        """
        covered = self._covered(tau)
        value: Tensor = _Penalty.apply(self._compute, tuple(covered), *covered.values())  # type: ignore[no-untyped-call]
        return value

    def add_grad(self, tau: Mapping[str, Tensor], grads: MutableMapping[str, Tensor] | None = None) -> Tensor:
        """Computes the penalty and adds its gradient, 2 λ/s G τ, to `grads` or to the `.grad` of the tensors.

        Args:
            tau: Task vector by parameter name; see `value`.
            grads: Gradients to add to, by parameter name. Missing gradients are created. Defaults to the `.grad` of
                each tensor.

        Returns:
            The penalty, a 0-d tensor without a graph.

        Raises:
            TaskVectorError: If τ does not match the bundles, or `grads` is None and τ creates new tensors on each
                access.
            KfacpackError: If `grads` is not a mutable mapping, or a gradient does not have the shape of its parameter.
        """
        covered = self._covered(tau)
        if grads is None:
            self._require_persistent(tau, covered)
            tau_grads = {
                name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                for name, tensor in covered.items()
            }
            for name, tensor in covered.items():
                tensor.grad = tau_grads[name]
            return self._compute(covered, tau_grads)
        if not isinstance(grads, MutableMapping):
            raise KfacpackError(f"grads: expected a dict to which gradients are added, got {type(grads).__name__}")
        for name, tensor in covered.items():
            if grads.get(name) is None:
                grads[name] = torch.zeros_like(tensor)
            elif grads[name].shape != tensor.shape:
                problem = f"expected shape {list(tensor.shape)}, got {list(grads[name].shape)}"
                raise KfacpackError(f"gradient of {name!r}: {problem}")
        return self._compute(covered, {name: grads[name] for name in covered})

    @staticmethod
    def _require_persistent(tau: Mapping[str, Tensor], covered: Mapping[str, Tensor]) -> None:
        """Rejects mappings, such as task vectors, that create new tensors on each access and would lose a `.grad`."""
        if any(tau[name] is not tensor for name, tensor in covered.items()):
            problem = f"a {type(tau).__name__} creates new tensors on each access, so their .grad would be lost"
            raise TaskVectorError(f"{problem}. Pass a dict to which gradients are added: add_grad(tau, grads)")

    def precision_loss(self, tau: Mapping[str, Tensor]) -> PrecisionLoss:
        """Measures the error that `precision` causes, compared with products in the dtype of the computation.

        Args:
            tau: Task vector by parameter name; see `value`.

        Returns:
            The relative errors. They are 0 if the penalty is zero.

        Raises:
            TaskVectorError: If τ does not match the bundles.
        """
        covered = self._covered(tau)
        exact, rounded = ({name: torch.zeros_like(tensor) for name, tensor in covered.items()} for _ in range(2))
        factors = self._factors_for(covered)
        expected = self._compute(covered, exact, FactorPlacement(self._dtype_for(covered), factors.device, keep=False))
        value = self._compute(covered, rounded)
        difference = [(rounded[name] - exact[name]).norm() for name in covered]
        norm = torch.stack([gradient.norm() for gradient in exact.values()]).norm()
        return PrecisionLoss(
            float((value - expected).abs() / expected) if expected else 0.0,
            float(torch.stack(difference).norm() / norm) if norm else 0.0,
        )

    @torch.no_grad()
    def _compute(
        self, tau: Mapping[str, Tensor], grads: Mapping[str, Tensor] | None, factors: FactorPlacement | None = None
    ) -> Tensor:
        """Returns the penalty, and adds its gradient to `grads` if it is not None. τ must have been checked.

        Args:
            tau: τ by parameter name.
            grads: Gradients to add to, by parameter name, or None.
            factors: Factors to use instead of the factors in the requested precision.
        """
        dtype, tf32 = self._dtype_for(tau), self.precision == "tf32" and factors is None
        factors = factors or self._factors_for(tau)
        batches = [batch for batch in self._batches if not batch.parameters.isdisjoint(tau)]
        values = [torch.zeros((), dtype=dtype, device=factors.device)]
        # An autocast context of the caller must not lower the precision of the penalty.
        with torch.autocast(factors.device.type, enabled=False), _tf32_products(enabled=tf32):
            for batch, operators in factors.place(batches):
                delta = gather_stack(tau, batch.joins, self._shapes).to(factors.device, dtype)
                H = batch.apply(delta.to(factors.dtype), operators).to(dtype)
                strength = self.strength / self.output_scale * batch.weight
                values.append(strength * torch.dot(delta.reshape(-1), H.reshape(-1)))
                if grads is not None:
                    accumulate(H, batch.joins, self._shapes, grads, 2 * strength)
        return torch.stack(values).sum()

    def _covered(self, tau: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return covered_parameters(tau, self._shapes, "regularizer")

    def _factors_for(self, tau: Mapping[str, Tensor]) -> FactorPlacement:
        device = self._device or next(iter(tau.values())).device
        dtype = torch.bfloat16 if self.precision == "bf16" else self._dtype_for(tau)
        if self._factors is None or (self._factors.device, self._factors.dtype) != (device, dtype):
            self._factors = FactorPlacement(dtype, device, offload=self._offload)
        return self._factors

    def _dtype_for(self, tau: Mapping[str, Tensor]) -> torch.dtype:
        return self._dtype or torch.promote_types(torch.float32, next(iter(tau.values())).dtype)

    def _resolve_strength(self, strength: float | None, preset: Preset | None) -> float:
        if strength is None and preset:
            return published_strength(self.curvatures[0].about.base)
        return resolve_strength(strength, metric=self.curvatures[0].about.metric)


@contextmanager
def _tf32_products(*, enabled: bool) -> Iterator[None]:
    """Temporarily allows TF32 in products of float32 matrices."""
    previous = torch.get_float32_matmul_precision()
    if enabled:
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        if enabled:
            torch.set_float32_matmul_precision(previous)


class _Penalty(torch.autograd.Function):
    """An autograd function that computes both the penalty and its gradient in the forward pass."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Tensor], names: tuple[str, ...], *tau: Tensor) -> Tensor:
        grads = [torch.zeros_like(tensor) for tensor in tau] if any(ctx.needs_input_grad) else []
        ctx.save_for_backward(*grads)
        return compute(dict(zip(names, tau, strict=True)), dict(zip(names, grads, strict=True)) if grads else None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(u.to(grad) * grad for grad in ctx.saved_tensors)


def _output_scale(inputs: Sequence[MergeInput]) -> float:
    """Returns the divisor s of the penalty: the scale of f, or 1 if no bundle records it (see `Regularizer`)."""
    about = inputs[0].curvature.about
    reference = scale_of_f(inputs)
    for bundle in inputs:
        if not (about.function.normalized or about.metric == "kl" or bundle.curvature.about.output_scale):
            instead = "the scale in the other bundles is used" if reference else "the penalty is not divided by a scale"
            problem = f"f is not normalised, and the bundle does not record the scale of f; {instead}"
            warnings.warn(f"{bundle.name}: {problem}. Estimate the bundle again", OutputScaleWarning, stacklevel=3)
    return reference or 1.0


def _without_own_task(inputs: Sequence[MergeInput], task: str) -> list[tuple[MergeInput, MergeInput]]:
    """Removes the task being trained from the bundles.

    Returns:
        Pairs of an original bundle and the same bundle without the task. If the task cannot be subtracted, a warning is
        issued, and merged bundles are not changed. Bundles for this task alone are left out.
    """
    _warn_of_common_classes(inputs, task)
    if not any(parent.task == task for bundle in inputs for parent in bundle.parents):
        return [(bundle, bundle) for bundle in inputs]
    others = [bundle for bundle in inputs if any(parent.task != task for parent in bundle.parents)]
    if not others:
        raise KfacpackError(
            f"the bundles contain only {task!r}, the task being trained, so there are no tasks to protect. "
            "Pass bundles of other tasks"
        )
    try:
        return [(inputs[position], bundle) for position, bundle in merge_without(inputs, [task])]
    except SubtractionError as error:
        warnings.warn(_own_task_message(task, str(error)), OwnTaskWarning, stacklevel=3)
        return [(bundle, bundle) for bundle in others]


def _warn_of_common_classes(inputs: Sequence[MergeInput], task: str) -> None:
    """Warns if a bundle contains another task with classes in common with `task`. Such a task cannot be subtracted."""
    protected = {
        parent.task: bundle for bundle in inputs for parent in bundle.parents if parent.task and parent.task != task
    }
    for other, bundle in protected.items():
        if share_classes(other, task):
            problem = f"{bundle.name} contains {other!r}, which has classes in common with {task!r}"
            remedy = f"Pass only bundles of tasks that have no classes in common with {task!r}"
            warnings.warn(_own_task_message(task, f"{problem}. {remedy}"), OwnTaskWarning, stacklevel=4)
            return


def _own_task_message(task: str, problem: str) -> str:
    return f"the penalty also restricts changes of f on {task!r}, the task being trained: {problem}"
