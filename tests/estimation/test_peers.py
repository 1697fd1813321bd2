"""Factors equal the type-2 factors of curvlinops, on models that it supports."""

from __future__ import annotations

import pytest
import torch
from estimation.nets import Transformer, deep_linear, images, mlp, seeded, vectors
from torch import nn

import kfacpack as kp

curvlinops = pytest.importorskip("curvlinops")


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3, 2, 1), nn.Linear(4 * 16, 3)
        self.double()

    def forward(self, x):
        return self.head(self.conv(x).tanh().flatten(1))


NETS = {
    "deep-linear": (deep_linear, lambda: vectors(5)),
    "mlp": (mlp, lambda: vectors(5)),
    "mlp-no-bias": (lambda: mlp(False), lambda: vectors(5)),
    "convolution": (Conv, images),
    "attention": (lambda: Transformer("split"), images),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_exact_factors_equal_those_of_curvlinops(net, sharing):
    make, inputs = NETS[net]
    model, x = seeded(make), inputs()
    layers = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.rpartition(".")[0] in layers)
    ours = kp.estimate(model, [x], fisher="exact", sharing=sharing)
    operator = curvlinops.KFACLinearOperator(
        model,
        # The squared error, whose second derivative is 2; and a sum over the examples, where ours is a mean.
        nn.MSELoss(reduction="sum"),
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        [(x, torch.zeros(len(x), 3, dtype=x.dtype))],
        fisher_type="type-2",
        kfac_approx=sharing,
        separate_weight_and_bias=False,
        check_deterministic=False,
    )
    operator.compute_kronecker_factors()
    assert layers
    for layer in layers:
        block = next(block for block in ours.blocks if block.name == f"{layer}.weight")
        matrices = dict(block.structure.matrices())
        expected = torch.kron(operator._gradient_covariances[layer], operator._input_covariances[layer]) / 2 / len(x)
        ours_whole = torch.kron(matrices["B"].dense(torch.float64), matrices["A"].dense(torch.float64))
        torch.testing.assert_close(ours_whole, expected, rtol=1e-9, atol=1e-12)
