"""The program of worker processes, each of which computes one stage at a time.

The scheduler starts it with `python -m kfacpack.experiments.worker`. A worker exchanges JSON lines with the scheduler
through pipes, and exits when its stdin is closed, so that no worker outlives the scheduler. The actors of
`ray_cluster.py` use the same functions.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kfacpack.errors import KfacpackError

if TYPE_CHECKING:
    from kfacpack.experiments.plan import Plan
    from kfacpack.experiments.run import RunContext
    from kfacpack.experiments.stage import Stage

_PROGRESS_SECONDS = 0.1


def run_setup(plan: Plan, text: str) -> dict[str, Any]:
    """Returns the settings from which `open_context` builds the context of a run in a worker, as JSON values.

    Args:
        plan: The plan.
        text: YAML text of the plan.
    """
    from kfacpack.models.data_loading import requested_workers

    return {
        "plan": text,
        "name": plan.source_name,
        "folder": str(plan.folder.absolute()),
        "loaders": requested_workers(),
    }


def open_context(setup: Mapping[str, Any], device: str, threads: int | None = None) -> RunContext:
    """Builds the context of a run in a worker.

    Args:
        setup: Result of `run_setup`.
        device: Device of the model.
        threads: Number of threads per stage; None for the default.
    """
    import torch

    from kfacpack.experiments.plan_file import parse
    from kfacpack.experiments.run import RunContext
    from kfacpack.models.data_loading import use_workers

    use_workers(setup["loaders"])
    plan = parse(setup["plan"], setup["name"]).based_at(Path(setup["folder"]))
    return RunContext(plan, torch.device(device), threads)


def compute(
    stage: Stage,
    on_progress: Callable[[int, int, str], None],
    stopped: Callable[[], bool],
    on_warning: Callable[[str], None],
) -> dict[str, Any]:
    """Computes a stage in a worker. Tracebacks, and warnings other than `PenaltyWarning`, are printed to stderr.

    Args:
        stage: The stage.
        on_progress: Called with the progress, at most ten times per second.
        stopped: Function that returns True when the stage should save its state and stop.
        on_warning: Called with the text of each `PenaltyWarning`.

    Returns:
        The message for the scheduler, with the event `finished`, `interrupted` or `failed`.
    """
    from kfacpack.estimation.resume import Interrupted
    from kfacpack.experiments.run import peak_bytes
    from kfacpack.experiments.stage import StageProgress
    from kfacpack.training.metrics import PenaltyWarning

    start = time.perf_counter()
    last = [0.0]

    def progress(done: int, total: int, status: str) -> None:
        if (now := time.perf_counter()) - last[0] >= _PROGRESS_SECONDS:
            last[0] = now
            on_progress(done, total, status)

    def showwarning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if issubclass(category, PenaltyWarning):
            on_warning(str(message))
        else:
            print(f"{category.__name__}: {message}", file=sys.stderr, flush=True)

    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {stage.kind}/{stage.name}", file=sys.stderr, flush=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", PenaltyWarning)
            warnings.showwarning = showwarning
            stage.make(StageProgress(progress, stopped))
        return {"event": "finished", "seconds": time.perf_counter() - start, "peak_bytes": peak_bytes()}
    except Interrupted:
        return {"event": "interrupted"}
    except Exception as error:  # the scheduler reports it
        return failure(error)


def failure(error: Exception) -> dict[str, Any]:
    """Prints the traceback of the current exception and returns the message that reports it to the scheduler."""
    traceback.print_exc()
    if isinstance(error, KfacpackError):
        return {"event": "failed", "kind": "KfacpackError", "text": str(error), "number": None, "file": None}
    if isinstance(error, OSError):
        file = None if error.filename is None else str(error.filename)
        text = error.strerror or str(error)
        return {"event": "failed", "kind": "OSError", "text": text, "number": error.errno, "file": file}
    return {"event": "failed", "kind": "Exception", "text": traceback.format_exc(), "number": None, "file": None}


class _WorkerProcess:
    """The program of a worker process, which receives keys of stages on stdin and sends messages to stdout."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        # A forked process closes sys.stdin, and would block if a thread were reading from it. Only this copy is read.
        self._input = os.fdopen(os.dup(0), "rb")
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        # Libraries may print to stdout; only messages may reach the pipe.
        self._output = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)
        self._lines: list[dict[str, Any]] = []
        self._arrived = threading.Condition()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches all processes
        signal.signal(signal.SIGTERM, lambda number, frame: self._stop.set())

    def run(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()
        setup = self._next()
        # Imported after the reader has started, so that the end of the input is detected during the import.
        import torch

        from kfacpack.experiments.stage_graph import StageGraph

        torch.set_num_threads(1)
        context = open_context(setup, setup["device"])
        with suppress(KfacpackError):  # reported by the scheduler
            _ = context.model  # loaded while the scheduler checks the plan
        keys = self._next()
        log = os.open(keys["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 2)
        os.dup2(log, 1)
        torch.set_num_threads(keys["threads"])
        context.use_keys(keys)
        stages = {stage.key: stage for stage in StageGraph(context, Path(setup["root"])).in_order()}
        while True:
            message = compute(
                stages[self._next()["stage"]],
                lambda done, total, status: self._send(
                    {"event": "progress", "done": done, "total": total, "status": status}
                ),
                self._stop.is_set,
                lambda text: self._send({"event": "warning", "text": text}),
            )
            self._send(message)
            if message["event"] == "interrupted":
                os._exit(0)

    def _send(self, message: Mapping[str, Any]) -> None:
        data = memoryview((json.dumps(message) + "\n").encode())
        try:
            while data:
                data = data[self._output.write(data) or 0 :]
        except BrokenPipeError:
            os._exit(1)

    def _next(self) -> dict[str, Any]:
        with self._arrived:
            self._arrived.wait_for(lambda: self._lines)
            return self._lines.pop(0)

    def _read(self) -> None:
        """Receives messages. When the scheduling process exits, the input ends, and this process exits as well."""
        for line in self._input:
            message = json.loads(line)
            if "stop" in message:
                self._stop.set()
                continue
            with self._arrived:
                self._lines.append(message)
                self._arrived.notify()
        os._exit(1)


if __name__ == "__main__":
    _WorkerProcess().run()
