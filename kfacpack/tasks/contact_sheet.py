"""A sheet of thumbnails: what a task's pictures look like, class by class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw, ImageFont

from kfacpack.errors import KfacpackError, printable

if TYPE_CHECKING:
    from kfacpack.tasks.task import Split, Task


MOST_CLASSES = 60
THUMBNAIL, GAP, NAME, LINE, MARGIN = 64, 4, 150, 24, 12
"""Pixels: of a thumbnail's side, between two of them, for a class's name, for a line of text, around it all."""
SHAPES = ((12, 1, 12), (24, 2, 8), (MOST_CLASSES, 3, 5))
"""Up to so many classes: how many columns of them, and how many examples of each."""
INK, FAINT, PAPER = (20, 20, 20), (120, 120, 120), (255, 255, 255)


@dataclass(frozen=True)
class ContactSheet:
    image: Image.Image
    classes: int
    """How many are shown; at most `MOST_CLASSES`."""
    left_out: int


def draw_contact_sheet(task: Task, split_name: str = "train") -> ContactSheet:
    """The first examples of each class, in the split's order."""
    split = task.split(split_name)
    names = _class_names(task, split)
    shown = min(len(names), MOST_CLASSES)
    left_out = len(names) - shown
    columns, each = next((columns, each) for most, columns, each in SHAPES if shown <= most)
    rows = -(-shown // columns)
    width, height = NAME + each * (THUMBNAIL + GAP), THUMBNAIL + GAP
    size = (columns * (width + MARGIN) + MARGIN, rows * height + 2 * MARGIN + LINE)
    image = Image.new("RGB", size, PAPER)
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(14)
    title = _title(task, split, shown, left_out)
    pen.text((MARGIN, MARGIN), _shortened(title, font, size[0] - 2 * MARGIN), FAINT, font)
    examples = _first_examples(split, shown, each)
    for number, name in enumerate(names[:shown]):
        left = MARGIN + number // rows * (width + MARGIN)
        top = MARGIN + LINE + number % rows * height
        pen.text((left, top + THUMBNAIL // 2), _shortened(name, font, NAME - GAP), INK, font, anchor="lm")
        for place, index in enumerate(examples[number]):
            thumbnail = _thumbnail(split[index]["image"])
            corner = left + NAME + place * (THUMBNAIL + GAP)
            middle = (corner + (THUMBNAIL - thumbnail.width) // 2, top + (THUMBNAIL - thumbnail.height) // 2)
            image.paste(thumbnail, middle)
    return ContactSheet(image, shown, left_out)


def _class_names(task: Task, split: Split) -> tuple[str, ...]:
    found = split[0]
    if "image" not in found:
        columns = ", ".join(map(repr, found))
        raise KfacpackError(f"{task.name}: a sheet shows pictures, an example of this task has {printable(columns)}")
    if task.classes is None:
        raise KfacpackError(f"{task.name}: a sheet is drawn by class, and there is no column of class labels")
    return task.classes


def _title(task: Task, split: Split, shown: int, left_out: int) -> str:
    more = f" ({left_out} more are not shown)" if left_out else ""
    return f"{task.name} · {split.source.split} · {len(split):,} examples · {shown} classes{more}"


def _first_examples(split: Split, classes: int, each: int) -> Mapping[int, list[int]]:
    """Class -> the places of its first examples."""
    found: dict[int, list[int]] = {number: [] for number in range(classes)}
    wanted = classes * each
    for index in range(len(split)):
        places = found.get(split.label(index))
        if places is not None and len(places) < each:
            places.append(index)
            wanted -= 1
        if not wanted:
            break
    return found


def _thumbnail(picture: Image.Image) -> Image.Image:
    """Whole multiples for what is small, so that its pixels are seen as they are."""
    coloured = picture.convert("RGB")
    if (times := THUMBNAIL // max(coloured.size)) > 0:
        return coloured.resize((coloured.width * times, coloured.height * times), Image.Resampling.NEAREST)
    coloured.thumbnail((THUMBNAIL, THUMBNAIL))
    return coloured


def _shortened(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    text = printable(text)
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(f"{text}…") > width:
        text = text[:-1]
    return f"{text}…"
