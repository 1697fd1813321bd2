"""Commands that are recorded mean the same from one folder, the run's; paths in plans, from the plan's."""

from __future__ import annotations

import os
import shlex
import subprocess

import pytest
from experiments.small import TEXT
from kit import refused

import kfacpack as kp
from kfacpack.experiments.plan_file import parse
from kfacpack.experiments.stage import command, model_options, task_data_option, task_options


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """The plan's, the run's, and another one that the user is in."""
    for name in ("plans/t5/small", "plans/data", "runs/out", "elsewhere/t5/small", "elsewhere/hub/name"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "plans", tmp_path / "runs" / "out"


def plan_of(folder, model="tiny", data="data"):
    text = TEXT.replace("name: tiny,", f"name: {model!r},").replace("weaves]", f"{{name: mine, data: {data!r}}}]")
    return parse(text, "plan.yaml").based_at(folder)


def echoed(words, root):
    """What a shell in the run's folder makes of a command's words."""
    line = command(*words).removeprefix("kfacpack ")
    done = subprocess.run(["sh", "-c", f"printf '%s\\n' {line}"], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "data",
    [
        "data",
        "./data",
        "../plans/data",
        "$HERE/data",
        "${HERE}/data",
        "~/data",
        "$NEAR",
        'a "b`c$-d',
        '$HERE/a "b`c$-d',
    ],
)
def test_paths_are_those_of_the_plan(folders, monkeypatch, data):
    folder, root = folders
    for name, value in (("HERE", str(folder)), ("HOME", str(folder)), ("NEAR", "data")):
        monkeypatch.setenv(name, value)
    plan = plan_of(folder, data=data)
    meant = os.path.realpath(plan.place(data))
    *_, word = echoed(task_options(plan, "mine", root), root)
    assert os.path.realpath(root / word) == meant
    (word,) = echoed([task_data_option(plan, "mine", root)], root)
    assert os.path.realpath(root / word.removeprefix("mine=")) == meant


def test_variables_are_written_as_in_the_plan(folders, monkeypatch):
    folder, root = folders
    monkeypatch.setenv("DATA", str(folder))
    line = command(*task_options(plan_of(folder, data="$DATA/mine"), "mine", root))
    assert line == 'kfacpack --task mine --data "$DATA/mine"'


@pytest.mark.parametrize("said", ["t5:t5/small", "t5:./t5/small", "hf:t5/small"])
def test_a_models_folder_is_meant_from_the_plans(folders, said):
    folder, root = folders
    plan = plan_of(folder, said)
    assert os.path.realpath(plan.model_folder()) == os.path.realpath(folder / "t5/small")
    assert shlex.join(map(str, model_options(plan, root))) == f"--model {said[:3]}../../plans/t5/small"


def test_a_model_of_the_hub_is_no_folder(folders):
    folder, root = folders
    plan = plan_of(folder, "t5:google/flan-t5-small")
    assert plan.model_folder() is None
    assert model_options(plan, root) == ("--model", "t5:google/flan-t5-small")
    assert plan_of(folder, "timm:t5/small").model_folder() is None


def test_a_folder_that_is_only_where_the_user_is(folders):
    with refused(kp.KfacpackError):
        plan_of(folders[0], "t5:hub/name").model_folder()
