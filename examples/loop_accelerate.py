"""Uses a bundle as a penalty in a training loop of Hugging Face Accelerate, in one or several processes.

    python examples/loop_accelerate.py [EPOCHS]
    accelerate launch --num_processes 2 examples/loop_accelerate.py    # torchrun works as well

A network trained on the digits 0 to 4 learns 5 to 9, while a bundle keeps its outputs on 0 to 4 from changing. The
penalty needs no data, so every process computes the same one; its gradient is added after the gradients of the data
have been averaged.
"""

import sys

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import kfacpack as kp
from two_tasks import digits, evaluate, format_result, network


def train(accelerator: Accelerator, bundle: kp.Curvature, strength: float, epochs: int) -> dict[str, float]:
    """Trains on the new digits and evaluates the result."""
    known, new = digits()
    net = network(known)
    before = net(known[0]).detach()
    penalty = kp.Regularizer(bundle, strength=strength)
    penalty.check(net)  # raises if the bundle belongs to other weights
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
                if accelerator.sync_gradients:  # gradients are accumulated and averaged over processes
                    parameters = dict(accelerator.unwrap_model(model).named_parameters())
                    tau = {name: parameter.detach() - base[name] for name, parameter in parameters.items()}
                    penalty.add_grad(tau, {name: parameter.grad for name, parameter in parameters.items()})
                optimizer.step()
                optimizer.zero_grad()
    trained = accelerator.unwrap_model(model).cpu()
    return evaluate(before, trained(known[0]), known, trained(new[0]), new)


def main(epochs: int = 3) -> dict[str, dict[str, float]]:
    """Trains without and with the penalty."""
    accelerator = Accelerator()
    known, _ = digits()
    # With several processes, each handles a part of the batches, and all receive the complete bundle.
    bundle = kp.estimate(network(known), known[0].split(128), samples=4)  # or kp.load("others.kfac")
    results = {}
    for name, strength in (("without", 0.0), ("with the penalty", 1.0)):
        results[name] = train(accelerator, bundle, strength, epochs)
        accelerator.print(format_result(name, results[name]))
    accelerator.end_training()
    return results


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
