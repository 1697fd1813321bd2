"""The plan of `kfacpack demo` on a Ray cluster of three simulated nodes, with the results of a sequential run.

    python tests/bench/ray_cluster.py [--out DIR]

Each node has one CPU, and its worker a folder of its own. The command is killed after a third of the stages and called
again; after two thirds, a node is killed. Takes about five minutes on two idle cores. If it is interrupted, the same
call continues. Exits with 1 if the results differ, or if anything but the stages that were running is computed again.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from promises import all_hold
from ray.cluster_utils import Cluster

from kfacpack.experiments.plan_file import plan_text

NODES = 3


def command(plan: Path, output: Path, *options: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "kfacpack_cli", "run", plan, "-o", output, "--quiet", *options])


def events(output: Path, kind: str) -> list[str]:
    """Returns the stages of all events of a kind."""
    path = output / "events.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [event["stage"] for event in map(json.loads, lines) if event["event"] == kind]


def wait_until(process: subprocess.Popen[bytes], condition: Callable[[], bool]) -> None:
    while process.poll() is None and not condition():
        time.sleep(0.2)


def run_on_cluster(plan: Path, output: Path, stages: int) -> None:
    """Runs the plan, kills the command after a third of the stages, and a node after two thirds."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(NODES - 1)]
        if len(events(output, "finished")) < stages // 3:
            driver = command(plan, output, "--ray", cluster.address)
            wait_until(driver, lambda: len(events(output, "finished")) >= stages // 3)
            driver.send_signal(signal.SIGKILL)
            driver.wait()
            print(f"killed the command after {len(events(output, 'finished'))} of {stages} stages", flush=True)
        driver = command(plan, output, "--ray", cluster.address)
        wait_until(driver, lambda: len(events(output, "finished")) >= 2 * stages // 3)
        cluster.remove_node(nodes[0], allow_graceful=False)
        print(f"killed a node after {len(events(output, 'finished'))} of {stages} stages", flush=True)
        if driver.wait():
            sys.exit(f"the command on the cluster ended with exit code {driver.returncode}")
    finally:
        cluster.shutdown()


def main(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    plan, sequential, output = folder / "plan.yaml", folder / "sequential", folder / "cluster"
    plan.write_text(plan_text(), encoding="utf-8")
    if command(plan, sequential, "--jobs", "1").wait():
        sys.exit("the sequential run failed")
    stages = len(set(events(sequential, "finished")))
    if not (output / "results.json").exists():
        run_on_cluster(plan, output, stages)
    finished = Counter(events(output, "finished"))
    same = (sequential / "results.json").read_bytes() == (output / "results.json").read_bytes()
    print(f"{stages} stages, {NODES} nodes; tried again: {', '.join(events(output, 'retried')) or 'none'}")
    promises = [
        ("same results.json as a sequential run", float(same), "==", 1.0),
        ("stages that were finished twice", float(sum(count > 1 for count in finished.values())), "==", 0.0),
        ("stages tried again after a node was killed", float(len(events(output, "retried"))), "<=", 1.0),
    ]
    return 0 if all_hold(promises) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("ray-cluster"))
    sys.exit(main(parser.parse_args().out))
