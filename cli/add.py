"""`kfacpack add`: many task vectors into one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from .console import print_json
from .options import IMAGE_SIZE, MODEL_NAME, QUIET, RUN, WEIGHTS, File, option
from .vectors import SAVE_MODEL, Wanted, write

HOW = "The method"


def add(
    vectors: list[File] = typer.Argument(..., metavar="FILE.safetensors...", help="The task vectors."),
    output: Path = option(RUN, ..., "--output", "-o", metavar="SUM.safetensors", help="The file to write."),
    method: str = option(
        HOW,
        "sum",
        "--method",
        help="sum: Σ α τ. ties: trim, elect signs, add up what agrees (the paper: their mean times λ). dare: drop at "
        "random, rescale, add up. tsv: each task's largest singular vectors, made orthogonal (the paper's α is 1). "
        "iso: the sum with a flat spectrum, Iso-C; iso-cts: with directions of single tasks (the paper chooses α).",
    ),
    alpha: list[float] | None = option(
        HOW,
        None,
        "--alpha",
        metavar="α",
        help="What the result is multiplied by; or, repeated, one for each vector in their order. Every method gives "
        "a vector on the scale of the sum, not the mean, to be used at 1, which is the default.",
    ),
    keep: float | None = option(
        HOW, None, "--keep", metavar="X", help="ties: the share of each vector's numbers that stays; 0.2 by default."
    ),
    drop: float | None = option(
        HOW, None, "--drop", metavar="P", help="dare: the probability of being dropped; 0.9 by default."
    ),
    seed: int | None = option(HOW, None, "--seed", help="dare: decides what is dropped; 0 by default."),
    common: float | None = option(
        HOW, None, "--common", metavar="X", help="iso-cts: the share of directions that the sum gives; 0.8 by default."
    ),
    mean: bool = option(
        HOW,
        False,
        "--mean",
        help="Average where the publication does: ties, what agrees; tsv and iso, parameters that are no matrices.",
    ),
    save_model: Path | None = SAVE_MODEL,
    model: str = MODEL_NAME,
    weights: str | None = WEIGHTS,
    image_size: int | None = IMAGE_SIZE,
    as_json: bool = option(RUN, False, "--json", help="Print what was made, and how, as JSON."),
    quiet: bool = QUIET,
) -> None:
    """Add task vectors up to one that has all their heads, or merge them by another method.

    Vectors of other base models, regimes or f, or with other heads for the same task, are refused.

    Memory does not grow with the number of vectors; the methods with singular vectors hold one layer of all of them.
    """
    # They bring torch, which --help has no need to wait for.
    from kfacpack.vectors.add import add as added
    from kfacpack.vectors.methods import METHODS

    wanted = Wanted(save_model, model, weights, image_size)
    wanted.check(output, vectors)
    given = {"keep": keep, "drop": drop, "seed": seed, "common": common, "mean": mean or None}
    settings = {name: value for name, value in given.items() if value is not None}
    alphas = alpha or [1.0]
    tau = added(vectors, method, alphas[0] if len(alphas) == 1 else alphas, **settings)
    said = write(tau, output, wanted, show=not (quiet or as_json), quiet=quiet)
    if as_json:
        by = METHODS[method].of(settings)
        how: dict[str, Any] = {"method": method, "settings": by.settings, "scale": by.scale}
        print_json({**how, "alphas": alphas * len(vectors) if len(alphas) == 1 else alphas, **said})
