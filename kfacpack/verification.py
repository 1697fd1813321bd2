"""Does a bundle keep what it promises?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kfacpack.bundle.checks import check_finite, check_hashes, check_model
from kfacpack.bundle.reader import Bundle

if TYPE_CHECKING:
    import os

    from kfacpack.bundle.checks import Check, Progress
    from kfacpack.bundle.identity import Weights


@dataclass(frozen=True)
class Verification:
    """What was checked of one bundle, and what did not hold."""

    path: str
    digest: str
    checks: tuple[Check, ...]

    @property
    def holds(self) -> bool:
        return not any(check.failures for check in self.checks)


def verify(
    path: str | os.PathLike[str],
    weights: Weights | None = None,
    progress: Progress = lambda check, done, total: None,
) -> Verification:
    """Check hashes, finiteness, symmetry and positive semi-definiteness; with `weights`, also the base model.

    A file that cannot be opened as a bundle raises `BundleError`. Matrices are computed with only once their bytes have
    proved to be numbers, and the ones that were sealed.
    """
    bundle = Bundle(path)
    checks = [check_hashes(bundle, progress), check_finite(bundle, progress)]
    if weights is not None:
        checks.append(check_model(bundle, weights))
    if not any(check.failures for check in checks[:2]):
        # Imported here because it brings torch, which a damaged file should not have to wait for.
        from kfacpack.curvature.checks import check_form, check_psd

        checks.append(check_form(bundle, progress))
        if not checks[-1].failures:
            checks.append(check_psd(bundle, progress))
    return Verification(str(bundle.path), bundle.digest, tuple(checks))
