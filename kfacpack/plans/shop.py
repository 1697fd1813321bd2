"""What stages work with, loaded once: the model, the tasks, their heads and the examples they are measured on."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING

import torch

from kfacpack.evaluation.accuracy import Exam
from kfacpack.function.parameters import choose
from kfacpack.heads import check_head, head_for, known_classes, require_several
from kfacpack.models import load_model
from kfacpack.models.fingerprint import fingerprint
from kfacpack.tasks import load_task
from kfacpack.tasks.places import is_address

if TYPE_CHECKING:
    from kfacpack.heads import Head
    from kfacpack.models import Model
    from kfacpack.plans.plan import Plan
    from kfacpack.tasks import Task


class Shop:
    def __init__(self, plan: Plan, device: torch.device):
        self.plan = plan
        self.device = device
        self._tasks: dict[str, Task] = {}
        self._heads: dict[str, Head] = {}
        self._exams: dict[tuple[str, str, str], Exam] = {}
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
        base = model.base(choose(model.module, ["*"]))
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
                local = said.data is not None and not is_address(said.data)
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

    def exam(self, task: str, split: str = "test", examples: str | None = None) -> Exam:
        asked = task, split, examples or self.plan.evaluation.examples
        if asked not in self._exams:
            self._exams[asked] = Exam.of(self.task(task), *asked[1:])
        return self._exams[asked]
