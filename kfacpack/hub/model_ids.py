"""A base model as others know it: its id on the Hub, and what `--model` would say.

A task's data as others know it: its id on the Hub, and what `--data` would say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kfacpack.format.identity import base_task_name
from kfacpack.format.reference import COMMIT
from kfacpack.tasks.registry import PUBLISHED, TASKS

if TYPE_CHECKING:
    from kfacpack.format.manifest import Base, Source


_MODEL_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def hub_id(base: Base) -> str | None:
    """Where its weights are published, if that is known: random ones and a user's own file are nowhere."""
    if base.revision is None or base.revision.startswith("random-") or base.family not in _IDS:
        return None
    found = _IDS[base.family](base.name, base.revision)
    return found if found and _MODEL_ID.fullmatch(found) else None


@contextmanager
def _importable() -> Iterator[None]:
    """For open_clip and timm, which bring torchvision along."""
    from kfacpack._compat import compiler_deferred, make_torchvision_importable

    with compiler_deferred():
        make_torchvision_importable()
        yield


def _of_open_clip(name: str, tag: str) -> str | None:
    from kfacpack.demo.tiny_model import EMBEDDED_MODELS

    if name in EMBEDDED_MODELS:
        return None
    with _importable():
        import open_clip

    place = open_clip.get_pretrained_cfg(name, tag).get("hf_hub", "")
    return "/".join(place.split("/")[:2]).partition("@")[0] or None


def _of_timm(name: str, tag: str) -> str | None:
    with _importable():
        from timm.models import get_pretrained_cfg, is_model

    architecture = name.partition(".")[0]
    found = get_pretrained_cfg(f"{architecture}.{tag}") if is_model(architecture) else None
    return found.hf_hub_id.partition("@")[0] if found and found.hf_hub_id else None


def _of_transformers(name: str, revision: str) -> str | None:
    # A directory has no commit.
    return name if COMMIT.fullmatch(revision) else None


_IDS: dict[str, Callable[[str, str], str | None]] = {
    "open_clip": _of_open_clip,
    "timm": _of_timm,
    "t5": _of_transformers,
    "hf": _of_transformers,
}
"""A family's name -> how its name and revision become an id."""


def model_option(base: Base) -> str | None:
    """What `--model` says for it, if it is of a family we know."""
    from kfacpack.demo.tiny_model import EMBEDDED_MODELS
    from kfacpack.models.families import FAMILIES

    prefix = next((family.prefix for family in FAMILIES.values() if family.name == base.family), None)
    if prefix is None:
        return None
    tagged = (
        not prefix and base.name not in EMBEDDED_MODELS and base.revision and not base.revision.startswith("random-")
    )
    return f"{prefix}:{base.name}" if prefix else f"{base.name}/{base.revision}" if tagged else base.name


_TAGGED: dict[str, tuple[str, Callable[[str, str], str | None]]] = {"": ("/", _of_open_clip), "timm": (".", _of_timm)}
"""Prefix -> what parts the name from the tag in `--model`, and how both become an id."""


def model_from_option(option: str) -> tuple[str, str]:
    """Of what `--model` says: the name that a manifest has, and the id on the Hub. What may be either is both."""
    from kfacpack.models.families import split_spec
    from kfacpack.models.families.transformers_loading import public_name

    prefix, name = split_spec(option)
    if prefix in _TAGGED:
        separator, id_of = _TAGGED[prefix]
        plain, _, tag = name.partition(separator)
        return name, (id_of(plain, tag) if tag else None) or name
    name = public_name(name)
    return name, name


_DATASET_ID = re.compile(r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}")


def dataset_id(source: Source) -> str | None:
    """Where it is published, if it was taken from there: a folder is nowhere."""
    return source.dataset if source.dataset and _DATASET_ID.fullmatch(source.dataset) else None


def data_option(source: Source) -> str:
    """What a command says, behind a space, so that the data is the one that is meant: the task's name alone may be
    that of other data."""
    name = base_task_name(source.task)
    embedded, published = TASKS.get(name), PUBLISHED.get(name)
    if embedded and embedded().source == source.dataset:
        return ""
    found, revision = dataset_id(source), source.revision
    if published and not found:
        found, revision = published().repository, None  # a copy of it in a folder
    if not found:
        return " --data DIR"
    if published and not embedded and found == published().repository:
        return ""
    return f" --data hf://datasets/{found}" + (f"@{revision}" if revision else "")
