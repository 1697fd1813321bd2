"""Schema of `results.json` and `times.json`, with functions that read and validate these files."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from kfacpack.errors import KfacpackError, abbreviate, printable


class UnknownKeyWarning(UserWarning):
    """Issued when a file contains unknown keys, which are ignored. They may be misspelt, or new in a later version."""


def unknown_keys(value: Any, key_path: tuple[str, ...] = ()) -> Iterator[str]:
    """Yields the locations of unknown keys, such as `arms.0.regimen`.

    Args:
        value: A validated model that allows extra keys, or a part of such a model.
        key_path: Location of `value`.
    """
    if isinstance(value, BaseModel):
        yield from (".".join((*key_path, key)) for key in value.model_extra or ())
        for name in type(value).model_fields:
            yield from unknown_keys(getattr(value, name), (*key_path, name))
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from unknown_keys(entry, (*key_path, str(key)))
    elif isinstance(value, list | tuple):
        for number, entry in enumerate(value):
            yield from unknown_keys(entry, (*key_path, str(number)))


FORMAT = "kfacpack.run/1"
PerTask = dict[str, FiniteFloat]
NonNegativeInt = Annotated[int, Field(ge=0)]


class ResultModel(BaseModel):
    """Base class for the parts of `results.json` and `times.json`. Instances are immutable."""

    # Extra keys cause only a warning, because a newer version may have added them.
    model_config = ConfigDict(extra="allow", frozen=True)


class SweepResult(ResultModel):
    """Accuracy on each task, and the mean accuracy, at every scale α of a merged vector."""

    alphas: list[FiniteFloat] = Field(min_length=1)
    tasks: dict[str, list[FiniteFloat]]
    mean: list[FiniteFloat]

    @model_validator(mode="after")
    def _check_lengths(self) -> SweepResult:
        if any(len(accuracies) != len(self.alphas) for accuracies in (self.mean, *self.tasks.values())):
            raise ValueError(f"expected one accuracy per α (number of alphas: {len(self.alphas)})")
        return self


class DisentanglementResult(ResultModel):
    """Disentanglement error ξ(α₁, α₂) of two vectors, on a square grid of values of α."""

    tasks: tuple[str, str]
    alphas: list[FiniteFloat] = Field(min_length=1)
    xi: list[list[FiniteFloat]]
    examples: dict[str, NonNegativeInt]

    @model_validator(mode="after")
    def _check_square(self) -> DisentanglementResult:
        size = len(self.alphas)
        if len(self.xi) != size or any(len(row) != size for row in self.xi):
            raise ValueError(f"xi: expected a {size} × {size} matrix, with one row and one column per α")
        return self


class Quantiles(ResultModel):
    """Mean and 5, 25, 50, 75 and 95 % quantiles of ‖Δf‖² over examples, where Δf is the change in the output f."""

    examples: NonNegativeInt
    mean: FiniteFloat
    quantiles: tuple[FiniteFloat, FiniteFloat, FiniteFloat, FiniteFloat, FiniteFloat]


class LocatedTask(ResultModel):
    """Change in the model's output that one vector causes on its own task (`on`) and on the other tasks (`off`)."""

    on: Quantiles
    off: Quantiles
    auroc: FiniteFloat
    by_task: dict[str, Quantiles] = {}


class LocalisationResult(ResultModel):
    """Changes in the model's output that each vector of an arm causes, and the mean AUROC of the vectors."""

    vectors: dict[str, LocatedTask] = Field(min_length=1)
    auroc: FiniteFloat


class DriftPair(ResultModel):
    """Drift that one vector causes on one task, as predicted by a bundle and as measured on data."""

    vector: str
    task: str
    predicted: FiniteFloat
    measured: FiniteFloat


class LayerDrift(DriftPair):
    """Drift that one layer of a vector causes on one task, as predicted by a bundle and as measured on data."""

    block: str


class DriftResult(ResultModel):
    """Drift of whole vectors and of individual layers."""

    pairs: list[DriftPair]
    layers: list[LayerDrift] = []


class Spectrum(ResultModel):
    """Eigenvalues of one curvature factor, at selected ranks."""

    name: str
    side: str
    size: NonNegativeInt
    trace: FiniteFloat
    effective_rank: FiniteFloat
    eigenvalues: list[FiniteFloat]
    ranks: list[NonNegativeInt]

    @model_validator(mode="after")
    def _check_counts(self) -> Spectrum:
        if len(self.eigenvalues) != len(self.ranks):
            counts = f"number of ranks: {len(self.ranks)}, number of eigenvalues: {len(self.eigenvalues)}"
            raise ValueError(f"expected one rank per eigenvalue ({counts})")
        return self


class SpectraResult(ResultModel):
    """Eigenvalues of the curvature factors of one bundle."""

    blocks: list[Spectrum] = Field(min_length=1)


class NegatedTask(ResultModel):
    """Accuracies before and after subtracting the vector of one task."""

    alpha: FiniteFloat
    accuracy: FiniteFloat
    before: FiniteFloat
    chance: FiniteFloat
    removed: FiniteFloat | None
    control: FiniteFloat
    control_before: FiniteFloat
    control_task: str | None = None
    """Name of the control task, or of its substitute if the control task of the plan is itself negated."""


class NegationResult(ResultModel):
    """Results of subtracting the vector of each task of an arm from the model."""

    control: str
    keep: FiniteFloat
    tasks: dict[str, NegatedTask]


class TaskAccuracy(ResultModel):
    """Accuracy with the merged vector, and its ratio to the accuracy with the task's own vector."""

    accuracy: FiniteFloat
    normalized: FiniteFloat | None
    examples: NonNegativeInt | None = None
    perplexity: FiniteFloat | None = None
    """Perplexity per token of a task with completions; null for a task with classes."""


class BestAlpha(ResultModel):
    """The α selected on the validation examples, with the mean accuracies at this α."""

    alpha: FiniteFloat
    validation: FiniteFloat
    test: FiniteFloat


class AddedResult(ResultModel):
    """Accuracies of the model with the merged vector of all tasks."""

    alpha: FiniteFloat
    tasks: dict[str, TaskAccuracy]
    mean: TaskAccuracy
    sweep: SweepResult | None = None
    """Accuracy at every α, if the plan sets `method_alphas`. Null for the first method (see `SeedResult.sweep`)."""
    best: BestAlpha | None = None


class SeedResult(ResultModel):
    """Results of one arm with one seed."""

    seed: int
    individual: PerTask
    individual_perplexity: PerTask = {}
    """Perplexity with each task's own vector; only for tasks with completions."""
    added: dict[str, AddedResult]
    """Accuracies by label of the merge method."""
    sweep: SweepResult | None = None
    """Accuracy of the first merge method at every α."""
    best: BestAlpha | None = None
    """The best α of the first merge method."""
    negation: NegationResult | None = None
    disentanglement: list[DisentanglementResult] | None = None
    localisation: LocalisationResult | None = None
    drift: DriftResult | None = None


class PenaltyResult(ResultModel):
    """The penalty with which an arm was trained."""

    structure: str | None = None
    rule: str | None = None
    rank: int = 1
    data: bool = False
    strength: FiniteFloat
    preset: str | None = None
    every: int = 1
    """Interval in steps between applications of the penalty: 1 means that the penalty was applied at every step."""


class ArmResult(ResultModel):
    """Results of one arm."""

    name: str
    regime: str
    penalty: PenaltyResult | None
    vectors: dict[str, str] | None = None
    """Checkpoints from which the vectors were extracted, by task; null if the vectors were trained."""
    settings: dict[str, Any] | None = None
    """Settings of the arm that override those of the plan."""
    bundle_bytes: FiniteFloat | None = None
    """Mean size in bytes of the bundles that the penalty uses (one bundle per task)."""
    seeds: list[SeedResult] = Field(min_length=1)


class Summary(ResultModel):
    """Means over tasks and seeds for one arm and merge method."""

    arm: str
    method: str
    individual: FiniteFloat
    individual_std: FiniteFloat | None = None
    added: FiniteFloat
    added_std: FiniteFloat | None = None
    normalized: FiniteFloat | None = None
    recovered: FiniteFloat | None = None
    best_alpha: FiniteFloat | None = None
    best: FiniteFloat | None = None
    removed: FiniteFloat | None = None
    control_kept: FiniteFloat | None = None
    auroc: FiniteFloat | None = None
    individual_perplexity: FiniteFloat | None = None
    """Geometric mean of the perplexity with each task's own vector, over all seeds and tasks with completions."""
    added_perplexity: FiniteFloat | None = None


class PlanInfo(ResultModel):
    """Text and hash of the plan."""

    sha256: str
    text: str


class ModelInfo(ResultModel):
    """Name, family and hash of the model."""

    name: str
    family: str
    sha256: str | None


class TaskInfo(ResultModel):
    """Name, number of classes, number of examples and source of a task."""

    name: str
    classes: NonNegativeInt
    train: NonNegativeInt
    test: NonNegativeInt
    source: str | None = None


class MethodInfo(ResultModel):
    """A merge method of the plan."""

    label: str
    """Name of the method in the results."""
    name: str
    settings: dict[str, bool | int | float | str | None] = {}
    needs_bundles: bool = False
    compress: str | None = None
    """Codec that compresses the bundles used by the method."""


class BundleInfo(ResultModel):
    """File, size and settings of the bundle of one task."""

    task: str
    structure: str
    seed: int | None
    compress: str | None = None
    settings: dict[str, Any] = {}
    """Settings for the estimate."""
    file: str
    bytes: NonNegativeInt
    dense_bytes: NonNegativeInt | None
    sha256: str


class MergeInfo(ResultModel):
    """File, size, settings and relative error of a merged bundle."""

    rule: str
    rank: int = 1
    structure: str
    without: str | None
    seed: int | None
    file: str
    bytes: NonNegativeInt
    error: FiniteFloat | None


class BaseScore(ResultModel):
    """Accuracy of the base model on one task."""

    accuracy: FiniteFloat
    examples: NonNegativeInt
    perplexity: FiniteFloat | None = None


class BaseInfo(ResultModel):
    """Accuracies of the base model."""

    tasks: dict[str, BaseScore]
    mean: FiniteFloat


class Results(ResultModel):
    """The content of `results.json`."""

    format: Literal["kfacpack.run/1"]
    name: str
    versions: dict[str, str]
    plan: PlanInfo
    commands: list[str]
    model: ModelInfo
    tasks: list[TaskInfo] = Field(min_length=1)
    seeds: list[int]
    methods: list[MethodInfo] = []
    bundles: list[BundleInfo]
    merges: list[MergeInfo]
    base: BaseInfo
    arms: list[ArmResult] = Field(min_length=1)
    spectra: SpectraResult | None = None
    summary: list[Summary] = Field(min_length=1)

    @property
    def names(self) -> list[str]:
        """Names of the tasks."""
        return [task.name for task in self.tasks]

    @model_validator(mode="after")
    def _check_consistency(self) -> Results:
        tasks = set(self.names)
        if len(tasks) != len(self.tasks):
            raise ValueError("duplicate task names")
        if len({arm.name for arm in self.arms}) != len(self.arms):
            raise ValueError("duplicate arm names")
        if set(self.base.tasks) != tasks:
            raise ValueError("base: tasks differ from those listed in `tasks`")
        for arm in self.arms:
            methods = list(arm.seeds[0].added)
            alphas = arm.seeds[0].sweep and arm.seeds[0].sweep.alphas
            for seed in arm.seeds:
                where = f"arm {arm.name!r}, seed {seed.seed}"
                by_task = [set(seed.individual), *(set(added.tasks) for added in seed.added.values())]
                if any(names != tasks for names in by_task):
                    raise ValueError(f"{where}: tasks differ from those listed in `tasks`")
                if list(seed.added) != methods or (seed.sweep and seed.sweep.alphas) != alphas:
                    raise ValueError(f"{where}: methods or alphas differ from those of the arm's first seed")
        return self


class StageTime(ResultModel):
    """Duration of one stage."""

    name: str
    key: str | None = None
    seconds: FiniteFloat
    reused: bool = False


class Times(ResultModel):
    """The content of `times.json`."""

    stages: list[StageTime]
    others: list[StageTime] = Field(default_factory=list)
    """Stages of other plans that were run in the same folder."""
    seconds: FiniteFloat
    peak_bytes: NonNegativeInt | None = None


ResultT = TypeVar("ResultT", bound=ResultModel)


def read_results(folder: Path) -> Results:
    """Reads and validates `results.json` in the folder of a run.

    Raises:
        KfacpackError: If the file is missing or damaged, or has another format.
    """
    file = folder / "results.json"
    if not file.is_file():
        raise KfacpackError(f"{folder}: no results.json in this folder; expected a folder that `kfacpack run` wrote")
    content = _read_json(file)
    version = content.get("format") if isinstance(content, dict) else None
    if version != FORMAT:
        raise KfacpackError(
            f"{file}: not the results of a run: format is {printable(repr(version))}, expected {FORMAT!r}. "
            "Pass a folder that `kfacpack run` wrote; to read the results of a newer version, install that version"
        )
    return _validate(file, content, Results)


def read_times(folder: Path) -> Times | None:
    """Reads and validates `times.json` in the folder of a run, or returns None if there is no such file.

    Raises:
        KfacpackError: If the file is damaged.
    """
    file = folder / "times.json"
    return _validate(file, _read_json(file), Times) if file.is_file() else None


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise KfacpackError(f"{file}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        problem = f"{file}: damaged: not valid JSON ({error})"
        raise KfacpackError(f"{problem}. Run the plan again with `kfacpack run`") from error


def _validate(file: Path, content: Any, kind: type[ResultT]) -> ResultT:
    try:
        model = kind.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key_path = printable(".".join(map(str, first["loc"])))
        shows_value = first["type"] not in ("value_error", "missing")
        value = printable(repr(first["input"]), max_length=60) if shows_value else ""
        problem = printable(first["msg"].removeprefix("Value error, "))
        raise KfacpackError(
            f"{file}: {key_path + ': ' if key_path else ''}{problem}{f', got {value}' if value else ''}. "
            "The file does not have the format that `kfacpack run` writes; run the plan again"
        ) from error
    if unknown := list(unknown_keys(model)):
        problem = f"{file}: unknown keys are ignored: {printable(abbreviate(unknown, limit=3))}"
        warnings.warn(
            UnknownKeyWarning(f"{problem}. The keys may be misspelt, or written by a newer version of kfacpack"),
            stacklevel=4,
        )
    return model
