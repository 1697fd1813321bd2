"""Means over seeds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean, median, stdev

from kfacpack.reporting.content import Cell, Kind
from kfacpack.reporting.results import Disentanglement, Pair, Seed, Sweep


def over_seeds(kind: Kind, values: Iterable[float | None]) -> Cell:
    """Their mean and, of several, the standard deviation; those that are missing are left out."""
    found = [value for value in values if value is not None]
    if not found:
        return Cell(kind=kind, value=None)
    return Cell(kind=kind, value=fmean(found), std=stdev(found) if len(found) > 1 else None)


def mean_sweep(seeds: Sequence[Seed]) -> Sweep | None:
    sweeps = [seed.sweep for seed in seeds if seed.sweep]
    if not sweeps:
        return None
    tasks = {task: _means([each.tasks[task] for each in sweeps]) for task in sweeps[0].tasks}
    return Sweep(alphas=sweeps[0].alphas, tasks=tasks, mean=_means([each.mean for each in sweeps]))


def mean_maps(seeds: Sequence[Seed]) -> list[tuple[Disentanglement, int]]:
    """ξ of each pair, the mean over the seeds that have it at the same α, and how many these are."""
    groups: dict[tuple[object, ...], list[Disentanglement]] = {}
    for seed in seeds:
        for each in seed.disentanglement or []:
            groups.setdefault((each.tasks, tuple(each.alphas)), []).append(each)
    made = []
    for group in groups.values():
        xi = [_means(rows) for rows in zip(*(each.xi for each in group), strict=True)]
        made.append((group[0].model_copy(update={"xi": xi}), len(group)))
    return made


def ratios(pairs: Iterable[Pair]) -> tuple[Cell, Cell]:
    """Of predicted to measured: the median, and the share that is within a factor of two."""
    found = [pair.predicted / pair.measured for pair in pairs if pair.measured > 0]
    if not found:
        return Cell(kind="number", value=None), Cell(kind="percent", value=None)
    near = sum(0.5 <= ratio <= 2 for ratio in found) / len(found)
    return Cell(kind="number", value=median(found)), Cell(kind="percent", value=near)


def _means(columns: Sequence[Sequence[float]]) -> list[float]:
    return [fmean(values) for values in zip(*columns, strict=True)]
