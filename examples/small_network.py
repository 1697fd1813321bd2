"""Writes a bundle by hand: the exact curvature of a small network, factor by factor.

    python examples/small_network.py small.kfac

The network is a two-layer classifier; `spec/README.md` defines its Kronecker factors. The weights are written beside
the bundle (`small.safetensors`), so that `kfacpack verify --model` can compare them.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

import kfacpack as kp

EXAMPLES, INPUTS, HIDDEN, OUTPUTS = 256, 16, 32, 10


def linear_block(name: str, layer: nn.Linear, inputs: torch.Tensor, gradients: torch.Tensor) -> kp.CurvatureBlock:
    """Returns the block of a linear layer.

    Args:
        name: Name of the layer.
        layer: The layer.
        inputs: Inputs of the layer, (N, in).
        gradients: Gradients of each of the C outputs of f with respect to the layer's output, (C, N, out).
    """
    ones = torch.ones(len(inputs), 1)
    a = torch.cat([inputs, ones], dim=1)  # the bias is an additional column of the weight with constant input 1
    g = gradients.flatten(0, 1)
    A = kp.Dense.of(a.T @ a / len(inputs), examples=len(inputs), positions=len(inputs))
    B = kp.Dense.of(g.T @ g / len(inputs), examples=len(inputs), positions=len(inputs))
    weight = kp.Piece(parameter=f"{name}.weight")
    bias = kp.Piece(parameter=f"{name}.bias", at=(0, layer.in_features))
    join = kp.Join(rows=layer.out_features, columns=layer.in_features + 1, pieces=(weight, bias))
    return kp.CurvatureBlock(f"{name}.weight", "linear", join, kp.Kronecker.of(B, A))


def main(path: Path) -> None:
    """Writes the bundle and the weights, and compares predicted with measured drift."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUTPUTS)).requires_grad_(False)
    x = torch.randn(EXAMPLES, INPUTS)

    first = model[0](x).requires_grad_()
    hidden = model[1](first)
    f = model[2](hidden)
    at_f = torch.eye(OUTPUTS)[:, None].expand(OUTPUTS, EXAMPLES, OUTPUTS)
    (at_first,) = torch.autograd.grad(f, first, at_f, is_grads_batched=True)

    about = kp.About(
        base=kp.identify(model, list(model.state_dict()), family="example", name="small-network"),
        function=kp.Function(output="logits", normalized=False, width=OUTPUTS),
        estimate=kp.Estimate(fisher="exact"),
        source=kp.Source(task="gaussian-noise", split="train", examples=EXAMPLES, dataset_size=EXAMPLES),
    )
    blocks = [linear_block("0", model[0], x, at_first), linear_block("2", model[2], hidden.detach(), at_f)]
    path.parent.mkdir(parents=True, exist_ok=True)
    kp.Curvature(blocks, about).save(path)
    save_file(model.state_dict(), path.with_suffix(".safetensors"))

    curvature = kp.load(path)
    tau = {name: 0.01 * torch.randn_like(value) for name, value in model.state_dict().items()}
    changed = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUTPUTS)).requires_grad_(False)
    changed.load_state_dict({name: value + tau[name] for name, value in model.state_dict().items()})
    print(f"drift predicted by the bundle: {curvature.quadratic(tau):.5f}")
    print(f"drift measured on the data:    {(changed(x) - f).square().sum(dim=1).mean():.5f}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
