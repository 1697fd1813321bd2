"""Time and peak memory of a step of linearised training on open_clip's ViT-B/32, compared with ordinary fine-tuning.

    python tests/bench/linear.py [--rounds 5] [--small]

16 random images, 2 threads, random weights, patch and position embeddings frozen. A step is the forward pass, a
cross-entropy and the gradient. "plain" is the gradient at the parameters themselves, "linearised" that at τ by
`kp.linearize`, "jvp" that at τ by backpropagating through torch.func.jvp. Each contender has its own process, as in
training, and they take turns; times are the best of the rounds. In one process they would share a heap, whose state
decides how many pages the next contender has to request: jvp requests a million in a step, which is a third of its
time, and took from 1.1 to 1.9 times as long as ours. In arithmetic both cost 5/3 of a plain step, the minimum; jvp is
slower because of memory. With an allocator that returns no pages (MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_THRESHOLD_ at
1e11) it takes 1.2 times as long as ours. Peak memory is that of the first steps, without the model, the data and τ.
These include all ways in which `kp.linearize` takes a step: untraced, recorded, verified and replayed.
Prints ratios, and exits with 1 if a promise does not hold. `--small` only shows that everything runs.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import subprocess
import sys
import time
import warnings
from pathlib import Path

import torch
from promises import all_hold
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

import kfacpack as kp
from kfacpack._compat import make_torchvision_importable

BATCH, PIXELS, PATCH, HEAD, OUTPUT, CLASSES, THREADS = 16, 224, 32, 64, 512, 10, 2
FULL, SMALL = (12, 768), (2, 128)  # layers, width
FROZEN = ("conv1", "positional_embedding")
FIRST_STEPS = 4
SLOWER, FASTER, LARGER = 2.0, 1.3, 1.2


class Embedding(nn.Module):
    """x (N, 3, 224, 224) -> f (N, 512)."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        import open_clip

        vision = {"image_size": PIXELS, "patch_size": PATCH, "layers": layers, "width": width, "head_width": HEAD}
        self.tower = open_clip.create_model("ViT-B-32", pretrained=None, vision_cfg=vision).visual
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(self.tower(x), dim=-1)


class Steps:
    """The gradient of each contender at the same images, labels, frozen head, parameters and τ."""

    def __init__(self, layers: int, width: int) -> None:
        torch.manual_seed(0)
        self.model = Embedding(layers, width)
        names = [name for name, _ in self.model.named_parameters() if not set(FROZEN) & set(name.split("."))]
        self.lin = kp.linearize(self.model, names)
        self.tau = {name: torch.randn_like(zero) * 1e-3 for name, zero in self.lin.zeros().items()}
        self.base = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name in self.tau)
        for value in self.tau.values():
            value.requires_grad_()
        self.x = torch.randn(BATCH, 3, PIXELS, PIXELS)
        self.labels = torch.randint(CLASSES, (BATCH,))
        self.head = nn.functional.normalize(torch.randn(CLASSES, OUTPUT), dim=-1)

    def cost(self, f: Tensor) -> Tensor:
        return cross_entropy(100 * f @ self.head.T, self.labels)

    def plain(self) -> tuple[Tensor, ...]:
        state = dict(self.model.named_parameters())
        return torch.autograd.grad(self.cost(self.model(self.x)), [state[name] for name in self.tau])

    def linearised(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.cost(self.lin(self.x, self.tau)), list(self.tau.values()))

    def jvp(self) -> tuple[Tensor, ...]:
        def f(chosen: dict[str, Tensor]) -> Tensor:
            output: Tensor = torch.func.functional_call(self.model, {**self.base, **chosen}, (self.x,))
            return output

        torch.backends.mha.set_fastpath_enabled(False)
        with sdpa_kernel(SDPBackend.MATH):
            at, change = torch.func.jvp(f, ({name: self.base[name] for name in self.tau},), (self.tau,))
            return torch.autograd.grad(self.cost(at + change), list(self.tau.values()))


CONTENDERS = {"plain": Steps.plain, "linearised": Steps.linearised, "jvp": Steps.jvp}


def check(steps: Steps) -> None:
    for ours, theirs in zip(steps.linearised(), steps.jvp(), strict=True):
        assert (ours - theirs).norm() <= 1e-3 * theirs.norm() + 1e-6, "the two linearised gradients differ"


def memory(key: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{key}:")[1].split("kB")[0]) * 1024


def peak(steps: Steps, name: str) -> int:
    """Peak bytes of the first steps. Memory that is left from building the model is first returned to the system.

    A small model runs before, so that modules which torch imports on first use are already imported.
    """
    CONTENDERS[name](Steps(*SMALL))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    for _ in range(FIRST_STEPS):
        gradients = CONTENDERS[name](steps)
        assert all(bool(gradient.isfinite().all()) for gradient in gradients)
        del gradients
    return memory("VmHWM") - before


def contend(name: str, small: bool) -> None:
    """Prints the peak memory of a first step, and the seconds of another step for every line of standard input."""
    steps = Steps(*(SMALL if small else FULL))
    print(peak(steps, name), flush=True)
    for _ in sys.stdin:
        gc.collect()
        start = time.perf_counter()
        CONTENDERS[name](steps)
        print(time.perf_counter() - start, flush=True)


class Contender:
    """A process that takes a step on request."""

    def __init__(self, name: str, small: bool) -> None:
        command = [sys.executable, __file__, "--contend", name, *(["--small"] if small else [])]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.peak = int(self._answer())

    def step(self) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def end(self) -> None:
        self.process.communicate()


def main(rounds: int, small: bool) -> int:
    layers, width = SMALL if small else FULL
    check(Steps(layers, width))
    contenders = {name: Contender(name, small) for name in CONTENDERS}
    turns = [{name: contender.step() for name, contender in contenders.items()} for _ in range(rounds)]
    for contender in contenders.values():
        contender.end()
    seconds = {name: min(turn[name] for turn in turns) for name in CONTENDERS}
    peaks = {name: contender.peak for name, contender in contenders.items()}
    print(f"{layers} layers of width {width}, {BATCH} images, {THREADS} threads, best of {rounds}; ratios to plain")
    for name in CONTENDERS:
        ratios = seconds[name] / seconds["plain"], peaks[name] / peaks["plain"]
        print(
            f"    {name:11} time {ratios[0]:5.2f} ({seconds[name]:6.3f} s)  peak {ratios[1]:5.2f}"
            f" ({peaks[name] / 1e6:5.0f} MB)"
        )
    slower = seconds["linearised"] / seconds["plain"]
    faster = seconds["jvp"] / seconds["linearised"]
    larger = peaks["linearised"] / peaks["plain"]
    promises = [
        ("time / plain", slower, "<=", SLOWER),
        ("torch.func.jvp's time / ours", faster, ">=", FASTER),
        ("peak memory / plain", larger, "<=", LARGER),
    ]
    return 0 if all_hold(promises) or small else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time and peak memory of a step of linearised training.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="{} layers of width {}".format(*SMALL))
    parser.add_argument("--contend", choices=CONTENDERS, help="run one contender: a step per line of standard input")
    return parser.parse_args()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(THREADS)
    make_torchvision_importable()
    options = arguments()
    if options.contend:
        contend(options.contend, options.small)
        sys.exit(0)
    sys.exit(main(options.rounds, options.small))
