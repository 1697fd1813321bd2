"""The shortened results of a plan, and statistics over seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import correlation, fmean, stdev
from typing import Any


class Results:
    """The shortened results of a plan.

    Args:
        content: The content of `results/PLAN.json`.
    """

    def __init__(self, content: dict[str, Any]):
        self.content = content

    @property
    def base(self) -> float:
        """Mean accuracy of the base model."""
        return float(self.content["base"])

    @property
    def arms(self) -> dict[str, Any]:
        """The arms by name."""
        return dict(self.content["arms"])

    def values(self, arm: str, read: Callable[[dict[str, Any]], float]) -> list[float]:
        """Returns one number per seed of an arm."""
        return [read(seed) for seed in self.arms[arm]["seeds"]]

    def methods(self, arm: str) -> list[str]:
        """Returns the labels of the merge methods of an arm."""
        return list(self.arms[arm]["seeds"][0]["methods"])

    def sum_at_one(self, arm: str, method: str | None = None) -> list[float]:
        """Returns the accuracy of the merged vectors at α = 1, by seed; by default of the first method."""
        return self.values(arm, lambda seed: seed["methods"][method or next(iter(seed["methods"]))]["accuracy"])

    def at_best(self, arm: str, method: str | None = None) -> list[float]:
        """Returns the test accuracy at the α that was best on validation examples, by seed."""
        return self.values(arm, lambda seed: seed["methods"][method or next(iter(seed["methods"]))]["best"]["test"])

    def individual(self, arm: str) -> list[float]:
        """Returns the mean accuracy of each task with its own vector, by seed."""
        return self.values(arm, lambda seed: seed["individual"])

    def auroc(self, arm: str) -> list[float]:
        """Returns the AUROC of localisation, by seed."""
        return self.values(arm, lambda seed: seed["auroc"])

    def negation(self, arm: str, key: str) -> list[float]:
        """Returns a number of the negation, such as the accuracy of the target, by seed."""
        return self.values(arm, lambda seed: seed["negation"][key])

    def spread_over_alpha(self, arm: str, low: float = 0.7, high: float = 1.3) -> list[float]:
        """Returns the largest deviation from the accuracy at α = 1 for α from `low` to `high`, by seed."""

        def deviation(seed: dict[str, Any]) -> float:
            sweep = next(iter(seed["methods"].values()))["sweep"]
            pairs = dict(zip(sweep["alphas"], sweep["mean"], strict=True))
            return max(abs(pairs[1.0] - value) for alpha, value in pairs.items() if low <= alpha <= high)

        return self.values(arm, deviation)

    def share_of_bytes(self, arm: str, whole: str) -> float:
        """Returns the size of an arm's bundles relative to those of the arm `whole`."""
        return float(self.arms[arm]["bundle_bytes"] / self.arms[whole]["bundle_bytes"])


def spread(values: Sequence[float]) -> float:
    """Returns the standard deviation over seeds; 0 for one seed."""
    return stdev(values) if len(values) > 1 else 0.0


def difference(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """Returns differences paired by seed."""
    return [first - second for first, second in zip(one, other, strict=True)]


def better(one: Sequence[float], other: Sequence[float]) -> bool:
    """Returns whether the paired difference is positive and at least as large as its standard deviation."""
    differences = difference(one, other)
    return fmean(differences) > 0 and fmean(differences) >= spread(differences)


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Returns Spearman's rank correlation of values without ties."""

    def ranks(values: Sequence[float]) -> list[float]:
        order = sorted(range(len(values)), key=values.__getitem__)
        positions = [0.0] * len(values)
        for rank, index in enumerate(order):
            positions[index] = rank
        return positions

    return correlation(ranks(one), ranks(other))


def percent(value: float, digits: int = 1) -> str:
    """Formats a fraction as percent."""
    return f"{100 * value:.{digits}f} %"


def points(values: Sequence[float]) -> str:
    """Formats the mean and the standard deviation of fractions, in percent."""
    return f"{100 * fmean(values):.1f} ± {100 * spread(values):.1f}"


def described(values: Sequence[float], unit: str = "points") -> str:
    """Describes a difference: mean and standard deviation over seeds."""
    scale = 100 if unit == "points" else 1
    digits = 1 if unit == "points" else 3
    mean = f"{scale * fmean(values):+.{digits}f}".replace("-", "−")
    return f"{mean} ± {scale * spread(values):.{digits}f} {unit}"
