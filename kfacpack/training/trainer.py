"""What a run says of itself: to be taken up again, and in the file of the vector that it makes.

The training of a task's vector: several processes, stored and taken up again.

Every process runs the same job. Of each step's batch it takes every n-th example; the gradients are added up, and all
go on with the same τ. So neither their number nor how many examples are computed at once changes what is trained, but
for rounding.
"""

from __future__ import annotations

import warnings
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
from torch.nn.functional import cross_entropy

from kfacpack.curvature.matrices.components import raw_bytes
from kfacpack.errors import KfacpackError, NotFiniteError, printable
from kfacpack.estimation import distributed
from kfacpack.estimation.resume import SAVE_INTERVAL, Interrupted, PartialFile, require_writable_folder
from kfacpack.format.manifest import Source
from kfacpack.format.vector_manifest import AboutVector, TaskEntry, Training
from kfacpack.models.data_loading import batches, fingerprint
from kfacpack.models.functional import to_device
from kfacpack.models.heads import Head, require_several
from kfacpack.tasks.task import own_classes
from kfacpack.training.metrics import (
    Metrics,
    PenaltyWarning,
    metrics_path,
    open_metrics_log,
    penalty_problem,
    read_metrics,
    require_metrics_path,
)
from kfacpack.training.optimizer import AdamWState, BatchOrder, find_learning_rate, require_influence
from kfacpack.training.settings import TrainingSettings
from kfacpack.vectors.task_vector import TaskVector

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kfacpack.format.manifest import Base
    from kfacpack.models.heads import Head
    from kfacpack.models.model import Batch
    from kfacpack.tasks.task import Split, Task
    from kfacpack.training.data_penalty import DataPenalty
    from kfacpack.training.regimes import Regime
    from kfacpack.training.regularizer import Regularizer


def resume_request(job: Trainer, base: Base) -> dict[str, Any]:
    """What must be the same for a run to be taken up again."""
    model, others = job.regime.model, job.drift.splits if job.drift else {}
    settings = _settings(job)
    settings.pop("output_scale", None)  # it follows from the bundles or the data
    return {
        **settings,
        "regime": job.regime.name,
        "model": f"{base.family} {base.name}",
        "weights": base.sha256,
        "preprocessing": model.preprocessing,
        "task": job.task.name,
        "data": f"{job.split.source.dataset}, {len(job.split)} examples",
        "data_content": fingerprint(model, job.split, job.task.name, labels=True),
        "reg_data_content": {name: fingerprint(model, split, name) for name, split in others.items()},
        "head": f"{job.head.origin}, {_digest_of(job.head)}",
        "bundles": list(job.regularizer.digests) if job.regularizer else [],
    }


def build_task_vector(job: Trainer, tau: Mapping[str, Tensor], base: Base) -> TaskVector:
    """The vector, with its head and with how it was trained."""
    origin, model = job.split.source, job.regime.model
    source = Source(
        task=job.task.name,
        dataset=origin.dataset,
        revision=origin.revision,
        split=origin.split,
        license=origin.license,
        preprocessing=model.preprocessing,
        examples=len(job.split),
        dataset_size=len(job.split),
    )
    settings = _settings(job)
    training = Training(
        seed=settings.pop("seed"),
        settings={key: value for key, value in settings.items() if value is not None},
        bundles=job.regularizer.digests if job.regularizer else (),
    )
    about = AboutVector(
        base=base,
        function=model.function,
        regime=job.regime.name,
        tasks=(TaskEntry(source=source, training=training),),
    )
    return TaskVector({name: each.cpu() for name, each in tau.items()}, about, {job.task.name: job.head})


def _settings(job: Trainer) -> dict[str, Any]:
    """Every number that decides what is trained."""
    penalty = job.regularizer or job.drift
    autocast = {"autocast": str(job.autocast).removeprefix("torch.")} if job.autocast else {}
    return {
        **asdict(job.settings),
        "steps": job.steps,
        "lr": job.lr,
        **(penalty.settings if penalty else {}),
        **autocast,
    }


def _digest_of(head: Head) -> str:
    digest = sha256(repr(head.classes).encode())
    for tensor in (head.weight, head.bias):
        digest.update(raw_bytes(tensor))
    return digest.hexdigest()


_LR_EXAMPLES = 32
"""How many examples a learning rate is found from."""


@dataclass
class Trainer:
    regime: Regime
    task: Task
    head: Head
    settings: TrainingSettings = field(default_factory=TrainingSettings)
    regularizer: Regularizer | None = None
    drift: DataPenalty | None = None
    autocast: torch.dtype | None = None
    """The type that the model computes in, where that is not its own; τ stays float32."""

    def __post_init__(self) -> None:
        require_several(self.task, self.head.classes)
        if not len(self.split):
            raise KfacpackError(f"{printable(self.task.name)}: its training split has no examples")
        if self.regularizer and self.drift:
            raise KfacpackError("the penalty comes from bundles or from data, found both")
        if self.drift:
            self.drift.measure_output_scale(self.regime.model)
        if self.regularizer:
            self.regularizer.check(self.regime.model.module, self.regime.model.function)

    @cached_property
    def split(self) -> Split:
        return self.task.split("train")

    @cached_property
    def unpenalised(self) -> tuple[str, ...]:
        """The parameters that move freely, though there is a penalty of bundles: those that no bundle covers."""
        covered = self.regularizer.parameters if self.regularizer else self.regime.wanted
        return tuple(name for name in self.regime.wanted if name not in covered)

    @cached_property
    def steps(self) -> int:
        return self.settings.length(len(self.split))

    @cached_property
    def lr(self) -> float:
        """At its peak. One that is found is found by all processes, from the same examples."""
        if self.settings.lr is not None:
            return self.settings.lr
        numbers = self._order.batch(0)[:_LR_EXAMPLES]
        return find_learning_rate(self.regime, self._own_head, self._batch(numbers), self._labels(numbers))

    @cached_property
    def _own_head(self) -> Head:
        """Of the classes that examples are told apart from: of a part of a task (NAME@k/n), its own alone."""
        head, own = self.head, own_classes(self.task)
        if own is None:
            return head
        # Views, so that what processes take from the first one's head is seen here.
        rows = slice(own.start, own.stop)
        return Head(head.weight[rows], head.bias[rows], head.classes[rows], head.origin)

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
        """Train, and write the vector. On the way, what is done is stored beside it, every so many seconds.

        `on_progress` hears of each step, and how many there are. Once `stopped` says so, what is done is stored after
        the step at hand, and `Interrupted` is raised.
        """
        require_writable_folder(output)
        require_metrics_path(output)
        model = self.regime.model
        base = model.base(self.regime.wanted)
        state = AdamWState(self.regime.wanted, self.settings)
        build_task_vector(
            self, state.tau, base
        )  # what is wrong with its words should not be found out after the last step
        partial = PartialFile(_partial_path(output), "a training run", resume_request(self, base), every)
        done = self._begin(partial, state, resume=resume)
        first = distributed.rank() == 0
        wanted = ((0, chosen) for step in range(done, self.steps) for chosen in self._own(step))
        with (
            open_metrics_log(metrics_path(output), done) if first else nullcontext() as log,
            closing(batches(model, [(self.split, self.task.name)], wanted)) as coming,
            closing(self.drift) if self.drift else nullcontext(),
        ):
            for step in range(done, self.steps):
                metrics, stop = self._step(step, state, coming, stopped)
                if log:
                    log.add(metrics)
                on_progress(metrics, self.steps)
                stop = stop or (distributed.world_size() == 1 and stopped())
                if first:
                    partial.keep(state, step + 1, now=stop)
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

    def _check_penalty(self, path: Path) -> None:
        penalty = self.regularizer or self.drift
        if penalty and (problem := penalty_problem(read_metrics(path), penalty.strength)):
            warnings.warn(f"{self.task.name}: {problem}", PenaltyWarning, stacklevel=3)

    def _begin(self, partial: PartialFile, state: AdamWState, *, resume: bool) -> int:
        """How many steps are done already. The first process knows; and all train against its head."""
        done = torch.zeros((), dtype=torch.int64)
        if distributed.rank() == 0:
            done.fill_(partial.restore(state) if resume else partial.require_absent())
        shared = (tensor for _, tensor in state.tensors())
        distributed.broadcast([done, self.head.weight, self.head.bias, *shared])
        return int(done)

    def _own(self, step: int) -> list[Sequence[int]]:
        return self._order.own(step, self.settings.at_once)

    def _step(
        self, step: int, state: AdamWState, coming: Iterator[Batch], stopped: Callable[[], bool]
    ) -> tuple[Metrics, bool]:
        """And whether any of the processes was asked to stop: then all do, after the same step."""
        numbers = self._order.batch(step)
        state.clear()
        loss, right, drift = (torch.zeros((), dtype=torch.float64) for _ in range(3))
        try:
            for chosen in self._own(step):
                lost, correct = self._learn(chosen, to_device(next(coming), self.head.weight.device), state)
                loss += lost
                right += correct
            if self.drift:
                with self._cast():
                    drift += self.drift.add_grad(step, self.regime, state.tau, state.gradients, self.settings.at_once)
        except NotFiniteError as error:
            raise self._failed(step, str(error), by_rate=step > 0) from error
        stop = torch.tensor(float(distributed.world_size() > 1 and stopped()))
        distributed.all_reduce_sum([loss, right, drift, stop, *state.gradients.values()])
        penalty = float(drift) if self.drift else None
        if self.regularizer and self.regularizer.due(step):
            penalty = float(self.regularizer.add_grad(state.tau, state.gradients))
        mean, accuracy = float(loss) / len(numbers), float(right) / len(numbers)
        if not (isfinite(mean) and isfinite(penalty or 0.0)):
            problem = f"the loss is {mean:.3g} and the penalty {penalty or 0.0:.3g}"
            raise self._failed(step, problem, by_rate=step > 0)
        if not state.gradients_are_finite():
            raise self._failed(step, "the gradient has numbers that are not finite", by_rate=step > 0)
        if step == 0 and state.gradients_are_zero():
            require_influence(self.regime, self._batch(numbers[:1]))
        lr = self.lr * self.settings.share_of_lr(step, self.steps)
        if not state.step(lr):
            raise self._failed(step, "after it, τ has numbers that are not finite", by_rate=True)
        return Metrics(step + 1, mean, accuracy, penalty, lr), bool(stop)

    def _failed(self, step: int, problem: str, *, by_rate: bool) -> KfacpackError:
        """`by_rate`: whether a learning rate has had a part in it; while τ is zero, none has."""
        kept = "The last good state is kept beside the output, if there was one"
        parameters = self.regime.model.module.named_parameters()
        if (bad := next((name for name, each in parameters if not bool(each.isfinite().all())), None)) is not None:
            remedy = f"the model's own weights are not all finite, {bad!r} first of all: load others"
        elif by_rate:
            remedy = "a smaller --lr may help"
        else:
            remedy = "τ is still zero there: check the data, or use another --dtype"
        return KfacpackError(f"step {step + 1}: {problem}. {kept}; {remedy}")

    def _learn(self, chosen: Sequence[int], batch: Batch, state: AdamWState) -> tuple[float, int]:
        """Adds the gradient of these examples' share of the loss; the sum of their losses, and how many are right."""
        labels = self._labels(chosen)
        with self._cast():
            moved = self.regime.moved(batch, state.tau)
        f = moved.f.requires_grad_()
        logits = self._own_head.logits(f)
        loss = cross_entropy(logits, labels, reduction="sum")
        (u,) = torch.autograd.grad(loss, f)
        moved.add_gradient(u / self.settings.batch_size, state.gradients)
        return float(loss.detach()), int((logits.argmax(1) == labels).sum())

    def _cast(self) -> AbstractContextManager[Any]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.head.weight.device.type, self.autocast)

    def _labels(self, numbers: Sequence[int]) -> Tensor:
        """By their places in `_own_head`."""
        labels = torch.tensor([self.split.label(number) for number in numbers], device=self.head.weight.device)
        own = own_classes(self.task)
        return labels if own is None else labels - own.start

    def _batch(self, numbers: Sequence[int]) -> Batch:
        model = self.regime.model
        prepared = model.prepare([self.split[number] for number in numbers], self.task.name)
        moved: Batch = to_device(prepared, self.head.weight.device)
        return moved


def _partial_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.partial")
