"""Distributes the stages of a plan among workers.

A worker keeps the model, the tasks and their heads in memory, and computes one stage at a time (`worker.py`). The
workers in this module are processes on one machine; `ray_cluster.py` implements workers on a Ray cluster.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any, ClassVar

from typing_extensions import Self

from kfacpack.errors import KfacpackError
from kfacpack.estimation.distributed import (
    available_bytes,
    default_jobs,
    devices_of,
    usable_cores,
    worker_bytes,
    workers_on_gpus,
)
from kfacpack.estimation.resume import Interrupted
from kfacpack.format.units import human_bytes
from kfacpack.training.metrics import PenaltyWarning

if TYPE_CHECKING:
    import torch

    from kfacpack.experiments.results import RunRecord
    from kfacpack.experiments.run import RunContext, StageDisplay
    from kfacpack.experiments.stage import Stage

LOGS = "logs"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_POLL_SECONDS = 0.1


class JobsWarning(UserWarning):
    """Issued for problems with workers, such as too little memory, more threads than cores, or no free Ray node.

    Example:
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore", kp.JobsWarning)
        ...     kp.run("plan.yaml", jobs=64)
    """


class StageWorker(ABC):
    """The scheduler's handle to a worker.

    Args:
        number: Number of the worker, from 1.
        device: Device of the worker's model.
        log: File with the output of the worker, or a description of where to find the output.
    """

    def __init__(self, number: int, device: str, log: Path | str):
        self.number = number
        self.device = device
        self.log = log
        self.stage: Stage | None = None
        self.ready = True
        """Whether the worker accepts stages."""
        self.loaded: set[str] = set()
        """Names of tasks and keys of inputs that the worker has used and may still have in memory; see `_used_by`."""

    @property
    def where(self) -> str:
        """Number and device of the worker, as shown in messages."""
        return f"worker {self.number}" + ("" if self.device == "cpu" else f" ({self.device})")

    def location(self) -> dict[str, Any]:
        """Returns the fields that identify the worker in an event: its number and its device."""
        return {"worker": self.number, "device": self.device}

    @abstractmethod
    def start(self, stage: Stage) -> None:
        """Tells the worker to compute a stage."""

    @abstractmethod
    def stop(self) -> None:
        """Asks the worker to save the state of its stage and to stop."""


class WorkerPool(ABC):
    """The workers of a run. When the pool is used as a context manager, it terminates the workers on exit."""

    attempts: ClassVar[int] = 2
    """Maximum number of attempts to compute a stage. A stage is started again if its worker dies."""

    @property
    @abstractmethod
    def workers(self) -> Sequence[StageWorker]:
        """The workers, including those that are being started."""

    @abstractmethod
    def messages(self, seconds: float) -> list[tuple[StageWorker, dict[str, Any]]]:
        """Waits at most `seconds` for messages, and returns each message with the worker that it concerns.

        The `event` of a message is progress, warning, finished, interrupted, failed or lost. The other keys are the
        arguments of the scheduler's method that handles this event.
        """

    @abstractmethod
    def replace(self, worker: StageWorker) -> None:
        """Replaces a worker that has died."""

    @abstractmethod
    def close(self) -> None:
        """Terminates all workers."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class Scheduler:
    """Distributes the pending stages of a run among workers.

    A stage is ready when the files of its inputs exist. A free worker starts the ready stage that begins the most
    expensive chain of dependent stages; see `_choose`.
    """

    stages: Sequence[Stage]
    pool: WorkerPool
    show: StageDisplay
    stopped: Callable[[], bool]
    record: RunRecord
    peak_bytes: dict[int, int] = field(default_factory=dict)
    """Peak memory in bytes, by worker number."""

    def run(self) -> None:
        """Computes all pending stages.

        Raises:
            Interrupted: If `stopped` returned True. The workers have then saved the state of their stages.
            KfacpackError: If a stage raised this error, or its worker died repeatedly.
            OSError: If a stage raised this error, for example because a file could not be written.
            RuntimeError: If a stage raised any other exception.
        """
        self._pending = {stage.key: stage for stage in self.stages if not stage.done}
        self._priorities = critical_paths(list(self._pending.values()))
        self._numbers = {stage.key: number for number, stage in enumerate(self.stages, start=1)}
        self._waiting = dict(self._pending)
        self._attempts: dict[str, int] = {}
        self._displays: dict[str, tuple[AbstractContextManager[Any], Callable[[int, int, str], None]]] = {}
        self._failure: BaseException | None = None
        self._stopping = False
        with ExitStack() as cleanup:
            cleanup.callback(self._close_displays)
            while self._pending:
                if self.stopped():
                    self._stop()
                self._assign()
                if self._stopping and not any(worker.stage for worker in self.pool.workers):
                    raise self._failure or Interrupted
                for worker, message in self.pool.messages(_POLL_SECONDS):
                    getattr(self, f"_on_{message.pop('event')}")(worker, **message)

    def _assign(self) -> None:
        for worker in self.pool.workers:
            ready = [
                stage
                for stage in self._waiting.values()
                if not any(dependency.key in self._pending for dependency in stage.inputs)
            ]
            if self._stopping or not ready:
                return
            if worker.stage is not None or not worker.ready:
                continue
            stage = self._choose(worker, ready)
            del self._waiting[stage.key]
            worker.stage = stage
            worker.loaded |= _used_by(stage)
            display = self.show(stage, self._numbers[stage.key], len(self.stages))
            self._displays[stage.key] = display, display.__enter__()
            self._displays[stage.key][1](0, 1, worker.where)
            self.record.event("started", stage, worker.location())
            worker.start(stage)

    def _choose(self, worker: StageWorker, ready: Sequence[Stage]) -> Stage:
        """Returns the ready stage that begins the most expensive chain of dependent stages.

        If there are several such stages, returns the one with the most inputs in the worker's memory.
        """

        def priority(stage: Stage) -> tuple[float, int]:
            return self._priorities[stage.key], len(_used_by(stage) & worker.loaded)

        return max(ready, key=priority)

    def _on_progress(self, worker: StageWorker, done: int, total: int, status: str) -> None:
        assert worker.stage is not None
        self._displays[worker.stage.key][1](done, total, f"{worker.where}  {status}".rstrip())

    def _on_warning(self, worker: StageWorker, text: str) -> None:
        warnings.warn(text, PenaltyWarning, stacklevel=2)

    def _on_finished(self, worker: StageWorker, seconds: float, peak_bytes: int) -> None:
        self.peak_bytes[worker.number] = max(peak_bytes, self.peak_bytes.get(worker.number, 0))
        stage = self._release(worker)
        del self._pending[stage.key]
        self.record.finished(stage, seconds, worker.location())

    def _on_interrupted(self, worker: StageWorker) -> None:
        if self._stopping:
            location = worker.location()
            self.record.event("interrupted", self._release(worker, Interrupted()), location)
        # Otherwise, the worker itself was terminated, and its exit will be reported as `lost`.

    def _on_failed(self, worker: StageWorker, kind: str, text: str, number: int | None, file: str | None) -> None:
        error: Exception
        name = f"{worker.stage.kind}/{worker.stage.name}" if worker.stage else "startup"
        if kind == "KfacpackError":
            error = KfacpackError(text)
        elif kind == "OSError":
            error = OSError(number, text, file)
        else:
            error = RuntimeError(f"{name} failed in {worker.where}; log: {worker.log}\n{text}")
        self._fail(worker, text, error)

    def _on_lost(self, worker: StageWorker, reason: str) -> None:
        """Handles the death of a worker: starts its stage again, or ends the run after too many attempts."""
        work = f"{worker.stage.kind}/{worker.stage.name}" if worker.stage else f"startup of {worker.where}"
        attempts = self._attempts[work] = self._attempts.get(work, 0) + 1
        if self._stopping:
            if worker.stage is not None:
                self._release(worker, Interrupted())
        elif attempts == self.pool.attempts:
            remedy = "Repeat the command to continue; if memory was exhausted, use fewer processes (--jobs)"
            problem = f"{work}: {worker.where} {reason} (attempt {attempts} of {attempts}); log: {worker.log}"
            self._fail(worker, reason, KfacpackError(f"{problem}. {remedy}"))
        else:
            if worker.stage is not None:
                stage = self._release(worker, Interrupted())
                self._waiting[stage.key] = stage
                self.record.event("retried", stage, worker.location(), error=reason, log=str(worker.log))
            self.pool.replace(worker)

    def _release(self, worker: StageWorker, problem: BaseException | None = None) -> Stage:
        """Marks a worker as idle, closes the display of its stage, and returns the stage.

        Args:
            worker: The worker.
            problem: The error that ended the stage; None if the stage is finished.
        """
        stage, worker.stage = worker.stage, None
        assert stage is not None
        self._displays.pop(stage.key)[0].__exit__(type(problem) if problem else None, problem, None)
        return stage

    def _fail(self, worker: StageWorker, text: str, error: Exception) -> None:
        if worker.stage is not None:
            stage = self._release(worker, error)
            self.record.event("failed", stage, worker.location(), error=text, log=str(worker.log))
        self._failure = self._failure or error
        self._stop()

    def _stop(self) -> None:
        """Asks all workers to save the state of their stages and to stop."""
        if not self._stopping:
            self._stopping = True
            for worker in self.pool.workers:
                worker.stop()

    def _close_displays(self) -> None:
        for display, _ in self._displays.values():
            problem = Interrupted()
            display.__exit__(Interrupted, problem, None)


def _used_by(stage: Stage) -> set[str]:
    """Returns the keys of a stage's inputs and, if the stage belongs to one task, the name of the task."""
    return {task for task in (getattr(stage, "task", None),) if task} | {dependency.key for dependency in stage.inputs}


def critical_paths(stages: Sequence[Stage]) -> dict[str, float]:
    """Maps the key of each stage to the cost of the most expensive chain of dependent stages that begins with it.

    Args:
        stages: The pending stages. Each stage must come after its inputs.
    """
    after: dict[str, float] = {}
    lengths: dict[str, float] = {}
    for stage in reversed(stages):
        lengths[stage.key] = stage.cost() + after.get(stage.key, 0.0)
        for dependency in stage.inputs:
            after[dependency.key] = max(after.get(dependency.key, 0.0), lengths[stage.key])
    return lengths


class ProcessWorker(StageWorker):
    """A worker process.

    Args:
        number: Number of the worker, from 1.
        device: Device of the worker's model.
        log: File that receives the worker's output, once the run has started.
        setup: The plan and the other settings of the run.
        variables: Environment variables of the worker process, in addition to those of the current process.
    """

    def __init__(
        self, number: int, device: str, log: Path, setup: Mapping[str, Any], variables: Mapping[str, str]
    ) -> None:
        super().__init__(number, device, log)
        self._log_file = log
        self._buffer = b""
        # Nothing is written to the folder of the run before the folder is locked.
        self._early_log = TemporaryFile()  # noqa: SIM115 - closed by `close`
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kfacpack.experiments.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._early_log,
            bufsize=0,
            env={**os.environ, **variables},
        )
        self.send({**setup, "device": "cuda:0" if _VISIBLE in variables else device})

    @property
    def output(self) -> IO[bytes]:
        """The pipe from which the worker's messages are read."""
        assert self.process.stdout is not None
        return self.process.stdout

    def start(self, stage: Stage) -> None:
        """Sends the key of the stage to the process."""
        self.send({"stage": stage.key})

    def stop(self) -> None:
        """Sends the process a request to stop."""
        self.send({"stop": True})

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message. If the worker has died, the message is lost, and `receive` will report the death."""
        assert self.process.stdin is not None
        line = memoryview((json.dumps(message) + "\n").encode())
        try:
            while line:
                line = line[self.process.stdin.write(line) or 0 :]
        except BrokenPipeError:
            pass

    def receive(self) -> list[dict[str, Any]]:
        """Returns the messages that have arrived, or the message `lost` if the process has ended."""
        if data := os.read(self.output.fileno(), 1 << 16):
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            return [json.loads(line) for line in lines]
        code = self.process.wait()
        self._early_log.seek(0)
        if text := self._early_log.read():
            with self._log_file.open("ab") as log:
                log.write(text)
        return [
            {"event": "lost", "reason": f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"}
        ]

    def close(self) -> None:
        """Kills the process."""
        assert self.process.stdin is not None
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.output.close()
        self._early_log.close()


class ProcessPool(WorkerPool):
    """Worker processes on this machine.

    Args:
        setup: The plan and the other settings of the run; see `run_setup`.
        root: Folder of the run.
        device: Device of the plan's model; see `worker_devices`.
    """

    def __init__(self, setup: Mapping[str, Any], root: Path, device: torch.device):
        self._workers: list[ProcessWorker] = []
        self._root = root
        self._devices = worker_devices(device, os.environ)
        self._setup = {**setup, "root": str(root)}
        self._keys: dict[str, Any] | None = None
        self._selector = selectors.DefaultSelector()

    @property
    def workers(self) -> Sequence[StageWorker]:
        """The worker processes, including those that are being started."""
        return self._workers

    def close(self) -> None:
        """Terminates all workers."""
        self.resize(0)
        self._selector.close()

    def resize(self, count: int) -> None:
        """Starts or terminates workers until there are `count` workers."""
        while len(self._workers) > count:
            self._end(self._workers[-1])
        while len(self._workers) < count:
            self._start(len(self._workers) + 1)

    def replace(self, worker: StageWorker) -> None:
        """Replaces a worker with a new process that has the same number and device."""
        assert isinstance(worker, ProcessWorker)
        self._end(worker)
        self._start(worker.number)

    def configure(self, context: RunContext) -> None:
        """Sends all workers the number of threads, and the hashes from `RunContext.shared_keys`."""
        self._keys = {**context.shared_keys(), "threads": context.threads}
        (self._root / LOGS).mkdir(exist_ok=True)
        for worker in self._workers:
            worker.send({**self._keys, "log": str(worker.log)})

    def messages(self, seconds: float) -> list[tuple[StageWorker, dict[str, Any]]]:
        """Waits at most `seconds` for messages from the workers, and returns the messages."""
        messages: list[tuple[StageWorker, dict[str, Any]]] = []
        for ready, _ in self._selector.select(seconds):
            worker: ProcessWorker = ready.data
            messages += ((worker, message) for message in worker.receive())
            if worker.process.returncode is not None:
                self._selector.unregister(worker.output)
        return messages

    def _start(self, number: int) -> None:
        device, variables = self._devices[(number - 1) % len(self._devices)]
        log = self._root / LOGS / f"worker-{number}.log"
        worker = ProcessWorker(number, device, log, self._setup, variables)
        if self._keys:
            worker.send({**self._keys, "log": str(worker.log)})
        self._selector.register(worker.output, selectors.EVENT_READ, worker)
        self._workers.append(worker)

    def _end(self, worker: ProcessWorker) -> None:
        with suppress(KeyError):  # a process that has died is not registered
            self._selector.unregister(worker.output)
        worker.close()
        self._workers.remove(worker)


def worker_devices(device: torch.device, environment: Mapping[str, str]) -> list[tuple[str, dict[str, str]]]:
    """Returns the devices that workers use, each with the environment variables that select it.

    Each worker sees only its own GPU, so that no library allocates memory on another GPU.

    Args:
        device: Device of the plan's model; `cuda` without an index means all GPUs.
        environment: Environment variables of this process.
    """
    if device.type != "cuda":
        return [(str(device), {})]
    # torch numbers only the visible GPUs, which may already be a subset of all GPUs.
    visible = [name for name in environment.get(_VISIBLE, "").split(",") if name]
    indices = [one.index or 0 for one in devices_of(device)]
    return [(f"cuda:{index}", {_VISIBLE: visible[index] if visible else str(index)}) for index in indices]


def choose_jobs(context: RunContext, requested: int | None) -> int:
    """Returns the requested or default number of processes, or a smaller number if not all of them fit into memory.

    Issues a `JobsWarning` if memory limits the number, or if all processes together have more threads than cores.

    Args:
        context: The context of the run.
        requested: The requested number of processes; None for the default number.
    """
    jobs = requested or default_jobs(context.device, context.threads)
    available, needed = available_bytes(), worker_bytes(context.model_bytes)
    if available is not None and (fitting := max(1, available // needed)) < jobs:
        problem = f"{jobs} processes need about {human_bytes(jobs * needed)} of memory"
        warning = f"{problem}, but only {human_bytes(available)} is available; using {fitting} instead"
        warnings.warn(warning, JobsWarning, stacklevel=4)
        jobs = fitting
    if context.device.type == "cuda" and (fitting := workers_on_gpus(context.device, context.model_bytes)) < jobs:
        warning = f"{jobs} processes do not fit into the memory of the GPUs; using {fitting} instead"
        warnings.warn(warning, JobsWarning, stacklevel=4)
        jobs = fitting
    if context.device.type == "cpu" and jobs > 1 and jobs * context.threads > usable_cores():
        counts = f"processes: {jobs}, threads per process: {context.threads}, cores: {usable_cores()}"
        problem = f"the processes have more threads than there are cores ({counts})"
        remedy = "fewer processes or threads may be faster (--jobs, --threads)"
        warnings.warn(f"{problem}; {remedy}", JobsWarning, stacklevel=4)
    return jobs
