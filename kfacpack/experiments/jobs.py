"""Runs the stages of a plan in several worker processes.

The process that reads the plan schedules its stages. Each worker is a new interpreter that keeps the model, the tasks
and their heads loaded and computes one stage at a time. Both sides exchange JSON lines through pipes. A worker exits
when its input ends, so that none survives the scheduling process.

`python -m kfacpack.experiments.jobs` is the program of a worker.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any

from kfacpack.errors import KfacpackError
from kfacpack.estimation.distributed import devices_of

if TYPE_CHECKING:
    import torch

    from kfacpack.experiments.plan import Plan
    from kfacpack.experiments.run import RunContext, StageDisplay
    from kfacpack.experiments.stage import Stage

_ATTEMPTS = 2
_POLL_SECONDS = 0.1
_PROGRESS_SECONDS = 0.1
LOGS = "logs"


class Worker:
    """A worker process, from the side of the scheduler.

    Args:
        number: Number of the worker, from 1.
        device: Device of its model.
        setup: The plan and the other settings of the run.
        log: File that receives the worker's stderr, once the run has started.
    """

    def __init__(self, number: int, device: torch.device, setup: Mapping[str, Any], log: Path):
        self.number = number
        self.device = device
        self.log = log
        self.stage: Stage | None = None
        self._buffer = b""
        # The folder of the run is not written before it is locked.
        self._early_log = TemporaryFile()  # noqa: SIM115 - closed by `close`
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kfacpack.experiments.jobs"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._early_log,
            bufsize=0,
        )
        self.send({**setup, "device": str(device)})

    @property
    def where(self) -> str:
        """Number and device, for messages."""
        return f"worker {self.number}" + ("" if self.device.type == "cpu" else f" ({self.device})")

    @property
    def output(self) -> IO[bytes]:
        """The pipe with the worker's messages."""
        assert self.process.stdout is not None
        return self.process.stdout

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message. That a worker is dead is noticed when its output ends."""
        assert self.process.stdin is not None
        line = memoryview((json.dumps(message) + "\n").encode())
        try:
            while line:
                line = line[self.process.stdin.write(line) or 0 :]
        except BrokenPipeError:
            pass

    def receive(self) -> list[dict[str, Any]] | None:
        """Reads the messages that have arrived; None at the end of the worker's output."""
        data = os.read(self.output.fileno(), 1 << 16)
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def save_log(self) -> None:
        """Appends what the process printed before it opened its log."""
        self._early_log.seek(0)
        if text := self._early_log.read():
            with self.log.open("ab") as log:
                log.write(text)

    def close(self) -> None:
        """Ends the process at once."""
        assert self.process.stdin is not None
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.output.close()
        self._early_log.close()


class WorkerPool:
    """The worker processes of a run. Used as a context, it ends them.

    Args:
        plan: The plan.
        text: Its YAML text.
        root: Folder of the run.
        device: Device of the plan's model; see `devices_of`.
    """

    def __init__(self, plan: Plan, text: str, root: Path, device: torch.device):
        from kfacpack.models.data_loading import requested_workers

        self.workers: list[Worker] = []
        self._root = root
        self._devices = devices_of(device)
        self._setup = {
            "plan": text,
            "name": plan.source_name,
            "folder": str(plan.folder.absolute()),
            "root": str(root),
            "loaders": requested_workers(),
        }
        self._keys: dict[str, Any] | None = None

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.close()

    def resize(self, count: int) -> None:
        """Starts or ends workers, so that there are `count`."""
        while len(self.workers) > count:
            self.workers.pop().close()
        while len(self.workers) < count:
            self._start(len(self.workers) + 1)

    def restart(self, worker: Worker) -> Worker:
        """Replaces a worker that has died."""
        worker.close()
        self.workers.remove(worker)
        return self._start(worker.number)

    def configure(self, context: RunContext, threads: int) -> None:
        """Sends the hashes that were computed by the scheduler, and the number of threads, to all workers."""
        self._keys = {**context.shared_keys(), "threads": threads}
        (self._root / LOGS).mkdir(exist_ok=True)
        for worker in self.workers:
            worker.send({**self._keys, "log": str(worker.log)})

    def _start(self, number: int) -> Worker:
        device = self._devices[(number - 1) % len(self._devices)]
        worker = Worker(number, device, self._setup, self._root / LOGS / f"worker-{number}.log")
        if self._keys:
            worker.send({**self._keys, "log": str(worker.log)})
        self.workers.append(worker)
        return worker


@dataclass
class Scheduler:
    """Distributes the pending stages of a run among workers.

    A stage is ready when the files of its inputs exist. Of the ready stages, the one with the longest remaining chain
    of dependent stages is started first.
    """

    stages: Sequence[Stage]
    pool: WorkerPool
    show: StageDisplay
    stopped: Callable[[], bool]
    on_finished: Callable[[Stage, float], None]
    """Called with each finished stage and its duration in seconds."""
    on_event: Callable[[dict[str, Any]], None]
    """Receives what happens to the stages: started, finished, lost, failed or interrupted."""
    peak_bytes: dict[int, int] = field(default_factory=dict)
    """Peak memory by worker."""

    def run(self) -> None:
        """Computes all pending stages.

        Raises:
            Interrupted: If `stopped` returned True; the workers have saved their state.
            KfacpackError: If a stage failed, or its worker died twice.
            OSError: If a file could not be written.
            RuntimeError: If a stage failed because of an error in the program.
        """
        from kfacpack.estimation.resume import Interrupted

        self._pending = {stage.key: stage for stage in self.stages if not stage.done}
        self._priorities = critical_paths(list(self._pending.values()))
        self._numbers = {stage.key: number for number, stage in enumerate(self.stages, start=1)}
        self._waiting = dict(self._pending)
        self._attempts: dict[str, int] = {}
        self._displays: dict[str, tuple[AbstractContextManager[Any], Callable[[int, int, str], None]]] = {}
        self._failure: BaseException | None = None
        self._stopping = False
        with selectors.DefaultSelector() as self._selector, ExitStack() as cleanup:
            cleanup.callback(self._close_displays)
            for worker in self.pool.workers:
                self._selector.register(worker.output, selectors.EVENT_READ, worker)
            while self._pending:
                if self.stopped():
                    self._stop()
                self._assign()
                if self._stopping and not any(worker.stage for worker in self.pool.workers):
                    raise self._failure or Interrupted
                for ready, _ in self._selector.select(_POLL_SECONDS):
                    self._receive(ready.data)

    def _assign(self) -> None:
        for worker in self.pool.workers:
            ready = [
                stage
                for stage in self._waiting.values()
                if not any(dependency.key in self._pending for dependency in stage.inputs)
            ]
            if self._stopping or not ready:
                return
            if worker.stage is not None:
                continue
            stage = max(ready, key=lambda stage: self._priorities[stage.key])  # the first of equals
            del self._waiting[stage.key]
            worker.stage = stage
            display = self.show(stage, self._numbers[stage.key], len(self.stages))
            self._displays[stage.key] = display, display.__enter__()
            self._displays[stage.key][1](0, 1, worker.where)
            self._event("started", worker, stage)
            worker.send({"stage": stage.key})

    def _receive(self, worker: Worker) -> None:
        messages = worker.receive()
        if messages is None:
            self._lost(worker)
            return
        for message in messages:
            getattr(self, f"_on_{message.pop('event')}")(worker, **message)

    def _on_progress(self, worker: Worker, done: int, total: int, status: str) -> None:
        assert worker.stage is not None
        self._displays[worker.stage.key][1](done, total, f"{worker.where}  {status}".rstrip())

    def _on_warning(self, worker: Worker, text: str) -> None:
        from kfacpack.training.metrics import PenaltyWarning

        warnings.warn(text, PenaltyWarning, stacklevel=2)

    def _on_finished(self, worker: Worker, seconds: float, peak_bytes: int) -> None:
        self.peak_bytes[worker.number] = max(peak_bytes, self.peak_bytes.get(worker.number, 0))
        stage = self._release(worker)
        del self._pending[stage.key]
        self._event("finished", worker, stage, seconds=round(seconds, 3))
        self.on_finished(stage, seconds)

    def _on_interrupted(self, worker: Worker) -> None:
        if self._stopping:
            self._event("interrupted", worker, self._release(worker))
        # Otherwise the worker itself was terminated; it exits, which is handled when its output ends.

    def _on_failed(self, worker: Worker, kind: str, text: str, number: int | None, file: str | None) -> None:
        stage = self._release(worker)
        self._event("failed", worker, stage, error=text)
        if kind == "KfacpackError":
            self._fail(KfacpackError(text))
        elif kind == "OSError":
            self._fail(OSError(number, text, file))
        else:
            self._fail(RuntimeError(f"{stage.kind}/{stage.name} failed in {worker.where}; log: {worker.log}\n{text}"))

    def _lost(self, worker: Worker) -> None:
        """Handles the death of a worker: its stage is tried once more."""
        self._selector.unregister(worker.output)
        code = worker.process.wait()
        worker.save_log()
        reason = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        stage = self._release(worker) if worker.stage else None
        if stage is None:
            work, name = worker.where, "idle"
        else:
            work = name = f"{stage.kind}/{stage.name}"
            self._event("lost", worker, stage, reason=reason)
        attempts = self._attempts[work] = self._attempts.get(work, 0) + 1
        if attempts == _ATTEMPTS:
            remedy = "If memory was exhausted, use fewer processes (--jobs); repeat the command to continue"
            self._fail(
                KfacpackError(f"{name}: {worker.where} {reason}, for the second time; log: {worker.log}. {remedy}")
            )
        elif not self._stopping:
            if stage is not None:
                self._waiting[stage.key] = stage
            replacement = self.pool.restart(worker)
            self._selector.register(replacement.output, selectors.EVENT_READ, replacement)

    def _release(self, worker: Worker) -> Stage:
        """Marks a worker as idle, and closes the display of its stage."""
        stage, worker.stage = worker.stage, None
        assert stage is not None
        self._displays.pop(stage.key)[0].__exit__(None, None, None)
        return stage

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._stop()

    def _stop(self) -> None:
        """Asks the workers to save their state."""
        if not self._stopping:
            self._stopping = True
            for worker in self.pool.workers:
                worker.send({"stop": True})

    def _close_displays(self) -> None:
        for display, _ in self._displays.values():
            display.__exit__(None, None, None)

    def _event(self, event: str, worker: Worker, stage: Stage, **more: Any) -> None:
        name = f"{stage.kind}/{stage.name}"
        self.on_event({"event": event, "stage": name, "worker": worker.number, "device": str(worker.device), **more})


def critical_paths(stages: Sequence[Stage]) -> dict[str, float]:
    """Returns, by key, the cost of the longest chain of stages that starts with each stage.

    Args:
        stages: Pending stages, each after its inputs.
    """
    after: dict[str, float] = {}
    lengths: dict[str, float] = {}
    for stage in reversed(stages):
        lengths[stage.key] = stage.cost() + after.get(stage.key, 0.0)
        for dependency in stage.inputs:
            after[dependency.key] = max(after.get(dependency.key, 0.0), lengths[stage.key])
    return lengths


class _WorkerSide:
    """The program of a worker: receives stages on stdin and sends events to stdout."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        # Libraries may print to stdout; only messages may reach the pipe.
        self._messages = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)
        self._lines: list[dict[str, Any]] = []
        self._arrived = threading.Condition()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal signals all processes; the scheduler decides
        signal.signal(signal.SIGTERM, lambda number, frame: self._stop.set())

    def run(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()
        setup = self._next()
        # Imported after the reader has started, so that a worker notices the end of its input during the import.
        import torch

        from kfacpack.experiments.plan_file import parse
        from kfacpack.experiments.run import RunContext
        from kfacpack.experiments.stage_graph import StageGraph
        from kfacpack.models.data_loading import use_workers

        torch.set_num_threads(1)
        use_workers(setup["loaders"])
        plan = parse(setup["plan"], setup["name"]).based_at(Path(setup["folder"]))
        context = RunContext(plan, torch.device(setup["device"]))
        with suppress(KfacpackError):  # reported by the scheduler
            _ = context.model  # loaded while the scheduler checks the plan
        keys = self._next()
        log = os.open(keys["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 2)
        os.dup2(log, 1)
        torch.set_num_threads(keys["threads"])
        context.use_keys(keys)
        stages = {stage.key: stage for stage in StageGraph(context, Path(setup["root"])).in_order()}
        warnings.showwarning = self._showwarning
        while True:
            self._compute(stages[self._next()["stage"]])

    def _compute(self, stage: Stage) -> None:
        from kfacpack.estimation.resume import Interrupted
        from kfacpack.experiments.run import peak_bytes
        from kfacpack.experiments.stage import StageProgress
        from kfacpack.training.metrics import PenaltyWarning

        start = time.perf_counter()
        last = [0.0]

        def progress(done: int, total: int, status: str) -> None:
            if (now := time.perf_counter()) - last[0] >= _PROGRESS_SECONDS:
                last[0] = now
                self._send("progress", done=done, total=total, status=status)

        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {stage.kind}/{stage.name}", file=sys.stderr, flush=True)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("always", PenaltyWarning)
                stage.make(StageProgress(progress, self._stop.is_set))
            self._send("finished", seconds=time.perf_counter() - start, peak_bytes=peak_bytes())
        except Interrupted:
            self._send("interrupted")
            os._exit(0)
        except KfacpackError as error:
            self._send("failed", kind="KfacpackError", text=str(error), number=None, file=None)
        except OSError as error:
            traceback.print_exc()
            file = None if error.filename is None else str(error.filename)
            self._send("failed", kind="OSError", text=error.strerror or str(error), number=error.errno, file=file)
        except Exception:
            traceback.print_exc()
            self._send("failed", kind="Exception", text=traceback.format_exc(), number=None, file=None)

    def _showwarning(self, message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        from kfacpack.training.metrics import PenaltyWarning

        if issubclass(category, PenaltyWarning):
            self._send("warning", text=str(message))
        else:
            print(f"{category.__name__}: {message}", file=sys.stderr, flush=True)

    def _send(self, event: str, **message: Any) -> None:
        data = memoryview((json.dumps({"event": event, **message}) + "\n").encode())
        try:
            while data:
                data = data[self._messages.write(data) or 0 :]
        except BrokenPipeError:
            os._exit(1)

    def _next(self) -> dict[str, Any]:
        with self._arrived:
            self._arrived.wait_for(lambda: self._lines)
            return self._lines.pop(0)

    def _read(self) -> None:
        """Receives messages. The end of the input means that the scheduling process is gone."""
        for line in sys.stdin.buffer:
            message = json.loads(line)
            if "stop" in message:
                self._stop.set()
                continue
            with self._arrived:
                self._lines.append(message)
                self._arrived.notify()
        os._exit(1)


if __name__ == "__main__":
    _WorkerSide().run()
