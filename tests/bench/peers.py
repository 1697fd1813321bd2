"""The contenders of estimate.py. Each takes a model and its batches and returns the factors that it computed.

The model maps x to f (N, C). A peer gets the layers that it supports; the others are frozen. Its optional passes over
the data are switched off: check_deterministic and the counting of examples in curvlinops, files in kronfluence. The
package of a peer is imported when it runs.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import kfacpack as kp

if TYPE_CHECKING:
    from collections.abc import Callable

OUTPUT = 512


@dataclass
class ContenderResult:
    """The factors that a contender computed, and the number of parameters (scalars) that they cover."""

    matrices: list[Any]
    covered: int


def plain(model: nn.Module, batches: list[torch.Tensor]) -> ContenderResult:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for x in batches:
        f = model(x)
        torch.autograd.grad((torch.randn_like(f) * f).sum(), trainable)
    return ContenderResult([], 0)


def kfacpack(model: nn.Module, batches: list[torch.Tensor]) -> ContenderResult:
    """Every linear layer."""
    return estimated(model, batches, linear_parameters(model))


def kfacpack_same(model: nn.Module, batches: list[torch.Tensor]) -> ContenderResult:
    """The layers that the peers support."""
    layers = linear_layers(model)
    return estimated(
        model,
        batches,
        [f"{layer}.{name}" for layer in layers for name, _ in model.get_submodule(layer).named_parameters()],
    )


def estimated(model: nn.Module, batches: list[torch.Tensor], names: list[str]) -> ContenderResult:
    curvature = kp.estimate(model, batches, fisher="mc", samples=1, probe="orthogonal", params=names, seed=0)
    assert set(curvature.parameters) == set(names), "kfacpack did not cover the requested parameters"
    matrices = [matrix for block in curvature.blocks for _, matrix in block.structure.matrices()]
    state = dict(model.named_parameters())
    return ContenderResult(matrices, sum(state[name].numel() for name in names))


def linear_parameters(model: nn.Module) -> list[str]:
    """Names of all trainable matrices, including fused and bare ones, and of their biases."""
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    weights = [name for name, parameter in trainable.items() if parameter.ndim == 2]
    biases = {name.removesuffix("weight") + "bias" for name in weights if name.endswith("weight")}
    return [name for name in trainable if name in weights or name in biases]


def curvlinops_hooks(model: nn.Module, batches: list[torch.Tensor]) -> ContenderResult:
    from curvlinops import KFACLinearOperator

    layers = linear_layers(model)
    model = only(model, layers)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    operator = KFACLinearOperator(
        model,
        nn.MSELoss(reduction="sum"),
        parameters,
        [(x, x.new_zeros(len(x), OUTPUT)) for x in batches],
        check_deterministic=False,
        fisher_type="mc",
        mc_samples=1,
        kfac_approx="expand",
        num_per_example_loss_terms=1,
        separate_weight_and_bias=False,
        num_data=sum(map(len, batches)),
    )
    operator.compute_kronecker_factors()
    matrices = [*operator._input_covariances.values(), *operator._gradient_covariances.values()]
    assert len(matrices) == 2 * len(layers), "curvlinops left layers out"
    return ContenderResult(matrices, sum(parameter.numel() for parameter in parameters))


def kronfluence(model: nn.Module, batches: list[torch.Tensor]) -> ContenderResult:
    from kronfluence.analyzer import prepare_model
    from kronfluence.arguments import FactorArguments
    from kronfluence.factor.covariance import fit_covariance_matrices_with_loader
    from kronfluence.task import Task
    from kronfluence.utils.state import State

    layers = linear_layers(model)

    class Sampled(Task):
        """The gradient of <s, f> for random s, at the layers that kronfluence can track."""

        def compute_train_loss(self, batch: torch.Tensor, model: nn.Module, sample: bool = False) -> torch.Tensor:
            f = model(batch)
            return (torch.randn_like(f) * f).sum()

        def compute_measurement(self, batch: torch.Tensor, model: nn.Module) -> torch.Tensor:
            raise NotImplementedError

        def get_influence_tracked_modules(self) -> list[str]:
            return layers

    task = Sampled()
    covered = sum(p.numel() for layer in layers for p in model.get_submodule(layer).parameters())
    model = prepare_model(only(model, layers), task)
    state = State(cpu=batches[0].device.type == "cpu")
    fit: Any = fit_covariance_matrices_with_loader
    _, factors = fit(model, state, task, batches, FactorArguments(strategy="kfac"), disable_tqdm=True)
    matrices = [factor for group in factors.values() for factor in group.values() if factor.ndim == 2]
    assert len(matrices) == 2 * len(layers), "kronfluence left layers out"
    return ContenderResult(matrices, covered)


def linear_layers(model: nn.Module) -> list[str]:
    """Layers that both peers support. `out_proj` of nn.MultiheadAttention, a subclass of nn.Linear, is never called."""
    return [name for name, module in model.named_modules() if type(module) is nn.Linear and module.weight.requires_grad]


def only(model: nn.Module, layers: list[str]) -> nn.Module:
    """Copies the modules, because peers wrap and freeze them; shares the data; only these layers are trainable."""
    trainable = {id(parameter) for layer in layers for parameter in model.get_submodule(layer).parameters()}
    shared: dict[int, torch.Tensor] = {id(buffer): buffer for buffer in model.buffers()}
    shared |= {id(p): nn.Parameter(p.data, requires_grad=id(p) in trainable) for p in model.parameters()}
    return copy.deepcopy(model, shared)


CONTENDERS: dict[str, Callable[[nn.Module, list[torch.Tensor]], ContenderResult]] = {
    "plain": plain,
    "kfacpack": kfacpack,
    "kfacpack-same": kfacpack_same,
    "curvlinops-hooks": curvlinops_hooks,
    "kronfluence": kronfluence,
}
PEERS = ("curvlinops-hooks", "kronfluence")
