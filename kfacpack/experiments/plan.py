"""What a plan says: the model, the tasks, the arms to compare, and what is measured of them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
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
    field_validator,
    model_validator,
)

from kfacpack.compression.chain import CodecChain
from kfacpack.errors import KfacpackError
from kfacpack.format.container import refuse_duplicate_keys
from kfacpack.format.identity import share_classes
from kfacpack.format.manifest import Fisher, FloatType, Probe
from kfacpack.format.reference import expand_user
from kfacpack.format.units import parse_alphas
from kfacpack.format.vector_manifest import RegimeName
from kfacpack.models.families import FAMILIES
from kfacpack.models.heads import HeadKind
from kfacpack.models.prompts import PromptStyle
from kfacpack.tasks.task import parse_count
from kfacpack.training.penalty_weights import resolve_strength
from kfacpack.training.settings import MAX_RATE
from kfacpack.vectors.methods import METHODS

ShortText = Annotated[str, Field(min_length=1, max_length=200)]


def _refuse_bool(said: Any) -> Any:
    """Python takes true for 1."""
    return str(said) if isinstance(said, bool) else said


Integer = Annotated[int, BeforeValidator(_refuse_bool)]
FiniteNumber = Annotated[float, BeforeValidator(_refuse_bool)]
Positive = Annotated[Integer, Field(ge=1)]
SeedNumber = Annotated[Integer, Field(ge=0, lt=2**32)]
KeyPath = tuple[str | int, ...]
"""Where something stands in a plan: keys, and numbers in lists."""
BASELINE = "without"
"""The arm without a penalty, if there is one of this name: what the others are measured against."""


class PlanSection(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelSection(PlanSection):
    name: ShortText = "tiny"
    weights: ShortText | None = None
    image_size: Positive | None = None
    dtype: FloatType = "float32"
    prompts: PromptStyle | None = None
    """Prompt style of a t5: model, as for --prompts."""
    head: HeadKind = "auto"
    """What tells classes apart, see kfacpack/heads.py."""


class TaskSection(PlanSection):
    name: ShortText
    data: ShortText | None = None
    """The folder of its data, or hf://datasets/…; none for a task that is registered."""
    columns: ShortText | None = None
    """What the data's columns are, as for --columns."""

    @field_validator("name")
    @classmethod
    def _is_a_name(cls, name: str) -> str:
        if not re.fullmatch(r"[\w.@/+ -]+", name) or name.startswith((".", "/")) or ".." in name:
            raise ValueError("expected letters, digits and -_.@/+")
        return name


def _examples(said: str) -> str:
    parse_count(said, 1)
    return said


def _codec(spec: str) -> str:
    CodecChain.parse(spec)
    return spec


def _alphas(text: str) -> str:
    parse_alphas(text)
    return text


def _magnitudes(text: str) -> str:
    if wrong := [alpha for alpha in parse_alphas(text) if alpha < 0]:
        raise KfacpackError(f"alpha {wrong[0]:g}: the vector is negated already; expected zero or more, as 0:3:0.1")
    return text


def _method(name: str) -> str:
    if name not in METHODS:
        raise KfacpackError(f"there is no method {name!r}; there are {', '.join(METHODS)}")
    return name


def _validated_by(check: Callable[[str], str]) -> AfterValidator:
    """What the library refuses is refused, with its words, where it stands in the plan."""

    def checked(said: str) -> str:
        try:
            return check(said)
        except KfacpackError as error:
            raise ValueError(str(error)) from error

    return AfterValidator(checked)


Examples = Annotated[str, BeforeValidator(str), _validated_by(_examples)]
CodecSpec = Annotated[ShortText, _validated_by(_codec)]
Alphas = Annotated[ShortText, BeforeValidator(str), _validated_by(_alphas)]
Magnitudes = Annotated[ShortText, BeforeValidator(str), _validated_by(_magnitudes)]
MethodName = Annotated[ShortText, _validated_by(_method)]


class CurvatureSection(PlanSection):
    examples: Examples = "256"
    fisher: Fisher = "mc"
    samples: Positive = 1
    probe: Probe = "orthogonal"
    compress: CodecSpec | None = None
    """A codec for the Kronecker factors, as `kfacpack compress` takes it."""
    batch_size: Positive = 32


class TrainingSection(PlanSection):
    regime: RegimeName = "linear"
    steps: Positive = 100
    batch_size: Positive = 32
    lr: Annotated[FiniteNumber, Field(gt=0, le=MAX_RATE)] | None = None
    warmup: Annotated[FiniteNumber, Field(ge=0, le=1)] = 0.1
    weight_decay: Annotated[FiniteNumber, Field(ge=0, le=MAX_RATE)] = 0.1


class ArmSection(PlanSection):
    """One way of training all tasks' vectors."""

    penalty: Literal["none", "kronecker", "diagonal", "data"]
    rule: Literal["tak", "optimal", "stack"] = "tak"
    rank: Positive = 1
    strength: Annotated[FiniteNumber, Field(ge=0, le=MAX_RATE)] | None = None
    training: TrainingSection = TrainingSection()
    """What this arm has otherwise than the plan's `training`."""

    @property
    def lam(self) -> float:
        """λ, as it is said or by default."""
        return resolve_strength(self.strength, on_data=self.penalty == "data")

    @model_validator(mode="after")
    def _has_what_it_sets(self) -> ArmSection:
        for key, penalties in (
            ("rule", ("kronecker", "diagonal")),
            ("rank", ("kronecker",)),
            ("strength", ("kronecker", "diagonal", "data")),
        ):
            if key in self.model_fields_set and self.penalty not in penalties:
                raise ValueError(f"{key} belongs to a penalty, found penalty: {self.penalty}")
        if self.rank > 1 and self.rule != "optimal":
            raise ValueError(f"rank belongs to rule: optimal, found rule: {self.rule}")
        return self


class NegationSection(PlanSection):
    control: ShortText
    """The task that is to be kept."""
    instead: ShortText | None = None
    """The one that is kept when the control itself is negated. None: the first of the others."""
    keep: Annotated[FiniteNumber, Field(gt=0, le=1)] = 0.95
    alphas: Magnitudes = "0:3:0.1"


class PairsSection(PlanSection):
    alphas: Alphas = "-2:2:0.5"
    pairs: tuple[tuple[ShortText, ShortText], ...] | None = None
    """None: the first task with each of the others."""
    examples: Examples = "200"


class ExamplesSection(PlanSection):
    examples: Examples = "200"


class DriftSection(ExamplesSection):
    layer_examples: Annotated[Integer, Field(ge=0)] = 8
    """Each layer's drift is measured on fewer, for it takes a pass of its own; 0 leaves layers out."""


class EvaluationSection(PlanSection):
    examples: Examples = "all"
    batch_size: Positive = 64
    methods: Annotated[tuple[MethodName, ...], Field(min_length=1)] = ("sum",)
    alphas: Alphas = "0:2:0.1"
    negation: NegationSection | None = None
    disentanglement: PairsSection | None = None
    localisation: ExamplesSection | None = None
    drift: DriftSection | None = None
    spectra: bool = False
    in_depth: tuple[ShortText, ...] | None = None
    """The arms of which negation, disentanglement, localisation and drift are measured; None: all."""


class Plan(PlanSection):
    name: ShortText
    model: ModelSection = ModelSection()
    tasks: Annotated[tuple[TaskSection, ...], Field(min_length=2)]
    seeds: Annotated[tuple[SeedNumber, ...], Field(min_length=1)] = (0,)
    curvature: CurvatureSection = CurvatureSection()
    training: TrainingSection = TrainingSection()
    arms: Annotated[dict[ShortText, ArmSection], Field(min_length=1)]
    evaluation: EvaluationSection = EvaluationSection()
    _folder: Path = PrivateAttr(default=Path())
    _where: Callable[[KeyPath], str] | None = PrivateAttr(default=None)

    @field_validator("model", mode="before")
    @classmethod
    def _model_by_name(cls, said: Any) -> Any:
        return {"name": said} if isinstance(said, str) else said

    @field_validator("tasks", mode="before")
    @classmethod
    def _tasks_by_name(cls, said: Any) -> Any:
        return [{"name": each} if isinstance(each, str) else each for each in said] if isinstance(said, list) else said

    @field_validator("arms", mode="before")
    @classmethod
    def _arms_without_more(cls, said: Any) -> Any:
        return {name: {} if arm is None else arm for name, arm in said.items()} if isinstance(said, dict) else said

    @field_validator("arms")
    @classmethod
    def _arms_are_names(cls, arms: dict[str, ArmSection]) -> dict[str, ArmSection]:
        for name in arms:
            if not re.fullmatch(r"[\w.+ -]+", name) or name.startswith("."):
                raise ValueError(f"the arm {name!r}: expected letters, digits and -_.+")
        return arms

    def contradiction(self) -> tuple[KeyPath, str] | None:
        """What does not go together with the rest, and where it stands."""
        names = [task.name for task in self.tasks]
        told = self.evaluation
        for place, values in (
            (("tasks",), names),
            (("seeds",), [str(seed) for seed in self.seeds]),
            (("evaluation", "methods"), list(told.methods)),
        ):
            if twice := refuse_duplicate_keys(values):
                return (*place, len(values) - 1 - values[::-1].index(twice)), f"{twice!r} is there twice"
        for number, name in enumerate(names):
            if other := next((each for each in names[:number] if share_classes(each, name)), None):
                problem = f"{name!r} and {other!r} have classes in common, which would count twice"
                return ("tasks", number), f"{problem}. Name parts without a class in common, or the whole alone"
        for number, arm in enumerate(told.in_depth or ()):
            if arm not in self.arms:
                return ("evaluation", "in_depth", number), f"{arm!r} is none of the arms: {', '.join(self.arms)}"
        drifting = told.drift is not None and told.in_depth != ()
        if told.spectra and not drifting and all(arm.penalty != "kronecker" for arm in self.arms.values()):
            problem = "spectra are those of Kronecker factors, and no arm has a penalty: kronecker"
            return ("evaluation", "spectra"), f"{problem}. Add such an arm, or leave spectra out"
        asked: list[tuple[KeyPath, str]] = []
        if told.negation:
            control, instead = told.negation.control, told.negation.instead
            asked.append((("evaluation", "negation", "control"), control))
            if instead is not None:
                asked.append((("evaluation", "negation", "instead"), instead))
            if instead == control:
                problem = f"{control!r} cannot be kept in its own place; name another task"
                return ("evaluation", "negation", "instead"), problem
        for number, pair in enumerate((told.disentanglement and told.disentanglement.pairs) or ()):
            there: KeyPath = ("evaluation", "disentanglement", "pairs", number)
            if pair[0] == pair[1]:
                return there, f"a pair is of two tasks, found {pair[0]!r} twice"
            asked += [((*there, k), name) for k, name in enumerate(pair)]
        for there, name in asked:
            if name not in names:
                return there, f"{name!r} is none of the tasks: {', '.join(names)}"
        return None

    def training_of(self, arm: str) -> TrainingSection:
        return self.training.model_copy(update=self.arms[arm].training.model_dump(exclude_unset=True))

    def task(self, name: str) -> TaskSection:
        return next(task for task in self.tasks if task.name == name)

    def others(self, name: str) -> tuple[TaskSection, ...]:
        return tuple(task for task in self.tasks if task.name != name)

    def based_at(self, folder: Path) -> Plan:
        """The same plan, its paths meant from a folder."""
        self._folder = folder
        return self

    def told_by(self, where: Callable[[KeyPath], str]) -> Plan:
        """The same plan, which can say in which line of which file something stands."""
        self._where = where
        return self

    @contextmanager
    def at(self, *place: str | int) -> Iterator[None]:
        """What is wrong with something that the plan names is told with the line that names it."""
        try:
            yield
        except KfacpackError as error:
            where = self._where(place) if self._where else ".".join(map(str, place))
            raise KfacpackError(f"{where}: {error}") from error

    def model_folder(self) -> Path | None:
        """The folder of a model that is named by one, as t5:DIR is; a name of the Hub's stands for none."""
        prefix, _, name = self.model.name.partition(":")
        if prefix not in FAMILIES or not FAMILIES[prefix].takes_folder or not name:
            return None
        folder = self.place(name)
        if name.startswith((".", "/", "~", "$")) or folder.is_dir():
            return folder
        if Path(name).is_dir():
            problem = f"there is a folder {name!r} here, but none in {self._folder.absolute()}"
            raise KfacpackError(f"{problem}; paths in a plan are meant from the plan's own folder")
        return None

    def place(self, said: str) -> Path:
        """A path of the plan; $NAME in it is taken from the environment."""
        full = os.path.expandvars(said)
        if unset := re.search(r"\$\{?(\w+)", full):
            problem = f"the environment has no variable {unset[1]}"
            raise KfacpackError(f"{said}: {problem}. Set it to the place that is meant, or write it into the plan")
        return self._folder / expand_user(full)
