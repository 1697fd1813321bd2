"""`kfacpack train`: a task's vector, with or without a penalty that protects other tasks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from kfacpack.errors import KfacpackError, printable
from kfacpack.format.manifest import FloatType
from kfacpack.format.units import human_bytes, human_seconds
from kfacpack.format.vector_manifest import RegimeName
from kfacpack.models.prompts import PromptStyle
from kfacpack.training.penalty_weights import STRENGTH, STRENGTH_ON_DATA, Preset

from .console import examples_bar, loading, out, print_json, show_note, show_warnings, stop_on_interrupt, training_bar
from .options import (
    COLUMNS,
    DATA,
    DATA_FOLDER,
    DEVICE,
    DTYPE,
    HEAD,
    IMAGE_SIZE,
    MODEL_NAME,
    PARAMS,
    PROMPTS,
    QUIET,
    RUN,
    WEIGHTS,
    WORKERS,
    File,
    HeadKind,
    check_output,
    load_model_option,
    load_task_option,
    option,
    task_and_folder,
)

if TYPE_CHECKING:
    from kfacpack.tasks.task import Task
    from kfacpack.training.data_penalty import DataPenalty
    from kfacpack.training.regularizer import Regularizer
    from kfacpack.training.trainer import Trainer


TRAINING_PANEL, PENALTY_PANEL = "The training", "The penalty"


def train(
    model: str = MODEL_NAME,
    task: str = option(DATA, ..., "--task", help="The task's name."),
    output: Path | None = option(
        RUN, None, "--output", "-o", metavar="FILE.safetensors", help="The file to write; else TASK.safetensors."
    ),
    weights: str | None = WEIGHTS,
    image_size: int | None = IMAGE_SIZE,
    prompts: PromptStyle | None = PROMPTS,
    params: list[str] | None = PARAMS,
    device: str = DEVICE,
    dtype: FloatType = DTYPE,
    head: HeadKind = HEAD,
    data: str | None = DATA_FOLDER,
    columns: str | None = COLUMNS,
    reg: list[File] | None = option(
        PENALTY_PANEL, None, "--reg", metavar="FILE.kfac", help="A bundle of other tasks' curvature; repeatable."
    ),
    strength: float | None = option(
        PENALTY_PANEL,
        None,
        "--strength",
        metavar="λ",
        help="λ, which multiplies the drift of f relative to the scale of f. "
        f"Default: {STRENGTH:g}, or {STRENGTH_ON_DATA:g} with --reg-data.",
    ),
    reg_every: int = option(
        PENALTY_PANEL, 1, "--reg-every", min=1, metavar="N", help="Apply it at every N-th step only."
    ),
    weight: list[str] | None = option(
        PENALTY_PANEL,
        None,
        "--weight",
        metavar="GROUP=X",
        help="Multiply the penalty of a group: norm, token, projection, or an operation such as linear; repeatable.",
    ),
    preset: Preset | None = option(
        PENALTY_PANEL, None, "--preset", help="tak: the published strength, scaling and weights of groups."
    ),
    offload: bool = option(
        PENALTY_PANEL, False, "--offload", help="Keep factors on the CPU; bring one block at a time."
    ),
    reg_data: list[str] | None = option(
        PENALTY_PANEL,
        None,
        "--reg-data",
        metavar="TASK[=DIR]",
        help="Penalise the drift on this task's own data instead (τJp), in DIR if it is not one of ours; repeatable.",
    ),
    regime: RegimeName = option(
        TRAINING_PANEL,
        "linear",
        "--regime",
        help="linear: the linearised model. full: the model itself. attention: itself, only its attention layers move.",
    ),
    steps: int | None = option(
        TRAINING_PANEL, None, "--steps", min=1, help="How many steps; 500 if neither this nor --epochs is given."
    ),
    epochs: float | None = option(
        TRAINING_PANEL, None, "--epochs", help="Instead of --steps: how often to go through the training examples."
    ),
    batch_size: int = option(
        TRAINING_PANEL, 32, "--batch-size", min=1, help="Examples of one step, of all processes together."
    ),
    at_once: int | None = option(
        TRAINING_PANEL,
        None,
        "--at-once",
        min=1,
        metavar="N",
        help="Compute N examples at a time; a step adds up what it takes.",
    ),
    lr: float | None = option(
        TRAINING_PANEL, None, "--lr", help="The learning rate at its peak. By default one is found that fits the model."
    ),
    warmup: float = option(
        TRAINING_PANEL, 0.1, "--warmup", help="The share of steps in which the learning rate rises."
    ),
    weight_decay: float = option(
        TRAINING_PANEL, 0.1, "--weight-decay", help="AdamW's: it pulls the weights towards the base model's."
    ),
    autocast: bool | None = option(
        TRAINING_PANEL, None, "--autocast/--no-autocast", help="Compute the model in bfloat16; by default on CUDA."
    ),
    seed: int = option(TRAINING_PANEL, 0, "--seed", min=0, help="Decides the order of the examples."),
    resume: bool = option(RUN, False, "--resume", help="Go on with the run that was interrupted."),
    as_json: bool = option(RUN, False, "--json", help="Print what was made as JSON."),
    workers: int | None = WORKERS,
    quiet: bool = QUIET,
) -> None:
    """Train a task vector, and write it with its frozen head to one file.

    With --reg, the quadratic penalty of a bundle keeps the other tasks' outputs where they are, so that vectors can be
    added at α = 1. Give the bundle of the others: --reg others.kfac; or that of all and the task's own, which is then
    subtracted: --reg all.kfac --reg own.kfac.

    Ctrl-C stores what is done beside the output; --resume goes on from there, to the same bytes. Loss, penalty and
    accuracy of each step are in FILE.metrics.jsonl. Processes of torchrun or accelerate launch share each batch.
    """
    # They bring torch, which --help has no need to wait for.
    import torch

    from kfacpack.estimation import distributed
    from kfacpack.models.data_loading import use_workers
    from kfacpack.models.heads import head_for
    from kfacpack.training.metrics import require_metrics_path
    from kfacpack.training.regimes import REGIMES
    from kfacpack.training.settings import TrainingSettings
    from kfacpack.training.trainer import Trainer

    use_workers(workers)
    settings = TrainingSettings(
        steps=steps,
        epochs=epochs,
        batch_size=batch_size,
        at_once=at_once,
        lr=lr,
        warmup=warmup,
        weight_decay=weight_decay,
        seed=seed,
    )
    if reg and reg_data:
        raise KfacpackError("the penalty comes from bundles (--reg) or from data (--reg-data), found both")
    if strength is not None and not (reg or reg_data):
        raise KfacpackError("--strength is that of a penalty: give --reg FILE.kfac or --reg-data TASK")
    target = output or Path(f"{task.replace('/', '-')}.safetensors")
    check_output(target, [*(reg or ()), *([weights] if weights else ())])
    require_metrics_path(target)
    place = distributed.local_device(device)
    with distributed.process_group(place):
        show = distributed.rank() == 0 and not (quiet or as_json)
        with loading(f"{task}, {model}", show=show):
            # The task first: a slip of the pen should not wait for a model.
            silent = quiet or distributed.rank() != 0
            found_task = load_task_option(task, data, columns, model, quiet=silent)
            named = [task_and_folder("--reg-data", each, bare=True) for each in reg_data or ()]
            others = [load_task_option(name, folder, None, model, quiet=silent) for name, folder in named]
            found_model = load_model_option(model, weights, image_size, dtype, place, seed, prompts)
            chosen = REGIMES[regime](found_model, tuple(params) if params else None)
            regularizer = _regularizer(
                reg,
                quiet=quiet or distributed.rank() != 0,
                strength=strength,
                weights=_weights(weight or ()),
                preset=preset,
                every=reg_every,
                offload=offload,
                leaving_out=task,
            )
        if regularizer:
            regularizer.check(found_model.module, found_model.function)  # before anything takes long
        with examples_bar(f"{task}: head", show=show) as advance:
            made = head_for(found_model, found_task, head, on_progress=advance)
        job = Trainer(
            chosen,
            found_task,
            made,
            settings,
            regularizer,
            _drift(others, strength, task, settings.batch_size, seed),
            torch.bfloat16 if (place.type == "cuda" if autocast is None else autocast) else None,
        )
        if show and job.unpenalised:
            some = ", ".join(job.unpenalised[:3]) + (", …" if len(job.unpenalised) > 3 else "")
            show_note(f"no bundle covers {len(job.unpenalised)} of the parameters that are trained: {some}")
        _run(job, target, resume, show=show, quiet=quiet, as_json=as_json)


def _regularizer(reg: list[File] | None, *, quiet: bool, **how: Any) -> Regularizer | None:
    from kfacpack.training.regularizer import OutputScaleWarning, OwnTaskWarning, Regularizer

    if not reg:
        if how["weights"] or how["preset"] or how["every"] != 1 or how["offload"]:
            problem = "--weight, --preset, --reg-every and --offload belong to a penalty of bundles"
            raise KfacpackError(f"{problem}: give --reg FILE.kfac")
        return None
    with show_warnings(OwnTaskWarning, OutputScaleWarning, show=not quiet):
        return Regularizer(reg, **how)


def _weights(given: Sequence[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for text in given:
        name, _, number = text.partition("=")
        if name in found:
            raise KfacpackError(f"--weight {printable(text)}: {printable(name)} is given twice; give it once")
        try:
            found[name] = float(number)
        except ValueError as error:
            raise KfacpackError(f"--weight {text!r}: expected a group and a number, such as norm=10") from error
    return found


def _drift(others: list[Task], strength: float | None, task: str, batch_size: int, seed: int) -> DataPenalty | None:
    from kfacpack.training.data_penalty import DataPenalty

    names = [other.name for other in others]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise KfacpackError(f"--reg-data {printable(twice[0])}: is given twice, and would count twice")
    if task in names:
        raise KfacpackError(f"--reg-data {printable(task)}: that is the task that is trained; name the others")
    return DataPenalty(others, strength, batch_size, seed) if others else None


def _protected_tasks(job: Trainer) -> tuple[str, ...]:
    """The tasks whose outputs the penalty holds: after a subtraction, not all that a bundle was merged from."""
    penalty = job.regularizer or job.drift
    return penalty.tasks if penalty else ()


def _run(job: Trainer, output: Path, resume: bool, *, show: bool, quiet: bool, as_json: bool) -> None:
    from kfacpack.estimation import distributed
    from kfacpack.estimation.resume import require_unfinished
    from kfacpack.training.metrics import MetricsWarning, PenaltyWarning, metrics_path

    if resume:
        require_unfinished(output)
    start = time.perf_counter()
    with (
        stop_on_interrupt(f"what is done is stored beside {output}. Go on with --resume") as stopped,
        show_warnings(MetricsWarning, PenaltyWarning, show=not quiet),
        training_bar(job.task.name, job.steps, show=show) as advance,
    ):
        vector = job.run(output, resume=resume, on_progress=advance, stopped=stopped)
    if distributed.rank() != 0:
        return
    seconds, last = time.perf_counter() - start, advance.last
    if as_json:
        said: dict[str, Any] = {
            "path": str(output),
            "sha256": vector.digest,
            "bytes": output.stat().st_size,
            "metrics": str(metrics_path(output)),
            "regime": vector.regime,
            "parameters": len(vector),
            "steps": job.steps,
            "held": list(_protected_tasks(job)),
            "unpenalised": list(job.unpenalised),
            "loss": last.loss if last else None,
            "penalty": last.penalty if last else None,
            "accuracy": last.accuracy if last else None,
            "seconds": seconds,
        }
        print_json(said)
    elif show:
        size = f"{len(vector)} parameters, {human_bytes(output.stat().st_size)}"
        out.print(Text(f"wrote {output}: {size}, after {job.steps} steps in {human_seconds(seconds)}"))
        if held := _protected_tasks(job):
            out.print(Text(f"the penalty held {printable(', '.join(held))}"))
        if last:
            penalty = "" if last.penalty is None else f", penalty {last.penalty:.3g}"
            out.print(f"last batch: loss {last.loss:.3g}, accuracy {last.accuracy:.1%}{penalty}")
