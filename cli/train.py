"""`kfacpack train`: trains a task vector, with or without a penalty that protects other tasks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import TypedDict

from kfacpack.errors import KfacpackError, abbreviate, counted, printable
from kfacpack.format.manifest import FloatType
from kfacpack.format.units import human_bytes, human_seconds
from kfacpack.format.vector_manifest import HeadKind, RegimeName
from kfacpack.models.prompts import PromptStyle
from kfacpack.training.penalty_weights import STRENGTH, STRENGTH_KL, STRENGTH_ON_DATA, PenaltyPrecision, Preset

from .console import (
    examples_bar,
    loading,
    print_json,
    print_line,
    print_next,
    show_note,
    show_warnings,
    stop_on_interrupt,
    training_bar,
)
from .options import (
    AS_JSON,
    COLUMNS,
    DATA_FOLDER,
    DEVICE,
    DTYPE,
    HEAD,
    IMAGE_SIZE,
    MODEL_NAME,
    PARAMS,
    PROMPTS,
    QUIET,
    RESUME,
    TASK,
    WEIGHTS,
    WORKERS,
    File,
    check_output,
    default_output,
    load_model_option,
    load_task_option,
    model_arguments,
    option,
    output_option,
    task_and_folder,
)

if TYPE_CHECKING:
    from kfacpack.training.trainer import Trainer


TRAINING_PANEL, PENALTY_PANEL = "Training", "Penalty"


class TrainOutput(TypedDict):
    """Output of `kfacpack train --json`."""

    path: str
    sha256: str
    """Digest of the task vector."""
    bytes: int
    metrics: str
    """JSON Lines file with the loss, penalty and accuracy of each step."""
    regime: RegimeName
    parameters: int
    """Number of parameters that were trained."""
    steps: int
    held: list[str]
    """Tasks that the penalty protects."""
    unpenalised: list[str]
    """Trained parameters that no bundle covers, so that the penalty does not apply to them."""
    loss: float | None
    """Loss of the last batch; null if no step was run."""
    penalty: float | None
    """Penalty at the last step; null if there is no penalty."""
    penalty_error: tuple[float, float] | None
    """Relative errors of the penalty and of its gradient; null without `--penalty-precision`."""
    accuracy: float | None
    """Accuracy on the last batch; null if no step was run."""
    seconds: float


def train(
    model: str = MODEL_NAME,
    task: str = TASK,
    output: Path | None = output_option("FILE.safetensors", None, "Output file. [default: TASK.safetensors]"),
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
        PENALTY_PANEL, None, "--reg", metavar="FILE.kfac", help="Bundle with the curvature of other tasks; repeatable."
    ),
    strength: float | None = option(
        PENALTY_PANEL,
        None,
        "--strength",
        metavar="λ",
        help="Factor λ of the penalty. The penalty is the predicted drift of f, divided by the scale of f. "
        f"[default: {STRENGTH:g}; {STRENGTH_KL:g} for bundles estimated with --metric kl; "
        f"{STRENGTH_ON_DATA:g} with --reg-data]",
    ),
    reg_every: int = option(
        PENALTY_PANEL, 1, "--reg-every", min=1, metavar="N", help="Apply the penalty only every N steps."
    ),
    weight: list[str] | None = option(
        PENALTY_PANEL,
        None,
        "--weight",
        metavar="GROUP=X",
        help="Factor by which the penalty of a group of blocks is multiplied; repeatable. GROUP is norm, token, "
        "projection, or the operation of the blocks, such as linear.",
    ),
    preset: Preset | None = option(
        PENALTY_PANEL,
        None,
        "--preset",
        help="Preset for the penalty. tak: the strength, scaling and group weights from the TAK paper.",
    ),
    penalty_precision: PenaltyPrecision | None = option(
        PENALTY_PANEL,
        None,
        "--penalty-precision",
        help="Precision of the products with the Kronecker factors in the penalty. The error that a lower precision "
        "causes in the penalty is reported. [default: float32]",
    ),
    offload: bool = option(
        PENALTY_PANEL,
        False,
        "--offload",
        help="Keep the factors in CPU memory and copy a few blocks at a time to the GPU.",
    ),
    reg_data: list[str] | None = option(
        PENALTY_PANEL,
        None,
        "--reg-data",
        metavar="TASK[=DIR]",
        help="Another task to protect; repeatable. The drift of f is measured and penalised on the data of this task, "
        "so that no bundle is needed (τJp in the TAK paper).",
    ),
    regime: RegimeName = option(
        TRAINING_PANEL,
        "linear",
        "--regime",
        help="What to train. linear: the linearised model. full: the model itself. attention: the attention layers "
        "of the model itself. sparse: the least sensitive weights of the model itself (TaLoS).",
    ),
    mask: list[File] | None = option(
        TRAINING_PANEL,
        None,
        "--mask",
        metavar="FILE.kfac",
        help="Bundle of other tasks; repeatable. With --regime sparse, the weights to train are selected with these "
        "bundles instead of validation examples.",
    ),
    keep: float | None = option(
        TRAINING_PANEL,
        None,
        "--keep",
        metavar="SHARE",
        help="Share of the weights that --regime sparse trains. [default: 0.1]",
    ),
    steps: int | None = option(
        TRAINING_PANEL,
        None,
        "--steps",
        min=1,
        metavar="N",
        help="Number of training steps. [default: 500, unless --epochs is passed]",
    ),
    epochs: float | None = option(
        TRAINING_PANEL,
        None,
        "--epochs",
        metavar="X",
        help="Number of passes over the training examples, instead of --steps.",
    ),
    batch_size: int = option(
        TRAINING_PANEL, 32, "--batch-size", min=1, help="Total number of examples per step, across all processes."
    ),
    micro_batch_size: int | None = option(
        TRAINING_PANEL,
        None,
        "--micro-batch-size",
        min=1,
        metavar="N",
        help="Number of examples per forward pass; gradients are accumulated until the batch is complete. [default: "
        "the whole batch]",
    ),
    lr: float | None = option(
        TRAINING_PANEL,
        None,
        "--lr",
        metavar="X",
        help="Peak learning rate. [default: derived from the model and the first batch; 1e-5 with --regime sparse]",
    ),
    warmup: float = option(
        TRAINING_PANEL, 0.1, "--warmup", help="Fraction of the steps over which the learning rate increases linearly."
    ),
    weight_decay: float = option(
        TRAINING_PANEL, 0.1, "--weight-decay", help="Weight decay of AdamW, applied to the task vector."
    ),
    clip: float | None = option(
        TRAINING_PANEL,
        None,
        "--clip",
        metavar="X",
        help="Maximum norm of the gradient. [default: no limit; 1 with --regime sparse]",
    ),
    autocast: bool | None = option(
        TRAINING_PANEL, None, "--autocast/--no-autocast", help="Run the model in bfloat16. [default: on CUDA only]"
    ),
    compile: bool = option(
        TRAINING_PANEL,
        False,
        "--compile",
        help="Compile the training step of the linearised model with torch.compile, and use CUDA graphs on a GPU. "
        "Requires a C++ compiler. The first step takes several minutes.",
    ),
    seed: int = option(TRAINING_PANEL, 0, "--seed", min=0, help="Seed for the order of the examples."),
    resume: bool = RESUME,
    as_json: bool = AS_JSON,
    workers: int | None = WORKERS,
    quiet: bool = QUIET,
) -> None:
    """Train a task vector and write it, with its frozen head, to one file.

    With --reg, a quadratic penalty keeps the model's outputs on other tasks nearly unchanged, so that vectors can be
    added at α = 1. The penalty is computed from the curvature in bundles. Pass a bundle of the other tasks (--reg
    others.kfac), or a bundle of all tasks and the bundle of the trained task, which is then subtracted (--reg all.kfac
    --reg own.kfac).

    Ctrl-C saves the state beside the output. With --resume, the command continues from this state, and the result is
    identical, byte for byte, to that of an uninterrupted run. The loss, penalty and accuracy of each step are written
    to FILE.metrics.jsonl. Processes started by torchrun or accelerate share each batch.
    """
    # Imported here so that --help does not wait for torch.
    from kfacpack.estimation import distributed
    from kfacpack.models.data_loading import use_workers
    from kfacpack.training.metrics import require_metrics_path
    from kfacpack.training.optimizer import TrainingSettings
    from kfacpack.training.regularizer import OutputScaleWarning, OwnTaskWarning
    from kfacpack.training.train import build_trainer, check_mask_options, check_penalty_options

    use_workers(workers)
    settings = TrainingSettings(steps, epochs, batch_size, micro_batch_size, lr, warmup, weight_decay, clip, seed)
    penalty: dict[str, Any] = {
        "strength": strength,
        "weights": _parse_weights(weight or ()),
        "preset": preset,
        "reg_every": reg_every,
        "penalty_precision": penalty_precision,
        "offload": offload,
    }
    check_penalty_options(reg or (), reg_data or (), **penalty)
    check_mask_options(regime, mask or (), keep)
    target = output or default_output(task, ".safetensors")
    check_output(target, [*(reg or ()), *(mask or ()), *([weights] if weights else ())])
    require_metrics_path(target)
    torch_device = distributed.local_device(device)
    with distributed.process_group(torch_device):
        silent = quiet or distributed.rank() != 0
        show = not (silent or as_json)
        with loading(f"{task}, {model}", show=show):
            # The task is loaded first, so that a misspelt task name is reported before the model is loaded.
            loaded_task = load_task_option(task, data, columns, model, quiet=silent)
            folders = [task_and_folder("--reg-data", text, folder_optional=True) for text in reg_data or ()]
            other_tasks = [load_task_option(name, folder, None, model, quiet=silent) for name, folder in folders]
            loaded_model = load_model_option(model, weights, image_size, dtype, torch_device, prompts=prompts)
        with (
            show_warnings(OwnTaskWarning, OutputScaleWarning, show=not silent),
            examples_bar(f"{task}: head", show=show) as advance,
        ):
            trainer = build_trainer(
                loaded_model,
                loaded_task,
                settings=settings,
                reg=reg or (),
                reg_data=other_tasks,
                regime=regime,
                mask=mask or (),
                keep=keep,
                params=tuple(params) if params else None,
                head=head,
                autocast=autocast,
                compile=compile,
                on_head=advance,
                **penalty,
            )
        if show and trainer.unpenalised:
            names = abbreviate(trainer.unpenalised, limit=3)
            show_note(f"trained parameters that no bundle covers: {len(trainer.unpenalised)} ({names})")
        values = {
            "--data": data,
            "--columns": columns,
            "--weights": weights,
            "--image-size": image_size,
            "--prompts": prompts,
        }
        options = [text for flag, value in values.items() if value is not None for text in (flag, str(value))]
        _run(trainer, target, resume, eval_options=options, show=show, quiet=quiet, as_json=as_json)


def _parse_weights(texts: Sequence[str]) -> dict[str, float]:
    """Parses the values of `--weight GROUP=X` and returns the factors by group."""
    weights: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition("=")
        if name in weights:
            raise KfacpackError(f"--weight {printable(text)}: {printable(name)} is given twice")
        try:
            weights[name] = float(number)
        except ValueError as error:
            raise KfacpackError(f"--weight {text!r}: expected a group and a number, such as norm=10") from error
    return weights


def _protected_tasks(trainer: Trainer) -> tuple[str, ...]:
    """Returns the tasks that the penalty protects. Tasks that were subtracted from a bundle are not protected."""
    penalty = trainer.regularizer or trainer.data_penalty
    return penalty.tasks if penalty else ()


def _run(
    trainer: Trainer,
    output: Path,
    resume: bool,
    *,
    eval_options: Sequence[str],
    show: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    from kfacpack.estimation import distributed
    from kfacpack.estimation.resume import require_unfinished
    from kfacpack.training.metrics import MetricsWarning, PenaltyWarning, metrics_path

    if resume:
        require_unfinished(output)
    start = time.perf_counter()
    with (
        stop_on_interrupt(f"the state is stored beside {output}; continue with --resume") as stopped,
        show_warnings(MetricsWarning, PenaltyWarning, show=not quiet),
        training_bar(trainer.task.name, trainer.steps, show=show) as advance,
    ):
        vector = trainer.run(output, resume=resume, on_progress=advance, stopped=stopped)
    if distributed.rank() != 0:
        return
    seconds, last = time.perf_counter() - start, advance.last
    error = trainer.penalty_error(vector)
    if as_json:
        result: TrainOutput = {
            "path": str(output),
            "sha256": vector.digest,
            "bytes": output.stat().st_size,
            "metrics": str(metrics_path(output)),
            "regime": vector.regime,
            "parameters": len(vector),
            "steps": trainer.steps,
            "held": list(_protected_tasks(trainer)),
            "unpenalised": list(trainer.unpenalised),
            "loss": last.loss if last else None,
            "penalty": last.penalty if last else None,
            "penalty_error": error,
            "accuracy": last.accuracy if last else None,
            "seconds": seconds,
        }
        print_json(result)
    elif show:
        size = f"{counted(len(vector), 'parameter')}, {human_bytes(output.stat().st_size)}"
        print_line(f"wrote {output}: {size}, after {counted(trainer.steps, 'step')} in {human_seconds(seconds)}")
        if protected := _protected_tasks(trainer):
            print_line(f"protected tasks: {', '.join(protected)}")
        if last:
            penalty = "" if last.penalty is None else f", penalty {last.penalty:.3g}"
            print_line(f"last batch: loss {last.loss:.3g}, accuracy {last.accuracy:.1%}{penalty}")
        if error and trainer.regularizer:
            errors = f"relative error {error.value:.2g}, relative error of the gradient {error.gradient:.2g}"
            print_line(f"penalty computed in {trainer.regularizer.precision}: {errors}")
        task = ("--task", trainer.task.name, *eval_options)
        print_next("eval", *model_arguments(vector.about.base), "--vector", output, *task)
