"""Synthetic results: the content of results.json for a given number of tasks and arms."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

TASKS = ["digits", "mnist", "materials", "faces", "hebrew", "syllabics", "emblems", "weaves"]
ARMS: list[tuple[str, dict[str, Any] | None, float]] = [
    ("without", None, 0.30),
    ("kfac", {"structure": "kfac", "rule": "tak", "strength": 1.0}, 0.04),
    ("diagonal", {"structure": "diagonal", "rule": "tak", "strength": 1.0}, 0.17),
    ("data", {"data": True, "strength": 1.0}, 0.03),
]
HASH = "0123456789abcdef" * 4


def make_sweep(tasks: list[str], loss: float, generator: random.Random) -> dict[str, Any]:
    alphas = [round(0.1 * k, 1) for k in range(21)]
    width = 0.9 / (0.4 + 3 * loss)
    curves = {
        t: [
            round(0.35 + 0.55 * math.exp(-(((a - 0.9) / width) ** 2)) - 0.3 * loss + generator.uniform(-0.03, 0.03), 6)
            for a in alphas
        ]
        for t in tasks
    }
    return {
        "alphas": alphas,
        "tasks": curves,
        "mean": [sum(e[k] for e in curves.values()) / len(tasks) for k in range(21)],
    }


def make_disentanglement(a: str, b: str, loss: float) -> dict[str, Any]:
    alphas = [round(0.2 * k, 1) for k in range(-5, 11)]
    xi = [[min(1.0, loss * (0.3 * x * x + 0.25 * y * y + 0.5 * abs(x * y))) for y in alphas] for x in alphas]
    return {"tasks": [a, b], "alphas": alphas, "xi": xi, "examples": {a: 500, b: 400}}


def make_spread(centre: float, generator: random.Random, examples: int = 500) -> dict[str, Any]:
    centre *= math.exp(generator.uniform(-0.5, 0.5))
    return {
        "examples": examples,
        "mean": centre * 1.3,
        "quantiles": [centre * math.exp(k) for k in (-1.3, -0.5, 0, 0.5, 1.2)],
    }


def make_interference(tasks: list[str], generator: random.Random) -> dict[str, Any]:
    pairs = [
        {"vector": s, "task": t, "own": s == t, "predicted": 10 ** generator.uniform(-4, -1) + 0.2 * (s == t)}
        for s in tasks
        for t in tasks
    ]
    return {"vectors": tasks, "tasks": [{"task": task} for task in tasks], "pairs": pairs}


def make_localisation(tasks: list[str], loss: float, generator: random.Random) -> dict[str, Any]:
    vectors = {}
    for t in tasks:
        off = 0.9 * loss
        vectors[t] = {
            "on": make_spread(1.0, generator),
            "off": make_spread(off, generator),
            "auroc": min(1.0, 0.99 - loss * generator.uniform(0.3, 1)),
            "by_task": {u: make_spread(1.0 if u == t else off, generator) for u in tasks},
        }
    return {"vectors": vectors, "auroc": sum(v["auroc"] for v in vectors.values()) / len(tasks)}


def make_drift(tasks: list[str], loss: float, generator: random.Random) -> dict[str, Any]:
    def two(scale: float) -> dict[str, float]:
        value = scale * math.exp(generator.uniform(-1, 1))
        return {"predicted": value * math.exp(generator.uniform(-0.2, 0.2)), "measured": value}

    blocks = [f"visual.blocks.{k}.mlp.weight" for k in range(4)]
    pairs = [{"vector": t, "task": u} | two(1.0 if t == u else 0.8 * loss) for t in tasks for u in tasks]
    layers = [
        {"vector": t, "task": u, "block": b} | two(0.1 if t == u else 0.08 * loss)
        for t in tasks
        for u in tasks
        for b in blocks
    ]
    return {"pairs": pairs, "layers": layers}


def make_spectra(blocks: int = 12) -> dict[str, Any]:
    entries = []
    for k in range(blocks):
        for side, size in (("A", 192), ("B", 64)):
            ranks = sorted({round(size ** (j / 31)) for j in range(32)})
            values = [(1 + 0.2 * k) * r ** -(1.2 + 0.05 * k) * (3 if side == "A" else 0.02) for r in ranks]
            entries.append(
                {
                    "name": f"visual.blocks.{k}.mlp",
                    "side": side,
                    "size": size,
                    "trace": 2 * sum(values),
                    "effective_rank": 7.25 + k,
                    "eigenvalues": values,
                    "ranks": ranks,
                }
            )
    return {"blocks": entries}


def make_negation(tasks: list[str], control: str, generator: random.Random) -> dict[str, Any]:
    results = {
        t: {
            "alpha": 0.8,
            "accuracy": 0.12,
            "before": 0.61,
            "chance": 0.1,
            "removed": 0.9 + generator.uniform(-0.1, 0.08),
            "control": 0.58,
            "control_before": 0.6,
        }
        for t in tasks
        if t != control
    }
    return {"control": control, "keep": 0.95, "tasks": results}


def make_seed(seed: int, tasks: list[str], loss: float, base: dict[str, float], full: bool) -> dict[str, Any]:
    generator = random.Random(f"{seed} {loss}")
    individual = {t: round(0.94 - 0.02 * k / len(tasks) - generator.uniform(0, 0.02), 6) for k, t in enumerate(tasks)}

    def added(extra: float) -> dict[str, Any]:
        accuracies = {t: max(base[t], individual[t] - extra * generator.uniform(0.7, 1.3)) for t in tasks}
        scores = {t: {"accuracy": accuracies[t], "normalized": accuracies[t] / individual[t]} for t in tasks}
        mean = {key: sum(e[key] for e in scores.values()) / len(tasks) for key in ("accuracy", "normalized")}
        return {"alpha": 1.0, "tasks": scores, "mean": mean}

    return {
        "seed": seed,
        "individual": individual,
        "added": {"sum": added(loss), "ties": added(loss * 0.9)},
        "sweep": make_sweep(tasks, loss, generator),
        "best": {"alpha": 0.9, "validation": 0.915 - loss, "test": 0.91 - loss},
        "negation": make_negation(tasks, tasks[0], generator) if full else None,
        "disentanglement": [make_disentanglement(tasks[0], task, loss) for task in tasks[1:3]] if full else None,
        "localisation": make_localisation(tasks, loss, generator) if full else None,
        "drift": make_drift(tasks, loss, generator) if full else None,
    }


def make_results(tasks: int | list[str] = 3, arms: int = 2, seeds: int = 1, full: bool = True) -> dict[str, Any]:
    names = TASKS[:tasks] if isinstance(tasks, int) else tasks
    base = {t: 0.31 + 0.03 * k for k, t in enumerate(names)}
    arm_results = [
        {
            "name": name,
            "regime": "linear",
            "penalty": penalty,
            "seeds": [make_seed(s, names, loss, base, full) for s in range(seeds)],
        }
        for name, penalty, loss in ARMS[:arms]
    ]
    return {
        "format": "kfacpack.run/1",
        "name": "three tasks on tiny",
        "versions": {"kfacpack": "0.1.0", "torch": "2.13.0", "python": "3.11.2"},
        "plan": {"sha256": HASH, "text": "model: tiny\ntasks: [digits, mnist]\n"},
        "commands": ["kfacpack run plan.yaml", "kfacpack report run -o report.html"],
        "model": {"name": "tiny", "family": "tiny", "sha256": HASH},
        "tasks": [
            {"name": t, "classes": 10, "train": 2000 + k, "test": 500, "source": "drawn"} for k, t in enumerate(names)
        ],
        "seeds": list(range(seeds)),
        "bundles": [
            {
                "task": t,
                "structure": s,
                "seed": 0,
                "file": f"bundles/{t}-{s}.kfac",
                "bytes": 1234567 + k,
                "dense_bytes": 7654321,
                "sha256": HASH,
            }
            for k, t in enumerate(names)
            for s in ("kfac", "diagonal")
        ],
        "merges": [
            {
                "rule": "tak",
                "structure": "kfac",
                "without": t,
                "seed": 0,
                "file": f"merges/without-{t}.kfac",
                "bytes": 1300000 + k,
                "error": 0.123 + k / 100,
            }
            for k, t in enumerate(names)
        ],
        "base": {
            "tasks": {t: {"accuracy": base[t], "examples": 500} for t in names},
            "mean": sum(base.values()) / len(names),
        },
        "arms": arm_results,
        "spectra": make_spectra() if full else None,
        "summary": [make_summary(arm, arm_results[0], full) for arm in arm_results],
    }


def make_summary(arm: dict[str, Any], without: dict[str, Any], full: bool) -> dict[str, Any]:
    def mean(values: Any) -> float:
        numbers = list(values)
        return sum(numbers) / len(numbers)

    def loss(arm: dict[str, Any]) -> float:
        return mean(mean(s["individual"].values()) - s["added"]["sum"]["mean"]["accuracy"] for s in arm["seeds"])

    return {
        "arm": arm["name"],
        "method": "sum",
        "individual": mean(mean(s["individual"].values()) for s in arm["seeds"]),
        "individual_std": 0.0 if len(arm["seeds"]) == 1 else 0.0042,
        "added": mean(s["added"]["sum"]["mean"]["accuracy"] for s in arm["seeds"]),
        "added_std": 0.0 if len(arm["seeds"]) == 1 else 0.0087,
        "normalized": mean(s["added"]["sum"]["mean"]["normalized"] for s in arm["seeds"]),
        "recovered": None if arm is without else 1 - loss(arm) / loss(without),
        "best_alpha": 0.9,
        "best": mean(s["best"]["test"] for s in arm["seeds"]),
        "removed": 0.91 if full else None,
        "control_kept": 0.967 if full else None,
        "auroc": mean(s["localisation"]["auroc"] for s in arm["seeds"]) if full else None,
    }


TIMES = {
    "stages": [
        {"name": "estimate", "seconds": 31.25, "reused": False},
        {"name": "train", "seconds": 0.02, "reused": True},
    ],
    "seconds": 61.5,
    "peak_bytes": 1_234_000_000,
}


def write_run(folder: Path, results: dict[str, Any], times: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
    if times is not None:
        (folder / "times.json").write_text(json.dumps(times), encoding="utf-8")
    return folder
