"""Measures the cost of curvature for common models: bundle size, time and memory, predicted by a dry run and measured.

    python examples/sizes.py [ViT-B-32 ViT-B-16 ViT-L-14 t5-base] [--examples 16] [--batch-size 8]

Weights are random, since neither shapes nor times depend on them. Texts for T5 are sentence pairs of 60 words. The row
of a model contains the number of blocks; the size of the uncompressed bundle; the time for 256 examples, from a dry
run; and the peak memory, predicted by the dry run and measured in a process that estimates on `--examples` examples,
minus that of a process for `tiny`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

VISION = ("ViT-B-32", "ViT-B-16", "ViT-L-14")
T5 = {"t5-base": {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "vocab_size": 32128}}
DRY_RUN_EXAMPLES = 256
WORDS = 60


def kfacpack(*arguments: object) -> tuple[dict[str, Any], int]:
    """Runs a command with --json; returns its output and the peak memory of its process in bytes."""
    program = (
        "import resource, sys\n"
        "from kfacpack_cli.main import app\n"
        "try:\n    app(standalone_mode=False)\n"
        "finally:\n    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)\n"
    )
    command = [sys.executable, "-c", program, *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    unit = 1 if sys.platform == "darwin" else 1024
    return json.loads(done.stdout), int(done.stderr.split()[-1]) * unit


def t5_folder(folder: Path, shape: dict[str, int]) -> str:
    """Writes the config of a T5 and a tokenizer of whole words; returns the name of the model."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, T5Config

    words = ["<pad>", "</s>", "<unk>", *(f"w{number}" for number in range(WORDS)), "yes", "no"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    T5Config(**shape, decoder_start_token_id=0).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>").save_pretrained(folder)
    return f"t5:{folder}"


def sentence_pairs(folder: Path) -> Path:
    """Writes a dataset of sentence pairs; returns its folder."""
    import datasets

    sentence = " ".join(f"w{number}" for number in range(WORDS // 2))
    features = datasets.Features(
        premise=datasets.Value("string"),
        hypothesis=datasets.Value("string"),
        label=datasets.ClassLabel(names=["yes", "no"]),
    )
    rows = {
        "premise": [sentence] * DRY_RUN_EXAMPLES,
        "hypothesis": [sentence] * DRY_RUN_EXAMPLES,
        "label": [0, 1] * (DRY_RUN_EXAMPLES // 2),
    }
    datasets.Dataset.from_dict(rows, features).to_parquet(folder / "train-00000-of-00001.parquet")
    return folder


def model_arguments(name: str, folder: Path) -> list[object]:
    """Returns the options that select a model and data for it; writes those of T5 into the folder."""
    if name not in T5:
        return ["--model", name, "--task", "materials"]
    (folder / name).mkdir()
    (folder / "pairs").mkdir()
    model, data = t5_folder(folder / name, T5[name]), sentence_pairs(folder / "pairs")
    return ["--model", model, "--task", "pairs", "--data", data]


def row(name: str, folder: Path, examples: int, batch_size: int, libraries: int) -> str:
    """Returns the row of one model; `libraries` is the memory of a process for `tiny`."""
    arguments = ["estimate", *model_arguments(name, folder), "--weights", "random", "--batch-size", batch_size]
    predicted, _ = kfacpack(*arguments, "--examples", DRY_RUN_EXAMPLES, "--dry-run")
    _, measured = kfacpack(*arguments, "--examples", examples, "-o", folder / f"{name}.kfac")
    (folder / f"{name}.kfac").unlink()
    size = f"{predicted['bytes'] / 1e6:8.0f} MB"
    memory = f"{predicted['peak_memory'] / 1e9:8.2f} GB {(measured - libraries) / 1e9:8.2f} GB"
    return f"{name:10} {len(predicted['blocks']):6} {size} {predicted['seconds']:9.0f} s {memory}"


def main(names: list[str], examples: int, batch_size: int) -> None:
    """Prints the table."""
    with TemporaryDirectory() as folder:
        few = ["--examples", "2", "--batch-size", "2"]
        _, libraries = kfacpack("estimate", "--task", "digits", *few, "-o", Path(folder) / "tiny.kfac")
        headings = ("bundle", "time", "predicted", "measured")
        print(f"{'model':10} blocks " + " ".join(f"{heading:>11}" for heading in headings))
        for name in names:
            print(row(name, Path(folder), examples, batch_size, libraries), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measures the cost of curvature for common models.")
    parser.add_argument("models", nargs="*", help=f"one or more of {', '.join([*VISION, *T5])}; default: all")
    parser.add_argument("--examples", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=8)
    options = parser.parse_args()
    if unknown := [name for name in options.models if name not in (*VISION, *T5)]:
        parser.error(f"unknown model {unknown[0]!r}; expected one of: {', '.join([*VISION, *T5])}")
    main(options.models or [*VISION, *T5], options.examples, options.batch_size)
