"""`kfacpack tasks`, from the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from kfacpack_cli.main import app
from PIL import Image
from typer.testing import CliRunner

from kfacpack.tasks.registry import PUBLISHED, TASKS, load_task


def run(*arguments, code=0):
    result = CliRunner().invoke(app, ["tasks", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == code, result.stderr
    return result


@pytest.fixture
def pictures(tmp_path):
    """A folder of images in two classes."""
    for name in ("dark", "light [x]"):
        (tmp_path / "pictures" / "train" / name).mkdir(parents=True)
        Image.new("L", (40, 30), 99).save(tmp_path / "pictures" / "train" / name / "0.png")
    return tmp_path / "pictures"


def test_every_task_is_listed_with_its_sizes():
    shown = run().stdout
    for name in TASKS:
        task = load_task(name)
        row = next(line for line in shown.splitlines() if line.startswith(f"{name} "))
        for number in (len(task.classes), *task.sizes.values()):
            assert f" {number:,} " in row
    assert "CC BY-SA 3.0" in shown


def test_listing_generates_no_data(tmp_path):
    program = "import sys; from kfacpack_cli.main import app; app(['tasks', '--json'], standalone_mode=False)\n"
    program += "assert not {'datasets', 'torch'} & set(sys.modules)"
    environment = {**os.environ, "KFACPACK_CACHE": str(tmp_path / "cache")}
    result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert {task["name"] for task in json.loads(result.stdout)["tasks"]} == set(TASKS)
    assert not (tmp_path / "cache").exists()


def test_showing_one_task():
    shown = run("digits").stdout
    for fact in ("10 classes", "zero, one", "a photo of the digit {}.", "train 1,000", "scikit-learn", "CC BY 4.0"):
        assert fact in shown
    result = json.loads(run("digits", "--json").stdout)
    task = load_task("digits")
    assert result == {
        "name": "digits",
        "classes": list(task.classes),
        "templates": list(task.templates),
        "splits": {"train": 1000, "validation": 200, "test": 597},
        "source": task.source,
        "license": "CC BY 4.0",
    }
    assert result in json.loads(run("--json").stdout)["tasks"]


def test_a_task_in_a_folder(pictures):
    result = json.loads(run("mine", "--data", pictures, "--json").stdout)
    assert (result["name"], result["classes"], result["splits"]) == ("mine", ["dark", "light [x]"], {"train": 2})
    assert (result["source"], result["license"]) == ("pictures", None)
    assert "dark, light [x]" in run("mine", "--data", pictures).stdout


def test_a_sheet_is_a_png(tmp_path, pictures):
    file = tmp_path / "sheet.png"
    completed = run("faces", "--sheet", file, "--split", "test")
    assert f"wrote {file}: 2 classes" in completed.stdout
    with Image.open(file) as image:
        assert (image.format, image.mode, image.size) == ("PNG", "RGB", (990, 184))
    before = file.read_bytes()
    result = json.loads(run("mine", "--data", pictures, "--sheet", file, "--json").stdout)
    assert result["sheet"] == {"path": str(file), "split": "train", "classes": 2, "left_out": 0}
    assert file.read_bytes() != before
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["sheet.png"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["nothing"], "unknown task 'nothing'. Run `kfacpack tasks` for a list"),
        (["--sheet", "out.png"], "--sheet needs a task"),
        (["--data", "."], "--data needs a task"),
        (["faces", "--split", "test"], "--split selects the images that --sheet draws; pass --sheet FILE.png"),
        (
            ["faces", "--sheet", "out.png", "--split", "dev"],
            "unknown split 'dev'; expected one of train, validation, test",
        ),
        (["faces", "--sheet", "nowhere/out.png"], "nowhere/out.png: no such folder: 'nowhere'"),
        (["faces", "--sheet", "out.jpg"], "out.jpg: expected a file name that ends in .png"),
        (["mine", "--data", "nowhere"], "nowhere: no such folder"),
    ],
)
def test_bad_usage_is_refused(tmp_path, monkeypatch, arguments, problem):
    monkeypatch.chdir(tmp_path)
    result = run(*arguments, code=2)
    assert problem in result.stderr
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_published_tasks_are_listed_and_shown_without_a_network(monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "HfApi", None, raising=False)
    shown = run().stdout
    for name, definition in PUBLISHED.items():
        row = next(line for line in reversed(shown.splitlines()) if line.startswith(f"{name} "))
        for number in (definition.classes, *definition.sizes.values()):
            assert f" {number:,} " in row
        assert definition.repository in row
    published = {entry["name"]: entry for entry in json.loads(run("--json").stdout)["published"]}
    assert set(published) == set(PUBLISHED)
    dtd = json.loads(run("dtd", "--json").stdout)
    assert dtd == published["dtd"]
    assert (dtd["class_count"], dtd["splits"]["test"], dtd["columns"]["image"][0]) == (47, 1880, "image")
    for fact in (
        "tanganke/dtd",
        "https://huggingface.co/datasets/tanganke/dtd",
        "a photo of a {} texture.",
        "test 1,880",
    ):
        assert fact in run("dtd").stdout
    assert "held out from the train split" in run("rte").stdout
    assert "accept its terms" in run("imagenet").stdout
    assert "rows without a label" in run("snli").stdout


def test_an_ambiguous_task_name_gives_a_warning():
    assert "--data hf://datasets/ylecun/mnist" in " ".join(run("mnist").stdout.split())
    note = CliRunner().invoke(app, ["eval", "--task", "mnist", "--model", "no-such-model"]).stderr
    note = " ".join(note.split())
    assert "warning: the embedded task mnist is not the public dataset of the same name" in note
    assert "contains 5,000 digits of MNIST" in note
    quiet = CliRunner().invoke(app, ["eval", "--task", "mnist", "--model", "no-such-model", "--quiet"]).stderr
    assert "warning" not in quiet


@pytest.mark.parametrize("option", [("--columns", "text=a"), ("--data", "folder"), ("--sheet", "sheet.png")])
def test_options_of_one_task_need_its_name(option):
    assert f"{option[0]} needs a task" in run(*option, code=2).stderr


def test_the_sheet_is_checked_before_the_task_is_loaded(tmp_path):
    """The task does not exist, but the output is refused first."""
    assert ".png" in run("no-such-task", "--sheet", tmp_path / "sheet.jpg", code=2).stderr
    assert str(tmp_path) in run("no-such-task", "--sheet", tmp_path / "none" / "sheet.png", code=2).stderr.replace(
        "\n", ""
    )


def test_the_option_columns(pictures, tmp_path):
    import datasets

    folder = tmp_path / "own"
    folder.mkdir()
    datasets.Dataset.from_dict({"a": ["x", "y"], "kind": ["b", "c"]}).to_parquet(folder / "train.parquet")
    result = json.loads(run("mine", "--data", folder, "--columns", "text=a,label=kind", "--json").stdout)
    assert result["classes"] == ["b", "c"]
    assert (
        "the values of column 'kind' in train: b, c" in run("mine", "--data", folder, "--columns", "label=kind").stdout
    )
    assert "no column 'z'" in run("mine", "--data", folder, "--columns", "text=z", code=2).stderr
