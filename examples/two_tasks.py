"""Shared by the training loop examples: a network trained on the digits 0 to 4, which then learns 5 to 9."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

Data = tuple[Tensor, Tensor]


def digits() -> tuple[Data, Data]:
    """Returns the digits 0 to 4 and the digits 5 to 9, each as x, (N, 64), and labels, (N,)."""
    bunch = load_digits()
    x, labels = torch.tensor(bunch.data, dtype=torch.float32) / 16, torch.tensor(bunch.target)
    known = labels < 5
    return (x[known], labels[known]), (x[~known], labels[~known])


def network(known: Data) -> nn.Module:
    """Returns a network trained on the known digits; f is its logits, (N, 10)."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        cross_entropy(net(known[0]), known[1]).backward()
        optimizer.step()
    return net


@torch.no_grad()
def evaluate(before: Tensor, after: Tensor, known: Data, new_outputs: Tensor, new: Data) -> dict[str, float]:
    """Evaluates a trained network.

    Args:
        before: f of the known digits before training, (N, 10).
        after: f of the known digits after training, (N, 10).
        known: The known digits.
        new_outputs: f of the new digits after training.
        new: The new digits.

    Returns:
        The loss on the new digits, the drift of f on the known ones, and the share of them still classified correctly.
    """
    return {
        "loss": float(cross_entropy(new_outputs, new[1])),
        "drift": float((after - before).square().sum(1).mean()),
        "kept": float((after.argmax(1) == known[1]).float().mean()),
    }


def format_result(name: str, result: dict[str, float]) -> str:
    """Formats the result of one training run as a line of text."""
    kept = f"drift of f on 0 to 4: {result['drift']:8.3f}   accuracy on 0 to 4: {result['kept']:4.0%}"
    return f"{name:32}loss on 5 to 9: {result['loss']:.3f}   {kept}"
