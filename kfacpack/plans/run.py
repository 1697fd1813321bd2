"""A plan is carried out: what is missing is made, stage by stage; what is there stays."""

from __future__ import annotations

import fcntl
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kfacpack.errors import KfacpackError
from kfacpack.models.outputs import outputs
from kfacpack.plans.graph import Graph
from kfacpack.plans.results import results
from kfacpack.plans.shop import Shop
from kfacpack.plans.stages.base import Watch
from kfacpack.running.files import write_whole
from kfacpack.running.partial import Interrupted

if TYPE_CHECKING:
    from kfacpack.plans.plan import Plan
    from kfacpack.plans.stages.base import Stage

    Progress = Callable[[int, int, str], None]
    Show = Callable[[Stage, int, int], AbstractContextManager[Progress]]
    """A stage, its number from 1, how many there are -> who is told how far it is."""

RESULTS, TIMES = "results.json", "times.json"
_PROBED = 32
"""Examples that the speed of the model is measured on."""


class Run:
    """A plan in its folder."""

    def __init__(self, plan: Plan, text: str, root: Path, device: torch.device):
        self.plan = plan
        self.text = text
        self.root = root
        shop = Shop(plan, device)
        shop.check()
        self.graph = Graph(shop, root)
        self.stages = self.graph.in_order()

    def pending(self) -> list[Stage]:
        return [stage for stage in self.stages if not stage.done]

    def forecast(self) -> dict[str, float]:
        """Seconds that each pending stage may take, by its key: from the speed of one batch."""
        shop = self.graph.shop
        task = self.plan.tasks[0].name
        exam = shop.exam(task)
        numbers = exam.numbers[:_PROBED]
        begun = [time.perf_counter()]
        for _ in range(2):  # the first one also warms up
            for _chosen, _f in outputs(shop.model, exam.split, task, numbers, len(numbers)):
                begun.append(time.perf_counter())
        each = (begun[-1] - begun[-2]) / len(numbers)
        return {stage.key: stage.cost() * each for stage in self.pending()}

    def execute(
        self,
        show: Show = lambda stage, number, total: nullcontext(Watch.progress),
        stopped: Callable[[], bool] = lambda: False,
    ) -> dict[str, Any]:
        """Make what is missing, and write what was found: results.json, and times.json beside it.

        Once `stopped` says so, also in the middle of a stage, what is done is kept and `Interrupted` is raised.
        """
        start = time.perf_counter()
        with _alone(self.root):
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
                    stage.make(Watch(progress, stopped))
                made.add(stage.key)
                times[stage.key] = time.perf_counter() - begun
                self._write_times(times, made, start)
            found = results(self.graph, self.text)
            write_whole(self.root / RESULTS, (json.dumps(found, indent=1, ensure_ascii=False) + "\n").encode())
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
        write_whole(self.root / TIMES, (json.dumps(said, indent=1) + "\n").encode())


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
def _alone(root: Path) -> Iterator[None]:
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
