"""From a reference to bytes: a whole file, which huggingface_hub keeps in its cache, or the header alone."""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from kfacpack.errors import HubError
from kfacpack.hub.files.client import speaking
from kfacpack.hub.files.reference import COMMIT

if TYPE_CHECKING:
    from kfacpack.hub.files.reference import Kind, Reference

_SHA256 = re.compile(r"[0-9a-f]{64}")
_CHUNK = 2**20


@dataclass(frozen=True)
class Remote:
    """What the Hub says of a file before any of it is fetched."""

    commit: str
    nbytes: int
    sha256: str | None
    """Of its bytes. Of small files in git itself, the Hub says none."""


def look_up(reference: Reference) -> Remote:
    """One HEAD request."""
    from huggingface_hub import get_hf_file_metadata

    with speaking(reference, reference.repository, reference.revision, kind=reference.kind):
        found = get_hf_file_metadata(_url(reference, reference.revision))
    if found.commit_hash is None or found.size is None or found.etag is None:
        problem = "what answers does not say of which commit and size the file is, so it is no Hub"
        raise HubError(str(reference), problem, "Look at HF_ENDPOINT, and at the proxy")
    return Remote(found.commit_hash, found.size, found.etag if _SHA256.fullmatch(found.etag) else None)


def local_copy(reference: Reference, *, checked: bool = False) -> Path:
    """The file in huggingface_hub's cache, fetched if it is not there.

    What was fetched is checked against the size and the SHA-256 that the Hub gives. A file that has been in the cache
    is checked by its size; with `checked`, by its SHA-256, too; and fetched anew if it is damaged. Without a network,
    the cache is believed.
    """
    if reference.revision and COMMIT.fullmatch(reference.revision) and not checked:
        cached = _cached(reference, reference.revision)
        if cached is not None:
            return cached  # a commit never changes, so that there is nothing to ask
    remote = _looked_up(reference)
    if isinstance(remote, Path):
        return remote
    cached = _cached(reference, remote.commit)
    if cached is not None and _difference(cached, remote, whole=checked) is None:
        return cached
    path = _fetched(reference, anew=cached is not None)
    if problem := _difference(path, remote, whole=True):
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise HubError(str(reference), f"what arrived is not what the Hub has: {problem}", "Fetch it again")
    return path


def header_descriptor(reference: Reference, longest: int) -> int:
    """An open file with the header of a safetensors file and its size; what lies behind the header is not fetched.

    A header of more than `longest` bytes is left for whoever reads it to refuse.
    """
    remote = _looked_up(reference)
    if isinstance(remote, Path):
        return os.open(remote, os.O_RDONLY)
    cached = _cached(reference, remote.commit)
    if cached is not None and _difference(cached, remote, whole=False) is None:
        return os.open(cached, os.O_RDONLY)
    start = _range(reference, remote, 0, 8)
    length = int.from_bytes(start, "little")
    rest = _range(reference, remote, 8, 8 + (length if length <= longest else 24))
    # Where nothing was written, the file has holes that take no room.
    with tempfile.TemporaryFile(prefix="kfacpack-header-") as stand_in:
        stand_in.write(start + rest)
        stand_in.truncate(remote.nbytes)
        stand_in.flush()
        return os.dup(stand_in.fileno())


def snapshot(repository: str, revision: str | None, kind: Kind = "model") -> Path | None:
    """The folder of huggingface_hub's cache with all that was fetched of a revision, if anything was."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"{kind}s--{repository.replace('/', '--')}"
    ref = folder / "refs" / (revision or "main")
    commit = ref.read_text().strip() if ref.is_file() else revision
    found = folder / "snapshots" / commit if commit else None
    return found if found and found.is_dir() else None


def _looked_up(reference: Reference) -> Remote | Path:
    """What the Hub says of a file; where it cannot be reached, the copy in the cache."""
    try:
        return look_up(reference)
    except HubError as error:
        cached = _cached(reference, reference.revision or "main") if error.unreachable else None
        if cached is None:
            raise
        return cached


def _url(reference: Reference, revision: str | None) -> str:
    from huggingface_hub import hf_hub_url

    return hf_hub_url(reference.repository, reference.file, repo_type=reference.kind, revision=revision)


def _range(reference: Reference, remote: Remote, start: int, stop: int) -> bytes:
    """Bytes `start` to `stop` of the file, or to its end."""
    stop = min(stop, remote.nbytes)
    if start >= stop:
        return b""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

    with speaking(reference, reference.repository, reference.revision, kind=reference.kind):
        headers = {**build_hf_headers(), "Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        response = http_backoff("GET", _url(reference, remote.commit), headers=headers, timeout=timeout, max_retries=2)
        hf_raise_for_status(response)
    content: bytes = response.content
    found = content[start:stop] if response.status_code == 200 else content
    if len(found) != stop - start:
        problem = f"asked for bytes {start} to {stop}, the Hub gave {len(found)} bytes"
        raise HubError(str(reference), problem, "Try again")
    return found


def _cached(reference: Reference, revision: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(reference.repository, reference.file, revision=revision, repo_type=reference.kind)
    return Path(found) if isinstance(found, str) else None


def _fetched(reference: Reference, *, anew: bool) -> Path:
    from huggingface_hub import hf_hub_download

    with speaking(reference, reference.repository, reference.revision, kind=reference.kind):
        return Path(
            hf_hub_download(
                reference.repository,
                reference.file,
                repo_type=reference.kind,
                # By its own name, so that the cache knows without a network what it stands for.
                revision=reference.revision,
                force_download=anew,
                library_name="kfacpack",
            )
        )


def _difference(path: Path, remote: Remote, *, whole: bool) -> str | None:
    """How a file differs from what the Hub says of it, in words, or None."""
    if (size := path.stat().st_size) != remote.nbytes:
        return f"it has {size} bytes, expected {remote.nbytes}"
    if whole and remote.sha256 and (found := digest_of_file(path)) != remote.sha256:
        return f"its bytes have SHA-256 {found}, expected {remote.sha256}"
    return None


def digest_of_file(path: Path) -> str:
    """SHA-256 of all its bytes."""
    content = sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            content.update(chunk)
    return content.hexdigest()
