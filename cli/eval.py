"""What `--individual` says: how well each task's own vector does, to normalise by.

`kfacpack eval`: how often a model is right on tasks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kfacpack.errors import KfacpackError, printable
from kfacpack.format.manifest import FloatType
from kfacpack.format.reference import is_reference
from kfacpack.format.units import parse_alphas
from kfacpack.models.prompts import PromptStyle

from .console import loading, print_json, show_note
from .evaluator import Evaluator, write_csv
from .options import (
    COLUMNS,
    DATA,
    DEVICE,
    DTYPE,
    HEAD,
    IMAGE_SIZE,
    MODEL_NAME,
    PROMPTS,
    QUIET,
    RUN,
    WEIGHTS,
    WORKERS,
    File,
    HeadKind,
    check_output,
    folders_of,
    load_model_option,
    load_task_option,
    option,
)

if TYPE_CHECKING:
    from kfacpack.evaluation.accuracy import EvaluationSet
    from kfacpack.vectors.task_vector import TaskVector


NUMBER = re.compile(r"(.+)=([0-9.]+)(%?)")
INDIVIDUAL_FORMS = "expected a vector's file, TASK=0.93, or a .json that eval --json printed"


def read_individual(said: list[str], exams: Mapping[str, EvaluationSet]) -> dict[str, float | TaskVector]:
    """A task's name -> its individual accuracy, or the vector that has it."""
    known: dict[str, float | TaskVector] = {}
    for each in said:
        for task, found in _read_entry(each, exams).items():
            if task in known:
                raise KfacpackError(f"--individual {printable(each)}: {printable(task)!r} is already given by another")
            known[task] = found
    return known


def _read_entry(said: str, exams: Mapping[str, EvaluationSet]) -> Mapping[str, float | TaskVector]:
    if is_reference(said):
        return _vector(said, exams)
    number = None if Path(said).exists() else NUMBER.fullmatch(said)
    if number:
        return {_evaluated(said, number[1], exams): _parse_share(said, number[2], number[3])}
    if not Path(said).is_file():
        raise _invalid_individual(said, f"there is no such file; {INDIVIDUAL_FORMS}")
    return _from_json(said, exams) if said.endswith(".json") else _vector(said, exams)


def _vector(said: str, exams: Mapping[str, EvaluationSet]) -> dict[str, float | TaskVector]:
    from kfacpack.vectors.task_vector import TaskVector

    vector = TaskVector.load(said)
    if len(vector.tasks) != 1:
        raise _invalid_individual(
            said, f"is a vector of {len(vector.tasks)} tasks, {', '.join(vector.tasks)}; expected of one"
        )
    return {_evaluated(said, vector.tasks[0], exams): vector}


def _from_json(said: str, exams: Mapping[str, EvaluationSet]) -> dict[str, float | TaskVector]:
    try:
        tasks = json.loads(Path(said).read_text(encoding="utf-8"))["tasks"]
        found = {task: (_parse_share(said, str(tasks[task]["accuracy"])), tasks[task]["examples"]) for task in tasks}
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise _invalid_individual(said, "is not what eval --json prints for one α") from error
    wanted = {task: each for task, each in found.items() if task in exams}
    if not wanted:
        raise _invalid_individual(said, f"has none of the tasks that are evaluated; it has {', '.join(found)}")
    for task, (_, examples) in wanted.items():
        if examples != (own := len(exams[task].numbers)):
            problem = f"{task!r} was evaluated on {examples} examples, and is on {own} here"
            raise _invalid_individual(said, f"{problem}; evaluate it with the same --split and --examples")
    return {task: accuracy for task, (accuracy, _) in wanted.items()}


def _evaluated(said: str, task: str, exams: Mapping[str, EvaluationSet]) -> str:
    if task not in exams:
        raise _invalid_individual(said, f"{task!r} is not among the tasks that are evaluated: {', '.join(exams)}")
    return task


def _parse_share(said: str, number: str, percent: str = "") -> float:
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise _invalid_individual(said, f"{number}{percent} is no accuracy to divide by; expected above 0, up to 1")
    return share


def _invalid_individual(said: str, problem: str) -> KfacpackError:
    return KfacpackError(f"--individual {printable(said)}: {printable(problem)}")


VECTOR = "The vector"


def evaluate(
    model: str = MODEL_NAME,
    task: list[str] = option(DATA, [], "--task", help="A task's name; repeatable."),
    more: list[str] | None = typer.Argument(None, metavar="TASK...", help="Further tasks: --task A B C."),
    weights: str | None = WEIGHTS,
    image_size: int | None = IMAGE_SIZE,
    prompts: PromptStyle | None = PROMPTS,
    vector: File | None = option(
        VECTOR,
        None,
        "--vector",
        metavar="FILE.safetensors",
        help="A task vector to add. Its own heads are used, unless --head names another kind; for a task that it has "
        "none for, one is made, and a note says so.",
    ),
    alpha: str | None = option(
        VECTOR,
        None,
        "--alpha",
        metavar="A|A,B|FROM:TO:STEP",
        help="What it is multiplied by: one number, several, or a range with its end, as 0:2:0.1. "
        "If it is not given: 1.0; with --choose 0:2:0.1, with --control 0:1:0.05.",
    ),
    individual: list[str] | None = option(
        VECTOR,
        None,
        "--individual",
        metavar="FILE|TASK=X|FILE.json",
        help="Normalise a task's accuracy by that of its own vector: the file of that vector, the number, or what "
        "eval --json printed for it; repeatable.",
    ),
    choose: bool = option(
        VECTOR, False, "--choose", help="Choose α by the mean accuracy on validation; evaluate on test at this α alone."
    ),
    control: str | None = option(
        VECTOR,
        None,
        "--control",
        metavar="TASK",
        help="Subtract the vector, as much of it as this task bears: α, chosen on validation, is the one that leaves "
        "the other tasks least while this one keeps --keep of its accuracy.",
    ),
    keep: str | None = option(
        VECTOR,
        None,
        "--keep",
        metavar="P%",
        help="The share of its accuracy that the --control task keeps; 95% by default.",
    ),
    device: str = DEVICE,
    dtype: FloatType = DTYPE,
    head: HeadKind = HEAD,
    data: list[str] | None = option(
        DATA,
        None,
        "--data",
        metavar="DIR|TASK=DIR",
        help="The task's data: a folder, or hf://datasets/OWNER/REPO, as for train. Of one of several tasks, or of the "
        "--control, TASK=DIR; repeatable.",
    ),
    columns: str | None = COLUMNS,
    split: str = option(DATA, "test", "--split", help="The split to take examples from."),
    examples: str = option(DATA, "all", "--examples", metavar="N|P%|all", help="How many; always the same ones."),
    batch_size: int = option(RUN, 64, "--batch-size", min=1, help="Examples at a time."),
    as_json: bool = option(RUN, False, "--json", help="Print the accuracies as JSON."),
    csv: Path | None = option(RUN, None, "--csv", metavar="FILE", help="Write them as a table, a row for each task."),
    workers: int | None = WORKERS,
    quiet: bool = QUIET,
) -> None:
    """Measure a model's accuracy on one or several tasks, and its mean over them.

    With --vector, of the model with α times that task vector: one that was trained linearised is used in the
    linearised model, where a range of α costs no more than one.
    """
    names = [*task, *(more or [])]
    _check_names(names, control)
    folders = _folders(names, control, data or [], columns)
    needing = {"alpha": alpha, "individual": individual, "choose": choose, "control": control}
    if vector is None and (first := next((name for name, given in needing.items() if given), None)):
        raise KfacpackError(f"--{first} is about a task vector: give --vector FILE.safetensors as well")
    _check_combination(choose, control, keep, individual, split)
    alphas = parse_alphas(alpha if alpha is not None else "0:2:0.1" if choose else "0:1:0.05" if control else "1.0")
    if choose and len(alphas) == 1:
        raise KfacpackError(f"--choose needs several α to choose from, found {alpha}; give --alpha 0:2:0.1")
    share = _percentage_of_individual(keep or "95%")
    if csv:
        if csv.is_dir():
            raise KfacpackError(f"{csv}: is a folder; give the path of a file")
        check_output(csv, [each for each in (vector, *(individual or ())) if each])
    # They bring torch, which --help has no need to wait for.
    from kfacpack.estimation.distributed import local_device
    from kfacpack.evaluation.accuracy import EvaluationSet, vector_head
    from kfacpack.evaluation.sweep import validation_set
    from kfacpack.models.data_loading import use_workers
    from kfacpack.vectors.task_vector import TaskVector

    use_workers(workers)
    show = not (quiet or as_json)
    place = local_device(device)
    with loading(", ".join([*names, model]), show=show):
        tasks = [load_task_option(name, folders.get(name), columns, model, quiet=quiet) for name in names]
        if control is not None:
            tasks.append(load_task_option(control, folders.get(control), None, model, quiet=quiet))
        exams = {each.name: EvaluationSet.of(each, split, examples) for each in tasks}
        chosen_on = {each.name: validation_set(each, examples) for each in tasks} if choose or control else {}
        known = read_individual(individual or [], exams)
        tau = TaskVector.load(vector) if vector else None
        loaded = load_model_option(model, weights, image_size, dtype, place, prompts=prompts)
    for each in (tau, *known.values()):
        if isinstance(each, TaskVector):
            each.check(loaded.module, loaded.function)  # before anything takes long
    room = Evaluator(loaded, head, batch_size, show)
    made = {each.name: room.head(each, tau) for each in tasks}
    if vector and tau and head == "auto" and not quiet:
        for name in (each.name for each in tasks[: len(names)] if vector_head(each, tau) is None):
            own = f"its heads are for {', '.join(tau.heads)}" if tau.heads else "it has none"
            problem = f"{vector} has no head for {name!r}, {own}"
            show_note(f"note: {problem}; what is told of it is with one made for the model ({made[name].origin})")
    if control is not None:
        assert tau is not None
        found = room.negation(made, chosen_on, exams, tau, alphas, share)
    elif choose:
        assert tau is not None
        found = room.choice(made, chosen_on, exams, tau, alphas, room.accuracies(known, exams))
    else:
        found = room.sweep(made, exams, tau, alphas, room.accuracies(known, exams), split)
    if csv:
        write_csv(csv, found.rows)
    if as_json:
        print_json(found.as_json)
    elif show:
        found.print()


def _folders(names: list[str], control: str | None, data: list[str], columns: str | None) -> dict[str, str]:
    """Task -> where its data is: a folder alone is that of the one task, and else it is TASK=DIR for each."""
    if columns and len(names) > 1:
        raise KfacpackError(
            f"--columns is about the data of one task, found {len(names)}: {printable(', '.join(names))}"
        )
    everyone = [*names, *([control] if control else [])]
    if len(names) == len(data) == 1 and data[0].partition("=")[0] not in everyone:
        return {names[0]: data[0]}
    return folders_of(everyone, data)


def _check_names(names: list[str], control: str | None) -> None:
    if not names:
        raise KfacpackError("no task to evaluate on; name one with --task. `kfacpack tasks` lists those that are known")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise KfacpackError(f"task {printable(twice[0])!r} is named twice; once is enough")
    if control in names:
        raise KfacpackError(f"--control {printable(str(control))}: is to be forgotten as well; name another task")


def _check_combination(
    choose: bool,
    control: str | None,
    keep: str | None,
    individual: list[str] | None,
    split: str,
) -> None:
    if choose and control:
        raise KfacpackError("--choose looks for the best α, --control for the one that forgets most; give one of them")
    if (choose or control) and split != "test":
        asked = "--choose" if choose else "--control"
        problem = f"{asked} chooses α on validation and evaluates on test, found --split {printable(split)}"
        raise KfacpackError(f"{problem}. Leave out one of them")
    if control is None and keep:
        raise KfacpackError("--keep is about the control task: name it with --control TASK")
    if control and individual:
        raise KfacpackError("--individual normalises what a vector adds, and --control takes it away; give one of them")


def _percentage_of_individual(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise KfacpackError(f"--keep {printable(text)}: expected a share such as 95%, above 0%, up to 100%")
    return share
