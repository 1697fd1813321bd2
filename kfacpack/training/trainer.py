"""The training loop for task vectors: distributed, resumable, with an optional penalty.

Every process runs the same trainer. Process r of n takes every n-th example of each step's batch, beginning with
example r. Gradients are summed over processes, and all processes continue with the same τ. Therefore, up to rounding
errors, the result depends neither on the number of processes nor on how many examples are computed at once.

The results of a step (loss, accuracy, penalty, and whether all values are finite) are read in one transfer. On a device
that computes asynchronously, this happens after the next step has been started, so that the device is not idle while
the host waits. A state is stored, and a vector is written, only after the results of the last step have been checked.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass, field
from functools import cached_property
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kfacpack.curvature.matrices.components import raw_bytes
from kfacpack.errors import KfacpackError, ProcessLostError, printable
from kfacpack.estimation import distributed
from kfacpack.estimation.resume import SAVE_INTERVAL, Interrupted, PartialFile, require_writable_folder
from kfacpack.estimation.tracing import SYNCHRONOUS_DEVICES
from kfacpack.format.manifest import Base, Source, base_digest
from kfacpack.format.vector_manifest import AboutVector, TaskEntry, Training
from kfacpack.models.data_loading import DeferredValues, fingerprint, step_batches
from kfacpack.models.functional import to_device
from kfacpack.models.heads import CompletionHead, Head, require_several_classes
from kfacpack.tasks.task import own_classes
from kfacpack.training.metrics import (
    Metrics,
    PenaltyWarning,
    check_not_negative,
    metrics_path,
    open_metrics_log,
    penalty_problem,
    read_metrics,
    require_metrics_path,
)
from kfacpack.training.optimizer import AdamWState, BatchOrder, TrainingSettings, find_learning_rate, require_influence
from kfacpack.vectors.task_vector import TaskVector

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kfacpack.models.model import Batch
    from kfacpack.tasks.task import Split, Task
    from kfacpack.training.data_penalty import DataPenalty
    from kfacpack.training.regimes import Regime, SparsityMasks
    from kfacpack.training.regularizer import PrecisionLoss, Regularizer


def identify_base(regime: Regime, regularizer: Regularizer | None = None) -> Base:
    """Hashes the parameters of a run once, and checks that the bundles of its penalty match the model.

    Args:
        regime: The regime, which defines the model and the trained parameters.
        regularizer: The curvature penalty, if any.

    Returns:
        The identity of the trained and the penalised parameters.

    Raises:
        KfacpackError: If a bundle is for a different f or a different base model.
    """
    model = regime.model
    penalised = regularizer.parameters if regularizer else ()
    # The check below reports parameters that the model does not have, together with the name of the bundle.
    present = model.module.state_dict().keys()
    base = model.base([*regime.parameters, *(name for name in penalised if name in present)])
    if regularizer:
        regularizer.check(model, base=base)
    return base


def resume_request(trainer: Trainer, base: Base) -> dict[str, Any]:
    """Returns the settings that must be unchanged for an interrupted run to be resumed.

    Args:
        trainer: The training run.
        base: Identity of the trained parameters.
    """
    model, penalty_splits = trainer.regime.model, trainer.data_penalty.splits if trainer.data_penalty else {}
    settings = _settings(trainer)
    settings.pop("output_scale", None)  # follows from the bundles or the data
    if settings["clip"] is None:
        del settings["clip"]  # runs of earlier versions, which had no such setting, can be resumed
    return {
        **settings,
        "regime": trainer.regime.name,
        "model": f"{base.family} {base.name}",
        "weights": base.sha256,
        "preprocessing": model.preprocessing,
        "task": trainer.task.name,
        "data": f"{trainer.split.source.dataset}, {len(trainer.split)} examples",
        "data_content": fingerprint(model, trainer.split, trainer.task.name, labels=trainer.task.classes is not None),
        "reg_data_content": {name: fingerprint(model, split, name) for name, split in penalty_splits.items()},
        "head": f"{trainer.head.origin}, {_head_digest(trainer.head)}",
        "bundles": list(trainer.regularizer.digests) if trainer.regularizer else [],
        **({"mask_content": trainer.masks.digest} if trainer.masks else {}),
    }


def build_task_vector(trainer: Trainer, tau: Mapping[str, Tensor], base: Base) -> TaskVector:
    """Returns the task vector with its head and a record of how it was trained.

    Args:
        trainer: The training run.
        tau: τ by parameter name, on any device.
        base: Identity of the trained parameters.
    """
    origin, model = trainer.split.source, trainer.regime.model
    source = Source(
        task=trainer.task.name,
        dataset=origin.dataset,
        revision=origin.revision,
        split=origin.split,
        license=origin.license,
        preprocessing=model.preprocessing,
        examples=len(trainer.split),
        dataset_size=len(trainer.split),
    )
    settings = _settings(trainer)
    training = Training(
        seed=settings.pop("seed"),
        settings={key: value for key, value in settings.items() if value is not None},
        bundles=trainer.regularizer.digests if trainer.regularizer else (),
    )
    about = AboutVector(
        base=base,
        function=model.function,
        regime=trainer.regime.name,
        tasks=(TaskEntry(source=source, training=training),),
    )
    heads = {trainer.task.name: trainer.head} if trainer.head.is_stored else {}
    masks = {name: mask.cpu() for name, mask in trainer.masks.tensors.items()} if trainer.masks else None
    return TaskVector({name: tensor.cpu() for name, tensor in tau.items()}, about, heads, masks=masks)


def _settings(trainer: Trainer) -> dict[str, Any]:
    """Returns all settings of a run that affect the trained vector, by name."""
    penalty = trainer.regularizer or trainer.data_penalty
    autocast = {"autocast": str(trainer.autocast).removeprefix("torch.")} if trainer.autocast else {}
    return {
        **asdict(trainer.settings),
        "steps": trainer.steps,
        "lr": trainer.lr,
        "clip": trainer.clip,
        **(penalty.settings if penalty else {}),
        **autocast,
        **({"compile": True} if trainer.regime.compiled else {}),
        **(trainer.masks.settings if trainer.masks else {}),
    }


def _head_digest(head: Head) -> str:
    digest = sha256(repr(head.classes).encode())
    for tensor in (head.weight, head.bias):
        digest.update(raw_bytes(tensor))
    return digest.hexdigest()


@dataclass(frozen=True)
class StartedStep:
    """A step that has been started and whose results have not been read yet."""

    step: int
    """Index of the step, from 0."""
    lr: float
    """Learning rate of the step."""
    values: DeferredValues
    """First the sums over all processes: the loss, the number of correct predictions, the number of micro-batches with
    NaN or Inf in f, the data penalty, and the numbers of requests to stop and to save. Then the penalty, the largest
    magnitude in the gradient, and the largest magnitude in τ after the step."""


_LR_EXAMPLES = 32
"""Number of examples from which a learning rate is derived."""


@dataclass
class Trainer:
    """A training run whose settings have been checked; `run` executes it.

    The model's weights must not change after construction.

    Raises:
        KfacpackError: If model, task, head and penalty are incompatible, or there is nothing to train.
    """

    regime: Regime
    """The regime, which defines the model and the parameters to train."""
    task: Task
    """The task to train on; its split "train" is used."""
    head: Head
    """Frozen head with which the loss is computed."""
    settings: TrainingSettings = field(default_factory=TrainingSettings)
    """Number of steps, batch size, learning rate, seed and other hyperparameters."""
    regularizer: Regularizer | None = None
    """Curvature penalty. It cannot be combined with `data_penalty`."""
    data_penalty: DataPenalty | None = None
    """Data penalty. It cannot be combined with `regularizer`."""
    autocast: torch.dtype | None = None
    """Compute dtype of the model. Defaults to the dtype of its weights. τ is always float32."""
    base: Base | None = None
    """Result of `identify_base`. By default, it is computed at construction."""
    masks: SparsityMasks | None = None
    """Masks that select the weights to train. They are required in the regime `sparse`, and only there."""

    def __post_init__(self) -> None:
        if not isinstance(self.head, CompletionHead):
            require_several_classes(self.task, self.head.classes)
        if not len(self.split):
            raise KfacpackError(f"{printable(self.task.name)}: the training split has no examples")
        if (self.masks is None) == (self.regime.name == "sparse"):
            raise KfacpackError(
                f"regime {self.regime.name!r}: masks are required in the regime 'sparse' and invalid in other regimes"
            )
        if self.regularizer and self.data_penalty:
            raise KfacpackError("expected a penalty from bundles or from data, got both")
        if self.data_penalty:
            self.data_penalty.measure_output_scale(self.regime.model)
        if self.base is None:
            self.base = identify_base(self.regime, self.regularizer)

    @cached_property
    def split(self) -> Split:
        """The split "train" of the task."""
        return self.task.split("train")

    @cached_property
    def unpenalised(self) -> tuple[str, ...]:
        """Names of the trained parameters that no bundle of the penalty covers; () without a curvature penalty."""
        covered = self.regularizer.parameters if self.regularizer else self.regime.parameters
        return tuple(name for name in self.regime.parameters if name not in covered)

    @cached_property
    def steps(self) -> int:
        """Total number of steps."""
        return self.settings.step_count(len(self.split))

    @cached_property
    def lr(self) -> float:
        """Peak learning rate. If it is derived from the model, every process derives it from the same examples."""
        if (lr := self.settings.lr if self.settings.lr is not None else self.regime.default_lr) is not None:
            return lr
        numbers = self._order.batch(0)[:_LR_EXAMPLES]
        return find_learning_rate(
            self.regime, self._own_head, self._batch(numbers), self._labels(numbers).to(self.head.weight.device)
        )

    @property
    def clip(self) -> float | None:
        """Maximum norm of the gradient, or None for no limit."""
        return self.settings.clip if self.settings.clip is not None else self.regime.default_clip

    @cached_property
    def _own_head(self) -> Head:
        """The head or, if the task is a class split NAME@k/n, the rows of the head for the classes of part k."""
        head, own = self.head, own_classes(self.task)
        if own is None:
            return head
        # The rows are views, so that a broadcast of the head to other processes also changes the rows.
        return head.of_classes(own)

    @cached_property
    def _order(self) -> BatchOrder:
        return BatchOrder(len(self.split), self.settings.batch_size, self.settings.seed)

    def run(
        self,
        output: Path,
        *,
        resume: bool = False,
        every: float = SAVE_INTERVAL,
        on_progress: Callable[[Metrics, int], None] = lambda metrics, steps: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> TaskVector:
        """Trains the vector and writes it to a file. During training, the state is stored beside the file at intervals.

        Args:
            output: File to write.
            resume: Whether to resume an interrupted run with the same output.
            every: Minimum number of seconds between two stored states.
            on_progress: Called after each step with its metrics and the total number of steps. On a GPU, it is called
                only after the next step has been started.
            stopped: Called after each step. Once it returns True, the state is stored and `Interrupted` is raised.

        Returns:
            The task vector.

        Raises:
            Interrupted: If `stopped` returned True.
            KfacpackError: If a file cannot be written, the interrupted run has different settings, or training
                diverges.
        """
        require_writable_folder(output)
        require_metrics_path(output)
        model, base = self.regime.model, self._trained_base()
        masks = self.masks.tensors if self.masks else None
        state = AdamWState(self.regime.parameters, self.settings, self.clip, masks)
        # Invalid metadata raises an error here, before the first step, and not only after the last step.
        build_task_vector(self, state.tau, base)
        partial = PartialFile(_partial_path(output), "a training run", resume_request(self, base), every)
        done = self._begin(partial, state, resume=resume)
        first, alone = distributed.rank() == 0, distributed.world_size() == 1
        asynchronous = self.head.weight.device.type not in SYNCHRONOUS_DEVICES
        steps = ([(0, part) for part in self._own_parts(step)] for step in range(done, self.steps))
        with (
            open_metrics_log(metrics_path(output), done) if first else nullcontext() as log,
            closing(step_batches(model, [(self.split, self.task.name)], steps, self._labels)) as loader,
            closing(self.data_penalty) if self.data_penalty else nullcontext(),
        ):
            started: deque[StartedStep] = deque()
            requests = False, False

            def finish(*, unread: int = 0) -> None:
                """Checks and records the results of all started steps, except the last `unread` ones."""
                nonlocal requests
                while len(started) > unread:
                    metrics, requests = self._results(started.popleft())
                    if log:
                        log.add(metrics)
                    on_progress(metrics, self.steps)

            for step in range(done, self.steps):
                try:
                    # All processes must stop at the same step. They must also agree on the step at which they read the
                    # results before a save. They therefore act on requests that were sent with the results.
                    sent = (False, False) if alone else (stopped(), first and partial.is_due())
                    started.append(self._start_step(step, state, loader, *sent))
                except Exception as error:
                    finish()  # reports the previous step if it diverged, and records it otherwise
                    if first and isinstance(error, ProcessLostError):
                        partial.save(state, step, now=True)  # the state is still that of the previous step
                    raise
                finish(unread=1 if asynchronous else 0)
                stop, save = (stopped(), partial.is_due()) if alone else requests
                if stop or save or step + 1 == self.steps:
                    finish()
                if first and (stop or save):
                    partial.save(state, step + 1, now=True)
                if stop:
                    raise Interrupted
        vector = build_task_vector(self, state.tau, base)
        if first:
            vector.save(output)
        distributed.barrier()
        if first:
            partial.remove()
            self._check_penalty(metrics_path(output))
        return vector

    def _trained_base(self) -> Base:
        """Returns the identity of only the trained parameters, from the hashes computed at construction."""
        assert self.base is not None
        trained = tuple(parameter for parameter in self.base.parameters if parameter.name in self.regime.parameters)
        base = self.base
        return Base(
            family=base.family, name=base.name, revision=base.revision, sha256=base_digest(trained), parameters=trained
        )

    def penalty_error(self, vector: TaskVector) -> PrecisionLoss | None:
        """Returns the errors that reduced precision causes in the penalty, or None if the precision is not reduced.

        Args:
            vector: The task vector of this run, at which the errors are measured.
        """
        if self.regularizer is None or self.regularizer.precision is None:
            return None
        device = self.head.weight.device
        return self.regularizer.precision_loss({name: vector[name].to(device) for name in vector})

    def _check_penalty(self, path: Path) -> None:
        penalty = self.regularizer or self.data_penalty
        if penalty and (problem := penalty_problem(read_metrics(path), penalty.strength)):
            warnings.warn(f"{self.task.name}: {problem}", PenaltyWarning, stacklevel=3)

    def _begin(self, partial: PartialFile, state: AdamWState, *, resume: bool) -> int:
        """Restores the state, broadcasts it and the head, and returns the number of completed steps."""
        done = torch.zeros((), dtype=torch.int64)
        if distributed.rank() == 0:
            done.fill_(partial.restore(state) if resume else partial.require_absent())
        stored = (tensor for _, tensor in state.tensors())
        distributed.broadcast([done, self.head.weight, self.head.bias, *stored])
        return int(done)

    def _own_parts(self, step: int) -> list[Sequence[int]]:
        return self._order.own(step, self.settings.micro_batch_size)

    def _start_step(
        self, step: int, state: AdamWState, loader: Iterator[list[Any]], stop: bool, save: bool
    ) -> StartedStep:
        """Starts one step without waiting for its results. `stop` and `save` are requests to all processes."""
        device, batches = self.head.weight.device, next(loader)
        state.clear()
        # The losses, the correct predictions, and the micro-batches with NaN or Inf in f.
        sums = [torch.zeros(3, device=device)]
        sums += [self._add_loss_gradient(batch, labels, state) for batch, labels in batches]
        drift = torch.zeros((), device=device)
        if self.data_penalty:
            with self._autocast_context():
                drift = self.data_penalty.add_grad(
                    step, self.regime, state.tau, state.gradients, self.settings.micro_batch_size
                )
        requests = [torch.full((), float(request), device=device) for request in (stop, save)]
        results = torch.cat([torch.stack(sums).sum(0), torch.stack([drift.float(), *requests])])
        distributed.all_reduce_sum([results, *state.gradients.values()])
        penalty = results[3]
        if self.regularizer and self.regularizer.due(step):
            penalty = self.regularizer.add_grad(state.tau, state.gradients)
        gradient = state.largest_gradient()
        lr = self.lr * self.settings.lr_factor(step, self.steps)
        state.step(lr)
        others = torch.stack([penalty.float(), gradient, state.largest_change()])
        return StartedStep(step, lr, DeferredValues(torch.cat([results, others])))

    def _results(self, started: StartedStep) -> tuple[Metrics, tuple[bool, bool]]:
        """Returns the metrics of a step, whether any process requested a stop, and whether any requested a save.

        Raises:
            KfacpackError: If a value is NaN or Inf, or f does not depend on the parameters.
        """
        step, numbers = started.step, self._order.batch(started.step)
        loss, correct, failed, _, stop, save, value, gradient, change = started.values.read()
        mean_loss, accuracy = loss / len(numbers), correct / len(numbers)
        if failed:
            raise self._step_error(step, "f contains NaN or Inf", lr_involved=step > 0)
        if not (isfinite(mean_loss) and isfinite(value)):
            problem = f"the loss is {mean_loss:.3g} and the penalty is {value:.3g}"
            raise self._step_error(step, problem, lr_involved=step > 0)
        if not isfinite(gradient):
            raise self._step_error(step, "the gradient contains NaN or Inf", lr_involved=step > 0)
        if step == 0 and gradient == 0:
            require_influence(self.regime, self._batch(numbers[:1]))
        if not isfinite(change):
            raise self._step_error(step, "τ contains NaN or Inf after the step", lr_involved=True)
        check_not_negative(step, value)
        penalty = value if self.data_penalty or (self.regularizer and self.regularizer.due(step)) else None
        return Metrics(step + 1, mean_loss, accuracy, penalty, started.lr), (bool(stop), bool(save))

    def _step_error(self, step: int, problem: str, *, lr_involved: bool) -> KfacpackError:
        """Returns the error for a failed step. If `lr_involved` is set, a lower learning rate may be the remedy."""
        state = "Any state stored beside the output is kept"
        for name, parameter in self.regime.model.module.named_parameters():
            if not bool(parameter.isfinite().all()):
                remedy = f"the weights of the model contain NaN or Inf, first in {name!r}: load other weights"
                break
        else:
            not_lr = "τ is still zero at this step: check the data, or use another --dtype (dtype)"
            remedy = "a smaller --lr (lr) may help" if lr_involved else not_lr
        return KfacpackError(f"step {step + 1}: {problem}. {state}; {remedy}")

    def _add_loss_gradient(self, batch: Batch, labels: Tensor, state: AdamWState) -> Tensor:
        """Adds the gradient of a micro-batch's loss to `state.gradients`.

        Returns:
            A tensor of shape (3,): the sum of the losses, the number of correct predictions, and a flag that is 1 if f
            contains NaN or Inf.
        """
        with self._autocast_context():
            result = self.regime.forward(batch, state.tau)
        f = result.f.requires_grad_()
        loss, correct = self._own_head.loss(f, labels, batch)
        (u,) = torch.autograd.grad(loss, f)
        result.add_gradient(u / self.settings.batch_size, state.gradients)
        failed = ~f.detach().isfinite().all()
        return torch.stack([loss.detach().float(), correct.float(), failed.float()])

    def _autocast_context(self) -> AbstractContextManager[Any]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.head.weight.device.type, self.autocast)

    def _labels(self, numbers: Sequence[int]) -> Tensor:
        """Returns labels as indices into the classes of `_own_head`, on the CPU. Without classes, every label is 0."""
        if isinstance(self.head, CompletionHead):
            return torch.zeros(len(numbers), dtype=torch.int64)
        labels = torch.tensor([self.split.label(number) for number in numbers], dtype=torch.int64)
        own = own_classes(self.task)
        return labels if own is None else labels - own.start

    def _batch(self, numbers: Sequence[int]) -> Batch:
        model = self.regime.model
        prepared = model.prepare([self.split[number] for number in numbers], self.task.name)
        batch: Batch = to_device(prepared, self.head.weight.device)
        return batch


def _partial_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.partial")
