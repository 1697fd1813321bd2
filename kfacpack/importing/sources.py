"""Where published files are: in a folder, or on the Hub, from which only those that are needed are fetched."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from kfacpack.errors import HubError, KfacpackError, printable
from kfacpack.hub.files.client import client, speaking
from kfacpack.hub.files.download import snapshot
from kfacpack.hub.files.reference import SCHEME, is_reference, read_address
from kfacpack.paths import expanded

OTHERWISE = "download it by other means, and give the folder"


class HubFolder(NamedTuple):
    """owner/repo, a folder in it ("" for all of it), and a revision."""

    repository: str
    folder: str
    revision: str | None
    kept: Path | None = None
    """Where the Hub cannot be reached, all that its cache has of the repository."""

    def __str__(self) -> str:
        at = f"@{self.revision}" if self.revision else ""
        said = f"{SCHEME}{self.repository}{at}" + (f"/{self.folder}" if self.folder else "")
        return f"{said}, as far as the cache has it (the Hub cannot be reached)" if self.kept else said


def place_of(source: str | Path) -> Path | HubFolder:
    """A folder, or hf://owner/repo[@revision][/folder]; mammoth writes the revision last: hf://owner/repo/folder@main."""
    if not is_reference(source):
        folder = expanded(source)
        if not folder.is_dir():
            raise KfacpackError(f"{folder}: is no folder; give the one with the .pt files, or hf://owner/repo/folder")
        return folder
    text = str(source).rstrip("/")
    address = read_address(text)
    if address is None or address.kind != "model":
        raise KfacpackError(f"{printable(text)}: expected hf://owner/repo, hf://owner/repo/folder")
    inner, _, last = (address.path or "").partition("@")
    return HubFolder(address.repository, inner, address.revision or last or None)


def listing(place: Path | HubFolder) -> tuple[Path | HubFolder, list[str]]:
    """The names of all files there, those in folders below left aside; and the place that has them: without a network,
    that is the cache."""
    if isinstance(place, Path):
        return place, sorted(each.name for each in place.iterdir() if each.is_file())
    try:
        with speaking(place, place.repository, place.revision, otherwise=OTHERWISE):
            told = client().model_info(place.repository, revision=place.revision)
    except HubError as error:
        kept = snapshot(place.repository, place.revision) if error.unreachable else None
        if kept is None or not (kept / place.folder).is_dir():
            raise
        return place._replace(kept=kept), listing(kept / place.folder)[1]
    paths = [Path(each.rfilename) for each in told.siblings or ()]
    return place, sorted(path.name for path in paths if path.parent == Path(place.folder))


def fetched(place: Path | HubFolder, names: Iterable[str]) -> tuple[Path, str | None]:
    """A folder that has these files, and, from the Hub, the commit that they are of."""
    if isinstance(place, Path):
        return place, None
    if place.kept:
        return place.kept / place.folder, place.kept.name
    from huggingface_hub import snapshot_download

    wanted = [f"{place.folder}/{name}" if place.folder else name for name in names]
    with speaking(place, place.repository, place.revision, otherwise=OTHERWISE):
        root = Path(snapshot_download(place.repository, revision=place.revision, allow_patterns=wanted))
    return root / place.folder, root.name
