"""Every failure a user can cause, in words that name the place, what was found, what was expected and what to do."""

from __future__ import annotations

import os


class KfacpackError(Exception):
    """Bad input. The command line prints it and exits with code 2."""


class MatrixError(KfacpackError, ValueError):
    """Numbers that cannot be a matrix of curvature."""


class TaskVectorError(KfacpackError, ValueError):
    """A task vector that does not fit the curvature it is put to."""


class BundleError(KfacpackError):
    """A file that is not, or no longer, a bundle; or one that could not be written.

    `where` is the tensor, parameter, block or manifest key at fault, or None when it is the file as a whole.
    """

    def __init__(self, path: str | os.PathLike[str], problem: str, where: str | None = None, remedy: str | None = None):
        self.path = os.fspath(path)
        self.problem = printable(problem)
        self.where = where if where is None else printable(where)
        self.remedy = remedy
        place = self.path if self.where is None else f"{self.path}: {self.where}"
        super().__init__(f"{place}: {self.problem}" + (f". {remedy}" if remedy else ""))

    def __reduce__(self) -> tuple[type[BundleError], tuple[str, str, str | None, str | None]]:
        return type(self), (self.path, self.problem, self.where, self.remedy)


class CorruptTensor(BundleError):  # noqa: N818 - named for what it is, as in "raise CorruptTensor"
    """A tensor whose bytes are not the ones its bundle was sealed with, or not what they should be."""


def printable(text: str, longest: int = 400) -> str:
    """Text from a file nobody vouches for: nothing a terminal would obey, and no longer than a person would read."""
    short = text if len(text) <= longest else f"{text[: longest - 1]}…"
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in short)


def first_line(said: object) -> str:
    """What another library's error says, or a server, as one line without its full stop; else what kind it is."""
    lines = [line.strip().rstrip(".:") for line in str(said).splitlines()]
    # torch's headline about a state dict says nothing.
    told = [line for line in lines if line and not line.startswith("Error(s) in loading")]
    return printable(told[0]) if told else type(said).__name__


class SubtractionError(KfacpackError):
    """A task cannot be taken out of what it was merged into."""


class NotFiniteError(KfacpackError):
    """f has numbers that are none."""


class HubError(KfacpackError):
    """A file or repository on the Hub that could not be read or written.

    `unreachable`: nobody answered, or nobody was to be asked, or not now; what is in the cache may serve instead.
    """

    def __init__(self, place: str, problem: str, remedy: str, *, unreachable: bool = False):
        self.place, self.problem, self.remedy, self.unreachable = place, problem, remedy, unreachable
        super().__init__(printable(f"{place}: {problem}. {remedy}", longest=2000))

    def __reduce__(self) -> tuple[type[HubError], tuple[str, str, str]]:
        return type(self), (self.place, self.problem, self.remedy)


class VerificationError(KfacpackError):
    """A file that was checked and is not what it promises to be. The command line exits with code 1."""
