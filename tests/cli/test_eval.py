"""`kfacpack eval`, as a shell sees it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from kfacpack_cli.main import app
from pictures import paint
from typer.testing import CliRunner

from kfacpack.tasks import TASKS, load_task

RANDOM = ["--weights", "random"]
COUNTS = {split: dict.fromkeys(("red", "green", "blue"), 4) for split in ("train", "test")}


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
        (["--task", "a", "b", "--data", "/tmp"], "--data is the data of one task, found 2: a, b"),
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


def test_help_waits_for_no_torch():
    program = "import sys, kfacpack_cli.main\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
