"""Curvature as an artifact: compute Kronecker factors once, share them, merge them, train against them.

Names are imported when first used, so that reading a manifest does not wait for torch.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kfacpack.analysis.disentanglement import disentanglement
    from kfacpack.analysis.drift import drift
    from kfacpack.analysis.localisation import localisation
    from kfacpack.analysis.spectra import spectra
    from kfacpack.bundle.manifest import EXPAND, REDUCE, About, Base, Estimate, Function, Join, Piece, Source
    from kfacpack.bundle.reader import Bundle
    from kfacpack.compression.compress import compress
    from kfacpack.curvature.block import CurvatureBlock, Kronecker, Whole
    from kfacpack.curvature.curvature import Curvature
    from kfacpack.curvature.identify import identify
    from kfacpack.curvature.loading import load
    from kfacpack.curvature.matrices import BlockDiagonal, Dense, Diagonal, LowRank, Packed, Sparse
    from kfacpack.errors import BundleError, CorruptTensor, KfacpackError, MatrixError, TaskVectorError
    from kfacpack.estimation.estimate import estimate
    from kfacpack.evaluation.accuracy import evaluate
    from kfacpack.evaluation.sweep import sweep
    from kfacpack.exporting import export
    from kfacpack.heads import Head, head_for
    from kfacpack.hub.pull import pull
    from kfacpack.hub.push import push
    from kfacpack.importing.mammoth import import_mammoth
    from kfacpack.linear.linearize import linearize
    from kfacpack.merging.merge import merge
    from kfacpack.models import load_model
    from kfacpack.reporting.report import report
    from kfacpack.tasks import load_task
    from kfacpack.training.regularizer import Regularizer
    from kfacpack.vectors.add import add
    from kfacpack.vectors.vector import TaskVector
    from kfacpack.verification import verify

_HOMES = {
    "About": "bundle.manifest",
    "Base": "bundle.manifest",
    "BlockDiagonal": "curvature.matrices",
    "Bundle": "bundle.reader",
    "BundleError": "errors",
    "CorruptTensor": "errors",
    "Curvature": "curvature.curvature",
    "CurvatureBlock": "curvature.block",
    "Dense": "curvature.matrices",
    "Diagonal": "curvature.matrices",
    "EXPAND": "bundle.manifest",
    "Estimate": "bundle.manifest",
    "Function": "bundle.manifest",
    "Head": "heads",
    "Join": "bundle.manifest",
    "KfacpackError": "errors",
    "Kronecker": "curvature.block",
    "LowRank": "curvature.matrices",
    "MatrixError": "errors",
    "Packed": "curvature.matrices",
    "Piece": "bundle.manifest",
    "REDUCE": "bundle.manifest",
    "Regularizer": "training.regularizer",
    "Source": "bundle.manifest",
    "Sparse": "curvature.matrices",
    "TaskVector": "vectors.vector",
    "TaskVectorError": "errors",
    "Whole": "curvature.block",
    "add": "vectors.add",
    "compress": "compression.compress",
    "disentanglement": "analysis.disentanglement",
    "drift": "analysis.drift",
    "estimate": "estimation.estimate",
    "evaluate": "evaluation.accuracy",
    "export": "exporting",
    "head_for": "heads",
    "identify": "curvature.identify",
    "import_mammoth": "importing.mammoth",
    "linearize": "linear.linearize",
    "load": "curvature.loading",
    "load_model": "models",
    "load_task": "tasks",
    "localisation": "analysis.localisation",
    "merge": "merging.merge",
    "pull": "hub.pull",
    "push": "hub.push",
    "report": "reporting.report",
    "spectra": "analysis.spectra",
    "sweep": "evaluation.sweep",
    "verify": "verification",
}

__version__ = version("kfacpack")
__all__ = [
    "EXPAND",
    "REDUCE",
    "About",
    "Base",
    "BlockDiagonal",
    "Bundle",
    "BundleError",
    "CorruptTensor",
    "Curvature",
    "CurvatureBlock",
    "Dense",
    "Diagonal",
    "Estimate",
    "Function",
    "Head",
    "Join",
    "KfacpackError",
    "Kronecker",
    "LowRank",
    "MatrixError",
    "Packed",
    "Piece",
    "Regularizer",
    "Source",
    "Sparse",
    "TaskVector",
    "TaskVectorError",
    "Whole",
    "add",
    "compress",
    "disentanglement",
    "drift",
    "estimate",
    "evaluate",
    "export",
    "head_for",
    "identify",
    "import_mammoth",
    "linearize",
    "load",
    "load_model",
    "load_task",
    "localisation",
    "merge",
    "pull",
    "push",
    "report",
    "spectra",
    "sweep",
    "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kfacpack' has no attribute {name!r}")
    return getattr(import_module(f"kfacpack.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
