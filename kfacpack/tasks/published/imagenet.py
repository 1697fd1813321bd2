"""ImageNet, the control task: classes and prompts are those that open_clip carries, read where they lie."""

from __future__ import annotations

import re
import runpy
from collections.abc import Sequence
from functools import cache
from typing import Any

from kfacpack.packages import Package
from kfacpack.tasks.published.base import HIDDEN, Published

OPEN_CLIP = Package("open_clip_torch", "open_clip", tested="3.3.0")
TIMM = Package("timm", "timm", tested="1.0.30")
WORDNET = re.compile(r"n\d{8}")


def imagenet() -> Published:
    return Published(
        name="imagenet",
        repository="ILSVRC/imagenet-1k",
        license="for non-commercial research",
        classes=1000,
        stored={"train": 1281167, "test": 50000},
        inputs={"image": ("image", "img")},
        splits={**HIDDEN, "test": ("validation", "val", "test")},
        templates=tuple(template("{}") for template in _carried()["OPENAI_IMAGENET_TEMPLATES"]),
        words=words,
        gated=True,
    )


def words(stored: Sequence[str]) -> tuple[str, ...]:
    """Folders are known by their WordNet number, all thousand by their place; of others, the first of their names."""
    names = _carried()["IMAGENET_CLASSNAMES"]
    if all(map(WORDNET.fullmatch, stored)):
        place = {synset: number for number, synset in enumerate(_synsets())}
        return tuple(names[place[each]] if each in place else each for each in stored)
    if len(stored) == len(names) and stored[0].split(",")[0] == names[0]:  # in order of their numbers, not by name
        return tuple(names)
    return tuple(each.split(",")[0].replace("_", " ") for each in stored)


@cache
def _carried() -> dict[str, Any]:
    """What the file defines; importing open_clip itself would take seconds."""
    return runpy.run_path(str(OPEN_CLIP.file("zero_shot_metadata.py")))


@cache
def _synsets() -> tuple[str, ...]:
    return TIMM.read("data/_info/imagenet_synsets.txt", lambda data: tuple(data.decode().split()))
