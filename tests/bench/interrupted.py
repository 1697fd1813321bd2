"""A run that is killed at five random moments gives the results of an uninterrupted run.

python tests/bench/interrupted.py [--seed 0]
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from experiments.small_plan import TEXT


def start_run(plan: Path, out: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "kfacpack_cli", "run", str(plan), "-o", str(out), "--quiet"])


def main(seed: int) -> None:
    generator = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        plan, uninterrupted, interrupted = (
            Path(folder) / name for name in ("plan.yaml", "uninterrupted", "interrupted")
        )
        plan.write_text(TEXT, encoding="utf-8")
        start = time.perf_counter()
        assert start_run(plan, uninterrupted).wait() == 0
        length = time.perf_counter() - start
        print(f"uninterrupted: {length:.0f} s")
        for number in range(5):
            signal_sent = generator.choice((signal.SIGINT, signal.SIGTERM, signal.SIGKILL))
            after = generator.uniform(0.2, 0.9) * length
            process = start_run(plan, interrupted)
            try:
                process.wait(after)
            except subprocess.TimeoutExpired:
                process.send_signal(signal_sent)
                process.wait()
            files = sum(path.is_file() for path in interrupted.rglob("*"))
            print(
                f"{number + 1}: {signal_sent.name} after {after:.1f} s, exit code {process.returncode}, {files} files"
            )
        assert start_run(plan, interrupted).wait() == 0
        same = (uninterrupted / "results.json").read_bytes() == (interrupted / "results.json").read_bytes()
        print("same results" if same else "DIFFERENT RESULTS")
        sys.exit(0 if same else 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args().seed)
