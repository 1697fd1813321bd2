"""The claims of the paper, its numbers, and the criteria by which `results.py` decides them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import log
from statistics import correlation, fmean, stdev
from typing import Any

HOLDS, FAILS, UNTESTABLE = "holds", "does not hold", "cannot be tested at this size"
Verdict = tuple[str, str]
"""The verdict and the sentence with its reason."""


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

    def spread_over_alpha(self, arm: str, low: float = 0.7, high: float = 1.3) -> list[float]:
        """Returns the largest deviation from the accuracy at α = 1 for α from `low` to `high`, by seed."""

        def deviation(seed: dict[str, Any]) -> float:
            sweep = next(iter(seed["methods"].values()))["sweep"]
            pairs = dict(zip(sweep["alphas"], sweep["mean"], strict=True))
            return max(abs(pairs[1.0] - value) for alpha, value in pairs.items() if low <= alpha <= high)

        return self.values(arm, deviation)


def percent(value: float, digits: int = 1) -> str:
    """Formats a fraction as percent."""
    return f"{100 * value:.{digits}f} %"


def points(values: Sequence[float]) -> str:
    """Formats the mean and the standard deviation of fractions, in percent."""
    return f"{100 * fmean(values):.1f} ± {100 * spread(values):.1f}"


def spread(values: Sequence[float]) -> float:
    """Returns the standard deviation over seeds; 0 for one seed."""
    return stdev(values) if len(values) > 1 else 0.0


def difference(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """Returns differences paired by seed."""
    return [first - second for first, second in zip(one, other, strict=True)]


def described(values: Sequence[float], unit: str = "points") -> str:
    """Describes a difference: mean and standard deviation over seeds."""
    scale = 100 if unit == "points" else 1
    digits = 1 if unit == "points" else 3
    return f"{scale * fmean(values):+.{digits}f} ± {scale * spread(values):.{digits}f} {unit}"


def better(one: Sequence[float], other: Sequence[float]) -> bool:
    """Returns whether the paired difference is positive and at least as large as its standard deviation."""
    differences = difference(one, other)
    return fmean(differences) > 0 and fmean(differences) >= spread(differences)


@dataclass(frozen=True)
class Claim:
    """A claim and its criterion."""

    text: str
    decide: Callable[[Results], Verdict]


def exceeds(
    text: str, one: Callable[[Results], list[float]], other: Callable[[Results], list[float]], unit: str = "points"
) -> Claim:
    """A claim that one number is larger than another."""

    def decide(results: Results) -> Verdict:
        first, second = one(results), other(results)
        reason = f"The difference is {described(difference(first, second), unit)}."
        return (HOLDS if better(first, second) else FAILS), reason

    return Claim(text, decide)


def within(
    text: str,
    bound: float,
    one: Callable[[Results], list[float]],
    other: Callable[[Results], list[float]],
    effect: Callable[[Results], list[float]] | None = None,
    unit: str = "points",
) -> Claim:
    """A claim that one number is at most `bound` below another.

    Args:
        text: The claim.
        bound: The bound, as a fraction.
        one: The number that may be lower.
        other: The number that it is compared with.
        effect: The number without the method. The claim cannot be tested unless `other` exceeds it by two bounds.
        unit: Unit of the numbers in the reason.
    """

    def decide(results: Results) -> Verdict:
        first, second = one(results), other(results)
        limit = f"{100 * bound:.0f}" if unit == "points" else f"{bound:g}"
        reason = f"The difference is {described(difference(first, second), unit)}; the bound is {limit}."
        if effect and fmean(difference(second, effect(results))) < 2 * bound:
            gain = described(difference(second, effect(results)))
            return UNTESTABLE, f"The penalty changes the sum by only {gain}, so the bound does not separate the arms."
        return (HOLDS if fmean(difference(first, second)) >= -bound else FAILS), reason

    return Claim(text, decide)


def at_one(arm: str, method: str | None = None) -> Callable[[Results], list[float]]:
    """Reads the accuracy of an arm at α = 1."""
    return lambda results: results.sum_at_one(arm, method)


def at_best(arm: str, method: str | None = None) -> Callable[[Results], list[float]]:
    """Reads the accuracy of an arm at its best α."""
    return lambda results: results.at_best(arm, method)


def auroc(arm: str) -> Callable[[Results], list[float]]:
    """Reads the AUROC of an arm."""
    return lambda results: results.auroc(arm)


@dataclass(frozen=True)
class PlanPage:
    """The section of a plan on the page."""

    title: str
    source: str
    """Tables and figures of the paper with the numbers."""
    claims: tuple[Claim, ...]
    paper: dict[str, str] = field(default_factory=dict)
    """The paper's numbers by arm."""
    paper_heading: str = "paper, ViT-B/32"
    figure: str = "bars"
    table: Callable[[Results, PlanPage], list[str]] = field(default_factory=lambda: arms_table)


def row(*cells: object) -> str:
    """Returns a row of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def table_of(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Returns a Markdown table."""
    return [row(*headings), f"|{'---|' * len(headings)}", *(row(*cells) for cells in rows)]


def arms_table(results: Results, page: PlanPage) -> list[str]:
    """Returns a table with the accuracies of all arms, and further numbers that the plan measured."""
    seeds = [seed for arm in results.arms.values() for seed in arm["seeds"]]
    has_best = all(next(iter(seed["methods"].values()))["best"] for seed in seeds)
    swept = has_best and len(next(iter(seeds[0]["methods"].values()))["sweep"]["alphas"]) > 1
    has_auroc = any(seed["auroc"] is not None for seed in seeds)
    sizes = len({arm["bundle_bytes"] for arm in results.arms.values() if arm["bundle_bytes"]}) > 1
    headings = ["", "own vector", "sum, α = 1", *(["sum, best α"] if swept else [])]
    headings += [
        *(["AUROC"] if has_auroc else []),
        *(["bundle"] if sizes else []),
        *([page.paper_heading] * bool(page.paper)),
    ]
    rows = []
    for name, arm in results.arms.items():
        cells: list[object] = [name, points(results.individual(name)), points(results.sum_at_one(name))]
        cells += [points(results.at_best(name))] if swept else []
        if has_auroc:
            located = arm["seeds"][0]["auroc"] is not None
            cells.append(f"{fmean(results.auroc(name)):.3f} ± {spread(results.auroc(name)):.3f}" if located else "")
        if sizes:
            cells.append(f"{arm['bundle_bytes'] / 1e6:.2f} MB" if arm["bundle_bytes"] else "")
        rows.append([*cells, *([page.paper.get(name, "")] if page.paper else [])])
    return table_of(headings, rows)


def negation_table(results: Results, page: PlanPage) -> list[str]:
    """Returns a table with the accuracy of the negated task and of the control."""

    def numbers(arm: str, key: str) -> str:
        return points(results.values(arm, lambda seed: seed["negation"][key]))

    rows = [
        [name, numbers(name, "accuracy"), numbers(name, "control"), page.paper.get(name, "")] for name in results.arms
    ]
    first = next(iter(results.arms))
    base = ["base model", numbers(first, "before"), numbers(first, "control_before"), page.paper.get("base", "")]
    return table_of(["", "target ↓", "control ↑", f"{page.paper_heading}: target, control"], [base, *rows])


def methods_table(results: Results, page: PlanPage) -> list[str]:
    """Returns a table with the accuracies of all merge methods and arms, at α = 1 and at the best α."""
    methods = list(next(iter(results.arms.values()))["seeds"][0]["methods"])
    headings = ["", *(f"{arm}, {alpha}" for arm in results.arms for alpha in ("α = 1", "best α")), page.paper_heading]
    rows = []
    for method in methods:
        cells = [points(read(arm, method)) for arm in results.arms for read in (results.sum_at_one, results.at_best)]
        rows.append([method, *cells, page.paper.get(method, "")])
    return table_of(headings, rows)


def cost_table(results: Results, page: PlanPage) -> list[str]:
    """Returns a table with times and memory."""
    rows = [
        [name, f"{entry['seconds']:.3g} s", f"{entry['bytes'] / 1e6:.0f} MB", page.paper.get(name, "")]
        for name, entry in results.content["costs"].items()
    ]
    return table_of(["", "time", "peak memory", page.paper_heading], rows)


def _order(results: Results) -> Verdict:
    none, diagonal, kfac = (results.sum_at_one(arm) for arm in ("without", "diagonal", "kfac"))
    holds = better(kfac, diagonal) and better(diagonal, none)
    steps = described(difference(kfac, diagonal)), described(difference(diagonal, none))
    return (HOLDS if holds else FAILS), f"KFAC − diagonal: {steps[0]}; diagonal − none: {steps[1]}."


def _alpha(results: Results) -> Verdict:
    kfac, none = results.spread_over_alpha("kfac"), results.spread_over_alpha("without")
    numbers = f"{points(kfac)} points with KFAC and {points(none)} without"
    reason = f"The largest deviation from α = 1 is {numbers}; the bound is 2."
    return (HOLDS if fmean(kfac) <= 0.02 else FAILS), reason


def _disentangled(results: Results) -> Verdict:
    def mean(arm: str) -> list[float]:
        grids = [grid for seed in results.arms[arm]["seeds"] for grid in seed["disentanglement"]]
        return [fmean(value for line in grid["xi"] for value in line) for grid in grids]

    with_penalty, without = mean("kfac"), mean("without")
    if not with_penalty:
        return UNTESTABLE, "No grid was measured."
    lower = all(one < other for one, other in zip(with_penalty, without, strict=True))
    pairs = "; ".join(f"{one:.3f} instead of {other:.3f}" for one, other in zip(with_penalty, without, strict=True))
    return (HOLDS if lower else FAILS), f"Mean ξ over the grid, by pair of tasks: {pairs}."


def _predicted(results: Results) -> Verdict:
    pairs = [pair for seed in results.arms["without"]["seeds"] for pair in seed["drift"] if min(pair) > 0]
    if len(pairs) < 3:
        return UNTESTABLE, "No drift was measured."
    value = correlation([log(predicted) for predicted, _ in pairs], [log(measured) for _, measured in pairs])
    reason = (
        f"The correlation of the logarithms is {value:.2f} ({len(pairs)} pairs of vector and task); the bound is 0.9."
    )
    return (HOLDS if value >= 0.9 else FAILS), reason


def _negation(results: Results) -> Verdict:
    def read(arm: str, key: str) -> list[float]:
        return results.values(arm, lambda seed: seed["negation"][key])

    target = difference(read("without", "accuracy"), read("kfac", "accuracy"))
    control = difference(read("kfac", "control"), read("without", "control"))
    lower = better(read("without", "accuracy"), read("kfac", "accuracy"))
    reason = f"The target is lower by {described(target)}, and the control changes by {described(control)} (bound −1)."
    return (HOLDS if lower and fmean(control) >= -0.01 else FAILS), reason


def _probes(results: Results) -> Verdict:
    one, eight, undivided = (results.sum_at_one(arm) for arm in ("256 examples", "8 probes", "8 undivided"))
    divided_gap, undivided_gap = difference(eight, one), difference(undivided, one)
    reason = (
        f"Eight probes − one: {described(divided_gap)} (bound −1); without the division: {described(undivided_gap)}."
    )
    return (HOLDS if fmean(divided_gap) >= -0.01 else FAILS), reason


def _block8(results: Results) -> Verdict:
    full, block = results.sum_at_one("kfac"), results.sum_at_one("block-8")
    share = results.arms["block-8"]["bundle_bytes"] / results.arms["kfac"]["bundle_bytes"]
    holds = fmean(difference(block, full)) >= -0.01
    reason = f"The difference is {described(difference(block, full))} at {percent(share, 0)} of the bytes."
    return (HOLDS if holds and share <= 0.14 else FAILS), reason


def _strengths(results: Results) -> Verdict:
    means = {arm: fmean(results.sum_at_one(arm)) for arm in ("x0.1", "x1", "x10")}
    spread_of = max(means.values()) - min(means.values())
    listed = ", ".join(f"{arm} {percent(value)}" for arm, value in means.items())
    return (
        HOLDS if spread_of <= 0.03 else FAILS
    ), f"{listed}: a range of {100 * spread_of:.1f} points; the bound is 3."


def _methods(results: Results) -> Verdict:
    ours, plain = results.sum_at_one("without", "curvature"), results.sum_at_one("without", "sum")
    others = [m for m in next(iter(results.arms.values()))["seeds"][0]["methods"] if m not in ("sum", "curvature")]
    best = max(others, key=lambda method: fmean(results.at_best("without", method)))
    gap = difference(ours, results.at_best("without", best))
    reason = (
        f"Over the sum at α = 1: {described(difference(ours, plain))}; over {best} at its best α: {described(gap)}."
    )
    return (HOLDS if better(ours, plain) else FAILS), reason


def _cost(results: Results) -> Verdict:
    costs = results.content["costs"]
    none, kfac, tjp = (costs[name]["seconds"] for name in ("step, none", "step, KFAC", "step, τJp"))
    reason = f"A step takes {kfac / none:.2f} times as long with KFAC, and {tjp / none:.2f} times with τJp."
    return (HOLDS if kfac - none < 0.5 * (tjp - none) else FAILS), reason


PLANS: dict[str, PlanPage] = {
    "addition": PlanPage(
        "Task addition, linearised",
        "Table 1 (linear fine-tuning), Figures 1, 5 and 9",
        (
            Claim("KFAC > diagonal > no penalty at α = 1", _order),
            within("KFAC, without data, is within 1 point of τJp", 0.01, at_one("kfac"), at_one("tjp")),
            Claim("With KFAC, the accuracy is flat for α from 0.7 to 1.3", _alpha),
            exceeds("Localisation: the AUROC is higher with the penalty", auroc("kfac"), auroc("without"), "AUROC"),
            Claim("Disentanglement: ξ is lower with the penalty", _disentangled),
            Claim("Bundles predict the drift (not in the paper)", _predicted),
        ),
        {"without": "76.7 (best 78.8)", "diagonal": "80.1 (80.2)", "kfac": "85.8 (86.0)", "tjp": "85.0 (85.6)"},
        figure="sweeps",
    ),
    "nonlinear": PlanPage(
        "Task addition, without linearisation",
        "Table 1 (non-linear fine-tuning), Figures 12 and 13",
        (
            exceeds(
                "Attention-only + KFAC > attention-only, best α", at_best("attention + kfac"), at_best("attention")
            ),
            exceeds(
                "Non-linear localisation: the AUROC is higher with the penalty",
                auroc("attention + kfac"),
                auroc("attention"),
                "AUROC",
            ),
            within(
                "TaLoS with masks from bundles is within 2 points of TaLoS (not in the paper)",
                0.02,
                at_best("talos from bundles"),
                at_best("talos"),
            ),
        ),
        {
            "full": "32.0 (best 73.5)",
            "attention": "22.5 (78.2)",
            "attention + kfac": "60.3 (83.1)",
            "talos": "– (79.7)",
        },
        figure="sweeps",
    ),
    "negation": PlanPage(
        "Task negation",
        "Table 2; the control is ImageNet there, and `materials` here",
        (Claim("Negation: lower target accuracy at equal control accuracy", _negation),),
        {"base": "48.4, 63.3", "without": "9.3, 60.5", "kfac": "3.4, 62.4", "tjp": "6.7, 60.8", "full": "20.4, 60.5"},
        table=negation_table,
        figure="negation",
    ),
    "rules": PlanPage(
        "Naive against merged",
        "Table 3; `optimal` is not in the paper",
        (
            within("The merged penalty is within 1 point of the naive one", 0.01, at_one("tak"), at_one("stack")),
            within(
                "`optimal` of rank 1 is within 1 point of the naive one (not in the paper)",
                0.01,
                at_one("optimal"),
                at_one("stack"),
            ),
        ),
        {"stack": "86.5", "tak": "85.8"},
    ),
    "estimation": PlanPage(
        "Number of examples and probes",
        "Figure 7 (left)",
        (
            within(
                "128 examples are within 1 point of 30 % of the data",
                0.01,
                at_one("128 examples"),
                at_one("30 percent"),
            ),
            within("One probe is within 1 point of the exact GGN", 0.01, at_one("256 examples"), at_one("exact")),
            Claim("More probes do not hurt if their sum is divided by M", _probes),
            within(
                "One orthogonal probe is within 1 point of eight Gaussian ones (not in the paper)",
                0.01,
                at_one("256 examples"),
                at_one("8 gaussian"),
            ),
        ),
    ),
    "compression": PlanPage(
        "Compressed bundles",
        "Figure 7 (right) and Figure 14, ViT-B/16",
        (
            Claim("`block:8` is within 1 point at 13 % of the bytes", _block8),
            within(
                "A search over codecs for 13 % of the bytes is within 1 point (not in the paper)",
                0.01,
                at_one("budget-13"),
                at_one("kfac"),
            ),
            within(
                "With `block:8`, the AUROC of localisation is within 0.01",
                0.01,
                auroc("block-8"),
                auroc("kfac"),
                unit="AUROC",
            ),
        ),
        {"kfac": "88.3", "block-8": "87.1"},
        "paper, ViT-B/16",
        figure="bytes",
    ),
    "every": PlanPage(
        "The penalty at every N-th step",
        "Figure 8",
        (
            within(
                "Every 16th step is within 2 points of every step",
                0.02,
                at_one("every 16"),
                at_one("every 1"),
                at_one("without"),
            ),
        ),
        {"every 16": "−1.4 points"},
        "paper, ViT-B/16",
    ),
    "strength": PlanPage(
        "Strength of the penalty",
        "Table 5",
        (Claim("The accuracy is flat over two decades of λ", _strengths),),
        {"without": "75.2", "x0.01": "81.7", "x0.1": "85.1", "x1": "86.0", "x10": "86.4", "x100": "84.4"},
    ),
    "methods": PlanPage(
        "Merge methods",
        "Figure 4 and Table 4; the numbers are those of linear fine-tuning at α = 1, without and with the penalty",
        (
            Claim("Curvature merging of unpenalised vectors > their sum (not in the paper)", _methods),
            exceeds(
                "The sum of penalised vectors > TIES on unpenalised ones, α = 1",
                at_one("kfac", "sum"),
                at_one("without", "ties"),
            ),
        ),
        {"sum": "76.7, 85.8", "ties": "77.1, 81.8", "tsv": "84.2, 84.7", "iso": "83.8, 84.2"},
        table=methods_table,
        figure="methods",
    ),
    "universal": PlanPage(
        "One bundle for all tasks",
        "Table 6",
        (
            within(
                "The universal bundle is within 2 points of the tasks' bundles",
                0.02,
                at_one("universal"),
                at_one("kfac"),
                at_one("without"),
            ),
        ),
        {"without": "76.7", "kfac": "85.8", "universal": "84.7"},
    ),
    "incremental": PlanPage(
        "Class-incremental splits",
        "Table 7 (EuroSAT); `syllabics` in four parts here",
        (exceeds("Class-incremental: KFAC > no penalty at α = 1", at_one("kfac"), at_one("without")),),
        {"without": "70.4", "diagonal": "73.9", "kfac": "79.6", "naive": "79.6", "tjp": "84.4", "full": "71.2"},
        "paper, ViT-B/16",
    ),
    "text": PlanPage(
        "Text",
        "Figure 3 and Table 8, T5-base on six tasks; flan-T5-small on three here",
        (
            exceeds("Text: KFAC > no penalty at α = 1", at_one("kfac"), at_one("without")),
            exceeds("Text: τJp > KFAC at α = 1", at_one("tjp"), at_one("kfac")),
        ),
        {"without": "76.1", "kfac": "78.6", "tjp": "81.0", "attention": "67.0"},
        "paper, T5-base",
    ),
    "cost": PlanPage(
        "Cost",
        "Figure 6",
        (Claim("The penalty costs less than half of what τJp adds to a step", _cost),),
        {"estimate, one probe": "3.9 min", "estimate, exact": "198.7 min"},
        "paper, all eight tasks",
        table=cost_table,
        figure="",
    ),
}
"""The plans in the order of the page, the most important first."""
