"""Measures how much faster a plan runs in two worker processes than in one, with the same results.

python tests/bench/jobs.py [demo] [eight]

`demo` is the plan of `kfacpack demo`. `eight` is a part of examples/eight_tasks.yaml that takes minutes: all tasks, one
of three seeds, two of six arms, and the accuracies only. Both run by default. The bounds hold on two idle cores. The
speedup that the stages allow is printed as well, from their times in the sequential run: their total divided by the
longer of half of it and the longest chain.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import yaml
from promises import all_hold

from kfacpack.experiments.plan_file import read_plan
from kfacpack.experiments.run import Run

ROOT = Path(__file__).parents[2]
BOUNDS = {"demo": 1.5, "eight": 1.7}
"""Minimum speedup by plan."""
DEMO_SECONDS = 90


def seconds(*command: object) -> float:
    """Runs a `kfacpack` command and returns its duration, including the import of its libraries."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "kfacpack_cli", *map(str, command), "--quiet"], check=True)
    return time.perf_counter() - start


def part_of_eight_tasks() -> str:
    """Returns the plan of `eight`."""
    plan = yaml.safe_load((ROOT / "examples" / "eight_tasks.yaml").read_text(encoding="utf-8"))
    plan["seeds"] = plan["seeds"][:1]
    plan["arms"] = {name: plan["arms"][name] for name in ("without", "kfac")}
    plan["evaluation"] = {key: plan["evaluation"][key] for key in ("examples", "alphas")}
    return yaml.safe_dump(plan, sort_keys=False)


def possible_speedup(root: Path, plan: Path) -> float:
    """Returns the largest speedup of two processes that compute stages without any overhead.

    Args:
        root: Folder of a sequential run, with the times of its stages.
        plan: Its plan.
    """
    events = [json.loads(line) for line in (root / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    seconds = {event["stage"]: event["seconds"] for event in events if event["event"] == "finished"}
    with Run(*read_plan(plan), root, torch.device("cpu")) as run:
        chains: dict[str, float] = {}
        for stage in run.stages:
            before = max((chains[dependency.key] for dependency in stage.inputs), default=0.0)
            chains[stage.key] = before + seconds[f"{stage.kind}/{stage.name}"]
    total = sum(seconds.values())
    return total / max(total / 2, *chains.values())


def measure(plan: str, folder: Path) -> list[tuple[str, float, str, float]]:
    """Runs a plan with one and with two processes; returns the promises about their durations and results."""
    command: list[object] = ["demo"]
    if plan == "eight":
        path = folder / "eight.yaml"
        path.write_text(part_of_eight_tasks(), encoding="utf-8")
        command = ["run", path]
    outputs = [folder / f"{plan}-{jobs}" for jobs in (1, 2)]
    # The parallel run is first: a warm cache of images is an advantage for the sequential one.
    parallel = seconds(*command, "--jobs", 2, "-o", outputs[1])
    sequential = seconds(*command, "--jobs", 1, "-o", outputs[0])
    same = outputs[0].joinpath("results.json").read_bytes() == outputs[1].joinpath("results.json").read_bytes()
    allowed = possible_speedup(outputs[0], folder / "eight.yaml" if plan == "eight" else outputs[0] / "plan.yaml")
    print(f"{plan}: {sequential:.0f} s with --jobs 1, {parallel:.0f} s with --jobs 2; the stages allow {allowed:.2f}")
    promises = [
        (f"{plan}: speedup with two processes", sequential / parallel, ">=", BOUNDS[plan]),
        (f"{plan}: same results.json", float(same), "==", 1.0),
    ]
    return promises + ([("demo: seconds", parallel, "<", DEMO_SECONDS)] if plan == "demo" else [])


def main(plans: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        promises = [promise for plan in plans or BOUNDS for promise in measure(plan, Path(folder))]
    sys.exit(0 if all_hold(promises) else 1)


if __name__ == "__main__":
    main(sys.argv[1:])
