"""What a file has that nobody reads: keys of a newer version, or misspelt ones.

results.json and times.json, as a run leaves them: read, and refused when they are anything else.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from kfacpack.errors import KfacpackError, printable


class UnknownKeyWarning(UserWarning):
    """A file has keys that are left aside."""


def unknown_keys(said: Any, place: tuple[str, ...] = ()) -> Iterator[str]:
    """Where they stand, as arms.0.regimen; `said` was read by models that allow them."""
    if isinstance(said, BaseModel):
        yield from (".".join((*place, key)) for key in said.model_extra or ())
        for name in type(said).model_fields:
            yield from unknown_keys(getattr(said, name), (*place, name))
    elif isinstance(said, dict):
        for key, value in said.items():
            yield from unknown_keys(value, (*place, str(key)))
    elif isinstance(said, list | tuple):
        for number, value in enumerate(said):
            yield from unknown_keys(value, (*place, str(number)))


FORMAT = "kfacpack.run/1"
PerTask = dict[str, FiniteFloat]
NonNegativeInt = Annotated[int, Field(ge=0)]


class ResultModel(BaseModel):
    # What a later version adds is no harm, and is told: it may also be a word that is misspelt.
    model_config = ConfigDict(extra="allow", frozen=True)


class SweepResult(ResultModel):
    alphas: list[FiniteFloat] = Field(min_length=1)
    tasks: dict[str, list[FiniteFloat]]
    mean: list[FiniteFloat]

    @model_validator(mode="after")
    def _as_long_as_alphas(self) -> SweepResult:
        if any(len(each) != len(self.alphas) for each in (self.mean, *self.tasks.values())):
            raise ValueError(f"needs one accuracy for each of the {len(self.alphas)} alphas")
        return self


class DisentanglementResult(ResultModel):
    tasks: tuple[str, str]
    alphas: list[FiniteFloat] = Field(min_length=1)
    xi: list[list[FiniteFloat]]
    examples: dict[str, NonNegativeInt]

    @model_validator(mode="after")
    def _square(self) -> DisentanglementResult:
        size = len(self.alphas)
        if len(self.xi) != size or any(len(row) != size for row in self.xi):
            raise ValueError(f"xi needs {size} rows of {size} numbers, as there are alphas")
        return self


class Quantiles(ResultModel):
    examples: NonNegativeInt
    mean: FiniteFloat
    quantiles: tuple[FiniteFloat, FiniteFloat, FiniteFloat, FiniteFloat, FiniteFloat]


class LocatedTask(ResultModel):
    on: Quantiles
    off: Quantiles
    auroc: FiniteFloat
    by_task: dict[str, Quantiles] = {}


class LocalisationResult(ResultModel):
    vectors: dict[str, LocatedTask] = Field(min_length=1)
    auroc: FiniteFloat


class DriftPair(ResultModel):
    vector: str
    task: str
    predicted: FiniteFloat
    measured: FiniteFloat


class LayerDrift(DriftPair):
    block: str


class DriftResult(ResultModel):
    pairs: list[DriftPair]
    layers: list[LayerDrift] = []


class Spectrum(ResultModel):
    name: str
    side: str
    size: NonNegativeInt
    trace: FiniteFloat
    effective_rank: FiniteFloat
    eigenvalues: list[FiniteFloat]
    ranks: list[NonNegativeInt]

    @model_validator(mode="after")
    def _as_many(self) -> Spectrum:
        if len(self.eigenvalues) != len(self.ranks):
            raise ValueError("needs as many ranks as eigenvalues")
        return self


class SpectraResult(ResultModel):
    blocks: list[Spectrum] = Field(min_length=1)


class NegatedTask(ResultModel):
    alpha: FiniteFloat
    accuracy: FiniteFloat
    before: FiniteFloat
    chance: FiniteFloat
    removed: FiniteFloat | None
    control: FiniteFloat
    control_before: FiniteFloat
    control_task: str | None = None
    """Where it is not the one of all the others: a control cannot be negated and kept."""


class NegationResult(ResultModel):
    control: str
    keep: FiniteFloat
    tasks: dict[str, NegatedTask]


class TaskAccuracy(ResultModel):
    accuracy: FiniteFloat
    normalized: FiniteFloat | None
    examples: NonNegativeInt | None = None


class AddedResult(ResultModel):
    alpha: FiniteFloat
    tasks: dict[str, TaskAccuracy]
    mean: TaskAccuracy


class BestAlpha(ResultModel):
    alpha: FiniteFloat
    validation: FiniteFloat
    test: FiniteFloat


class SeedResult(ResultModel):
    seed: int
    individual: PerTask
    added: dict[str, AddedResult]
    sweep: SweepResult | None = None
    best: BestAlpha | None = None
    negation: NegationResult | None = None
    disentanglement: list[DisentanglementResult] | None = None
    localisation: LocalisationResult | None = None
    drift: DriftResult | None = None


class PenaltyResult(ResultModel):
    structure: str | None = None
    rule: str | None = None
    rank: int = 1
    data: bool = False
    strength: FiniteFloat


class ArmResult(ResultModel):
    name: str
    regime: str
    penalty: PenaltyResult | None
    seeds: list[SeedResult] = Field(min_length=1)


class Summary(ResultModel):
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


class PlanInfo(ResultModel):
    sha256: str
    text: str


class ModelInfo(ResultModel):
    name: str
    family: str
    sha256: str | None


class TaskInfo(ResultModel):
    name: str
    classes: NonNegativeInt
    train: NonNegativeInt
    test: NonNegativeInt
    source: str | None = None


class BundleInfo(ResultModel):
    task: str
    structure: str
    seed: int | None
    file: str
    bytes: NonNegativeInt
    dense_bytes: NonNegativeInt | None
    sha256: str


class MergeInfo(ResultModel):
    rule: str
    rank: int = 1
    structure: str
    without: str | None
    seed: int | None
    file: str
    bytes: NonNegativeInt
    error: FiniteFloat | None


class BaseScore(ResultModel):
    accuracy: FiniteFloat
    examples: NonNegativeInt


class BaseInfo(ResultModel):
    tasks: dict[str, BaseScore]
    mean: FiniteFloat


class Results(ResultModel):
    format: Literal["kfacpack.run/1"]
    name: str
    versions: dict[str, str]
    plan: PlanInfo
    commands: list[str]
    model: ModelInfo
    tasks: list[TaskInfo] = Field(min_length=1)
    seeds: list[int]
    bundles: list[BundleInfo]
    merges: list[MergeInfo]
    base: BaseInfo
    arms: list[ArmResult] = Field(min_length=1)
    spectra: SpectraResult | None = None
    summary: list[Summary] = Field(min_length=1)

    @property
    def names(self) -> list[str]:
        return [task.name for task in self.tasks]

    @model_validator(mode="after")
    def _of_one_set_of_tasks(self) -> Results:
        wanted = set(self.names)
        if len(wanted) != len(self.tasks):
            raise ValueError("names a task twice")
        if len({arm.name for arm in self.arms}) != len(self.arms):
            raise ValueError("names an arm twice")
        if set(self.base.tasks) != wanted:
            raise ValueError("base: has other tasks than the list of tasks")
        for arm in self.arms:
            methods = list(arm.seeds[0].added)
            alphas = arm.seeds[0].sweep and arm.seeds[0].sweep.alphas
            for seed in arm.seeds:
                where = f"arm {arm.name!r}, seed {seed.seed}"
                found = [set(seed.individual), *(set(added.tasks) for added in seed.added.values())]
                if any(names != wanted for names in found):
                    raise ValueError(f"{where}: has other tasks than the list of tasks")
                if list(seed.added) != methods or (seed.sweep and seed.sweep.alphas) != alphas:
                    raise ValueError(f"{where}: has other methods or alphas than the arm's first seed")
        return self


class StageTime(ResultModel):
    name: str
    key: str | None = None
    seconds: FiniteFloat
    reused: bool = False


class Times(ResultModel):
    stages: list[StageTime]
    seconds: FiniteFloat
    peak_bytes: NonNegativeInt | None = None


ResultT = TypeVar("ResultT", bound=ResultModel)


def read_results(folder: Path) -> Results:
    file = folder / "results.json"
    if not file.is_file():
        raise KfacpackError(f"{folder}: has no results.json; a run's folder is expected, as `kfacpack run` makes it")
    said = _read_json(file)
    found = said.get("format") if isinstance(said, dict) else None
    if found != FORMAT:
        raise KfacpackError(
            f"{file}: is no results of a run: its format is {printable(repr(found))}, expected {FORMAT!r}. "
            "Name the folder that `kfacpack run` made; one of a newer kfacpack needs that one to report"
        )
    return _checked(file, said, Results)


def read_times(folder: Path) -> Times | None:
    file = folder / "times.json"
    return _checked(file, _read_json(file), Times) if file.is_file() else None


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise KfacpackError(f"{file}: could not be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise KfacpackError(f"{file}: is damaged: no JSON ({error}). Make it again with `kfacpack run`") from error


def _checked(file: Path, said: Any, kind: type[ResultT]) -> ResultT:
    try:
        found = kind.model_validate(said)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = printable(".".join(map(str, first["loc"])))
        value = printable(repr(first["input"]), longest=60) if first["type"] != "value_error" else ""
        problem = printable(first["msg"].removeprefix("Value error, "))
        raise KfacpackError(
            f"{file}: {place + ': ' if place else ''}{problem}{f', found {value}' if value else ''}. "
            "It is not as `kfacpack run` writes it; make it again"
        ) from error
    if unknown := list(unknown_keys(found)):
        some = ", ".join(unknown[:3]) + (f" and {len(unknown) - 3} more" if len(unknown) > 3 else "")
        problem = f"{file}: has keys that are not known here and are left out: {printable(some)}"
        warnings.warn(UnknownKeyWarning(f"{problem}. Are they misspelt, or of a newer kfacpack?"), stacklevel=4)
    return found
