"""What can only be checked of a bundle by computing with it: that its matrices are what they promise to be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kfacpack.bundle.checks import Check, Failure, run_check
from kfacpack.curvature.loading import matrix_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kfacpack.bundle.checks import Progress
    from kfacpack.bundle.reader import Bundle
    from kfacpack.curvature.matrices import Matrix


def check_form(bundle: Bundle, progress: Progress) -> Check:
    """Symmetry, and whatever else a form asks of its tensors beyond their shapes."""

    def problems(name: str) -> Iterator[Failure]:
        tensors = bundle.matrices[name].components
        for component, problem in matrix_of(bundle, name).violations():
            yield Failure(tensors[component], problem)

    return run_check("symmetry", bundle.matrices, problems, progress)


def check_psd(bundle: Bundle, progress: Progress) -> Check:
    """Positive semi-definiteness of the matrices that promise it, up to the rounding of what they are stored in."""

    def problems(name: str) -> Iterator[Failure]:
        if (smallest := negative_eigenvalue(matrix_of(bundle, name))) is not None:
            tensor = bundle.matrices[name].components["data"]
            yield Failure(tensor, f"is not positive semi-definite: its smallest eigenvalue is {smallest:.4g}")

    promised = (name for name, entry in bundle.matrices.items() if entry.psd)
    return run_check("psd", promised, problems, progress)


def negative_eigenvalue(matrix: Matrix) -> float | None:
    """The smallest eigenvalue, if it is further below zero than rounding explains.

    Storing an entry moves it by at most half an eps of itself, so no eigenvalue moves by more than eps/2 · ‖M‖_F. Four
    times that leaves room for how the sums were accumulated. A Cholesky factorisation costs a tenth of the eigenvalues,
    which are computed only for the message.
    """
    eps = torch.finfo(matrix.dtype if matrix.dtype.is_floating_point else torch.float32).eps
    for witness in matrix.psd_witnesses():
        slack = 2 * max(eps, torch.finfo(torch.float32).eps) * torch.linalg.matrix_norm(witness)
        lifted = witness + slack * torch.eye(len(witness), dtype=witness.dtype)
        if float(slack) > 0 and torch.linalg.cholesky_ex(lifted).info != 0:
            return float(torch.linalg.eigvalsh(witness)[0])
    return None
