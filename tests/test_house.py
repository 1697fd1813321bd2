"""The house keeps its own rules: what imports what, what is packaged, what is public."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kfacpack as kp

ROOT = Path(__file__).resolve().parents[1]
LAYERS = [
    "errors",
    "paths",
    "hub.files",
    "bundle",
    "curvature.matrices",
    "curvature",
    "running",
    "verification",
    "exporting",
    "packages",
    "drawing",
    "vectors",
    "compression",
    "merging",
    "tasks",
    "function",
    "models",
    "heads",
    "linear",
    "estimation",
    "importing",
    "evaluation",
    "analysis",
    "figures",
    "training",
    "reporting",
    "plans",
    "hub",
]
"""In the order of CONTRIBUTING's table: a module imports from its own layer and from those before it."""


def layer_of(module: str) -> int:
    inner = module.removeprefix("kfacpack.")
    return max(
        (k for k, layer in enumerate(LAYERS) if inner == layer or inner.startswith(f"{layer}.")),
        key=lambda k: len(LAYERS[k]),
    )


def imports_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module} | {
        alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }


@pytest.mark.parametrize("path", sorted((ROOT / "kfacpack").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path):
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    imported = {name for name in imports_of(path) if name.startswith(("kfacpack", "cli"))}
    assert not any(name.startswith(("kfacpack_cli", "cli")) for name in imported), "the library imports no command"
    if module == "kfacpack":
        return
    for name in imported - {"kfacpack"}:
        assert layer_of(name) <= layer_of(module), f"{module} imports {name}"


def test_every_package_is_listed_for_the_wheel():
    listed = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("packages = [")[1].split("]")[0]
    folders = {
        ".".join(path.parent.relative_to(ROOT).parts).replace("cli", "kfacpack_cli", 1)
        if path.parent.name == "cli"
        else ".".join(path.parent.relative_to(ROOT).parts)
        for top in ("kfacpack", "cli")
        for path in (ROOT / top).rglob("__init__.py")
    }
    assert {line.strip(' ",') for line in listed.split("\n")} - {""} == folders


def test_every_public_name_is_there():
    assert set(kp.__all__) == set(kp._HOMES) == set(dir(kp)) - {"__version__"}
    for name in kp.__all__:
        assert getattr(kp, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = kp.nothing


def test_pickles_are_read_in_one_place():
    reading = re.compile(r"^\s*(import|from) (pickle|dill|joblib|cloudpickle)\b|torch\.load\(", re.MULTILINE)
    paths = [path for top in ("kfacpack", "cli", "spec") for path in (ROOT / top).rglob("*.py")]
    readers = {str(path.relative_to(ROOT)) for path in paths if reading.search(path.read_text(encoding="utf-8"))}
    assert readers == {"kfacpack/importing/unpickle.py"}


def test_the_bundle_package_needs_no_torch():
    program = "import sys, kfacpack.bundle.reader, kfacpack.bundle.writer, kfacpack.verification\n"
    program += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_example_predicts_the_drift_it_measures(tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "small_network.py"), str(tmp_path / "small.kfac")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    predicted, measured = (float(line.split()[-1]) for line in done.stdout.splitlines())
    assert predicted == pytest.approx(measured, rel=0.05)
    assert kp.verify(tmp_path / "small.kfac", tmp_path / "small.safetensors").holds
