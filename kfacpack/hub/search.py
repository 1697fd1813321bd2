"""Which bundles and vectors there are on the Hub, by the tags and metadata of their cards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kfacpack.errors import HubError
from kfacpack.hub.bases import from_option
from kfacpack.hub.card import BASE_TAG, TAGS, TASK_TAG
from kfacpack.hub.files.client import client, speaking
from kfacpack.hub.repositories import look_at

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

    from kfacpack.hub.repositories import Stored


@dataclass(frozen=True)
class Found:
    """A repository with bundles or vectors."""

    repository: str
    bases: tuple[str, ...]
    tasks: tuple[str, ...]
    downloads: int
    files: tuple[Stored, ...]


def search(
    *, base_model: str | None = None, task: str | None = None, author: str | None = None, limit: int = 20
) -> list[Found]:
    """Repositories whose cards say that they hold bundles or vectors, at most `limit`.

    `base_model`: as `--model` has it (ViT-B-32/openai, timm:NAME, or ViT-B-32 for any tag) or by its id on the Hub;
    `author`: a user or an organisation.
    """
    from huggingface_hub import constants

    common = [TAGS[0], *([f"{TASK_TAG}{task}"] if task else [])]
    ways = _ways(base_model) if base_model else [[]]
    found: dict[str, ModelInfo] = {}
    if constants.HF_HUB_OFFLINE:
        raise HubError("search", "asks the Hub, and HF_HUB_OFFLINE is set", "Unset it", unreachable=True)
    with speaking("search", "search", otherwise="let HF_ENDPOINT name a mirror"):
        for way in ways:
            for each in client().list_models(filter=[*common, *way], author=author, limit=limit, full=True):
                found.setdefault(each.id, each)
    return [_found(each) for each in list(found.values())[:limit]]


def _ways(base_model: str) -> list[list[str]]:
    """The tags that say that it is this one. Whether a name is ours or an id on the Hub, it does not show."""
    name, known = from_option(base_model)
    return [[f"{BASE_TAG}{name}"], [f"base_model:{known}"]]


def _found(info: ModelInfo) -> Found:
    def tagged(prefix: str) -> tuple[str, ...]:
        return tuple(tag.removeprefix(prefix) for tag in info.tags or () if tag.startswith(prefix))

    files = tuple(look_at(info.id, None).candidates)
    return Found(info.id, tagged(BASE_TAG), tagged(TASK_TAG), info.downloads or 0, files)
