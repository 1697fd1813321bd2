"""The penalty of a bundle in a plain PyTorch loop: linearised, and in the model itself.

    python examples/loop_pytorch.py [STEPS]

A network that knows the digits 0 to 4 learns 5 to 9. A bundle, which could be of anybody's data, holds
its outputs on 0 to 4 where they are.
"""

import copy
import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import kfacpack as kp
from two_tasks import Data, digits, measured, network, said


def linearised(net: nn.Module, new: Data, penalty: kp.Regularizer, steps: int) -> dict[str, Tensor]:
    """Trains τ in f + J τ; the network stays as it is."""
    lin = kp.linearize(net)
    tau = {name: value.requires_grad_() for name, value in lin.zeros().items()}
    optimizer = torch.optim.AdamW(tau.values(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(lin(new[0], tau), new[1]).backward()
        penalty.add_grad(tau)  # 2 λ G τ, in closed form
        optimizer.step()
    return {name: value.detach() for name, value in tau.items()}


def fine_tuned(net: nn.Module, new: Data, penalty: kp.Regularizer, steps: int) -> nn.Module:
    """Trains a copy of the network itself; τ is how far it has come from where it began."""
    base = {name: parameter.detach() for name, parameter in net.named_parameters()}
    net = copy.deepcopy(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(net(new[0]), new[1]).backward()
        tau = {name: parameter.detach() - base[name] for name, parameter in net.named_parameters()}
        penalty.add_grad(tau, {name: parameter.grad for name, parameter in net.named_parameters()})
        optimizer.step()
    return net


def main(steps: int = 60) -> dict[str, dict[str, float]]:
    known, new = digits()
    net = network(known)
    bundle = kp.estimate(net, known[0].split(128), samples=4)  # or kp.load("others.kfac")
    before, lin, found = net(known[0]).detach(), kp.linearize(net), {}
    for name, strength in (("without", 0.0), ("with the penalty", 0.1)):
        penalty = kp.Regularizer(bundle, strength=strength)
        tau = linearised(net, new, penalty, steps)
        found[f"linearised, {name}"] = measured(before, lin(known[0], tau), known, lin(new[0], tau), new)
        tuned = fine_tuned(net, new, penalty, steps)
        found[f"fine-tuned, {name}"] = measured(before, tuned(known[0]), known, tuned(new[0]), new)
    for name in sorted(found, reverse=True):
        print(said(name, found[name]))
    return found


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
