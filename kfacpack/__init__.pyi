from .compression.compress import compress
from .curvature.blocks import CurvatureBlock, Kronecker, Whole
from .curvature.curvature import Curvature, identify, load
from .curvature.export import export
from .curvature.matrices import BlockDiagonal, Dense, Diagonal, LowRank, Packed, Sparse
from .curvature.verification import verify
from .errors import BundleError, CorruptTensor, KfacpackError, MatrixError, TaskVectorError
from .estimation.estimate import estimate
from .evaluation.accuracy import evaluate
from .evaluation.bundle_quality import drift, spectra
from .evaluation.disentanglement import disentanglement
from .evaluation.localisation import localisation
from .evaluation.sweep import sweep
from .experiments.report import report
from .format.manifest import EXPAND, REDUCE, About, Base, Estimate, Function, Join, Piece, Source
from .format.reader import Bundle
from .hub.mammoth import import_mammoth
from .hub.push import push
from .hub.repository import pull
from .linearization.linearize import linearize
from .merging.merge import merge
from .models.families import load_model
from .models.heads import Head, head_for
from .tasks.registry import load_task
from .training.regularizer import Regularizer
from .vectors.add import add
from .vectors.task_vector import TaskVector

__version__: str
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
]
