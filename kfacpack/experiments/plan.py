"""The contents of a plan: the model, the tasks, the arms to compare and the measurements to make.

Each section of the YAML file is one pydantic model; `kfacpack.experiments.plan_file` reads the file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from kfacpack.compression.codecs import CodecChain
from kfacpack.errors import KfacpackError
from kfacpack.format.container import first_duplicate
from kfacpack.format.identity import share_classes
from kfacpack.format.manifest import Fisher, FloatType, Metric, Probe
from kfacpack.format.reference import expand_user
from kfacpack.format.units import parse_alphas
from kfacpack.format.vector_manifest import HeadKind, RegimeName
from kfacpack.models.families import FAMILIES
from kfacpack.models.prompts import PromptStyle
from kfacpack.tasks.task import parse_count
from kfacpack.training.penalty_weights import MAX_RATE, resolve_strength
from kfacpack.vectors.methods import METHODS

ShortText = Annotated[str, Field(min_length=1, max_length=200)]


def _refuse_bool(value: Any) -> Any:
    """Converts booleans to text, which numeric fields reject: in Python, `True` is also the integer 1."""
    return str(value) if isinstance(value, bool) else value


Integer = Annotated[int, BeforeValidator(_refuse_bool)]
FiniteNumber = Annotated[float, BeforeValidator(_refuse_bool)]
Positive = Annotated[Integer, Field(ge=1)]
SeedNumber = Annotated[Integer, Field(ge=0, lt=2**32)]
KeyPath = tuple[str | int, ...]
"""A location in a plan: mapping keys and list indices."""
BASELINE = "without"
"""Name of the arm without a penalty, against which the other arms are compared."""


class PlanSection(BaseModel):
    """Base class of the sections of a plan: immutable, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelSection(PlanSection):
    """The model that is fine-tuned, and how it is loaded."""

    name: ShortText = "tiny"
    weights: ShortText | None = None
    image_size: Positive | None = None
    dtype: FloatType = "float32"
    prompts: PromptStyle | None = None
    """Prompt style of a `t5:` or `lm:` model, as for `--prompts`."""
    head: HeadKind = "auto"
    """Kind of classification head, see `kfacpack/models/heads.py`."""


class TaskSection(PlanSection):
    """One task and the location of its data."""

    name: ShortText
    data: ShortText | None = None
    """Folder of the data, or `hf://datasets/…`; None for a registered task."""
    columns: ShortText | None = None
    """Roles of the data's columns, as for `--columns`."""

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not re.fullmatch(r"[\w.@/+ -]+", name) or name.startswith((".", "/")) or ".." in name:
            raise ValueError("expected letters, digits and -_.@/+")
        return name


def _examples(text: str) -> str:
    parse_count(text, 1)
    return text


def _codec(spec: str) -> str:
    CodecChain.parse(spec)
    return spec


def _alphas(text: str) -> str:
    parse_alphas(text)
    return text


def _magnitudes(text: str) -> str:
    if negative := [alpha for alpha in parse_alphas(text) if alpha < 0]:
        raise KfacpackError(
            f"alpha {negative[0]:g}: negation already subtracts the vector; expected zero or more, such as 0:3:0.1"
        )
    return text


def _validated_by(check: Callable[[str], str]) -> AfterValidator:
    """Converts the `KfacpackError` of a library check to a validation error, which has a location in the plan."""

    def validate(text: str) -> str:
        try:
            return check(text)
        except KfacpackError as error:
            raise ValueError(str(error)) from error

    return AfterValidator(validate)


Examples = Annotated[str, BeforeValidator(str), _validated_by(_examples)]
CodecSpec = Annotated[ShortText, _validated_by(_codec)]
Alphas = Annotated[ShortText, BeforeValidator(str), _validated_by(_alphas)]
Magnitudes = Annotated[ShortText, BeforeValidator(str), _validated_by(_magnitudes)]


class CurvatureSection(PlanSection):
    """How the curvature of each task is estimated."""

    examples: Examples = "256"
    fisher: Fisher = "mc"
    samples: Positive = 1
    probe: Probe = "orthogonal"
    metric: Metric = "l2"
    compress: CodecSpec | None = None
    """Codec for the Kronecker factors, as for `kfacpack compress`."""
    batch_size: Positive = 32


class TrainingSection(PlanSection):
    """How the task vectors are trained."""

    regime: RegimeName = "linear"
    steps: Positive = 100
    batch_size: Positive = 32
    lr: Annotated[FiniteNumber, Field(gt=0, le=MAX_RATE)] | None = None
    warmup: Annotated[FiniteNumber, Field(ge=0, le=1)] = 0.1
    weight_decay: Annotated[FiniteNumber, Field(ge=0, le=MAX_RATE)] = 0.1
    compile: bool = False
    """Whether torch.compile compiles the linearised step."""


class ArmSection(PlanSection):
    """One way of obtaining the vectors of all tasks: by training, or by extraction from checkpoints."""

    vectors: Annotated[dict[ShortText, ShortText], Field(min_length=1)] | None = None
    """By task, a fine-tuned checkpoint or an adapter to extract the vector from: a file, a folder or `hf://…`."""
    penalty: Literal["none", "kronecker", "diagonal", "data"]
    rule: Literal["tak", "optimal", "stack"] = "tak"
    rank: Positive = 1
    strength: Annotated[FiniteNumber, Field(ge=0, le=MAX_RATE)] | None = None
    training: TrainingSection = TrainingSection()
    """Settings of this arm that override the plan's `training`."""
    _metric: Metric = PrivateAttr(default="l2")

    @model_validator(mode="before")
    @classmethod
    def _leave_out_penalty_of_extracted_vectors(cls, value: Any) -> Any:
        return {"penalty": "none", **value} if isinstance(value, dict) and value.get("vectors") else value

    @property
    def lam(self) -> float:
        """λ: the `strength` of the plan, or the default of the penalty with the metric of the bundles."""
        return resolve_strength(self.strength, on_data=self.penalty == "data", metric=self._metric)

    @model_validator(mode="after")
    def _check_settings_apply(self) -> ArmSection:
        if self.vectors is not None and (self.penalty != "none" or "training" in self.model_fields_set):
            key = "penalty" if self.penalty != "none" else "training"
            raise ValueError(f"{key} does not apply to vectors that are extracted; remove it, or remove vectors")
        for key, penalties in (
            ("rule", ("kronecker", "diagonal")),
            ("rank", ("kronecker",)),
            ("strength", ("kronecker", "diagonal", "data")),
        ):
            if key in self.model_fields_set and self.penalty not in penalties:
                raise ValueError(f"{key} requires penalty: {' or '.join(penalties)}; got penalty: {self.penalty}")
        if self.rank > 1 and self.rule != "optimal":
            raise ValueError(f"rank requires rule: optimal; got rule: {self.rule}")
        return self


class MethodSection(PlanSection):
    """A merge method. Keys beyond the fields below are settings of the method, such as `keep` of `ties`."""

    model_config = ConfigDict(extra="allow")

    name: ShortText
    label: Annotated[str, Field(max_length=60, pattern=r"^[\w+][\w.+=:,% -]*$")] = ""
    """Name in the results. Defaults to the name of the method with its settings."""
    compress: CodecSpec | None = None
    """Codec with which the bundles are compressed before the method uses them, as for `kfacpack compress`."""

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the method that are not defaults."""
        return dict(self.model_extra or {})

    @property
    def all_settings(self) -> dict[str, Any]:
        """All settings of the method, with their defaults."""
        return METHODS[self.name].of(self.settings).settings

    @property
    def needs_bundles(self) -> bool:
        """Whether the method needs the bundle of every task."""
        return METHODS[self.name].needs_bundles

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        """Expands a name alone, and fills in the label."""
        value = {"name": value} if isinstance(value, str) else value
        if not isinstance(value, dict) or "label" in value:
            return value
        settings = [f"{key}={entry}" for key, entry in value.items() if key not in ("name", "compress")]
        words = [str(value.get("name")), *settings, *([str(value["compress"])] if value.get("compress") else [])]
        return {**value, "label": " ".join(words)}

    @model_validator(mode="after")
    def _check_settings(self) -> MethodSection:
        if self.name not in METHODS:
            raise ValueError(f"unknown merge method {self.name!r}; expected one of: {', '.join(METHODS)}")
        try:
            METHODS[self.name].of(self.settings)
        except KfacpackError as error:
            raise ValueError(str(error)) from error
        if self.compress and not self.needs_bundles:
            names = [name for name, method in METHODS.items() if method.needs_bundles]
            raise ValueError(f"compress is for methods that use bundles: {', '.join(names)}; got method {self.name!r}")
        return self


class NegationSection(PlanSection):
    """Negation: each task is removed from the model while a control task is kept."""

    control: ShortText
    """The task whose accuracy is kept."""
    instead: ShortText | None = None
    """The control task when `control` itself is negated. Defaults to the first of the other tasks."""
    keep: Annotated[FiniteNumber, Field(gt=0, le=1)] = 0.95
    alphas: Magnitudes = "0:3:0.1"


class PairsSection(PlanSection):
    """Disentanglement: pairs of tasks and the values of α."""

    alphas: Alphas = "-2:2:0.5"
    pairs: tuple[tuple[ShortText, ShortText], ...] | None = None
    """Pairs to measure. Defaults to the first task with each of the others."""
    examples: Examples = "200"


class ExamplesSection(PlanSection):
    """A measurement whose only setting is the number of examples."""

    examples: Examples = "200"


class DriftSection(ExamplesSection):
    """Predicted and measured drift."""

    layer_examples: Annotated[Integer, Field(ge=0)] = 8
    """Examples for the drift of single layers, each of which needs its own forward pass; 0 skips the layers."""


class EvaluationSection(PlanSection):
    """The measurements of a plan, and the examples and merge methods that they use."""

    examples: Examples = "all"
    batch_size: Positive = 64
    methods: Annotated[tuple[MethodSection, ...], Field(min_length=1)] = (MethodSection(name="sum"),)
    alphas: Alphas = "0:2:0.1"
    method_alphas: bool = False
    """Whether every method is evaluated at all `alphas`, instead of only the first one."""
    negation: NegationSection | None = None
    disentanglement: PairsSection | None = None
    localisation: ExamplesSection | None = None
    drift: DriftSection | None = None
    spectra: bool = False
    in_depth: tuple[ShortText, ...] | None = None
    """Arms for which negation, disentanglement, localisation and drift are measured. Defaults to all arms."""


class Plan(PlanSection):
    """A complete comparison: model, tasks, arms and measurements."""

    name: ShortText
    model: ModelSection = ModelSection()
    tasks: Annotated[tuple[TaskSection, ...], Field(min_length=2)]
    seeds: Annotated[tuple[SeedNumber, ...], Field(min_length=1)] = (0,)
    curvature: CurvatureSection = CurvatureSection()
    training: TrainingSection = TrainingSection()
    arms: Annotated[dict[ShortText, ArmSection], Field(min_length=1)]
    evaluation: EvaluationSection = EvaluationSection()
    _folder: Path = PrivateAttr(default=Path())
    _source_name: str = PrivateAttr(default="plan")
    _locate: Callable[[KeyPath], str] | None = PrivateAttr(default=None)

    @field_validator("model", mode="before")
    @classmethod
    def _expand_model_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @field_validator("tasks", mode="before")
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
            if "curvature" in info.data:  # missing if that section is invalid
                arm._metric = info.data["curvature"].metric
            if not re.fullmatch(r"[\w.+ -]+", name) or name.startswith("."):
                raise ValueError(f"arm {name!r}: expected letters, digits and -_.+")
        return arms

    def contradiction(self) -> tuple[KeyPath, str] | None:
        """Finds the first setting that contradicts the rest of the plan.

        Returns:
            The location of the setting and a description of the problem, or None if the plan is consistent.
        """
        names = [task.name for task in self.tasks]
        evaluation = self.evaluation
        for key_path, values in (
            (("tasks",), names),
            (("seeds",), [str(seed) for seed in self.seeds]),
            (("evaluation", "methods"), [method.label for method in evaluation.methods]),
        ):
            if duplicate := first_duplicate(values):
                return (*key_path, len(values) - 1 - values[::-1].index(duplicate)), f"duplicate entry {duplicate!r}"
        for number, name in enumerate(names):
            if other := next((earlier for earlier in names[:number] if share_classes(earlier, name)), None):
                problem = f"{name!r} and {other!r} have classes in common, which would be counted twice"
                return ("tasks", number), f"{problem}. Use splits without common classes, or only the whole task"
        for number, arm in enumerate(evaluation.in_depth or ()):
            if arm not in self.arms:
                return (
                    ("evaluation", "in_depth", number),
                    f"unknown arm {arm!r}; expected one of: {', '.join(self.arms)}",
                )
        for arm, section in self.arms.items():
            if mismatch := _mismatch(names, section.vectors):
                return ("arms", arm, "vectors"), mismatch
        for number, method in enumerate(evaluation.methods):
            if method.compress and self.curvature.compress:
                problem = f"all bundles are already compressed, by curvature.compress: {self.curvature.compress}"
                return ("evaluation", "methods", number), f"{problem}. Remove one of the two"
        measures_drift = evaluation.drift is not None and evaluation.in_depth != ()
        has_factors = (
            measures_drift
            or any(method.needs_bundles for method in evaluation.methods)
            or any(arm.penalty == "kronecker" for arm in self.arms.values())
        )
        if evaluation.spectra and not has_factors:
            problem = "spectra need Kronecker factors, but no arm has penalty: kronecker and no method uses bundles"
            return ("evaluation", "spectra"), f"{problem}. Add such an arm, or remove spectra"
        references: list[tuple[KeyPath, str]] = []
        if evaluation.negation:
            control, instead = evaluation.negation.control, evaluation.negation.instead
            references.append((("evaluation", "negation", "control"), control))
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
        """Returns the regime of an arm's vectors; extracted vectors are those of ordinary fine-tuning."""
        return "full" if self.arms[arm].vectors is not None else self.training_of(arm).regime

    def training_of(self, arm: str) -> TrainingSection:
        """Returns the training settings of an arm: those of the plan, overridden by its own."""
        return self.training.model_copy(update=self.arms[arm].training.model_dump(exclude_unset=True))

    def task(self, name: str) -> TaskSection:
        """Returns the section of the task `name`."""
        return next(task for task in self.tasks if task.name == name)

    def others(self, name: str) -> tuple[TaskSection, ...]:
        """Returns the sections of all tasks except `name`."""
        return tuple(task for task in self.tasks if task.name != name)

    def based_at(self, folder: Path) -> Plan:
        """Sets the base folder of relative paths in the plan, and returns the plan."""
        self._folder = folder
        return self

    @property
    def folder(self) -> Path:
        """Base folder of relative paths."""
        return self._folder

    @property
    def source_name(self) -> str:
        """Name of the plan's file in error messages."""
        return self._source_name

    def with_locations(self, name: str, locate: Callable[[KeyPath], str]) -> Plan:
        """Sets the file name and the function that describes a location by file, line and key; returns the plan."""
        self._source_name = name
        self._locate = locate
        return self

    @contextmanager
    def at(self, *key_path: str | int) -> Iterator[None]:
        """Prefixes the message of a `KfacpackError` raised inside with the location `key_path` in the plan.

        Args:
            *key_path: Keys and list indices of the setting in question.

        Raises:
            KfacpackError: The error raised inside, with file, line and key before its message.
        """
        try:
            yield
        except KfacpackError as error:
            location = self._locate(key_path) if self._locate else ".".join(map(str, key_path))
            raise KfacpackError(f"{location}: {error}") from error

    def model_folder(self) -> Path | None:
        """Returns the folder of a local model, such as `t5:DIR`; None for names on the Hub.

        Raises:
            KfacpackError: If the folder exists in the working directory but not beside the plan.
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
        """Resolves a path of the plan: `$NAME` and `~` are expanded, relative paths start from the plan's folder.

        Raises:
            KfacpackError: If an environment variable in the path is not set.
        """
        expanded = os.path.expandvars(text)
        if unset := re.search(r"\$\{?(\w+)", expanded):
            problem = f"environment variable {unset[1]} is not set"
            raise KfacpackError(f"{text}: {problem}. Set it, or write the path into the plan")
        return self._folder / expand_user(expanded)


def _mismatch(tasks: list[str], vectors: Mapping[str, str] | None) -> str | None:
    """Returns why the checkpoints of an arm do not match the tasks of the plan, or None if they do."""
    if vectors is None:
        return None
    for task in tasks:
        if task not in vectors:
            return f"no checkpoint of task {task!r}; expected one for each task of the plan: {', '.join(tasks)}"
    unknown = next((task for task in vectors if task not in tasks), None)
    return f"unknown task {unknown!r}; expected the plan's tasks: {', '.join(tasks)}" if unknown else None
