"""Tasks that are published on the Hub: what is known of each, a line here and a function in one of the files."""

from __future__ import annotations

from collections.abc import Callable

from kfacpack.tasks.published import nli, vision
from kfacpack.tasks.published.base import Published
from kfacpack.tasks.published.imagenet import imagenet

__all__ = ["PUBLISHED", "Published"]

PUBLISHED: dict[str, Callable[[], Published]] = {
    "stanford_cars": vision.stanford_cars,
    "dtd": vision.dtd,
    "eurosat": vision.eurosat,
    "gtsrb": vision.gtsrb,
    "mnist": vision.mnist,
    "resisc45": vision.resisc45,
    "sun397": vision.sun397,
    "svhn": vision.svhn,
    "snli": nli.snli,
    "mnli": nli.mnli,
    "sick": nli.sick,
    "scitail": nli.scitail,
    "rte": nli.rte,
    "qnli": nli.qnli,
    "imagenet": imagenet,
}
"""Calling one neither reads nor fetches any data."""
