"""`kfacpack eval`, as a shell sees it."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys

import pytest
from kfacpack_cli.evaluator import print_sweep
from kfacpack_cli.main import app
from made_up import made_up
from pictures import paint
from typer.testing import CliRunner

import kfacpack as kp
from kfacpack.evaluation.accuracy import Score
from kfacpack.evaluation.sweep import evaluation_result
from kfacpack.tasks.registry import TASKS, load_task

RANDOM = ["--weights", "random"]
COUNTS = {split: dict.fromkeys(("red", "green", "blue"), 4) for split in ("train", "validation", "test")}


def run(*arguments, code=0):
    done = CliRunner().invoke(app, ["eval", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return paint(tmp_path_factory.mktemp("colours"), COUNTS)


@pytest.fixture
def _registered(folder, monkeypatch):
    """Two tasks that need no --data."""
    for name in ("morning", "evening"):
        monkeypatch.setitem(TASKS, name, lambda name=name: load_task(name, folder))


def test_json_has_the_form_it_will_keep(folder):
    done = run(*RANDOM, "--task", "colours", "--data", folder, "--head", "prototypes", "--json")
    assert json.loads(done.stdout) == {
        "tasks": {"colours": {"accuracy": 1.0, "normalized": None, "examples": 12, "head": "prototypes"}},
        "mean": {"accuracy": 1.0, "normalized": None},
    }
    assert not done.stderr


def test_each_of_several_tasks_has_its_own_folder(folder, tmp_path):
    paint(tmp_path, {split: dict.fromkeys(classes, 2) for split, classes in COUNTS.items()})
    both = ["--data", f"large={folder}", "--data", f"small={tmp_path}"]
    found = json.loads(run(*RANDOM, "--task", "large", "small", *both, "--json").stdout)["tasks"]
    assert [found[name]["examples"] for name in ("large", "small")] == [12, 6]
    for name, place in (("large", folder), ("small", tmp_path)):
        alone = json.loads(run(*RANDOM, "--task", name, "--data", place, "--json").stdout)["tasks"]
        assert alone == {name: found[name]}


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize("tasks", [["--task", "morning", "evening"], ["--task", "morning", "--task", "evening"]])
def test_several_tasks_and_their_mean(tasks):
    common = [*RANDOM, "--model", "tiny", "--batch-size", 5]
    found = json.loads(run(*tasks, *common, "--json", "--examples", "50%").stdout)
    assert list(found["tasks"]) == ["morning", "evening"]
    assert {each["head"] for each in found["tasks"].values()} == {"text"}
    assert {each["examples"] for each in found["tasks"].values()} == {6}
    accuracies = [each["accuracy"] for each in found["tasks"].values()]
    assert found["mean"]["accuracy"] == pytest.approx(sum(accuracies) / 2)


@pytest.mark.usefixtures("_registered")
def test_a_person_gets_a_table(folder):
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


def test_a_backbone_without_texts_takes_prototypes(folder):
    model = ["--model", "timm:test_vit", *RANDOM, "--image-size", 32]
    found = json.loads(run(*model, "--task", "colours", "--data", folder, "--json").stdout)
    assert found["tasks"]["colours"]["head"] == "prototypes"
    done = run(*model, "--task", "colours", "--data", folder, "--head", "text", code=2)
    assert "has no text tower" in done.stderr


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--task", "morning", "morning"], "'morning' is named twice"),
        (["--task", "morning", "unheard-of"], "'unheard-of' is no registered task"),
        (["--task", "a", "b", "--data", "/tmp"], "'/tmp': expected a task and its folder, such as cars=data/cars"),
        (["--task", "a", "b", "--data", "c=x"], "task 'c' is not measured on; that are a, b"),
        (["--task", "a", "b", "--data", "a=x", "--data", "a=y"], "task 'a' is given twice"),
        (["--task", "a", "b", "--columns", "label=y"], "--columns is about the data of one task, found 2: a, b"),
        (["--task", "a", "--data", "/no/such/folder"], "/no/such/folder"),
        (["--task", "morning", "--split", "nowhere"], "nowhere"),
        (["--task", "morning", "--examples", "0"], "examples '0'"),
        (["--task", "morning", "--model", "tinny"], "close to it are tiny"),
        (["--task", "morning", "--device", "bogus"], "bogus"),
        (["--task", "morning", "--head", "guess"], "guess"),
        ([], "--task"),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, list) else None,
)
def test_wrong_input_is_told_before_anything_is_evaluated(wrong, words):
    done = run(*wrong, code=2)
    assert words in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr
    assert not done.stdout


@pytest.fixture(scope="module")
def vectors(tmp_path_factory, folder):
    """Of two tasks that are the same pictures, one vector each, with heads of their own; and their sum."""
    made = tmp_path_factory.mktemp("vectors")
    model = kp.load_model("tiny", weights="random")
    both = []
    for seed, name in enumerate(("morning", "evening")):
        task = load_task(name, folder)
        bare = made_up(model, name, size=0.02, seed=seed, params="visual.transformer.resblocks.3.*")
        both.append(kp.TaskVector(dict(bare), bare.about, {name: kp.head_for(model, task, "prototypes")}))
        both[-1].save(made / f"{name}.safetensors")
    (both[0] + both[1]).save(made / "sum.safetensors")
    return made


VECTOR = [*RANDOM, "--task", "morning", "evening", "--vector"]


@pytest.mark.usefixtures("_registered")
def test_a_sweep_has_what_each_alpha_gives(vectors, tmp_path):
    common = [*VECTOR, vectors / "sum.safetensors", "--individual", "morning=0.8", "--individual", "evening=50%"]
    found = json.loads(run(*common, "--alpha=-1:2:1.5", "--json", "--csv", tmp_path / "all.csv").stdout)
    assert [each["alpha"] for each in found["sweep"]] == [-1.0, 0.5, 2.0]
    for each in found["sweep"]:
        alpha = each.pop("alpha")
        assert each == json.loads(run(*common, f"--alpha={alpha}", "--json").stdout)
        morning, evening = each["tasks"].values()
        assert morning["normalized"] == morning["accuracy"] / 0.8
        assert each["mean"]["normalized"] == pytest.approx((morning["normalized"] + evening["accuracy"] / 0.5) / 2)
    largest = max(each["mean"]["accuracy"] for each in found["sweep"])
    assert found["best"]["mean"]["accuracy"] == largest
    assert found["best"]["split"] == "test"
    with (tmp_path / "all.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["task"], row["split"], row["alpha"]) for row in rows[:3]] == [
        ("morning", "test", "-1.0"),
        ("evening", "test", "-1.0"),
        ("morning", "test", "0.5"),
    ]
    told = [task["accuracy"] for each in found["sweep"] for task in each["tasks"].values()]
    assert [float(row["accuracy"]) for row in rows] == told
    assert [path.name for path in tmp_path.iterdir()] == ["all.csv"]


@pytest.mark.usefixtures("_registered")
def test_the_alpha_is_chosen_on_validation_and_told_on_test(vectors):
    common = [*VECTOR, vectors / "sum.safetensors"]
    found = json.loads(run(*common, "--choose", "--alpha", "0,1,3", "--json").stdout)
    on_validation = json.loads(run(*common, "--split", "validation", "--alpha", "0,1,3", "--json").stdout)
    assert found["validation"]["sweep"] == on_validation["sweep"]
    assert found["best"]["alpha"] == on_validation["best"]["alpha"]
    assert found["best"]["validation"] == on_validation["best"]["mean"]["accuracy"]
    on_test = json.loads(run(*common, "--alpha", found["best"]["alpha"], "--json").stdout)
    assert {key: found[key] for key in on_test} == on_test
    assert found["best"]["test"] == pytest.approx(on_test["mean"]["accuracy"])
    shown = run(*common, "--choose", "--alpha", "0,1,3").stdout.splitlines()
    assert shown[0].startswith(f"α = {found['best']['alpha']:g}, chosen from 3 on validation")
    assert [line.split()[0] for line in shown[1:]] == ["task", "morning", "evening", "mean"]


@pytest.mark.usefixtures("_registered")
def test_negation_under_a_control(vectors, tmp_path):
    common = [*RANDOM, "--task", "morning", "--vector", vectors / "morning.safetensors", "--control", "evening"]
    found = json.loads(run(*common, "--alpha", "0,1,3", "--keep", "80%", "--json", "--csv", tmp_path / "n.csv").stdout)
    told = found["negation"]
    assert (told["control"], told["keep"], list(told["tasks"])) == ("evening", 0.8, ["morning"])
    entry = told["tasks"]["morning"]
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
    assert "the control keeps 95% there" in shown
    assert "control" in shown.splitlines()[3]


@pytest.mark.usefixtures("_registered")
def test_individual_vectors_are_evaluated_or_read(vectors, tmp_path):
    common = [*VECTOR, vectors / "sum.safetensors", "--json"]
    alone = {}
    for name in ("morning", "evening"):
        done = run(*RANDOM, "--task", name, "--vector", vectors / f"{name}.safetensors", "--json")
        (tmp_path / f"{name}.json").write_text(done.stdout)
        alone[name] = json.loads(done.stdout)["tasks"][name]["accuracy"]
    assert all(alone.values())
    for suffix, where in ((".json", tmp_path), (".safetensors", vectors)):
        given = [part for name in alone for part in ("--individual", where / f"{name}{suffix}")]
        found = json.loads(run(*common, *given).stdout)["tasks"]
        assert {name: each["normalized"] for name, each in found.items()} == {
            name: each["accuracy"] / alone[name] for name, each in found.items()
        }
    header = run(*common[:-1], "--individual", "morning=0.9").stdout.splitlines()[0].split()
    assert header == ["task", "accuracy", "normalised", "examples", "head"]


@pytest.mark.usefixtures("_registered")
def test_a_head_that_the_vector_has_not_is_told(vectors):
    common = [*VECTOR, vectors / "morning.safetensors", "--json"]
    done = run(*common)
    assert json.loads(done.stdout)["tasks"]["evening"]["head"] == "text"
    said = (
        "has no head for 'evening', its heads are for morning; what is told of it is with one made for the model (text)"
    )
    assert said in done.stderr
    assert done.stderr.count("note") == 1
    assert not run(*common, "--quiet").stderr
    assert not run(*common, "--head", "prototypes").stderr
    assert not run(*VECTOR, vectors / "sum.safetensors", "--json").stderr


@pytest.mark.usefixtures("_registered")
def test_the_head_that_is_asked_for_goes_before_the_vectors_own(vectors):
    common = [*RANDOM, "--task", "morning", "--vector", vectors / "morning.safetensors", "--json"]
    for asked, head in (([], "prototypes"), (["--head", "auto"], "prototypes"), (["--head", "text"], "text")):
        assert json.loads(run(*common, *asked).stdout)["tasks"]["morning"]["head"] == head


@pytest.mark.usefixtures("_registered")
def test_a_vector_of_another_image_size_is_refused(vectors):
    done = run(*VECTOR, vectors / "sum.safetensors", "--image-size", 56, code=2)
    assert "another f than the model's" in done.stderr
    assert "28x28" in done.stderr
    assert "56x56" in done.stderr


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--alpha", "0:2"], "alpha '0:2': a range has three numbers"),
        (["--alpha", "much"], "alpha 'much'"),
        (["--choose", "--alpha", "1"], "--choose needs several α"),
        (["--choose", "--split", "train"], "--choose chooses α on validation and evaluates on test"),
        (["--choose", "--control", "faces"], "give one of them"),
        (["--control", "morning"], "--control morning: is to be forgotten as well"),
        (["--control", "faces", "--alpha=-1,1"], "α is a magnitude"),
        (["--control", "faces", "--keep", "200%"], "--keep 200%: expected a share"),
        (["--control", "faces", "--individual", "morning=1"], "give one of them"),
        (["--keep", "90%"], "--keep is about the control task"),
        (["--individual", "noon=0.5"], "'noon' is not among the tasks"),
        (["--individual", "morning=0"], "0 is no accuracy to divide by"),
        (["--individual", "morning=1", "--individual", "morning=1"], "'morning' is already given"),
        (["--individual", "nowhere.json"], "there is no such file; expected a vector's file, TASK=0.93"),
        (["--individual", "SUM"], "is a vector of 2 tasks, morning, evening; expected of one"),
        (["--individual", "SHORT"], "'morning' was evaluated on 3 examples, and is on 12 here"),
        (["--individual", "SWEEP"], "is not what eval --json prints for one α"),
        (["--individual", "LIST"], "is not what eval --json prints for one α"),
        (["--individual", "DEEP"], "is not what eval --json prints for one α"),
        (["--csv", "SUM"], "is also an input"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be_asked_of_a_vector(vectors, tmp_path, wrong, words):
    files = {"SUM": vectors / "sum.safetensors", "SHORT": tmp_path / "short.json", "SWEEP": tmp_path / "sweep.json"}
    files["SHORT"].write_text(json.dumps({"tasks": {"morning": {"accuracy": 0.5, "examples": 3}}}))
    files["SWEEP"].write_text(json.dumps({"sweep": []}))
    files |= {"LIST": tmp_path / "list.json", "DEEP": tmp_path / "deep.json"}
    files["LIST"].write_text('{"tasks": [1]}')
    files["DEEP"].write_text("[" * 100_000)
    done = run(*VECTOR, files["SUM"], *(files.get(each, each) for each in wrong), code=2)
    assert words in done.stderr.replace("\n", " ")
    assert not done.stdout


@pytest.mark.usefixtures("_registered")
def test_what_is_about_a_vector_needs_one():
    for wrong in (["--alpha", "2"], ["--individual", "morning=1"], ["--choose"], ["--control", "faces"]):
        assert f"{wrong[0]} is about a task vector" in run("--task", "morning", *wrong, code=2).stderr


@pytest.mark.parametrize("count", [1, 8, 30])
def test_a_sweeps_table_fits_eighty_columns(capsys, count):
    names = ["materials_of_a_long_name", *(f"syllabics{k}" for k in range(count - 1))]
    found = [evaluation_result(dict.fromkeys(names, Score(k, 3)), dict.fromkeys(names, 0.9)) for k in range(4)]
    print_sweep([-0.05, 0.0, 0.5, 1.0], found, 3, "test")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("100.0%" in line for line in lines) == sum("← best" in line for line in lines) >= 1
    assert sum(line.count("100.0%") for line in lines) == count + 1, "every task, and the mean"


def test_help_waits_for_no_torch():
    program = "import sys, kfacpack_cli.main\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
