"""The model card of a repository: what its bundles and vectors are, made of their manifests.

Our part lies between two comments and is made anew each time; what stands outside is the user's, and stays. So does
metadata that we do not know of.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kfacpack.errors import HubError, first_line
from kfacpack.hub.bases import hub_id
from kfacpack.hub.data import dataset_id
from kfacpack.hub.files.reference import Reference
from kfacpack.reporting.numbers import human_bytes

if TYPE_CHECKING:
    from huggingface_hub import ModelCard

    from kfacpack.hub.items import Item

BEGIN = "<!-- kfacpack begins: written by `kfacpack push`; what stands outside is yours and stays -->"
END = "<!-- kfacpack ends -->"
_OURS = re.compile(r"<!-- kfacpack begins.*?-->.*?<!-- kfacpack ends -->", re.DOTALL)

TAGS = ("kfac", "task-arithmetic")
BASE_TAG, TASK_TAG = "kfac-base:", "kfac-task:"
"""What tags begin with that say which model and which tasks; the Hub's own base_model wants a repository."""
_CARDS_LONGEST = 64
"""How many files get a section of their own."""


def card_for(
    repository: str,
    items: Sequence[Item],
    existing: str | None = None,
    *,
    revision: str | None = None,
    license: str | None = None,
    base_model: str | None = None,
) -> str:
    """The card of a repository with these files: the one that is there, with our part and metadata brought up to date.

    `license` and `base_model` are for the metadata; what the card says already stays, unless they are given.
    """
    ours = f"{BEGIN}\n\n{_body(repository, items, revision)}\n{END}"
    card = _parsed(repository, existing if existing is not None else f"---\n{{}}\n---\n\n# {repository}\n\n{ours}\n")
    text = card.text
    # Through a function, so that no backslash in our part is taken for a group.
    card.text = _OURS.sub(lambda _: ours, text, count=1) if _OURS.search(text) else f"{text.rstrip()}\n\n{ours}\n"
    _describe(card, items, license, base_model)
    return str(card)


def _parsed(repository: str, content: str) -> ModelCard:
    from huggingface_hub import ModelCard
    from yaml import YAMLError

    try:
        return ModelCard(content if content.lstrip().startswith("---") else f"---\n{{}}\n---\n{content}")
    except (ValueError, YAMLError) as error:
        problem = f"the metadata at the top of its README.md cannot be read: {first_line(error)}"
        raise HubError(repository, problem, "Correct it on the Hub; its text stays as it is") from error


def _describe(card: ModelCard, items: Sequence[Item], license: str | None, base_model: str | None) -> None:
    data: Any = card.data  # a ModelCardData, which its type does not say
    kept = [tag for tag in _listed(data.tags) if not tag.startswith((BASE_TAG, TASK_TAG))]
    bases = [f"{BASE_TAG}{item.base.name}" for item in items]
    tasks = [f"{TASK_TAG}{task}" for item in items for task in item.tasks]
    data.tags = _unique([*kept, *TAGS, *bases, *tasks])
    data.library_name = data.library_name or "kfacpack"
    known = [base_model] if base_model else [found for item in items if (found := hub_id(item.base))]
    models = _unique([*([] if base_model else _listed(data.base_model)), *known])
    data.base_model = models[0] if len(models) == 1 else models or None
    sets = [found for item in items for source in item.sources if (found := dataset_id(source))]
    data.datasets = _unique([*_listed(data.datasets), *sets]) or None
    data.license = license or data.license


def _listed(value: Any) -> list[str]:
    """What metadata says once or several times."""
    return [] if value is None else [value] if isinstance(value, str) else [str(each) for each in value]


def _unique(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


def _body(repository: str, items: Sequence[Item], revision: str | None) -> str:
    lines = [
        "Curvature (Kronecker factors) and task vectors for task arithmetic, in the format of kfacpack: one sealed "
        "safetensors file each, whose manifest says what it is, of which model, and from what.",
        "",
        "| file | what | of | tasks | size |",
        "|---|---|---|---|---|",
    ]
    for item in items:
        tasks = _cell(", ".join(item.tasks[:16]) + (", …" if len(item.tasks) > 16 else ""))
        size = human_bytes(item.file.nbytes)
        lines.append(f"| {_code(item.name)} | {item.what} | {_cell(item.base.name)} | {tasks} | {size} |")
    for item in items[:_CARDS_LONGEST]:
        lines += ["", *_section(repository, item, revision)]
    return "\n".join(lines) + "\n"


def _section(repository: str, item: Item, revision: str | None) -> Iterator[str]:
    place = str(Reference(repository, item.name, revision))
    yield f"## {_code(item.name)}"
    yield ""
    yield from ("```sh", *item.commands(place), "```", "", "```python", *item.python(place), "```", "")
    yield from ("| | |", "|---|---|")
    for label, value in item.facts:
        yield f"| {_LABELS.get(label, label)} | {_cell(value)} |"


_LABELS = {"license": "licence of the data", "merged": "merge history"}


def _cell(text: str) -> str:
    """Words from a manifest in a table: nothing that would be read as markup, or as one of our comments."""
    for char, instead in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "\\|"), ("`", "'"), ("[", "\\[")):
        text = text.replace(char, instead)
    return text


def _code(name: str) -> str:
    return f"`{_cell(name)}`"
