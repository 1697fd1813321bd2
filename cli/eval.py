"""`kfacpack eval`: how often a model is right on tasks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table
from rich.text import Text

from kfacpack.bundle.manifest import FloatType
from kfacpack.errors import KfacpackError, printable

from .console import out, print_json
from .options import (
    DATA,
    DATA_FOLDER,
    DEVICE,
    HEAD,
    IMAGE_SIZE,
    MODEL,
    MODEL_NAME,
    QUIET,
    RUN,
    WEIGHTS,
    HeadKind,
    load_named,
    option,
)
from .progress import examples_bar, loading

if TYPE_CHECKING:
    from kfacpack.evaluation.accuracy import Exam, Score
    from kfacpack.heads import Head


def evaluate(
    model: str = MODEL_NAME,
    task: list[str] = option(DATA, [], "--task", help="A task's name; repeatable."),
    more: list[str] | None = typer.Argument(None, metavar="TASK", help="Further tasks: --task A B C."),
    weights: str | None = WEIGHTS,
    image_size: int | None = IMAGE_SIZE,
    vector: Path | None = option(
        MODEL, None, "--vector", metavar="FILE.safetensors", help="A task vector to add; its own heads are used."
    ),
    device: str = DEVICE,
    dtype: FloatType = option(MODEL, "float32", "--dtype", help="The model's."),
    head: HeadKind = HEAD,
    data: Path | None = DATA_FOLDER,
    split: str = option(DATA, "test", "--split", help="The split to take examples from."),
    examples: str = option(DATA, "all", "--examples", metavar="N|P%|all", help="How many; always the same ones."),
    batch_size: int = option(RUN, 64, "--batch-size", min=1, help="Examples at a time."),
    as_json: bool = option(RUN, False, "--json", help="Print the accuracies as JSON."),
    quiet: bool = QUIET,
) -> None:
    """Measure a model's accuracy on one or several tasks, and its mean over them.

    With --vector, of the model with that task vector: one that was trained linearised is used in the linearised model.
    """
    names = [*task, *(more or [])]
    if not names:
        raise KfacpackError("no task to evaluate on; name one with --task. `kfacpack tasks` lists those that are known")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise KfacpackError(f"task {printable(twice[0])!r} is named twice; once is enough")
    if data is not None and len(names) > 1:
        raise KfacpackError(f"--data is the data of one task, found {len(names)}: {printable(', '.join(names))}")
    # They bring torch, which --help has no need to wait for.
    from kfacpack.evaluation.accuracy import Exam, score
    from kfacpack.heads import head_for
    from kfacpack.running.processes import local_device
    from kfacpack.tasks import load_task
    from kfacpack.vectors.vector import TaskVector

    show = not (quiet or as_json)
    place = local_device(device)
    with loading(", ".join([*names, model]), show=show):
        exams = [Exam.of(load_task(name, data), split, examples) for name in names]
        loaded = load_named(model, weights, image_size, dtype, place)
    tau = TaskVector.load(vector) if vector else None
    heads: list[Head] = []
    for exam in exams:
        if tau and exam.task.name in tau.heads:
            heads.append(tau.heads[exam.task.name])
            continue
        with examples_bar(f"{exam.task.name}: head", show=show) as advance:
            heads.append(head_for(loaded, exam.task, head, batch_size=batch_size, on_progress=advance))
    scores: list[Score] = []
    for exam, made in zip(exams, heads, strict=True):
        with examples_bar(exam.task.name, show=show) as advance:
            scores.append(score(loaded, made, exam, vector=tau, batch_size=batch_size, on_progress=advance))
    if as_json:
        print_json(_as_json(exams, heads, scores))
    elif show:
        _print(exams, heads, scores)


def _as_json(exams: list[Exam], heads: list[Head], scores: list[Score]) -> dict[str, Any]:
    tasks = {
        exam.task.name: {
            "accuracy": score.accuracy,
            "normalized": None,
            "examples": score.examples,
            "head": head.origin,
        }
        for exam, head, score in zip(exams, heads, scores, strict=True)
    }
    return {"tasks": tasks, "mean": {"accuracy": _mean(scores), "normalized": None}}


def _print(exams: list[Exam], heads: list[Head], scores: list[Score]) -> None:
    table = Table("task", box=None, header_style="bold", pad_edge=False)
    for heading in ("accuracy", "examples"):
        table.add_column(heading, justify="right")
    table.add_column("head")
    for exam, head, score in zip(exams, heads, scores, strict=True):
        name = Text(printable(exam.task.name), overflow="fold")
        table.add_row(name, f"{score.accuracy:.1%}", f"{score.examples:,}", head.origin)
    if len(scores) > 1:
        table.add_row("mean", f"{_mean(scores):.1%}", style="bold")
    out.print(table)


def _mean(scores: list[Score]) -> float:
    return sum(score.accuracy for score in scores) / len(scores)
