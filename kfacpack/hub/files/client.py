"""How we speak with huggingface_hub: what it raises, in our words, and when it may draw its bars.

Tokens are its own concern: it reads what `hf auth login` stored. Nothing here asks for one, or sees one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from kfacpack.errors import HubError, printable

if TYPE_CHECKING:
    from huggingface_hub import HfApi

LOG_IN = "log in with: hf auth login"

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
def speaking(place: object, repository: str, revision: str | None = None) -> Iterator[None]:
    """What huggingface_hub raises becomes a `HubError` about `place`; meanwhile its bars are as `bars` says."""
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
        met = error.__cause__ if isinstance(error, RuntimeError) else error
        if not isinstance(met, of_http | OSError | HFValidationError):
            raise
        raise _told(met, place, repository, revision) from error
    finally:
        if silenced:
            enable_progress_bars()


def _told(error: BaseException, place: object, repository: str, revision: str | None) -> HubError:
    from huggingface_hub import constants, errors

    def hub(problem: str, remedy: str, **more: bool) -> HubError:
        return HubError(str(place), problem, remedy, **more)

    if isinstance(error, errors.OfflineModeIsEnabled) or constants.HF_HUB_OFFLINE:
        return hub("is not in the cache, and HF_HUB_OFFLINE is set", "Unset it, or give a file", unreachable=True)
    if isinstance(error, errors.GatedRepoError):
        remedy = f"Ask for access at {constants.ENDPOINT}/{repository}, and {LOG_IN}"
        return hub(f"{repository} is gated, and you have no access to it", remedy)
    if isinstance(error, errors.RepositoryNotFoundError):
        problem = f"there is no repository {repository}, or it is private and you may not see it"
        return hub(problem, f"Check its name; if it is private, {LOG_IN}")
    if isinstance(error, errors.RevisionNotFoundError):
        problem = f"{repository} has no revision {revision or 'main'!r}"
        return hub(problem, "Give a branch, a tag or a commit that is there")
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        where = f" at {revision}" if revision else ""
        return hub(f"{repository} has no such file{where}", f"See what it has: kfacpack pull {repository} --list")
    if isinstance(error, errors.HfHubHTTPError):
        return _of_status(error, hub, repository)
    if isinstance(error, errors.HFValidationError):
        return hub(f"is not a name the Hub knows: {_first_line(error)}", "Expected owner/repo")
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        return hub(f"could not be stored: {error.filename}: {error.strerror}", "Nothing was changed")
    cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ else error
    problem = f"the Hub ({constants.ENDPOINT}) cannot be reached: {_first_line(cause)}"
    return hub(problem, "Is there a network? Then the same command goes on; or give a file", unreachable=True)


def _of_status(error: BaseException, hub: object, repository: str) -> HubError:
    assert callable(hub)
    status = error.response.status_code  # type: ignore[attr-defined]
    said = getattr(error, "server_message", None)
    words = f": {_first_line(said)}" if said else ""
    if status == 401:
        problem, remedy = f"the Hub does not know who you are{words}", f"For {repository}, {LOG_IN}"
    elif status == 403:
        problem = f"you may not do this with {repository}{words}"
        remedy = f"With an account that may, and a token that can write where you write, {LOG_IN}"
    elif status >= 500 or status == 429:
        problem, remedy = f"the Hub answers {status}{words}", "Try again later"
    else:
        problem, remedy = f"the Hub refuses ({status}){words}", f"Is {repository} what you meant?"
    made = hub(problem, remedy)
    assert isinstance(made, HubError)
    return made


def _first_line(error: object) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return printable(lines[0].rstrip(".") if lines else type(error).__name__)
