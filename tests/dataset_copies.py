"""Small copies of published data sets with random rows, in the Hub's files, columns, types and splits."""

from __future__ import annotations

from pathlib import Path

import datasets
import numpy as np
from PIL import Image

WORDS = ["a", "dog", "runs", "over", "the", "green", "field", "an", "animal", "moves", "nobody", "sleeps"]
CORRUPTED = ("contrast", "gaussian_noise", "impulse_noise", "jpeg_compression", "motion_blur", "pixelate", "spatter")
DIGITS = [str(digit) for digit in range(10)]
COUNTS = {"train": 24, "test": 6, "validation": 5, "validation_matched": 7, "validation_mismatched": 3}
PAIR = ("premise", "hypothesis")
THREE, TWO = ["entailment", "neutral", "contradiction"], ["entailment", "not_entailment"]
GLUE_TEST = ("test", "test_matched", "test_mismatched")

# Task to folder, splits, text columns, class names.
VISION = {
    "stanford_cars": ("data", ("train", "test", *CORRUPTED), ["Audi TTS Coupe 2012", "Ram C/V Cargo Van Minivan 2012"]),
    "dtd": ("data", ("train", "test"), ["banded", "blotchy", "polka-dotted"]),
    "eurosat": ("data", ("train", "test", *CORRUPTED), ["annual crop land", "forest", "lake or sea"]),
    "gtsrb": ("data", ("train", "test", *CORRUPTED), ["stop", "end / de-restriction of 80 kph speed limit"]),
    "mnist": ("mnist", ("train", "test"), DIGITS),
    "resisc45": ("data", ("train", "test"), ["airplane", "baseball_diamond"]),
    "sun397": ("data", ("train", "test"), ["abbey", "airplane cabin"]),
    "svhn": ("cropped_digits", ("train", "test", "extra"), DIGITS),
    "imagenet": ("data", ("train", "validation", "test"), ["tench, Tinca tinca", "goldfish, Carassius auratus"]),
}
TEXT = {
    "snli": ("plain_text", ("train", "validation", "test"), PAIR, THREE),
    "mnli": ("mnli", ("train", "validation_matched", "validation_mismatched", *GLUE_TEST[1:]), PAIR, THREE),
    "sick": ("default", ("train", "validation", "test"), ("sentence_A", "sentence_B"), THREE),
    "scitail": ("tsv_format", ("train", "validation", "test"), PAIR, None),
    "rte": ("rte", ("train", "validation", "test"), ("sentence1", "sentence2"), TWO),
    "qnli": ("qnli", ("train", "validation", "test"), ("question", "sentence"), TWO),
}
HIDDEN = {"mnli", "rte", "qnli", "imagenet"}
"""Tasks whose test labels are -1."""


def copy(name: str, folder: Path, viewer: bool = False) -> Path:
    """Writes a copy of a task; with `viewer`, in the layout of the Hub's own parquet conversion."""
    inside, splits = (VISION.get(name) or TEXT[name])[:2]
    for split in splits:
        data = (pictures if name in VISION else pairs)(name, split)
        config = "default" if inside == "data" else inside
        file = f"{config}/{split}/0000.parquet" if viewer else f"{inside}/{split}-00000-of-00001.parquet"
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        data.to_parquet(folder / file)
    if name == "svhn":  # the other config is for detection
        boxes = datasets.Dataset.from_dict({"image": [None], "digits": [[1, 2]]})
        (folder / "full_numbers").mkdir(exist_ok=True)
        boxes.to_parquet(folder / "full_numbers" / "train-00000-of-00001.parquet")
    return folder


def labels(name: str, split: str, classes: int) -> list[int]:
    count = COUNTS.get(split, 3)
    if name in HIDDEN and split in GLUE_TEST:
        return [-1] * count
    return [-1 if name == "snli" and row == 2 else row % classes for row in range(count)]


def pictures(name: str, split: str) -> datasets.Dataset:
    classes = VISION[name][2]
    random = np.random.default_rng(len(split))
    values = labels(name, split, len(classes))
    images = [Image.fromarray(random.integers(0, 256, (9, 12, 3), dtype=np.uint8)) for _ in values]
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=classes))
    return datasets.Dataset.from_dict({"image": images, "label": values}, features)


def pairs(name: str, split: str) -> datasets.Dataset:
    _, _, columns, classes = TEXT[name]
    values = labels(name, split, len(classes or "12"))
    random = np.random.default_rng(len(split))
    rows = {column: [" ".join(random.choice(WORDS, 2 + row % 4)) for row in range(len(values))] for column in columns}
    text = datasets.Value("string")
    features = dict.fromkeys(columns, text) | {"label": datasets.ClassLabel(names=classes) if classes else text}
    rows["label"] = values if classes else [("neutral", "entails")[label] for label in values]
    if name in ("mnli", "rte", "qnli"):
        features["idx"], rows["idx"] = datasets.Value("int32"), list(range(len(values)))
    if name == "sick":
        features |= {"id": text, "relatedness_score": datasets.Value("float32"), "entailment_AB": text}
        rows |= {
            "id": ["1"] * len(values),
            "relatedness_score": [1.0] * len(values),
            "entailment_AB": ["A"] * len(values),
        }
    return datasets.Dataset.from_dict(rows, datasets.Features(features))
