"""`kfacpack run` and `kfacpack demo`, from the command line."""

from __future__ import annotations

import json
import shutil
import signal
import time
import warnings

import pytest
import yaml
from experiments.small_plan import TEXT
from image_folders import write_images
from kfacpack_cli import experiments
from kfacpack_cli.main import app
from processes import Python
from typer.testing import CliRunner

from kfacpack.experiments.results_schema import UnknownKeyWarning, read_results, read_times

PLAN = TEXT.replace("layer_examples: 0", "layer_examples: 1") + "  in_depth: [kfac]\n"
"""Has every measurement for one arm; that of single layers takes longest."""


def run(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with a plan and its finished run, and what the run printed."""
    folder = tmp_path_factory.mktemp("plan")
    (folder / "small.yaml").write_text(PLAN)
    result = run("run", folder / "small.yaml", "-o", folder / "out")
    assert result.exit_code == 0, result.output
    return folder, result.stdout


@pytest.fixture
def without_report(monkeypatch):
    """Runs write no report; drawing its figures takes seconds."""
    monkeypatch.setattr("kfacpack.experiments.report.report", lambda folder, page: page)


def test_run_prints_a_table_and_writes_a_report(finished):
    folder, printed = finished
    for words in ("individual", "recovered", "without", "kfac", "report.html", "of memory"):
        assert words in printed
    assert {"results.json", "times.json", "report.html", "report.json", "figures"} <= {
        file.name for file in (folder / "out").iterdir()
    }


@pytest.mark.usefixtures("without_report")
def test_json_equals_the_results_file(finished):
    folder, _ = finished
    result = run("run", folder / "small.yaml", "-o", folder / "out", "--json")
    assert json.loads(result.stdout) == json.loads((folder / "out" / "results.json").read_text())


def test_a_dry_run_writes_nothing(finished, tmp_path):
    folder, _ = finished
    completed = run("run", folder / "small.yaml", "-o", tmp_path / "new", "--dry-run")
    assert completed.exit_code == 0
    assert "vectors/faces.kfac.seed-0" in completed.stdout
    assert "30 stages to run, 0 finished" in completed.stdout
    assert not (tmp_path / "new").exists()
    result = json.loads(run("run", folder / "small.yaml", "-o", folder / "out", "--dry-run", "--json").stdout)
    assert all(stage["done"] for stage in result["stages"])
    assert result["seconds"] == 0


def test_recorded_commands_use_existing_options(finished):
    folder, _ = finished
    commands = json.loads((folder / "out" / "results.json").read_text())["commands"]
    kinds = {command.split()[1] for command in commands}
    assert kinds == {"estimate", "merge", "train", "add"}
    for kind in kinds:
        command = next(text for text in commands if text.split()[1] == kind)
        options = [word for word in command.split() if word.startswith("--")]
        known = run(kind, "--help").stdout
        assert all(option in known for option in options)


def test_a_wrong_plan_is_refused(tmp_path):
    (tmp_path / "plan.yaml").write_text(TEXT.replace("steps: 3", "steps: many"))
    result = run("run", tmp_path / "plan.yaml")
    assert result.exit_code == 2
    assert "plan.yaml, line 5: training.steps" in result.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("known", "unknown", "expected"),
    [
        ("[faces, weaves]", "[faces, nowhere]", "line 3: tasks.1: unknown task 'nowhere'"),
        ("weaves]", "{name: mine, data: ~nosuch/x}]", "line 3: tasks.1: ~nosuch/x: the home directory of this user"),
        ("name: tiny", "name: nosuch", "line 2: model: unknown open_clip model 'nosuch'"),
    ],
)
def test_unknown_names_are_refused_before_the_run(tmp_path, known, unknown, expected):
    (tmp_path / "plan.yaml").write_text(TEXT.replace(known, unknown))
    result = run("run", tmp_path / "plan.yaml", "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {tmp_path / 'plan.yaml'}, {expected}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kind", "classes", "expected"),
    [
        ("prototypes", ("red",), "line 3: tasks.1: the task mine has only one class, 'red'"),
        ("words", ("red", "blue"), "line 2: model.head: tiny predicts no words"),
    ],
)
def test_a_dry_run_checks_the_plan_like_a_run(tmp_path, kind, classes, expected):
    write_images(tmp_path / "mine", {split: dict.fromkeys(classes, 1) for split in ("train", "validation", "test")})
    text = TEXT.replace("weaves]", "{name: mine, data: mine}]").replace("head: prototypes", f"head: {kind}")
    (tmp_path / "plan.yaml").write_text(text)
    result = run("run", tmp_path / "plan.yaml", "-o", tmp_path / "out", "--dry-run")
    assert result.exit_code == 2
    assert expected in result.stderr


def test_the_report_supports_every_key_of_a_run(finished):
    folder, _ = finished
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnknownKeyWarning)
        read_results(folder / "out")
        read_times(folder / "out")


def test_the_demo_does_not_overwrite_a_plan(tmp_path):
    (tmp_path / "plan.yaml").write_text(TEXT)
    result = run("demo", "-o", tmp_path)
    assert result.exit_code == 2
    assert "differs from the plan of the demo" in result.stderr
    assert (tmp_path / "plan.yaml").read_text() == TEXT


@pytest.mark.usefixtures("without_report")
def test_the_demo_explains_itself_on_one_screen(finished, monkeypatch):
    folder, _ = finished
    monkeypatch.setattr("kfacpack.experiments.plan_file.plan_text", lambda all_tasks: TEXT)
    printed = run("demo", "-o", folder / "out").stdout
    results = read_results(folder / "out")
    assert len(printed.splitlines()) < 40
    for fact in (*results.names, "base model", *(row.arm for row in results.summary), "plan.yaml", "report.html"):
        assert fact in printed
    for row in results.summary:
        assert f"{row.added:.1%}" in printed


@pytest.mark.parametrize(("idle", "jobs"), [(1.9, None), (0.8, 1), (0.0, 1), (8.0, None), (None, None)])
def test_the_demo_uses_idle_cores(idle, jobs, monkeypatch):
    monkeypatch.setattr(experiments, "_idle_cores", lambda: idle)
    monkeypatch.setattr("kfacpack.estimation.distributed.usable_cores", lambda: 2)
    assert experiments.idle_jobs() == jobs


@pytest.mark.parametrize("jobs", ["0", "-1", "two"])
def test_a_wrong_number_of_jobs_is_refused(tmp_path, jobs):
    (tmp_path / "plan.yaml").write_text(TEXT)
    assert run("run", tmp_path / "plan.yaml", "-o", tmp_path / "out", "--jobs", jobs).exit_code == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("without_report")
def test_an_interrupted_run_resumes_to_the_same_results(finished, tmp_path):
    """The plan has no analyses, which are interrupted in tests/runs/test_run.py."""
    folder, _ = finished
    plan = yaml.safe_load(TEXT)
    for analysis in ("negation", "disentanglement", "localisation", "drift", "spectra"):
        del plan["evaluation"][analysis]
    (tmp_path / "short.yaml").write_text(yaml.safe_dump(plan))
    shutil.copytree(folder / "out", tmp_path / "whole")
    whole = run("run", tmp_path / "short.yaml", "-o", tmp_path / "whole", "--json")
    times = json.loads((tmp_path / "whole" / "times.json").read_text())
    assert all(stage["reused"] for stage in times["stages"]), "the files of the finished run are those of this plan"
    arguments = ["run", tmp_path / "short.yaml", "-o", tmp_path / "out", "-q"]
    for signal_number, after in ((signal.SIGINT, "bundles/*.kfac"), (signal.SIGKILL, "vectors/*.safetensors")):
        with Python("-m", "kfacpack_cli", *arguments) as process:
            while not list((tmp_path / "out").glob(after)) and process.returncode is None:
                time.sleep(0.05)
            process.send_signal(signal_number)
            result = process.wait()
        assert result.returncode == (130 if signal_number == signal.SIGINT else -signal_number)
    assert run(*arguments).exit_code == 0
    assert json.loads(whole.stdout)["arms"]
    assert (tmp_path / "out" / "results.json").read_bytes() == (tmp_path / "whole" / "results.json").read_bytes()
