"""The plans of this folder with the claims that they test, the numbers of the paper, and the form of their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from criteria import (
    Claim,
    at_best,
    at_one,
    auroc,
    best_method,
    cheaper,
    compressed,
    disentangled,
    exceeds,
    flat_over_alpha,
    flat_over_strength,
    more_probes,
    negated,
    ordered,
    predicted_drift,
    within,
)
from measures import Results
from tables import arms_table, cost_table, methods_table, negation_table


@dataclass(frozen=True)
class PlanPage:
    """The section of a plan on the page."""

    title: str
    source: str
    """Tables and figures of the paper with the numbers."""
    claims: tuple[Claim, ...]
    paper: Mapping[str, str] = field(default_factory=dict)
    """The paper's numbers by arm."""
    paper_heading: str = "paper, ViT-B/32"
    figures: tuple[str, ...] = ("arms",)
    """Names of figures; the first has the name of the plan, others have their own name appended."""
    table: Callable[[Results, Mapping[str, str], str], list[str]] = arms_table
    note: str = ""
    """Sentences that follow the verdicts."""


without, kfac = at_one("without"), at_one("kfac")

PLANS: dict[str, PlanPage] = {
    "addition": PlanPage(
        "Task addition, linearised",
        "Table 1 (linear fine-tuning), Figures 1, 5 and 9",
        (
            ordered("KFAC > diagonal > no penalty at α = 1", "kfac", "diagonal", "without"),
            within("KFAC, without data, is within 1 point of τJp", 0.01, kfac, at_one("tjp"), without),
            flat_over_alpha("With KFAC, the accuracy is flat for α from 0.7 to 1.3", "kfac", "without"),
            exceeds(
                "Localisation: the AUROC is higher with the penalty", (auroc("kfac"), auroc("without")), unit="AUROC"
            ),
            disentangled("Disentanglement: ξ is lower with the penalty", "kfac", "without"),
            predicted_drift("Bundles predict which vectors interfere (not in the paper)", "without"),
        ),
        {"without": "76.7 (best 78.8)", "diagonal": "80.1 (80.2)", "kfac": "85.8 (86.0)", "tjp": "85.0 (85.6)"},
        figures=("sweeps", "maps"),
        note="τJp sees examples of one other task in each step. Its λ, 0.2, is the one of 0.05, 0.2, 1, 5 and 25 with "
        "the most accurate sum for seed 3, which is not one of the three seeds: 64.2, 65.1, 62.1, 48.1 and 46.0 % "
        "(`addition.yaml` with `seeds: [3]` and this `strength`).",
    ),
    "nonlinear": PlanPage(
        "Task addition, without linearisation",
        "Table 1 (non-linear fine-tuning), Figures 12 and 13",
        (
            exceeds(
                "Attention-only + KFAC > attention-only, best α", (at_best("attention + kfac"), at_best("attention"))
            ),
            exceeds(
                "Non-linear localisation: the AUROC is higher with the penalty, in full and attention-only fine-tuning",
                (auroc("full + kfac"), auroc("full")),
                (auroc("attention + kfac"), auroc("attention")),
                unit="AUROC",
            ),
            within(
                "TaLoS with masks from bundles is within 2 points of TaLoS, best α (not in the paper)",
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
        figures=("sweeps",),
    ),
    "negation": PlanPage(
        "Task negation",
        "Table 2; the control is ImageNet there, and `materials` here",
        (negated("Negation: lower target accuracy at equal control accuracy", "kfac", "without"),),
        {"base": "48.4, 63.3", "without": "9.3, 60.5", "kfac": "3.4, 62.4", "tjp": "6.7, 60.8", "full": "20.4, 60.5"},
        table=negation_table,
        figures=("negation",),
    ),
    "rules": PlanPage(
        "Naive against merged",
        "Table 3; `optimal` is not in the paper",
        (
            within(
                "The merged penalty is within 1 point of the naive one", 0.01, at_one("tak"), at_one("stack"), without
            ),
            within(
                "`optimal` of rank 1 is within 1 point of the naive one (not in the paper)",
                0.01,
                at_one("optimal"),
                at_one("stack"),
                without,
            ),
        ),
        {"without": "76.7", "stack": "86.5", "tak": "85.8"},
    ),
    "estimation": PlanPage(
        "Number of examples and probes",
        "Figure 7 (left)",
        (
            within(
                "128 examples, and 256, are within 1 point of all training examples",
                0.01,
                (at_one("128 examples"), at_one("256 examples")),
                at_one("many examples"),
                without,
            ),
            within(
                "One probe is within 1 point of the exact GGN, on 128 examples",
                0.01,
                at_one("128 examples"),
                at_one("exact"),
                without,
            ),
            more_probes(
                "More probes do not hurt if their sum is divided by M", "256 examples", "8 probes", "8 undivided"
            ),
            within(
                "One orthogonal probe is within 1 point of one Gaussian probe (not in the paper)",
                0.01,
                at_one("256 examples"),
                at_one("1 gaussian"),
                without,
            ),
        ),
    ),
    "compression": PlanPage(
        "Compressed bundles",
        "Figure 7 (right) and Figure 14, ViT-B/16",
        (
            compressed("`block:8` is within 1 point at 13 % of the bytes", "block-8", "kfac"),
            compressed(
                "A search over codecs for 13 % of the bytes is within 1 point (not in the paper)", "budget-13", "kfac"
            ),
            exceeds(
                "Compressed localisation: the AUROC is higher with `block:8` than without the penalty",
                (auroc("block-8"), auroc("without")),
                unit="AUROC",
            ),
        ),
        {"kfac": "88.3", "block-8": "87.1"},
        "paper, ViT-B/16",
        figures=("bytes",),
    ),
    "every": PlanPage(
        "The penalty at every N-th step",
        "Figure 8",
        (
            within(
                "Every 16th step is within 2 points of every step", 0.02, at_one("every 16"), at_one("every 1"), without
            ),
        ),
        {"every 16": "−1.4 points"},
        "paper, ViT-B/16",
    ),
    "strength": PlanPage(
        "Strength of the penalty",
        "Table 5",
        (flat_over_strength("The accuracy is flat over two decades of λ", "x0.1", "x1", "x10"),),
        {"without": "75.2", "x0.01": "81.7", "x0.1": "85.1", "x1": "86.0", "x10": "86.4", "x100": "84.4"},
    ),
    "methods": PlanPage(
        "Merge methods",
        "Figure 4 and Table 4; the numbers are those of linear fine-tuning at α = 1, without and with the penalty",
        (
            best_method(
                "The sum of penalised vectors at α = 1 > every merge method on unpenalised ones at its best α",
                ("kfac", "sum"),
                "without",
            ),
            best_method(
                "Curvature merging of unpenalised vectors at α = 1 > the other methods at their best α"
                " (not in the paper)",
                ("without", "curvature"),
                "without",
            ),
        ),
        {"sum": "76.7, 85.8", "ties": "77.1, 81.8", "tsv": "84.2, 84.7", "iso": "83.8, 84.2"},
        table=methods_table,
        figures=("methods",),
    ),
    "universal": PlanPage(
        "One bundle for all tasks",
        "Table 6",
        (
            within(
                "The universal bundle is within 2 points of the tasks' bundles",
                0.02,
                at_one("universal"),
                kfac,
                without,
            ),
        ),
        {"without": "76.7", "kfac": "85.8", "universal": "84.7"},
    ),
    "incremental": PlanPage(
        "Class-incremental splits",
        "Table 7 (EuroSAT); `syllabics` in four parts here",
        (exceeds("Class-incremental: KFAC > no penalty at α = 1", (kfac, without)),),
        {"without": "70.4", "diagonal": "73.9", "kfac": "79.6", "tjp": "84.4"},
        "paper, ViT-B/16",
    ),
    "text": PlanPage(
        "Text",
        "Figure 3 and Table 8, T5-base on six tasks; flan-T5-small on three here",
        (
            exceeds("Text: KFAC > no penalty at α = 1", (kfac, without)),
            exceeds("Text: τJp > KFAC at α = 1", (at_one("tjp"), kfac)),
        ),
        {"without": "76.1", "kfac": "78.6", "tjp": "81.0", "attention": "67.0"},
        "paper, T5-base",
    ),
    "cost": PlanPage(
        "Cost",
        "Figure 6",
        (
            cheaper(
                "The penalty costs less than half of what τJp adds to a step",
                "step, KFAC",
                "step, τJp",
                0.5,
                base="step, none",
            ),
            cheaper(
                "With one probe, an estimate takes less than a tenth of the time of the exact GGN",
                "estimate, one probe",
                "estimate, exact",
                0.1,
            ),
            cheaper(
                "A linearised step takes at most twice as long as an ordinary one (not in the paper)",
                "step, none",
                "step, full",
                2,
            ),
        ),
        {"estimate, one probe": "3.9 min", "estimate, exact": "198.7 min"},
        "paper, all eight tasks",
        table=cost_table,
        figures=(),
    ),
}
"""The plans in the order of the page, the most important first."""
