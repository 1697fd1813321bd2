"""Definitions of the published tasks: vision tasks of the task arithmetic papers, ImageNet and six NLI tasks.

Class names and prompts of the vision tasks are those of CLIP's authors. ImageNet, the control task, uses those of
open_clip. The class names of the natural language inference tasks are T5's label words and are left unchanged.
"""

from __future__ import annotations

import re
import runpy
from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any

from kfacpack.tasks.data_files import PackageData
from kfacpack.tasks.published import HIDDEN_TEST_SPLITS, PublishedTask, names_from_table

EUROSAT_CLASSES = {
    "AnnualCrop": "annual crop land",
    "Forest": "forest",
    "HerbaceousVegetation": "brushland or shrubland",
    "Highway": "highway or road",
    "Industrial": "industrial buildings or commercial buildings",
    "Pasture": "pasture land",
    "PermanentCrop": "permanent crop land",
    "Residential": "residential buildings or homes or apartments",
    "River": "river",
    "SeaLake": "lake or sea",
    "Sea or Lake": "lake or sea",
}
"""Folder in the EuroSAT archive to CLIP's class name."""


GTSRB_SIGNS = (
    ("20_kmh", "red and white circle 20 kph speed limit"),
    ("30_kmh", "red and white circle 30 kph speed limit"),
    ("50_kmh", "red and white circle 50 kph speed limit"),
    ("60_kmh", "red and white circle 60 kph speed limit"),
    ("70_kmh", "red and white circle 70 kph speed limit"),
    ("80_kmh", "red and white circle 80 kph speed limit"),
    ("80_aufgehoben", "end / de-restriction of 80 kph speed limit"),
    ("100_kmh", "red and white circle 100 kph speed limit"),
    ("120_kmh", "red and white circle 120 kph speed limit"),
    ("ueberholverbot", "red and white circle red car and black car no passing"),
    ("lkw_ueberholverbot", "red and white circle red truck and black car no passing"),
    ("einmalige_vorfahrt", "red and white triangle road intersection warning"),
    ("vorfahrsstrasse", "white and yellow diamond priority road"),
    ("vorfahrt_gewaehren", "red and white upside down triangle yield right-of-way"),
    ("stopp", "stop"),
    ("durchfahrt_verboten", "empty red and white circle"),
    ("lkw_verboten", "red and white circle no truck entry"),
    ("verbot_der_einfahrt", "red circle with white horizonal stripe no entry"),
    ("gefahrenstelle", "red and white triangle with exclamation mark warning"),
    ("scharfe_kurve_links", "red and white triangle with black left curve approaching warning"),
    ("scharfe_kurve_rechts", "red and white triangle with black right curve approaching warning"),
    ("s_kurve_links", "red and white triangle with black double curve approaching warning"),
    ("unebene_fahrbahn", "red and white triangle rough / bumpy road warning"),
    ("rutschgefahr", "red and white triangle car skidding / slipping warning"),
    ("verengte_fahrbahn", "red and white triangle with merging / narrow lanes warning"),
    ("baustelle", "red and white triangle with person digging / construction / road work warning"),
    ("ampel", "red and white triangle with traffic light approaching warning"),
    ("fussgaenger", "red and white triangle with person walking warning"),
    ("achtung_kinder", "red and white triangle with child and person walking warning"),
    ("achtung_fahrrad", "red and white triangle with bicyle warning"),
    ("achtung_eis", "red and white triangle with snowflake / ice warning"),
    ("achtung_wildwechsel", "red and white triangle with deer warning"),
    ("unbegrenzt", "white circle with gray strike bar no speed limit"),
    ("vorgeschrieben_rechts", "blue circle with white right turn arrow mandatory"),
    ("vorgeschrieben_links", "blue circle with white left turn arrow mandatory"),
    ("vorgeschrieben_geradeaus", "blue circle with white forward arrow mandatory"),
    ("vorgeschrieben_geradeaus_rechts", "blue circle with white forward or right turn arrow mandatory"),
    ("vorgeschrieben_geradeaus_links", "blue circle with white forward or left turn arrow mandatory"),
    ("vorbeifahren_rechts", "blue circle with white keep right arrow mandatory"),
    ("vorbeifahren_links", "blue circle with white keep left arrow mandatory"),
    ("kreisverkehr", "blue circle with white arrows indicating a traffic circle"),
    ("ueberholverbot_aufgehoben", "white circle with gray strike bar indicating no passing for cars has ended"),
    ("lkw_ueberholverbot_aufgehoben", "white circle with gray strike bar indicating no passing for trucks has ended"),
)
"""German name and CLIP's class name of the 43 GTSRB signs, in the order of the benchmark's class numbers.

The two spelling mistakes are CLIP's and are kept, because published scores use these prompts.
"""

_GTSRB_BY_NAME = names_from_table({**dict(GTSRB_SIGNS), **{words: words for _, words in GTSRB_SIGNS}})


def gtsrb_classes(stored: Sequence[str]) -> tuple[str, ...]:
    """Returns CLIP's class names for the stored ones: CLIP's own, German names or class numbers such as 00014."""
    if all(re.fullmatch(r"\d{1,5}", name) and int(name) < len(GTSRB_SIGNS) for name in stored):
        return tuple(GTSRB_SIGNS[int(name)][1] for name in stored)
    return _GTSRB_BY_NAME(stored)


IMAGE_COLUMNS = {"image": ("image", "img")}
NUMBER_TEMPLATES = ('a photo of the number: "{}".',)


def _join_words(*parts: tuple[str, ...]) -> tuple[str, ...]:
    """Joins one word of each part: ("a photo of",), ("a", "the"), ("{}",) -> "a photo of a {}."."""
    return tuple(" ".join(word for word in words if word) + "." for words in product(*parts))


def stanford_cars() -> PublishedTask:
    """Returns the definition of Stanford Cars."""
    return PublishedTask(
        name="stanford_cars",
        repository="tanganke/stanford_cars",
        license=None,
        classes=196,
        stored={"train": 8144, "test": 8041},
        inputs=IMAGE_COLUMNS,
        templates=(
            *_join_words(("a photo of",), ("a", "the", "my"), ("{}",)),
            "i love my {}!",
            *_join_words(("a photo of my",), ("dirty", "clean", "new", "old"), ("{}",)),
        ),
    )


def dtd() -> PublishedTask:
    """Returns the definition of the Describable Textures Dataset."""
    return PublishedTask(
        name="dtd",
        repository="tanganke/dtd",
        license="for research",
        classes=47,
        stored={"train": 3760, "test": 1880},
        inputs=IMAGE_COLUMNS,
        templates=_join_words(("a photo of",), ("a", "the"), ("{}",), ("texture", "pattern", "thing", "object")),
    )


def eurosat() -> PublishedTask:
    """Returns the definition of EuroSAT."""
    return PublishedTask(
        name="eurosat",
        repository="tanganke/eurosat",
        license="MIT",
        classes=10,
        stored={"train": 21600, "test": 2700},
        inputs=IMAGE_COLUMNS,
        templates=_join_words(("a centered satellite photo of",), ("", "a", "the"), ("{}",)),
        words=names_from_table(EUROSAT_CLASSES),
    )


def gtsrb() -> PublishedTask:
    """Returns the definition of the German Traffic Sign Recognition Benchmark."""
    return PublishedTask(
        name="gtsrb",
        repository="tanganke/gtsrb",
        license=None,
        classes=43,
        stored={"train": 26640, "test": 12630},
        inputs=IMAGE_COLUMNS,
        templates=_join_words(("a",), ("zoomed in", "centered", "close up"), ('photo of a "{}" traffic sign',)),
        words=gtsrb_classes,
    )


def mnist() -> PublishedTask:
    """Returns the definition of MNIST."""
    return PublishedTask(
        name="mnist",
        repository="ylecun/mnist",
        license="MIT",
        classes=10,
        stored={"train": 60000, "test": 10000},
        inputs=IMAGE_COLUMNS,
        templates=NUMBER_TEMPLATES,
    )


def resisc45() -> PublishedTask:
    """Returns the definition of RESISC45."""
    return PublishedTask(
        name="resisc45",
        repository="tanganke/resisc45",
        license=None,
        classes=45,
        stored={"train": 18900, "test": 6300},
        inputs=IMAGE_COLUMNS,
        templates=tuple(
            f"{view} {kind} of {article}{{}}."
            for article, kind, view in product(
                ("", "a ", "the "), ("imagery", "photo", "view"), ("satellite", "aerial")
            )
        ),
    )


def sun397() -> PublishedTask:
    """Returns the definition of SUN397."""
    return PublishedTask(
        name="sun397",
        repository="tanganke/sun397",
        license=None,
        classes=397,
        stored={"train": 19850, "test": 19850},
        inputs=IMAGE_COLUMNS,
        templates=_join_words(("a photo of",), ("a", "the"), ("{}",)),
    )


def svhn() -> PublishedTask:
    """Returns the definition of SVHN, the cropped digits."""
    return PublishedTask(
        name="svhn",
        repository="ufldl-stanford/svhn",
        config="cropped_digits",
        license="for non-commercial use",
        classes=10,
        stored={"train": 73257, "test": 26032},
        inputs=IMAGE_COLUMNS,
        templates=NUMBER_TEMPLATES,
    )


OPEN_CLIP = PackageData("open_clip_torch", "open_clip", tested="3.3.0")
TIMM = PackageData("timm", "timm", tested="1.0.30")
WORDNET = re.compile(r"n\d{8}")


def imagenet() -> PublishedTask:
    """Returns the definition of ImageNet-1k. Its validation split is used as test split."""
    return PublishedTask(
        name="imagenet",
        repository="ILSVRC/imagenet-1k",
        license="for non-commercial research",
        classes=1000,
        stored={"train": 1281167, "test": 50000},
        inputs=IMAGE_COLUMNS,
        splits={**HIDDEN_TEST_SPLITS, "test": ("validation", "val", "test")},
        templates=tuple(template("{}") for template in _open_clip_metadata()["OPENAI_IMAGENET_TEMPLATES"]),
        words=imagenet_classes,
        gated=True,
    )


def imagenet_classes(stored: Sequence[str]) -> tuple[str, ...]:
    """Returns open_clip's class names for the stored ones.

    WordNet ids are looked up, and all thousand classes in their usual order are replaced by position; of other names
    with synonyms, the first is used.
    """
    names = _open_clip_metadata()["IMAGENET_CLASSNAMES"]
    if all(map(WORDNET.fullmatch, stored)):
        position = {synset: number for number, synset in enumerate(_synsets())}
        return tuple(names[position[synset]] if synset in position else synset for synset in stored)
    if len(stored) == len(names) and stored[0].split(",")[0] == names[0]:  # ordered by class number, not by name
        return tuple(names)
    return tuple(name.split(",")[0].replace("_", " ") for name in stored)


@cache
def _open_clip_metadata() -> dict[str, Any]:
    """Runs the file with open_clip's class names and templates; importing open_clip would take seconds."""
    return runpy.run_path(str(OPEN_CLIP.file("zero_shot_metadata.py")))


@cache
def _synsets() -> tuple[str, ...]:
    return TIMM.read("data/_info/imagenet_synsets.txt", lambda data: tuple(data.decode().split()))


PREMISE, HYPOTHESIS = ("premise", "sentence1"), ("hypothesis", "sentence2")
NLI_COLUMNS = {"premise": PREMISE, "hypothesis": HYPOTHESIS}
NLI_LABEL = ("label", "gold_label")


def snli() -> PublishedTask:
    """Returns the definition of SNLI. Rows without a label are left out."""
    return PublishedTask(
        name="snli",
        repository="stanfordnlp/snli",
        config="plain_text",
        license="CC BY-SA 4.0",
        classes=3,
        stored={"train": 549367, "validation": 9842, "test": 9824},
        inputs=NLI_COLUMNS,
        label=NLI_LABEL,
        words=tuple,
        drops_unlabelled=True,  # rows without a majority label: 785, 158 and 176
    )


def mnli() -> PublishedTask:
    """Returns the definition of MultiNLI. Its matched validation split is used as test split."""
    return PublishedTask(
        name="mnli",
        repository="nyu-mll/glue",
        config="mnli",
        license="several, see the corpus",
        classes=3,
        stored={"train": 392702, "test": 9815},
        inputs=NLI_COLUMNS,
        label=NLI_LABEL,
        splits={**HIDDEN_TEST_SPLITS, "test": ("validation_matched", "validation", "test")},
        words=tuple,
    )


def sick() -> PublishedTask:
    """Returns the definition of SICK."""
    return PublishedTask(
        name="sick",
        repository="RobZamp/sick",
        revision="refs/convert/parquet",  # the main branch contains a loading script
        config="default",
        license="CC BY-NC-SA 3.0",
        classes=3,
        stored={"train": 4439, "validation": 495, "test": 4906},
        inputs={"sentence_A": ("sentence_A", *PREMISE), "sentence_B": ("sentence_B", *HYPOTHESIS)},
        label=NLI_LABEL,
        words=tuple,
    )


def scitail() -> PublishedTask:
    """Returns the definition of SciTail."""
    return PublishedTask(
        name="scitail",
        repository="allenai/scitail",
        config="tsv_format",
        license=None,
        classes=2,
        stored={"train": 23097, "validation": 1304, "test": 2126},
        inputs=NLI_COLUMNS,
        label=NLI_LABEL,
        words=tuple,
    )


def rte() -> PublishedTask:
    """Returns the definition of RTE. Its validation split is used as test split."""
    return PublishedTask(
        name="rte",
        repository="nyu-mll/glue",
        config="rte",
        license="several, see the corpus",
        classes=2,
        stored={"train": 2490, "test": 277},
        inputs={"sentence1": ("sentence1", "premise"), "sentence2": ("sentence2", "hypothesis")},
        label=NLI_LABEL,
        splits=HIDDEN_TEST_SPLITS,
        words=tuple,
    )


def qnli() -> PublishedTask:
    """Returns the definition of QNLI. Its validation split is used as test split."""
    return PublishedTask(
        name="qnli",
        repository="nyu-mll/glue",
        config="qnli",
        license="CC BY-SA 4.0",
        classes=2,
        stored={"train": 104743, "test": 5463},
        inputs={"question": ("question",), "sentence": ("sentence",)},
        label=NLI_LABEL,
        splits=HIDDEN_TEST_SPLITS,
        words=tuple,
    )
