"""Contact sheets: thumbnails of a task's images, grouped by class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw, ImageFont

from kfacpack.errors import KfacpackError, printable

if TYPE_CHECKING:
    from kfacpack.tasks.task import Split, Task


MAX_CLASSES = 60
"""Maximum number of classes on a sheet."""
THUMBNAIL, GAP, NAME, LINE, MARGIN = 64, 4, 150, 24, 12
"""Sizes in pixels: side length of a thumbnail, gap between thumbnails, width of a class name, height of a line, and
margin."""
SHAPES = ((12, 1, 12), (24, 2, 8), (MAX_CLASSES, 3, 5))
"""Layouts of a sheet: maximum number of classes, number of columns, and number of examples per class."""
INK, FAINT, PAPER = (20, 20, 20), (120, 120, 120), (255, 255, 255)


@dataclass(frozen=True)
class ContactSheet:
    """A contact sheet: one image with thumbnails of examples from each class."""

    image: Image.Image
    """The rendered image."""
    classes: int
    """Number of classes shown, at most `MAX_CLASSES`."""
    left_out: int
    """Number of classes not shown."""


def draw_contact_sheet(task: Task, split_name: str = "train") -> ContactSheet:
    """Draws a contact sheet with the first examples of each class, in the order of the split.

    Args:
        task: Image task with class names.
        split_name: Split to draw.

    Returns:
        The contact sheet.

    Raises:
        KfacpackError: If the task has no images or no class names.
    """
    split = task.split(split_name)
    names = _class_names(task, split)
    shown = min(len(names), MAX_CLASSES)
    left_out = len(names) - shown
    columns, per_class = next((columns, per_class) for limit, columns, per_class in SHAPES if shown <= limit)
    rows = -(-shown // columns)
    width, height = NAME + per_class * (THUMBNAIL + GAP), THUMBNAIL + GAP
    size = (columns * (width + MARGIN) + MARGIN, rows * height + 2 * MARGIN + LINE)
    image = Image.new("RGB", size, PAPER)
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(14)
    title = _title(task, split, shown, left_out)
    pen.text((MARGIN, MARGIN), _shortened(title, font, size[0] - 2 * MARGIN), FAINT, font)
    examples = _first_examples(split, shown, per_class)
    for number, name in enumerate(names[:shown]):
        left = MARGIN + number // rows * (width + MARGIN)
        top = MARGIN + LINE + number % rows * height
        pen.text((left, top + THUMBNAIL // 2), _shortened(name, font, NAME - GAP), INK, font, anchor="lm")
        for position, index in enumerate(examples[number]):
            thumbnail = _thumbnail(split[index]["image"])
            corner = left + NAME + position * (THUMBNAIL + GAP)
            centred = (corner + (THUMBNAIL - thumbnail.width) // 2, top + (THUMBNAIL - thumbnail.height) // 2)
            image.paste(thumbnail, centred)
    return ContactSheet(image, shown, left_out)


def _class_names(task: Task, split: Split) -> tuple[str, ...]:
    example = split[0]
    if "image" not in example:
        inputs = printable(", ".join(map(repr, example)))
        raise KfacpackError(f"{task.name}: a contact sheet needs images, but the data has none; inputs: {inputs}")
    if task.classes is None:
        raise KfacpackError(f"{task.name}: a contact sheet needs classes, but the data has no column of class labels")
    return task.classes


def _title(task: Task, split: Split, shown: int, left_out: int) -> str:
    classes = f"{shown} class{'es' if shown != 1 else ''}"
    more = f" ({left_out} more not shown)" if left_out else ""
    return f"{task.name} · {split.source.split} · {len(split):,} examples · {classes}{more}"


def _first_examples(split: Split, classes: int, per_class: int) -> Mapping[int, list[int]]:
    """Returns the indices of the first examples of each class."""
    examples: dict[int, list[int]] = {number: [] for number in range(classes)}
    remaining = classes * per_class
    for index in range(len(split)):
        indices = examples.get(split.label(index))
        if indices is not None and len(indices) < per_class:
            indices.append(index)
            remaining -= 1
        if not remaining:
            break
    return examples


def _thumbnail(image: Image.Image) -> Image.Image:
    """Enlarges a small image by an integer factor, so that its pixels stay sharp, or shrinks a large image."""
    rgb = image.convert("RGB")
    if (factor := THUMBNAIL // max(rgb.size)) > 0:
        return rgb.resize((rgb.width * factor, rgb.height * factor), Image.Resampling.NEAREST)
    rgb.thumbnail((THUMBNAIL, THUMBNAIL))
    return rgb


def _shortened(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    text = printable(text)
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(f"{text}…") > width:
        text = text[:-1]
    return f"{text}…"
