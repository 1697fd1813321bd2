"""What stages work with, loaded once: the model, the tasks, their heads and the examples they are measured on.

A plan is carried out: what is missing is made, stage by stage; what is there stays.
"""

from __future__ import annotations

import fcntl
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kfacpack.errors import KfacpackError
from kfacpack.estimation.resume import Interrupted
from kfacpack.evaluation.accuracy import EvaluationSet
from kfacpack.experiments.results import results
from kfacpack.experiments.stage import StageProgress
from kfacpack.experiments.stage_graph import StageGraph
from kfacpack.format.writer import write_atomically
from kfacpack.models.data_loading import fingerprint, outputs
from kfacpack.models.families import load_model
from kfacpack.models.functional import select_parameters
from kfacpack.models.heads import check_head, head_for, known_classes, require_several
from kfacpack.tasks.data_sources import is_dataset_address
from kfacpack.tasks.registry import load_task

if TYPE_CHECKING:
    from kfacpack.experiments.plan import Plan
    from kfacpack.experiments.stage import Stage
    from kfacpack.models.heads import Head
    from kfacpack.models.model import Model
    from kfacpack.tasks.task import Task

    StageCallback = Callable[[int, int, str], None]

    StageDisplay = Callable[[Stage, int, int], AbstractContextManager[StageCallback]]

    """A stage, its number from 1, how many there are -> who is told how far it is."""


class RunContext:
    def __init__(self, plan: Plan, device: torch.device):
        self.plan = plan
        self.device = device
        self._tasks: dict[str, Task] = {}
        self._heads: dict[str, Head] = {}
        self._exams: dict[tuple[str, str, str], EvaluationSet] = {}
        self._prints: dict[tuple[str, str], str] = {}

    @cached_property
    def model(self) -> Model:
        said = self.plan.model
        dtype = getattr(torch, said.dtype)
        with self.plan.at("model"):
            weights = self.plan.place(said.weights) if said.weights not in (None, "random") else said.weights
            folder = self.plan.model_folder()
            name = f"{said.name.partition(':')[0]}:{folder}" if folder else said.name
            return load_model(
                name,
                weights=weights,
                image_size=said.image_size,
                dtype=dtype,
                device=self.device,
                prompts=said.prompts,
            )

    @cached_property
    def model_key(self) -> str:
        """Of everything about the model that decides what comes out of it."""
        model = self.model
        base = model.base(select_parameters(model.module, ["*"]))
        said = (base.sha256, model.function.model_dump_json(), model.preprocessing, self.plan.model.dtype)
        return sha256(repr(said).encode()).hexdigest()

    @cached_property
    def environment(self) -> dict[str, str]:
        """What else decides the last digits: another torch, or another kind of device, rounds otherwise.

        Two devices of one kind are the same. In which precision the model computes, `model_key` knows.
        """
        kind = self.device.type
        device = f"{kind}, {torch.cuda.get_device_name(self.device)}" if kind == "cuda" else kind
        return {"torch": str(torch.__version__), "device": device}

    def task(self, name: str) -> Task:
        if name not in self._tasks:
            number = next(k for k, task in enumerate(self.plan.tasks) if task.name == name)
            said = self.plan.tasks[number]
            with self.plan.at("tasks", number):
                local = said.data is not None and not is_dataset_address(said.data)
                data = self.plan.place(str(said.data)) if local else said.data
                self._tasks[name] = load_task(name, data, said.columns)
        return self._tasks[name]

    def data_key(self, task: str, split: str) -> str:
        """Of a split's content."""
        if (task, split) not in self._prints:
            made = fingerprint(self.model, self.task(task).split(split), task, labels=True)
            self._prints[task, split] = self._with_files(task, split, made)
        return self._prints[task, split]

    def _with_files(self, task: str, split: str, made: str) -> str:
        """A fingerprint with what it does not see of data in files.

        It looks at some examples, so that all files have to have the bytes they had; and heads are made of the classes'
        names.
        """
        found = self.task(task)
        listing = found.listing(split)
        return sha256(repr((made, found.classes, listing)).encode()).hexdigest() if listing else made

    def check(self) -> None:
        """Refuse what a stage would refuse after others have taken their time."""
        tasks = [self.task(said.name) for said in self.plan.tasks]
        for number, task in enumerate(tasks):
            with self.plan.at("tasks", number):
                require_several(task, known_classes(task))
        model = self.model  # what is wrong with it is told with its own line
        with self.plan.at("model", "head"):
            for task in tasks:
                check_head(model, task, self.plan.model.head)

    def head(self, task: str, on_progress: Callable[[int, int], None] = lambda done, total: None) -> Head:
        if task not in self._heads:
            kind, size = self.plan.model.head, self.plan.evaluation.batch_size
            self._heads[task] = head_for(self.model, self.task(task), kind, batch_size=size, on_progress=on_progress)
        return self._heads[task]

    def exam(self, task: str, split: str = "test", examples: str | None = None) -> EvaluationSet:
        asked = task, split, examples or self.plan.evaluation.examples
        if asked not in self._exams:
            self._exams[asked] = EvaluationSet.of(self.task(task), *asked[1:])
        return self._exams[asked]


RESULTS, TIMES = "results.json", "times.json"
_PROBE_EXAMPLES = 32
"""Examples that the speed of the model is measured on."""


class Run:
    """A plan in its folder."""

    def __init__(self, plan: Plan, text: str, root: Path, device: torch.device):
        self.plan = plan
        self.text = text
        self.root = root
        shop = RunContext(plan, device)
        shop.check()
        self.graph = StageGraph(shop, root)
        self.stages = self.graph.in_order()

    def pending(self) -> list[Stage]:
        return [stage for stage in self.stages if not stage.done]

    def forecast(self) -> dict[str, float]:
        """Seconds that each pending stage may take, by its key: from the speed of one batch."""
        shop = self.graph.shop
        task = self.plan.tasks[0].name
        exam = shop.exam(task)
        numbers = exam.numbers[:_PROBE_EXAMPLES]
        begun = [time.perf_counter()]
        for _ in range(2):  # the first one also warms up
            for _chosen, _f in outputs(shop.model, exam.split, task, numbers, len(numbers)):
                begun.append(time.perf_counter())
        each = (begun[-1] - begun[-2]) / len(numbers)
        return {stage.key: stage.cost() * each for stage in self.pending()}

    def execute(
        self,
        show: StageDisplay = lambda stage, number, total: nullcontext(StageProgress.progress),
        stopped: Callable[[], bool] = lambda: False,
    ) -> dict[str, Any]:
        """Make what is missing, and write what was found: results.json, and times.json beside it.

        Once `stopped` says so, also in the middle of a stage, what is done is kept and `Interrupted` is raised.
        """
        start = time.perf_counter()
        with _exclusive_lock(self.root):
            for kind in {stage.kind for stage in self.stages}:
                (self.root / kind).mkdir(exist_ok=True)
            times = _read_times(self.root / TIMES)
            made: set[str] = set()
            for number, stage in enumerate(self.stages, start=1):
                if stage.done:
                    continue
                if stopped():
                    raise Interrupted
                begun = time.perf_counter()
                with show(stage, number, len(self.stages)) as progress:
                    stage.make(StageProgress(progress, stopped))
                made.add(stage.key)
                times[stage.key] = time.perf_counter() - begun
                self._write_times(times, made, start)
            found = results(self.graph, self.text)
            write_atomically(self.root / RESULTS, (json.dumps(found, indent=1, ensure_ascii=False) + "\n").encode())
            self._write_times(times, made, start)
        return found

    def _write_times(self, times: dict[str, float], made: set[str], start: float) -> None:
        said = {
            "stages": [
                {
                    "name": f"{stage.kind}/{stage.name}",
                    "key": stage.key,
                    "seconds": round(times[stage.key], 3),
                    "reused": stage.key not in made,
                }
                for stage in self.stages
                if stage.key in times
            ],
            "seconds": round(time.perf_counter() - start, 3),
            "peak_bytes": peak_bytes(),
        }
        write_atomically(self.root / TIMES, (json.dumps(said, indent=1) + "\n").encode())


def _read_times(path: Path) -> dict[str, float]:
    """What stages took before. It is only told, nothing depends on it: one that cannot be read is begun anew."""
    try:
        return {each["key"]: float(each["seconds"]) for each in json.loads(path.read_bytes())["stages"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def peak_bytes() -> int:
    """The most memory that this process has had."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


@contextmanager
def _exclusive_lock(root: Path) -> Iterator[None]:
    """Two runs in one folder would write over each other's unfinished work."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = (root / ".lock").open("w")
    except OSError as error:
        raise KfacpackError(f"{root}: cannot be written: {error.strerror}. Give another folder with -o") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise KfacpackError(
                f"{root}: another run is at work in this folder; wait for it, or give another"
            ) from error
        yield
