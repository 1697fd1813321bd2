"""Runs the core of the test suite with the oldest supported versions of all dependencies, or with the newest.

    python tests/environments/compat.py oldest FOLDER
    python tests/environments/compat.py newest FOLDER

The oldest versions are in oldest.txt; a test compares it with the bounds in pyproject.toml. The newest are
those that pip finds. FOLDER becomes the environment, of several GB: on Linux, PyPI's torch is a CUDA build. The tests
run on the CPU. An existing environment is brought up to date.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from environment import ROOT, Environment, normalize

CORE = (
    "tests/format",
    "tests/curvature",
    "tests/linearization",
    "tests/estimation",
    "tests/vectors",
    "tests/training",
    "tests/tasks/test_embedded.py",
    "tests/tasks/test_local.py",
    "tests/models/test_clip.py",
    "tests/models/test_embedded.py",
    "tests/models/test_images.py",
    "tests/models/test_t5.py",
    "tests/hub/test_push.py",
    "tests/experiments/test_figures.py",
    "tests/test_compat.py",
    "tests/test_torch_private.py",
)
"""Tests of the parts that use other packages."""
# Other versions issue other deprecation warnings, which are not errors here.
PYTEST = ("-m", "pytest", "-W", "default", "--numprocesses=2", "--dist=loadfile", "-p", "no:cacheprovider")


def main(versions: str, folder: str) -> int:
    environment = Environment(Path(folder), clear=False)
    newest = ("--upgrade", "--upgrade-strategy", "eager")
    options = {"oldest": ("--constraint", str(ROOT / "tests/environments/oldest.txt")), "newest": newest}
    environment.install("--upgrade", "pip")
    environment.install(*options[versions], "--editable", f"{ROOT}[test]")
    done = environment.run("python", *PYTEST, *CORE, cwd=ROOT)
    installed = environment.versions()
    names = (name for name in dependencies() if normalize(name) in installed)  # not ray
    listed = ", ".join(f"{name} {installed[normalize(name)]}" for name in names)
    print(f"compat {versions}: Python {environment.python}, {listed}: {'failed' if done.returncode else 'passed'}")
    return done.returncode


def dependencies() -> list[str]:
    """Returns the packages of kfacpack and of its extras that have a lower bound, from `MINIMUM` in _compat.py."""
    source = (ROOT / "kfacpack" / "_compat.py").read_text(encoding="utf-8")
    table = source.partition("MINIMUM = {")[2].partition("}")[0]
    return re.findall(r'"([\w-]+)":', table)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
