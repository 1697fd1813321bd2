"""The contents of a plan: the model, the tasks, the ways of obtaining task vectors (arms) and the measurements.

`kfacpack.experiments.plan_sections` defines the sections, and `kfacpack.experiments.plan_file` reads the YAML file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PrivateAttr, ValidationInfo, field_validator, model_validator

from kfacpack.errors import KfacpackError
from kfacpack.experiments.plan_sections import (
    ArmSection,
    CurvatureSection,
    EvaluationSection,
    KeyPath,
    ModelSection,
    PenaltySection,
    PlanSection,
    SeedNumber,
    ShortText,
    TaskSection,
    TrainingSection,
)
from kfacpack.format.container import first_duplicate
from kfacpack.format.identity import share_classes
from kfacpack.format.reference import expand_user
from kfacpack.format.vector_manifest import RegimeName
from kfacpack.models.families import FAMILIES


class Plan(PlanSection):
    """A plan for comparing several ways of obtaining task vectors. Each way is called an arm."""

    name: ShortText
    model: ModelSection = ModelSection()
    tasks: Annotated[tuple[TaskSection, ...], Field(min_length=2)]
    references: tuple[TaskSection, ...] = ()
    """Additional tasks without vectors, such as a control task for negation, or tasks on which drift is penalised."""
    seeds: Annotated[tuple[SeedNumber, ...], Field(min_length=1)] = (0,)
    curvature: CurvatureSection = CurvatureSection()
    training: TrainingSection = TrainingSection()
    penalty: PenaltySection = PenaltySection()
    arms: Annotated[dict[ShortText, ArmSection], Field(min_length=1)]
    evaluation: EvaluationSection = EvaluationSection()
    _folder: Path = PrivateAttr(default=Path())
    _source_name: str = PrivateAttr(default="plan")
    _locate: Callable[[KeyPath], str] | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _fill_in_penalties(cls, value: Any) -> Any:
        """Adds the settings in `penalty` to each arm with a Kronecker penalty, unless the arm overrides them."""
        if not isinstance(value, dict) or not isinstance(value.get("penalty"), dict):
            return value
        defaults = {key: entry for key, entry in value["penalty"].items() if key in PenaltySection.model_fields}
        arms = value.get("arms")
        filled = {
            name: {**defaults, **arm} if isinstance(arm, dict) and arm.get("penalty") == "kronecker" else arm
            for name, arm in (arms.items() if isinstance(arms, dict) else ())
        }
        return {**value, "arms": filled} if isinstance(arms, dict) else value

    @field_validator("model", mode="before")
    @classmethod
    def _expand_model_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @field_validator("tasks", "references", mode="before")
    @classmethod
    def _expand_task_names(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return [{"name": task} if isinstance(task, str) else task for task in value]

    @field_validator("arms", mode="before")
    @classmethod
    def _expand_empty_arms(cls, value: Any) -> Any:
        return {name: {} if arm is None else arm for name, arm in value.items()} if isinstance(value, dict) else value

    @field_validator("arms")
    @classmethod
    def _check_arm_names(cls, arms: dict[str, ArmSection], info: ValidationInfo) -> dict[str, ArmSection]:
        for name, arm in arms.items():
            if "curvature" in info.data:  # absent if that section is invalid
                section = arm.curvature if "metric" in arm.curvature.model_fields_set else info.data["curvature"]
                arm._metric = section.metric
            if not re.fullmatch(r"[\w.+ -]+", name) or name.startswith("."):
                raise ValueError(f"arm name {name!r}: expected letters, digits, spaces or -_.+, and no leading dot")
        return arms

    def contradiction(self) -> tuple[KeyPath, str] | None:
        """Finds the first setting that contradicts the rest of the plan.

        Returns:
            The location of the setting and a description of the problem, or None if the plan is consistent.
        """
        names = [task.name for task in self.tasks]
        evaluation = self.evaluation
        known = [*names, *(reference.name for reference in self.references)]
        for key_path, values in (
            (("tasks",), names),
            (("references",), known),
            (("seeds",), [str(seed) for seed in self.seeds]),
            (("evaluation", "methods"), [method.label for method in evaluation.methods]),
        ):
            if duplicate := first_duplicate(values):
                last = len(values) - 1 - values[::-1].index(duplicate)
                number = last - len(names) if key_path == ("references",) else last
                return (*key_path, number), f"duplicate entry {duplicate!r}; remove one of the entries"
        for number, name in enumerate(names):
            if other := next((earlier for earlier in names[:number] if share_classes(earlier, name)), None):
                problem = f"{name!r} and {other!r} have classes in common, which would be counted twice"
                return ("tasks", number), f"{problem}. Use class splits without common classes, or only the whole task"
        for number, arm in enumerate(evaluation.in_depth or ()):
            if arm not in self.arms:
                return (
                    ("evaluation", "in_depth", number),
                    f"unknown arm {arm!r}; expected one of: {', '.join(self.arms)}",
                )
        for arm, section in self.arms.items():
            if mismatch := _mismatch(names, section.vectors):
                return ("arms", arm, "vectors"), mismatch
        for arm, section in self.arms.items():
            for number, name in enumerate(section.protects or ()):
                if name not in known:
                    problem = f"unknown task {name!r}; expected a task or a reference of the plan: {', '.join(known)}"
                    return ("arms", arm, "protects", number), problem
            if (section.compress or section.budget) and self.curvature_of(arm).compress:
                key = "compress" if section.compress else "budget"
                problem = "the bundles are already compressed by curvature.compress"
                return ("arms", arm, key), f"{problem}. Remove curvature.compress or {key}"
        for number, method in enumerate(evaluation.methods):
            if method.compress and self.curvature.compress:
                problem = f"all bundles are already compressed by curvature.compress: {self.curvature.compress}"
                remedy = "Remove curvature.compress, or remove the key compress from this method"
                return ("evaluation", "methods", number), f"{problem}. {remedy}"
        measures_drift = evaluation.drift is not None and evaluation.in_depth != ()
        has_factors = (
            measures_drift
            or any(method.needs_bundles for method in evaluation.methods)
            or any(arm.penalty == "kronecker" for arm in self.arms.values())
        )
        if evaluation.spectra and not has_factors:
            problem = "no arm has 'penalty: kronecker' and no method uses bundles, but spectra needs Kronecker factors"
            return ("evaluation", "spectra"), f"{problem}. Add such an arm or method, or remove spectra"
        references: list[tuple[KeyPath, str]] = []
        if evaluation.negation:
            control, instead = evaluation.negation.control, evaluation.negation.instead
            if control not in known:
                problem = f"unknown task {control!r}; expected a task or a reference of the plan: {', '.join(known)}"
                return ("evaluation", "negation", "control"), problem
            if instead is not None:
                references.append((("evaluation", "negation", "instead"), instead))
            if instead == control:
                problem = f"{control!r} is already the control task; expected another task"
                return ("evaluation", "negation", "instead"), problem
        for number, pair in enumerate((evaluation.disentanglement and evaluation.disentanglement.pairs) or ()):
            location: KeyPath = ("evaluation", "disentanglement", "pairs", number)
            if pair[0] == pair[1]:
                return location, f"expected two different tasks, got {pair[0]!r} twice"
            references += [((*location, k), name) for k, name in enumerate(pair)]
        for location, name in references:
            if name not in names:
                return location, f"unknown task {name!r}; expected one of the plan's tasks: {', '.join(names)}"
        return None

    def regime_of(self, arm: str) -> RegimeName:
        """Returns the training regime of an arm's vectors.

        Vectors extracted from checkpoints have the regime "full", because they result from ordinary fine-tuning.
        """
        return "full" if self.arms[arm].vectors is not None else self.training_of(arm).regime

    def training_of(self, arm: str) -> TrainingSection:
        """Returns the training settings of an arm: the settings of the plan, overridden by those of the arm."""
        return self.training.model_copy(update=self.arms[arm].training.model_dump(exclude_unset=True))

    def curvature_of(self, arm: str) -> CurvatureSection:
        """Returns the curvature settings of an arm: the settings of the plan, overridden by those of the arm."""
        return self.curvature.model_copy(update=self.arms[arm].curvature.model_dump(exclude_unset=True))

    def task(self, name: str) -> TaskSection:
        """Returns the plan section for the task or reference `name`."""
        return next(task for task in (*self.tasks, *self.references) if task.name == name)

    def task_location(self, name: str) -> KeyPath:
        """Returns the location of the task or reference `name` in the plan."""
        key = "tasks" if any(task.name == name for task in self.tasks) else "references"
        return key, next(number for number, task in enumerate(getattr(self, key)) if task.name == name)

    def protected(self, arm: str, task: str) -> tuple[str, ...]:
        """Returns the tasks on which the drift is penalised while the vector for `task` is trained in `arm`."""
        names = self.arms[arm].protects or tuple(section.name for section in self.tasks)
        return tuple(name for name in names if name != task)

    def others(self, name: str) -> tuple[TaskSection, ...]:
        """Returns the sections of all tasks except `name`."""
        return tuple(task for task in self.tasks if task.name != name)

    def based_at(self, folder: Path) -> Plan:
        """Sets the base folder of the relative paths in the plan, and returns the plan."""
        self._folder = folder
        return self

    @property
    def folder(self) -> Path:
        """Base folder of the relative paths in the plan."""
        return self._folder

    @property
    def source_name(self) -> str:
        """Name of the plan file, for error messages."""
        return self._source_name

    def with_locations(self, name: str, locate: Callable[[KeyPath], str]) -> Plan:
        """Sets the file name and the locations to use in error messages, and returns the plan.

        Args:
            name: Name of the plan file.
            locate: Function that converts the keys and list indices of a setting to "FILE, line N: KEY".
        """
        self._source_name = name
        self._locate = locate
        return self

    @contextmanager
    def at(self, *key_path: str | int) -> Iterator[None]:
        """Adds the location `key_path` to the message of any `KfacpackError` that is raised in the `with` block.

        Args:
            *key_path: Keys and list indices of the setting in question.

        Raises:
            KfacpackError: If the block raises this error. The message then starts with the file, the line and the key.
        """
        try:
            yield
        except KfacpackError as error:
            location = self._locate(key_path) if self._locate else ".".join(map(str, key_path))
            raise KfacpackError(f"{location}: {error}") from error

    def model_folder(self) -> Path | None:
        """Returns the folder of a local model, such as DIR in `t5:DIR`, or None for other models.

        Raises:
            KfacpackError: If the folder exists in the working directory but not in the folder that contains the plan.
        """
        prefix, _, name = self.model.name.partition(":")
        if prefix not in FAMILIES or not FAMILIES[prefix].takes_folder or not name:
            return None
        folder = self.resolve_path(name)
        if name.startswith((".", "/", "~", "$")) or folder.is_dir():
            return folder
        if Path(name).is_dir():
            problem = f"folder {name!r} exists in the working directory, but not in {self._folder.absolute()}"
            raise KfacpackError(f"{problem}; paths in a plan are relative to the plan's own folder")
        return None

    def resolve_path(self, text: str) -> Path:
        """Resolves a path in the plan: expands `$NAME` and `~`, and resolves relative paths against the plan's folder.

        Raises:
            KfacpackError: If an environment variable in the path is not set.
        """
        expanded = os.path.expandvars(text)
        if unset := re.search(r"\$\{?(\w+)", expanded):
            problem = f"environment variable {unset[1]} is not set"
            raise KfacpackError(f"{text}: {problem}. Set it, or write the full path in the plan")
        return self._folder / expand_user(expanded)


def _mismatch(tasks: list[str], vectors: Mapping[str, str] | None) -> str | None:
    """Describes the first task without a checkpoint or checkpoint without a task, or returns None if there is none."""
    if vectors is None:
        return None
    for task in tasks:
        if task not in vectors:
            return f"no checkpoint for task {task!r}; expected one for each task of the plan: {', '.join(tasks)}"
    unknown = next((task for task in vectors if task not in tasks), None)
    return f"unknown task {unknown!r}; expected one of the plan's tasks: {', '.join(tasks)}" if unknown else None
