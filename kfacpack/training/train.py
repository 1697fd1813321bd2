"""`kp.train`: trains a task vector. `kfacpack train` and the stages of a plan use this module as well."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from kfacpack.errors import KfacpackError, printable
from kfacpack.estimation.resume import output_path
from kfacpack.models.families import resolve_model
from kfacpack.models.heads import Head, head_for
from kfacpack.models.model import Model
from kfacpack.tasks.registry import resolve_task
from kfacpack.training.data_penalty import DataPenalty
from kfacpack.training.optimizer import TrainingSettings
from kfacpack.training.regimes import KEEP, REGIMES, calibrated_masks, masks_from_bundles, require_share
from kfacpack.training.regularizer import Regularizer
from kfacpack.training.trainer import Trainer, identify_base

if TYPE_CHECKING:
    from kfacpack.format.units import OnProgress
    from kfacpack.format.vector_manifest import HeadKind, RegimeName
    from kfacpack.merging.inputs import Mergeable
    from kfacpack.tasks.task import Task
    from kfacpack.training.metrics import Metrics
    from kfacpack.training.penalty_weights import PenaltyPrecision, Preset
    from kfacpack.vectors.task_vector import TaskVector


def train(
    model: Model | str,
    task: Task | str,
    *,
    reg: Sequence[Mergeable] | Mergeable = (),
    reg_data: Sequence[Task | str] | Task | str = (),
    strength: float | None = None,
    reg_every: int = 1,
    weights: Mapping[str, float] | None = None,
    preset: Preset | None = None,
    penalty_precision: PenaltyPrecision | None = None,
    offload: bool = False,
    regime: RegimeName = "linear",
    mask: Sequence[Mergeable] | Mergeable = (),
    keep: float | None = None,
    params: Sequence[str] | str | None = None,
    head: Head | HeadKind = "auto",
    steps: int | None = None,
    epochs: float | None = None,
    batch_size: int = 32,
    micro_batch_size: int | None = None,
    lr: float | None = None,
    warmup: float = 0.1,
    weight_decay: float = 0.1,
    clip: float | None = None,
    autocast: bool | None = None,
    compile: bool = False,
    seed: int = 0,
    output: str | os.PathLike[str] | None = None,
    resume: bool = False,
    on_progress: Callable[[Metrics, int], None] = lambda metrics, steps: None,
    stopped: Callable[[], bool] = lambda: False,
) -> TaskVector:
    """Trains a task vector, with or without a penalty that protects other tasks.

    Args:
        model: A model from `kp.load_model`, or its name.
        task: A task from `kp.load_task`, or its name.
        reg: One or several bundles with the curvature of other tasks: curvatures, paths or `hf://` references. The
            task being trained is removed from bundles that contain it, if possible.
        reg_data: One or several other tasks. The change in f on their data is penalised directly (τJp), without
            bundles.
        strength: λ. Defaults to 80, to 3 for bundles with the metric `kl`, and to 1 with `reg_data`. With `preset`,
            defaults to the published λ.
        reg_every: The penalty is applied only at every `reg_every`-th step.
        weights: Factors by which the penalties of groups of blocks are multiplied, such as `{"norm": 10.0}`.
        preset: `"tak"` for the published scaling, strength and weights.
        penalty_precision: `"tf32"` or `"bf16"` for faster products with the factors; `"bf16"` also halves the memory
            that the factors need. `Regularizer.precision_loss` measures the effect.
        offload: Whether to keep the factors on the CPU and copy them to the device a few blocks at a time.
        regime: `"linear"` trains the linearised model f + Jτ, `"full"` trains the model itself, `"attention"` trains
            only its attention layers, and `"sparse"` trains only the weights to which f is least sensitive (TaLoS).
        mask: Bundles of other tasks from which the regime `"sparse"` selects the weights to train. By default, the
            weights are selected by a calibration on the task's validation split.
        keep: Share of the weights that the regime `"sparse"` trains. Defaults to 0.1.
        params: Names or patterns of the parameters to train. Defaults to all parameters that the model family does not
            freeze.
        head: A frozen head, or the kind of head to compute: `"auto"`, `"text"`, `"words"` or `"prototypes"`.
        steps: Number of steps; 500 if neither `steps` nor `epochs` is given.
        epochs: Number of passes over the training examples, as an alternative to `steps`.
        batch_size: Number of examples per step, summed over all processes.
        micro_batch_size: Maximum number of examples per forward pass. By default, each process computes all of its
            examples of a step in one pass.
        lr: Peak learning rate. Defaults to 1e-5 in the regime `"sparse"`. In other regimes, it is derived from the
            model by default.
        warmup: Fraction of the steps over which the learning rate increases linearly.
        weight_decay: AdamW's weight decay on τ.
        clip: Maximum norm of the gradient. Defaults to 1 in the regime `"sparse"`, and to no limit in other regimes.
        autocast: Whether to run the model in bfloat16. By default, this is done only on CUDA devices.
        compile: Whether to compile the linearised step with torch.compile, and to use CUDA graphs on a GPU. Requires a
            C++ compiler.
        seed: Seed for the order of the examples.
        output: File to write. The metrics of each step and the state of an interrupted run are stored beside it. By
            default, no file is written.
        resume: Whether to resume an interrupted run with the same `output`.
        on_progress: Called after each step with its metrics and the total number of steps. On a GPU, it is called only
            after the next step has been started.
        stopped: Called after each step. Once it returns True, the state is stored and `Interrupted` is raised.

    Returns:
        The task vector, with its head.

    Raises:
        KfacpackError: If the model, the task, the bundles or the settings are incompatible.
        Interrupted: If `stopped` returned True.

    Example:
        >>> vector = kp.train("tiny", "digits", reg=["others.kfac"], steps=50)
        >>> vector.save("digits.safetensors")
    """
    others = [reg_data] if isinstance(reg_data, str) or not isinstance(reg_data, Sequence) else reg_data
    trainer = build_trainer(
        resolve_model(model),
        resolve_task(task),
        reg=reg,
        reg_data=[resolve_task(other) for other in others],
        strength=strength,
        reg_every=reg_every,
        weights=weights,
        preset=preset,
        penalty_precision=penalty_precision,
        offload=offload,
        regime=regime,
        mask=mask,
        keep=keep,
        params=params,
        head=head,
        settings=TrainingSettings(
            steps=steps,
            epochs=epochs,
            batch_size=batch_size,
            micro_batch_size=micro_batch_size,
            lr=lr,
            warmup=warmup,
            weight_decay=weight_decay,
            clip=clip,
            seed=seed,
        ),
        autocast=autocast,
        compile=compile,
    )
    with output_path(output, "vector.safetensors", resume=resume) as path:
        return trainer.run(path, resume=resume, on_progress=on_progress, stopped=stopped)


def build_trainer(
    model: Model,
    task: Task,
    *,
    settings: TrainingSettings,
    reg: Sequence[Mergeable] | Mergeable = (),
    reg_data: Sequence[Task] = (),
    strength: float | None = None,
    reg_every: int = 1,
    weights: Mapping[str, float] | None = None,
    preset: Preset | None = None,
    penalty_precision: PenaltyPrecision | None = None,
    offload: bool = False,
    regime: RegimeName = "linear",
    mask: Sequence[Mergeable] | Mergeable = (),
    keep: float | None = None,
    params: Sequence[str] | str | None = None,
    head: Head | HeadKind = "auto",
    autocast: bool | None = None,
    compile: bool = False,
    on_head: OnProgress = lambda done, total: None,
) -> Trainer:
    """Assembles a training run without starting it.

    Args:
        model: The base model.
        task: The task to train.
        settings: Number of steps, batch size, learning rate, seed and other hyperparameters.
        reg: Bundles from which the penalty is computed. This and the following arguments are described in `train`.
        reg_data: Tasks on whose data the change in f is penalised.
        strength: λ.
        reg_every: The penalty is applied only at every `reg_every`-th step.
        weights: Factors for groups of blocks.
        preset: `"tak"` for the published scaling, strength and weights.
        penalty_precision: Precision of the products with the factors.
        offload: Whether to keep the factors on the CPU.
        regime: Name of the regime.
        mask: Bundles that select the weights of the regime `"sparse"`.
        keep: Share of the weights that the regime `"sparse"` trains.
        params: Names or patterns of the trained parameters.
        head: A frozen head, or the kind of head to compute.
        autocast: Whether to run the model in bfloat16.
        compile: Whether to compile the linearised step with torch.compile.
        on_head: Called with the number of examples processed and the total number, while a head or the masks of the
            regime `"sparse"` are computed from examples.

    Returns:
        The trainer. Its method `run` starts the training.

    Raises:
        KfacpackError: If a penalty option is given without the penalty that it requires, or if the model, the task and
            the bundles are incompatible.
    """
    bundles = as_bundle_list(reg)
    check_penalty_options(
        bundles,
        reg_data,
        strength=strength,
        weights=weights,
        preset=preset,
        reg_every=reg_every,
        penalty_precision=penalty_precision,
        offload=offload,
    )
    if regime not in REGIMES:
        raise KfacpackError(f"unknown regime {regime!r}; expected one of {', '.join(REGIMES)}")
    mask_bundles = as_bundle_list(mask)
    check_mask_options(regime, mask_bundles, keep)
    training_regime = REGIMES[regime](model, params, compile=compile)
    regularizer = None
    if bundles:
        regularizer = Regularizer(
            bundles,
            strength,
            weights=weights,
            preset=preset,
            every=reg_every,
            offload=offload,
            precision=penalty_precision,
            exclude_task=task.name,
        )
    base = identify_base(training_regime, regularizer)  # checks the bundles before the slow computation of the head
    masked = Regularizer(mask_bundles, exclude_task=task.name) if mask_bundles else None
    if masked:
        masked.check(model, base=base)
    built_head = head if isinstance(head, Head) else head_for(model, task, kind=head, on_progress=on_head)
    masks = None
    if masked:
        masks = masks_from_bundles(training_regime, masked, KEEP if keep is None else keep)
    elif regime == "sparse":
        masks = calibrated_masks(
            training_regime, built_head, task, KEEP if keep is None else keep, settings.seed, on_head
        )
    return Trainer(
        training_regime,
        task,
        built_head,
        settings,
        regularizer,
        _data_penalty(reg_data, strength, task, settings),
        torch.bfloat16 if uses_autocast(model, autocast) else None,
        base=base,
        masks=masks,
    )


def as_bundle_list(reg: Sequence[Mergeable] | Mergeable) -> list[Mergeable]:
    """Converts an argument that is one bundle or a sequence of bundles to a list."""
    return list(reg) if isinstance(reg, Sequence) and not isinstance(reg, str) else [reg]


def check_penalty_options(
    bundles: Sequence[object],
    reg_data: Sequence[object],
    *,
    strength: float | None,
    weights: Mapping[str, float] | None,
    preset: Preset | None,
    reg_every: int,
    penalty_precision: PenaltyPrecision | None,
    offload: bool,
) -> None:
    """Rejects options of a penalty that is not used. The check needs no model, so it can run before a model is loaded.

    Args:
        bundles: The bundles of a curvature penalty, if any.
        reg_data: The tasks of a data penalty, if any.
        strength: λ, or None.
        weights: Factors for groups of blocks, if any.
        preset: Name of a preset, if any.
        reg_every: The penalty is applied only at every `reg_every`-th step.
        penalty_precision: Precision of the products with the factors, or None.
        offload: Whether to keep the factors on the CPU.

    Raises:
        KfacpackError: If both kinds of penalty are given, or an option is given without the penalty that it requires.
    """
    if bundles and reg_data:
        expected = "expected a penalty from bundles (--reg, reg) or from data (--reg-data, reg_data)"
        raise KfacpackError(f"{expected}, got both")
    if strength is not None and not (bundles or reg_data):
        remedy = "pass bundles with --reg (reg), or tasks with --reg-data (reg_data)"
        raise KfacpackError(f"--strength (strength) needs a penalty: {remedy}")
    if not bundles and (weights or preset or reg_every != 1 or penalty_precision or offload):
        options = "--weight (weights), --preset, --reg-every, --penalty-precision (penalty_precision) and --offload"
        raise KfacpackError(f"{options} require bundles; pass them with --reg (reg)")


def check_mask_options(regime: str, mask: Sequence[object], keep: float | None) -> None:
    """Rejects options of the regime `sparse` in other regimes. The check does not need the model.

    Args:
        regime: Name of the regime.
        mask: Bundles that select the weights to train, if any.
        keep: Share of the weights to train, or None.

    Raises:
        KfacpackError: If an option does not apply to the regime or is out of range.
    """
    if regime != "sparse" and (mask or keep is not None):
        raise KfacpackError(f"--mask (mask) and --keep (keep) require the regime 'sparse', got {regime!r}")
    if keep is not None:
        require_share(keep)


def uses_autocast(model: Model, autocast: bool | None = None) -> bool:
    """Returns whether training runs the model in bfloat16. This is `autocast` or, by default, True only on CUDA."""
    return next(model.module.parameters()).device.type == "cuda" if autocast is None else autocast


def _data_penalty(
    others: Sequence[Task], strength: float | None, task: Task, settings: TrainingSettings
) -> DataPenalty | None:
    names = [other.name for other in others]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        problem = f"{printable(repeated[0])} is given twice and would be counted twice"
        raise KfacpackError(f"--reg-data (reg_data): {problem}; pass each task only once")
    if task.name in names:
        problem = f"{printable(task.name)} is the task being trained"
        raise KfacpackError(f"--reg-data (reg_data): {problem}; pass other tasks")
    return DataPenalty(others, strength, settings.batch_size, settings.seed) if others else None
