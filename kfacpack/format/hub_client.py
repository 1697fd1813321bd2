"""How we speak with huggingface_hub: what it raises, in our words, and when it may draw its bars.

Tokens are its own concern: it reads what `hf auth login` stored. Nothing here asks for one, or sees one.

From a reference to bytes: a whole file, which huggingface_hub keeps in its cache, or the header alone.
"""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from kfacpack.errors import HubError, first_line
from kfacpack.format.reference import COMMIT

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    from kfacpack.format.reference import Reference, RepositoryKind


LOG_IN = "log in with: hf auth login"

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ENOTDIR)
_shown: ContextVar[bool] = ContextVar("kfacpack_hub_bars", default=False)


@contextmanager
def progress_bars(*, show: bool) -> Iterator[None]:
    """Whether huggingface_hub may draw its bars of what it fetches and sends; without this, it may not."""
    before = _shown.set(show)
    try:
        yield
    finally:
        _shown.reset(before)


def hub_api() -> HfApi:
    """Made each time, so that where the Hub is (HF_ENDPOINT) is looked at when it is asked."""
    from huggingface_hub import HfApi

    return HfApi(library_name="kfacpack")


@contextmanager
def hub_errors(
    place: object,
    repository: str,
    revision: str | None = None,
    *,
    kind: RepositoryKind = "model",
    otherwise: str | None = None,
    instead: str | None = None,
) -> Iterator[None]:
    """What huggingface_hub raises becomes a `HubError` about `place`; meanwhile its bars are as `bars` says.

    `otherwise`: what a user can do who does not get the file from the Hub, if that is more than to give a bundle.
    `instead`: the same of one whom the Hub refuses it, where that is something else.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    # The base of both kinds of its failures: httpx's and, in earlier versions, requests'.
    of_http = HfHubHTTPError.__mro__[1]
    silenced = not _shown.get() and constants.HF_HUB_DISABLE_PROGRESS_BARS is None and not are_progress_bars_disabled()
    if silenced:
        disable_progress_bars()
    try:
        yield
    except (of_http, OSError, HFValidationError, RuntimeError) as error:  # type: ignore[misc]
        # What an upload's thread met comes wrapped.
        met: BaseException | None = error.__cause__ if isinstance(error, RuntimeError) else error
        if met is None or not isinstance(met, (of_http, OSError, HFValidationError)):
            raise
        # From what was met, so that whoever catches it can tell which kind it is.
        raise _translate(
            met, _HubRequest(str(place), repository, revision, kind, otherwise, instead or otherwise)
        ) from met
    finally:
        if silenced:
            enable_progress_bars()


@dataclass(frozen=True)
class _HubRequest:
    """What was asked for when huggingface_hub raised something."""

    place: str
    repository: str
    revision: str | None
    kind: RepositoryKind
    otherwise: str | None
    instead: str | None

    def or_instead(self, remedy: str) -> str:
        return f"{remedy}; or {self.instead}" if self.instead else remedy

    @property
    def url(self) -> str:
        from huggingface_hub import constants

        return f"{constants.ENDPOINT}/{'datasets/' if self.kind == 'dataset' else ''}{self.repository}"


def _translate(error: BaseException, asked: _HubRequest) -> HubError:
    from huggingface_hub import constants, errors

    if words := _refusal(error, asked):
        return HubError(asked.place, *words, unreachable=_is_busy(_status(error)))
    otherwise = asked.otherwise or "give a file"
    if isinstance(error, errors.OfflineModeIsEnabled) or constants.HF_HUB_OFFLINE:
        problem = "is not in the cache, and HF_HUB_OFFLINE is set"
        return HubError(asked.place, problem, f"Unset it, or {otherwise}", unreachable=True)
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        problem = f"could not be stored in huggingface_hub's cache: {error.strerror}"
        return HubError(asked.place, problem, "Make room, or let HF_HOME name another folder")
    cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ else error
    problem = f"the Hub ({constants.ENDPOINT}) cannot be reached: {first_line(cause)}"
    return HubError(asked.place, problem, f"Is there a network? Then try again; or {otherwise}", unreachable=True)


def _refusal(error: BaseException, asked: _HubRequest) -> tuple[str, str] | None:
    """What the Hub says no to, and what to do, or None where nobody answered."""
    from huggingface_hub import errors

    repository, revision = asked.repository, asked.revision
    if isinstance(error, errors.GatedRepoError):
        remedy = f"Ask for access at {asked.url}, and {LOG_IN}"
        return f"{repository} is gated, and you have no access to it", asked.or_instead(remedy)
    if isinstance(error, errors.RepositoryNotFoundError):
        problem = f"there is no repository {repository}, or it is private and you may not see it"
        return problem, asked.or_instead(f"Check its name; if it is private, {LOG_IN}")
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repository} has no revision {revision or 'main'!r}", "Give a branch, a tag or a commit that is there"
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        where = f" at {revision}" if revision else ""
        ours = asked.kind == "model" and not asked.otherwise
        seen = f"See what it has: {f'kfacpack pull {repository} --list' if ours else asked.url}"
        return f"{repository} has no such file{where}", asked.or_instead(seen)
    if isinstance(error, errors.HFValidationError):
        return f"is not a name the Hub knows: {first_line(error)}", "Expected owner/repo"
    return _by_status(error, asked) if isinstance(error, errors.HfHubHTTPError) else None


def _by_status(error: HfHubHTTPError, asked: _HubRequest) -> tuple[str, str]:
    status, repository = _status(error), asked.repository
    said = f": {first_line(error.server_message)}" if error.server_message else ""
    if status == 401:
        return f"the Hub does not know who you are{said}", asked.or_instead(f"For {repository}, {LOG_IN}")
    if status == 403:
        remedy = f"With an account that may, and a token that can write where you write, {LOG_IN}"
        return f"you may not do this with {repository}{said}", remedy
    if status == 412:
        return f"{repository} has changed meanwhile{said}", "Do it again, on what it is now"
    if _is_busy(status):
        return f"the Hub answers {status}{said}", asked.or_instead("Try again later")
    return f"the Hub refuses ({status}){said}", f"Is {repository} what you meant?"


def _status(error: BaseException) -> int:
    """Of the Hub's answer; 0 where there is none."""
    return int(getattr(getattr(error, "response", None), "status_code", 0))


def _is_busy(status: int) -> bool:
    return status == 429 or status >= 500


_SHA256 = re.compile(r"[0-9a-f]{64}")
_CHUNK = 2**20


@dataclass(frozen=True)
class RemoteFile:
    """What the Hub says of a file before any of it is fetched."""

    commit: str
    nbytes: int
    sha256: str | None
    """Of its bytes. Of small files in git itself, the Hub says none."""


def resolve(reference: Reference) -> RemoteFile:
    """One HEAD request."""
    from huggingface_hub import get_hf_file_metadata

    with hub_errors(reference, reference.repository, reference.revision, kind=reference.kind):
        found = get_hf_file_metadata(_url(reference, reference.revision))
    if found.commit_hash is None or found.size is None or found.etag is None:
        problem = "what answers does not say of which commit and size the file is, so it is no Hub"
        raise HubError(str(reference), problem, "Look at HF_ENDPOINT, and at the proxy")
    return RemoteFile(found.commit_hash, found.size, found.etag if _SHA256.fullmatch(found.etag) else None)


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
    remote = _resolve_remote(reference)
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
    remote = _resolve_remote(reference)
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


def snapshot(repository: str, revision: str | None, kind: RepositoryKind = "model") -> Path | None:
    """The folder of huggingface_hub's cache with all that was fetched of a revision, if anything was."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"{kind}s--{repository.replace('/', '--')}"
    ref = folder / "refs" / (revision or "main")
    commit = ref.read_text().strip() if ref.is_file() else revision
    found = folder / "snapshots" / commit if commit else None
    return found if found and found.is_dir() else None


def _resolve_remote(reference: Reference) -> RemoteFile | Path:
    """What the Hub says of a file; where it cannot be reached, the copy in the cache."""
    try:
        return resolve(reference)
    except HubError as error:
        cached = _cached(reference, reference.revision or "main") if error.unreachable else None
        if cached is None:
            raise
        return cached


def _url(reference: Reference, revision: str | None) -> str:
    from huggingface_hub import hf_hub_url

    return hf_hub_url(reference.repository, reference.file, repo_type=reference.kind, revision=revision)


def _range(reference: Reference, remote: RemoteFile, start: int, stop: int) -> bytes:
    """Bytes `start` to `stop` of the file, or to its end."""
    stop = min(stop, remote.nbytes)
    if start >= stop:
        return b""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

    with hub_errors(reference, reference.repository, reference.revision, kind=reference.kind):
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

    with hub_errors(reference, reference.repository, reference.revision, kind=reference.kind):
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


def _difference(path: Path, remote: RemoteFile, *, whole: bool) -> str | None:
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
