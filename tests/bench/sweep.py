"""Cost of a sweep over α in the linearised model, compared with one evaluation.

    python tests/bench/sweep.py [--rounds 5] [--examples 256]

`tiny`, a small random vector, the test split of `digits`, 21 α. Times are the best of the rounds, in turns. The sweep
must also give the scores of separate evaluations. Prints the ratio, and exits with 1 if it is larger than promised.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable

import torch
from promises import all_hold

import kfacpack as kp
from kfacpack.evaluation.accuracy import EvaluationSet, score, scores
from kfacpack.format.units import parse_alphas
from kfacpack.format.vector_manifest import AboutVector, TaskEntry
from kfacpack.models.model import Model

ALPHAS = parse_alphas("0:2:0.1")
CHECKED = (0, 3, 10, 20)
DEARER = 1.3


def small_vector(model: Model) -> kp.TaskVector:
    generator = torch.Generator().manual_seed(0)
    zeros = kp.linearize(model).zeros()
    tensors = {name: 0.01 * torch.randn(zero.shape, generator=generator) for name, zero in zeros.items()}
    about = AboutVector(
        base=kp.identify(model.module, list(tensors), family=model.family, name=model.name),
        function=model.function,
        regime="linear",
        tasks=(TaskEntry(source=kp.Source(task="digits")),),
    )
    return kp.TaskVector(tensors, about)


def main(rounds: int, examples: str) -> int:
    model, task = kp.load_model("tiny"), kp.load_task("digits")
    vector, head, exam = small_vector(model), kp.head_for(model, task), EvaluationSet.of(task, examples=examples)
    swept = scores(model, head, exam, vector, ALPHAS)
    for k in CHECKED:
        assert swept[k] == score(model, head, exam, vector=vector, alpha=ALPHAS[k]), "a sweep is its evaluations"
    contenders: dict[str, Callable[[], object]] = {
        "one": lambda: score(model, head, exam, vector=vector),
        "sweep": lambda: scores(model, head, exam, vector, ALPHAS),
    }
    best: dict[str, float] = {}
    for _ in range(rounds):
        for name, work in contenders.items():
            gc.collect()
            start = time.perf_counter()
            work()
            taken = time.perf_counter() - start
            best[name] = min(taken, best.get(name, taken))
    ratio = best["sweep"] / best["one"]
    print(f"tiny, {len(exam.numbers)} examples, {len(ALPHAS)} α, best of {rounds}")
    print(f"    one evaluation {best['one']:6.3f} s   sweep {best['sweep']:6.3f} s")
    return 0 if all_hold([("time of the sweep / of one evaluation", ratio, "<=", DEARER)]) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The time of a sweep over 21 α, beside one evaluation.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--examples", default="256")
    options = parser.parse_args()
    sys.exit(main(options.rounds, options.examples))
