"""Contact sheets: every class has a row with its name and its own images."""

from __future__ import annotations

import numpy as np
import pytest
from kit import refused
from PIL import Image

from kfacpack.errors import KfacpackError
from kfacpack.tasks.contact_sheet import GAP, LINE, MARGIN, MAX_CLASSES, NAME, PAPER, THUMBNAIL, draw_contact_sheet
from kfacpack.tasks.registry import load_task
from kfacpack.tasks.task import DataOrigin


class Colours:
    """A task with any number of classes; the colour of an image encodes its class."""

    name, templates, license, splits = "colours", (), None, ("train",)

    def __init__(self, classes, size=(28, 28), per_class=20):
        self.classes = tuple(f"number {k} with quite a long name for what it is" for k in range(classes))
        self.sizes = {"train": classes * per_class}
        self._size = size

    def split(self, name):
        return self

    @property
    def source(self):
        return DataOrigin("here", "train")

    def __len__(self):
        return self.sizes["train"]

    def __getitem__(self, index):
        return {"image": Image.new("RGB", self._size, self.colour(self.label(index)))}

    def label(self, index):
        return index % len(self.classes)

    @staticmethod
    def colour(label):
        return (label % 7 * 30, label // 7 * 3, 50)


def first_thumbnail(sheet, column, row, per_class):
    left = MARGIN + column * (NAME + per_class * (THUMBNAIL + GAP) + MARGIN) + NAME
    top = MARGIN + LINE + row * (THUMBNAIL + GAP)
    return np.asarray(sheet.image)[top : top + THUMBNAIL, left : left + THUMBNAIL]


@pytest.mark.parametrize(
    ("classes", "columns", "rows", "per_class"),
    [(2, 1, 2, 12), (12, 1, 12, 12), (13, 2, 7, 8), (60, 3, 20, 5), (400, 3, 20, 5)],
)
def test_each_class_has_a_row_up_to_the_limit(classes, columns, rows, per_class):
    sheet = draw_contact_sheet(Colours(classes))
    assert (sheet.classes, sheet.left_out) == (min(classes, MAX_CLASSES), max(classes - MAX_CLASSES, 0))
    width = MARGIN + columns * (NAME + per_class * (THUMBNAIL + GAP) + MARGIN)
    assert sheet.image.size == (width, LINE + 2 * MARGIN + rows * (THUMBNAIL + GAP))
    for label in range(sheet.classes):
        middle = first_thumbnail(sheet, label // rows, label % rows, per_class)[THUMBNAIL // 2, THUMBNAIL // 2]
        assert tuple(middle) == Colours.colour(label)


def test_small_images_are_enlarged_by_a_whole_factor():
    split = load_task("digits").split("train")
    index = next(k for k in range(len(split)) if split.label(k) == 3)
    shown = first_thumbnail(draw_contact_sheet(load_task("digits")), column=0, row=3, per_class=12)
    border = (THUMBNAIL - 56) // 2
    pixels = np.asarray(split[index]["image"]).repeat(2, 0).repeat(2, 1)
    np.testing.assert_array_equal(shown[border:-border, border:-border, 0], pixels)
    assert (shown[:border] == PAPER).all()


@pytest.mark.parametrize("size", [(640, 480), (30, 600), (1, 1), (64, 64)])
def test_images_of_every_size_fit(size):
    shown = first_thumbnail(draw_contact_sheet(Colours(2, size, per_class=1)), column=0, row=1, per_class=12)
    inked = (shown != PAPER).any(-1)
    extent = inked.any(0).sum(), inked.any(1).sum()
    assert max(extent) == THUMBNAIL
    assert extent[0] / extent[1] == pytest.approx(size[0] / size[1], rel=0.1)


def test_names_do_not_overlap_images():
    pixels = np.asarray(draw_contact_sheet(Colours(3)).image)
    assert (pixels[MARGIN + LINE :, MARGIN + NAME - GAP : MARGIN + NAME] == PAPER).all()
    assert (pixels[MARGIN + LINE :, MARGIN : MARGIN + NAME - GAP] != PAPER).any()


def test_a_task_without_images_or_classes_is_refused():
    texts, unlabelled = Colours(2), Colours(2)
    texts.split = lambda name: [{"premise": "one", "hypothesis": "two"}]
    with refused(KfacpackError, "colours: ", "images", "'premise', 'hypothesis'"):
        draw_contact_sheet(texts)
    unlabelled.split, unlabelled.classes = lambda name: [{"image": Image.new("L", (4, 4))}], None
    with refused(KfacpackError, "colours: ", "column of class labels"):
        draw_contact_sheet(unlabelled)
