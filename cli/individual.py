"""What `--individual` says: how well each task's own vector does, to normalise by."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kfacpack.errors import KfacpackError, printable
from kfacpack.hub.files.reference import is_reference

if TYPE_CHECKING:
    from kfacpack.evaluation.accuracy import Exam
    from kfacpack.vectors.vector import TaskVector

NUMBER = re.compile(r"(.+)=([0-9.]+)(%?)")
FORMS = "expected a vector's file, TASK=0.93, or a .json that eval --json printed"


def read(said: list[str], exams: Mapping[str, Exam]) -> dict[str, float | TaskVector]:
    """A task's name -> its individual accuracy, or the vector that has it."""
    known: dict[str, float | TaskVector] = {}
    for each in said:
        for task, found in _one(each, exams).items():
            if task in known:
                raise KfacpackError(f"--individual {printable(each)}: {printable(task)!r} is already given by another")
            known[task] = found
    return known


def _one(said: str, exams: Mapping[str, Exam]) -> Mapping[str, float | TaskVector]:
    if is_reference(said):
        return _vector(said, exams)
    number = None if Path(said).exists() else NUMBER.fullmatch(said)
    if number:
        return {_evaluated(said, number[1], exams): _share(said, number[2], number[3])}
    if not Path(said).is_file():
        raise _wrong(said, f"there is no such file; {FORMS}")
    return _from_json(said, exams) if said.endswith(".json") else _vector(said, exams)


def _vector(said: str, exams: Mapping[str, Exam]) -> dict[str, float | TaskVector]:
    from kfacpack.vectors.vector import TaskVector

    vector = TaskVector.load(said)
    if len(vector.tasks) != 1:
        raise _wrong(said, f"is a vector of {len(vector.tasks)} tasks, {', '.join(vector.tasks)}; expected of one")
    return {_evaluated(said, vector.tasks[0], exams): vector}


def _from_json(said: str, exams: Mapping[str, Exam]) -> dict[str, float | TaskVector]:
    try:
        tasks = json.loads(Path(said).read_text(encoding="utf-8"))["tasks"]
        found = {task: (_share(said, str(tasks[task]["accuracy"])), tasks[task]["examples"]) for task in tasks}
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise _wrong(said, "is not what eval --json prints for one α") from error
    wanted = {task: each for task, each in found.items() if task in exams}
    if not wanted:
        raise _wrong(said, f"has none of the tasks that are evaluated; it has {', '.join(found)}")
    for task, (_, examples) in wanted.items():
        if examples != (own := len(exams[task].numbers)):
            problem = f"{task!r} was evaluated on {examples} examples, and is on {own} here"
            raise _wrong(said, f"{problem}; evaluate it with the same --split and --examples")
    return {task: accuracy for task, (accuracy, _) in wanted.items()}


def _evaluated(said: str, task: str, exams: Mapping[str, Exam]) -> str:
    if task not in exams:
        raise _wrong(said, f"{task!r} is not among the tasks that are evaluated: {', '.join(exams)}")
    return task


def _share(said: str, number: str, percent: str = "") -> float:
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise _wrong(said, f"{number}{percent} is no accuracy to divide by; expected above 0, up to 1")
    return share


def _wrong(said: str, problem: str) -> KfacpackError:
    return KfacpackError(f"--individual {printable(said)}: {printable(problem)}")
