"""The penalty of a bundle in a loop of Hugging Face accelerate, in one process or in several.

    python examples/loop_accelerate.py [EPOCHS]
    accelerate launch --num_processes 2 examples/loop_accelerate.py    # torchrun will do as well

A network that knows the digits 0 to 4 learns 5 to 9; a bundle holds its outputs on 0 to 4 where they are. The penalty
needs no data, so every process computes the same one: its gradient is added after those of the data have been averaged.
"""

import sys

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import kfacpack as kp
from two_tasks import digits, measured, network, said


def train(accelerator: Accelerator, bundle: kp.Curvature, strength: float, epochs: int) -> dict[str, float]:
    known, new = digits()
    net = network(known)
    before = net(known[0]).detach()
    penalty = kp.Regularizer(bundle, strength=strength)
    penalty.check(net)  # the bundle is of these weights
    base = {name: parameter.detach().clone().to(accelerator.device) for name, parameter in net.named_parameters()}

    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(
        net, optimizer, DataLoader(TensorDataset(*new), batch_size=64, shuffle=True)
    )
    for _ in range(epochs):
        for x, labels in loader:
            with accelerator.accumulate(model):
                accelerator.backward(cross_entropy(model(x), labels))
                if accelerator.sync_gradients:  # the step comes now: gradients are summed up, and the same everywhere
                    parameters = dict(accelerator.unwrap_model(model).named_parameters())
                    tau = {name: parameter.detach() - base[name] for name, parameter in parameters.items()}
                    penalty.add_grad(tau, {name: parameter.grad for name, parameter in parameters.items()})
                optimizer.step()
                optimizer.zero_grad()
    trained = accelerator.unwrap_model(model).cpu()
    return measured(before, trained(known[0]), known, trained(new[0]), new)


def main(epochs: int = 3) -> dict[str, dict[str, float]]:
    accelerator = Accelerator()
    known, _ = digits()
    # In several processes, each takes its share of the batches, and all get the whole bundle.
    bundle = kp.estimate(network(known), known[0].split(128), samples=4)  # or kp.load("others.kfac")
    found = {}
    for name, strength in (("without", 0.0), ("with the penalty", 1.0)):
        found[name] = train(accelerator, bundle, strength, epochs)
        accelerator.print(said(name, found[name]))
    accelerator.end_training()
    return found


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
