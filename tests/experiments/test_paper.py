"""The pages about the paper are those of the committed results, and verdicts follow from their criteria."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from experiments.synthetic_results import make_results

from kfacpack.experiments.plan_file import read_plan

ROOT = Path(__file__).parents[2]
PAPER = ROOT / "examples" / "paper"
sys.path.insert(0, str(PAPER))

import claims  # noqa: E402 - a script of the folder above
import criteria  # noqa: E402 - a script of the folder above
import measures  # noqa: E402 - a script of the folder above
import results as script  # noqa: E402 - a script of the folder above

PLANS = [name for name in claims.PLANS if (PAPER / f"{name}.yaml").exists()]


def numbers(name, level):
    """Results of a plan in which the k-th arm has the accuracy level(k) at α = 1, with three seeds."""
    plan, _ = read_plan(PAPER / f"{name}.yaml")
    labels = [method.label for method in plan.evaluation.methods]

    def seed(position, number):
        accuracy = level(position) + 0.001 * number
        sweep = {"alphas": [0.7, 1.0, 1.3], "mean": [accuracy] * 3}
        best = {"alpha": 1.0, "validation": accuracy, "test": accuracy}
        method = {"accuracy": accuracy, "normalized": 0.9, "best": best, "sweep": sweep}
        return {
            "individual": 0.8,
            "methods": dict.fromkeys(labels, method),
            "negation": {"before": 0.6, "accuracy": 1 - accuracy, "control_before": 0.6, "control": 0.6},
            "auroc": accuracy,
            "scores": {"on": [1.0] * 5, "off": [0.1] * 5},
            "disentanglement": [{"tasks": ["a", "b"], "alphas": [0, 1], "xi": [[0, 1 - accuracy]] * 2}],
            "drift": [[0.1, 0.2], [0.2, 0.4], [0.3, 0.6]],
        }

    arms = {
        arm: {"regime": "linear", "penalty": None, "bundle_bytes": 1e6 / (1 + 9 * position),
              "seeds": [seed(position, number) for number in range(3)]}
        for position, arm in enumerate(plan.arms)
    }  # fmt: skip
    tasks = [task.name for task in plan.tasks]
    return measures.Results({"model": "tiny", "base": 0.5, "seeds": [0, 1, 2], "tasks": tasks, "arms": arms})


def test_the_pages_are_those_of_the_committed_results():
    committed = script.read_results()
    assert (PAPER / "RESULTS.md").read_text(encoding="utf-8") == script.page(committed, "../../docs/assets/paper")
    assert (ROOT / "docs" / "paper.md").read_text(encoding="utf-8") == script.page(committed, "assets/paper")
    for name in committed:
        assert all((script.FIGURES / file).exists() for file in script.figure_files(name))


def test_every_plan_has_a_section_and_every_section_a_plan():
    assert {path.stem for path in PAPER.glob("*.yaml")} == set(PLANS)
    assert set(claims.PLANS) - set(PLANS) == {"cost"}


@pytest.mark.parametrize("name", PLANS)
def test_every_claim_is_decided_from_the_arms_of_its_plan(name):
    results = numbers(name, lambda position: 0.5 + 0.03 * position)
    lines = script.section(name, claims.PLANS[name], results, "figures")
    assert all(arm in "\n".join(lines) for arm in results.arms)
    for claim in claims.PLANS[name].claims:
        verdict, reason = claim.decide(results)
        assert verdict in (criteria.HOLDS, criteria.FAILS, criteria.UNTESTABLE)
        assert reason.endswith(".")
    full_scale, _ = read_plan(PAPER / f"{name}.yaml", "full")
    assert set(claims.PLANS[name].paper) <= {
        *results.arms,
        *full_scale.arms,
        "base",
        *next(iter(results.arms.values()))["seeds"][0]["methods"],
    }


def decide(name, text, level):
    return next(c for c in claims.PLANS[name].claims if text in c.text).decide(numbers(name, level))[0]


def test_verdicts_follow_the_criteria():
    assert decide("addition", "KFAC > diagonal", lambda position: 0.5 + 0.1 * position) == criteria.HOLDS
    assert decide("addition", "KFAC > diagonal", lambda position: 0.5) == criteria.FAILS
    assert decide("addition", "τJp", lambda position: [0.5, 0.6, 0.691, 0.7][position]) == criteria.HOLDS
    assert decide("addition", "τJp", lambda position: [0.5, 0.6, 0.689, 0.7][position]) == criteria.FAILS
    assert decide("addition", "τJp", lambda position: [0.5, 0.6, 0.7, 0.51][position]) == criteria.UNTESTABLE
    assert decide("every", "16th", lambda position: [0.5, 0.7, 0.69][position]) == criteria.HOLDS
    assert decide("every", "16th", lambda position: [0.5, 0.7, 0.67][position]) == criteria.FAILS
    assert decide("every", "16th", lambda position: [0.68, 0.7, 0.7][position]) == criteria.UNTESTABLE
    assert measures.better([0.5, 0.7], [0.4, 0.6])
    assert not measures.better([0.5, 0.7], [0.6, 0.5]), "the spread of the difference is larger than its mean"


def results_of(bundle_bytes=None, **accuracies):
    """Results with one method, whose arms have these accuracies in two seeds."""
    arms = {
        name: {
            "bundle_bytes": (bundle_bytes or {}).get(name),
            "seeds": [
                {
                    "methods": {"sum": {"accuracy": accuracy, "best": {"test": accuracy}}},
                    "negation": {"accuracy": accuracy, "control": 1 - accuracy},
                }
            ] * 2,
        }
        for name, accuracy in accuracies.items()
    }  # fmt: skip
    return measures.Results({"arms": arms, "costs": {name: {"seconds": value} for name, value in accuracies.items()}})


@pytest.mark.parametrize(
    ("claim", "holding", "failing"),
    [
        (
            criteria.compressed("", "small", "whole"),
            results_of({"whole": 100, "small": 14}, whole=0.7, small=0.691),
            results_of({"whole": 100, "small": 15}, whole=0.7, small=0.7),
        ),
        (
            criteria.compressed("", "small", "whole"),
            results_of({"whole": 100, "small": 13}, whole=0.7, small=0.8),
            results_of({"whole": 100, "small": 13}, whole=0.7, small=0.689),
        ),
        (
            criteria.flat_over_strength("", "low", "high"),
            results_of(low=0.681, high=0.7),
            results_of(low=0.679, high=0.7),
        ),
        (
            criteria.more_probes("", "one", "more", "undivided"),
            results_of(one=0.7, more=0.691, undivided=0.2),
            results_of(one=0.7, more=0.689, undivided=0.9),
        ),
        (
            criteria.best_method("", ("kfac", "sum"), "without"),
            results_of(kfac=0.7, without=0.69),
            results_of(kfac=0.7, without=0.71),
        ),
        (
            criteria.negated("", "kfac", "without"),
            results_of(kfac=0.1, without=0.2),
            results_of(kfac=0.2, without=0.1),
        ),
        (criteria.cheaper("", "one", "other", 0.5), results_of(one=0.5, other=1), results_of(one=0.6, other=1)),
        (
            criteria.cheaper("", "one", "other", 0.5, base="none"),
            results_of(none=10, one=10.5, other=11),
            results_of(none=10, one=10.6, other=11),
        ),
    ],
)
def test_a_criterion_distinguishes_results(claim, holding, failing):
    assert claim.decide(holding)[0] == criteria.HOLDS
    assert claim.decide(failing)[0] == criteria.FAILS


def test_rank_correlation_ignores_the_scale():
    assert measures.rank_correlation([1, 2, 3, 4], [0.1, 1, 10, 1000]) == pytest.approx(1)
    assert measures.rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert measures.rank_correlation([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(0.8)


def test_results_are_shortened_to_what_the_tables_use():
    content = make_results()
    short = script.shortened(content)
    assert len(json.dumps(short)) < len(json.dumps(content))
    results = measures.Results(short)
    first = content["arms"][0]
    accuracy = first["seeds"][0]["added"][next(iter(first["seeds"][0]["added"]))]["mean"]["accuracy"]
    assert results.sum_at_one(first["name"])[0] == pytest.approx(accuracy, rel=1e-4)


def test_plans_whose_data_is_missing_are_skipped(monkeypatch):
    monkeypatch.delenv("DATA", raising=False)
    monkeypatch.delenv("T5", raising=False)
    assert script.missing_variables(PAPER / "text.yaml") == ["DATA", "T5"]
    assert script.missing_variables(PAPER / "addition.yaml") == [], "variables of other scales do not count"
