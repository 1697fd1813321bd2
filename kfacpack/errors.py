"""Exceptions that kfacpack raises for invalid input, and helpers for their messages.

Every message names the file or object, the value found, the value expected and, if possible, a remedy.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from difflib import get_close_matches
from functools import partial


class KfacpackError(Exception):
    """Base class of all errors that are caused by invalid input or usage.

    The `kfacpack` command prints the message to stderr and exits with code 2.

    Example:
        >>> try:
        ...     kp.load_task("digit")
        ... except kp.KfacpackError as error:
        ...     print(error)
    """


class MatrixError(KfacpackError, ValueError):
    """Raised for tensors or arguments from which no curvature matrix can be built, such as a tensor that is not square.

    Example:
        >>> try:
        ...     kp.Dense.of(torch.zeros(2, 3))
        ... except kp.MatrixError as error:
        ...     print(error)
    """


class TaskVectorError(KfacpackError, ValueError):
    """Raised for an invalid task vector, or one that does not match the model, bundles or vectors it is used with.

    Example:
        >>> try:
        ...     curvature.quadratic({"no.such.parameter": torch.zeros(3)})
        ... except kp.TaskVectorError as error:
        ...     print(error)
    """


class BundleError(KfacpackError):
    """Raised for a file that is not a valid bundle or task vector, or that cannot be read or written.

    Attributes:
        path: The file, as a path or an `hf://` reference.
        problem: Description of the problem, without the path and the remedy.
        where: The invalid tensor, parameter, block or manifest key; None if the problem concerns the whole file.
        remedy: What the user can do about the problem, or None.

    Example:
        >>> try:
        ...     kp.load("damaged.kfac")
        ... except kp.BundleError as error:
        ...     print(error.path, error.where, error.problem)
    """

    def __init__(self, path: str | os.PathLike[str], problem: str, where: str | None = None, remedy: str | None = None):
        self.path = os.fspath(path)
        self.problem = printable(problem)
        self.where = where if where is None else printable(where)
        self.remedy = remedy
        location = self.path if self.where is None else f"{self.path}: {self.where}"
        super().__init__(f"{location}: {self.problem}" + (f". {remedy}" if remedy else ""))

    def __reduce__(self) -> tuple[type[BundleError], tuple[str, str, str | None, str | None]]:
        return type(self), (self.path, self.problem, self.where, self.remedy)


class CorruptTensor(BundleError):  # noqa: N818 - part of the public API under this name
    """Raised when a tensor's bytes do not match the SHA-256 hash in the manifest, or contain invalid values.

    Has the same attributes as `BundleError`; `where` is the name of the tensor.

    Example:
        >>> try:
        ...     kp.load("damaged.kfac").quadratic(tau)
        ... except kp.CorruptTensor as error:
        ...     print(error.where)
    """


class SubtractionError(KfacpackError):
    """Raised when a task cannot be subtracted from a merged bundle."""


class NotFiniteError(KfacpackError):
    """Raised when an output of the model, such as f or the logits, contains NaN or Inf."""


class HubError(KfacpackError):
    """Raised when a file or repository on the Hub cannot be read or written.

    Attributes:
        target: The reference or repository that was requested.
        problem: Description of the problem.
        remedy: What the user can do about the problem.
        unreachable: Whether the Hub did not answer, was busy, or must not be contacted (offline mode). In these cases,
            a cached copy may be used instead.
    """

    def __init__(self, target: str, problem: str, remedy: str, *, unreachable: bool = False):
        self.target, self.problem, self.remedy, self.unreachable = target, problem, remedy, unreachable
        super().__init__(printable(f"{target}: {problem}. {remedy}", max_length=2000))

    def __reduce__(self) -> tuple[partial[HubError], tuple[str, str, str]]:
        return partial(type(self), unreachable=self.unreachable), (self.target, self.problem, self.remedy)


class ProcessLostError(KfacpackError):
    """Raised when another process of a distributed run has exited or does not respond."""


class VerificationError(KfacpackError):
    """Raised when a file fails verification. The `kfacpack` command then exits with code 1."""


def printable(text: str, max_length: int = 400) -> str:
    """Makes text from an untrusted file safe to print.

    Args:
        text: The untrusted text.
        max_length: Maximum number of characters; longer text is truncated.

    Returns:
        The text, truncated to `max_length` characters, with non-printable characters such as terminal escapes replaced
        by their escape sequences.
    """
    short = text if len(text) <= max_length else f"{text[: max_length - 1]}…"
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in short)


def first_line(message: object) -> str:
    """Returns the first informative line of an error message.

    Args:
        message: An exception, or an error message as a string.

    Returns:
        The line without a final period or colon, or the name of the type of `message` if there is no such line.
    """
    lines = [line.strip().rstrip(".:") for line in str(message).splitlines()]
    # The first line of torch's message about a state dict only names the class of the module.
    informative = [line for line in lines if line and not line.startswith("Error(s) in loading")]
    return printable(informative[0]) if informative else type(message).__name__


def did_you_mean(name: str, names: Iterable[str], *, count: int = 1, cutoff: float = 0.6) -> str:
    """Returns the ending of an error message about an unknown name.

    The ending is "; did you mean 'a', 'b' or 'c'?", or "." if no valid name is similar.

    Args:
        name: The unknown name. A value of another type is converted to a string.
        names: The valid names. The comparison ignores case.
        count: Maximum number of suggestions.
        cutoff: Minimum similarity, from 0 to 1, as in `difflib.get_close_matches`.
    """
    by_lower = {candidate.lower(): candidate for candidate in names}
    close = get_close_matches(str(name).lower(), by_lower, n=count, cutoff=cutoff)
    if not close:
        return "."
    *first, last = [repr(by_lower[key]) for key in close]
    return f"; did you mean {', '.join(first)} or {last}?" if first else f"; did you mean {last}?"


def abbreviate(words: Iterable[str], limit: int = 16) -> str:
    """Joins words with commas. Words after the first `limit` words are replaced with "and N more"."""
    listed = list(words)
    more = [f"and {len(listed) - limit} more"] if len(listed) > limit else []
    return ", ".join([*listed[:limit], *more])


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Formats a count with its noun: '1 block', '2 blocks'. The plural of the noun defaults to the noun with an s."""
    return f"{count} {noun if count == 1 else plural or f'{noun}s'}"
