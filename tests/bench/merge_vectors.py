"""Cost of merging vectors with their bundles: time, memory, and that low-rank vectors stay factored.

    python tests/bench/merge_vectors.py [FOLDER] [--layers 12] [--tasks 8]

Vectors and bundles of a ViT-B/32's size, 12 layers of 4 linear blocks, are written to the folder (default: a temporary
one; it needs 10 GB) and merged by `curvature` in a fresh process, whose peak memory is measured. The spectra of the
factors decay and differ between the tasks: such blocks need 11 or 12 iterations, those of six tasks of `tiny` 8 on
average. The bounds are for 12 layers and 2 cores; with fewer layers the time is scaled. The time is compared with one
SHA-256 over all bytes of the inputs. Then adapters of rank 16 are merged with the same bundles.
Exits with 1 if a promise does not hold.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from merge import hashing
from promises import all_hold
from tower import tower

import kfacpack as kp
from kfacpack.curvature.matrices.components import InMemoryTensors, pack
from kfacpack.format.vector_manifest import AboutVector, TaskEntry

LAYERS, TASKS, RANK = 12, 8, 16
MINUTES, GIGABYTES = 10, 3
MERGE = """
import sys
from pathlib import Path
from kfacpack_cli.main import app
try:
    app(sys.argv[1:])
except SystemExit as end:
    # The peak since this program began; ru_maxrss would include the memory of the parent process at the fork.
    status = Path("/proc/self/status").read_text()
    print(end.code, status.split("VmHWM:")[1].split("kB")[0])
"""


def decaying(side: int, task: int, seed: int) -> kp.Packed:
    """A covariance with eigenvalues that fall from 1 to 1e-6, whose leading directions differ between the tasks."""
    generator = torch.Generator().manual_seed(1000 * seed + task)
    spectrum = torch.logspace(0, -3, side)  # of the square root
    common = torch.randn(side, side, generator=torch.Generator().manual_seed(seed))
    factor = (common + 0.7 * torch.randn(side, side, generator=generator)) * spectrum / side**0.5
    return kp.Packed(side, InMemoryTensors(data=pack(factor @ factor.T)))


def write_inputs(folder: Path, layers: int, tasks: int) -> tuple[list[Path], list[Path]]:
    vectors, bundles = [], []
    for task in range(tasks):
        matrices: dict[int, kp.Packed] = {}

        def matrix(side: int, task: int = task, matrices: dict[int, kp.Packed] = matrices) -> kp.Packed:
            # The same numbers in every layer; neither time nor memory depends on that.
            if side not in matrices:
                matrices[side] = decaying(side, task, side)
            return kp.Packed(side, matrices[side].components)

        curvature = tower("ViT-B-32", layers, matrix)
        source = kp.Source(task=f"task{task}", dataset_size=1000 + task)
        bundles.append(folder / f"task{task}.kfac")
        kp.Curvature(curvature.blocks, curvature.about.model_copy(update={"source": source})).save(bundles[-1])
        generator = torch.Generator().manual_seed(task)
        base = curvature.about.base
        tensors = {p.name: 1e-3 * torch.randn(p.shape, generator=generator) for p in base.parameters}
        about = AboutVector(
            base=base, function=curvature.about.function, regime="full", tasks=(TaskEntry(source=source),)
        )
        vectors.append(folder / f"task{task}.safetensors")
        kp.TaskVector(tensors, about).save(vectors[-1])
    return vectors, bundles


def merge(vectors: list[Path], bundles: list[Path], output: Path) -> tuple[float, int, dict]:
    """Seconds, peak memory in bytes, and the result of the command."""
    options = [word for bundle in bundles for word in ("--bundle", str(bundle))]
    arguments = ["add", *map(str, vectors), "--method", "curvature", *options, "-o", str(output), "--json"]
    start = time.perf_counter()
    result = subprocess.run([sys.executable, "-c", MERGE, *arguments], capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - start
    summary, _, last = result.stdout.rstrip().rpartition("\n")
    code, peak = map(int, last.split())
    assert code == 0, result.stderr
    return seconds, peak * 1024, json.loads(summary)


def write_adapters(folder: Path, bundles: list[Path]) -> list[Path]:
    """Vectors of rank 16 in every weight; the other parameters do not change."""
    paths = []
    for task, bundle in enumerate(bundles):
        about, generator = kp.load(bundle).about, torch.Generator().manual_seed(task)
        factors = {}
        for parameter in about.base.parameters:
            rows, columns = parameter.shape[0], (*parameter.shape, 1)[1]
            rank = RANK if len(parameter.shape) > 1 else 0
            factors[parameter.name] = (
                1e-2 * torch.randn(rows, rank, generator=generator),
                1e-2 * torch.randn(rank, columns, generator=generator),
            )
        entry = TaskEntry(source=about.source)
        vector = AboutVector(base=about.base, function=about.function, regime="full", tasks=(entry,))
        paths.append(folder / f"adapter{task}.safetensors")
        kp.TaskVector({}, vector, factors=factors).save(paths[-1])
    return paths


def dense_changes(path: Path) -> list[str]:
    """The weights whose change in a vector is not stored as factors."""
    vector = kp.TaskVector.load(path)
    return [p.name for p in vector.about.base.parameters if len(p.shape) > 1 and vector.factors(p.name) is None]


def main(folder: Path, layers: int, tasks: int) -> int:
    vectors, bundles = write_inputs(folder, layers, tasks)
    hashed = hashing([*vectors, *bundles])
    seconds, peak, result = merge(vectors, bundles, folder / "merged.safetensors")
    iterations = [block["iterations"] for block in result["blocks"]]
    residual = max(block["residual"] for block in result["blocks"])
    print(f"{tasks} vectors of {layers} layers: {seconds:.0f} s, peak {peak / 1e9:.2f} GB")
    print(f"  iterations {min(iterations)} to {max(iterations)}, residual at most {residual:.2g}")
    print(f"  hashing the inputs: {hashed:.1f} s; merging takes {seconds / hashed:.1f} times as long")
    adapters, merged = write_adapters(folder, bundles), folder / "merged-adapters.safetensors"
    adapter_seconds, adapter_peak, _ = merge(adapters, bundles, merged)
    print(f"  {tasks} adapters of rank {RANK}: {adapter_seconds:.0f} s, peak {adapter_peak / 1e9:.2f} GB")
    promises = [
        ("minutes to merge, for 12 layers", seconds / 60 * LAYERS / layers, "<=", MINUTES),
        ("peak memory in GB", peak / 1e9, "<", GIGABYTES),
        ("peak memory for adapters, relative to that for dense vectors", adapter_peak / peak, "<", 1),
        ("merged weights of adapters that became dense", len(dense_changes(merged)), "==", 0),
    ]
    return 0 if all_hold(promises) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--tasks", type=int, default=TASKS)
    options = parser.parse_args()
    if options.folder:
        sys.exit(main(options.folder, options.layers, options.tasks))
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(main(Path(temporary), options.layers, options.tasks))
