"""Compares the drift of f with the drift of the label scores, for vectors of language models trained together.

    python examples/label_drift.py MODEL DATA VECTOR … [--prompts STYLE] [--examples 200]

MODEL is a `t5:` or `lm:` model, DATA the folder that contains the folders of the tasks, and each VECTOR is a file that
`kfacpack train` has written in the regime `linear`. For each task, the script measures on test examples how much the
vector of the task (*own*) and the sum of the other vectors (*others*) change the linearised model:

    drift of f          E ‖J τ‖²
    drift of scores     E ‖H (J τ)‖², where H are the rows of the head, minus their mean

Only the second drift can change a prediction, because a class is chosen by the differences between the scores of the
label words. If the prompts of the tasks have different label words, the first drift can be large and the second small.
"""

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor

import kfacpack as kp
from kfacpack.models.data_loading import prepared_batches


def drifts(
    model: kp.Model, task: kp.Task, vectors: Sequence[kp.TaskVector], examples: int, batch_size: int = 16
) -> dict[str, float]:
    """Measures both drifts on one task.

    Args:
        model: The base model.
        task: The task. One of the vectors belongs to it.
        vectors: The vectors of all tasks.
        examples: Maximum number of test examples.
        batch_size: Examples per forward pass.

    Returns:
        The drift of f and that of the scores, for the own vector and the sum of the others.
    """
    own = next(vector for vector in vectors if vector.tasks[0] == task.name)
    others = [vector for vector in vectors if vector is not own]
    lin = kp.linearize(model, params=sorted({name for vector in vectors for name in vector}))
    zeros = lin.zeros()
    taus = {
        "own": {**zeros, **own},
        "others": {
            name: value + sum(vector[name] for vector in others if name in vector) for name, value in zeros.items()
        },
    }
    head = kp.head_for(model, task)
    scores = head.weight.float() - head.weight.float().mean(0)
    split = task.split("test")
    indices = range(min(examples, len(split)))
    sums = {f"{kind} {side}": 0.0 for kind in ("f", "scores") for side in taus}
    for _, batch in prepared_batches(model, split, task.name, indices, batch_size):
        for side, tau in taus.items():
            with torch.no_grad():
                change: Tensor = lin.outputs(batch, tau)[1].float()
            sums[f"f {side}"] += float(change.square().sum())
            sums[f"scores {side}"] += float((change @ scores.T).square().sum())
    return {key: value / len(indices) for key, value in sums.items()}


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description="Compares the drift of f with the drift of the label scores.")
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("vectors", nargs="+")
    parser.add_argument("--prompts", choices=["t5", "flan", "plain", "chat"])
    parser.add_argument("--examples", type=int, default=200)
    options = parser.parse_args()
    model = kp.load_model(options.model, prompts=options.prompts)
    vectors = [kp.TaskVector.load(path) for path in options.vectors]
    print("| task | f: own | f: others | others / own | scores: own | scores: others | others / own |")
    print("|---|---|---|---|---|---|---|")
    for vector in vectors:
        task = kp.load_task(vector.tasks[0], data=f"{options.data}/{vector.tasks[0]}")
        drift = drifts(model, task, vectors, options.examples)
        cells = []
        for kind in ("f", "scores"):
            own, others = drift[f"{kind} own"], drift[f"{kind} others"]
            cells += [f"{own:.3g}", f"{others:.3g}", f"{others / own:.2f}"]
        print(f"| {task.name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
