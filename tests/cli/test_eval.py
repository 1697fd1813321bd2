"""`kfacpack eval`, from the command line."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys

import pytest
from image_folders import write_images
from kfacpack_cli.evaluator import print_sweep
from kfacpack_cli.main import app
from random_vectors import random_vector
from typer.testing import CliRunner

import kfacpack as kp
from kfacpack.evaluation.accuracy import Score
from kfacpack.evaluation.sweep import evaluation_result
from kfacpack.tasks.registry import TASKS, load_task

RANDOM = ["--weights", "random"]
COUNTS = {split: dict.fromkeys(("red", "green", "blue"), 4) for split in ("train", "validation", "test")}


def run(*arguments, code=0):
    result = CliRunner().invoke(app, ["eval", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("colours"), COUNTS)


@pytest.fixture
def _registered(folder, monkeypatch):
    """Two tasks that need no --data."""
    for name in ("morning", "evening"):
        monkeypatch.setitem(TASKS, name, lambda name=name: load_task(name, folder))


def test_json_format_is_stable(folder):
    result = run(*RANDOM, "--task", "colours", "--data", folder, "--head", "prototypes", "--json")
    assert json.loads(result.stdout) == {
        "tasks": {"colours": {"accuracy": 1.0, "normalized": None, "examples": 12, "head": "prototypes"}},
        "mean": {"accuracy": 1.0, "normalized": None},
    }
    assert not result.stderr


def test_each_of_several_tasks_has_its_own_folder(folder, tmp_path):
    write_images(tmp_path, {split: dict.fromkeys(classes, 2) for split, classes in COUNTS.items()})
    both = ["--data", f"large={folder}", "--data", f"small={tmp_path}"]
    output = json.loads(run(*RANDOM, "--task", "large", "small", *both, "--json").stdout)["tasks"]
    assert [output[name]["examples"] for name in ("large", "small")] == [12, 6]
    for name, place in (("large", folder), ("small", tmp_path)):
        alone = json.loads(run(*RANDOM, "--task", name, "--data", place, "--json").stdout)["tasks"]
        assert alone == {name: output[name]}


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize("tasks", [["--task", "morning", "evening"], ["--task", "morning", "--task", "evening"]])
def test_several_tasks_and_their_mean(tasks):
    common = [*RANDOM, "--model", "tiny", "--batch-size", 5]
    output = json.loads(run(*tasks, *common, "--json", "--examples", "50%").stdout)
    assert list(output["tasks"]) == ["morning", "evening"]
    assert {item["head"] for item in output["tasks"].values()} == {"text"}
    assert {item["examples"] for item in output["tasks"].values()} == {6}
    accuracies = [item["accuracy"] for item in output["tasks"].values()]
    assert output["mean"]["accuracy"] == pytest.approx(sum(accuracies) / 2)


@pytest.mark.usefixtures("_registered")
def test_the_table(folder):
    lines = run(*RANDOM, "--task", "morning", "evening", "--head", "prototypes").stdout.splitlines()
    assert [line.split() for line in lines] == [
        ["task", "accuracy", "examples", "head"],
        ["morning", "100.0%", "12", "prototypes"],
        ["evening", "100.0%", "12", "prototypes"],
        ["mean", "100.0%"],
    ]
    alone = run(*RANDOM, "--task", "morning", "--split", "train").stdout
    assert "mean" not in alone
    assert not run(*RANDOM, "--task", "morning", "--quiet").output


def test_a_model_without_text_tower_uses_prototypes(folder):
    model = ["--model", "timm:test_vit", *RANDOM, "--image-size", 32]
    output = json.loads(run(*model, "--task", "colours", "--data", folder, "--json").stdout)
    assert output["tasks"]["colours"]["head"] == "prototypes"
    result = run(*model, "--task", "colours", "--data", folder, "--head", "text", code=2)
    assert "has no text tower" in result.stderr


def test_a_folder_with_the_name_of_its_task_is_its_data(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    output = run(*RANDOM, "--head", "prototypes", "--task", folder.name, "--data", folder.name, "--json").stdout
    assert list(json.loads(output)["tasks"]) == [folder.name]


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--task", "morning", "morning"], "'morning' is given twice"),
        (["--task", "morning", "unheard-of"], "unknown task 'unheard-of'"),
        (["--task", "a", "b", "--data", "/tmp"], "'/tmp': expected TASK=DIR"),
        (["--task", "a", "b", "--data", "c=x"], "task 'c' is not used by this command; expected a or b"),
        (["--task", "a", "b", "--data", "a=x", "--data", "a=y"], "task 'a' is given twice"),
        (["--task", "a", "b", "--columns", "label=y"], "--columns requires a single task, got 2: a, b"),
        (["--task", "a", "--data", "/no/such/folder"], "/no/such/folder"),
        (["--task", "morning", "--split", "nowhere"], "nowhere"),
        (["--task", "morning", "--examples", "0"], "examples '0'"),
        (["--task", "morning", "--model", "tinny"], "'tinny'; did you mean 'tiny'"),
        (["--task", "morning", "--device", "bogus"], "bogus"),
        (["--task", "morning", "--head", "guess"], "guess"),
        ([], "--task"),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, list) else None,
)
def test_wrong_input_is_refused(wrong, words):
    result = run(*wrong, code=2)
    assert words in result.stderr.replace("\n", " ")
    assert "Traceback" not in result.stderr
    assert not result.stdout


@pytest.fixture(scope="module")
def vectors(tmp_path_factory, folder):
    """Vectors of two tasks with the same images, each with its own head, and their sum."""
    vector_folder = tmp_path_factory.mktemp("vectors")
    model = kp.load_model("tiny", weights="random")
    both = []
    for seed, name in enumerate(("morning", "evening")):
        task = load_task(name, folder)
        bare = random_vector(model, name, size=0.02, seed=seed, params="visual.transformer.resblocks.3.*")
        both.append(kp.TaskVector(dict(bare), bare.about, {name: kp.head_for(model, task, kind="prototypes")}))
        both[-1].save(vector_folder / f"{name}.safetensors")
    (both[0] + both[1]).save(vector_folder / "sum.safetensors")
    return vector_folder


VECTOR = [*RANDOM, "--task", "morning", "evening", "--vector"]


@pytest.mark.usefixtures("_registered")
def test_a_sweep_equals_single_evaluations(vectors, tmp_path):
    common = [*VECTOR, vectors / "sum.safetensors", "--individual", "morning=0.8", "--individual", "evening=50%"]
    output = json.loads(run(*common, "--alpha=-1:2:1.5", "--json", "--csv", tmp_path / "all.csv").stdout)
    assert [item["alpha"] for item in output["sweep"]] == [-1.0, 0.5, 2.0]
    for item in output["sweep"]:
        alpha = item.pop("alpha")
        assert item == json.loads(run(*common, f"--alpha={alpha}", "--json").stdout)
        morning, evening = item["tasks"].values()
        assert morning["normalized"] == morning["accuracy"] / 0.8
        assert item["mean"]["normalized"] == pytest.approx((morning["normalized"] + evening["accuracy"] / 0.5) / 2)
    largest = max(item["mean"]["accuracy"] for item in output["sweep"])
    assert output["best"]["mean"]["accuracy"] == largest
    assert output["best"]["split"] == "test"
    with (tmp_path / "all.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["task"], row["split"], row["alpha"]) for row in rows[:3]] == [
        ("morning", "test", "-1.0"),
        ("evening", "test", "-1.0"),
        ("morning", "test", "0.5"),
    ]
    values = [task["accuracy"] for item in output["sweep"] for task in item["tasks"].values()]
    assert [float(row["accuracy"]) for row in rows] == values
    assert [path.name for path in tmp_path.iterdir()] == ["all.csv"]


@pytest.mark.usefixtures("_registered")
def test_alpha_is_chosen_on_validation_and_evaluated_on_test(vectors):
    common = [*VECTOR, vectors / "sum.safetensors"]
    output = json.loads(run(*common, "--choose", "--alpha", "0,1,3", "--json").stdout)
    on_validation = json.loads(run(*common, "--split", "validation", "--alpha", "0,1,3", "--json").stdout)
    assert output["validation"]["sweep"] == on_validation["sweep"]
    assert output["best"]["alpha"] == on_validation["best"]["alpha"]
    assert output["best"]["validation"] == on_validation["best"]["mean"]["accuracy"]
    on_test = json.loads(run(*common, "--alpha", output["best"]["alpha"], "--json").stdout)
    assert {key: output[key] for key in on_test} == on_test
    assert output["best"]["test"] == pytest.approx(on_test["mean"]["accuracy"])
    shown = run(*common, "--choose", "--alpha", "0,1,3").stdout.splitlines()
    assert shown[0].startswith(f"α = {output['best']['alpha']:g}, chosen from 3 values")
    assert [line.split()[0] for line in shown[1:]] == ["task", "morning", "evening", "mean"]


@pytest.mark.usefixtures("_registered")
def test_negation_under_a_control(vectors, tmp_path):
    common = [*RANDOM, "--task", "morning", "--vector", vectors / "morning.safetensors", "--control", "evening"]
    output = json.loads(run(*common, "--alpha", "0,1,3", "--keep", "80%", "--json", "--csv", tmp_path / "n.csv").stdout)
    negation = output["negation"]
    assert (negation["control"], negation["keep"], list(negation["tasks"])) == ("evening", 0.8, ["morning"])
    entry = negation["tasks"]["morning"]
    assert entry["chance"] == 1 / 3
    for alpha, target, control in ((0.0, "before", "control_before"), (entry["alpha"], "accuracy", "control")):
        plain = [*VECTOR, vectors / "morning.safetensors", f"--alpha={-alpha}", "--json"]
        tasks = json.loads(run(*plain).stdout)["tasks"]
        assert (tasks["morning"]["accuracy"], tasks["evening"]["accuracy"]) == (entry[target], entry[control])
    with (tmp_path / "n.csv").open(newline="") as file:
        rows = [(row["task"], float(row["alpha"]), float(row["accuracy"])) for row in csv.DictReader(file)]
    assert rows[0] == ("morning", 0.0, entry["before"])
    assert rows[3] == ("evening", -entry["alpha"], entry["control"])
    shown = run(*common, "--alpha", "0,1").stdout
    assert "the control task must keep 95%" in shown
    assert "control" in shown.splitlines()[3]


@pytest.mark.usefixtures("_registered")
def test_individual_vectors_are_evaluated_or_read(vectors, tmp_path):
    common = [*VECTOR, vectors / "sum.safetensors", "--json"]
    alone = {}
    for name in ("morning", "evening"):
        result = run(*RANDOM, "--task", name, "--vector", vectors / f"{name}.safetensors", "--json")
        (tmp_path / f"{name}.json").write_text(result.stdout)
        alone[name] = json.loads(result.stdout)["tasks"][name]["accuracy"]
    assert all(alone.values())
    for suffix, location in ((".json", tmp_path), (".safetensors", vectors)):
        options = [part for name in alone for part in ("--individual", location / f"{name}{suffix}")]
        output = json.loads(run(*common, *options).stdout)["tasks"]
        assert {name: item["normalized"] for name, item in output.items()} == {
            name: item["accuracy"] / alone[name] for name, item in output.items()
        }
    header = run(*common[:-1], "--individual", "morning=0.9").stdout.splitlines()[0].split()
    assert header == ["task", "accuracy", "normalised", "examples", "head"]


@pytest.mark.usefixtures("_registered")
def test_a_missing_head_is_reported(vectors):
    common = [*VECTOR, vectors / "morning.safetensors", "--json"]
    result = run(*common)
    assert json.loads(result.stdout)["tasks"]["evening"]["head"] == "text"
    assert "has no head for 'evening' (only for morning); using a new head, built from text" in result.stderr
    assert result.stderr.count("note") == 1
    assert not run(*common, "--quiet").stderr
    assert not run(*common, "--head", "prototypes").stderr
    assert not run(*VECTOR, vectors / "sum.safetensors", "--json").stderr


@pytest.mark.usefixtures("_registered")
def test_the_option_head_overrides_the_vectors_heads(vectors):
    common = [*RANDOM, "--task", "morning", "--vector", vectors / "morning.safetensors", "--json"]
    for options, head in (([], "prototypes"), (["--head", "auto"], "prototypes"), (["--head", "text"], "text")):
        assert json.loads(run(*common, *options).stdout)["tasks"]["morning"]["head"] == head


@pytest.mark.usefixtures("_registered")
def test_a_vector_of_another_image_size_is_refused(vectors):
    result = run(*VECTOR, vectors / "sum.safetensors", "--image-size", 56, code=2)
    for fact in ("different functions f", "28x28", "56x56"):
        assert fact in result.stderr


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--alpha", "0:2"], "alpha '0:2': a range has three numbers"),
        (["--alpha", "much"], "alpha 'much'"),
        (["--choose", "--alpha", "1"], "--choose requires several values of α"),
        (["--choose", "--split", "train"], "cannot be combined with --split train"),
        (["--choose", "--control", "faces"], "--choose and --control cannot be combined"),
        (["--control", "morning"], "--control morning: is also an evaluated task"),
        (["--control", "faces", "--alpha=-1,1"], "alpha is -1, "),
        (["--control", "faces", "--keep", "200%"], "--keep 200%: expected a share"),
        (["--control", "faces", "--individual", "morning=1"], "--individual and --control cannot be combined"),
        (["--keep", "90%"], "--keep needs a control task"),
        (["--individual", "noon=0.5"], "'noon' is not one of the evaluated tasks: morning, evening"),
        (["--individual", "morning=0"], "invalid accuracy 0; expected a number above 0"),
        (["--individual", "morning=1", "--individual", "morning=1"], "'morning' is given twice"),
        (["--individual", "nowhere.json"], "nowhere.json: no such file; expected a task vector, TASK=0.93"),
        (["--individual", "SUM"], "expected a vector of one task, got 2 (morning, evening)"),
        (["--individual", "SHORT"], "'morning' was evaluated on 3 examples, expected 12"),
        (["--individual", "SWEEP"], "expected the output of `kfacpack eval --json` for a single α"),
        (["--individual", "LIST"], "expected the output of `kfacpack eval --json` for a single α"),
        (["--individual", "DEEP"], "expected the output of `kfacpack eval --json` for a single α"),
        (["--csv", "SUM"], "is also an input"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_vector_options_are_refused(vectors, tmp_path, wrong, words):
    files = {"SUM": vectors / "sum.safetensors", "SHORT": tmp_path / "short.json", "SWEEP": tmp_path / "sweep.json"}
    files["SHORT"].write_text(json.dumps({"tasks": {"morning": {"accuracy": 0.5, "examples": 3}}}))
    files["SWEEP"].write_text(json.dumps({"sweep": []}))
    files |= {"LIST": tmp_path / "list.json", "DEEP": tmp_path / "deep.json"}
    files["LIST"].write_text('{"tasks": [1]}')
    files["DEEP"].write_text("[" * 100_000)
    result = run(*VECTOR, files["SUM"], *(files.get(item, item) for item in wrong), code=2)
    assert words in result.stderr.replace("\n", " ")
    assert not result.stdout


@pytest.mark.usefixtures("_registered")
def test_vector_options_need_a_vector():
    for wrong in (["--alpha", "2"], ["--individual", "morning=1"], ["--choose"], ["--control", "faces"]):
        assert f"{wrong[0]} needs a task vector" in run("--task", "morning", *wrong, code=2).stderr


@pytest.mark.parametrize("count", [1, 8, 30])
def test_a_sweeps_table_fits_eighty_columns(capsys, count):
    names = ["materials_of_a_long_name", *(f"syllabics{k}" for k in range(count - 1))]
    output = [evaluation_result(dict.fromkeys(names, Score(k, 3)), dict.fromkeys(names, 0.9)) for k in range(4)]
    print_sweep([-0.05, 0.0, 0.5, 1.0], output, 3, "test")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("100.0%" in line for line in lines) == sum("← best" in line for line in lines) >= 1
    assert sum(line.count("100.0%") for line in lines) == count + 1, "every task, and the mean"


def test_the_command_line_imports_no_torch():
    program = "import sys, kfacpack_cli.main\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
