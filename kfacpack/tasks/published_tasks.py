"""Definitions of the published tasks: vision tasks from the task arithmetic papers, ImageNet and six NLI tasks.

The class names and prompts of the vision tasks are those of CLIP's authors. ImageNet, the usual control task for
negation, uses those of open_clip. The class names of the natural language inference (NLI) tasks are T5's label words
and are left unchanged.
"""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import product
from typing import Any

from kfacpack.tasks.data_files import PackageData
from kfacpack.tasks.data_sources import RequestedColumns
from kfacpack.tasks.task import validation_indices

ClassNamesFn = Callable[[Sequence[str]], tuple[str, ...]]
"""Function that maps stored class names to words for prompts."""


def plain_names(stored: Sequence[str]) -> tuple[str, ...]:
    """Converts stored names such as baseball_diamond or /c/church/outdoor to words separated by spaces."""
    return tuple(map(_plain_name, stored))


def _plain_name(name: str) -> str:
    folder = re.fullmatch(r"/[a-z]/(.+)", name)
    return (folder[1].replace("/", " ") if folder else name).replace("_", " ")


def names_from_table(names: Mapping[str, str]) -> ClassNamesFn:
    """Returns a function that looks up class names in a table.

    Args:
        names: Words for prompts, by stored name. Case, spaces and punctuation in stored names are ignored. Names that
            are not in the table are converted by `plain_names`.
    """
    table = {_alphanumeric(name): words for name, words in names.items()}
    return lambda stored: tuple(table.get(_alphanumeric(name)) or _plain_name(name) for name in stored)


def _alphanumeric(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


IMAGE_COLUMNS = {"image": ("image", "img")}
"""Possible names of the image column."""
VALIDATION = ("validation", "valid", "val", "dev")
"""Possible names of a validation split."""
DEFAULT_SPLITS = {"train": ("train",), "validation": VALIDATION, "test": ("test",)}
HIDDEN_TEST_SPLITS = {"train": ("train",), "test": ("validation", "test")}
"""Names of splits in datasets whose test labels are not public. `validation` is used as the test split."""


@dataclass(frozen=True)
class PublishedTask:
    """Definition of a task with a published dataset. Creating a definition neither reads nor downloads data."""

    name: str
    """Name of the task."""
    repository: str
    """Repository on the Hub, `owner/repository`."""
    license: str | None
    """License stated by the owners of the data; None if they state no license."""
    classes: int
    """Number of classes."""
    stored: Mapping[str, int]
    """Number of examples in the repository for each split of the task, without the rows that are left out."""
    inputs: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: IMAGE_COLUMNS)
    """Possible column names for each key of an example; the name that the repository uses comes first."""
    label: tuple[str, ...] = ("label", "labels")
    """Possible names of the label column."""
    config: str | None = None
    """Config of the repository."""
    revision: str | None = None
    """Revision of the repository; None for the main branch."""
    splits: Mapping[str, tuple[str, ...]] | None = None
    """Possible names of each split in the repository; the first existing name is used. Other splits of the repository,
    such as corrupted copies of `test`, are ignored. If None, `DEFAULT_SPLITS` is used."""
    prompts: tuple[str, ...] | Callable[[], tuple[str, ...]] = ()
    """Prompt templates, with {} in place of the class name, or a function that reads them from a package."""
    words: ClassNamesFn = plain_names
    """Function that maps the stored class names to words for prompts."""
    drops_unlabelled: bool = False
    """Whether rows without a label are left out. If False, reading the label of such a row raises an error."""
    gated: bool = False
    """Whether users have to accept terms on the Hub before they can download the data."""

    @property
    def templates(self) -> tuple[str, ...]:
        """Prompt templates, with {} in place of the class name; empty for text tasks."""
        return self.prompts() if callable(self.prompts) else self.prompts

    @property
    def split_names(self) -> Mapping[str, tuple[str, ...]]:
        """Possible names of each split in the repository."""
        return self.splits or DEFAULT_SPLITS

    @property
    def requested_columns(self) -> RequestedColumns:
        """Columns to look for in the data."""
        return RequestedColumns(self.inputs, self.label, required=False)

    @property
    def sizes(self) -> dict[str, int]:
        """Number of examples in each split of the task."""
        if "validation" in self.stored:
            return dict(self.stored)
        held_out = len(validation_indices(self.stored["train"]))
        others = {split: size for split, size in self.stored.items() if split != "train"}
        return {"train": self.stored["train"] - held_out, "validation": held_out, **others}

    @property
    def url(self) -> str:
        """Page of the dataset on the Hub."""
        return f"https://huggingface.co/datasets/{self.repository}"


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
"""CLIP's class names, by folder name in the EuroSAT archive."""

eurosat_classes = names_from_table(EUROSAT_CLASSES)

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
"""German names and CLIP's class names for the 43 GTSRB signs, in the order of the benchmark's class numbers.

Two of CLIP's class names are misspelled. They are not corrected, because published scores use these prompts.
"""

_GTSRB_BY_NAME = names_from_table({**dict(GTSRB_SIGNS), **{words: words for _, words in GTSRB_SIGNS}})


def gtsrb_classes(stored: Sequence[str]) -> tuple[str, ...]:
    """Returns CLIP's class names for classes stored under CLIP's names, German names or numbers such as 00014."""
    if all(re.fullmatch(r"\d{1,5}", name) and int(name) < len(GTSRB_SIGNS) for name in stored):
        return tuple(GTSRB_SIGNS[int(name)][1] for name in stored)
    return _GTSRB_BY_NAME(stored)


def _join_words(*parts: tuple[str, ...]) -> tuple[str, ...]:
    """Returns all combinations of one phrase per part, such as "a photo of a {}." and "a photo of the {}."."""
    return tuple(" ".join(word for word in words if word) + "." for words in product(*parts))


CARS_TEMPLATES = (
    *_join_words(("a photo of",), ("a", "the", "my"), ("{}",)),
    "i love my {}!",
    *_join_words(("a photo of my",), ("dirty", "clean", "new", "old"), ("{}",)),
)
DTD_TEMPLATES = _join_words(("a photo of",), ("a", "the"), ("{}",), ("texture", "pattern", "thing", "object"))
EUROSAT_TEMPLATES = _join_words(("a centered satellite photo of",), ("", "a", "the"), ("{}",))
GTSRB_TEMPLATES = _join_words(("a",), ("zoomed in", "centered", "close up"), ('photo of a "{}" traffic sign',))
NUMBER_TEMPLATES = ('a photo of the number: "{}".',)
RESISC45_TEMPLATES = tuple(
    f"{view} {kind} of {article}{{}}."
    for article, kind, view in product(("", "a ", "the "), ("imagery", "photo", "view"), ("satellite", "aerial"))
)
SUN397_TEMPLATES = _join_words(("a photo of",), ("a", "the"), ("{}",))

OPEN_CLIP = PackageData("open_clip_torch", "open_clip", tested="3.3.0")
TIMM = PackageData("timm", "timm", tested="1.0.30")
WORDNET = re.compile(r"n\d{8}")


def imagenet_templates() -> tuple[str, ...]:
    """Returns open_clip's prompt templates for ImageNet, with {} in place of the class name."""
    return tuple(template("{}") for template in _open_clip_metadata()["OPENAI_IMAGENET_TEMPLATES"])


def imagenet_classes(stored: Sequence[str]) -> tuple[str, ...]:
    """Returns open_clip's names for the classes of a copy of ImageNet.

    If all stored names are WordNet ids, open_clip's names for these ids are returned. If there are as many
    stored names as open_clip has, and the first name is the same, the order is assumed to be the same, and open_clip's
    names are returned. Otherwise, the first synonym in each stored name is returned.
    """
    names = _open_clip_metadata()["IMAGENET_CLASSNAMES"]
    if all(map(WORDNET.fullmatch, stored)):
        position = {synset: number for number, synset in enumerate(_synsets())}
        return tuple(names[position[synset]] if synset in position else synset for synset in stored)
    if len(stored) == len(names) and stored[0].split(",")[0] == names[0]:  # in the order of the class numbers
        return tuple(names)
    return tuple(name.split(",")[0].replace("_", " ") for name in stored)


@cache
def _open_clip_metadata() -> dict[str, Any]:
    """Returns open_clip's class names and templates.

    Only the file that defines them is run, because importing open_clip takes several seconds.
    """
    return runpy.run_path(str(OPEN_CLIP.file("zero_shot_metadata.py")))


@cache
def _synsets() -> tuple[str, ...]:
    return TIMM.read("data/_info/imagenet_synsets.txt", lambda data: tuple(data.decode().split()))


PREMISE, HYPOTHESIS = ("premise", "sentence1"), ("hypothesis", "sentence2")
NLI_COLUMNS = {"premise": PREMISE, "hypothesis": HYPOTHESIS}
NLI_LABEL = ("label", "gold_label")
SICK_COLUMNS = {"sentence_A": ("sentence_A", *PREMISE), "sentence_B": ("sentence_B", *HYPOTHESIS)}
RTE_COLUMNS = {"sentence1": ("sentence1", "premise"), "sentence2": ("sentence2", "hypothesis")}
QNLI_COLUMNS = {"question": ("question",), "sentence": ("sentence",)}
GLUE_LICENSE = "several, see the corpus"
IMAGENET_SPLITS = {**HIDDEN_TEST_SPLITS, "test": ("validation", "val", "test")}
MNLI_SPLITS = {**HIDDEN_TEST_SPLITS, "test": ("validation_matched", "validation", "test")}

_nli_task = partial(PublishedTask, inputs=NLI_COLUMNS, label=NLI_LABEL, words=tuple)


def _sizes(*sizes: int) -> dict[str, int]:
    """Returns a dict of sizes by split name: train and test for two sizes, or train, validation and test for three."""
    splits = ("train", "test") if len(sizes) == 2 else ("train", "validation", "test")
    return dict(zip(splits, sizes, strict=True))


# Name, repository, license, number of classes and stored sizes, followed by the fields that differ from the defaults.
PUBLISHED_TASKS = (
    PublishedTask("stanford_cars", "tanganke/stanford_cars", None, 196, _sizes(8144, 8041), prompts=CARS_TEMPLATES),
    PublishedTask("dtd", "tanganke/dtd", "for research", 47, _sizes(3760, 1880), prompts=DTD_TEMPLATES),
    PublishedTask(
        "eurosat", "tanganke/eurosat", "MIT", 10, _sizes(21600, 2700), prompts=EUROSAT_TEMPLATES, words=eurosat_classes
    ),
    PublishedTask(
        "gtsrb", "tanganke/gtsrb", None, 43, _sizes(26640, 12630), prompts=GTSRB_TEMPLATES, words=gtsrb_classes
    ),
    PublishedTask("mnist", "ylecun/mnist", "MIT", 10, _sizes(60000, 10000), prompts=NUMBER_TEMPLATES),
    PublishedTask("resisc45", "tanganke/resisc45", None, 45, _sizes(18900, 6300), prompts=RESISC45_TEMPLATES),
    PublishedTask("sun397", "tanganke/sun397", None, 397, _sizes(19850, 19850), prompts=SUN397_TEMPLATES),
    PublishedTask(
        "svhn",
        "ufldl-stanford/svhn",
        "for non-commercial use",
        10,
        _sizes(73257, 26032),
        config="cropped_digits",
        prompts=NUMBER_TEMPLATES,
    ),
    # Rows of SNLI without a majority label are left out: 785 in train, 158 in validation and 176 in test.
    _nli_task(
        "snli",
        "stanfordnlp/snli",
        "CC BY-SA 4.0",
        3,
        _sizes(549367, 9842, 9824),
        config="plain_text",
        drops_unlabelled=True,
    ),
    _nli_task("mnli", "nyu-mll/glue", GLUE_LICENSE, 3, _sizes(392702, 9815), config="mnli", splits=MNLI_SPLITS),
    _nli_task(
        "sick",
        "RobZamp/sick",
        "CC BY-NC-SA 3.0",
        3,
        _sizes(4439, 495, 4906),
        inputs=SICK_COLUMNS,
        revision="refs/convert/parquet",  # the main branch contains a loading script
        config="default",
    ),
    _nli_task("scitail", "allenai/scitail", None, 2, _sizes(23097, 1304, 2126), config="tsv_format"),
    _nli_task(
        "rte",
        "nyu-mll/glue",
        GLUE_LICENSE,
        2,
        _sizes(2490, 277),
        inputs=RTE_COLUMNS,
        config="rte",
        splits=HIDDEN_TEST_SPLITS,
    ),
    _nli_task(
        "qnli",
        "nyu-mll/glue",
        "CC BY-SA 4.0",
        2,
        _sizes(104743, 5463),
        inputs=QNLI_COLUMNS,
        config="qnli",
        splits=HIDDEN_TEST_SPLITS,
    ),
    PublishedTask(
        "imagenet",
        "ILSVRC/imagenet-1k",
        "for non-commercial research",
        1000,
        _sizes(1281167, 50000),
        splits=IMAGENET_SPLITS,
        prompts=imagenet_templates,
        words=imagenet_classes,
        gated=True,
    ),
)
"""Definitions of all published tasks."""
