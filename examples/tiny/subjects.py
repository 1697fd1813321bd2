"""The subjects of pretraining: characters, symbols and patterns, with their names. No drawn task contains them."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kfacpack._random import CounterRandom
from kfacpack.demo.canvas import SIZE, Field, has_glyph, interpolate, per_image, smooth_step, wave

STREAM = "pretraining"
"""Name of the random stream of the pictures."""

PRINTED = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSans-Oblique",
    "DejaVuSerif",
    "DejaVuSerif-Italic",
    "DejaVuSansMono",
    "STIXGeneral",
    "STIXGeneralItalic",
    "STIXGeneralBol",
    "cmr10",
    "cmss10",
    "cmti10",
    "cmtt10",
)
COMPUTER_MODERN_HAS = set("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ?!")
"""The characters that the Computer Modern fonts encode correctly."""


@dataclass(frozen=True)
class Glyph:
    """A character, its names and the fonts that contain it."""

    character: str
    names: tuple[str, ...]
    """Noun phrases, each of which identifies the glyph."""
    fonts: tuple[str, ...]


def _glyph(character: str, *names: str) -> Glyph:
    fonts = tuple(
        font
        for font in PRINTED
        if (character in COMPUTER_MODERN_HAS if font.startswith("cm") else has_glyph(character, font))
    )
    if not fonts:
        raise ValueError(f"no font has {character!r}")
    return Glyph(character, names, fonts)


NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
DIGITS = tuple(
    _glyph(
        str(value),
        *(
            f"{noun} {name}"
            for name in (str(value), word)
            for noun in ("the digit", "the number", "digit", "a", "the numeral", "")
        ),
    )
    for value, word in enumerate(NUMBERS)
)


def _latin() -> tuple[Glyph, ...]:
    """Returns Latin letters.

    o, l and i are omitted because many fonts draw them like digits. Letters whose cases differ only in size have one
    name.
    """
    glyphs = []
    for letter in "abcdefghjkmnpqrstuvwxyz":
        name = (f"the letter {letter}", f"letter {letter}", f"a letter {letter}")
        small = (*name, f"the small letter {letter}", f"lowercase {letter}")
        capital = (f"the capital letter {letter}", f"capital {letter}", f"uppercase letter {letter}")
        if letter in "ckpsuvwxz":
            glyphs.append(_glyph(letter, *name))
        else:
            glyphs += [_glyph(letter, *small), _glyph(letter.upper(), *capital)]
    return tuple(glyphs)


def _script(script: str, characters: str) -> tuple[Glyph, ...]:
    """Returns letters with their Unicode names: GREEK SMALL LETTER ALPHA is 'the greek letter alpha'."""
    glyphs = []
    for character in characters:
        words = unicodedata.name(character).lower().split()
        name = " ".join(words[words.index("letter") + 1 :])
        case = "capital " if character != character.lower() and script == "greek" else ""
        glyphs.append(
            _glyph(
                character,
                f"the {script} {case}letter {name}",
                f"{script} {case}letter {name}",
                f"{case}{name}, {'an' if script[0] == 'a' else 'a'} {script} letter",
            )
        )
    return tuple(glyphs)


SCRIPTS = {
    "latin": _latin(),
    "greek": _script("greek", "αβγδεζηθλμξπστφψωΓΔΛΞΠΣΦΨΩ"),
    "cyrillic": _script("cyrillic", "БДЖИЛЦЧШЫЭЮЯ"),
    "armenian": _script("armenian", "ԱԲԳԴԵԶԷԸԹԺԻԽԾԿՀՁՂՃՄՅՆՇՈՉՊՋՌՎՏՐՑՓՔ"),
    "arabic": _script("arabic", "ابتثجحخدرزسشصطعغفقكلمنهوي"),
}
SYMBOLS = (
    _glyph("●", "a circle", "a filled circle", "a disk", "a round dot"),
    _glyph("○", "a ring", "an empty circle", "the outline of a circle"),
    _glyph("■", "a square", "a filled square", "a block"),
    _glyph("□", "an empty square", "the outline of a square", "a square frame"),
    _glyph("▲", "a triangle", "a filled triangle", "a triangle pointing up"),
    _glyph("▼", "an upside down triangle", "a triangle pointing down"),
    _glyph("△", "an empty triangle", "the outline of a triangle"),
    _glyph("◆", "a diamond", "a rhombus", "a filled diamond"),
    _glyph("★", "a star", "a filled star", "a five pointed star"),
    _glyph("☆", "an empty star", "the outline of a star"),
    _glyph("✚", "a cross", "a thick cross", "a plus shape"),
    _glyph("←", "an arrow pointing left", "a left arrow"),
    _glyph("→", "an arrow pointing right", "a right arrow"),
    _glyph("↑", "an arrow pointing up", "an up arrow"),
    _glyph("↓", "an arrow pointing down", "a down arrow"),
    _glyph("✓", "a check mark", "a tick"),
    _glyph("☀", "a sun", "the sun with rays"),
    _glyph("☺", "a smiling face", "a smiley"),
    _glyph("♪", "a music note", "a musical note"),
    _glyph("?", "a question mark"),
    _glyph("!", "an exclamation mark"),
    _glyph("&", "an ampersand", "an and sign"),
    _glyph("%", "a percent sign"),
    _glyph("#", "a hash sign", "a number sign"),
    _glyph("@", "an at sign"),
    _glyph("=", "an equals sign"),
    _glyph("▬", "a bar", "a rectangle", "a flat rectangle"),
    _glyph("◐", "a half filled circle", "a circle with one half black"),
    _glyph("✱", "an asterisk"),
    _glyph("☐", "a box", "a ballot box"),
)
GLYPHS = (*DIGITS, *(glyph for script in SCRIPTS.values() for glyph in script), *SYMBOLS)

COLOURS = {
    "red": (0.85, 0.1, 0.1),
    "green": (0.1, 0.65, 0.15),
    "blue": (0.1, 0.2, 0.85),
    "yellow": (0.95, 0.9, 0.1),
    "orange": (0.95, 0.55, 0.05),
    "purple": (0.5, 0.1, 0.65),
    "pink": (0.95, 0.55, 0.75),
    "turquoise": (0.1, 0.8, 0.8),
    "brown": (0.45, 0.25, 0.1),
    "gray": (0.5, 0.5, 0.5),
    "black": (0.02, 0.02, 0.02),
    "white": (0.98, 0.98, 0.98),
}
PLACES = {
    "in the middle": (0.0, 0.0),
    "on the left": (-0.45, 0.0),
    "on the right": (0.45, 0.0),
    "at the top": (0.0, -0.45),
    "at the bottom": (0.0, 0.45),
    "in the top left corner": (-0.45, -0.45),
    "in the top right corner": (0.45, -0.45),
    "in the bottom left corner": (-0.45, 0.45),
    "in the bottom right corner": (0.45, 0.45),
}


@dataclass(frozen=True)
class Pattern:
    """A pattern, its names and how it is drawn."""

    names: tuple[str, ...]
    draw: Callable[[Field, Field, Field, CounterRandom], Field]
    """Maps x, y, the number of repetitions (N,) and a source of random numbers to the coverage."""


def _lines(position: Field, often: Field) -> Field:
    return smooth_step(wave(position) - np.float32(0.5), per_image(often) * np.float32(2 / SIZE))


def _dots(x: Field, y: Field, often: Field, rng: CounterRandom) -> Field:
    u, v = wave(x * per_image(often)), wave(y * per_image(often))
    return smooth_step(np.float32(0.55) - np.sqrt(u * u + v * v), per_image(often) * np.float32(2 / SIZE))


def _cells(size: int) -> Callable[[Field, Field, Field, CounterRandom], Field]:
    def draw(x: Field, y: Field, often: Field, rng: CounterRandom) -> Field:
        return interpolate(rng.uniform((len(x), size, size)))

    return draw


def _checks(x: Field, y: Field, often: Field, rng: CounterRandom) -> Field:
    u, v = wave(x * per_image(often)) - np.float32(0.5), wave(y * per_image(often)) - np.float32(0.5)
    return smooth_step(np.sign(u * v) * np.minimum(np.abs(u), np.abs(v)), per_image(often) * np.float32(2 / SIZE))


PATTERNS = (
    Pattern(("horizontal stripes", "horizontal lines"), lambda x, y, n, rng: _lines(y * per_image(n), n)),
    Pattern(("vertical stripes", "vertical lines"), lambda x, y, n, rng: _lines(x * per_image(n), n)),
    Pattern(
        ("diagonal stripes rising to the right", "rising diagonal lines"),
        lambda x, y, n, rng: _lines((x + y) * per_image(n) * np.float32(0.7), n),
    ),
    Pattern(
        ("diagonal stripes falling to the right", "falling diagonal lines"),
        lambda x, y, n, rng: _lines((x - y) * per_image(n) * np.float32(0.7), n),
    ),
    Pattern(("a checkerboard", "a checkered pattern"), _checks),
    Pattern(("polka dots", "a dotted pattern", "rows of dots"), _dots),
    Pattern(
        ("a grid", "a grid of lines", "graph paper"),
        lambda x, y, n, rng: (
            1
            - (1 - smooth_step(wave(x * per_image(n)) - np.float32(0.7), per_image(n) * np.float32(2 / SIZE)))
            * (1 - smooth_step(wave(y * per_image(n)) - np.float32(0.7), per_image(n) * np.float32(2 / SIZE)))
        ),
    ),
    Pattern(
        ("concentric rings", "rings around the middle", "a target"),
        lambda x, y, n, rng: _lines(np.sqrt(x * x + y * y) * per_image(n), n),
    ),
    Pattern(("a gradient from left to right", "a horizontal gradient"), lambda x, y, n, rng: (x + 1) / 2),
    Pattern(("a gradient from top to bottom", "a vertical gradient"), lambda x, y, n, rng: (y + 1) / 2),
    Pattern(("clouds", "smooth clouds", "soft blobs"), _cells(5)),
    Pattern(("a rough surface", "coarse grain", "a mottled surface"), _cells(12)),
    Pattern(("noise", "static", "random noise"), _cells(28)),
)
SUBJECTS = (*GLYPHS, *PATTERNS)
