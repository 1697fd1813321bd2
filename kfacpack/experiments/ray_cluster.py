"""Workers on a Ray cluster.

A worker is a Ray actor that reserves the resources for one stage: one CPU per thread, the expected memory and, if the
model is on a GPU, one GPU. Files are transferred through Ray's object store. The scheduler reads the inputs of a stage
from the folder of the run, and stores the files that the actor returns in the same folder. The nodes of the cluster
therefore need no shared file system.
"""

from __future__ import annotations

import glob
import logging
import os
import re
import socket
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError, RayTaskError

from kfacpack.errors import KfacpackError, first_line, printable
from kfacpack.estimation.distributed import worker_bytes
from kfacpack.experiments.jobs import JobsWarning, StageWorker, WorkerPool
from kfacpack.experiments.worker import compute, failure, open_context
from kfacpack.format.units import human_bytes
from kfacpack.format.writer import write_atomically
from kfacpack.tasks.data_sources import is_dataset_address

if TYPE_CHECKING:
    from kfacpack.experiments.run import RunContext
    from kfacpack.experiments.stage import Stage

_CONNECT_SECONDS = 10.0
_STATUS_SECONDS = 1.0
"""Interval in seconds at which the scheduler requests the progress of the stages."""
_NODES_SECONDS = 5.0
"""Interval in seconds at which the scheduler requests the list of nodes."""


class StageActor:
    """The Ray actor of a worker. It computes stages in a process on a node of the cluster.

    Args:
        setup: The plan and the other settings of the run; see `run_setup`.
        device: Device of the model, among those that Ray assigns to the actor.
        keys: The hashes that the scheduler has computed, and the number of threads.
    """

    def __init__(self, setup: Mapping[str, Any], device: str, keys: dict[str, Any]):
        self._setup, self._device, self._keys = setup, device, keys
        self._folder = TemporaryDirectory(prefix="kfacpack-")
        self._stop = threading.Event()
        self._progress: tuple[int, int, str] = (0, 1, "")

    def open(self) -> dict[str, Any]:
        """Loads the model, and checks that this node has the same versions, model and data as the scheduler.

        Returns:
            The message for the scheduler, with the event `ready` or `failed`.
        """
        import torch

        from kfacpack.experiments.stage_graph import StageGraph

        try:
            torch.set_num_threads(self._keys["threads"])
            context = open_context(self._setup, self._device, self._keys["threads"])
            node = str(ray.util.get_node_ip_address())
            _require_same_keys(context, self._keys, node)
            context.use_keys(self._keys)
            root = Path(self._folder.name)
            self._stages = {stage.key: stage for stage in StageGraph(context, root).in_order()}
            for kind in {stage.kind for stage in self._stages.values()}:
                (root / kind).mkdir()
            return {"event": "ready", "node": node}
        except Exception as error:  # the scheduler reports it
            return failure(error)

    def compute(
        self, key: str, names: Sequence[str], *contents: bytes
    ) -> tuple[dict[str, Any], list[str], dict[str, bytes]]:
        """Computes a stage.

        Args:
            key: Key of the stage.
            names: Paths of the needed files that the actor does not have yet, relative to the folder of the run.
            *contents: Contents of these files.

        Returns:
            The message for the scheduler, the warnings as strings, and the contents of the stage's files by path.
        """
        import torch

        torch.set_num_threads(self._keys["threads"])  # the setting applies only to the current thread
        stage, root, texts = self._stages[key], Path(self._folder.name), list[str]()
        self._progress = (0, 1, "")
        try:
            for name, content in zip(names, contents, strict=True):
                (root / name).write_bytes(content)
        except OSError as error:
            return failure(error), texts, {}

        def on_progress(done: int, total: int, status: str) -> None:
            self._progress = (done, total, status)

        message = compute(stage, on_progress, self._stop.is_set, texts.append)
        return message, texts, {str(path.relative_to(root)): path.read_bytes() for path in _own_files(stage)}

    def status(self) -> tuple[int, int, str]:
        """Returns the progress of the current stage."""
        return self._progress

    def stop(self) -> None:
        """Asks the current stage to save its state and to stop."""
        self._stop.set()

    def close(self) -> None:
        """Removes the files of this actor."""
        self._folder.cleanup()


def _own_files(stage: Stage) -> list[Path]:
    """Returns the existing files of a stage: its output, saved state and metrics."""
    path = stage.path
    return [file for file in path.parent.glob(f"{glob.escape(path.stem)}*") if file.is_file()]


def _require_same_keys(context: RunContext, keys: Mapping[str, Any], node: str) -> None:
    """Checks that the versions, the model and the local data on this node are the same as those of the scheduler.

    Raises:
        KfacpackError: If a version, the model or the data on this node is different.
    """
    pairs: list[tuple[str, Any, Any]] = [
        ("kfacpack", version("kfacpack"), keys["kfacpack"]),
        *((name, context.environment.get(name), value) for name, value in keys["environment"].items()),
        ("the hash of the model", context.model_key, keys["model"]),
    ]
    for task, split, value in keys["data"]:
        data = context.plan.task(task).data
        if data is not None and not is_dataset_address(data):
            pairs.append((f"the hash of the {split} split of {task}", context.data_key(task, split), value))
    for arm, task, value in keys["checkpoints"]:
        pairs.append((f"the checkpoint of {task} in arm {arm}", context.checkpoint_key(arm, task), value))
    for name, value, expected in pairs:
        if value != expected:
            problem = f"Ray node {node}: {name} is {value}, expected {expected} as on the machine that runs the command"
            remedy = "All nodes must have the same versions, the same files and the same kind of device"
            raise KfacpackError(f"{problem}. {remedy}")


class RayWorker(StageWorker):
    """The scheduler's handle to a Ray actor.

    Args:
        number: Number of the worker, from 1.
        device: Device of the worker's model.
        root: Folder of the run.
        actor: Handle to the actor.
        contents: References to files in the object store, by path; all workers share this dictionary.
    """

    def __init__(self, number: int, device: str, root: Path, actor: Any, contents: dict[str, Any]):
        super().__init__(number, device, "Ray's logs on the worker's node")
        self.ready = False
        self.node = ""
        self.actor = actor
        self.opening = actor.open.remote()
        self.result: Any = None
        self._root = root
        self._contents = contents
        self._sent: set[str] = set()

    @property
    def where(self) -> str:
        """Number and node of the worker, as shown in messages."""
        return f"worker {self.number}" + (f" on {self.node}" if self.node else "")

    def location(self) -> dict[str, Any]:
        """Returns the fields that identify the worker in an event: its number, its device and its node."""
        return {**super().location(), "node": self.node}

    def start(self, stage: Stage) -> None:
        """Sends the actor the key of the stage and the files that the actor does not have yet."""
        files = [*(dependency.path for dependency in stage.inputs), *_own_files(stage)]
        names = [str(file.relative_to(self._root)) for file in files]
        names = [name for name in dict.fromkeys(names) if name not in self._sent]
        for name in names:
            if name not in self._contents:
                self._contents[name] = ray.put((self._root / name).read_bytes())
        self._sent.update(names)
        self.result = self.actor.compute.remote(stage.key, names, *(self._contents[name] for name in names))

    def stop(self) -> None:
        """Asks the actor to stop its stage."""
        self.actor.stop.remote()


def _summary(error: RayError) -> str:
    """Returns the first and the last line of an error message. The last line describes the cause of the error."""
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines() if line.strip()]
    separator = " … " if len(lines) > 2 else " "
    return printable(separator.join(dict.fromkeys([lines[0], lines[-1]]))) if lines else type(error).__name__


def _connect(address: str) -> None:
    """Connects this process to the cluster at an address; see `RayPool`.

    Raises:
        KfacpackError: If there is no cluster at this address, or a cluster cannot be started.
    """
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or address
    try:
        host, _, port = address.rpartition(":")
        if host and port.isdecimal() and "/" not in host:
            # Fail early if the port is closed: Ray itself would retry for minutes.
            socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError) as error:
        if address == "auto" and isinstance(error, ConnectionError):
            warnings.warn("no Ray cluster is running; starting a cluster on this machine", JobsWarning, stacklevel=2)
            return _connect("local")
        other = "and use --ray auto" if address == "local" else "or use --ray local"
        remedy = f"Start a cluster with `ray start --head`, {other}"
        raise KfacpackError(f"--ray {address}: cannot connect to a cluster: {first_line(error)}. {remedy}") from error


class RayPool(WorkerPool):
    """The workers of a run on a Ray cluster.

    The resources of the nodes determine the number of workers; nodes that join later are used as well.

    Args:
        address: Address of the cluster. `"auto"` uses the address in RAY_ADDRESS or a cluster that is running on this
            machine; if there is neither, it starts a new cluster and issues a `JobsWarning`. `"local"` always starts a
            new cluster on this machine.
        setup: The plan and the other settings of the run; see `run_setup`.
        root: Folder of the run.
        context: The context of the run.
        limit: Maximum number of workers.

    Raises:
        KfacpackError: If the cluster cannot be reached.
    """

    attempts = 4

    def __init__(self, address: str, setup: Mapping[str, Any], root: Path, context: RunContext, limit: int):
        self._workers: list[RayWorker] = []
        self._root = root
        self._limit = limit
        self._device = "cuda:0" if context.device.type == "cuda" else str(context.device)
        self._resources = {"CPU": context.threads, "memory": worker_bytes(context.model_bytes)}
        if context.device.type == "cuda":
            self._resources["GPU"] = 1
        self._contents: dict[str, Any] = {}
        self._statuses: dict[Any, RayWorker] = {}
        self._next_status = self._next_nodes = 0.0
        self._connected = not ray.is_initialized()
        if self._connected:
            _connect(address)
        keys = {**context.shared_keys(), "threads": context.threads, "kfacpack": version("kfacpack")}
        self._arguments = ray.put(setup), self._device, ray.put(keys)
        self._actor_class: Any = ray.remote(StageActor).options(
            num_cpus=context.threads,
            num_gpus=self._resources.get("GPU", 0),
            memory=self._resources["memory"],
            max_concurrency=3,  # `compute`, `status` and `stop`
        )

    @property
    def workers(self) -> Sequence[StageWorker]:
        """The workers, including those that wait for resources."""
        return self._workers

    def close(self) -> None:
        """Terminates all actors, and closes the connection to the cluster if the pool has opened the connection."""
        if not ray.is_initialized():
            return
        with suppress(RayError):
            ray.wait([worker.actor.close.remote() for worker in self._workers] or [ray.put(0)], timeout=1)
        for worker in self._workers:
            ray.kill(worker.actor)
        self._workers.clear()
        if self._connected:
            ray.shutdown()

    def replace(self, worker: StageWorker) -> None:
        """Terminates the actor of a worker. A new actor is then started on any node with free resources."""
        assert isinstance(worker, RayWorker)
        ray.kill(worker.actor)
        self._workers.remove(worker)
        self._next_nodes = 0.0

    def messages(self, seconds: float) -> list[tuple[StageWorker, dict[str, Any]]]:
        """Waits for messages from the actors, and writes the files that they return."""
        now = time.monotonic()
        if now >= self._next_nodes:
            self._next_nodes = now + _NODES_SECONDS
            self._start_workers()
        if now >= self._next_status:
            self._next_status = now + _STATUS_SECONDS
            self._statuses = {worker.actor.status.remote(): worker for worker in self._workers if worker.stage}
        pending = {worker.opening: worker for worker in self._workers if not worker.ready}
        pending |= {worker.result: worker for worker in self._workers if worker.stage}
        pending |= self._statuses
        if not pending:
            time.sleep(seconds)
            return []
        messages: list[tuple[StageWorker, dict[str, Any]]] = []
        for reference in ray.wait(list(pending), timeout=seconds)[0]:
            worker = pending[reference]
            self._statuses.pop(reference, None)
            if worker in self._workers:
                messages += ((worker, message) for message in self._receive(worker, reference))
        return messages

    def _receive(self, worker: RayWorker, reference: Any) -> list[dict[str, Any]]:
        """Converts the result of a finished remote call to messages."""
        try:
            value = ray.get(reference)
        except RayTaskError as error:
            return [{"event": "failed", "kind": "Exception", "text": str(error), "number": None, "file": None}]
        except RayError as error:
            return [{"event": "lost", "reason": f"was lost: {_summary(error)}"}]
        if reference == worker.opening:
            if value["event"] == "failed":
                return [value]
            worker.ready, worker.node = True, value["node"]
            return []
        if reference != worker.result:
            done, total, status = value
            return [{"event": "progress", "done": done, "total": total, "status": status}] if worker.stage else []
        message, texts, files = value
        for name, content in files.items():
            write_atomically(self._root / name, content)
        if message["event"] == "finished" and worker.stage:
            for file in _own_files(worker.stage):  # the saved state from which the stage was resumed
                if str(file.relative_to(self._root)) not in files:
                    file.unlink()
        return [*({"event": "warning", "text": text} for text in texts), message]

    def _start_workers(self) -> None:
        """Starts as many workers as the nodes have resources for, and at least one, which may have to wait."""
        fitting = [
            min(int(node["Resources"].get(name, 0) // amount) for name, amount in self._resources.items())
            for node in ray.nodes()
            if node["Alive"]
        ]
        if not sum(fitting) and not self._workers:
            amounts = {**self._resources, "memory": human_bytes(self._resources["memory"])}
            wanted = ", ".join(f"{amount} {name}" for name, amount in amounts.items())
            warnings.warn(f"waiting for a Ray node with {wanted}", JobsWarning, stacklevel=2)
        numbers = {worker.number for worker in self._workers}
        free = (number for number in count(1) if number not in numbers)
        while len(self._workers) < min(self._limit, max(1, sum(fitting))):
            actor = self._actor_class.remote(*self._arguments)
            self._workers.append(RayWorker(next(free), self._device, self._root, actor, self._contents))
