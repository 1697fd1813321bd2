"""Every failure a user can cause, in words that name the place, what was found, what was expected and what to do."""

from __future__ import annotations

import os


class KfacpackError(Exception):
    """Bad input. The command line prints it and exits with code 2."""


class BundleError(KfacpackError):
    """A file that is not, or no longer, a bundle.

    `where` is the tensor, parameter, block or manifest key at fault, or None when it is the file as a whole.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        problem: str,
        *,
        where: str | None = None,
        remedy: str | None = None,
    ):
        self.path = os.fspath(path)
        self.problem = problem
        self.where = where
        self.remedy = remedy
        place = self.path if where is None else f"{self.path}: {where}"
        super().__init__(f"{place}: {problem}" + (f". {remedy}" if remedy else ""))


class CorruptTensor(BundleError):  # noqa: N818 - named for what it is, as in "raise CorruptTensor"
    """A tensor whose bytes are not the ones its bundle was sealed with, or are no numbers."""


class TaskVectorError(KfacpackError):
    """A task vector that does not fit the curvature it is put to."""
