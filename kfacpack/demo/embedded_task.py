"""The pictures of a task, as arrays: what they are, what they hash to, how they are divided.

Resizing in whole numbers: a library's filters differ in the last bit from machine to machine.

Pictures that were made once, kept in one safetensors file for each task. What a file holds, its reader checks.

A file has the hash of its content in its name, so a task that changes never meets what it was before. A folder that
cannot be used is no error: the pictures are made again.

A task whose pictures are at hand: made on first use, cached, and checked against the hash that was recorded.

What tasks that are drawn have in common: which class each picture shows, and glyphs put on a canvas.
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
    images: ByteArray
    """Grey (N, height, width) or colour (N, height, width, 3)."""
    labels: NDArray[np.int32]
    """(N,), indices into the task's classes."""


ImageSplits = Mapping[str, LabelledImages]
"""Split -> its examples, in order."""


def label_images(images: NDArray[np.integer], labels: NDArray[np.integer]) -> LabelledImages:
    return LabelledImages(np.ascontiguousarray(images, dtype=np.uint8), np.ascontiguousarray(labels, dtype=np.int32))


def images_digest(pictures: ImageSplits) -> str:
    """SHA-256 over every split's name, shapes, pixels and labels."""
    total = sha256()
    for split in sorted(pictures):
        images, labels = pictures[split]
        total.update(f"{split} {images.shape} {labels.shape}\n".encode())
        total.update(np.ascontiguousarray(images, dtype=np.uint8).tobytes())
        total.update(np.ascontiguousarray(labels, dtype="<i4").tobytes())
    return total.hexdigest()


def split_images(everything: LabelledImages, sizes: Mapping[str, int], name: str) -> ImageSplits:
    """Shuffled, by the name of the task, and dealt out to the splits."""
    order = CounterRandom(f"tasks/{name}/splits").order(len(everything.labels))
    pictures, start = {}, 0
    for split, size in sizes.items():
        chosen = order[start : start + size]
        pictures[split] = LabelledImages(everything.images[chosen], everything.labels[chosen])
        start += size
    return pictures


IntArray = NDArray[np.int64]


def upsample(pictures: IntArray, size: int, most: int) -> IntArray:
    """(N, S, S) with values up to `most` -> (N, size, size) up to 255, bilinear, rounded once; the border goes on."""
    side = pictures.shape[-1]
    # Pixel i of the new picture lies at (2 i + 1) S / (2 size) - 1/2 of the old one, which is whole in parts of 2 size.
    parts = 2 * size
    place = np.clip((2 * np.arange(size) + 1) * side - size, 0, (side - 1) * parts)
    first, share = place // parts, place % parts
    second = np.minimum(first + 1, side - 1)
    rows = pictures[:, first] * (parts - share)[:, None] + pictures[:, second] * share[:, None]
    both = rows[:, :, first] * (parts - share) + rows[:, :, second] * share
    whole = parts * parts * most
    return np.asarray((both * 255 + whole // 2) // whole)


def downsample(pictures: IntArray) -> IntArray:
    """(N, 2 H, 2 W) -> (N, H, W): the mean of every four pixels, rounded."""
    four = pictures[:, ::2, ::2] + pictures[:, ::2, 1::2] + pictures[:, 1::2, ::2] + pictures[:, 1::2, 1::2]
    return np.asarray((four + 2) // 4)


def to_grayscale(colours: IntArray) -> IntArray:
    """(…, 3) -> (…): the luma of ITU-R 601, rounded."""
    red, green, blue = colours[..., 0], colours[..., 1], colours[..., 2]
    return np.asarray((299 * red + 587 * green + 114 * blue + 500) // 1000)


def cache_path(task: str, digest: str) -> Path | None:
    """Where a task's pictures are kept; None if this user has no home."""
    name = f"{task}-{digest[:16]}.safetensors"
    if chosen := os.environ.get("KFACPACK_CACHE"):
        return Path(chosen) / name
    shared = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # The XDG specification says to ignore a path that is not absolute.
        return (Path(shared) if Path(shared).is_absolute() else Path.home() / ".cache") / "kfacpack" / name
    except RuntimeError:
        return None


def read_cache(file: Path | None) -> ImageSplits | None:
    """What the file holds; None if there is none, or none that can be read."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        arrays = load(file.read_bytes()) if file else {}
        splits = {name.split(".")[0] for name in arrays}
        found = {split: label_images(arrays[f"{split}.images"], arrays[f"{split}.labels"]) for split in splits}
    except (OSError, SafetensorError, KeyError, ValueError):
        return None
    return found or None


def write_cache(file: Path | None, pictures: ImageSplits) -> None:
    """Whole or not at all, so that several processes may make the same file at once."""
    from safetensors.numpy import save

    if file is None:
        return
    arrays = {f"{split}.{kind}": array for split, each in pictures.items() for kind, array in each._asdict().items()}
    with suppress(OSError, BundleError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, save(arrays))


PRETRAINED_MODEL = "tiny"
"""The model that these tasks are for."""


@dataclass(frozen=True)
class EmbeddedTask:
    name: str
    classes: tuple[str, ...]
    templates: tuple[str, ...]
    sizes: Mapping[str, int]
    source: str
    license: str | None
    make: Callable[[], ImageSplits]
    sha256: str
    """Of what `make` makes, by `pictures.digest`. To record it for a new task, ask for a split: the error has it."""
    package: PackageData | None = None
    """What carries the data, or the fonts that it is drawn from."""
    namesake: str | None = None
    """Where the data is that others mean by this name, with what they mean: 'ylecun/mnist, all 70,000 digits'."""

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.sizes)

    def notices(self, model: str) -> tuple[str, ...]:
        """To a model that is not our own, a task's namesake may be what is meant."""
        if self.namesake is None or model == PRETRAINED_MODEL:
            return ()
        repository, _, meant = self.namesake.partition(", ")
        here = f"{self.name} without --data is {self.source}: {self.sizes['test']:,} of them are its test split"
        return (
            f"{here}, and accuracies on it cannot be compared with those on {meant}. For these: "
            f"--data hf://datasets/{repository}",
        )

    def listing(self, split: str) -> list[tuple[str, str]]:
        return []

    def split(self, name: str) -> EmbeddedSplit:
        if name not in self.sizes:
            raise KfacpackError(f"{self.name}: no split {printable(name)!r}; there are {', '.join(self.splits)}")
        return EmbeddedSplit(self._pictures[name], DataOrigin(self.source, name, self.license))

    @cached_property
    def _pictures(self) -> ImageSplits:
        file = cache_path(self.name, self.sha256)
        kept = read_cache(file)
        if kept is not None and images_digest(kept) == self.sha256:
            return kept
        made = self.make()
        self._require_recorded(images_digest(made))
        write_cache(file, made)
        return made

    def _require_recorded(self, found: str) -> None:
        if found == self.sha256:
            return
        problem = f"its pictures have sha256 {found}, expected {self.sha256}"
        if self.package is None:
            made = f"drawn by kfacpack with numpy {np.__version__}"
            raise KfacpackError(f"{self.name}: {problem}. They were {made}; install kfacpack anew, or report this")
        remedy = f"They are made from {self.package}; take a version that is known to fit: {self.package.remedy}"
        raise KfacpackError(f"{self.name}: {problem}. {remedy}")


class EmbeddedSplit:
    def __init__(self, pictures: LabelledImages, source: DataOrigin):
        self.source = source
        self._pictures = pictures

    def __len__(self) -> int:
        return len(self._pictures.labels)

    def __getitem__(self, index: int) -> Example:
        return {"image": Image.fromarray(self._pictures.images[index])}

    def label(self, index: int) -> int:
        return int(self._pictures.labels[index])


BATCH = 128
"""Pictures drawn together, so few that their fields fit into a processor's cache. Each lot has a stream of its own, so
another number would be other pictures."""

Labels = NDArray[np.int64]


def random_stream(task: str, split: str) -> str:
    """The name of the random numbers that draw a split."""
    return f"tasks/{task}/{split}"


def draw_splits(
    task: str, sizes: Mapping[str, int], classes: int, draw: Callable[[Labels, CounterRandom], ByteArray]
) -> ImageSplits:
    """Every class equally often, in random order. `draw`: the label of each picture, dice -> pictures."""
    pictures = {}
    for split, size in sizes.items():
        labels = CounterRandom(random_stream(task, split)).order(size) % classes
        parts = [
            draw(labels[start : start + BATCH], CounterRandom(random_stream(task, split), number))
            for number, start in enumerate(range(0, size, BATCH), start=1)
        ]
        pictures[split] = label_images(np.concatenate(parts), labels)
    return pictures


def draw_glyph_on(characters: Sequence[str], fonts: Sequence[str], dice: CounterRandom) -> Field:
    """A stamp for each character, each in one of the fonts."""
    chosen = dice.below(len(fonts), len(characters))
    return render_glyphs((character, fonts[font]) for character, font in zip(characters, chosen.tolist(), strict=True))


def place_glyph(
    glyphs: Field,
    dice: CounterRandom,
    *,
    extent: tuple[float, float],
    shift: float,
    turn: float,
    bend: float,
    x: float = 0.0,
) -> Field:
    """Coverage of stamps, each of a random extent, around `x` and half-way down; `turn`: tangent of half the angle."""
    count = len(glyphs)
    u, v = canvas.grid_points(count)
    centre = (dice.uniform(count, x - shift, x + shift), dice.uniform(count, -shift, shift))
    u, v = canvas.translate(u, v, centre, dice.uniform(count, *extent))
    u, v = canvas.rotate(u, v, dice.uniform(count, -turn, turn))
    u, v = canvas.bend(u, v, dice, dice.uniform(count, 0, bend))
    return canvas.stamp_glyph(glyphs, u, v)


def finish_image(picture: Field, dice: CounterRandom, *, blur: float, noise: float) -> ByteArray:
    """(N, 28, 28, 3) blurred and with grain, as bytes."""
    count = len(picture)
    amount, grain = dice.uniform(count, 0, blur), dice.uniform(count, 0, noise)
    channels = [canvas.blur(picture[..., channel], amount) for channel in range(3)]
    return canvas.pixels(np.stack([one + per_image(grain) * dice.grain(one.shape) for one in channels], axis=-1))


def random_colours(dice: CounterRandom, count: int) -> tuple[Field, Field]:
    """A light and a dark one for each picture, in either order, (N, 3) each."""
    light, dark = dice.uniform((count, 3), 0.55, 1.0), dice.uniform((count, 3), 0.0, 0.4)
    swapped = dice.chance(0.5, (count, 1))
    return np.where(swapped, dark, light), np.where(swapped, light, dark)
