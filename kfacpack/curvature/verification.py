"""Does a bundle keep what it promises?"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kfacpack.format.identity import weights_of_file
from kfacpack.format.reader import Bundle, check_model, check_tensors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from kfacpack.format.identity import WeightReader
    from kfacpack.format.reader import CheckProgress, CheckResult


@dataclass(frozen=True)
class Verification:
    """What was checked of one bundle, and what did not hold."""

    path: str
    sha256: str
    checks: tuple[CheckResult, ...]

    @property
    def holds(self) -> bool:
        return not any(check.failures for check in self.checks)


def verify(
    path: str | os.PathLike[str],
    model: nn.Module | Mapping[str, Tensor] | str | os.PathLike[str] | None = None,
    progress: CheckProgress = lambda check, done, total: None,
) -> Verification:
    """Check hashes, finiteness, symmetry and positive semi-definiteness of a bundle.

    With `model` (a module, a state dict, or the path of a safetensors file), also that the curvature was computed at
    its weights. A file that cannot be opened as a bundle raises `BundleError`. Matrices are computed with only once
    their bytes have proved to be numbers, and the ones that were sealed.
    """
    bundle = Bundle(path)
    checks = [
        check_tensors("sha256", bundle, bundle.hash_problem, progress),
        check_tensors("finite", bundle, bundle.finite_problem, progress),
    ]
    intact = not any(check.failures for check in checks)
    if model is not None:
        checks.append(check_model(bundle, _weights(model), progress))
    if intact:
        # Imported here because it brings torch, which a damaged file should not have to wait for.
        from kfacpack.curvature.curvature import check_form, check_psd

        checks.append(check_form(bundle, progress))
        if not checks[-1].failures:
            checks.append(check_psd(bundle, progress))
    return Verification(str(bundle.path), bundle.digest, tuple(checks))


def _weights(model: nn.Module | Mapping[str, Tensor] | str | os.PathLike[str]) -> WeightReader:
    if isinstance(model, str | os.PathLike):
        return weights_of_file(model)
    from kfacpack.curvature.curvature import weights_of_model

    return weights_of_model(model)
