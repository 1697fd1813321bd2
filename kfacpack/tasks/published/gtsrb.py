"""The 43 German traffic signs: the words that CLIP's authors use, and the German names that some copies have."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kfacpack.tasks.published.words import looked_up

SIGNS = (
    ("20_kmh", "red and white circle 20 kph speed limit"),
    ("30_kmh", "red and white circle 30 kph speed limit"),
    ("50_kmh", "red and white circle 50 kph speed limit"),
    ("60_kmh", "red and white circle 60 kph speed limit"),
    ("70_kmh", "red and white circle 70 kph speed limit"),
    ("80_kmh", "red and white circle 80 kph speed limit"),
    ("80_aufgehoben", "end / de-restriction of 80 kph speed limit"),
    ("100_kmh", "red and white circle 100 kph speed limit"),
    ("120_kmh", "red and white circle 120 kph speed limit"),
    ("ueberholverbot", "red and white circle red car and black car no passing"),
    ("lkw_ueberholverbot", "red and white circle red truck and black car no passing"),
    ("einmalige_vorfahrt", "red and white triangle road intersection warning"),
    ("vorfahrsstrasse", "white and yellow diamond priority road"),
    ("vorfahrt_gewaehren", "red and white upside down triangle yield right-of-way"),
    ("stopp", "stop"),
    ("durchfahrt_verboten", "empty red and white circle"),
    ("lkw_verboten", "red and white circle no truck entry"),
    ("verbot_der_einfahrt", "red circle with white horizonal stripe no entry"),
    ("gefahrenstelle", "red and white triangle with exclamation mark warning"),
    ("scharfe_kurve_links", "red and white triangle with black left curve approaching warning"),
    ("scharfe_kurve_rechts", "red and white triangle with black right curve approaching warning"),
    ("s_kurve_links", "red and white triangle with black double curve approaching warning"),
    ("unebene_fahrbahn", "red and white triangle rough / bumpy road warning"),
    ("rutschgefahr", "red and white triangle car skidding / slipping warning"),
    ("verengte_fahrbahn", "red and white triangle with merging / narrow lanes warning"),
    ("baustelle", "red and white triangle with person digging / construction / road work warning"),
    ("ampel", "red and white triangle with traffic light approaching warning"),
    ("fussgaenger", "red and white triangle with person walking warning"),
    ("achtung_kinder", "red and white triangle with child and person walking warning"),
    ("achtung_fahrrad", "red and white triangle with bicyle warning"),
    ("achtung_eis", "red and white triangle with snowflake / ice warning"),
    ("achtung_wildwechsel", "red and white triangle with deer warning"),
    ("unbegrenzt", "white circle with gray strike bar no speed limit"),
    ("vorgeschrieben_rechts", "blue circle with white right turn arrow mandatory"),
    ("vorgeschrieben_links", "blue circle with white left turn arrow mandatory"),
    ("vorgeschrieben_geradeaus", "blue circle with white forward arrow mandatory"),
    ("vorgeschrieben_geradeaus_rechts", "blue circle with white forward or right turn arrow mandatory"),
    ("vorgeschrieben_geradeaus_links", "blue circle with white forward or left turn arrow mandatory"),
    ("vorbeifahren_rechts", "blue circle with white keep right arrow mandatory"),
    ("vorbeifahren_links", "blue circle with white keep left arrow mandatory"),
    ("kreisverkehr", "blue circle with white arrows indicating a traffic circle"),
    ("ueberholverbot_aufgehoben", "white circle with gray strike bar indicating no passing for cars has ended"),
    ("lkw_ueberholverbot_aufgehoben", "white circle with gray strike bar indicating no passing for trucks has ended"),
)
"""In the order of the benchmark's class numbers. Two words are misspelt in CLIP's list, and so they are here: scores
that others report are with these prompts."""

_BY_NAME = looked_up({**dict(SIGNS), **{words: words for _, words in SIGNS}})


def words(stored: Sequence[str]) -> tuple[str, ...]:
    """Copies have CLIP's words, German names, or the benchmark's numbers, as its folders do: 00014."""
    if all(re.fullmatch(r"\d{1,5}", name) and int(name) < len(SIGNS) for name in stored):
        return tuple(SIGNS[int(name)][1] for name in stored)
    return _BY_NAME(stored)
