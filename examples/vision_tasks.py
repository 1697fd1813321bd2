"""Does the penalty help? Real tasks, a real ViT-Tiny, linearised fine-tuning with and without it.

    python examples/vision_tasks.py OUT --data DIR --weights vit_tiny_patch16_224.safetensors

DIR holds a folder for each task, with train-*.parquet and test-*.parquet as the Hub has them. For each task: its
curvature, Kronecker-factored and diagonal; then one vector for each arm: without a penalty, with that of the other
tasks' merged Kronecker factors, and with that of their diagonals. Then every vector on its own task, and the sum of an
arm's vectors, as it is (α = 1), on all of them. Every stage is a command that is printed, and one whose file is there
already is not run again: after an interruption, call it again.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

import kfacpack as kp

TASKS = ("mnist", "eurosat", "gtsrb", "dtd", "stanford_cars")
MODEL = "timm:vit_tiny_patch16_224"
ARMS = {"without": None, "kfac": "kronecker", "diagonal": "diagonal"}


class Run:
    def __init__(self, options: argparse.Namespace):
        self.out: Path = options.out
        self.data: Path = options.data
        self.options = options
        self.model = ["--model", MODEL, "--weights", str(options.weights), "--image-size", str(options.image_size)]

    def of_task(self, task: str) -> list[str]:
        return ["--task", task, "--data", str(self.data / task)]

    def command(self, made: str, *arguments: str) -> Path:
        """Run a command that makes a file, unless it is there."""
        path = self.out / made
        if not path.exists():
            resume = ["--resume"] if path.with_name(f"{path.name}.partial").exists() else []
            line = [*arguments, "-o", str(path), *resume]
            print("kfacpack", shlex.join(line), flush=True)
            subprocess.run([sys.executable, "-m", "kfacpack_cli", *line, "--quiet"], check=True)
        return path

    def bundle(self, task: str, structure: str) -> Path:
        how = ["--structure", structure, "--seed", str(self.options.seed)]
        return self.command(f"{task}.{structure}.kfac", "estimate", *self.model, *self.of_task(task), *how)

    def others(self, task: str, structure: str) -> Path:
        bundles = [str(self.bundle(other, structure)) for other in TASKS if other != task]
        return self.command(f"not-{task}.{structure}.kfac", "merge", *bundles)

    def vector(self, task: str, arm: str) -> Path:
        structure = ARMS[arm]
        penalty = []
        if structure:
            penalty = ["--reg", str(self.others(task, structure)), "--strength", str(self.options.strength)]
        how = ["--steps", str(self.options.steps), "--seed", str(self.options.seed)]
        return self.command(f"{task}.{arm}.safetensors", "train", *self.model, *self.of_task(task), *how, *penalty)

    def accuracy(self, name: str, vector: kp.TaskVector | None, task: str) -> float:
        """Of a vector on a task's test split; kept in a file, too."""
        path = self.out / f"{name}.{task}.json"
        if not path.exists():
            model = kp.load_model(MODEL, weights=self.options.weights, image_size=self.options.image_size)
            found = kp.evaluate(model, kp.load_task(task, self.data / task), vector=vector)
            path.write_text(json.dumps({"accuracy": found.accuracy, "examples": found.examples}), encoding="utf-8")
        return float(json.loads(path.read_text(encoding="utf-8"))["accuracy"])


def require_same(options: argparse.Namespace) -> None:
    """Files of another run must not get into this one's table."""
    said = {key: str(value) for key, value in vars(options).items() if key not in ("out", "arms")}
    path = options.out / "options.json"
    if path.exists() and json.loads(path.read_text(encoding="utf-8")) != said:
        sys.exit(f"{options.out}: was begun with other options, see {path}; choose another folder")
    path.write_text(json.dumps(said), encoding="utf-8")


def main(options: argparse.Namespace) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    require_same(options)
    run, start = Run(options), time.perf_counter()
    rows: dict[str, list[float]] = {"base model": [run.accuracy("base", None, task) for task in TASKS]}
    for arm in options.arms:
        vectors = {task: kp.TaskVector.load(run.vector(task, arm)) for task in TASKS}
        rows[f"{arm}: individual"] = [run.accuracy(f"own.{arm}", vectors[task], task) for task in TASKS]
        total = sum(vectors.values())
        rows[f"{arm}: sum"] = [run.accuracy(f"sum.{arm}", total, task) for task in TASKS]
    width = max(map(len, rows))
    print(f"{'':{width}}", *(f"{task:>13}" for task in (*TASKS, "mean")))
    for name, found in rows.items():
        print(f"{name:{width}}", *(f"{value:13.3f}" for value in (*found, sum(found) / len(found))))
    print(f"{(time.perf_counter() - start) / 60:.1f} minutes, this call")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--image-size", type=int, default=96)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--strength", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    main(parser.parse_args())
