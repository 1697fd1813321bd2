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
        arm: {"regime": "linear", "penalty": None, "bundle_bytes": 1e6 / (1 + 9 * position), "seconds": 1.0,
              "seeds": [seed(position, number) for number in range(3)]}
        for position, arm in enumerate(plan.arms)
    }  # fmt: skip
    tasks = [task.name for task in plan.tasks]
    return claims.Results({"model": "tiny", "base": 0.5, "seeds": [0, 1, 2], "tasks": tasks, "arms": arms})


def test_the_pages_are_those_of_the_committed_results():
    committed = script.read_results()
    assert (PAPER / "RESULTS.md").read_text(encoding="utf-8") == script.page(committed, "../../docs/assets/paper")
    assert (ROOT / "docs" / "paper.md").read_text(encoding="utf-8") == script.page(committed, "assets/paper")
    for name in committed:
        assert not claims.PLANS[name].figure or (script.FIGURES / f"{name}.svg").exists()


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
        assert verdict in (claims.HOLDS, claims.FAILS, claims.UNTESTABLE)
        assert reason.endswith(".")
    assert set(claims.PLANS[name].paper) <= {
        *results.arms,
        "base",
        *next(iter(results.arms.values()))["seeds"][0]["methods"],
    }


def decide(name, text, level):
    return next(c for c in claims.PLANS[name].claims if text in c.text).decide(numbers(name, level))[0]


def test_verdicts_follow_the_criteria():
    assert decide("addition", "KFAC > diagonal", lambda position: 0.5 + 0.1 * position) == claims.HOLDS
    assert decide("addition", "KFAC > diagonal", lambda position: 0.5) == claims.FAILS
    assert decide("addition", "τJp", lambda position: 0.5 + 0.009 * position) == claims.HOLDS
    assert decide("addition", "τJp", lambda position: 0.5 + 0.011 * position) == claims.FAILS
    assert decide("every", "16th", lambda position: [0.5, 0.7, 0.7, 0.69][position]) == claims.HOLDS
    assert decide("every", "16th", lambda position: [0.5, 0.7, 0.7, 0.67][position]) == claims.FAILS
    assert decide("every", "16th", lambda position: [0.68, 0.7, 0.7, 0.7][position]) == claims.UNTESTABLE
    assert claims.better([0.5, 0.7], [0.4, 0.6])
    assert not claims.better([0.5, 0.7], [0.6, 0.5]), "the spread of the difference is larger than its mean"


def test_results_are_shortened_to_what_the_tables_use():
    content = make_results()
    short = script.shortened(content, {f"vectors/a.{content['arms'][0]['name']}.seed-0": 2.0})
    assert len(json.dumps(short)) < len(json.dumps(content))
    results = claims.Results(short)
    first = content["arms"][0]
    accuracy = first["seeds"][0]["added"][next(iter(first["seeds"][0]["added"]))]["mean"]["accuracy"]
    assert results.sum_at_one(first["name"])[0] == pytest.approx(accuracy, rel=1e-4)
    assert short["arms"][first["name"]]["seconds"] == 2.0


def test_plans_whose_data_is_missing_are_skipped(monkeypatch):
    monkeypatch.delenv("DATA", raising=False)
    monkeypatch.delenv("T5", raising=False)
    assert script.missing_variables(PAPER / "text.yaml") == ["DATA", "T5"]
    assert script.missing_variables(PAPER / "addition.yaml") == [], "variables of other scales do not count"
