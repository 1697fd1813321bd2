"""Training regimes: which parameters are trained, and with which model the loss is computed.

`linear` trains the linearised model f + J τ, in which task vectors add up. `full` trains the model itself at θ0 + τ.
`attention` also trains the model itself, but changes only parameters of attention layers, which keeps it closer to its
linearisation. `sparse` changes only the weights to which f is least sensitive.

Notation: N is the number of examples, and C is the width of f. τ and its gradient have the shapes of the parameters.

Masks of the regime `sparse` (TaLoS) select the weights to which f is least sensitive. Only these weights are trained.
The score of a weight is the square of the derivative of a logit with respect to that weight. The logit is sampled from
the prediction, and the squares are summed over examples of the task's validation split. There are four rounds. Round k
keeps a fraction keep^(k/4) of all weights: those with the lowest scores. Weights that are not kept are multiplied by
0.1 in later rounds and are not considered again.

The diagonal elements of G in a bundle can also serve as scores. For the weight (i, j) of a Kronecker block, the
element is B_ii A_jj. Masks can therefore be computed from the bundles of other tasks without data.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from hashlib import sha256
from math import ceil
from numbers import Real
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from kfacpack._random import CounterRandom
from kfacpack.curvature.blocks import scatter
from kfacpack.curvature.matrices.components import raw_bytes
from kfacpack.errors import KfacpackError, abbreviate, printable
from kfacpack.estimation import distributed
from kfacpack.linearization.linearize import Linearized
from kfacpack.models.data_loading import prepared_batches
from kfacpack.models.functional import at_least_float32, call_model, eval_mode, select_parameters, zeros_like_parameters
from kfacpack.models.heads import CompletionHead
from kfacpack.tasks.task import own_classes, sample_indices

if TYPE_CHECKING:
    from kfacpack.format.vector_manifest import RegimeName as Name
    from kfacpack.linearization.linearize import Linearization
    from kfacpack.models.model import Batch, Model

    Tau = Mapping[str, Tensor]
    from kfacpack.curvature.blocks import CurvatureBlock, ParameterShapes
    from kfacpack.format.units import OnProgress
    from kfacpack.models.heads import Head
    from kfacpack.tasks.task import Task
    from kfacpack.training.regularizer import Regularizer


class ForwardResult(ABC):
    """The output f for one batch at θ0 + τ, with a backward pass that computes gradients with respect to τ."""

    f: Tensor
    """The output f for the batch, (N, C), detached from the autograd graph."""

    @abstractmethod
    def add_gradient(self, u: Tensor, gradients: dict[str, Tensor]) -> None:
        """Adds ∂<u, f>/∂τ to `gradients` in place. May be called only once.

        Args:
            u: Gradient with respect to f, (N, C).
            gradients: Gradients by parameter name.
        """


class Regime(ABC):
    """Base class of regimes. A regime consists of a model, the parameters to train, and a differentiable forward pass.

    Args:
        model: The base model.
        params: Names or patterns of the parameters to train. Defaults to all parameters that the model family does not
            freeze.
        compile: Whether to compile the forward and backward pass with torch.compile. Supported only in the regime
            `linear`.

    Raises:
        KfacpackError: If no parameter is selected, or `compile` is set in a regime other than `linear`.
    """

    name: ClassVar[Name]
    """Name of the regime on the command line and in vector files."""
    relative_step: ClassVar[float]
    """Relative change in f that the first step makes at a learning rate derived from the model."""
    default_lr: ClassVar[float | None] = None
    """Default learning rate, or None if it is derived from the model."""
    default_clip: ClassVar[float | None] = None
    """Default maximum norm of the gradient, or None for no limit."""

    def __init__(self, model: Model, params: Iterable[str] | str | None = None, *, compile: bool = False):
        self.model = model
        self.parameters = self.choose_parameters(model, params)
        """Parameters that are trained, by state-dict name."""
        self.compiled = compile
        """Whether the forward and backward pass are compiled with torch.compile."""
        if compile and self.name != "linear":
            raise KfacpackError(f"--compile (compile) requires the regime 'linear', got {self.name!r}")

    def choose_parameters(self, model: Model, params: Iterable[str] | str | None) -> dict[str, Tensor]:
        """Returns the parameters to train, by state-dict name; see `Regime` for the arguments."""
        return select_parameters(model.module, params, model.frozen)

    def _require_some(self, model: Model, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the parameters after checking that there is at least one."""
        if not parameters:
            problem = f"{model.name} has none of the parameters that this regime trains"
            raise KfacpackError(f"regime {self.name!r}: {problem}; choose parameters with --params (params)")
        return parameters

    @abstractmethod
    def forward(self, batch: Batch, tau: Tau) -> ForwardResult:
        """Returns the output f for a batch at θ0 + τ.

        The values are not checked for NaN or Inf, because the check would synchronise with the device.
        """

    @abstractmethod
    def drift(self, batch: Batch, tau: Tau) -> tuple[Tensor, ForwardResult]:
        """Returns the change in f caused by τ, (N, C), and the forward result at θ0 + τ.

        The change and f have the same derivative with respect to τ, so `ForwardResult.add_gradient` applies to both.
        The change is not checked for NaN or Inf.
        """


class LinearForward(ForwardResult):
    """The output f + J τ of the linearised model for one batch, with its backward pass."""

    def __init__(self, point: Linearization):
        self._point = point
        self.f = at_least_float32(point.f) + at_least_float32(point.change)

    def add_gradient(self, u: Tensor, gradients: dict[str, Tensor]) -> None:
        """Adds Jᵀ u to `gradients` in place."""
        self._point.gradient(u.to(self._point.f), into=gradients)


class LinearRegime(Regime):
    """The regime that trains the linearised model f + J τ."""

    name = "linear"
    relative_step = 1.0

    def __init__(self, model: Model, params: Iterable[str] | str | None = None, *, compile: bool = False):
        super().__init__(model, params, compile=compile)
        self._linearized = Linearized(model.module, model.forward, self.parameters, compile=compile)

    def forward(self, batch: Batch, tau: Tau) -> LinearForward:
        """Returns f + J τ for a batch."""
        return LinearForward(self._linearized.at(batch, tau, finite=False))

    def drift(self, batch: Batch, tau: Tau) -> tuple[Tensor, LinearForward]:
        """Returns J τ, (N, C), and the forward result."""
        point = self._linearized.at(batch, tau, finite=False)
        return at_least_float32(point.change), LinearForward(point)


class FullForward(ForwardResult):
    """The output of the model itself at θ0 + τ for one batch, with its backward pass."""

    def __init__(self, output: Tensor, weights: Mapping[str, Tensor]):
        self._output = output
        self._weights = weights
        self.f = at_least_float32(output.detach())

    def add_gradient(self, u: Tensor, gradients: dict[str, Tensor]) -> None:
        """Computes the gradient of <u, f> by autograd and adds it to `gradients` in place."""
        if self._output.grad_fn is None:
            return  # f does not depend on any of the parameters
        leaves = list(self._weights.values())
        grads = torch.autograd.grad(self._output, leaves, u.to(self._output.dtype), allow_unused=True)
        for name, gradient in zip(self._weights, grads, strict=True):
            if gradient is not None:
                gradients[name].add_(gradient)


class FullRegime(Regime):
    """The regime that trains the model itself at θ0 + τ."""

    name: ClassVar[Name] = "full"
    relative_step = 0.1

    def __init__(self, model: Model, params: Iterable[str] | str | None = None, *, compile: bool = False):
        super().__init__(model, params, compile=compile)
        self._function = _FunctionalModule(model)

    def forward(self, batch: Batch, tau: Tau) -> FullForward:
        """Evaluates f on a batch with the weights θ0 + τ."""
        weights = {
            name: (parameter.detach() + tau[name].detach()).to(parameter.dtype).requires_grad_()
            for name, parameter in self.parameters.items()
        }
        inside = {f"module.{name}": weight for name, weight in weights.items()}
        with eval_mode(self.model.module, {}):
            return FullForward(functional_call(self._function, inside, (batch,)), weights)

    def drift(self, batch: Batch, tau: Tau) -> tuple[Tensor, FullForward]:
        """Returns f(θ0 + τ) − f(θ0), (N, C), and the forward result at θ0 + τ."""
        with torch.no_grad(), eval_mode(self.model.module, {}):
            base_output = at_least_float32(call_model(self.model.forward, batch, finite=False).detach())
        result = self.forward(batch, tau)
        return result.f - base_output, result


class _FunctionalModule(nn.Module):
    """A module that computes f, so that `functional_call` can replace the model's weights."""

    def __init__(self, model: Model):
        super().__init__()
        self.module = model.module
        self._forward = model.forward

    def forward(self, batch: Batch) -> Tensor:
        return call_model(self._forward, batch, finite=False)


ATTENTION = re.compile(r"(^|\.|_)(self_?|encdec|cross_?)?(attn|attention)(\.|_|$)", re.IGNORECASE)
"""Matches names of parameters in attention layers, such as attn, attention, SelfAttention and EncDecAttention."""
NORM = re.compile("norm", re.IGNORECASE)
"""Matches names of parameters in normalisation layers, including those inside attention layers."""


class AttentionRegime(FullRegime):
    """The regime that trains the model itself, by default only the parameters of attention layers except norms.

    Raises:
        KfacpackError: If no parameter is selected.
    """

    name = "attention"

    def choose_parameters(self, model: Model, params: Iterable[str] | str | None) -> dict[str, Tensor]:
        """Returns the parameters that `params` selects. By default, returns those of attention layers except norms."""
        parameters = super().choose_parameters(model, params)
        if params is None:
            parameters = {
                name: parameter
                for name, parameter in parameters.items()
                if ATTENTION.search(name) and not NORM.search(name)
            }
        return self._require_some(model, parameters)


LAYERS = re.compile("linear|conv|norm|attention|attn", re.IGNORECASE)
"""Matches class names of the layers whose weights the regime `sparse` trains by default."""


class SparseRegime(FullRegime):
    """The regime that trains only some weights of the model itself.

    The masks of the trainer select these weights. By default, they are selected from linear, attention, convolution and
    normalisation layers. The default learning rate and the default maximum norm of the gradient are those of TaLoS.

    Raises:
        KfacpackError: If no weight is selected.
    """

    name = "sparse"
    default_lr = 1e-5
    default_clip = 1.0

    def choose_parameters(self, model: Model, params: Iterable[str] | str | None) -> dict[str, Tensor]:
        """Returns the parameters that `params` selects. By default, returns the weights of layers matching `LAYERS`."""
        parameters = super().choose_parameters(model, params)
        if params is None:
            weights = {
                f"{prefix}.{name}" if prefix else name
                for prefix, module in model.module.named_modules()
                if LAYERS.search(type(module).__name__)
                for name, _ in module.named_parameters(recurse=False)
                if name.endswith("weight")
            }
            parameters = {name: parameter for name, parameter in parameters.items() if name in weights}
        return self._require_some(model, parameters)


REGIMES: dict[str, type[Regime]] = {
    regime.name: regime for regime in (LinearRegime, FullRegime, AttentionRegime, SparseRegime)
}
"""Regime classes by name."""


KEEP = 0.1
"""Default share of the weights that the regime `sparse` trains."""
ROUNDS = 4
"""Number of rounds in which the masks are calibrated."""
OUTSIDE = 0.1
"""Factor by which weights that are not kept are multiplied in later rounds."""
CALIBRATION_EXAMPLES = 256
"""Maximum number of validation examples used to calibrate the masks."""


@dataclass(frozen=True, eq=False)
class SparsityMasks:
    """Masks that select the weights that the regime `sparse` trains."""

    tensors: dict[str, Tensor]
    """Boolean tensors by parameter name, which are True for the weights to train."""
    settings: dict[str, float | str]
    """Settings of the selection, which are recorded in the vector's file."""

    @property
    def digest(self) -> str:
        """SHA-256 of the masks."""
        digest = sha256()
        for name, mask in self.tensors.items():
            digest.update(name.encode())
            digest.update(raw_bytes(mask))
        return digest.hexdigest()


def require_share(keep: float) -> float:
    """Returns `keep` after checking that it is a valid share of the weights.

    Raises:
        KfacpackError: If `keep` is not a number greater than 0 and at most 1.
    """
    if isinstance(keep, bool) or not isinstance(keep, Real) or not 0 < keep <= 1:
        raise KfacpackError(f"--keep (keep) {keep}: expected a share of the weights, greater than 0 and at most 1")
    return keep


def lowest(scores: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """Returns masks that select the elements with the lowest scores in all tensors together.

    Args:
        scores: Scores by parameter name. Elements with infinite scores are selected after all others.
        count: Number of elements to select, at least 1. Among equal scores, the first elements are selected.

    Returns:
        Boolean tensors by name.
    """
    flat = torch.cat([tensor.flatten() for tensor in scores.values()])
    threshold = flat.kthvalue(count).values
    selected = flat < threshold
    ties = (flat == threshold).nonzero().squeeze(1)
    selected[ties[: count - int(selected.sum())]] = True
    parts = selected.split([tensor.numel() for tensor in scores.values()])
    return {name: part.reshape(scores[name].shape) for name, part in zip(scores, parts, strict=True)}


def calibrated_masks(
    regime: Regime,
    head: Head,
    task: Task,
    keep: float = KEEP,
    seed: int = 0,
    on_progress: OnProgress = lambda done, total: None,
) -> SparsityMasks:
    """Selects the weights with the smallest squared gradients on validation examples.

    Args:
        regime: The regime, which defines the model and the weights to select from.
        head: Head of the task.
        task: The task; its split "validation" is used.
        keep: Share of the weights to train.
        seed: Seed for choosing examples and sampling logits.
        on_progress: Called with the number of examples processed and the total number, both summed over all rounds.

    Returns:
        The masks.

    Raises:
        KfacpackError: If the task has no classes or no validation split, or if f does not depend on the weights.
    """
    keep = require_share(keep)
    if isinstance(head, CompletionHead):
        problem = f"{printable(task.name)} has completions instead of classes, so no logit can be sampled"
        raise KfacpackError(f"regime 'sparse': {problem}. Pass bundles with --mask (mask)")
    own = own_classes(task)
    head = head if own is None else head.of_classes(own)
    size = len(split := task.split("validation"))
    numbers = sample_indices(size, min(size, CALIBRATION_EXAMPLES), seed)
    total = sum(parameter.numel() for parameter in regime.parameters.values())
    masks = {name: torch.ones_like(parameter, dtype=torch.bool) for name, parameter in regime.parameters.items()}
    for number in range(ROUNDS):
        # With this τ, the weights that are not kept are multiplied by `OUTSIDE`.
        tau = {name: (OUTSIDE - 1) * regime.parameters[name].detach() * ~mask for name, mask in masks.items()}
        draws = CounterRandom(f"sampled logits, round {number}", seed).uniform(len(numbers))
        scores = zeros_like_parameters(regime.parameters)
        for position, (_, batch) in enumerate(prepared_batches(regime.model, split, task.name, numbers, 1)):
            _add_squared_gradients(regime, head, batch, tau, float(draws[position]), scores)
            on_progress(number * len(numbers) + position + 1, ROUNDS * len(numbers))
        if number == 0 and not any(bool(score.any()) for score in scores.values()):
            problem = "the gradients of all weights are zero"
            raise KfacpackError(f"regime 'sparse': {problem}. Choose other weights with --params (params)")
        ranked = {name: score.masked_fill(~masks[name], torch.inf) for name, score in scores.items()}
        masks = lowest(ranked, max(1, ceil(total * keep ** ((number + 1) / ROUNDS))))
    return _broadcast(masks, {"keep": keep, "mask": f"{len(numbers)} examples of {split.source.split}"})


def _add_squared_gradients(
    regime: Regime, head: Head, batch: Batch, tau: Mapping[str, Tensor], draw: float, scores: dict[str, Tensor]
) -> None:
    """Samples a logit of one example and adds the squares of its gradients to `scores`.

    `draw` is a random number from 0 to 1 that determines which logit is sampled.
    """
    result = regime.forward(batch, tau)
    f = result.f.requires_grad_()
    logits = head.logits(f)[0]
    steps = logits.detach().double().softmax(0).cumsum(0)
    chosen = min(int((steps < draw * steps[-1]).sum()), len(logits) - 1)
    (u,) = torch.autograd.grad(logits[chosen], f)
    gradients = {name: torch.zeros_like(score) for name, score in scores.items()}
    result.add_gradient(u, gradients)
    for name, gradient in gradients.items():
        scores[name].addcmul_(gradient, gradient)


def masks_from_bundles(regime: Regime, bundles: Regularizer, keep: float = KEEP) -> SparsityMasks:
    """Selects the weights with the smallest diagonal elements of G, without data.

    Args:
        regime: The regime, which defines the model and the weights to select from.
        bundles: Bundles that have been checked against the model and do not contain the task being trained.
        keep: Share of the weights of `regime` to train. Weights that no bundle covers are not trained.

    Returns:
        The masks.

    Raises:
        KfacpackError: If the bundles cover fewer weights than are to be trained.
    """
    keep = require_share(keep)
    scores = {
        name: torch.full_like(parameter, torch.inf, dtype=torch.float32)
        for name, parameter in regime.parameters.items()
    }
    for curvature in bundles.curvatures:
        shapes = {parameter.name: parameter.shape for parameter in curvature.about.base.parameters}
        for block in curvature.blocks:
            for name, values in block_diagonal(block, shapes).items():
                if name in scores:
                    previous = scores[name].masked_fill(scores[name].isinf(), 0)
                    scores[name] = previous + values.to(previous).clamp(min=0)
    count = max(1, ceil(keep * sum(score.numel() for score in scores.values())))
    covered = sum(int(score.isfinite().sum()) for score in scores.values())
    if covered < count:
        missing = abbreviate([name for name, score in scores.items() if bool(score.isinf().any())], limit=3)
        problem = f"the bundles cover {covered:,} weights, but {count:,} weights are to be trained"
        problem += f"; parameters that are not fully covered: {missing}"
        remedy = "Pass a smaller --keep (keep), or choose weights with --params (params)"
        raise KfacpackError(f"--mask (mask): {problem}. {remedy}")
    digests = ", ".join(digest[:16] for digest in bundles.digests)
    return _broadcast(lowest(scores, count), {"keep": keep, "mask": f"bundles {digests}"})


def block_diagonal(block: CurvatureBlock, shapes: ParameterShapes) -> dict[str, Tensor]:
    """Returns the diagonal of a block's G by parameter name, as tensors with the shapes of the parameters.

    Args:
        block: The block.
        shapes: Shapes of the parameters, by name.
    """
    rows, columns = block.join.rows, block.join.columns
    total = torch.zeros(rows * columns, dtype=torch.float64)
    for weight, matrices in zip(block.structure.weights, zip(*block.structure.sides, strict=True), strict=True):
        diagonals = [matrix.operator(torch.float64).diagonal(matrix.side) for matrix in matrices]
        total += weight * reduce(torch.kron, diagonals).cpu()
    return scatter(total.reshape(rows, columns), block.join, shapes)


def _broadcast(masks: dict[str, Tensor], settings: dict[str, float | str]) -> SparsityMasks:
    """Sends the masks of the first process to all other processes, because rounding may make the masks differ."""
    bytes_of = {name: mask.to(torch.uint8) for name, mask in masks.items()}
    distributed.broadcast(list(bytes_of.values()))
    return SparsityMasks({name: values.bool() for name, values in bytes_of.items()}, settings)
