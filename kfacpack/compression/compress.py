"""`kp.compress`: compresses the matrices of a curvature, with one codec or within a size budget, and reports errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kfacpack.compression.budget_search import BudgetSearch, Candidates
from kfacpack.compression.codecs import CodecChain
from kfacpack.compression.compression_report import assemble_report, compare, dense_bytes, finish_report
from kfacpack.curvature.curvature import Curvature
from kfacpack.curvature.saving import file_size
from kfacpack.errors import KfacpackError
from kfacpack.format.units import parse_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from kfacpack.compression.budget_search import Option, OptionIndices
    from kfacpack.compression.compression_report import CompressionReport, FactorPair, Measure
    from kfacpack.curvature.blocks import CurvatureBlock
    from kfacpack.curvature.matrices.matrix import Matrix
    from kfacpack.format.units import OnProgress

    Vector = Callable[[str], Tensor]
    """A task vector, as a function that returns the change to the parameter with a given name."""


_WIDEST_FLOATS = 1.0, 1.0 - 1.23456e-7
"""Values of `quadratic` before and after compression whose relative error has the largest number of digits."""


@dataclass(frozen=True)
class CodecChoice:
    """A choice of one codec for each matrix of a curvature."""

    name: str
    """Name under which the errors are recorded: the codec, or "budget" if the codecs of the matrices differ."""
    chain_for: Callable[[Matrix], CodecChain]
    """Function that returns the codec chosen for a matrix."""


def compress(curvature: Curvature, spec: str | None = None, *, budget: str | int | None = None) -> Curvature:
    """Compresses a curvature, and records the approximation errors in the compressed curvature.

    Matrices that a codec does not make smaller are left unchanged. Matrices shared between blocks remain shared.

    Args:
        curvature: The curvature to compress.
        spec: A structural codec (`block:K`, `svd:R`, `svd:P%` or `prune:P%`), a number codec (`int8`, `fp16` or
            `bf16`), or one of each joined by +, such as "block:8+int8".
        budget: Maximum size of the saved bundle: a size such as "70MB", a percentage such as "10%" of the size of all
            matrices in dense float32, or a number of bytes. Pass either `spec` or `budget`. For a budget, a codec is
            chosen for each matrix such that the total error is small.

    Returns:
        The compressed curvature.

    Raises:
        KfacpackError: If `spec` and `budget` are both passed or both missing, if the spec is invalid, or if the budget
            is too small.

    Example:
        >>> import torch
        >>> import kfacpack as kp
        >>> curvature = kp.estimate(torch.nn.Linear(64, 32), [torch.randn(100, 64)])
        >>> kp.compress(curvature, "block:8+int8").nbytes < curvature.nbytes / 8
        True
    """
    if not isinstance(curvature, Curvature):
        raise KfacpackError(f"expected a curvature, such as kp.load(path); got {type(curvature).__name__}")
    return compress_with(curvature, choose_codecs(curvature, spec, budget))[0]


def choose_codecs(
    curvature: Curvature,
    spec: str | None,
    budget: str | int | None,
    on_progress: OnProgress = lambda done, total: None,
    *,
    with_vector: bool = False,
) -> CodecChoice:
    """Chooses the codec for each matrix according to a spec or a budget.

    If a budget is passed, every codec in `CANDIDATES` is tried on every matrix.

    Args:
        curvature: The curvature to compress.
        spec: See `compress`.
        budget: See `compress`.
        on_progress: Called with the number of groups of matrices processed and the total number of groups. The
            matrices of a group share one codec.
        with_vector: Whether the file will also contain the errors on a task vector, which take additional space.

    Returns:
        The choice of one codec for each matrix.

    Raises:
        KfacpackError: If `spec` and `budget` are both passed or both missing, if the spec is invalid, or if the budget
            is too small.
    """
    if spec is not None and budget is None:
        chain = CodecChain.parse(spec)
        return CodecChoice(str(chain), lambda matrix: chain)
    if budget is not None and spec is None:
        return _choose_for_budget(curvature, budget, on_progress, with_vector)
    count = "neither" if spec is None else "both"
    raise KfacpackError(f"expected either a codec, such as block:8+int8, or a budget, such as 70MB or 10%; got {count}")


def _choose_for_budget(
    curvature: Curvature, budget: str | int, on_progress: OnProgress, with_vector: bool
) -> CodecChoice:
    matrices = {id(matrix): matrix for block in curvature.blocks for _, matrix in block.structure.matrices()}
    limit = parse_size(budget, sum(map(dense_bytes, matrices.values())))
    candidates = Candidates.of(curvature, on_progress)
    search = BudgetSearch(candidates)
    files = _CandidateFiles(curvature, candidates, search.single(), with_vector)
    picks = _fit_budget(files, search, limit, budget)
    chosen = {key: option.chain for option in files.options(picks) for key in option.encoded}
    return CodecChoice(files.name(picks), lambda matrix: chosen[id(matrix)])


def _fit_budget(files: _CandidateFiles, search: BudgetSearch, limit: int, budget: str | int) -> OptionIndices:
    """Returns the best choice of options for which the file, including its header, has at most `limit` bytes."""
    single = [picks for picks in files.single if files.size(picks) <= limit]
    header = 0
    while (picks := search.best(limit - header, single)) is not None:
        excess = files.size(picks) - limit
        if excess <= 0:
            return picks
        header += excess
    # If the header is larger than the matrices, a codec that needs more tensors may increase the size of the file.
    sizes = {picks: files.size(picks) for picks in (*single, search.smallest(), search.unchanged())}
    if (smallest := min(sizes.values())) > limit:
        problem = f"budget {budget!r} is {limit:,} bytes, but the smallest file found has {smallest:,} bytes"
        raise KfacpackError(f"{problem}; increase the budget")
    return min((picks for picks in sizes if sizes[picks] <= limit), key=lambda picks: search.total(picks).random)


@dataclass(frozen=True)
class _CandidateFiles:
    """Determines the name of a choice of options and the exact size of the file that would result from it."""

    curvature: Curvature
    candidates: Candidates
    single: Mapping[OptionIndices, CodecChain]
    with_vector: bool

    def name(self, picks: OptionIndices) -> str:
        return str(self.single[picks]) if picks in self.single else "budget"

    def options(self, picks: OptionIndices) -> Iterator[Option]:
        return (group.options[pick] for group, pick in zip(self.candidates.groups, picks, strict=True))

    def size(self, picks: OptionIndices) -> int:
        """Returns the exact size of the file in bytes, for a choice of options.

        The size follows from the shapes of the compressed matrices and from the errors that the file records. Errors on
        a task vector are not known yet, so the function assumes that they have as many digits as possible.
        """
        encoded: dict[int, tuple[CodecChain, Matrix]] = {}
        sides: dict[tuple[int, ...], FactorPair] = {}
        counted: set[int] = set()
        for option in self.options(picks):
            encoded |= option.encoded
            sides |= option.sides
        measure = (lambda before, after: _WIDEST_FLOATS) if self.with_vector else None
        assembled = (assemble_report(block, encoded, sides, counted, measure) for block in self.curvature.blocks)
        blocks, reports = zip(*assembled, strict=True)
        return file_size(finish_report(self.curvature, blocks, reports, self.name(picks))[0])


def compress_with(
    curvature: Curvature,
    choice: CodecChoice,
    *,
    vector: Vector | None = None,
    on_progress: OnProgress = lambda done, total: None,
) -> tuple[Curvature, CompressionReport]:
    """Compresses every matrix with the codec that was chosen for it, block by block.

    The compressed matrices stay in memory; the original matrices are unpacked one block at a time.

    Args:
        curvature: The curvature to compress.
        choice: The codec for each matrix.
        vector: A task vector on which the error of `quadratic` is measured, or None to skip this measurement.
        on_progress: Called with the number of blocks processed and the total number of blocks.

    Returns:
        The compressed curvature, and a report on its sizes and errors.
    """
    encoded: dict[int, tuple[CodecChain, Matrix]] = {}
    sides: dict[tuple[int, ...], FactorPair] = {}
    counted: set[int] = set()
    measure = _vector_measure(curvature, vector) if vector else None
    blocks, reports = [], []
    for number, block in enumerate(curvature.blocks):
        on_progress(number, len(curvature.blocks))
        for side in block.structure.sides:
            for matrix in side:
                if id(matrix) not in encoded:
                    encoded[id(matrix)] = choice.chain_for(matrix).encode(matrix)
            key = tuple(map(id, side))
            if key not in sides:
                sides[key] = compare(side, [encoded[matrix_id][1] for matrix_id in key])
        smaller, report = assemble_report(block, encoded, sides, counted, measure)
        blocks.append(smaller)
        reports.append(report)
    on_progress(len(curvature.blocks), len(curvature.blocks))
    return finish_report(curvature, blocks, reports, choice.name)


def _vector_measure(curvature: Curvature, vector: Vector) -> Measure:
    """Returns a function that computes `quadratic` of a block on a task vector, before and after compression."""
    shapes = {parameter.name: parameter.shape for parameter in curvature.about.base.parameters}

    def measure(before: CurvatureBlock, after: CurvatureBlock) -> tuple[float, float]:
        tau = {name: vector(name) for name in before.parameters}
        return float(before.quadratic(tau, shapes)), float(after.quadratic(tau, shapes))

    return measure
