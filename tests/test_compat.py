"""Missing packages and unsupported versions are reported in one line with the command that helps."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from kit import refused

import kfacpack as kp
from kfacpack import _compat
from kfacpack._compat import EXTRAS, MINIMUM, require
from kfacpack.demo import canvas
from kfacpack.experiments.plan_file import plan_text

ROOT = Path(__file__).resolve().parents[1]


def toml() -> dict:
    tomllib = pytest.importorskip("tomllib")
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def bounds(requirements: list[str]) -> dict[str, str]:
    """Package -> lower bound."""
    return dict(requirement.split(">=") for requirement in requirements if not requirement.startswith("kfacpack["))


def test_bounds_are_those_of_the_project():
    project = toml()
    extras = project["optional-dependencies"]
    assert (
        bounds(project["dependencies"] + extras["demo"] + extras["ray"] + extras["report"] + extras["timm"]) == MINIMUM
    )
    assert set(bounds(extras["demo"] + extras["report"])) == set(EXTRAS["demo"])
    assert set(bounds(extras["report"])) == set(EXTRAS["report"])
    assert all(set(bounds(extras[name])) == set(EXTRAS[name]) for name in ("ray", "timm"))
    packages = {package for packages in EXTRAS.values() for package in packages}
    assert packages.isdisjoint(bounds(project["dependencies"]))


def test_the_oldest_versions_are_the_bounds():
    text = (ROOT / "tests/environments/oldest.txt").read_text(encoding="utf-8")
    pins = dict(re.findall(r"^([\w.-]+)==([\w.]+)", text, re.MULTILINE))
    pins = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    assert {name: pins[name.lower().replace("_", "-")] for name in MINIMUM} == MINIMUM


@pytest.fixture
def without(monkeypatch):
    """Returns a function that hides modules, as if their packages were not installed."""

    def hide(*modules: str) -> None:
        for module in modules:
            monkeypatch.setitem(sys.modules, module, None)

    return hide


def test_a_missing_package_is_named_with_its_extra(without):
    require(extra="demo")
    without("skimage", "sklearn")
    with refused(kp.KfacpackError, "drawing", "scikit-learn, scikit-image, which are", "pip install 'kfacpack[demo]'"):
        require(extra="demo", feature="drawing")
    require(extra="report")
    without("torch")
    with refused(kp.KfacpackError, "torch, which is not installed", "pip install torch"):
        require("torch")


@pytest.mark.parametrize(
    ("installed", "supported"),
    [
        ("2.5.1+cu124", False),
        ("2.5.9.dev20250101", False),
        ("1.99", False),
        ("2.6.0", True),
        ("2.6", True),
        ("2.6.0a0+gitab12", True),
        ("2.10.1", True),
        ("3", True),
    ],
)
def test_an_unsupported_version_is_refused(monkeypatch, installed, supported):
    monkeypatch.setitem(MINIMUM, "torch", "2.6.0")
    monkeypatch.setattr(_compat, "version", lambda package: installed)
    if supported:
        require("torch")
        return
    with refused(kp.KfacpackError, f"torch >= 2.6.0, found {installed}", "pip install 'torch>=2.6.0'") as raised:
        require("torch")
    assert "\n" not in str(raised.value)


def test_a_package_without_metadata_is_accepted(monkeypatch):
    def unknown(package: str) -> str:
        raise _compat.PackageNotFoundError(package)

    monkeypatch.setattr(_compat, "version", unknown)
    require("torch")


def test_tasks_name_the_packages_they_need(without, tmp_path, monkeypatch):
    monkeypatch.setenv("KFACPACK_CACHE", str(tmp_path))
    without("sklearn", "skimage", "mlxtend", "fontTools", "matplotlib", "jinja2")
    canvas._font.cache_clear()
    canvas.render_glyph.cache_clear()
    packages = {
        "digits": "scikit-learn",
        "mnist": "mlxtend",
        "materials": "scikit-image",
        "faces": "scikit-image",
        "hebrew": "fonttools, matplotlib",
        "syllabics": "fonttools, matplotlib",
        "emblems": "fonttools, matplotlib",
    }
    for name, package in packages.items():
        task = kp.load_task(name)
        assert task.sizes["train"]
        with refused(kp.KfacpackError, package, "pip install 'kfacpack[demo]'"):
            task.split("test")
    assert len(kp.load_task("weaves").split("test"))


BLOCKED = ["sklearn", "skimage", "mlxtend", "fontTools", "matplotlib", "jinja2"]
PROGRAM = """
import sys
sys.modules.update(dict.fromkeys({blocked}, None))
from kfacpack_cli import run
sys.argv = ["kfacpack", *{arguments}]
run()
"""


def command(*arguments: str, blocked: list[str] = BLOCKED) -> subprocess.CompletedProcess[str]:
    """Runs a command in a process in which some modules cannot be imported."""
    program = PROGRAM.format(blocked=blocked, arguments=arguments)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (("demo", "-o", "{folder}/demo"), "demo"),
        (("report", "{folder}", "-o", "{folder}/report.html"), "report"),
        (("run", "{folder}/plan.yaml", "-o", "{folder}/run"), "report"),
        (("measure", "spectra", "{folder}/no.kfac", "--figure", "{folder}/s.png"), "report"),
        (("tasks", "digits", "--sheet", "{folder}/digits.png"), "demo"),
        (("estimate", "--task", "mnist", "-o", "{folder}/mnist.kfac"), "demo"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_commands_name_the_extra_they_need(tmp_path, monkeypatch, arguments, extra):
    monkeypatch.setenv("KFACPACK_CACHE", str(tmp_path / "cache"))
    (tmp_path / "plan.yaml").write_text(plan_text(all_tasks=False), encoding="utf-8")
    done = command(*(argument.format(folder=tmp_path) for argument in arguments))
    assert done.returncode == 2, done.stderr
    assert f"pip install 'kfacpack[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["plan.yaml"]


def test_lists_need_no_extra():
    assert "digits" in command("tasks").stdout
    assert "tiny" in command("models").stdout


def test_the_command_refuses_an_unsupported_version():
    program = "import kfacpack._compat as c\nc.MINIMUM['{}'] = '999'\n" + PROGRAM
    for package in ("typer", "pydantic", "torch"):
        code = program.format(package, blocked=[], arguments=("estimate", "--task", "weaves", "--dry-run"))
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 2, done.stderr
        assert f"pip install '{package}>=999'" in done.stderr
        assert len(done.stderr.splitlines()) == 1
