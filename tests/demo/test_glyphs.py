"""Glyphs equal those that Pillow draws."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from kit import refused
from PIL import Image, ImageDraw, ImageFont

from kfacpack.demo.canvas import GLYPH_SIZE, MARGIN, has_glyph, render_glyph, render_glyphs
from kfacpack.errors import KfacpackError

FONTS = Path(find_spec("matplotlib").submodule_search_locations[0]) / "mpl-data" / "fonts" / "ttf"


def by_pillow(character: str, font: str) -> np.ndarray:
    """Returns a glyph drawn at a large size, cropped and reduced to fit."""
    large = ImageFont.truetype(str(FONTS / f"{font}.ttf"), 1000, layout_engine=ImageFont.Layout.BASIC)
    box = large.getbbox(character)
    picture = Image.new("L", (box[2] - box[0], box[3] - box[1]))
    ImageDraw.Draw(picture).text((-box[0], -box[1]), character, font=large, fill=255)
    picture = picture.crop(picture.getbbox())
    room = GLYPH_SIZE - 2 * MARGIN
    scale = room / max(picture.size)
    width, height = (side * scale for side in picture.size)
    place = ((GLYPH_SIZE - width) / 2, (GLYPH_SIZE - height) / 2)
    shrunk = Image.new("L", (GLYPH_SIZE * 10, GLYPH_SIZE * 10))
    shrunk.paste(
        picture.resize((round(width * 10), round(height * 10)), Image.Resampling.BOX),
        tuple(round(10 * at) for at in place),
    )
    return np.asarray(shrunk.resize((GLYPH_SIZE, GLYPH_SIZE), Image.Resampling.BOX), dtype=np.float32) / 255


@pytest.mark.parametrize("font", ["DejaVuSans", "DejaVuSerif-Italic", "cmr10", "STIXGeneral"])
@pytest.mark.parametrize("character", ["0", "8", "a", "g", "R", "?", "%"])
def test_a_glyph_equals_that_of_pillow(character, font):
    difference = np.abs(render_glyph(character, font) - by_pillow(character, font))
    assert difference.mean() < 0.02


@pytest.mark.parametrize("character", ["א", "ᐁ", "♥", "ж"])
def test_other_alphabets(character):
    assert np.abs(render_glyph(character, "DejaVuSans") - by_pillow(character, "DejaVuSans")).mean() < 0.02


def test_a_glyph_fills_its_image_and_is_centred():
    covered = np.argwhere(render_glyph("H", "DejaVuSans") > 0)
    assert covered.min(axis=0)[0] == MARGIN
    assert covered.max(axis=0)[0] == GLYPH_SIZE - MARGIN - 1
    assert (covered.min(axis=0) + covered.max(axis=0)) / 2 == pytest.approx([(GLYPH_SIZE - 1) / 2] * 2, abs=0.51)


def test_glyphs_are_in_order():
    assert np.array_equal(render_glyphs([("a", "cmr10"), ("b", "cmr10")])[1], render_glyph("b", "cmr10"))


def test_missing_and_blank_characters_are_refused():
    assert has_glyph("a", "DejaVuSans")
    assert not has_glyph("\u4e00", "DejaVuSans")
    with refused(KfacpackError, "DejaVuSans", "'\u4e00'", "no glyph"):
        render_glyph("\u4e00", "DejaVuSans")
    with refused(KfacpackError, "DejaVuSans", "' '", "blank"):
        render_glyph(" ", "DejaVuSans")
