"""Ids of base models and datasets on the Hub, and the command-line options that select them."""

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
_DATASET_ID = re.compile(r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}")


def hub_id(base: Base) -> str | None:
    """Returns the Hub id of a base model, or None for random weights and for weights that are not published."""
    if base.revision is None or base.revision.startswith("random-") or base.family not in _HUB_IDS:
        return None
    model_id = _HUB_IDS[base.family](base.name, base.revision)
    return model_id if model_id and _MODEL_ID.fullmatch(model_id) else None


@contextmanager
def _importable() -> Iterator[None]:
    """Makes open_clip and timm importable, even if torchvision, which they import, is not usable."""
    from kfacpack._compat import compiler_deferred, make_torchvision_importable

    with compiler_deferred():
        make_torchvision_importable()
        yield


def _open_clip_id(name: str, tag: str) -> str | None:
    from kfacpack.demo.tiny_model import EMBEDDED_MODELS

    if name in EMBEDDED_MODELS:
        return None
    with _importable():
        import open_clip

    location = open_clip.get_pretrained_cfg(name, tag).get("hf_hub", "")
    return "/".join(location.split("/")[:2]).partition("@")[0] or None


def _timm_id(name: str, tag: str) -> str | None:
    with _importable():
        from timm.models import get_pretrained_cfg, is_model

    architecture = name.partition(".")[0]
    config = get_pretrained_cfg(f"{architecture}.{tag}") if is_model(architecture) else None
    return config.hf_hub_id.partition("@")[0] if config and config.hf_hub_id else None


def _transformers_id(name: str, revision: str) -> str | None:
    # A local directory has no commit.
    return name if COMMIT.fullmatch(revision) else None


_HUB_IDS: dict[str, Callable[[str, str], str | None]] = {
    "open_clip": _open_clip_id,
    "timm": _timm_id,
    "clip": _transformers_id,
    "t5": _transformers_id,
    "hf": _transformers_id,
}
"""Functions that return the Hub id for a name and a revision, by model family."""


def model_option(base: Base) -> str | None:
    """Returns the value of `--model` for a base model, or None if its family is unknown."""
    from kfacpack.demo.tiny_model import EMBEDDED_MODELS
    from kfacpack.models.families import FAMILIES

    prefix = next((family.prefix for family in FAMILIES.values() if family.name == base.family), None)
    if prefix is None:
        return None
    if prefix:
        return f"{prefix}:{base.name}"
    has_tag = base.name not in EMBEDDED_MODELS and base.revision and not base.revision.startswith("random-")
    return f"{base.name}/{base.revision}" if has_tag else base.name


_TAGGED: dict[str, tuple[str, Callable[[str, str], str | None]]] = {"": ("/", _open_clip_id), "timm": (".", _timm_id)}
"""By prefix of `--model`: the separator between name and tag, and the function that returns the Hub id."""


def model_from_option(option: str) -> tuple[str, str]:
    """Returns the name in manifests and the Hub id that a value of `--model` stands for.

    If the value may be either, both are the value itself.
    """
    from kfacpack.models.families import split_spec
    from kfacpack.models.families.transformers_loading import public_name

    prefix, name = split_spec(option)
    if prefix in _TAGGED:
        separator, id_of = _TAGGED[prefix]
        plain, _, tag = name.partition(separator)
        return name, (id_of(plain, tag) if tag else None) or name
    name = public_name(name)
    return name, name


def dataset_id(source: Source) -> str | None:
    """Returns the Hub id of a dataset, or None if it was not loaded from the Hub."""
    return source.dataset if source.dataset and _DATASET_ID.fullmatch(source.dataset) else None


def data_option(source: Source) -> str:
    """Returns the `--data` option that selects a task's data, with a leading space.

    Empty if the task's name alone selects the same data.
    """
    name = base_task_name(source.task)
    embedded, published = TASKS.get(name), PUBLISHED.get(name)
    if embedded and embedded().source == source.dataset:
        return ""
    dataset, revision = dataset_id(source), source.revision
    if published and not dataset:
        dataset, revision = published.repository, None  # a local copy of the published dataset
    if not dataset:
        return " --data DIR"
    if published and not embedded and dataset == published.repository:
        return ""
    return f" --data hf://datasets/{dataset}" + (f"@{revision}" if revision else "")
