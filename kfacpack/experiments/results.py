"""Collects the results of a run for `results.json`, and records the progress of the run.

The content of `results.json` depends neither on the clock, nor on how often the run was interrupted, nor on the number
of workers. `RunRecord` writes the events and times of the run to two other files, `events.jsonl` and `times.json`.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, geometric_mean, stdev
from typing import IO, TYPE_CHECKING, Any, Literal

from typing_extensions import NotRequired, TypedDict

from kfacpack.evaluation.sweep import as_table, best, evaluation_result, normalized
from kfacpack.experiments.artifact_stages import CompressStage, MergeStage
from kfacpack.experiments.plan_sections import BASELINE
from kfacpack.experiments.results_schema import FORMAT
from kfacpack.format.reader import Bundle
from kfacpack.format.writer import write_atomically
from kfacpack.vectors.methods import METHODS

if TYPE_CHECKING:
    from kfacpack.experiments.artifact_stages import EstimateStage
    from kfacpack.experiments.measurement_stages import SweepStage
    from kfacpack.experiments.plan_sections import ArmSection, MethodSection, NegationSection
    from kfacpack.experiments.stage import Stage
    from kfacpack.experiments.stage_graph import ArmRun, StageGraph

RESULTS, TIMES, EVENTS = "results.json", "times.json", "events.jsonl"
_NOISE = 1e-9
"""Two mean accuracies that differ by at most this value are considered equal, because of rounding errors.

A single prediction changes an accuracy by more than this value, for example by 1e-7 if there are ten million examples.
"""


def results(graph: StageGraph, text: str) -> dict[str, Any]:
    """Reads the files of all stages and returns the content of `results.json`.

    Args:
        graph: The stages of the run, all of which must have written their files.
        text: The YAML text of the plan.
    """
    plan, context = graph.plan, graph.context
    base = {task: stage.read() for task, stage in graph.base.items()}
    tasks = [context.task(section.name) for section in plan.tasks]
    arms = [
        {
            "name": arm,
            "regime": plan.regime_of(arm),
            "penalty": _penalty(section),
            **({"vectors": section.vectors} if section.vectors else {}),
            **_arm_settings(graph, arm),
            "seeds": [_seed(run, plan.evaluation.negation) for run in graph.arm_runs if run.arm == arm],
        }
        for arm, section in plan.arms.items()
    ]
    return {
        "format": FORMAT,
        "name": plan.name,
        "versions": {
            "kfacpack": version("kfacpack"),
            "python": platform.python_version(),
            **context.environment,
        },
        "plan": {"sha256": sha256(text.encode()).hexdigest(), "text": text},
        "commands": [command for stage in graph.in_order() if (command := stage.command())],
        "model": {"name": plan.model.name, "family": context.model.family, "sha256": context.model_key},
        "tasks": [
            {
                "name": task.name,
                "classes": len(task.classes or ()),
                "train": task.sizes["train"],
                "test": task.sizes["test"],
                "source": task.source,
            }
            for task in tasks
        ],
        "seeds": list(plan.seeds),
        "methods": [_method(method) for method in plan.evaluation.methods],
        "bundles": [
            *(_bundle(stage) for stage in graph.bundles.values()),
            *(_bundle(stage) for stage in graph.compressed.values()),
        ],
        "merges": [_merge(stage) for stage in graph.merges.values()],
        "base": {"tasks": base, "mean": fmean(score["accuracy"] for score in base.values())},
        "arms": arms,
        "spectra": graph.spectra.read() if graph.spectra else None,
        "summary": summary(arms),
    }


def _penalty(arm: ArmSection) -> dict[str, Any] | None:
    if arm.penalty == "none":
        return None
    if arm.penalty == "data":
        return {"data": True, "strength": arm.lam}
    rank = {"rank": arm.rank} if arm.rank > 1 else {}
    preset = {"preset": arm.preset} if arm.preset else {}
    every = {"every": arm.every} if arm.every > 1 else {}
    return {"structure": arm.penalty, "rule": arm.rule, **rank, "strength": arm.lam, **preset, **every}


def _arm_settings(graph: StageGraph, arm: str) -> dict[str, Any]:
    """Returns the settings of an arm that override those of the plan, and the mean size of its bundles."""
    section = graph.plan.arms[arm]
    names = {"compress", "budget", "protects", "curvature", "training"} & section.model_fields_set
    settings = section.model_dump(mode="json", include=names, exclude_unset=True)
    run = next(run for run in graph.arm_runs if run.arm == arm)
    merges = [stage for vector in run.vectors.values() for stage in vector.inputs if isinstance(stage, MergeStage)]
    sizes = {bundle.key: Bundle(bundle.path).nbytes for merge in merges for bundle in merge.bundles}
    return {
        **({"settings": settings} if settings else {}),
        **({"bundle_bytes": fmean(sizes.values())} if sizes else {}),
    }


def _method(method: MethodSection) -> dict[str, Any]:
    return {
        "label": method.label,
        "name": method.name,
        "settings": METHODS[method.name].of(method.settings).settings,
        "needs_bundles": method.needs_bundles,
        "compress": method.compress,
    }


def _bundle(stage: EstimateStage | CompressStage) -> dict[str, Any]:
    bundle, estimate = Bundle(stage.path), stage.bundle if isinstance(stage, CompressStage) else stage
    return {
        "task": estimate.task,
        "structure": estimate.structure,
        "seed": estimate.seed,
        "compress": stage.codec if isinstance(stage, CompressStage) else estimate.options.compress,
        "settings": estimate.section.model_dump(mode="json", exclude={"compress", "batch_size"}),
        "file": stage.file,
        "bytes": bundle.nbytes,
        "dense_bytes": bundle.dense_bytes,
        "sha256": bundle.digest,
    }


def _merge(stage: MergeStage) -> dict[str, Any]:
    first = stage.bundles[0]
    return {
        "rule": stage.rule,
        "rank": stage.rank,
        "structure": first.structure,
        "without": stage.without,
        "seed": first.seed,
        "file": stage.file,
        "bytes": stage.path.stat().st_size,
        "error": stage.error(),
    }


def _seed(run: ArmRun, negation: NegationSection | None) -> dict[str, Any]:
    own = {task: stage.at(1.0) for task, stage in run.own.items()}
    individual = {task: score.accuracy for task, score in own.items()}
    perplexity = {task: score.perplexity for task, score in own.items() if score.perplexity is not None}
    added: dict[str, dict[str, Any]] = {
        label: {"alpha": 1.0, **evaluation_result({task: stage.at(1.0) for task, stage in stages.items()}, individual)}
        for label, stages in run.sums.items()
    }
    # The sweep of the first method is recorded in the entry of the seed itself.
    first, *others = (_sweep(run.sums[label], validation) for label, validation in run.validation.items())
    for label, sweep in zip(list(run.validation)[1:], others, strict=True):
        added[label] |= sweep
    negated: dict[str, Any] = {}
    for stage in run.negated.values():
        values = stage.read()
        for task, entry in values["tasks"].items():
            negated[task] = {**entry, "control_task": values["control"]}
    return {
        "seed": run.seed,
        "individual": individual,
        **({"individual_perplexity": perplexity} if perplexity else {}),
        "added": added,
        **first,
        "negation": {"control": negation.control, "keep": negation.keep, "tasks": negated}
        if negation and negated
        else None,
        "disentanglement": [stage.read() for stage in run.pairs] or None,
        "localisation": run.localisation.read() if run.localisation else None,
        "drift": run.drift.read() if run.drift else None,
    }


def _sweep(test: Mapping[str, SweepStage], validation: Mapping[str, SweepStage]) -> dict[str, Any]:
    """Returns the accuracies of a merged vector at every α, and the best α on the validation split."""
    alphas = next(iter(test.values())).alphas
    table = as_table(alphas, {task: stage.scores() for task, stage in test.items()})
    held_out = as_table(alphas, {task: stage.scores() for task, stage in validation.items()})
    index = best(alphas, [stage.scores() for stage in validation.values()])
    chosen = {"alpha": alphas[index], "validation": held_out["mean"][index], "test": table["mean"][index]}
    return {"sweep": table, "best": chosen}


def summary(arms: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Computes means over tasks and seeds, and standard deviations over seeds, for each arm and merge method.

    Args:
        arms: The `arms` of `results.json`.

    Returns:
        One entry for each arm and merge method. `recovered` is the fraction by which an arm reduces the accuracy loss
        from adding the vectors, compared with the baseline arm. It is None for the baseline arm itself and for all
        methods except the first. It is also None if there is no baseline arm, or if this arm loses no accuracy.
    """
    lines = [_line(arm, method) for arm in arms for method in arm["seeds"][0]["added"]]
    baseline = next((line for line in lines if line["arm"] == BASELINE), None)
    for line in lines:
        line["recovered"] = _recovered(line, baseline) if baseline else None
    return lines


def _recovered(line: dict[str, Any], baseline: dict[str, Any]) -> float | None:
    lost = baseline["individual"] - baseline["added"]
    if lost <= _NOISE or line["arm"] == BASELINE or line["method"] != baseline["method"]:
        return None
    recovered: float = (line["added"] - baseline["added"]) / lost
    return recovered


def _line(arm: dict[str, Any], method: str) -> dict[str, Any]:
    seeds = arm["seeds"]
    individual = [fmean(seed["individual"].values()) for seed in seeds]
    added = [seed["added"][method]["mean"] for seed in seeds]
    first = method == next(iter(seeds[0]["added"]))
    # The best α of the first method is recorded in the entry of the seed itself.
    best_alphas = [seed["best"] if first else seed["added"][method].get("best") for seed in seeds]
    chosen = [entry for entry in best_alphas if entry]
    negated = [entry for seed in seeds if seed["negation"] for entry in seed["negation"]["tasks"].values()]
    perplexities = {
        "individual_perplexity": [value for seed in seeds for value in seed.get("individual_perplexity", {}).values()],
        "added_perplexity": [
            task["perplexity"]
            for seed in seeds
            for task in seed["added"][method].get("tasks", {}).values()
            if "perplexity" in task
        ],
    }
    return {
        "arm": arm["name"],
        "method": method,
        "individual": fmean(individual),
        "individual_std": spread(individual),
        "added": fmean(mean["accuracy"] for mean in added),
        "added_std": spread([mean["accuracy"] for mean in added]),
        "normalized": _mean(mean["normalized"] for mean in added),
        "best_alpha": _mean(entry["alpha"] for entry in chosen),
        "best": _mean(entry["test"] for entry in chosen),
        "removed": _mean(entry["removed"] for entry in negated),
        "control_kept": _mean(normalized(entry["control"], entry["control_before"]) for entry in negated),
        "auroc": _mean(seed["localisation"]["auroc"] for seed in seeds if seed["localisation"]),
        **{key: geometric_mean(values) for key, values in perplexities.items() if values},
    }


def _mean(values: Iterable[float | None]) -> float | None:
    """Averages the values that are not None; returns None if all values are None.

    For example, the removed fraction is None for tasks whose accuracy was not above chance before the subtraction.
    """
    present = [value for value in values if value is not None]
    return fmean(present) if present else None


def spread(values: list[float]) -> float:
    """Returns the sample standard deviation, or 0 for a single value."""
    return stdev(values) if len(values) > 1 else 0.0


class StageEvent(TypedDict):
    """An event of a stage: one line of `events.jsonl`. With `--events`, the line is also printed to stderr."""

    time: float
    """Time of the event, in seconds since 1970-01-01 UTC."""
    event: Literal["started", "finished", "retried", "failed", "interrupted"]
    """Type of the event. `retried` means that the worker died and the stage is computed again. `failed` means that the
    run ends with an error. `interrupted` means that the stage was stopped before it was finished."""
    stage: str
    """Kind and name of the stage, such as bundles/digits.kronecker.seed-0."""
    worker: int
    """Number of the worker, from 1; 0 if the stage runs in the main process."""
    device: str
    """Device on which the stage runs."""
    node: NotRequired[str]
    """Address of the machine; only on a Ray cluster."""
    seconds: NotRequired[float]
    """Duration of a finished stage."""
    error: NotRequired[str]
    """Reason why the stage was retried or failed."""
    log: NotRequired[str]
    """Log file of the worker whose stage was retried or failed."""


class RunRecord:
    """Records the events of a run in `events.jsonl`, and the durations of its stages in `times.json`.

    Args:
        root: Folder of the run.
        stages: All stages of the run.
        events: The file `events.jsonl`, opened for appending.
        on_event: Called with each event.
        peak_bytes: Function that returns the peak memory of the run in bytes.
    """

    def __init__(
        self,
        root: Path,
        stages: Sequence[Stage],
        events: IO[str],
        on_event: Callable[[StageEvent], None],
        peak_bytes: Callable[[], int],
    ):
        self._path = root / TIMES
        self._stages = stages
        self._events = events
        self._on_event = on_event
        self._peak_bytes = peak_bytes
        self._start = time.perf_counter()
        earlier = _read_times(self._path)
        self._seconds = {key: float(stage["seconds"]) for key, stage in earlier.items()}
        own = {stage.key for stage in stages}
        self._others = [{**stage, "reused": True} for key, stage in earlier.items() if key not in own]
        self._executed: set[str] = set()

    def event(self, event: str, stage: Stage, location: Mapping[str, Any], **more: Any) -> None:
        """Records an event of a stage; see `StageEvent` for the fields."""
        name = f"{stage.kind}/{stage.name}"
        content: Any = {"time": round(time.time(), 3), "event": event, "stage": name, **location, **more}
        self._events.write(json.dumps(content, ensure_ascii=False) + "\n")
        self._events.flush()
        self._on_event(content)

    def finished(self, stage: Stage, seconds: float, location: Mapping[str, Any]) -> None:
        """Records that a stage is finished."""
        self.event("finished", stage, location, seconds=round(seconds, 3))
        self._executed.add(stage.key)
        self._seconds[stage.key] = seconds
        self.write_times()

    def write_times(self) -> None:
        """Writes the durations of all stages, including those of other plans that were run in the same folder."""
        content = {
            "stages": [
                {
                    "name": f"{stage.kind}/{stage.name}",
                    "key": stage.key,
                    "seconds": round(self._seconds[stage.key], 3),
                    "reused": stage.key not in self._executed,
                }
                for stage in self._stages
                if stage.key in self._seconds
            ],
            "others": self._others,
            "seconds": round(time.perf_counter() - self._start, 3),
            "peak_bytes": self._peak_bytes(),
        }
        write_atomically(self._path, (json.dumps(content, indent=1) + "\n").encode())


def open_events(root: Path) -> IO[str]:
    """Opens `events.jsonl` for appending, and removes an incomplete last line."""
    path = root / EVENTS
    content = path.read_bytes() if path.exists() else b""
    if content and not content.endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)
    return path.open("a", encoding="utf-8")


def _read_times(path: Path) -> dict[str, dict[str, Any]]:
    """Reads the durations of stages in earlier runs, by key. Ignores an unreadable file, as no result depends on it."""
    try:
        content = json.loads(path.read_bytes())
        stages = [*content["stages"], *content.get("others", ())]
        return {
            str(stage["key"]): {"name": str(stage["name"]), "key": stage["key"], "seconds": float(stage["seconds"])}
            for stage in stages
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}
