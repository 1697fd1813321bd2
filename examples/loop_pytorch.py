"""Uses a bundle as a penalty in a plain PyTorch training loop, for the linearised and for the full model.

    python examples/loop_pytorch.py [STEPS]

A network trained on the digits 0 to 4 learns 5 to 9, while a bundle keeps its outputs on 0 to 4 from changing. The
bundle contains no data, so it may come from another person.
"""

import copy
import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import kfacpack as kp
from two_tasks import Data, digits, evaluate, format_result, network


def linearised(net: nn.Module, new: Data, penalty: kp.Regularizer, steps: int) -> dict[str, Tensor]:
    """Trains τ in f + J τ; the network itself does not change."""
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
    """Trains a copy of the network; τ is the difference from the initial weights."""
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
    """Trains both ways, without and with the penalty."""
    known, new = digits()
    net = network(known)
    bundle = kp.estimate(net, known[0].split(128), samples=4)  # or kp.load("others.kfac")
    before, lin, results = net(known[0]).detach(), kp.linearize(net), {}
    for name, strength in (("without", 0.0), ("with the penalty", 0.1)):
        penalty = kp.Regularizer(bundle, strength=strength)
        tau = linearised(net, new, penalty, steps)
        results[f"linearised, {name}"] = evaluate(before, lin(known[0], tau), known, lin(new[0], tau), new)
        tuned = fine_tuned(net, new, penalty, steps)
        results[f"fine-tuned, {name}"] = evaluate(before, tuned(known[0]), known, tuned(new[0]), new)
    for name in sorted(results, reverse=True):
        print(format_result(name, results[name]))
    return results


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
