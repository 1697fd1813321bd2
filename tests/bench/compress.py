"""Cost of compressed curvature: bytes, time to apply it, and the error of a budget compared with single codecs.

    python tests/bench/compress.py

The layer is one of ViT-B's, 3072×768. Its factors are Gram matrices of random inputs whose variances fall off, as those
of real layers do; speed does not depend on that. Times are the best of several, taken in turns. The bundle for the
budget is that of `tiny` on real MNIST digits. Exits with 1 when a promise does not hold.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from promises import all_hold

import kfacpack as kp
from kfacpack.compression.codecs import CodecChain
from kfacpack.compression.compress import choose_codecs, compress_with
from kfacpack.curvature.saving import file_size

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS, COLUMNS, ROUNDS = 3072, 768, 9
CODECS = (
    *("block:8", "block:8+int8", "block:8+fp16", "svd:32", "svd:32+int8", "svd:25%", "svd:25%+int8"),
    *("prune:30%", "prune:15%", "prune:5%", "prune:1%", "prune:15%+int8", "int8", "fp16", "bf16"),
)
UNIFORM = (
    *("fp16", "int8", "block:8", "block:8+int8", "block:32+int8"),
    *("svd:32", "svd:32+int8", "svd:10%+fp16", "prune:15%", "prune:2%+int8"),
)
NOISE = 1.1
"""A time within a tenth of another is the same: more does not repeat from one run to the next."""


def factor(side: int) -> kp.Dense:
    inputs = torch.randn(side // 2, side) * torch.logspace(0, -2, side)
    return kp.Dense.of(inputs.T @ inputs / side + 1e-4 * torch.eye(side))


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def layer() -> list[tuple[str, float, str, float]]:
    """Promises about one layer: description, value, relation, bound."""
    B, A, dW = factor(ROWS), factor(COLUMNS), torch.randn(ROWS, COLUMNS)
    dense = kp.Kronecker.of(B, A)
    plain_bytes = 4 * (ROWS**2 + COLUMNS**2)
    promises: list[tuple[str, float, str, float]] = []
    print(
        f"{ROWS}×{COLUMNS}, {torch.get_num_threads()} threads, best of {ROUNDS}; times as shares of the dense layer's"
    )
    print(f"{'':18}{'bytes':>8}{'apply':>9}{'densify, apply':>16}{'difference':>12}")
    for spec in CODECS:
        chain = CodecChain.parse(spec)
        b, a = chain.encode(B)[1], chain.encode(A)[1]
        small = kp.Kronecker.of(b, a)

        def densified(b: kp.Dense = b, a: kp.Dense = a) -> torch.Tensor:
            return kp.Kronecker.of(kp.Dense.of(b.dense()), kp.Dense.of(a.dense())).apply(dW)

        times = [
            (seconds(lambda: dense.apply(dW)), seconds(lambda s=small: s.apply(dW)), seconds(densified))
            for _ in range(ROUNDS + 1)
        ][1:]
        full, own, other = (min(rounds) for rounds in zip(*times, strict=True))
        difference = float((small.apply(dW) - densified()).norm() / densified().norm())
        share = sum(matrix.for_storage().nbytes for matrix in (b, a)) / plain_bytes
        print(f"{spec:18}{share:8.2%}{own / full:9.3f}{other / full:16.3f}{difference:12.1e}")
        promises.append((f"{spec}: apply / densify and apply", own / other, "<=", NOISE))
        promises.append((f"{spec}: relative difference to that", difference, "<=", 1e-5))
        if spec in ("block:8", "svd:32"):
            promises.append((f"{spec}: times as fast as dense", full / own, ">=", 5.0))
        if spec in (most := {"block:8": 0.13, "block:8+int8": 0.04}):
            promises.append((f"{spec}: bytes / dense bytes", share, "<=", most[spec]))
    return promises


def budget(folder: Path) -> list[tuple[str, float, str, float]]:
    """A budget of each single codec's size."""
    digits = estimated("mnist", folder)
    promises = []
    print(f"tiny on mnist, {file_size(digits) / 1e6:.1f} MB; relative errors of quadratic on random τ")
    for spec in UNIFORM:
        uniform, loss = compress_with(digits, choose_codecs(digits, spec, None))
        chosen, budget_loss = compress_with(digits, choose_codecs(digits, None, file_size(uniform)))
        size, smaller = file_size(uniform), file_size(chosen)
        print(
            f"{spec:18}{size / 1e6:8.3f} MB {loss.moments.quadratic:9.2e}   budget {smaller / 1e6:8.3f} MB "
            f"{budget_loss.moments.quadratic:9.2e}   along the curvature {loss.moments.along:9.2e} "
            f"{budget_loss.moments.along:9.2e}"
        )
        promises.append(
            (f"budget of {spec}'s size: its error", budget_loss.moments.quadratic, "<=", loss.moments.quadratic)
        )
        promises.append((f"budget of {spec}'s size: its bytes", smaller, "<=", size))
    return promises


def estimated(task: str, folder: Path) -> kp.Curvature:
    from kfacpack_cli.main import app

    path = folder / f"{task}.kfac"
    app(["estimate", "--model", "tiny", "--task", task, "-o", str(path), "--quiet"], standalone_mode=False)
    return kp.load(path)


def main(folder: Path) -> int:
    torch.manual_seed(0)
    return 0 if all_hold([*layer(), *budget(folder)]) else 1


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(main(Path(temporary)))
