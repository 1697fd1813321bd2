"""Embedded tasks, whose images are generated on first use, checked against a recorded hash, and cached.

This module also contains helpers that split images, resize images and place glyphs on a canvas. Images are resized in
integer arithmetic, because image libraries can give different results on different machines.

The cache contains one safetensors file per task. The name of the file contains a hash of the images, so that a changed
task never reads an outdated file. If the cache folder cannot be used, the images are generated again in each process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from kfacpack._random import CounterRandom
from kfacpack.demo import canvas
from kfacpack.demo.canvas import Field, per_image, render_glyphs
from kfacpack.errors import BundleError, KfacpackError, printable
from kfacpack.format.writer import write_atomically
from kfacpack.tasks.data_files import PackageData
from kfacpack.tasks.task import DataOrigin, Example

ByteArray = NDArray[np.uint8]


class LabelledImages(NamedTuple):
    """Images with their labels."""

    images: ByteArray
    """Grey images, (N, height, width), or colour images, (N, height, width, 3)."""
    labels: NDArray[np.int32]
    """Labels, (N,), as indices into the task's classes."""


ImageSplits = Mapping[str, LabelledImages]
"""Labelled images by split."""


def label_images(images: NDArray[np.integer], labels: NDArray[np.integer]) -> LabelledImages:
    """Returns images and labels as contiguous arrays of dtype uint8 and int32, respectively."""
    return LabelledImages(np.ascontiguousarray(images, dtype=np.uint8), np.ascontiguousarray(labels, dtype=np.int32))


def images_digest(splits: ImageSplits) -> str:
    """Returns the SHA-256 digest of the names, shapes, pixels and labels of all splits."""
    total = sha256()
    for split in sorted(splits):
        images, labels = splits[split]
        total.update(f"{split} {images.shape} {labels.shape}\n".encode())
        total.update(np.ascontiguousarray(images, dtype=np.uint8).tobytes())
        total.update(np.ascontiguousarray(labels, dtype="<i4").tobytes())
    return total.hexdigest()


def split_images(labelled: LabelledImages, sizes: Mapping[str, int], name: str) -> ImageSplits:
    """Shuffles images and divides them among splits.

    Args:
        labelled: Images and labels of all splits.
        sizes: Number of images by split.
        name: Name of the task, which determines the random order.
    """
    order = CounterRandom(f"tasks/{name}/splits").permutation(len(labelled.labels))
    splits, start = {}, 0
    for split, size in sizes.items():
        indices = order[start : start + size]
        splits[split] = LabelledImages(labelled.images[indices], labelled.labels[indices])
        start += size
    return splits


IntArray = NDArray[np.int64]


def upsample(images: IntArray, size: int, max_value: int) -> IntArray:
    """Enlarges images by bilinear interpolation. Values are rounded only once, and border pixels are repeated.

    Args:
        images: Images, (N, S, S), with values from 0 to `max_value`.
        size: New width and height.
        max_value: Value that is mapped to 255.

    Returns:
        Images, (N, size, size), with values from 0 to 255.
    """
    side = images.shape[-1]
    # Pixel i of the new image lies at (2 i + 1) S / (2 size) - 1/2 in the old image, a multiple of 1 / (2 size).
    parts = 2 * size
    position = np.clip((2 * np.arange(size) + 1) * side - size, 0, (side - 1) * parts)
    first, share = position // parts, position % parts
    second = np.minimum(first + 1, side - 1)
    rows = images[:, first] * (parts - share)[:, None] + images[:, second] * share[:, None]
    weighted = rows[:, :, first] * (parts - share) + rows[:, :, second] * share
    divisor = parts * parts * max_value
    return np.asarray((weighted * 255 + divisor // 2) // divisor)


def downsample(images: IntArray) -> IntArray:
    """Halves the resolution, (N, 2 H, 2 W) -> (N, H, W): every new pixel is the rounded mean of four pixels."""
    total = images[:, ::2, ::2] + images[:, ::2, 1::2] + images[:, 1::2, ::2] + images[:, 1::2, 1::2]
    return np.asarray((total + 2) // 4)


def to_grayscale(colours: IntArray) -> IntArray:
    """Converts RGB values, (…, 3), to luma values, (…), as defined by ITU-R BT.601 and rounded to integers."""
    red, green, blue = colours[..., 0], colours[..., 1], colours[..., 2]
    return np.asarray((299 * red + 587 * green + 114 * blue + 500) // 1000)


def cache_path(task: str, digest: str) -> Path | None:
    """Returns the path of the cache file for a task's images, or None if there is no cache folder.

    The cache folder is $KFACPACK_CACHE or, if this variable is not set, $XDG_CACHE_HOME/kfacpack. If neither variable
    is set, the cache folder is ~/.cache/kfacpack. If the user has no home folder either, there is no cache folder.

    Args:
        task: Name of the task.
        digest: Expected `images_digest` of the images.
    """
    name = f"{task}-{digest[:16]}.safetensors"
    if folder := os.environ.get("KFACPACK_CACHE"):
        return Path(folder) / name
    shared = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # According to the XDG specification, relative paths must be ignored.
        return (Path(shared) if Path(shared).is_absolute() else Path.home() / ".cache") / "kfacpack" / name
    except RuntimeError:
        return None


def read_cache(file: Path | None) -> ImageSplits | None:
    """Returns the splits in a cache file, or None if the file does not exist or cannot be read."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        arrays = load(file.read_bytes()) if file else {}
        names = {name.split(".")[0] for name in arrays}
        splits = {split: label_images(arrays[f"{split}.images"], arrays[f"{split}.labels"]) for split in names}
    except (OSError, SafetensorError, KeyError, ValueError):
        return None
    return splits or None


def write_cache(file: Path | None, splits: ImageSplits) -> None:
    """Writes a cache file atomically, so that several processes can write it at the same time. Errors are ignored."""
    from safetensors.numpy import save

    if file is None:
        return
    arrays = {
        f"{split}.{kind}": array for split, labelled in splits.items() for kind, array in labelled._asdict().items()
    }
    with suppress(OSError, BundleError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, save(arrays))


PRETRAINED_MODEL = "tiny"
"""Name of the embedded model that is meant to be used with the embedded tasks."""


@dataclass(frozen=True)
class EmbeddedTask:
    """A task whose images are taken from an installed package or drawn by code."""

    name: str
    """Name of the task."""
    classes: tuple[str, ...]
    """Names of the classes."""
    templates: tuple[str, ...]
    """Prompts for CLIP's text tower, with {} in place of the class name."""
    sizes: Mapping[str, int]
    """Number of examples by split."""
    source: str
    """Origin of the data, as recorded in manifests."""
    license: str | None
    """License of the data."""
    make: Callable[[], ImageSplits]
    """Function that generates all splits."""
    sha256: str
    """Expected `images_digest` of the splits.

    To find the digest of a new task, request one of its splits: the error message shows the digest.
    """
    package: PackageData | None = None
    """Package that contains the images or the fonts; None if no package is needed."""
    namesake: str | None = None
    """Repository and description of the public dataset of the same name; None if there is no such dataset.

    An example is "ylecun/mnist, the 10,000 test digits of MNIST".
    """

    def __repr__(self) -> str:
        return f"<EmbeddedTask {self.name}: {len(self.classes)} classes>"

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits."""
        return tuple(self.sizes)

    def notices(self, model: str) -> tuple[str, ...]:
        """Returns a notice that the task is not the public dataset of the same name, or () if there is no such dataset.

        Args:
            model: Name of the model with which the task is used. For `tiny`, no notice is returned.
        """
        if self.namesake is None or model == PRETRAINED_MODEL:
            return ()
        repository, _, description = self.namesake.partition(", ")
        address = f"hf://datasets/{repository}"
        return (
            f"the embedded task {self.name} is not the public dataset of the same name: the task contains "
            f"{self.source}, and its test split has {self.sizes['test']:,} examples. "
            f"Accuracies on this task cannot be compared with accuracies on {description}. "
            f"To use the public dataset, pass --data {address} (data={address!r})",
        )

    def listing(self, split: str) -> list[tuple[str, str]]:
        """Returns an empty list, because an embedded task has no data files."""
        return []

    def split(self, name: str) -> EmbeddedSplit:
        """Returns the split `name`.

        Raises:
            KfacpackError: If there is no such split, or the hash of the images differs from the recorded hash.
        """
        if name not in self.sizes:
            raise KfacpackError(
                f"{self.name}: unknown split {printable(str(name))!r}; expected one of {', '.join(self.splits)}"
            )
        return EmbeddedSplit(self._images[name], DataOrigin(self.source, name, self.license))

    @cached_property
    def _images(self) -> ImageSplits:
        file = cache_path(self.name, self.sha256)
        cached = read_cache(file)
        if cached is not None and images_digest(cached) == self.sha256:
            return cached
        splits = self.make()
        self._require_recorded(images_digest(splits))
        write_cache(file, splits)
        return splits

    def _require_recorded(self, digest: str) -> None:
        if digest == self.sha256:
            return
        problem = f"the images have sha256 {digest}, expected {self.sha256}"
        if self.package is None:
            remedy = f"The images were drawn with numpy {np.__version__}; reinstall kfacpack, or report a bug"
            raise KfacpackError(f"{self.name}: {problem}. {remedy}")
        cause = f"The images were made from {self.package}"
        raise KfacpackError(
            f"{self.name}: {problem}. {cause}; install a version that is known to work: {self.package.remedy}"
        )


class EmbeddedSplit:
    """A split of an embedded task. Each example is `{"image": PIL image}`."""

    def __init__(self, labelled: LabelledImages, source: DataOrigin):
        self.source = source
        self._labelled = labelled

    def __len__(self) -> int:
        return len(self._labelled.labels)

    def __getitem__(self, index: int) -> Example:
        return {"image": Image.fromarray(self._labelled.images[index])}

    def label(self, index: int) -> int:
        """Returns the label of an example."""
        return int(self._labelled.labels[index])


BATCH_SIZE = 128
"""Number of images that are drawn at a time. The fields of this many images fit into the CPU cache.

Each batch has its own random stream, so a different batch size would change the images.
"""

Labels = NDArray[np.int64]


def random_stream(task: str, split: str) -> str:
    """Returns the name of the random stream that is used to draw the images of a split."""
    return f"tasks/{task}/{split}"


def draw_splits(
    task: str, sizes: Mapping[str, int], classes: int, draw: Callable[[Labels, CounterRandom], ByteArray]
) -> ImageSplits:
    """Draws the images of all splits of a task, with balanced classes in random order.

    Args:
        task: Name of the task, which determines the random streams.
        sizes: Number of images by split.
        classes: Number of classes.
        draw: Function that maps labels and a random stream to images, one per label.
    """
    splits = {}
    for split, size in sizes.items():
        labels = CounterRandom(random_stream(task, split)).permutation(size) % classes
        parts = [
            draw(labels[start : start + BATCH_SIZE], CounterRandom(random_stream(task, split), number))
            for number, start in enumerate(range(0, size, BATCH_SIZE), start=1)
        ]
        splits[split] = label_images(np.concatenate(parts), labels)
    return splits


def random_glyphs(characters: Sequence[str], fonts: Sequence[str], rng: CounterRandom) -> Field:
    """Returns one glyph image per character, in a random font, (N, GLYPH_SIZE, GLYPH_SIZE)."""
    font_indices = rng.integers(len(fonts), len(characters))
    return render_glyphs(
        (character, fonts[font]) for character, font in zip(characters, font_indices.tolist(), strict=True)
    )


def place_glyph(
    glyphs: Field,
    rng: CounterRandom,
    *,
    extent: tuple[float, float],
    shift: float,
    turn: float,
    bend: float,
    x: float = 0.0,
) -> Field:
    """Places glyphs at random positions, with random sizes, angles and distortions, and returns their coverage.

    `extent`, `shift` and `x` are in image coordinates, which range from -1 to 1.

    Args:
        glyphs: Glyph images, (N, GLYPH_SIZE, GLYPH_SIZE).
        rng: Random stream for the positions, sizes, angles and distortions.
        extent: Smallest and largest width of a glyph.
        shift: Largest distance between the centre of a glyph and (`x`, 0), along each axis.
        turn: Tangent of half the largest rotation angle.
        bend: Largest value of `strength` in `canvas.bend`.
        x: Horizontal coordinate around which the glyphs are placed.
    """
    count = len(glyphs)
    u, v = canvas.grid_points(count)
    centre = (rng.uniform(count, x - shift, x + shift), rng.uniform(count, -shift, shift))
    u, v = canvas.translate(u, v, centre, rng.uniform(count, *extent))
    u, v = canvas.rotate(u, v, rng.uniform(count, -turn, turn))
    u, v = canvas.bend(u, v, rng, rng.uniform(count, 0, bend))
    return canvas.stamp_glyph(glyphs, u, v)


def finish_image(image: Field, rng: CounterRandom, *, blur: float, noise: float) -> ByteArray:
    """Adds random blur and noise to images and converts them to bytes.

    Args:
        image: Colour images, (N, 28, 28, 3), with values from 0 to 1.
        rng: Random stream.
        blur: Largest value of `amount` in `canvas.blur`.
        noise: Largest standard deviation of the noise.
    """
    count = len(image)
    amount, grain = rng.uniform(count, 0, blur), rng.uniform(count, 0, noise)
    channels = [canvas.blur(image[..., channel], amount) for channel in range(3)]
    return canvas.pixels(np.stack([field + per_image(grain) * rng.normal(field.shape) for field in channels], axis=-1))


def random_colours(rng: CounterRandom, count: int) -> tuple[Field, Field]:
    """Returns a light and a dark colour for each image, in random order, (N, 3) each."""
    light, dark = rng.uniform((count, 3), 0.55, 1.0), rng.uniform((count, 3), 0.0, 0.4)
    swapped = rng.bernoulli(0.5, (count, 1))
    return np.where(swapped, dark, light), np.where(swapped, light, dark)
