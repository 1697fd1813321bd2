"""Verification of a bundle: hashes, finite values, matrix forms, positive semi-definiteness, and the base model.

Importing this module does not import torch.
"""

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
    """The results of all checks of one bundle, as returned by `verify`."""

    path: str
    """Path of the file."""
    sha256: str
    """Digest of the file."""
    checks: tuple[CheckResult, ...]
    """The result of each check."""

    @property
    def holds(self) -> bool:
        """Whether all checks passed."""
        return not any(check.failures for check in self.checks)


def verify(
    path: str | os.PathLike[str],
    model: nn.Module | Mapping[str, Tensor] | str | os.PathLike[str] | None = None,
    *,
    on_progress: CheckProgress = lambda check, done, total: None,
) -> Verification:
    """Checks a bundle: hashes, finite values, symmetry, positive semi-definiteness and, optionally, the base model.

    Symmetry is checked only if all hashes match and all values are finite. Positive semi-definiteness is checked only
    if the symmetry check passes.

    Args:
        path: The bundle.
        model: A module, a state dict, or the path of a safetensors file. If given, its weights are compared with the
            weights at which the curvature was computed.
        on_progress: Called with the name of a check, the number of items checked and the total number.

    Returns:
        The results of all checks that were performed.

    Raises:
        BundleError: If the file cannot be opened as a bundle.

    Example:
        >>> import kfacpack as kp
        >>> kp.verify("mnist.kfac").holds  # doctest: +SKIP
        True
    """
    bundle = Bundle(path)
    checks = [
        check_tensors("sha256", bundle, bundle.hash_problem, on_progress),
        check_tensors("finite", bundle, bundle.finite_problem, on_progress),
    ]
    intact = not any(check.failures for check in checks)
    if model is not None:
        checks.append(check_model(bundle, _weights(model), on_progress))
    if intact:
        # Imported here to avoid importing torch for a damaged file, for which it is not needed.
        from kfacpack.curvature.curvature import check_form, check_psd

        checks.append(check_form(bundle, on_progress))
        if not checks[-1].failures:
            checks.append(check_psd(bundle, on_progress))
    return Verification(str(bundle.path), bundle.digest, tuple(checks))


def _weights(model: nn.Module | Mapping[str, Tensor] | str | os.PathLike[str]) -> WeightReader:
    if isinstance(model, str | os.PathLike):
        return weights_of_file(model)
    from kfacpack.curvature.curvature import weights_of_model

    return weights_of_model(model)
