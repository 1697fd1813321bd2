"""What can only be checked of a bundle by computing with it: that its matrices are what they promise to be."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
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
        if (smallest := negative_eigenvalue(matrix_of(bundle, name))) is None:
            return None
        tensor = bundle.matrices[name].components["data"]
        problem = f"is not positive semi-definite: its smallest eigenvalue is {smallest:.4g}"
        return Failure(f"tensor {tensor!r}", problem)

    promised = [name for name, entry in bundle.matrices.items() if entry.psd]
    found = run_check("psd", promised, failure, progress)
    return replace(found, exempt=len(bundle.matrices) - len(promised))


def negative_eigenvalue(matrix: Matrix) -> float | None:
    """The smallest eigenvalue, if it is further below zero than rounding explains.

    Storing an entry moves it by half an eps of itself, and adding up k terms in float32 by about √k eps; no eigenvalue
    moves by more than the Frobenius norm of all that. A Cholesky factorisation costs a tenth of the eigenvalues, which
    are computed only for the message.
    """
    stored = torch.finfo(matrix.dtype if matrix.dtype.is_floating_point else torch.float32).eps
    summed = torch.finfo(torch.float32).eps * sqrt(matrix.positions or matrix.examples or _UNKNOWN_COUNT)
    for witness in matrix.psd_witnesses():
        # Scaled to unit size first, so that numbers of any magnitude are judged alike.
        size = witness.abs().amax()
        if size == 0:
            continue
        unit = witness / size
        slack = 2 * (stored + summed) * torch.linalg.matrix_norm(unit)
        if torch.linalg.cholesky_ex(unit + slack * torch.eye(len(unit)).to(unit)).info != 0:
            return float(torch.linalg.eigvalsh(unit)[0] * size)
    return None
