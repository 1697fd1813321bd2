"""Pre-training has seen nothing of the tasks: no character, no pattern, no class by name, no random number, no file."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

from kfacpack.drawing.dice import key_of
from kfacpack.drawing.glyphs import stamp
from kfacpack.tasks import TASKS, load_task
from kfacpack.tasks.embedded import emblems, hebrew, syllabics, weaves
from kfacpack.tasks.embedded.drawn import AT_ONCE, stream
from tiny.captions import FILLERS, FRAMES
from tiny.pictures import batch
from tiny.subjects import COLOURS, GLYPHS, PATTERNS, PLACES, STREAM, SUBJECTS

DRAWN = {
    "hebrew": (hebrew.LETTERS.values(), hebrew.FONTS),
    "syllabics": (syllabics.SYLLABLES.values(), syllabics.FONTS),
    "emblems": (emblems.EMBLEMS.values(), emblems.FONTS),
}
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEPS = 10_000
"""More batches than pre-training takes."""


@pytest.mark.parametrize("name", DRAWN)
def test_no_character_of_a_task_is_drawn_in_pretraining(name):
    assert not set(DRAWN[name][0]) & {glyph.character for glyph in GLYPHS}


def looks_of(character, fonts):
    """A stamp in outline, so that the same shape in another weight of the font counts as the same."""
    return [(stamp(character, font) > 0.5).ravel() for font in fonts]


@pytest.mark.parametrize("name", DRAWN)
def test_few_characters_of_a_task_look_like_one_of_pretraining(name):
    """Some syllables are borrowed shapes, as ᑯ from d; most of a task is new all the same."""
    characters, fonts = DRAWN[name]
    seen = np.stack([look for glyph in GLYPHS for look in looks_of(glyph.character, glyph.fonts)]).astype(np.float32)
    alike = 0
    for character in characters:
        shapes = np.stack(looks_of(character, fonts)).astype(np.float32)
        common = shapes @ seen.T
        overlap = common / (shapes.sum(1)[:, None] + seen.sum(1)[None] - common)
        alike += overlap.max() > 0.8
    assert alike <= 0.35 * len(characters)


def test_no_pattern_of_a_task_is_drawn_in_pretraining():
    from tiny import subjects

    assert not {pattern.draw for pattern in PATTERNS} & set(weaves.WEAVES.values())
    imported = {
        node.module
        for file in (EXAMPLES / "tiny").glob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module
    }
    assert not any(module.startswith("kfacpack.tasks") for module in imported), subjects.__file__


@pytest.mark.parametrize("name", [*DRAWN, "weaves"])
def test_no_name_of_a_drawn_class_is_said_in_pretraining(name):
    said = (
        {phrase for subject in SUBJECTS for phrase in subject.names} | set(COLOURS) | set(PLACES) | {*FRAMES, *FILLERS}
    )
    for label in load_task(name).classes:
        assert not {phrase for phrase in said if phrase in (label, f"a {label}", f"the {label}")}


def test_no_stream_of_a_task_is_used_in_pretraining():
    pretraining = {key_of(f"{STREAM}-0", number) for number in range(STEPS)}
    tasks = {
        key_of(stream(name, split), number)
        for name in TASKS
        for split, size in load_task(name).sizes.items()
        for number in range(size // AT_ONCE + 2)
    }
    assert len(pretraining) == STEPS
    assert not pretraining & tasks


def test_pretraining_reads_no_picture():
    """It draws: there is no call in its code that opens a file of pictures."""
    for file in [*(EXAMPLES / "tiny").glob("*.py"), EXAMPLES / "pretrain_tiny.py"]:
        words = file.read_text(encoding="utf-8")
        assert not [
            word for word in ("Image.open", "imread", "skimage", "sklearn", "mlxtend", "np.load") if word in words
        ]


def test_a_batch_depends_on_its_number_alone_and_tells_the_truth():
    first, again, other = batch(0, 7, 32), batch(0, 7, 32), batch(0, 8, 32)
    assert np.array_equal(first.pictures, again.pictures)
    assert first.captions == again.captions
    assert not np.array_equal(first.pictures, other.pictures)
    assert first.true.diagonal().all()
    assert first.true.sum() < 32 * 32 / 4
