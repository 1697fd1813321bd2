"""The file's promises, measured on a bundle of ViT-B/16 size: 48 linear blocks, 1.3 GB of factors.

    python tests/bench/bundle.py [FOLDER]

Prints one ratio per promise and exits with 1 if one does not hold. Times are the best of several, taken in turns. The
folder (default: a temporary one) is where the files go; it needs 2.5 GB.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from promises import all_hold
from safetensors.torch import load_file, save_file
from tower import tower

import kfacpack as kp

if TYPE_CHECKING:
    from collections.abc import Callable

LAYERS, ROUNDS = 12, 4


def vit_b_16() -> kp.Curvature:
    """Factors of the right sizes. Their numbers are random and symmetric; speed does not depend on them."""
    return tower("ViT-B-16", LAYERS, lambda side: kp.Dense.of(symmetric(side)))


def symmetric(side: int) -> torch.Tensor:
    full = torch.randn(side, side)
    return full.add_(full.T.clone())


def memory(key: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{key}:")[1].split("kB")[0]) * 1024


def mapped_and_resident(path: Path) -> int:
    """How many bytes of a mapped file this process has touched through its mappings."""
    resident, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            inside = line.endswith(str(path))
        elif inside and first == "Rss:":
            resident += int(line.split()[1]) * 1024
    return resident


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def load_everything(path: Path) -> None:
    """All tensors in memory at the end, unchecked."""
    _ = [tensor.clone() for tensor in load_file(path).values()]


def check_everything(path: Path) -> None:
    bundle = kp.Bundle(path)
    _ = [bytearray(bundle.bytes_of(name)) for name in bundle.tensors]


def main(folder: Path) -> int:
    curvature = vit_b_16()
    tensors = {
        f"{block.name}/{role}": matrix.components["data"]
        for block in curvature.blocks
        for role, matrix in block.structure.matrices()
    }
    dense_bytes = sum(tensor.nbytes for tensor in tensors.values())
    largest = max(sum(m.nbytes for _, m in block.structure.matrices()) for block in curvature.blocks)
    ours, plain = (folder / "ours.kfac").resolve(), folder / "plain.safetensors"

    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    curvature.save(ours)
    extra = memory("VmHWM") - before

    opened = kp.Bundle(ours)
    touched = mapped_and_resident(ours)
    del opened

    times: dict[str, list[float]] = {key: [] for key in ("ours", "plain", "open", "load", "check")}
    for _ in range(ROUNDS):
        times["plain"].append(seconds(lambda: save_file(tensors, plain)))
        times["ours"].append(seconds(lambda: curvature.save(ours)))
        times["load"].append(seconds(lambda: load_everything(ours)))
        times["check"].append(seconds(lambda: check_everything(ours)))
        times["open"].append(seconds(lambda: kp.Bundle(ours)))
    best = {key: min(rounds) for key, rounds in times.items()}
    size, plain_size = ours.stat().st_size, plain.stat().st_size

    per_byte = (size / best["ours"]) / (plain_size / best["plain"])
    print(f"{len(curvature.blocks)} blocks, {dense_bytes / 1e9:.2f} GB of float32 factors, best of {ROUNDS}")
    print(
        f"  save_file, unpacked and not synced {best['plain']:.2f} s; ours, packed, hashed, synced {best['ours']:.2f} s"
    )
    print(f"  bytes on disk per second / save_file's: {per_byte:.2f}, for half as many bytes")
    print(f"  load everything {best['load']:.2f} s; with every hash checked {best['check']:.2f} s")
    print(f"  open and read the manifest {best['open'] * 1000:.1f} ms")
    promises = [
        ("tensor bytes touched by opening", touched, "==", 0),
        ("time to open / time to load everything", best["open"] / best["load"], "<=", 1 / 20),
        ("curvature saved per second / save_file's", best["plain"] / best["ours"], ">=", 0.5),
        ("file size / unpacked file size", size / plain_size, "<=", 0.51),
        ("extra memory while writing / largest block", extra / largest, "<=", 1.3),
    ]
    return 0 if all_hold(promises) else 1


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(main(Path(sys.argv[1])))
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(main(Path(temporary)))
