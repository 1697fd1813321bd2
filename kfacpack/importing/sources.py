"""Where published files are: in a folder, or on the Hub, from which only those that are needed are fetched."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from kfacpack.errors import KfacpackError, printable
from kfacpack.hub.files.client import speaking

HUB = "hf://"


class HubFolder(NamedTuple):
    """owner/repo, a folder in it ("" for all of it), and a revision."""

    repository: str
    folder: str
    revision: str | None

    def __str__(self) -> str:
        at = f"@{self.revision}" if self.revision else ""
        return f"{HUB}{self.repository}{at}" + (f"/{self.folder}" if self.folder else "")


def place_of(source: str | Path) -> Path | HubFolder:
    """A folder, or hf://owner/repo[@revision][/folder]; mammoth writes the revision last: hf://owner/repo/folder@main."""
    text = str(source)
    if not text.startswith(HUB):
        folder = Path(source).expanduser()
        if not folder.is_dir():
            raise KfacpackError(f"{folder}: is no folder; give the one with the .pt files, or hf://owner/repo/folder")
        return folder
    parts = text.removeprefix(HUB).strip("/").split("/")
    if len(parts) < 2 or not all(parts):
        raise KfacpackError(f"{printable(text)}: expected hf://owner/repo, hf://owner/repo/folder")
    last, _, revision = parts[-1].partition("@")
    if len(parts) > 2 and revision:
        parts[-1] = last
    owner, repository, *folders = parts
    repository, _, early = repository.partition("@")
    return HubFolder(f"{owner}/{repository}", "/".join(folders), early or revision or None)


def names_in(place: Path | HubFolder) -> list[str]:
    """The names of all files there, those in folders below left aside."""
    if isinstance(place, Path):
        return sorted(each.name for each in place.iterdir() if each.is_file())
    from huggingface_hub import list_repo_files

    with speaking(place, place.repository, place.revision):
        paths = map(Path, list_repo_files(place.repository, revision=place.revision))
        return sorted(path.name for path in paths if path.parent == Path(place.folder))


def fetched(place: Path | HubFolder, names: Iterable[str]) -> tuple[Path, str | None]:
    """A folder that has these files, and, from the Hub, the commit that they are of."""
    if isinstance(place, Path):
        return place, None
    from huggingface_hub import snapshot_download

    wanted = [f"{place.folder}/{name}" if place.folder else name for name in names]
    with speaking(place, place.repository, place.revision):
        root = Path(snapshot_download(place.repository, revision=place.revision, allow_patterns=wanted))
    return root / place.folder, root.name
