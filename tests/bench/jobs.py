"""Measures how much faster a plan runs in two worker processes than in one, with the same results.

python tests/bench/jobs.py [demo] [eight]

`demo` is the plan of `kfacpack demo`, `eight` the first seed of examples/eight_tasks.yaml. Both run by default. The
bounds hold on two idle cores.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from promises import all_hold

ROOT = Path(__file__).parents[2]
BOUNDS = {"demo": 1.5, "eight": 1.7}
"""Minimum speedup by plan."""
DEMO_SECONDS = 90


def seconds(*command: object) -> float:
    """Runs a `kfacpack` command and returns its duration, including the import of its libraries."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "kfacpack_cli", *map(str, command), "--quiet"], check=True)
    return time.perf_counter() - start


def measure(plan: str, folder: Path) -> list[tuple[str, float, str, float]]:
    """Runs a plan with one and with two processes; returns the promises about their durations and results."""
    command: list[object] = ["demo"]
    if plan == "eight":
        path = folder / "eight.yaml"
        text = (ROOT / "examples" / "eight_tasks.yaml").read_text(encoding="utf-8")
        assert "seeds: [0, 1, 2]" in text
        path.write_text(text.replace("seeds: [0, 1, 2]", "seeds: [0]"), encoding="utf-8")
        command = ["run", path]
    outputs = [folder / f"{plan}-{jobs}" for jobs in (1, 2)]
    # The parallel run is first: a warm cache of images is an advantage for the sequential one.
    parallel = seconds(*command, "--jobs", 2, "-o", outputs[1])
    sequential = seconds(*command, "--jobs", 1, "-o", outputs[0])
    same = outputs[0].joinpath("results.json").read_bytes() == outputs[1].joinpath("results.json").read_bytes()
    print(f"{plan}: {sequential:.0f} s with --jobs 1, {parallel:.0f} s with --jobs 2")
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
