"""The sections of a plan. Each section of the YAML file is defined by one pydantic model."""

from __future__ import annotations

import re
from collections.abc import Callable
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

from kfacpack.compression.codecs import CodecChain
from kfacpack.errors import KfacpackError
from kfacpack.format.manifest import Fisher, FloatType, Metric, Probe
from kfacpack.format.units import parse_alphas, parse_size
from kfacpack.format.vector_manifest import HeadKind, RegimeName
from kfacpack.models.prompts import PromptStyle
from kfacpack.tasks.task import parse_count
from kfacpack.training.penalty_weights import MAX_RATE, resolve_strength
from kfacpack.vectors.methods import METHODS

ShortText = Annotated[str, Field(min_length=1, max_length=200)]


def _refuse_bool(value: Any) -> Any:
    """Converts booleans to strings, so that numeric fields reject them: in Python, `True` is also the integer 1."""
    return str(value) if isinstance(value, bool) else value


Integer = Annotated[int, BeforeValidator(_refuse_bool)]
FiniteNumber = Annotated[float, BeforeValidator(_refuse_bool)]
Positive = Annotated[Integer, Field(ge=1)]
SeedNumber = Annotated[Integer, Field(ge=0, lt=2**32)]
KeyPath = tuple[str | int, ...]
"""A location in a plan: a sequence of mapping keys and list indices."""
BASELINE = "without"
"""Name of the arm without a penalty. The other arms are compared with this arm."""


class PlanSection(BaseModel):
    """Base class for the sections of a plan. Sections are immutable and reject unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelSection(PlanSection):
    """The model to fine-tune, and the options for loading it."""

    name: ShortText = "tiny"
    weights: ShortText | None = None
    image_size: Positive | None = None
    dtype: FloatType = "float32"
    prompts: PromptStyle | None = None
    """Prompt style of a model named `t5:…` or `lm:…`; the values are those of `--prompts`."""
    params: Annotated[tuple[ShortText, ...], Field(min_length=1)] | None = None
    """Names or patterns of the parameters in the bundles and in the vectors, in the syntax of `--params`."""
    head: HeadKind = "auto"
    """Kind of classification head; see `kfacpack/models/heads.py`."""


class TaskSection(PlanSection):
    """One task and the location of its data."""

    name: ShortText
    data: ShortText | None = None
    """Folder with the data, or `hf://datasets/…`. Defaults to the data of the registered task with this name."""
    columns: ShortText | None = None
    """Roles of the columns in the data, in the syntax of `--columns`."""

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not re.fullmatch(r"[\w.@/+ -]+", name) or name.startswith((".", "/")) or ".." in name:
            expected = "expected letters, digits, spaces or -_.@/+, but neither `..` nor a leading dot or slash"
            raise ValueError(f"{expected}, got {name!r}")
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
            f"alpha {negative[0]:g}: negation already subtracts the vector; expected values ≥ 0, such as 0:3:0.1"
        )
    return text


def _validated_by(check: Callable[[str], str]) -> AfterValidator:
    """Returns a validator that calls `check` and converts a `KfacpackError` to a validation error with a location."""

    def validate(text: str) -> str:
        try:
            return check(text)
        except KfacpackError as error:
            raise ValueError(str(error)) from error

    return AfterValidator(validate)


def _budget(text: str) -> str:
    parse_size(text, 1)
    return text


Budget = Annotated[ShortText, BeforeValidator(str), _validated_by(_budget)]
Examples = Annotated[str, BeforeValidator(str), _validated_by(_examples)]
CodecSpec = Annotated[ShortText, _validated_by(_codec)]
Alphas = Annotated[ShortText, BeforeValidator(str), _validated_by(_alphas)]
Magnitudes = Annotated[ShortText, BeforeValidator(str), _validated_by(_magnitudes)]


class CurvatureSection(PlanSection):
    """Settings for estimating the curvature of each task."""

    examples: Examples = "256"
    fisher: Fisher = "mc"
    samples: Positive = 1
    probe: Probe = "orthogonal"
    metric: Metric = "l2"
    compress: CodecSpec | None = None
    """Codec for the Kronecker factors, in the syntax of `kfacpack compress`."""
    batch_size: Positive = 32


class TrainingSection(PlanSection):
    """Settings for training the task vectors."""

    regime: RegimeName = "linear"
    steps: Positive = 100
    batch_size: Positive = 32
    lr: Annotated[FiniteNumber, Field(gt=0, le=MAX_RATE)] | None = None
    warmup: Annotated[FiniteNumber, Field(ge=0, le=1)] = 0.1
    weight_decay: Annotated[FiniteNumber, Field(ge=0, le=MAX_RATE)] = 0.1
    compile: bool = False
    """Whether to compile the training step of the linearised model with torch.compile."""
    clip: Annotated[FiniteNumber, Field(gt=0)] | None = None
    """Maximum norm of the gradient."""
    keep: Annotated[FiniteNumber, Field(gt=0, le=1)] | None = None
    """Fraction of the weights that the regime `sparse` trains."""
    mask: Literal["data", "bundles"] = "data"
    """How the regime `sparse` selects weights: with validation examples, or with the bundles of the protected tasks."""

    @property
    def key(self) -> dict[str, Any]:
        """The settings that determine the trained vector.

        Settings that older versions of kfacpack do not have are omitted if they have their default values.
        """
        added = ("compile", "clip", "keep", "mask")
        defaults = {name: TrainingSection.model_fields[name].default for name in added}
        return {name: value for name, value in self.model_dump().items() if defaults.get(name, ...) != value}


class PenaltySection(PlanSection):
    """Default settings for arms with `penalty: kronecker`."""

    strength: Annotated[FiniteNumber, Field(ge=0, le=MAX_RATE)] | None = None
    preset: Literal["tak"] | None = None


class ArmSection(PlanSection):
    """One way of obtaining the vectors of all tasks, either by training or by extraction from checkpoints."""

    vectors: Annotated[dict[ShortText, ShortText], Field(min_length=1)] | None = None
    """The fine-tuned checkpoint or adapter (file, folder or `hf://…`) from which each task's vector is extracted."""
    penalty: Literal["none", "kronecker", "diagonal", "data"]
    rule: Literal["tak", "optimal", "stack"] = "tak"
    rank: Positive = 1
    strength: Annotated[FiniteNumber, Field(ge=0, le=MAX_RATE)] | None = None
    preset: Literal["tak"] | None = None
    """`tak` uses the scaling and the group weights of the TAK paper; `strength` must then be given."""
    every: Positive = 1
    """Interval in steps between applications of the penalty: 1 applies the penalty at every step."""
    compress: CodecSpec | None = None
    """Codec that compresses the bundles of this arm before they are merged, in the syntax of `kfacpack compress`."""
    budget: Budget | None = None
    """Maximum size of each bundle of this arm, in the syntax of `kfacpack compress --budget`."""
    protects: Annotated[tuple[ShortText, ...], Field(min_length=1)] | None = None
    """Tasks or references on which the drift is penalised. Defaults to all tasks except the vector's own task."""
    curvature: CurvatureSection = CurvatureSection()
    """Settings of this arm that override the plan's `curvature`."""
    training: TrainingSection = TrainingSection()
    """Settings of this arm that override the plan's `training`."""
    _metric: Metric = PrivateAttr(default="l2")

    @model_validator(mode="before")
    @classmethod
    def _default_penalty_of_extracted_vectors(cls, value: Any) -> Any:
        return {"penalty": "none", **value} if isinstance(value, dict) and value.get("vectors") else value

    @property
    def lam(self) -> float:
        """Strength λ of the penalty. Its default depends on the kind of penalty and on the metric of the bundles."""
        return resolve_strength(self.strength, on_data=self.penalty == "data", metric=self._metric)

    @model_validator(mode="after")
    def _check_settings_apply(self) -> ArmSection:
        if self.vectors is not None and (self.penalty != "none" or "training" in self.model_fields_set):
            key = "penalty" if self.penalty != "none" else "training"
            raise ValueError(f"{key} does not apply to extracted vectors; remove {key} or vectors")
        for key, penalties in (
            ("rule", ("kronecker", "diagonal")),
            ("rank", ("kronecker",)),
            ("strength", ("kronecker", "diagonal", "data")),
            ("protects", ("kronecker", "diagonal", "data")),
            ("preset", ("kronecker",)),
            ("every", ("kronecker", "diagonal")),
            ("compress", ("kronecker",)),
            ("budget", ("kronecker",)),
        ):
            if key in self.model_fields_set and self.penalty not in penalties:
                raise ValueError(f"{key} requires 'penalty: {' or '.join(penalties)}', got 'penalty: {self.penalty}'")
        if self.rank > 1 and self.rule != "optimal":
            raise ValueError(f"rank requires 'rule: optimal', got 'rule: {self.rule}'")
        if self.preset and self.strength is None:
            raise ValueError(
                "preset requires strength; set strength to the λ that the TAK paper uses for the model, "
                "e.g. 100 for ViT-B/32"
            )
        if self.compress and self.budget:
            raise ValueError("expected either compress or budget, got both")
        return self


class MethodSection(PlanSection):
    """A merge method. Keys other than the fields below are settings of the method, such as `keep` for `ties`."""

    model_config = ConfigDict(extra="allow")

    name: ShortText
    label: Annotated[str, Field(max_length=60, pattern=r"^[\w+][\w.+=:,% -]*$")] = ""
    """Name of the method in the results. Defaults to `name`, followed by the settings and the codec in the plan."""
    compress: CodecSpec | None = None
    """Codec that compresses the bundles before the method uses them, in the syntax of `kfacpack compress`."""

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the method that are given in the plan."""
        return dict(self.model_extra or {})

    @property
    def all_settings(self) -> dict[str, Any]:
        """All settings of the method, with default values for settings that are not given in the plan."""
        return METHODS[self.name].of(self.settings).settings

    @property
    def needs_bundles(self) -> bool:
        """Whether the method needs the bundle of every task."""
        return METHODS[self.name].needs_bundles

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        """Converts a method that is given only by name into a mapping, and adds a label if there is none."""
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
            raise ValueError(f"compress requires a method that uses bundles ({', '.join(names)}), got {self.name!r}")
        return self


class NegationSection(PlanSection):
    """Settings for negation, which removes each task from the model while a control task keeps its accuracy."""

    control: ShortText
    """Task whose accuracy must be preserved."""
    instead: ShortText | None = None
    """Control task to use when `control` itself is negated. Defaults to the first task other than `control`."""
    keep: Annotated[FiniteNumber, Field(gt=0, le=1)] = 0.95
    alphas: Magnitudes = "0:3:0.1"


class PairsSection(PlanSection):
    """Settings for measuring disentanglement: the pairs of tasks, the values of α and the examples."""

    alphas: Alphas = "-2:2:0.5"
    pairs: tuple[tuple[ShortText, ShortText], ...] | None = None
    """Pairs of tasks to measure. By default, the first task is paired with each of the other tasks."""
    examples: Examples = "200"


class ExamplesSection(PlanSection):
    """Settings for a measurement whose only setting is the number of examples."""

    examples: Examples = "200"


class DriftSection(ExamplesSection):
    """Settings for the comparison of predicted and measured drift."""

    layer_examples: Annotated[Integer, Field(ge=0)] = 8
    """Number of examples on which the drift of individual layers is measured; 0 skips this measurement."""


class EvaluationSection(PlanSection):
    """The measurements of a plan, and the examples and merge methods that they use."""

    examples: Examples = "all"
    batch_size: Positive = 64
    methods: Annotated[tuple[MethodSection, ...], Field(min_length=1)] = (MethodSection(name="sum"),)
    alphas: Alphas = "0:2:0.1"
    method_alphas: bool = False
    """Whether to evaluate every merge method at all `alphas`.

    If false, all merge methods except the first are evaluated only at α = 1.
    """
    negation: NegationSection | None = None
    disentanglement: PairsSection | None = None
    localisation: ExamplesSection | None = None
    drift: DriftSection | None = None
    spectra: bool = False
    in_depth: tuple[ShortText, ...] | None = None
    """Arms for which negation, disentanglement, localisation and drift are measured. Defaults to all arms."""
