"""Overhead of a linearised step: CPU time on a model so thin that its arithmetic does not count.

    python tests/bench/overhead.py [--rounds 30]

open_clip's vision transformer with 12 layers of width 16, two images, one thread. A step is the forward pass, the loss,
the gradient and AdamW (foreach). On a GPU, this is the time that the host needs to launch the kernels of a step.
"ordinary" is fine-tuning; "jvp" backpropagates through torch.func.jvp; "untraced" and "traced" are `kp.linearize`
without and with its recorded programs; "penalised" adds the penalty of a bundle of all blocks to "traced"; "trainer" is
a step of `kp.train` with that penalty, including data, checks and metrics. They take turns, between two steps of the
trainer; times are the best of the rounds, as ratios to an ordinary step. Exits with 1 if a promise does not hold.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from promises import all_hold
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

import kfacpack as kp
from kfacpack._compat import make_torchvision_importable
from kfacpack.models.model import Model
from kfacpack.training.metrics import Metrics

VISION = {"image_size": 32, "layers": 12, "width": 16, "head_width": 4, "patch_size": 8}
TEXT = {"context_length": 8, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
BATCH, CLASSES, WIDTH = 2, 10, 16
WARM_UP = 6
"""Rounds that are not counted; the programs are recorded in them."""
LINEARISED, PENALISED, TRAINER, PENALTY = 2.2, 2.6, 2.8, 0.25


def thin_model(folder: Path) -> Model:
    make_torchvision_importable()
    import open_clip

    path = folder / "ViT-thin.json"
    path.write_text(json.dumps({"embed_dim": WIDTH, "vision_cfg": VISION, "text_cfg": TEXT}))
    open_clip.add_model_config(path)
    return kp.load_model(path.stem, weights="random")


class Steps:
    """A step of each contender on the same data."""

    def __init__(self, model: Model, bundle: kp.Curvature) -> None:
        torch.manual_seed(0)
        self.model = model
        self.lin, self.untraced_lin = kp.linearize(model), kp.linearize(model, trace=False)
        parameters = dict(model.module.named_parameters())
        self.base = {name: parameters[name] for name in self.lin.parameters}
        self.trained = {name: value.detach().clone().requires_grad_() for name, value in self.base.items()}
        self.regularizer = kp.Regularizer(bundle, strength=80.0)
        self.x = torch.randn(BATCH, 3, VISION["image_size"], VISION["image_size"])
        self.labels = torch.randint(CLASSES, (BATCH,))
        self.head = nn.functional.normalize(torch.randn(CLASSES, WIDTH), dim=-1)
        self.taus: dict[str, dict[str, Tensor]] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        for name in ("ordinary", "jvp", "untraced", "traced", "penalised"):
            tau = {key: (1e-3 * torch.randn_like(value)).requires_grad_() for key, value in self.base.items()}
            self.taus[name] = tau
            values = self.base.values() if name == "ordinary" else tau.values()
            self.optimizers[name] = torch.optim.AdamW(list(values), lr=1e-5, foreach=True)

    def _update(self, name: str, f: Tensor) -> None:
        cross_entropy(100 * f @ self.head.T, self.labels).backward()
        if name == "penalised":
            self.regularizer.add_grad(self.taus[name])
        self.optimizers[name].step()
        self.optimizers[name].zero_grad()

    def ordinary(self) -> None:
        self._update("ordinary", self.model.forward(self.x))

    def jvp(self) -> None:
        def f(values: dict[str, Tensor]) -> Tensor:
            output: Tensor = torch.func.functional_call(_Called(self.model), values, (self.x,))
            return output

        torch.backends.mha.set_fastpath_enabled(False)
        base = {f"module.{name}": value for name, value in self.base.items()}
        tau = {f"module.{name}": value for name, value in self.taus["jvp"].items()}
        with sdpa_kernel(SDPBackend.MATH):
            at, change = torch.func.jvp(f, (base,), (tau,))
        torch.backends.mha.set_fastpath_enabled(True)
        self._update("jvp", at + change)

    def untraced(self) -> None:
        self._update("untraced", self.untraced_lin(self.x, self.taus["untraced"]))

    def traced(self) -> None:
        self._update("traced", self.lin(self.x, self.taus["traced"]))

    def penalised(self) -> None:
        self._update("penalised", self.lin(self.x, self.taus["penalised"]))

    def penalty(self) -> None:
        self.regularizer.add_grad(self.taus["penalised"])


class _Called(nn.Module):
    """f as a module, for `functional_call`."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.module, self._f = model.module, model.forward

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self._f(x)
        return output


CONTENDERS: dict[str, Callable[[Steps], None]] = {
    name: getattr(Steps, name) for name in ("ordinary", "jvp", "untraced", "traced", "penalised", "penalty")
}


def main(rounds: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        model = thin_model(Path(folder))
    task = kp.load_task("digits")
    bundle = kp.estimate_task(model, kp.load_task("faces"), examples=32)
    steps = Steps(model, bundle)
    seconds: dict[str, list[float]] = {name: [] for name in (*CONTENDERS, "trainer")}
    start = time.thread_time()

    def take_turns(metrics: Metrics, total: int) -> None:
        nonlocal start
        seconds["trainer"].append(time.thread_time() - start)
        for name, contender in CONTENDERS.items():
            start = time.thread_time()
            contender(steps)
            seconds[name].append(time.thread_time() - start)
        start = time.thread_time()

    count = rounds + WARM_UP
    kp.train(
        model, task, reg=[bundle], steps=count, batch_size=BATCH, lr=1e-5, head="prototypes", on_progress=take_turns
    )
    assert steps.lin.programs == 1, steps.lin.untraced
    best = {name: min(values[WARM_UP:]) for name, values in seconds.items()}
    ratios = {name: value / best["ordinary"] for name, value in best.items()}
    blocks = len(bundle.blocks)
    print(f"12 layers of width 16, {BATCH} images, {blocks} blocks; CPU time of one thread, best of {rounds}")
    for name, ratio in ratios.items():
        print(f"    {name:10} {ratio:5.2f}  ({1e3 * best[name]:.1f} ms)")
    promises = [
        ("linearised step / ordinary", ratios["traced"], "<=", LINEARISED),
        ("linearised step / torch.func.jvp's", best["traced"] / best["jvp"], "<", 1.0),
        ("with penalty / ordinary", ratios["penalised"], "<=", PENALISED),
        ("with penalty / torch.func.jvp's", best["penalised"] / best["jvp"], "<", 1.0),
        ("trainer's step / ordinary", ratios["trainer"], "<=", TRAINER),
        ("penalty alone / ordinary", ratios["penalty"], "<=", PENALTY),
    ]
    return 0 if all_hold(promises) else 1


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description="CPU time of a step on a thin model.")
    parser.add_argument("--rounds", type=int, default=30)
    sys.exit(main(parser.parse_args().rounds))
