"""`kfacpack eval`: evaluates the accuracy of a model on tasks, with or without a task vector."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kfacpack.errors import KfacpackError, counted, printable
from kfacpack.format.container import first_duplicate
from kfacpack.format.manifest import FloatType
from kfacpack.format.reference import is_reference
from kfacpack.format.units import parse_alphas
from kfacpack.format.vector_manifest import HeadKind
from kfacpack.models.prompts import PromptStyle

from .console import loading, print_json, print_line, show_note
from .evaluator import Evaluator, write_csv
from .options import (
    AS_JSON,
    BATCH_SIZE,
    COLUMNS,
    DATA_PANEL,
    DEVICE,
    DTYPE,
    HEAD,
    IMAGE_SIZE,
    MODEL_NAME,
    PROMPTS,
    QUIET,
    RUN_PANEL,
    TASK_HELP,
    WEIGHTS,
    WORKERS,
    File,
    check_output,
    data_folders,
    examples_option,
    load_model_option,
    load_task_option,
    option,
    split_option,
)

if TYPE_CHECKING:
    from kfacpack.evaluation.accuracy import EvaluationSet
    from kfacpack.vectors.task_vector import TaskVector


NUMBER = re.compile(r"(.+)=([0-9.]+%?)")
INDIVIDUAL_FORMS = "expected a task vector, TASK=0.93, or a .json file with the output of `kfacpack eval --json`"


def read_individual(values: list[str], sets: Mapping[str, EvaluationSet]) -> dict[str, float | TaskVector]:
    """Parses the values of --individual.

    Args:
        values: Vector files, TASK=NUMBER pairs, or JSON files with the output of earlier evaluations.
        sets: Evaluation sets by task.

    Returns:
        For each task, either the accuracy with the task's own vector or that vector.

    Raises:
        KfacpackError: If a value is invalid, if its task is not evaluated, or if a task is given twice.
    """
    individual: dict[str, float | TaskVector] = {}
    for value in values:
        for task, accuracy in _read_entry(value, sets).items():
            if task in individual:
                raise _invalid_individual(value, f"task {task!r} is given twice; pass one value per task")
            individual[task] = accuracy
    return individual


def _read_entry(value: str, sets: Mapping[str, EvaluationSet]) -> Mapping[str, float | TaskVector]:
    if is_reference(value):
        return _from_vector(value, sets)
    number = None if Path(value).exists() else NUMBER.fullmatch(value)
    if number:
        return {_require_evaluated(value, number[1], sets): _accuracy(value, number[2])}
    if not Path(value).is_file():
        raise _invalid_individual(value, f"no such file; {INDIVIDUAL_FORMS}")
    return _from_json(value, sets) if value.endswith(".json") else _from_vector(value, sets)


def _from_vector(value: str, sets: Mapping[str, EvaluationSet]) -> dict[str, float | TaskVector]:
    from kfacpack.vectors.task_vector import TaskVector

    vector = TaskVector.load(value)
    if len(vector.tasks) != 1:
        problem = f"expected a vector of one task, got {len(vector.tasks)} ({', '.join(vector.tasks) or 'none'})"
        raise _invalid_individual(value, problem)
    return {_require_evaluated(value, vector.tasks[0], sets): vector}


def _from_json(value: str, sets: Mapping[str, EvaluationSet]) -> dict[str, float | TaskVector]:
    try:
        tasks = json.loads(Path(value).read_text(encoding="utf-8"))["tasks"]
        entries = {task: (_accuracy(value, str(tasks[task]["accuracy"])), tasks[task]["examples"]) for task in tasks}
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise _invalid_individual(value, "expected the output of `kfacpack eval --json` for a single α") from error
    evaluated = {task: entry for task, entry in entries.items() if task in sets}
    if not evaluated:
        expected = f"expected the accuracy on at least one of the tasks {', '.join(sets)}"
        raise _invalid_individual(value, f"{expected}, got {', '.join(entries) or 'none'}")
    for task, (_, examples) in evaluated.items():
        if examples != (own := len(sets[task].numbers)):
            problem = f"task {task!r} was evaluated on {examples} examples, expected {own}"
            raise _invalid_individual(value, f"{problem}; evaluate it again with the same --split and --examples")
    return {task: accuracy for task, (accuracy, _) in evaluated.items()}


def _require_evaluated(value: str, task: str, sets: Mapping[str, EvaluationSet]) -> str:
    if task not in sets:
        raise _invalid_individual(value, f"task {task!r} is not one of the evaluated tasks: {', '.join(sets)}")
    return task


def _accuracy(value: str, number: str) -> float:
    share = _parse_share(number)
    if share is None:
        raise _invalid_individual(value, f"invalid accuracy {number}; expected a number above 0 and at most 1")
    return share


def _parse_share(text: str) -> float | None:
    """Parses a share, such as '0.95' or '95%'. Returns None if it is not a number above 0 and at most 1."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return None
    return share if 0 < share <= 1 else None


def _invalid_individual(value: str, problem: str) -> KfacpackError:
    return KfacpackError(f"--individual {printable(value)}: {printable(problem)}")


VECTOR_PANEL = "Vector"


def evaluate(
    model: str = MODEL_NAME,
    task: list[str] = option(
        DATA_PANEL,
        [],
        "--task",
        metavar="TASK",
        help=f"{TASK_HELP}; repeatable.",
    ),
    more: list[str] | None = typer.Argument(
        None, metavar="TASK...", help="Further tasks to evaluate, as in `--task A B C`."
    ),
    weights: str | None = WEIGHTS,
    image_size: int | None = IMAGE_SIZE,
    prompts: PromptStyle | None = PROMPTS,
    vector: File | None = option(
        VECTOR_PANEL,
        None,
        "--vector",
        metavar="FILE.safetensors",
        help="Task vector to add to the model. The heads in the vector are used unless --head is passed.",
    ),
    alpha: str | None = option(
        VECTOR_PANEL,
        None,
        "--alpha",
        metavar="α|α,α|FROM:TO:STEP",
        help="Factor α of the vector: a number, a comma-separated list, or a range, which includes its end if a step "
        "reaches it. [default: 1; 0:2:0.1 with --choose; 0:1:0.05 with --control]",
    ),
    individual: list[str] | None = option(
        VECTOR_PANEL,
        None,
        "--individual",
        metavar="FILE|TASK=X|FILE.json",
        help="Normalise the accuracy on a task by the accuracy with the task's own vector. Pass this vector, this "
        "accuracy, or a file with the output of `kfacpack eval --json`; repeatable.",
    ),
    choose: bool = option(
        VECTOR_PANEL,
        False,
        "--choose",
        help="Choose the α with the highest mean accuracy on the validation split, and evaluate the vector at this α "
        "on the test split.",
    ),
    control: str | None = option(
        VECTOR_PANEL,
        None,
        "--control",
        metavar="TASK",
        help="Subtract the vector instead of adding it, and use this task as the control task. α is chosen on the "
        "validation split. Of the values at which the accuracy on the control task is at least the limit set by "
        "--keep, the one with the lowest accuracy on the evaluated tasks is chosen.",
    ),
    keep: str | None = option(
        VECTOR_PANEL,
        None,
        "--keep",
        metavar="P%",
        help="Minimum accuracy on the control task, as a share of its accuracy without the vector. [default: 95%]",
    ),
    device: str = DEVICE,
    dtype: FloatType = DTYPE,
    head: HeadKind = HEAD,
    data: list[str] | None = option(
        DATA_PANEL,
        None,
        "--data",
        metavar="DIR|TASK=DIR",
        help="Data of the task: a folder or hf://datasets/… (see `kfacpack train`). With --control or several tasks, "
        "pass TASK=DIR for each task that needs data; repeatable.",
    ),
    columns: str | None = COLUMNS,
    split: str = split_option("test"),
    examples: str = examples_option("all"),
    batch_size: int = BATCH_SIZE,
    as_json: bool = AS_JSON,
    csv: Path | None = option(
        RUN_PANEL, None, "--csv", metavar="FILE", help="Also write a CSV file with one row per task and α."
    ),
    workers: int | None = WORKERS,
    quiet: bool = QUIET,
) -> None:
    """Evaluate the accuracy of a model on tasks, with or without a task vector.

    With --vector, the model plus α times the vector is evaluated. Vectors trained in the linear regime are evaluated in
    the linearised model, in which evaluating a range of values of α takes hardly longer than evaluating one value.
    """
    names = [*task, *(more or [])]
    _check_names(names, control)
    folders = _folders(names, control, data or [], columns)
    vector_options = {"alpha": alpha, "individual": individual, "choose": choose, "control": control}
    if vector is None and (first := next((name for name, value in vector_options.items() if value), None)):
        raise KfacpackError(f"--{first} needs a task vector; pass --vector FILE.safetensors as well")
    _check_combination(choose, control, keep, individual, split)
    alphas = parse_alphas(alpha if alpha is not None else "0:2:0.1" if choose else "0:1:0.05" if control else "1.0")
    if choose and len(alphas) == 1:
        raise KfacpackError(f"--choose requires several values of α, got {alpha}; pass a range such as --alpha 0:2:0.1")
    kept_share = _parse_share(keep or "95%")
    if kept_share is None:
        raise KfacpackError(f"--keep {printable(str(keep))}: expected a share above 0% and at most 100%, such as 95%")
    if csv:
        if csv.is_dir():
            raise KfacpackError(f"{csv}: is a folder; expected a file")
        check_output(csv, [file for file in (vector, weights, *(individual or ())) if file])
    # Imported here so that --help does not wait for torch.
    from kfacpack.estimation.distributed import local_device
    from kfacpack.evaluation.accuracy import EvaluationSet, vector_head
    from kfacpack.evaluation.sweep import SelectionTask, validation_set
    from kfacpack.models.data_loading import use_workers
    from kfacpack.vectors.task_vector import TaskVector

    use_workers(workers)
    show = not (quiet or as_json)
    torch_device = local_device(device)
    with loading(", ".join([*names, model]), show=show):
        tasks = [load_task_option(name, folders.get(name), columns, model, quiet=quiet) for name in names]
        if control is not None:
            tasks.append(load_task_option(control, folders.get(control), None, model, quiet=quiet))
        sets = {loaded.name: EvaluationSet.of(loaded, split, examples) for loaded in tasks}
        validation = {loaded.name: validation_set(loaded, examples) for loaded in tasks} if choose or control else {}
        own_vectors = read_individual(individual or [], sets)
        tau = TaskVector.load(vector) if vector else None
        loaded_model = load_model_option(model, weights, image_size, dtype, torch_device, prompts=prompts)
    for added in (tau, *own_vectors.values()):
        if isinstance(added, TaskVector):
            added.check(loaded_model.module, loaded_model.function)  # fails before any long computation
    evaluator = Evaluator(loaded_model, head, batch_size, show)
    heads = {loaded.name: evaluator.head(loaded, tau) for loaded in tasks}
    if vector and tau and head == "auto" and not quiet:
        for name in (loaded.name for loaded in tasks[: len(names)] if vector_head(loaded, tau) is None):
            existing = f" (only for {', '.join(tau.heads)})" if tau.heads else ""
            problem = f"{vector} has no head for {name!r}{existing}"
            show_note(f"note: {problem}; using a new head, built from {heads[name].origin}")
    accuracies = evaluator.individual_accuracies(own_vectors, sets)
    if tau and (choose or control):
        selection = [SelectionTask(heads[name], validation[name], sets[name]) for name in sets]
        output = (
            evaluator.choice(selection, tau, alphas, accuracies)
            if choose
            else evaluator.negation(selection, tau, alphas, kept_share)
        )
    else:
        output = evaluator.sweep(heads, sets, tau, alphas, accuracies, split)
    if csv:
        write_csv(csv, output.rows)
    if as_json:
        print_json(output.as_json)
    elif show:
        output.print()
        if csv:
            print_line(f"wrote {csv}: {counted(len(output.rows), 'row')}")


def _folders(names: list[str], control: str | None, data: list[str], columns: str | None) -> dict[str, str]:
    """Returns the data folders by task. For a single task, --data may be given without TASK=."""
    if columns and len(names) > 1:
        raise KfacpackError(f"--columns requires a single task, got {len(names)}: {printable(', '.join(names))}")
    tasks = [*names, *([control] if control else [])]
    if len(names) == len(data) == 1 and not data[0].startswith(tuple(f"{task}=" for task in tasks)):
        return {names[0]: data[0]}
    return data_folders(tasks, data)


def _check_names(names: list[str], control: str | None) -> None:
    if not names:
        raise KfacpackError("no task to evaluate; pass a task with --task. Run `kfacpack tasks` for a list")
    if repeated := first_duplicate(names):
        raise KfacpackError(f"task {printable(repeated)!r} is given twice; pass each task once")
    if control in names:
        raise KfacpackError(f"--control {printable(str(control))}: is also an evaluated task; pass a different task")


def _check_combination(
    choose: bool,
    control: str | None,
    keep: str | None,
    individual: list[str] | None,
    split: str,
) -> None:
    if choose and control:
        problem = "--choose and --control cannot be combined, because one adds the vector and the other subtracts it"
        raise KfacpackError(f"{problem}; omit one of them")
    if (choose or control) and split != "test":
        flag = "--choose" if choose else "--control"
        problem = f"{flag} always evaluates on the test split and cannot be combined with --split {printable(split)}"
        raise KfacpackError(f"{problem}; omit one of the two options")
    if control is None and keep:
        raise KfacpackError("--keep needs a control task; pass it with --control TASK")
    if control and individual:
        problem = "--individual and --control cannot be combined, because a negation has no normalised accuracy"
        raise KfacpackError(f"{problem}; omit one of them")
