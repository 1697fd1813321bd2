"""Executes plans: computes the missing files, stage by stage, and collects the results.

`RunContext` holds the objects that the stages share: the model, and the tasks with their heads and evaluation sets.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kfacpack._compat import require
from kfacpack.demo import EMBEDDED_MODELS
from kfacpack.errors import KfacpackError
from kfacpack.estimation.distributed import default_jobs, local_device, stage_threads, usable_cores
from kfacpack.estimation.resume import Interrupted
from kfacpack.evaluation.accuracy import EvaluationSet
from kfacpack.evaluation.edited_model import OutputCache
from kfacpack.experiments.jobs import ProcessPool, Scheduler, WorkerPool, choose_jobs
from kfacpack.experiments.measurement_stages import require_no_class_measurement
from kfacpack.experiments.plan_file import read_plan
from kfacpack.experiments.results import RESULTS, RunRecord, StageEvent, open_events, results
from kfacpack.experiments.stage import StageProgress
from kfacpack.experiments.stage_graph import StageGraph
from kfacpack.experiments.worker import run_setup
from kfacpack.format.hub_client import commit_of
from kfacpack.format.reference import is_reference
from kfacpack.format.writer import write_atomically
from kfacpack.models.data_loading import fingerprint, outputs
from kfacpack.models.families import load_model
from kfacpack.models.functional import select_parameters
from kfacpack.models.heads import check_head, head_for, require_classes, require_several_classes
from kfacpack.tasks.data_sources import is_dataset_address
from kfacpack.tasks.registry import load_task
from kfacpack.tasks.task import has_completions
from kfacpack.vectors.checkpoints import checkpoint_digest

if TYPE_CHECKING:
    from kfacpack.experiments.plan import Plan
    from kfacpack.experiments.stage import Stage
    from kfacpack.models.heads import Head
    from kfacpack.models.model import Model
    from kfacpack.tasks.task import Task

    StageCallback = Callable[[int, int, str], None]
    """Called with the number of completed units, the total number of units and a status message."""

    StageDisplay = Callable[[Stage, int, int], AbstractContextManager[StageCallback]]
    """Called with a stage, its number and the number of stages; the context manager yields a `StageCallback`."""


class RunContext:
    """The objects that the stages of a run share, loaded on first use.

    Args:
        plan: The plan to execute.
        device: Device of the model.
        threads: Number of threads per stage. If None, `stage_threads` determines the number.
    """

    def __init__(self, plan: Plan, device: torch.device, threads: int | None = None):
        self.plan = plan
        self.device = device
        self._requested_threads = threads
        self._tasks: dict[str, Task] = {}
        self._heads: dict[str, Head] = {}
        self._evaluation_sets: dict[tuple[str, str, str], EvaluationSet] = {}
        self._fingerprints: dict[tuple[str, str], str] = {}
        self._checkpoints: dict[tuple[str, str], str] = {}

    @cached_property
    def model(self) -> Model:
        """The model of the plan."""
        section = self.plan.model
        dtype = getattr(torch, section.dtype)
        with self.plan.at("model"):
            local = section.weights not in (None, "random")
            weights = self.plan.resolve_path(str(section.weights)) if local else section.weights
            folder = self.plan.model_folder()
            name = f"{section.name.partition(':')[0]}:{folder}" if folder else section.name
            return load_model(
                name,
                weights=weights,
                image_size=section.image_size,
                dtype=dtype,
                device=self.device,
                prompts=section.prompts,
            )

    @cached_property
    def model_key(self) -> str:
        """Hash of everything that determines the output of the model."""
        model = self.model
        base = model.base(select_parameters(model.module, ["*"]))
        content = (base.sha256, model.function.model_dump_json(), model.preprocessing, self.plan.model.dtype)
        return sha256(repr(content).encode()).hexdigest()

    @cached_property
    def environment(self) -> dict[str, str]:
        """The torch version, the kind of device and, on a CPU, the number of threads, all of which affect rounding.

        Two devices of the same kind are considered equal. The compute dtype is part of `model_key`.
        """
        kind = self.device.type
        device = f"{kind}, {torch.cuda.get_device_name(self.device)}" if kind == "cuda" else kind
        threads = {"threads": str(self.threads)} if kind == "cpu" else {}
        return {"torch": str(torch.__version__), "device": device, **threads}

    @cached_property
    def threads(self) -> int:
        """Number of threads per stage."""
        size = sum(parameter.numel() for parameter in self.model.module.parameters())
        return stage_threads(self.device, size, self._requested_threads)

    @property
    def model_bytes(self) -> int:
        """Size of the model's parameters in bytes."""
        return sum(parameter.nbytes for parameter in self.model.module.parameters())

    def task(self, name: str) -> Task:
        """Returns the task `name` of the plan.

        Raises:
            KfacpackError: If the task cannot be loaded; the message starts with the location of the task in the plan.
        """
        if name not in self._tasks:
            section = self.plan.task(name)
            with self.plan.at(*self.plan.task_location(name)):
                local = section.data is not None and not is_dataset_address(section.data)
                data = self.plan.resolve_path(str(section.data)) if local else section.data
                self._tasks[name] = load_task(name, data, columns=section.columns)
        return self._tasks[name]

    def data_key(self, task: str, split: str) -> str:
        """Returns a hash of the content of a split."""
        if (task, split) not in self._fingerprints:
            loaded = self.task(task)
            examples = fingerprint(self.model, loaded.split(split), task, labels=not has_completions(loaded))
            self._fingerprints[task, split] = self._with_files(task, split, examples)
        return self._fingerprints[task, split]

    def _with_files(self, task: str, split: str, examples: str) -> str:
        """Returns a hash of the fingerprint of examples, the list of their files, and the class names.

        The fingerprint covers only some of the examples, whereas the list of files covers all examples. The class names
        are included because heads depend on them. If there is no list of files, the fingerprint itself is returned.
        """
        loaded = self.task(task)
        listing = loaded.listing(split)
        return sha256(repr((examples, loaded.classes, listing)).encode()).hexdigest() if listing else examples

    def checkpoint_key(self, arm: str, task: str) -> str:
        """Returns a key that identifies the checkpoint from which a vector is extracted.

        For a local checkpoint, the key is a hash of the files. For a checkpoint on the Hub, it contains the commit.

        Raises:
            KfacpackError: If there is no such checkpoint; the message starts with the location in the plan.
        """
        if (arm, task) not in self._checkpoints:
            source = (self.plan.arms[arm].vectors or {})[task]
            with self.plan.at("arms", arm, "vectors", task):
                if is_reference(source):
                    self._checkpoints[arm, task] = f"{source} {commit_of(source)}"
                else:
                    self._checkpoints[arm, task] = checkpoint_digest(self.plan.resolve_path(source), source)
        return self._checkpoints[arm, task]

    def shared_keys(self) -> dict[str, Any]:
        """Returns the hashes on which the keys of stages depend, so that other processes need not compute them."""
        return {
            "model": self.model_key,
            "environment": self.environment,
            "data": [[*key, value] for key, value in self._fingerprints.items()],
            "checkpoints": [[*key, value] for key, value in self._checkpoints.items()],
        }

    def use_keys(self, keys: dict[str, Any]) -> None:
        """Uses the hashes that `shared_keys` returned in another process, instead of computing them."""
        self.model_key = keys["model"]
        self.environment = keys["environment"]
        self._fingerprints = {(task, split): value for task, split, value in keys["data"]}
        self._checkpoints = {(arm, task): value for arm, task, value in keys["checkpoints"]}

    def check(self) -> None:
        """Checks the tasks, the model, the heads and the checkpoints before any stage runs.

        Raises:
            KfacpackError: If a task or the model cannot be loaded, a task has fewer than two classes, a measurement
                needs classes that a task does not have, the model cannot use the head, or a checkpoint does not
                exist; the message starts with the location in the plan.
        """
        tasks = [self.task(section.name) for section in self.plan.tasks]
        for number, task in enumerate(tasks):
            with self.plan.at("tasks", number):
                if has_completions(task):
                    require_no_class_measurement(self.plan.evaluation)
                else:
                    require_several_classes(task, require_classes(task))
        model = self.model  # loaded here, so that its errors are reported for `model` and not for `model.head`
        with self.plan.at("model", "head"):
            for task in tasks:
                check_head(model, task, self.plan.model.head)
        for arm, section in self.plan.arms.items():
            for name in section.vectors or ():
                self.checkpoint_key(arm, name)

    def head(self, task: str, on_progress: Callable[[int, int], None] = lambda done, total: None) -> Head:
        """Returns the classification head of a task."""
        if task not in self._heads:
            kind, size = self.plan.model.head, self.plan.evaluation.batch_size
            self._heads[task] = head_for(
                self.model, self.task(task), kind=kind, batch_size=size, on_progress=on_progress
            )
        return self._heads[task]

    def evaluation_set(self, task: str, split: str = "test", examples: str | None = None) -> EvaluationSet:
        """Returns the evaluation set for a split of a task.

        Args:
            task: Name of the task.
            split: Name of the split.
            examples: Examples to use: `"all"`, a number or a percentage; None for the plan's `evaluation.examples`.
        """
        examples = examples or self.plan.evaluation.examples
        key = task, split, examples
        if key not in self._evaluation_sets:
            selected = EvaluationSet.of(self.task(task), split, examples)
            self._evaluation_sets[key] = replace(selected, outputs=OutputCache())
        return self._evaluation_sets[key]


_PROBE_EXAMPLES = 32
"""Number of examples on which the speed of the model is measured."""


def run(
    plan: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    device: str = "auto",
    show: StageDisplay = lambda stage, number, total: nullcontext(StageProgress.progress),
    stopped: Callable[[], bool] = lambda: False,
    jobs: int | None = 1,
    threads: int | None = None,
    ray: str | None = None,
    scale: str | None = None,
) -> dict[str, Any]:
    """Runs a plan, as `kfacpack run` does: computes bundles and task vectors, merges them, and evaluates the results.

    Args:
        plan: Path of the plan, a YAML file.
        output: Folder of the run. Defaults to a folder in the working directory that is named after the plan. Existing
            files are not computed again.
        device: Device of the model; `"auto"` uses the first GPU, if there is one.
        show: Called for each stage that is executed; returns a context manager that yields the progress callback.
        stopped: Function that returns True when the run should stop. Another call of `run` resumes the stopped run.
        jobs: Number of processes that compute independent stages. With 1, stages run in this process. With None, the
            number is chosen as in `kfacpack run`. The results do not depend on the number of processes.
        threads: Number of threads per stage, which affects rounding. Defaults to OMP_NUM_THREADS. If this variable is
            not set, the number depends on the device and on the size of the model.
        ray: Address of a Ray cluster that computes the stages. `"auto"` finds a running cluster, or starts a cluster on
            this machine if none is running. `"local"` always starts a cluster. On a cluster, `jobs` is the maximum
            number of workers. If `jobs` is None, only the resources of the cluster limit the number of workers.
        scale: Name of an entry in the plan's `scales`; the settings in this entry override those of the plan.

    Returns:
        The content of `results.json`.

    Raises:
        Interrupted: If `stopped` returned True.
        KfacpackError: If the plan, a task or the model cannot be used, or the folder cannot be written.

    Example:
        >>> results = kp.run("examples/eight_tasks.yaml", "eight")
        >>> kp.report("eight", "eight/report.html")
    """
    for argument, value in (("plan", plan), ("output", output)):
        if not isinstance(value, str | os.PathLike) and not (argument == "output" and value is None):
            raise KfacpackError(f"run: {argument}: expected a path, got {type(value).__name__}")
    parsed, text = read_plan(Path(plan), scale)
    root = Path(plan).stem if output is None else output
    with Run(parsed, text, Path(root), local_device(device), jobs, threads, ray) as planned:
        return planned.execute(show, stopped)


class Run:
    """A plan and the folder in which it is executed.

    Args:
        plan: The plan.
        text: The plan's YAML text, which is recorded in the results.
        root: Folder of the run.
        device: Device of the model.
        jobs: Maximum number of processes that compute stages. If None, `default_jobs` determines the number. Fewer
            processes are used if there is not enough memory. If there are several processes, the constructor may start
            some of them. The object must then be used as a context manager, which terminates the processes.
        threads: Number of threads per stage. If None, `stage_threads` determines the number.
        ray: Address of a Ray cluster that computes the stages (see `RayPool`); None for processes on this machine.

    Raises:
        KfacpackError: If a task or the model cannot be used as the plan specifies, `jobs` or `threads` is not
            positive, or Ray is not installed.
    """

    def __init__(
        self,
        plan: Plan,
        text: str,
        root: Path,
        device: torch.device,
        jobs: int | None = 1,
        threads: int | None = None,
        ray: str | None = None,
    ):
        for name, value in (("jobs", jobs), ("threads", threads)):
            if value is not None and value < 1:
                raise KfacpackError(f"{name} {value}: expected a positive number")
        if ray is not None:
            require(extra="ray", feature="--ray")
        self.plan = plan
        self.text = text
        self.root = root
        self._peaks: dict[int, int] = {}
        self._ray = ray
        self._requested_jobs = jobs
        with ExitStack() as self._cleanup:
            self._pool = self._cleanup.enter_context(ProcessPool(run_setup(plan, text), root, device))
            if ray is None and not (root / RESULTS).exists():
                # Workers import torch, which takes seconds, while the plan is checked. Unused workers are terminated.
                known_small = device.type == "cpu" and plan.model.name in EMBEDDED_MODELS
                early = jobs or (default_jobs(device, stage_threads(device, 0, threads)) if known_small else 1)
                self._pool.resize(min(early, usable_cores()) if early > 1 else 0)
            context = RunContext(plan, device, threads)
            context.check()
            self.graph = StageGraph(context, root)
            self.stages = self.graph.in_order()
            self.jobs = 1 if ray is not None else choose_jobs(context, jobs)
            self._cleanup = self._cleanup.pop_all()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    @property
    def peak_bytes(self) -> int:
        """Peak memory of this process plus that of the workers, in bytes."""
        return peak_bytes() + sum(self._peaks.values())

    def pending(self) -> list[Stage]:
        """Returns the stages whose files are missing or damaged."""
        return [stage for stage in self.stages if not stage.done]

    def forecast(self) -> dict[str, float]:
        """Estimates, from the speed of one batch, how long each pending stage takes if it runs alone.

        Returns:
            Seconds by stage key.
        """
        context = self.graph.context
        task = self.plan.tasks[0].name
        examples = context.evaluation_set(task)
        numbers = examples.numbers[:_PROBE_EXAMPLES]
        clock = [time.perf_counter()]
        with _threads(context.threads):
            for _ in range(2):  # the first pass is a warm-up
                for _numbers, _f in outputs(context.model, examples.split, task, numbers, len(numbers)):
                    clock.append(time.perf_counter())
        seconds_per_example = (clock[-1] - clock[-2]) / len(numbers)
        return {stage.key: stage.cost() * seconds_per_example for stage in self.pending()}

    def execute(
        self,
        show: StageDisplay = lambda stage, number, total: nullcontext(StageProgress.progress),
        stopped: Callable[[], bool] = lambda: False,
        on_event: Callable[[StageEvent], None] = lambda event: None,
    ) -> dict[str, Any]:
        """Computes the missing files and writes `results.json` and `times.json`.

        Args:
            show: Called for each stage that is executed; returns a context manager that yields the progress callback.
            stopped: Function that returns True when the run should stop, possibly in the middle of a stage.
            on_event: Called with each event of a stage, as written to `events.jsonl`.

        Returns:
            The content of `results.json`.

        Raises:
            Interrupted: If `stopped` returned True. Finished stages are kept, and a second call resumes the run.
            KfacpackError: If the folder cannot be written, or is in use by another run.
        """
        with _exclusive_lock(self.root):
            for kind in {stage.kind for stage in self.stages}:
                (self.root / kind).mkdir(exist_ok=True)
            with open_events(self.root) as events, _threads(self.graph.context.threads):
                record = RunRecord(self.root, self.stages, events, on_event, lambda: self.peak_bytes)
                if pool := self._start_workers():
                    Scheduler(self.stages, pool, show, stopped, record, self._peaks).run()
                    pool.close()
                else:
                    self._execute_here(show, stopped, record)
            content = results(self.graph, self.text)
            write_atomically(self.root / RESULTS, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())
            record.write_times()
        return content

    def _start_workers(self) -> WorkerPool | None:
        """Starts the workers and returns their pool, or returns None if this process computes the stages."""
        pending = len(self.pending())
        jobs = min(self.jobs, pending)
        self._pool.resize(jobs if jobs > 1 else 0)
        if self._ray is not None and pending:
            from kfacpack.experiments.ray_cluster import RayPool

            setup = run_setup(self.plan, self.text)
            pool = RayPool(
                self._ray, setup, self.root, self.graph.context, min(self._requested_jobs or pending, pending)
            )
            return self._cleanup.enter_context(pool)
        if jobs < 2:
            return None
        self._pool.configure(self.graph.context)
        return self._pool

    def _execute_here(self, show: StageDisplay, stopped: Callable[[], bool], record: RunRecord) -> None:
        """Computes the missing files one after the other, in this process."""
        where = {"worker": 0, "device": str(self.graph.context.device)}
        for number, stage in enumerate(self.stages, start=1):
            if stage.done:
                continue
            if stopped():
                raise Interrupted
            record.event("started", stage, where)
            start = time.perf_counter()
            try:
                with show(stage, number, len(self.stages)) as progress:
                    stage.make(StageProgress(progress, stopped))
            except Interrupted:
                record.event("interrupted", stage, where)
                raise
            except Exception as error:  # recorded, and raised again
                record.event("failed", stage, where, error=str(error))
                raise
            record.finished(stage, time.perf_counter() - start, where)


def peak_bytes() -> int:
    """Returns the peak resident memory of this process in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Temporarily sets the number of threads that torch uses."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _exclusive_lock(root: Path) -> Iterator[None]:
    """Locks the folder of the run against other runs, because two runs would overwrite each other's partial files."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = (root / ".lock").open("w")
    except OSError as error:
        raise KfacpackError(f"{root}: cannot be written: {error.strerror}. Choose another output folder") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise KfacpackError(
                f"{root}: another run is using this folder; wait until it ends, or choose another output folder"
            ) from error
        yield
