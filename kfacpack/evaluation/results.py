"""Scores as they are told: absolute, and as a share of what the individual vectors reach."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kfacpack.evaluation.accuracy import Score


def result(
    found: Mapping[str, Score], individual: Mapping[str, float], heads: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """{"tasks": {name: {"accuracy", "normalized", "examples"}}, "mean": {"accuracy", "normalized"}}.

    `individual`: a task's name -> the accuracy of the vector of this task alone; where it is not known, or zero,
    `normalized` is None, and so is its mean where it is of any. `heads`: what each head was made from, told as "head".
    """
    tasks = {
        name: {
            "accuracy": score.accuracy,
            "normalized": normalized(score.accuracy, individual.get(name)),
            "examples": score.examples,
            **({"head": heads[name]} if heads else {}),
        }
        for name, score in found.items()
    }
    return {"tasks": tasks, "mean": {key: _mean([each[key] for each in tasks.values()]) for key in MEANS}}


MEANS = ("accuracy", "normalized")


def normalized(accuracy: float, individual: float | None) -> float | None:
    return accuracy / individual if individual else None


def _mean(values: list[Any]) -> float | None:
    return None if None in values else sum(values) / len(values)
