"""Prints the memory of one device for estimating and training, from the dry run of an estimate.

    python examples/memory.py [ViT-L-14 t5-base] [--micro-batch-size 8]

Every process of a data-parallel run needs this much. Weights are random, since only shapes matter. Training keeps τ,
its gradient and AdamW's two moments in float32. Activations are those that autograd keeps for one forward pass, as
measured by the dry run; a linearised step needs at most 1.2 × as much.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import kfacpack as kp
from kfacpack._compat import make_torchvision_importable
from sizes import T5, VISION, kfacpack, model_arguments

LINEARISED = 1.2


def triangle(side: int) -> int:
    return side * (side + 1) // 2


def sides(block: dict[str, Any]) -> list[int]:
    """Returns the sides of the matrices of a block, except those that an earlier block has as well."""
    rows, columns = block["rows"], block["columns"]
    candidates = [[rows * columns]] if block["structure"] != "kronecker" else [[rows, columns], [rows], [columns]]
    return next(sides for sides in candidates if block["bytes"] == 4 * sum(map(triangle, sides)))


def of_block(side: int, count: int = 8) -> int:
    """Returns the widest side of `count` diagonal blocks."""
    return -(-side // count)


FORMS = {
    "dense float32, of an uncompressed bundle": lambda side: 4 * side**2,
    "`block:8`": lambda side: 4 * 8 * of_block(side) ** 2,
    "`block:8+int8`": lambda side: 8 * triangle(of_block(side)) + 4 * side,
}
"""Bytes on the device of a matrix of a given side, by the form of its bundle."""


def column(name: str, folder: Path, micro_batch_size: int) -> dict[str, float]:
    """Returns bytes by row of the table."""
    arguments = ["estimate", *model_arguments(name, folder), "--weights", "random", "--dry-run"]
    one, two = (kfacpack(*arguments, "--examples", size, "--batch-size", size)[0] for size in (1, 2))
    model = kp.load_model(arguments[2], weights="random")
    weights = sum(tensor.nbytes for tensor in (*model.module.parameters(), *model.module.buffers()))
    trained = 4 * sum(block["rows"] * block["columns"] for block in one["blocks"])
    activations = (two["peak_memory"] - one["peak_memory"]) * micro_batch_size
    blocks = [sides(block) for block in one["blocks"]]
    factors = {form: sum(size(side) for block in blocks for side in block) for form, size in FORMS.items()}
    largest = sorted((sum(FORMS[next(iter(FORMS))](side) for side in block) for block in blocks), reverse=True)[:2]
    train = weights + 4 * trained + LINEARISED * activations
    return {
        "weights, float32": weights,
        "τ, its gradient and AdamW's moments": 4 * trained,
        f"activations of {micro_batch_size} examples": activations,
        **{f"factors, {form}": size for form, size in factors.items()},
        "factors, with `--offload`: two blocks": sum(largest),
        "sums of an estimate": one["bytes"],
        "**estimate**": weights + one["bytes"] + activations,
        "**estimate `--offload`**": weights + activations + sum(largest),
        "**train**, without a penalty": train,
        **{f"**train**, {form}": train + size for form, size in factors.items()},
        "**train `--offload`**": train + sum(largest),
    }


def main(names: list[str], micro_batch_size: int) -> None:
    """Prints the table as Markdown."""
    with TemporaryDirectory() as folder:
        columns = [column(name, Path(folder), micro_batch_size) for name in names]
    print(f"| GB per device | {' | '.join(names)} |\n|---{'|---' * len(names)}|")
    for key in columns[0]:
        print(f"| {key} | {' | '.join(f'{values[key] / 1e9:.2f}' for values in columns)} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Prints the memory of one device for estimating and training.")
    parser.add_argument("models", nargs="*", help=f"one or more of {', '.join([*VISION, *T5])}")
    parser.add_argument("--micro-batch-size", type=int, default=8)
    options = parser.parse_args()
    if unknown := [name for name in options.models if name not in (*VISION, *T5)]:
        sys.exit(f"unknown model {unknown[0]!r}; expected one of: {', '.join([*VISION, *T5])}")
    make_torchvision_importable()
    main(options.models or ["ViT-L-14", "t5-base"], options.micro_batch_size)
