"""The vocabulary of the text encoder: byte-pair merges of the captions, in the file format of CLIP's tokenizer."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path

MERGES = 768
END = "</w>"


def write_merges(captions: Iterable[str], path: Path) -> None:
    """Writes the merges, one per line after a header line; the same captions give the same bytes."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(end_of_word_suffix=END))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(
        # The words of CLIP: letters, a single digit, or other characters.
        pattern=Regex(r"\p{L}+|\p{N}|[^\s\p{L}\p{N}]+"),
        behavior="removed",
        invert=True,
    )
    letters = [chr(code) for code in range(33, 127)]
    trainer = trainers.BpeTrainer(
        # Every character counts twice, once as the end of a word.
        vocab_size=MERGES + 2 * len(letters),
        min_frequency=2,
        # Ties between equally frequent pairs are broken by token number. Numbering the characters beforehand makes the
        # result deterministic; otherwise they are numbered in an order that changes from call to call.
        special_tokens=[*letters, *(letter + END for letter in letters)],
        end_of_word_suffix=END,
        show_progress=False,
    )
    tokenizer.train_from_iterator((text.lower() for text in captions), trainer)
    merges = _merges(tokenizer)[:MERGES]
    with path.open("wb") as file, gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed:
        packed.write("\n".join(["#version: 0.2", *merges]).encode())


def _merges(tokenizer) -> list[str]:
    return [
        merge if isinstance(merge, str) else " ".join(merge)
        for merge in json.loads(tokenizer.to_str())["model"]["merges"]
    ]
