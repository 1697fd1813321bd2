"""The criteria by which claims are decided.

The criteria are part of the plans: they are stated before a plan is run, and do not depend on its results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from measures import Results, better, described, difference, percent, points, rank_correlation

HOLDS, FAILS, UNTESTABLE = "holds", "does not hold", "cannot be tested at this size"
Verdict = tuple[str, str]
"""The verdict and the sentence with its reason."""
Reading = Callable[[Results], list[float]]
"""Reads one number per seed."""
FLAT = 0.02
"""Largest change of an accuracy that is called flat: 2 points."""
RANK_CORRELATION = 0.8
"""Rank correlation from which the drift counts as predicted, as on the page of results."""


@dataclass(frozen=True)
class Claim:
    """A claim and its criterion."""

    text: str
    decide: Callable[[Results], Verdict]


def at_one(arm: str, method: str | None = None) -> Reading:
    """Reads the accuracy of an arm at α = 1."""
    return lambda results: results.sum_at_one(arm, method)


def at_best(arm: str, method: str | None = None) -> Reading:
    """Reads the accuracy of an arm at its best α."""
    return lambda results: results.at_best(arm, method)


def auroc(arm: str) -> Reading:
    """Reads the AUROC of an arm."""
    return lambda results: results.auroc(arm)


def verdict(holds: bool, reason: str) -> Verdict:
    """Returns the verdict of a claim that can be tested."""
    return (HOLDS if holds else FAILS), reason


def exceeds(text: str, *pairs: tuple[Reading, Reading], unit: str = "points") -> Claim:
    """A claim that one number is larger than another, in every pair."""

    def decide(results: Results) -> Verdict:
        numbers = [(one(results), other(results)) for one, other in pairs]
        gains = ", and ".join(described(difference(one, other), unit) for one, other in numbers)
        return verdict(all(better(one, other) for one, other in numbers), f"The difference is {gains}.")

    return Claim(text, decide)


def within(
    text: str, bound: float, one: Sequence[Reading] | Reading, other: Reading, effect: Reading | None = None
) -> Claim:
    """A claim that one number, or each of several, is at most `bound` below another.

    Args:
        text: The claim.
        bound: The bound, as a fraction.
        one: The numbers that may be lower.
        other: The number that they are compared with.
        effect: The number without the method. The claim cannot be tested unless `other` exceeds it by two bounds.
            None to omit this condition.
    """
    readings = [one] if callable(one) else one

    def decide(results: Results) -> Verdict:
        reference = other(results)
        if effect and fmean(gain := difference(reference, effect(results))) < 2 * bound:
            problem = f"The penalty changes the sum by only {described(gain)}"
            return UNTESTABLE, f"{problem}, so a bound of {100 * bound:.0f} does not separate the arms."
        differences = [difference(reading(results), reference) for reading in readings]
        listed = ", and ".join(map(described, differences))
        holds = all(fmean(values) >= -bound for values in differences)
        return verdict(holds, f"The difference is {listed}; the bound is −{100 * bound:.0f}.")

    return Claim(text, decide)


def ordered(text: str, *arms: str) -> Claim:
    """A claim that each arm is better than the next at α = 1."""

    def decide(results: Results) -> Verdict:
        pairs = list(pairwise(arms))
        holds = all(better(results.sum_at_one(one), results.sum_at_one(other)) for one, other in pairs)
        steps = (
            f"{one} − {other}: {described(difference(results.sum_at_one(one), results.sum_at_one(other)))}"
            for one, other in pairs
        )
        return verdict(holds, f"{'; '.join(steps)}.")

    return Claim(text, decide)


def flat_over_alpha(text: str, arm: str, without: str) -> Claim:
    """A claim that the accuracy of an arm is flat for α from 0.7 to 1.3."""

    def decide(results: Results) -> Verdict:
        own, other = results.spread_over_alpha(arm), results.spread_over_alpha(without)
        numbers = f"{points(own)} points with KFAC and {points(other)} without"
        reason = f"The largest deviation from α = 1 is {numbers}; the bound is {100 * FLAT:.0f}."
        return verdict(fmean(own) <= FLAT, reason)

    return Claim(text, decide)


def flat_over_strength(text: str, *arms: str) -> Claim:
    """A claim that the accuracy is the same in arms with different λ."""

    def decide(results: Results) -> Verdict:
        means = {arm: fmean(results.sum_at_one(arm)) for arm in arms}
        width = max(means.values()) - min(means.values())
        listed = ", ".join(f"{arm} {percent(value)}" for arm, value in means.items())
        return verdict(width <= FLAT, f"{listed}: a range of {100 * width:.1f} points; the bound is {100 * FLAT:.0f}.")

    return Claim(text, decide)


def disentangled(text: str, arm: str, without: str) -> Claim:
    """A claim that the mean of ξ over the grid is lower for every pair of tasks."""

    def means(results: Results, name: str) -> list[float]:
        grids = [grid for seed in results.arms[name]["seeds"] for grid in seed["disentanglement"]]
        return [fmean(value for line in grid["xi"] for value in line) for grid in grids]

    def decide(results: Results) -> Verdict:
        pairs = list(zip(means(results, arm), means(results, without), strict=True))
        if not pairs:
            return UNTESTABLE, "No grid was measured."
        listed = "; ".join(f"{one:.3f} instead of {other:.3f}" for one, other in pairs)
        reason = f"Mean ξ over the grid, by pair of tasks, first seed: {listed}."
        return verdict(all(one < other for one, other in pairs), reason)

    return Claim(text, decide)


def predicted_drift(text: str, arm: str) -> Claim:
    """A claim that τᵀGτ ranks pairs of a vector and another task as the measured drift does."""

    def decide(results: Results) -> Verdict:
        pairs = [pair for seed in results.arms[arm]["seeds"] for pair in seed["drift"]]
        if len(pairs) < 3:
            return UNTESTABLE, "No drift was measured."
        value = rank_correlation([predicted for predicted, _ in pairs], [measured for _, measured in pairs])
        counted = f"{len(pairs)} pairs of a vector and another task, first seed"
        reason = f"Spearman's rank correlation is {value:.2f} ({counted}); the bound is {RANK_CORRELATION}."
        return verdict(value >= RANK_CORRELATION, reason)

    return Claim(text, decide)


def negated(text: str, arm: str, without: str, bound: float = 0.01) -> Claim:
    """A claim that the accuracy of the target is lower, while that of the control is at most `bound` lower."""

    def decide(results: Results) -> Verdict:
        one, other = results.negation(without, "accuracy"), results.negation(arm, "accuracy")
        control = difference(results.negation(arm, "control"), results.negation(without, "control"))
        gain = described(difference(one, other))
        reason = f"The target is lower by {gain}; the control changes by {described(control)}, with the bound "
        return verdict(better(one, other) and fmean(control) >= -bound, f"{reason}−{100 * bound:.0f}.")

    return Claim(text, decide)


def more_probes(text: str, one: str, more: str, undivided: str, bound: float = 0.01) -> Claim:
    """A claim that more probes are at most `bound` below one probe; also states the effect of not dividing by M."""

    def decide(results: Results) -> Verdict:
        first = results.sum_at_one(one)
        gap = difference(results.sum_at_one(more), first)
        reason = f"{more} − one: {described(gap)}, with the bound −{100 * bound:.0f}; without the division by M: "
        other = described(difference(results.sum_at_one(undivided), first))
        return verdict(fmean(gap) >= -bound, f"{reason}{other}.")

    return Claim(text, decide)


def compressed(text: str, arm: str, whole: str, bound: float = 0.01, share: float = 0.14) -> Claim:
    """A claim that bundles with at most `share` of the bytes lose at most `bound`."""

    def decide(results: Results) -> Verdict:
        gap, size = difference(results.sum_at_one(arm), results.sum_at_one(whole)), results.share_of_bytes(arm, whole)
        reason = f"The difference is {described(gap)}, with the bound −{100 * bound:.0f}, at {percent(size)} of the "
        return verdict(fmean(gap) >= -bound and size <= share, f"{reason}bytes, with the bound {percent(share, 0)}.")

    return Claim(text, decide)


def best_method(text: str, one: tuple[str, str], arm: str) -> Claim:
    """A claim that an arm and method, at α = 1, is better than every other method of an arm at its best α.

    Args:
        text: The claim.
        one: Arm and method.
        arm: The arm whose other methods are compared.
    """

    def decide(results: Results) -> Verdict:
        own = results.sum_at_one(*one)
        others = [method for method in results.methods(arm) if (arm, method) != one and method != "curvature"]
        gains = {method: difference(own, results.at_best(arm, method)) for method in others}
        listed = ", ".join(f"{method} {described(values)}" for method, values in gains.items())
        holds = all(better(own, results.at_best(arm, method)) for method in others)
        return verdict(holds, f"The difference from each method at its best α: {listed}.")

    return Claim(text, decide)


def cheaper(text: str, one: str, other: str, ratio: float, base: str | None = None) -> Claim:
    """A claim that one time is at most `ratio` times another.

    Args:
        text: The claim.
        one: Name of the first measurement.
        other: Name of the second one.
        ratio: The bound.
        base: Name of a measurement whose time is subtracted from both.
    """

    def decide(results: Results) -> Verdict:
        costs = results.content["costs"]
        start = costs[base]["seconds"] if base else 0.0
        first, second = costs[one]["seconds"] - start, costs[other]["seconds"] - start
        reason = f"The ratio is {first / second:.3g}; the bound is {ratio:g}."
        return verdict(first <= ratio * second, reason)

    return Claim(text, decide)
