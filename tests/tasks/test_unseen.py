"""Pre-training data does not overlap with the drawn tasks: shapes, patterns, class names, random streams, files."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from kfacpack._random import CounterRandom
from kfacpack.demo import canvas, drawn_tasks
from kfacpack.demo.canvas import render_glyph
from kfacpack.demo.embedded_task import random_stream
from kfacpack.tasks.registry import TASKS, load_task
from tiny.captions import SUBJECT, UNSTATED
from tiny.pictures import batch
from tiny.subjects import GLYPHS, PATTERNS, STREAM, SUBJECTS

LETTERED = {
    "hebrew": (drawn_tasks.HEBREW_LETTERS, drawn_tasks.HEBREW_FONTS),
    "syllabics": (drawn_tasks.SYLLABLES, drawn_tasks.SYLLABICS_FONTS),
    "emblems": (drawn_tasks.EMBLEMS, drawn_tasks.EMBLEMS_FONTS),
}
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SHARED_WORDS = {
    "alef": "an arabic letter as well",
    "kaf": "an arabic letter as well",
    "che": "a cyrillic letter as well",
    "ya": "a cyrillic letter as well",
    "cha": "an armenian letter as well",
    "ra": "an armenian letter as well",
    "sha": "an armenian letter as well",
    "yi": "an armenian letter as well",
    "triangles": "one triangle is a symbol",
    "rows": "of dots",
    "sign": "a percent sign",
    "lines": "straight ones are a pattern",
}
"""Words in class names that pre-training uses with another meaning."""


def outlines(pairs):
    """(N, pixels) of 0 and 1."""
    return np.stack([render_glyph(character, font).ravel() > 0.5 for character, font in pairs]).astype(np.float32)


def test_every_drawn_task_is_checked():
    drawn = {name for name in TASKS if "drawn" in load_task(name).source}
    assert drawn == {*LETTERED, "weaves"}


@pytest.mark.parametrize("name", LETTERED)
def test_no_character_of_a_task_has_the_shape_of_one_in_pretraining(name):
    """Intersection over union of the ink: 1 for equal outlines; the largest value is 0.84, for ח and n."""
    characters, fonts = LETTERED[name]
    pretraining_outlines = outlines((glyph.character, font) for glyph in GLYPHS for font in glyph.fonts)
    shown = outlines(product(characters.values(), fonts))
    common = shown @ pretraining_outlines.T
    overlap = common / (shown.sum(1)[:, None] + pretraining_outlines.sum(1)[None] - common)
    assert overlap.max() < 0.9


def standardised(fields):
    flat = fields.reshape(len(fields), -1)
    flat = flat - flat.mean(1, keepdims=True)
    return flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-6)


def test_no_pattern_of_a_task_looks_like_one_of_pretraining():
    """By correlation, over scales, rotations and shifts of the pre-training patterns."""
    x, y = canvas.grid_points(1)
    shown = standardised(
        np.concatenate(
            [canvas.smooth_step(inside((x + 3) * 2, (y + 3) * 2), 0.3) for inside in drawn_tasks.WEAVES.values()]
        )
    )
    ways = np.array(
        list(
            product(
                np.linspace(1, 4, 13),
                (-0.41421, *np.linspace(-0.5, 0.5, 9), 0.41421),
                np.linspace(0, 0.5, 4),
                np.linspace(0, 0.5, 4),
            )
        )
    ).astype(np.float32)
    often, turn, right, down = ways.T
    x, y = canvas.rotate(*canvas.grid_points(len(ways)), turn)
    for pattern in PATTERNS:
        field = pattern.draw(x + canvas.per_image(right), y + canvas.per_image(down), often, CounterRandom("any"))
        assert np.abs(shown @ standardised(field).T).max() < 0.85, pattern.names


def test_no_class_of_a_drawn_task_is_named_in_pretraining():
    pretraining_words = {
        word for subject in SUBJECTS for phrase in subject.names for word in re.findall("[a-z]+", phrase)
    }
    for name in (*LETTERED, "weaves"):
        words = {word for label in load_task(name).classes for word in re.findall("[a-z]+", label)}
        assert words & pretraining_words - {"in", "a", "he"} <= {*SHARED_WORDS}, name


def test_tasks_and_pretraining_use_different_random_streams():
    """Streams with different names are independent, see the tests of CounterRandom."""
    names = {random_stream(name, split) for name in TASKS for split in load_task(name).sizes}
    assert all(name.startswith("tasks/") for name in names)
    source = "".join(file.read_text(encoding="utf-8") for file in (EXAMPLES / "tiny").glob("*.py"))
    assert re.findall(r"CounterRandom\(f?\"[^\"]*\"", source) == ['CounterRandom(f"{STREAM}-{seed}"']
    assert not f"{STREAM}-".startswith("tasks/")


def test_pretraining_reads_no_images():
    """Its code opens no image and no file of a package except fonts."""
    for file in [*(EXAMPLES / "tiny").glob("*.py"), EXAMPLES / "pretrain_tiny.py"]:
        text = file.read_text(encoding="utf-8")
        assert not re.findall(
            r"Image|imread|skimage|sklearn|mlxtend|np\.load|kfacpack\.tasks|kfacpack import tasks", text
        )


def test_a_batch_depends_on_its_number_alone():
    first, again, other = batch(0, 7, 32), batch(0, 7, 32), batch(0, 8, 32)
    assert np.array_equal(first.pictures, again.pictures)
    assert first.captions == again.captions
    assert not np.array_equal(first.pictures, other.pictures)
    assert not np.array_equal(first.pictures, batch(1, 7, 32).pictures)


def test_a_caption_matches_images_that_do_not_contradict_it():
    examples = batch(0, 7, 64)
    assert examples.true.diagonal().all()
    for picture, caption in product(range(64), range(64)):
        stated, shown = examples.stated[caption], examples.shown[picture]
        assert examples.true[picture, caption] == all(
            fact in (UNSTATED, shown_fact) for fact, shown_fact in zip(stated, shown, strict=True)
        )


def test_a_caption_names_its_subject():
    examples = batch(0, 3, 128)
    for text, stated in zip(examples.captions, examples.stated, strict=True):
        names = SUBJECTS[stated[SUBJECT]].names
        assert any(words_of(name) <= words_of(text) for name in names), (text, names)


def words_of(text):
    return set(re.findall("[a-z0-9]+", text)) - {"a", "an", "the"}
