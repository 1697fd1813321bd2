"""What can only be checked of a bundle by computing with it: that its matrices are what they promise to be."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite, nan, sqrt
from typing import TYPE_CHECKING

import torch

from kfacpack.bundle.checks import Check, Failure, run_check
from kfacpack.curvature.loading import matrix_of

if TYPE_CHECKING:
    from kfacpack.bundle.checks import Progress
    from kfacpack.bundle.reader import Bundle
    from kfacpack.curvature.matrices import Matrix

_UNKNOWN_COUNT = 10_000


def check_form(bundle: Bundle, progress: Progress) -> Check:
    """Symmetry, and whatever else a form asks of its tensors beyond their shapes."""

    def failure(name: str) -> Failure | None:
        if violation := matrix_of(bundle, name).violation():
            component, problem = violation
            return Failure(f"tensor {bundle.matrices[name].components[component]!r}", problem)
        return None

    return run_check("symmetry", bundle.matrices, failure, progress)


def check_psd(bundle: Bundle, progress: Progress) -> Check:
    """Positive semi-definiteness of the matrices that promise it, up to rounding."""

    def failure(name: str) -> Failure | None:
        if (bound := negative_direction(matrix_of(bundle, name))) is None:
            return None
        tensor = bundle.matrices[name].components["data"]
        problem = f"is not positive semi-definite: it has an eigenvalue below {bound:.4g}, which is no rounding"
        return Failure(f"tensor {tensor!r}", problem)

    promised = [name for name, entry in bundle.matrices.items() if entry.psd]
    found = run_check("psd", promised, failure, progress)
    return replace(found, exempt=len(bundle.matrices) - len(promised))


def negative_direction(matrix: Matrix) -> float | None:
    """If an eigenvalue is further below zero than rounding explains, how far below rounding reaches; else None.

    Storing an entry moves it by half an eps of itself (or of the smallest normal number), and adding up k terms in
    float32 by about √k eps; no eigenvalue moves by more than the Frobenius norm of all that. Sums of squares stay
    positive however they are stored, so of the diagonal only the adding-up is excused. A Cholesky factorisation tells,
    at a tenth of the price of the eigenvalues.
    """
    stored = torch.finfo(matrix.dtype if matrix.dtype.is_floating_point else torch.float32)
    added = torch.finfo(torch.float32).eps * sqrt(matrix.positions or matrix.examples or _UNKNOWN_COUNT)
    for witness in matrix.psd_witnesses():
        size = float(witness.abs().amax())
        if size == 0:
            continue
        if not isfinite(size):
            return nan
        # Scaled to unit size, so that numbers of any magnitude are judged alike.
        unit = witness / size
        norm = torch.linalg.matrix_norm(unit)[..., None]
        smallest = stored.tiny * stored.eps * unit.shape[-1] / size
        slack = 2 * (stored.eps + added) * norm + smallest
        lifted = unit + torch.diag_embed(slack.expand(unit.shape[:-1]))
        negative = bool((unit.diagonal(dim1=-2, dim2=-1) < -2 * added * norm - smallest).any())
        if negative or bool(torch.linalg.cholesky_ex(lifted).info.any()):
            return -float((2 * added * norm + smallest if negative else slack).amax()) * size
    return None
