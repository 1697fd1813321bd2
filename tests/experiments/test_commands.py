"""Paths in recorded commands are relative to the folder of the run, paths in plans to the folder of the plan."""

from __future__ import annotations

import os
import shlex
import subprocess

import pytest
from experiments.small_plan import TEXT
from kit import refused

import kfacpack as kp
from kfacpack.experiments.plan_file import parse
from kfacpack.experiments.stage import command, model_options, task_data_option, task_options


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """The folders of the plan and of the run; the working directory is a third one."""
    for name in ("plans/t5/small", "plans/data", "runs/out", "elsewhere/t5/small", "elsewhere/hub/name"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "plans", tmp_path / "runs" / "out"


def plan_of(folder, model="tiny", data="data"):
    text = TEXT.replace("name: tiny,", f"name: {model!r},").replace("weaves]", f"{{name: mine, data: {data!r}}}]")
    return parse(text, "plan.yaml").based_at(folder)


def echoed(words, root):
    """Returns the words of a command as a shell in the folder of the run expands them."""
    line = command(*words).removeprefix("kfacpack ")
    result = subprocess.run(
        ["sh", "-c", f"printf '%s\\n' {line}"], cwd=root, capture_output=True, text=True, check=True
    )
    return result.stdout.splitlines()


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
def test_commands_name_the_paths_of_the_plan(folders, monkeypatch, data):
    folder, root = folders
    for name, value in (("HERE", str(folder)), ("HOME", str(folder)), ("NEAR", "data")):
        monkeypatch.setenv(name, value)
    plan = plan_of(folder, data=data)
    expected = os.path.realpath(plan.resolve_path(data))
    *_, word = echoed(task_options(plan, "mine", root), root)
    assert os.path.realpath(root / word) == expected
    (word,) = echoed([task_data_option(plan, "mine", root)], root)
    assert os.path.realpath(root / word.removeprefix("mine=")) == expected


def test_variables_are_kept_as_in_the_plan(folders, monkeypatch):
    folder, root = folders
    monkeypatch.setenv("DATA", str(folder))
    line = command(*task_options(plan_of(folder, data="$DATA/mine"), "mine", root))
    assert line == 'kfacpack --task mine --data "$DATA/mine"'


@pytest.mark.parametrize("name", ["t5:t5/small", "t5:./t5/small", "hf:t5/small"])
def test_model_folders_are_relative_to_the_plan(folders, name):
    folder, root = folders
    plan = plan_of(folder, name)
    assert os.path.realpath(plan.model_folder()) == os.path.realpath(folder / "t5/small")
    assert shlex.join(map(str, model_options(plan, root))) == f"--model {name[:3]}../../plans/t5/small"


def test_hub_models_have_no_folder(folders):
    folder, root = folders
    plan = plan_of(folder, "t5:google/flan-t5-small")
    assert plan.model_folder() is None
    assert model_options(plan, root) == ("--model", "t5:google/flan-t5-small")
    assert plan_of(folder, "timm:t5/small").model_folder() is None


def test_a_model_folder_in_the_working_directory_is_refused(folders):
    with refused(kp.KfacpackError, "'hub/name'", folders[0], "the plan's own folder"):
        plan_of(folders[0], "t5:hub/name").model_folder()
