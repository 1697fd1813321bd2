"""Cost of merging: memory does not grow with the number of bundles, and time is little more than hashing takes.

    python tests/bench/merge.py [FOLDER] [--counts 2 8 32]

Bundles of a ViT-B/32's size, 12 layers of 4 linear blocks, 650 MB each, are written to the folder (default: a temporary
one; it needs 22 GB for 32) and merged by `tak` in a fresh process each time, whose peak memory is measured. Times are
the best of three, compared with one SHA-256 over all bytes of the inputs. Exits with 1 if a promise does not hold.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from hashlib import sha256
from pathlib import Path

import torch
from promises import all_hold
from tower import SHAPES, SIDES, tower

import kfacpack as kp
from kfacpack.curvature.matrices.components import InMemoryTensors

LAYERS, ROUNDS, TIMED = 12, 3, 8
MERGE = """
import sys
from pathlib import Path
from kfacpack_cli.main import app
try:
    app(sys.argv[1:])
except SystemExit as end:
    # The peak since this program began; ru_maxrss would include the memory of the parent process at the fork.
    print(end.code, Path("/proc/self/status").read_text().split("VmHWM:")[1].split("kB")[0])
"""


def write_bundles(folder: Path, count: int) -> list[Path]:
    """Bundles of different tasks. The numbers are the same in all of them; neither time nor memory depends on them."""
    generator = torch.Generator().manual_seed(0)
    triangles = {side: torch.randn(side * (side + 1) // 2, generator=generator) for side in SIDES}
    curvature = tower("ViT-B-32", LAYERS, lambda side: kp.Packed(side, InMemoryTensors(data=triangles[side])))
    paths = [folder / f"task{number}.kfac" for number in range(count)]
    for number, path in enumerate(paths):
        source = kp.Source(task=path.stem, dataset_size=1000 + number)
        kp.Curvature(curvature.blocks, curvature.about.model_copy(update={"source": source})).save(path)
    return paths


def merge(paths: list[Path], output: Path) -> tuple[float, int]:
    """Seconds that the command reports, and the peak memory of its process in bytes."""
    arguments = [sys.executable, "-c", MERGE, "merge", *map(str, paths), "-o", str(output), "--json"]
    result = subprocess.run(arguments, capture_output=True, text=True, check=True)
    summary, _, last = result.stdout.rstrip().rpartition("\n")
    code, peak = map(int, last.split())
    assert code == 0, result.stderr
    return float(json.loads(summary)["seconds"]), peak * 1024


def hashing(paths: list[Path]) -> float:
    """One thread, one pass over the files, a megabyte at a time."""
    start = time.perf_counter()
    for path in paths:
        content = sha256()
        with path.open("rb") as file:
            while chunk := file.read(2**20):
                content.update(chunk)
    return time.perf_counter() - start


def main(folder: Path, counts: list[int]) -> int:
    most = max(counts)
    needed, free = 0.7e9 * (most + 1), shutil.disk_usage(folder).free
    if free < needed:
        print(f"{folder} has {free / 1e9:.0f} GB free, {needed / 1e9:.0f} GB are needed; choose a folder or --counts")
        return 2
    paths, output = write_bundles(folder, most), folder / "merged.kfac"
    peaks = {count: merge(paths[:count], output)[1] for count in counts}
    timed = paths[: min(TIMED, most)]
    times = [(hashing(timed), merge(timed, output)[0]) for _ in range(ROUNDS)]
    hashed, merged = (min(rounds) for rounds in zip(*times, strict=True))
    print(f"{len(SHAPES) * LAYERS} blocks, {paths[0].stat().st_size / 1e6:.0f} MB a bundle")
    for count, peak in peaks.items():
        print(f"  merging {count}: peak {peak / 1e6:.0f} MB")
    print(f"  merging {len(timed)}: {merged:.2f} s; hashing their bytes {hashed:.2f} s; best of {ROUNDS}")
    promises = [
        ("largest peak memory / smallest", max(peaks.values()) / min(peaks.values()), "<=", 1.1),
        ("time to merge / time to hash the inputs", merged / hashed, "<=", 3.0),
    ]
    return 0 if all_hold(promises) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--counts", type=int, nargs="+", default=[2, 8, 32])
    options = parser.parse_args()
    if options.folder:
        sys.exit(main(options.folder, options.counts))
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(main(Path(temporary), options.counts))
