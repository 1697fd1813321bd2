"""The text tower's vocabulary: what is frequent in captions is merged, in the file format of CLIP's tokenizer."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path

MERGES = 768
END = "</w>"


def write_merges(captions: Iterable[str], path: Path) -> None:
    """A first line that is skipped, then one merge a line; the same bytes for the same captions."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(end_of_word_suffix=END))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(
        # What CLIP takes for a word: letters, one digit, or other signs.
        pattern=Regex(r"\p{L}+|\p{N}|[^\s\p{L}\p{N}]+"),
        behavior="removed",
        invert=True,
    )
    letters = [chr(code) for code in range(33, 127)]
    trainer = trainers.BpeTrainer(
        # Every letter counts twice, once as the end of a word.
        vocab_size=MERGES + 2 * len(letters),
        min_frequency=2,
        # Of pairs that are as frequent, the one with the smaller numbers is merged. Letters get theirs as they are met,
        # in an order that changes from call to call, unless they have them beforehand.
        special_tokens=[*letters, *(letter + END for letter in letters)],
        end_of_word_suffix=END,
        show_progress=False,
    )
    tokenizer.train_from_iterator((each.lower() for each in captions), trainer)
    merges = _merges(tokenizer)[:MERGES]
    with path.open("wb") as file, gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed:
        packed.write("\n".join(["#version: 0.2", *merges]).encode())


def _merges(tokenizer) -> list[str]:
    return [
        merge if isinstance(merge, str) else " ".join(merge)
        for merge in json.loads(tokenizer.to_str())["model"]["merges"]
    ]
