"""`kp.pull`: bundles and task vectors from the Hub, verified, put where they are wanted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kfacpack.bundle.writer import replacing
from kfacpack.errors import HubError, KfacpackError
from kfacpack.hub.files.download import digest_of_file, local_copy
from kfacpack.hub.files.reference import SCHEME, Reference
from kfacpack.hub.items import ENDINGS, Item, Progress
from kfacpack.hub.repositories import look_at, parse_repository


@dataclass(frozen=True)
class Pulled:
    reference: Reference
    path: Path
    item: Item


def pull(
    what: str | Reference,
    files: Sequence[str] = (),
    *,
    output: str | os.PathLike[str] | None = None,
    force: bool = False,
    progress: Progress = lambda check, done, total: None,
) -> list[Pulled]:
    """Fetch hf://owner/repo[@revision]/FILE, or of owner/repo[@revision] the files named, or all that are ours.

    Each is checked by the Hub's SHA-256 and by its own, and then put into the folder `output` (else the current one),
    or, if it is one, under that name: whole or not at all. A copy in the cache that is damaged is fetched anew. A file
    that is there and differs is replaced with `force` only.
    """
    wanted = _wanted(what, files)
    places = _places(wanted, output)
    found = []
    for reference, place in zip(wanted, places, strict=True):
        cached = local_copy(reference, checked=True)
        item = Item.of(cached, reference.file)
        item.require_sound(cached, progress)
        _put(cached, place, force=force)
        found.append(Pulled(reference, place, Item.of(place, reference.file)))
    return found


def _wanted(what: str | Reference, files: Sequence[str]) -> list[Reference]:
    if isinstance(what, Reference) or (what.startswith(SCHEME) and what.endswith(ENDINGS)):
        if files:
            raise KfacpackError(f"{what}: names a file already; give the repository, and the names of files after it")
        return [what if isinstance(what, Reference) else Reference.parse(what)]
    name, revision = parse_repository(what)
    if files:
        return [Reference(name, file, revision) for file in files]
    repository = look_at(name, revision)
    ours = [file.name for file in repository.candidates if repository.item(file.name)]
    if not ours:
        raise HubError(what, "has neither bundles nor task vectors", "Is it the repository you meant?")
    return [Reference(name, file, revision) for file in ours]


def _places(wanted: Sequence[Reference], output: str | os.PathLike[str] | None) -> list[Path]:
    target = Path(output) if output is not None else Path()
    if len(wanted) == 1 and output is not None and not target.is_dir() and target.suffix in ENDINGS:
        places = [target]
    else:
        if target.exists() and not target.is_dir():
            raise KfacpackError(f"{target}: is no folder; {len(wanted)} files need one")
        places = [target / each.name for each in wanted]
    if len(set(places)) < len(places):
        raise KfacpackError("files in different folders of the repository have the same name; pull them one by one")
    return places


def _put(source: Path, place: Path, *, force: bool) -> None:
    if place.exists() and not force:
        if place.is_file() and digest_of_file(place) == digest_of_file(source):
            return
        raise KfacpackError(f"{place}: is there already, and differs; move it, or replace it with --force")
    place.parent.mkdir(parents=True, exist_ok=True)
    with (
        source.open("rb") as stream,
        replacing(place) as descriptor,
        os.fdopen(descriptor, "wb", closefd=False) as target,
    ):
        shutil.copyfileobj(stream, target, 2**20)
