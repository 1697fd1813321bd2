"""For the examples of loops: a network that knows the digits 0 to 4, and is to learn 5 to 9."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

Data = tuple[Tensor, Tensor]


def digits() -> tuple[Data, Data]:
    """What it knows and what it is to learn: each x (N, 64) and labels (N,)."""
    found = load_digits()
    x, labels = torch.tensor(found.data, dtype=torch.float32) / 16, torch.tensor(found.target)
    known = labels < 5
    return (x[known], labels[known]), (x[~known], labels[~known])


def network(known: Data) -> nn.Module:
    """f is its logits, (N, 10)."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        cross_entropy(net(known[0]), known[1]).backward()
        optimizer.step()
    return net


@torch.no_grad()
def measured(before: Tensor, after: Tensor, known: Data, learnt: Tensor, new: Data) -> dict[str, float]:
    """How well the new digits are learnt, and what became of the known ones.

    f of the known ones before and after (N, 10), of the new ones after.
    """
    return {
        "loss": float(cross_entropy(learnt, new[1])),
        "drift": float((after - before).square().sum(1).mean()),
        "kept": float((after.argmax(1) == known[1]).float().mean()),
    }


def said(name: str, found: dict[str, float]) -> str:
    kept = f"drift of f on 0 to 4: {found['drift']:8.3f}   of 0 to 4, still right: {found['kept']:4.0%}"
    return f"{name:32}loss on 5 to 9: {found['loss']:.3f}   {kept}"
