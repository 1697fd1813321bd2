"""Measures the CPU time of an estimate and of a training step, and their peak memory, in separate processes.

    python examples/paper/cost.py results/cost.json

Each process uses one thread, so that its CPU time hardly depends on other work on the machine. The time of a step is
the difference of two runs of different length, divided by the difference of their steps, so that loading the model does
not count.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

TASKS = ("digits", "hebrew", "weaves")
SHORT, LONG = 5, 45


def measure(*arguments: object) -> tuple[float, int]:
    """Runs a kfacpack command; returns the CPU seconds of its process and its peak memory in bytes."""
    command = [sys.executable, "-m", "kfacpack_cli", *map(str, arguments), "--quiet"]
    process = os.spawnve(os.P_NOWAIT, sys.executable, command, {**os.environ, "OMP_NUM_THREADS": "1"})
    _, status, usage = os.wait4(process, 0)
    if status:
        sys.exit(f"{' '.join(command)}: exit code {os.waitstatus_to_exitcode(status)}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main(target: Path) -> None:
    """Measures everything and writes the file."""
    costs: dict[str, dict[str, float]] = {}
    with TemporaryDirectory() as name:
        folder = Path(name)
        few, many = 32, 256
        for label, options in (("estimate, one probe", ()), ("estimate, exact", ("--fisher", "exact"))):
            times = [
                measure(
                    "estimate", "--task", "digits", "--examples", count, *options, "-o", folder / f"{label}{count}.kfac"
                )
                for count in (few, many)
            ]
            costs[label] = {"seconds": (times[1][0] - times[0][0]) * many / (many - few), "bytes": times[1][1]}
        for task in TASKS[1:]:
            measure("estimate", "--task", task, "-o", folder / f"{task}.kfac")
        measure("merge", *(folder / f"{task}.kfac" for task in TASKS[1:]), "-o", folder / "others.kfac")
        data = [word for task in TASKS[1:] for word in ("--reg-data", task)]
        for label, options in {
            "step, full": ("--regime", "full"),
            "step, none": (),
            "step, KFAC": ("--reg", folder / "others.kfac"),
            "step, τJp": data,
        }.items():
            times = [
                measure("train", "--task", "digits", "--head", "prototypes", "--steps", steps, "--lr", 0.001, *options,
                        "-o", folder / f"{label}{steps}.safetensors")
                for steps in (SHORT, LONG)
            ]  # fmt: skip
            costs[label] = {"seconds": (times[1][0] - times[0][0]) / (LONG - SHORT), "bytes": times[1][1]}
    target.write_text(json.dumps({"costs": costs}, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
