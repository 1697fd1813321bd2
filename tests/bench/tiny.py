"""Size of the wheel, and time to load the model and a task from an installed wheel.

    python tests/bench/tiny.py

Builds the wheel, unpacks it into an empty folder and loads `tiny` and each task from there, in a fresh process with an
empty cache and no network, compared with a process that only imports torch. Times are the best of the rounds, in
turns. Exits with 1 when a promise does not hold.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 3
WHEEL_BYTES, SECONDS = 10e6, 5.0
LOADING = """
import kfacpack as kp
assert "{folder}" in kp.__file__, kp.__file__
model, task = kp.load_model("tiny"), kp.load_task("{task}")
len(task.split("train")), len(task.split("test"))
"""


def built(folder: Path) -> Path:
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def seconds(program: str, folder: Path) -> float:
    with TemporaryDirectory() as cache:
        # A proxy without a server, so that any network access fails.
        proxies = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
        environment = {**os.environ, **proxies, "PYTHONPATH": str(folder), "KFACPACK_CACHE": cache}
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", program], check=True, cwd=cache, env=environment)
        return time.perf_counter() - start


def main() -> None:
    from kfacpack.tasks.registry import TASKS

    with TemporaryDirectory() as temporary:
        folder = Path(temporary) / "unpacked"
        wheel = built(Path(temporary))
        size = wheel.stat().st_size
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(folder)
        print(f"wheel: {size / 1e6:.2f} MB (at most {WHEEL_BYTES / 1e6:.0f})")
        programs = {name: LOADING.format(folder=folder, task=name) for name in TASKS}
        best = dict.fromkeys(["torch", *programs], float("inf"))
        for _ in range(ROUNDS):
            for name, program in {"torch": "import torch", **programs}.items():
                best[name] = min(best[name], seconds(program, folder))
    beyond = {name: best[name] - best["torch"] for name in programs}
    for name, took in beyond.items():
        print(f"tiny and {name}, nothing cached: {took:.1f} s beyond importing torch (at most {SECONDS:.0f})")
    if size > WHEEL_BYTES or max(beyond.values()) > SECONDS:
        raise SystemExit("a promise does not hold")


if __name__ == "__main__":
    main()
