from .compression.compress import compress
from .curvature.blocks import BlockStructure, CurvatureBlock, Kronecker, Whole
from .curvature.curvature import Curvature, identify, load
from .curvature.matrices import BlockDiagonal, Dense, Diagonal, LowRank, Packed, Sparse
from .curvature.matrices.matrix import Matrix
from .curvature.saving import export
from .curvature.verification import Verification, verify
from .errors import (
    BundleError,
    CorruptTensor,
    HubError,
    KfacpackError,
    MatrixError,
    NotFiniteError,
    SubtractionError,
    TaskVectorError,
    VerificationError,
)
from .estimation.estimate import estimate
from .estimation.resume import Interrupted
from .estimation.task_estimate import estimate_task
from .evaluation.accuracy import EvaluationSet, Score, evaluate
from .evaluation.bundle_quality import drift, spectra
from .evaluation.disentanglement import disentanglement, localisation
from .evaluation.interference import InterferenceResult, interference
from .evaluation.sweep import sweep
from .experiments.report import report
from .experiments.run import run
from .format.container import Container
from .format.manifest import (
    EXPAND,
    REDUCE,
    About,
    Base,
    DenseEntry,
    Estimate,
    Function,
    Join,
    KroneckerEntry,
    Loss,
    Merge,
    OutputScale,
    Parameter,
    Piece,
    Scaling,
    Source,
)
from .format.reader import Bundle
from .format.reference import Reference
from .format.vector_manifest import AboutVector, CheckpointEntry, MethodEntry, SolvedBlock
from .hub.importer import ImportResult
from .hub.mammoth import import_mammoth
from .hub.push import PushResult, push
from .hub.repository import PullResult, SearchResult, pull, search
from .linearization.linearize import Linearized, SlowLinearizationWarning, linearize
from .merging.merge import merge
from .models.families import load_model
from .models.heads import Head, head_for
from .models.model import Model
from .tasks.registry import load_task
from .tasks.task import Split, Task
from .training.metrics import Metrics, MetricsWarning, PenaltyWarning
from .training.regularizer import OutputScaleWarning, OwnTaskWarning, PrecisionError, Regularizer
from .training.train import train
from .vectors.adapter_export import ExportedMatrix, LinearVectorWarning, LoraExport, LostParameter, export_lora
from .vectors.add import add, refine
from .vectors.storage import VectorStorage
from .vectors.task_vector import TaskVector

__version__: str
__all__ = [
    "EXPAND",
    "REDUCE",
    "About",
    "AboutVector",
    "Base",
    "BlockDiagonal",
    "BlockStructure",
    "Bundle",
    "BundleError",
    "CheckpointEntry",
    "Container",
    "CorruptTensor",
    "Curvature",
    "CurvatureBlock",
    "Dense",
    "DenseEntry",
    "Diagonal",
    "Estimate",
    "EvaluationSet",
    "ExportedMatrix",
    "Function",
    "Head",
    "HubError",
    "ImportResult",
    "InterferenceResult",
    "Interrupted",
    "Join",
    "KfacpackError",
    "Kronecker",
    "KroneckerEntry",
    "LinearVectorWarning",
    "Linearized",
    "LoraExport",
    "Loss",
    "LostParameter",
    "LowRank",
    "Matrix",
    "MatrixError",
    "Merge",
    "MethodEntry",
    "Metrics",
    "MetricsWarning",
    "Model",
    "NotFiniteError",
    "OutputScale",
    "OutputScaleWarning",
    "OwnTaskWarning",
    "Packed",
    "Parameter",
    "PenaltyWarning",
    "Piece",
    "PrecisionError",
    "PullResult",
    "PushResult",
    "Reference",
    "Regularizer",
    "Scaling",
    "Score",
    "SearchResult",
    "SlowLinearizationWarning",
    "SolvedBlock",
    "Source",
    "Sparse",
    "Split",
    "SubtractionError",
    "Task",
    "TaskVector",
    "TaskVectorError",
    "VectorStorage",
    "Verification",
    "VerificationError",
    "Whole",
    "add",
    "compress",
    "disentanglement",
    "drift",
    "estimate",
    "estimate_task",
    "evaluate",
    "export",
    "export_lora",
    "head_for",
    "identify",
    "import_mammoth",
    "interference",
    "linearize",
    "load",
    "load_model",
    "load_task",
    "localisation",
    "merge",
    "pull",
    "push",
    "refine",
    "report",
    "run",
    "search",
    "spectra",
    "sweep",
    "train",
    "verify",
]
