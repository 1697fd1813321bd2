"""What a run found, in one JSON: nothing in it depends on the clock or on how often the run was interrupted."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from hashlib import sha256
from importlib.metadata import version
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from kfacpack.evaluation.sweep import as_table, best, evaluation_result, normalized
from kfacpack.experiments.plan import BASELINE
from kfacpack.experiments.results_schema import FORMAT
from kfacpack.format.reader import Bundle

if TYPE_CHECKING:
    from kfacpack.experiments.artifact_stages import EstimateStage, MergeStage
    from kfacpack.experiments.plan import ArmSection, NegationSection
    from kfacpack.experiments.stage_graph import ArmRun, StageGraph


_NOISE = 1e-9
"""Means of the same accuracies differ by rounding; one example of ten million is a hundred times that."""


def results(graph: StageGraph, text: str) -> dict[str, Any]:
    plan, shop = graph.plan, graph.shop
    base = {task: stage.read() for task, stage in graph.base.items()}
    tasks = [shop.task(each.name) for each in plan.tasks]
    arms = [
        {
            "name": arm,
            "regime": plan.training_of(arm).regime,
            "penalty": _penalty(said),
            "seeds": [_trial(trial, plan.evaluation.negation) for trial in graph.trials if trial.arm == arm],
        }
        for arm, said in plan.arms.items()
    ]
    return {
        "format": FORMAT,
        "name": plan.name,
        "versions": {
            "kfacpack": version("kfacpack"),
            "python": platform.python_version(),
            **shop.environment,
        },
        "plan": {"sha256": sha256(text.encode()).hexdigest(), "text": text},
        "commands": [command for stage in graph.in_order() if (command := stage.command())],
        "model": {"name": plan.model.name, "family": shop.model.family, "sha256": shop.model_key},
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
        "bundles": [_bundle(stage, graph) for stage in graph.bundles.values()],
        "merges": [_merge(stage, graph) for stage in graph.merges.values()],
        "base": {"tasks": base, "mean": fmean(each["accuracy"] for each in base.values())},
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
    return {"structure": arm.penalty, "rule": arm.rule, **rank, "strength": arm.lam}


def _bundle(stage: EstimateStage, graph: StageGraph) -> dict[str, Any]:
    bundle = Bundle(stage.path)
    return {
        "task": stage.task,
        "structure": stage.structure,
        "seed": stage.seed,
        "file": str(stage.path.relative_to(graph.root)),
        "bytes": bundle.nbytes,
        "dense_bytes": bundle.dense_bytes,
        "sha256": bundle.digest,
    }


def _merge(stage: MergeStage, graph: StageGraph) -> dict[str, Any]:
    first = stage.bundles[0]
    return {
        "rule": stage.rule,
        "rank": stage.rank,
        "structure": first.structure,
        "without": stage.without,
        "seed": first.seed,
        "file": str(stage.path.relative_to(graph.root)),
        "bytes": stage.path.stat().st_size,
        "error": stage.error(),
    }


def _trial(trial: ArmRun, negation: NegationSection | None) -> dict[str, Any]:
    own = {task: stage.at(1.0).accuracy for task, stage in trial.own.items()}
    added = {
        method: {"alpha": 1.0, **evaluation_result({task: stage.at(1.0) for task, stage in stages.items()}, own)}
        for method, stages in trial.sums.items()
    }
    first = next(iter(trial.sums.values()))
    alphas = next(iter(first.values())).alphas
    table = as_table(alphas, {task: stage.scores() for task, stage in first.items()})
    held_out = as_table(alphas, {task: stage.scores() for task, stage in trial.validation.items()})
    chosen = best(alphas, [stage.scores() for stage in trial.validation.values()])
    negated: dict[str, Any] = {}
    for stage in trial.negated.values():
        found = stage.read()
        for task, entry in found["tasks"].items():
            negated[task] = {**entry, "control_task": found["control"]}
    return {
        "seed": trial.seed,
        "individual": own,
        "added": added,
        "sweep": table,
        "best": {"alpha": alphas[chosen], "validation": held_out["mean"][chosen], "test": table["mean"][chosen]},
        "negation": {"control": negation.control, "keep": negation.keep, "tasks": negated}
        if negation and negated
        else None,
        "disentanglement": [stage.read() for stage in trial.pairs] or None,
        "localisation": trial.localisation.read() if trial.localisation else None,
        "drift": trial.drift.read() if trial.drift else None,
    }


def summary(arms: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for each arm and method: means over tasks and seeds, and the spread over seeds."""
    lines = [_line(arm, method) for arm in arms for method in arm["seeds"][0]["added"]]
    without = next((line for line in lines if line["arm"] == BASELINE), None)
    for line in lines:
        lost = without["individual"] - without["added"] if without else 0.0
        fair = without is not None and lost > _NOISE and line["arm"] != BASELINE and line["method"] == without["method"]
        line["recovered"] = (line["added"] - without["added"]) / lost if fair and without else None
    return lines


def _line(arm: dict[str, Any], method: str) -> dict[str, Any]:
    seeds = arm["seeds"]
    own = [fmean(each["individual"].values()) for each in seeds]
    added = [each["added"][method]["mean"] for each in seeds]
    first = method == next(iter(seeds[0]["added"]))
    negated = [entry for each in seeds if each["negation"] for entry in each["negation"]["tasks"].values()]
    return {
        "arm": arm["name"],
        "method": method,
        "individual": fmean(own),
        "individual_std": spread(own),
        "added": fmean(each["accuracy"] for each in added),
        "added_std": spread([each["accuracy"] for each in added]),
        "normalized": _mean(each["normalized"] for each in added),
        "best_alpha": fmean(each["best"]["alpha"] for each in seeds) if first else None,
        "best": fmean(each["best"]["test"] for each in seeds) if first else None,
        "removed": _mean(each["removed"] for each in negated),
        "control_kept": _mean(normalized(each["control"], each["control_before"]) for each in negated),
        "auroc": _mean(each["localisation"]["auroc"] for each in seeds if each["localisation"]),
    }


def _mean(values: Iterable[float | None]) -> float | None:
    """Of those that there are, if there are any: a task that was never above chance has no margin to lose."""
    found = [each for each in values if each is not None]
    return fmean(found) if found else None


def spread(values: list[float]) -> float:
    """The standard deviation of a sample; 0 of a single one."""
    return stdev(values) if len(values) > 1 else 0.0
