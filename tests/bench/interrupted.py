"""A run that is killed at five random moments finds what an uninterrupted one finds.

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


def begun(plan: Path, out: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "kfacpack_cli", "run", str(plan), "-o", str(out), "--quiet"])


def main(seed: int) -> None:
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        plan, whole, broken = (Path(folder) / name for name in ("plan.yaml", "whole", "broken"))
        plan.write_text(TEXT, encoding="utf-8")
        start = time.perf_counter()
        assert begun(plan, whole).wait() == 0
        length = time.perf_counter() - start
        print(f"uninterrupted: {length:.0f} s")
        for number in range(5):
            how = dice.choice((signal.SIGINT, signal.SIGTERM, signal.SIGKILL))
            after = dice.uniform(0.2, 0.9) * length
            process = begun(plan, broken)
            try:
                process.wait(after)
            except subprocess.TimeoutExpired:
                process.send_signal(how)
                process.wait()
            files = sum(path.is_file() for path in broken.rglob("*"))
            print(f"{number + 1}: {how.name} after {after:.1f} s, exit code {process.returncode}, {files} files")
        assert begun(plan, broken).wait() == 0
        same = (whole / "results.json").read_bytes() == (broken / "results.json").read_bytes()
        print("the same results" if same else "OTHER RESULTS")
        sys.exit(0 if same else 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args().seed)
