"""Training regimes: which parameters are trained, and with which model the loss is computed.

`linear` trains the linearised model f + J τ, in which task vectors add up. `full` trains the model itself at θ0 + τ.
`attention` also trains the model itself, but changes only parameters of attention layers, which keeps it closer to its
linearisation. `sparse` changes only the weights to which f is least sensitive; `masks.py` selects them.

Notation: N is the number of examples, C the width of f. τ and its gradient have the shapes of the parameters.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from kfacpack.errors import KfacpackError
from kfacpack.linearization.linearize import Linearized
from kfacpack.models.functional import at_least_float32, call_model, eval_mode, select_parameters

if TYPE_CHECKING:
    from kfacpack.format.vector_manifest import RegimeName as Name
    from kfacpack.linearization.linearize import Linearization
    from kfacpack.models.model import Batch, Model

    Tau = Mapping[str, Tensor]


class ForwardResult(ABC):
    """Output of one batch at θ0 + τ, with its backward pass to τ."""

    f: Tensor
    """(N, C), detached."""

    @abstractmethod
    def add_gradient(self, u: Tensor, gradients: dict[str, Tensor]) -> None:
        """Adds ∂<u, f>/∂τ to `gradients` in place. May be called once.

        Args:
            u: Gradient at f, (N, C).
            gradients: Gradients by parameter name.
        """


class Regime(ABC):
    """A model, the parameters that are trained, and the forward pass they are trained through.

    Args:
        model: The base model.
        params: Names or patterns of the parameters to train. Defaults to all that the model family does not freeze.
        compile: Whether torch.compile compiles the forward and backward pass; only in the regime `linear`.

    Raises:
        KfacpackError: If no parameter is selected, or `compile` is set in another regime.
    """

    name: ClassVar[Name]
    """Name on the command line and in vector files."""
    relative_step: ClassVar[float]
    """Target change of f in the first step, relative to its size, for the default learning rate."""
    default_lr: ClassVar[float | None] = None
    """Default learning rate; None derives it from the model."""
    default_clip: ClassVar[float | None] = None
    """Default limit of the norm of the gradient; None for no limit."""

    def __init__(self, model: Model, params: Iterable[str] | str | None = None, *, compile: bool = False):
        self.model = model
        self.parameters = self.choose_parameters(model, params)
        """Parameters that are trained, by state-dict name."""
        self.compiled = compile
        """Whether torch.compile compiles the forward and backward pass."""
        if compile and self.name != "linear":
            raise KfacpackError(f"--compile (compile): applies to the regime 'linear', got {self.name!r}")

    def choose_parameters(self, model: Model, params: Iterable[str] | str | None) -> dict[str, Tensor]:
        """Returns the parameters to train, by state-dict name; see `Regime` for the arguments."""
        return select_parameters(model.module, params, model.frozen)

    def _require_some(self, model: Model, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns parameters, of which there must be at least one."""
        if not parameters:
            remedy = "choose some with --params (params)"
            raise KfacpackError(f"regime {self.name!r}: {model.name} has no such parameters; {remedy}")
        return parameters

    @abstractmethod
    def forward(self, batch: Batch, tau: Tau) -> ForwardResult:
        """Returns f of a batch at θ0 + τ, not checked for NaN or Inf, which would synchronise with the device."""

    @abstractmethod
    def drift(self, batch: Batch, tau: Tau) -> tuple[Tensor, ForwardResult]:
        """Returns the change of f by τ, (N, C), and the forward result whose gradient is that of the change.

        The change is not checked for NaN or Inf.
        """


class LinearForward(ForwardResult):
    """Forward result of the linearised model."""

    def __init__(self, point: Linearization):
        self._point = point
        self.f = at_least_float32(point.f) + at_least_float32(point.change)

    def add_gradient(self, u: Tensor, gradients: dict[str, Tensor]) -> None:
        """Adds Jᵀ u to `gradients` in place."""
        self._point.gradient(u.to(self._point.f), into=gradients)


class LinearRegime(Regime):
    """Trains the linearised model f + J τ."""

    name = "linear"
    relative_step = 1.0

    def __init__(self, model: Model, params: Iterable[str] | str | None = None, *, compile: bool = False):
        super().__init__(model, params, compile=compile)
        self._linearized = Linearized(model.module, model.forward, self.parameters, compile=compile)

    def forward(self, batch: Batch, tau: Tau) -> LinearForward:
        """Returns f + J τ of a batch."""
        return LinearForward(self._linearized.at(batch, tau, finite=False))

    def drift(self, batch: Batch, tau: Tau) -> tuple[Tensor, LinearForward]:
        """Returns J τ, (N, C), and the forward result."""
        point = self._linearized.at(batch, tau, finite=False)
        return at_least_float32(point.change), LinearForward(point)


class FullForward(ForwardResult):
    """Forward result of the model itself at θ0 + τ."""

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
    """Trains the model itself at θ0 + τ."""

    name: ClassVar[Name] = "full"
    relative_step = 0.1

    def __init__(self, model: Model, params: Iterable[str] | str | None = None, *, compile: bool = False):
        super().__init__(model, params, compile=compile)
        self._function = _FunctionalModule(model)

    def forward(self, batch: Batch, tau: Tau) -> FullForward:
        """Returns f of a batch with the weights θ0 + τ."""
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
    """Wraps f as a module, so that `functional_call` can replace the model's weights."""

    def __init__(self, model: Model):
        super().__init__()
        self.module = model.module
        self._forward = model.forward

    def forward(self, batch: Batch) -> Tensor:
        return call_model(self._forward, batch, finite=False)


ATTENTION = re.compile(r"(^|\.|_)(self_?|encdec|cross_?)?(attn|attention)(\.|_|$)", re.IGNORECASE)
"""Matches parameters of attention layers: attn, attention, SelfAttention, EncDecAttention."""
NORM = re.compile("norm", re.IGNORECASE)
"""Matches parameters of normalisation layers, also inside attention layers."""


class AttentionRegime(FullRegime):
    """Trains the model itself, by default only parameters of attention layers other than norms.

    Raises:
        KfacpackError: If the model has no such parameters.
    """

    name = "attention"

    def choose_parameters(self, model: Model, params: Iterable[str] | str | None) -> dict[str, Tensor]:
        """Returns the chosen parameters, or those of attention layers if `params` is None."""
        parameters = super().choose_parameters(model, params)
        if params is None:
            parameters = {
                name: parameter
                for name, parameter in parameters.items()
                if ATTENTION.search(name) and not NORM.search(name)
            }
        return self._require_some(model, parameters)


LAYERS = re.compile("linear|conv|norm|attention|attn", re.IGNORECASE)
"""Matches the classes of layers whose weights the regime `sparse` may train."""


class SparseRegime(FullRegime):
    """Trains the model itself, but only some of the weights of linear, attention, convolution and norm layers.

    Which ones is decided by the masks of the trainer. The default learning rate and limit of the gradient are those of
    TaLoS.

    Raises:
        KfacpackError: If the model has no such parameters.
    """

    name = "sparse"
    default_lr = 1e-5
    default_clip = 1.0

    def choose_parameters(self, model: Model, params: Iterable[str] | str | None) -> dict[str, Tensor]:
        """Returns the chosen parameters, or the weights of the layers above if `params` is None."""
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
"""Regimes by name."""
