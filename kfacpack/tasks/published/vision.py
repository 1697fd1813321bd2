"""The eight vision tasks of the task arithmetic papers, and the prompts that CLIP's authors use for each."""

from __future__ import annotations

from itertools import product

from kfacpack.tasks.published import eurosat as eurosat_words
from kfacpack.tasks.published import gtsrb as gtsrb_words
from kfacpack.tasks.published.base import Published
from kfacpack.tasks.published.words import looked_up

PICTURE = {"image": ("image", "img")}
NUMBER = ('a photo of the number: "{}".',)


def _filled(*parts: tuple[str, ...]) -> tuple[str, ...]:
    """Every choice of one of each: ("a photo of",), ("a", "the") -> "a photo of a {}.", "a photo of the {}."."""
    return tuple(" ".join(word for word in words if word) + "." for words in product(*parts))


def stanford_cars() -> Published:
    return Published(
        name="stanford_cars",
        repository="tanganke/stanford_cars",
        license=None,
        classes=196,
        stored={"train": 8144, "test": 8041},
        inputs=PICTURE,
        templates=(
            *_filled(("a photo of",), ("a", "the", "my"), ("{}",)),
            "i love my {}!",
            *_filled(("a photo of my",), ("dirty", "clean", "new", "old"), ("{}",)),
        ),
    )


def dtd() -> Published:
    return Published(
        name="dtd",
        repository="tanganke/dtd",
        license="for research",
        classes=47,
        stored={"train": 3760, "test": 1880},
        inputs=PICTURE,
        templates=_filled(("a photo of",), ("a", "the"), ("{}",), ("texture", "pattern", "thing", "object")),
    )


def eurosat() -> Published:
    return Published(
        name="eurosat",
        repository="tanganke/eurosat",
        license="MIT",
        classes=10,
        stored={"train": 21600, "test": 2700},
        inputs=PICTURE,
        templates=_filled(("a centered satellite photo of",), ("", "a", "the"), ("{}",)),
        words=looked_up(eurosat_words.WORDS),
    )


def gtsrb() -> Published:
    return Published(
        name="gtsrb",
        repository="tanganke/gtsrb",
        license=None,
        classes=43,
        stored={"train": 26640, "test": 12630},
        inputs=PICTURE,
        templates=_filled(("a",), ("zoomed in", "centered", "close up"), ('photo of a "{}" traffic sign',)),
        words=gtsrb_words.words,
    )


def mnist() -> Published:
    return Published(
        name="mnist",
        repository="ylecun/mnist",
        license="MIT",
        classes=10,
        stored={"train": 60000, "test": 10000},
        inputs=PICTURE,
        templates=NUMBER,
    )


def resisc45() -> Published:
    return Published(
        name="resisc45",
        repository="tanganke/resisc45",
        license=None,
        classes=45,
        stored={"train": 18900, "test": 6300},
        inputs=PICTURE,
        templates=tuple(
            f"{seen} {kind} of {article}{{}}."
            for article, kind, seen in product(
                ("", "a ", "the "), ("imagery", "photo", "view"), ("satellite", "aerial")
            )
        ),
    )


def sun397() -> Published:
    return Published(
        name="sun397",
        repository="tanganke/sun397",
        license=None,
        classes=397,
        stored={"train": 19850, "test": 19850},
        inputs=PICTURE,
        templates=_filled(("a photo of",), ("a", "the"), ("{}",)),
    )


def svhn() -> Published:
    return Published(
        name="svhn",
        repository="ufldl-stanford/svhn",
        config="cropped_digits",
        license="for non-commercial use",
        classes=10,
        stored={"train": 73257, "test": 26032},
        inputs=PICTURE,
        templates=NUMBER,
    )
