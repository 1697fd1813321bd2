"""How we speak with huggingface_hub: what it raises, in our words, and when it may draw its bars.

Tokens are its own concern: it reads what `hf auth login` stored. Nothing here asks for one, or sees one.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kfacpack.errors import HubError, first_line

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    from kfacpack.hub.files.reference import Kind

LOG_IN = "log in with: hf auth login"

_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ENOTDIR)
_shown: ContextVar[bool] = ContextVar("kfacpack_hub_bars", default=False)


@contextmanager
def bars(*, show: bool) -> Iterator[None]:
    """Whether huggingface_hub may draw its bars of what it fetches and sends; without this, it may not."""
    before = _shown.set(show)
    try:
        yield
    finally:
        _shown.reset(before)


def client() -> HfApi:
    """Made each time, so that where the Hub is (HF_ENDPOINT) is looked at when it is asked."""
    from huggingface_hub import HfApi

    return HfApi(library_name="kfacpack")


@contextmanager
def speaking(
    place: object,
    repository: str,
    revision: str | None = None,
    *,
    kind: Kind = "model",
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
        raise _told(met, _Asked(str(place), repository, revision, kind, otherwise, instead or otherwise)) from met
    finally:
        if silenced:
            enable_progress_bars()


@dataclass(frozen=True)
class _Asked:
    """What was asked for when huggingface_hub raised something."""

    place: str
    repository: str
    revision: str | None
    kind: Kind
    otherwise: str | None
    instead: str | None

    def or_instead(self, remedy: str) -> str:
        return f"{remedy}; or {self.instead}" if self.instead else remedy

    @property
    def url(self) -> str:
        from huggingface_hub import constants

        return f"{constants.ENDPOINT}/{'datasets/' if self.kind == 'dataset' else ''}{self.repository}"


def _told(error: BaseException, asked: _Asked) -> HubError:
    from huggingface_hub import constants, errors

    if words := _refusal(error, asked):
        return HubError(asked.place, *words, unreachable=_is_busy(_status(error)))
    otherwise = asked.otherwise or "give a file"
    if isinstance(error, errors.OfflineModeIsEnabled) or constants.HF_HUB_OFFLINE:
        problem = "is not in the cache, and HF_HUB_OFFLINE is set"
        return HubError(asked.place, problem, f"Unset it, or {otherwise}", unreachable=True)
    if isinstance(error, OSError) and error.errno in _OF_DISKS:
        problem = f"could not be stored in huggingface_hub's cache: {error.strerror}"
        return HubError(asked.place, problem, "Make room, or let HF_HOME name another folder")
    cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ else error
    problem = f"the Hub ({constants.ENDPOINT}) cannot be reached: {first_line(cause)}"
    return HubError(asked.place, problem, f"Is there a network? Then try again; or {otherwise}", unreachable=True)


def _refusal(error: BaseException, asked: _Asked) -> tuple[str, str] | None:
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


def _by_status(error: HfHubHTTPError, asked: _Asked) -> tuple[str, str]:
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
