"""Access to the Hub through huggingface_hub: error messages, progress bars, downloads and cached copies.

A reference is resolved either to a complete file in huggingface_hub's cache, or to the header of a safetensors file
alone. Tokens are managed by huggingface_hub (see `hf auth login`); this module never accesses them.
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

from kfacpack._compat import require
from kfacpack.errors import HubError, first_line
from kfacpack.format.reference import COMMIT, parse_address

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    from kfacpack.format.reference import Reference, RepositoryKind


LOG_IN = "log in with: hf auth login"

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ENOTDIR)
_show_bars: ContextVar[bool] = ContextVar("kfacpack_hub_bars", default=False)


@contextmanager
def progress_bars(*, show: bool) -> Iterator[None]:
    """Shows or hides the progress bars of huggingface_hub inside this context. By default, kfacpack hides them.

    Args:
        show: Whether to show the progress bars.

    Yields:
        None.
    """
    token = _show_bars.set(show)
    try:
        yield
    finally:
        _show_bars.reset(token)


def hub_api() -> HfApi:
    """Creates a client for the Hub. The client is not cached, so that changes to HF_ENDPOINT take effect."""
    require("huggingface_hub")
    from huggingface_hub import HfApi

    return HfApi(library_name="kfacpack")


@contextmanager
def hub_errors(
    target: object,
    repository: str,
    revision: str | None = None,
    *,
    kind: RepositoryKind = "model",
    offline_remedy: str | None = None,
    access_remedy: str | None = None,
) -> Iterator[None]:
    """Converts exceptions that huggingface_hub raises inside this context to `HubError`.

    This context also hides the progress bars of huggingface_hub, unless `progress_bars(show=True)` is active.

    Args:
        target: The file or repository that is accessed, for error messages.
        repository: Name of the repository, OWNER/NAME.
        revision: A branch, a tag or a commit. Defaults to the main branch.
        kind: Kind of repository, "model" or "dataset".
        offline_remedy: Advice to the user if the Hub cannot be reached. By default, the advice is to pass a local file.
        access_remedy: Alternative advice to the user if the Hub refuses the request. Defaults to `offline_remedy`.

    Yields:
        None.

    Raises:
        HubError: If huggingface_hub raises an HTTP, validation or operating system error.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    # The base class of huggingface_hub's HTTP errors is from httpx or, in earlier versions, from requests.
    http_error = HfHubHTTPError.__mro__[1]
    hide = not _show_bars.get() and constants.HF_HUB_DISABLE_PROGRESS_BARS is None and not are_progress_bars_disabled()
    if hide:
        disable_progress_bars()
    try:
        yield
    except (http_error, OSError, HFValidationError, RuntimeError) as error:  # type: ignore[misc]
        # Errors in an upload thread are wrapped in a RuntimeError.
        cause: BaseException | None = error.__cause__ if isinstance(error, RuntimeError) else error
        if cause is None or not isinstance(cause, (http_error, OSError, HFValidationError)):
            raise
        request = _HubRequest(str(target), repository, revision, kind, offline_remedy, access_remedy or offline_remedy)
        # Callers inspect __cause__ to tell the kinds of errors apart.
        raise _translate(cause, request) from cause
    finally:
        if hide:
            enable_progress_bars()


@dataclass(frozen=True)
class _HubRequest:
    """A request for which huggingface_hub raised an exception. The fields are the arguments of `hub_errors`."""

    target: str
    repository: str
    revision: str | None
    kind: RepositoryKind
    offline_remedy: str | None
    access_remedy: str | None

    def with_alternative(self, remedy: str) -> str:
        """Returns `remedy`, followed by `access_remedy` as an alternative if it is set."""
        return f"{remedy}; or {self.access_remedy}" if self.access_remedy else remedy

    @property
    def url(self) -> str:
        """URL of the web page of the repository."""
        from huggingface_hub import constants

        return f"{constants.ENDPOINT}/{'datasets/' if self.kind == 'dataset' else ''}{self.repository}"


def _translate(error: BaseException, request: _HubRequest) -> HubError:
    from huggingface_hub import constants, errors

    if refusal := _refusal(error, request):
        return HubError(request.target, *refusal, unreachable=_is_busy(_status(error)))
    offline_remedy = request.offline_remedy or "pass a local file"
    if isinstance(error, errors.OfflineModeIsEnabled) or constants.HF_HUB_OFFLINE:
        problem = "is not in the cache, and HF_HUB_OFFLINE is set"
        return HubError(request.target, problem, f"Unset HF_HUB_OFFLINE, or {offline_remedy}", unreachable=True)
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        problem = f"could not be stored in huggingface_hub's cache: {error.strerror}"
        return HubError(
            request.target, problem, "Check the disk space and the permissions, or set HF_HOME to another folder"
        )
    cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ else error
    problem = f"the Hub ({constants.ENDPOINT}) cannot be reached: {first_line(cause)}"
    remedy = f"Check the network connection and try again, or {offline_remedy}"
    return HubError(request.target, problem, remedy, unreachable=True)


def _refusal(error: BaseException, request: _HubRequest) -> tuple[str, str] | None:
    """Returns the problem and the remedy if the Hub refused a request, or None for other errors, such as a timeout."""
    from huggingface_hub import errors

    repository, revision = request.repository, request.revision
    if isinstance(error, errors.GatedRepoError):
        remedy = f"Request access at {request.url}, and {LOG_IN}"
        return f"{repository} is gated, and you have no access to it", request.with_alternative(remedy)
    if isinstance(error, errors.RepositoryNotFoundError):
        problem = f"the repository {repository} does not exist, or it is private and you have no access to it"
        return problem, request.with_alternative(f"Check the name; if the repository is private, {LOG_IN}")
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repository} has no revision {revision or 'main'!r}", "Pass an existing branch, tag or commit"
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        where = f" at {revision}" if revision else ""
        is_bundle = request.kind == "model" and not request.offline_remedy
        listing = f"List the repository's files: {f'kfacpack pull {repository} --list' if is_bundle else request.url}"
        return f"{repository} has no such file{where}", request.with_alternative(listing)
    if isinstance(error, errors.HFValidationError):
        return f"is not a valid name on the Hub: {first_line(error)}", "Expected owner/repo"
    return _refusal_by_status(error, request) if isinstance(error, errors.HfHubHTTPError) else None


def _refusal_by_status(error: HfHubHTTPError, request: _HubRequest) -> tuple[str, str]:
    status, repository = _status(error), request.repository
    message = f": {first_line(error.server_message)}" if error.server_message else ""
    if status == 401:
        remedy = request.with_alternative(f"To access {repository}, {LOG_IN}")
        return f"the Hub requires authentication{message}", remedy
    if status == 403:
        remedy = "Log in with an account that has permission (uploads need a token with write access): hf auth login"
        return f"permission denied for {repository}{message}", remedy
    if status in (409, 412):
        return f"{repository} was changed in the meantime{message}", "Try again"
    if _is_busy(status):
        return f"the Hub returned HTTP status {status}{message}", request.with_alternative("Try again later")
    return (
        f"the Hub refused the request (HTTP status {status}){message}",
        "Check that all names are spelled correctly",
    )


def _status(error: BaseException) -> int:
    """Returns the HTTP status of the response that caused an error, or 0 if there was no response."""
    return int(getattr(getattr(error, "response", None), "status_code", 0))


def _is_busy(status: int) -> bool:
    return status == 429 or status >= 500


_SHA256 = re.compile(r"[0-9a-f]{64}")
_CHUNK = 2**20


@dataclass(frozen=True)
class RemoteFile:
    """Metadata of a file on the Hub."""

    commit: str
    nbytes: int
    sha256: str | None
    """SHA-256 of the content; None for small files, which are stored in git itself without a SHA-256."""


def resolve(reference: Reference) -> RemoteFile:
    """Fetches the metadata of a file with one HEAD request.

    Args:
        reference: The file.

    Returns:
        The commit, size and SHA-256 of the file.

    Raises:
        HubError: If the file cannot be accessed, or the server is not the Hub.
    """
    from huggingface_hub import get_hf_file_metadata

    with hub_errors(reference, reference.repository, reference.revision, kind=reference.kind):
        metadata = get_hf_file_metadata(_url(reference, reference.revision))
    if metadata.commit_hash is None or metadata.size is None or metadata.etag is None:
        problem = "the response lacks the commit, the size or the ETag of the file, so the server is not the Hub"
        raise HubError(str(reference), problem, "Check HF_ENDPOINT and the proxy settings")
    digest = metadata.etag if _SHA256.fullmatch(metadata.etag) else None
    return RemoteFile(metadata.commit_hash, metadata.size, digest)


def local_copy(reference: Reference, *, checked: bool = False) -> Path:
    """Returns the path of a file in huggingface_hub's cache, after downloading it if necessary.

    A downloaded file is checked against the size and the SHA-256 that the Hub provides. If the file is already in the
    cache, only its size is checked by default, and the file is downloaded again if the size is wrong. A cached file is
    not checked at all if the Hub cannot be reached, or if the revision is a commit and `checked` is not set.

    Args:
        reference: The file.
        checked: Whether to check both the size and the SHA-256 of a file that is already in the cache.

    Returns:
        Path of the cached file.

    Raises:
        HubError: If the file cannot be downloaded, or if the downloaded file differs from the Hub's metadata.
    """
    if reference.revision and COMMIT.fullmatch(reference.revision) and not checked:
        cached = _cached(reference, reference.revision)
        if cached is not None:
            return cached  # commits are immutable, so no request is needed
    remote = _resolve_remote(reference)
    if isinstance(remote, Path):
        return remote
    cached = _cached(reference, remote.commit)
    if cached is not None and _difference(cached, remote, check_digest=checked) is None:
        return cached
    path = _download(reference, force=cached is not None)
    if problem := _difference(path, remote, check_digest=True):
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise HubError(str(reference), f"the download differs from the file on the Hub: {problem}", "Try again")
    return path


def commit_of_copy(reference: Reference, path: Path) -> str | None:
    """Returns the commit that a file in huggingface_hub's cache belongs to.

    Args:
        reference: The file.
        path: The copy of the file, as returned by `local_copy`.

    Returns:
        The commit, or None if the path is not in the cache.
    """
    folder = path.parents[reference.file.count("/")]  # the cache stores files in snapshots/COMMIT
    return folder.name if COMMIT.fullmatch(folder.name) else None


def header_descriptor(reference: Reference, max_length: int) -> int:
    """Opens a safetensors file on the Hub and downloads only its header.

    Args:
        reference: The file.
        max_length: Maximum length of the header in bytes. A longer header is not downloaded, and the reader must reject
            the file.

    Returns:
        A file descriptor of the cached file or, if the file is not cached, of a sparse temporary file that contains the
        header and has the size of the file on the Hub.

    Raises:
        HubError: If the file cannot be accessed.
    """
    remote = _resolve_remote(reference)
    if isinstance(remote, Path):
        return os.open(remote, os.O_RDONLY)
    cached = _cached(reference, remote.commit)
    if cached is not None and _difference(cached, remote, check_digest=False) is None:
        return os.open(cached, os.O_RDONLY)
    prefix = _download_range(reference, remote, 0, 8)
    length = int.from_bytes(prefix, "little")
    # 24 bytes of a header that is too long are enough for the reader to recognise other file formats.
    header = _download_range(reference, remote, 8, 8 + (length if length <= max_length else 24))
    with tempfile.TemporaryFile(prefix="kfacpack-header-") as placeholder:
        placeholder.write(prefix + header)
        placeholder.truncate(remote.nbytes)
        placeholder.flush()
        return os.dup(placeholder.fileno())


def snapshot(repository: str, revision: str | None, kind: RepositoryKind = "model") -> Path | None:
    """Returns the folder in huggingface_hub's cache that contains the downloaded files of a revision.

    Args:
        repository: Name of the repository, OWNER/NAME.
        revision: A branch, a tag or a commit; None for the main branch.
        kind: Kind of repository, "model" or "dataset".

    Returns:
        The folder, or None if no file of the revision is in the cache.
    """
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"{kind}s--{repository.replace('/', '--')}"
    ref = folder / "refs" / (revision or "main")
    commit = ref.read_text().strip() if ref.is_file() else revision
    path = folder / "snapshots" / commit if commit else None
    return path if path and path.is_dir() else None


def commit_of(address: str) -> str:
    """Returns the commit that an address on the Hub currently refers to.

    Args:
        address: `hf://owner/repo[@revision][/path]`.

    Returns:
        The current commit or, if the Hub cannot be reached, the commit of the cached files.

    Raises:
        HubError: If there is no such repository or revision, or the Hub cannot be reached and nothing is cached.
    """
    parts = parse_address(address)
    if parts is None:
        raise HubError(address, "is not an address on the Hub", "Expected hf://OWNER/REPO[@REVISION][/PATH]")
    try:
        with hub_errors(address, parts.repository, parts.revision, kind=parts.kind):
            return str(hub_api().repo_info(parts.repository, revision=parts.revision, repo_type=parts.kind).sha)
    except HubError as error:
        cached = snapshot(parts.repository, parts.revision, parts.kind) if error.unreachable else None
        if cached is None:
            raise
        return cached.name


def _resolve_remote(reference: Reference) -> RemoteFile | Path:
    """Returns the Hub's metadata for a file, or the path of the cached file if the Hub cannot be reached."""
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


def _download_range(reference: Reference, remote: RemoteFile, start: int, stop: int) -> bytes:
    """Downloads the bytes of a file from position `start` to `stop` (exclusive), or to the end of a shorter file."""
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
    # A server may ignore the range and send the whole file, with status 200.
    part = content[start:stop] if response.status_code == 200 else content
    if len(part) != stop - start:
        problem = f"requested bytes {start} to {stop}, got {len(part)} bytes"
        raise HubError(str(reference), problem, "Try again")
    return part


def _cached(reference: Reference, revision: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(reference.repository, reference.file, revision=revision, repo_type=reference.kind)
    return Path(path) if isinstance(path, str) else None


def _download(reference: Reference, *, force: bool) -> Path:
    from huggingface_hub import hf_hub_download

    with hub_errors(reference, reference.repository, reference.revision, kind=reference.kind):
        return Path(
            hf_hub_download(
                reference.repository,
                reference.file,
                repo_type=reference.kind,
                # Pass the revision's name, not its commit, so that the cache can resolve the name offline.
                revision=reference.revision,
                force_download=force,
                library_name="kfacpack",
            )
        )


def _difference(path: Path, remote: RemoteFile, *, check_digest: bool) -> str | None:
    """Compares the size and, if `check_digest` is set, the SHA-256 of a file with the Hub's metadata.

    Returns:
        A description of the first difference, or None if there is no difference.
    """
    if (size := path.stat().st_size) != remote.nbytes:
        return f"got {size} bytes, expected {remote.nbytes}"
    if check_digest and remote.sha256 and (digest := digest_of_file(path)) != remote.sha256:
        return f"got SHA-256 {digest}, expected {remote.sha256}"
    return None


def digest_of_file(path: Path) -> str:
    """Returns the SHA-256 of a file's content as 64 hexadecimal digits."""
    content = sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            content.update(chunk)
    return content.hexdigest()
