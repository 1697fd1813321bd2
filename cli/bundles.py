"""`kfacpack compress` and `kfacpack merge`: write a smaller or a merged bundle and report the approximation error."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.text import Text
from typing_extensions import TypedDict

from kfacpack.errors import KfacpackError, abbreviate, counted
from kfacpack.format.reader import Bundle
from kfacpack.format.units import human_bytes, human_seconds

from .console import out, plain_table, print_json, print_line, print_next, steps_bar
from .options import (
    AS_JSON,
    MAX_SHARD_SIZE,
    QUIET,
    RUN_PANEL,
    File,
    check_output,
    check_shard_size,
    model_arguments,
    option,
    output_option,
)

if TYPE_CHECKING:
    from kfacpack.compression.compression_report import BlockCompressionReport, CompressionReport
    from kfacpack.format.manifest import Merge
    from kfacpack.merging.merge import BlockMergeReport, MergeReport


COMPRESSION_PANEL = "Compression"


class QuadraticErrorOutput(TypedDict):
    """Relative errors of τᵀGτ, the drift that the curvature G predicts for a task vector τ."""

    random: float
    """Root-mean-square error on random task vectors."""
    along: float
    """Error on task vectors drawn from N(0, G)."""
    vector: float | None
    """Error on the task vector given by `--vector`; null without this option."""


class BlockCompressionOutput(TypedDict):
    """Size and errors of one compressed block."""

    name: str
    step: str | None
    """The codecs that were applied; null if the block is unchanged."""
    kept: list[str]
    """Roles, such as A or B, of the matrices that were left unchanged because the codec would not make them smaller."""
    bytes: int
    dense_bytes: int
    """Size of the matrices if stored as dense float32."""
    ratio: float | None
    """`bytes` divided by `dense_bytes`; null if the block shares all its matrices with an earlier block."""
    frobenius: float
    """Relative error of the block in the Frobenius norm."""
    quadratic: QuadraticErrorOutput


class CompressionOutput(TypedDict):
    """Size and errors of a compressed bundle."""

    dense_bytes: int
    """Size of all matrices if stored as dense float32."""
    ratio: float
    """Size of the compressed file divided by `dense_bytes`."""
    frobenius: float
    """Relative error of G in the Frobenius norm."""
    quadratic: QuadraticErrorOutput
    blocks: list[BlockCompressionOutput]


class CompressOutput(CompressionOutput):
    """Output of `kfacpack compress --json`."""

    path: str | None
    """Path of the compressed bundle; null with `--dry-run`."""
    sha256: str | None
    """Digest of the compressed bundle; null with `--dry-run`."""
    bytes: int
    """Size of the compressed bundle."""
    input_bytes: int
    """Size of the input bundle."""


def compress(
    bundle: File = typer.Argument(..., metavar="FILE.kfac", help="Bundle to compress."),
    spec: str | None = typer.Argument(
        None,
        metavar="CODEC",
        help="How the matrices are compressed. block:K keeps K diagonal blocks. svd:R keeps the R largest eigenvalues, "
        "and svd:P% the largest P% of the eigenvalues. prune:P% keeps the largest P% of the entries. int8, fp16 and "
        "bf16 store the numbers in the format of that name. Join codecs with +, as in block:8+int8.",
    ),
    output: Path | None = output_option("SMALL.kfac", None),
    budget: str | None = option(
        COMPRESSION_PANEL,
        None,
        "--budget",
        metavar="SIZE|P%",
        help="Maximum file size: a size such as 70MB, or a percentage such as 10% of the size of all matrices as dense "
        "float32. Pass this option instead of CODEC to choose the codec of each matrix so that the error is smallest.",
    ),
    vector: File | None = option(
        RUN_PANEL,
        None,
        "--vector",
        metavar="FILE.safetensors",
        help="Task vector τ on which the error of τᵀGτ is also measured.",
    ),
    blocks: bool = option(RUN_PANEL, False, "--blocks", help="List the codec, size and errors of every block."),
    dry_run: bool = option(RUN_PANEL, False, "--dry-run", help="Show the size and the errors without writing a file."),
    max_shard_size: str | None = MAX_SHARD_SIZE,
    as_json: bool = AS_JSON,
    quiet: bool = QUIET,
) -> None:
    """Compress a bundle and report the error of its curvature G and of the drift τᵀGτ that G predicts for a vector τ.

    The error of τᵀGτ is measured on random task vectors and on vectors along the curvature. The latter are drawn from
    N(0, G) and are closer to trained vectors than the former. With --vector, the error is also measured on the given
    vector. The errors are recorded in the new bundle.

    A matrix that the codec would not make smaller is left unchanged. The codecs block, svd and svd+int8 keep the
    matrices positive semi-definite; fp16 and bf16 do so up to rounding errors. If you use any other codec, check the
    result with `kfacpack verify`.
    """
    # Imported here so that --help does not wait for torch.
    from kfacpack.compression.compress import choose_codecs, compress_with
    from kfacpack.curvature.curvature import from_bundle
    from kfacpack.curvature.saving import file_size
    from kfacpack.vectors.storage import read_vector_tensors

    if output is None and not dry_run:
        raise KfacpackError("no output file; pass -o SMALL.kfac, or --dry-run to show only the size and the errors")
    source = Bundle(bundle)
    if output is not None:
        check_output(output, [bundle, *([vector] if vector else [])])
    check_shard_size(max_shard_size, output)
    curvature = from_bundle(source)
    tau = read_vector_tensors(vector, curvature) if vector else None
    show = not (quiet or as_json)
    with steps_bar("trying codecs", show=show and budget is not None) as advance:
        choice = choose_codecs(curvature, spec, budget, advance, with_vector=tau is not None)
    with steps_bar("compressing", show=show) as advance:
        compressed, report = compress_with(curvature, choice, vector=tau, on_progress=advance)
    path, digest, size = None, None, file_size(compressed)
    if output is not None and not dry_run:
        compressed.save(output, max_shard_size=max_shard_size)
        written = Bundle(output)
        path, digest, size = str(output), written.digest, written.nbytes
    if as_json:
        result: CompressOutput = {
            "path": path,
            "sha256": digest,
            "bytes": size,
            "input_bytes": source.nbytes,
            **report_json(report, size),
        }
        print_json(result)
    elif show:
        if blocks:
            _print_blocks(report)
        action = "compressed size:" if path is None else f"wrote {output}:"
        print_report(report, f"{action} {human_bytes(size)}, from {human_bytes(source.nbytes)}", size)
        if path is not None:
            print_next("train", *model_arguments(curvature.about.base), "--task", "TASK", "--reg", output)


def report_json(report: CompressionReport, size: int) -> CompressionOutput:
    """Returns the content of a compression report for `--json`.

    Args:
        report: The report.
        size: Size of the compressed file in bytes.
    """
    return {
        "dense_bytes": report.dense_bytes,
        "ratio": size / report.dense_bytes,
        "frobenius": report.moments.frobenius,
        "quadratic": _quadratic_json(report),
        "blocks": [_block_json(block) for block in report.blocks],
    }


def _block_json(block: BlockCompressionReport) -> BlockCompressionOutput:
    return {
        "name": block.name,
        "step": block.step,
        "kept": list(block.kept),
        "bytes": block.bytes,
        "dense_bytes": block.dense_bytes,
        "ratio": block.bytes / block.dense_bytes if block.dense_bytes else None,
        "frobenius": block.moments.frobenius,
        "quadratic": _quadratic_json(block),
    }


def _quadratic_json(report: CompressionReport | BlockCompressionReport) -> QuadraticErrorOutput:
    from kfacpack.compression.compression_report import relative_error

    moments = report.moments
    return {"random": moments.quadratic, "along": moments.along, "vector": relative_error(report.on_vector)}


def print_report(report: CompressionReport, heading: str, size: int) -> None:
    """Prints a compression report: the size relative to dense float32, the errors, and the unchanged blocks.

    Args:
        report: The report.
        heading: Text to print before the size relative to dense float32.
        size: Size of the compressed file in bytes.
    """
    from kfacpack.compression.compression_report import relative_error

    dense = human_bytes(report.dense_bytes)
    print_line(f"{heading}: {size / report.dense_bytes:.2%} of the size as dense float32 ({dense})")
    error = relative_error(report.on_vector)
    on_vector = "" if error is None else f", {error:.2g} on the given task vector"
    print_line(
        f"relative error of G: {report.moments.frobenius:.2g} (Frobenius norm); relative error of τᵀGτ: "
        f"{report.moments.quadratic:.2g} on random task vectors (root mean square), {report.moments.along:.2g} "
        f"on vectors along the curvature{on_vector}"
    )
    if unchanged := [block.name for block in report.blocks if block.step is None]:
        names = abbreviate(unchanged, limit=3)
        print_line(f"unchanged blocks: {len(unchanged)} of {len(report.blocks)} ({names})")


def _print_blocks(report: CompressionReport) -> None:
    from kfacpack.compression.compression_report import relative_error

    with_vector = report.on_vector is not None
    columns = ("bytes", "of dense", "G", "random τ", "along G", *(["task vector"] * with_vector))
    table = plain_table("block", "codec", numbers=columns)
    for block in report.blocks:
        ratio = f"{block.bytes / block.dense_bytes:.2%}" if block.dense_bytes else "shared"
        moments = block.moments
        errors = [
            moments.frobenius,
            moments.quadratic,
            moments.along,
            *([relative_error(block.on_vector)] * with_vector),
        ]
        cells = ["" if error is None else f"{error:.2g}" for error in errors]
        name = Text(block.name, overflow="fold")
        table.add_row(name, Text(block.step or "unchanged"), human_bytes(block.bytes), ratio, *cells)
    out.print(table)


MERGE_PANEL = "Merge"


def merge(
    bundles: list[File] = typer.Argument(..., metavar="FILE.kfac...", help="Bundles to merge."),
    output: Path = output_option("MERGED.kfac"),
    rule: str = option(
        MERGE_PANEL,
        "tak",
        "--rule",
        metavar="RULE",
        help="Merge rule. tak: one Kronecker product per block, as in the TAK paper. optimal: the sum of --rank "
        "Kronecker products that is nearest to the exact result. stack: the exact result, which contains the products "
        "of all bundles. shards: the exact estimate for one task, from bundles that were estimated from different "
        "examples.",
    ),
    rank: int = option(
        MERGE_PANEL,
        1,
        "--rank",
        metavar="R",
        help="Number of Kronecker products per block; used only with --rule optimal.",
    ),
    weights: str | None = option(
        MERGE_PANEL,
        None,
        "--weights",
        metavar="W,W,...",
        help="One weight per bundle; only the ratios of the weights matter. [default: the dataset sizes]",
    ),
    without: list[str] | None = option(
        MERGE_PANEL,
        None,
        "--without",
        metavar="TASK",
        help="Leave out this task; repeatable. If an input bundle was merged with the rule tak and contains this task, "
        "also pass the bundle of this task alone, which is then subtracted.",
    ),
    allow_partial: bool = option(
        MERGE_PANEL,
        False,
        "--allow-partial",
        help="Allow blocks that are missing in some bundles. Such a block is merged from the bundles that contain it.",
    ),
    blocks: bool = option(RUN_PANEL, False, "--blocks", help="List the approximation error of every block."),
    max_shard_size: str | None = MAX_SHARD_SIZE,
    as_json: bool = AS_JSON,
    quiet: bool = QUIET,
) -> None:
    """Merge bundles of several tasks into one, and report the approximation error.

    The result represents Σ w_t G_t, where G_t is the curvature of task t. By default, the weights w_t are the dataset
    sizes, scaled to a mean of one.

    To reuse a bundle of all tasks for training on one of them, subtract the bundle of that task:
    kfacpack merge all.kfac dtd.kfac --without dtd -o others.kfac
    """
    # Imported here so that --help does not wait for torch.
    from kfacpack.merging.merge import merge_and_report

    check_output(output, bundles)
    check_shard_size(max_shard_size, output)
    start, show = time.perf_counter(), not (quiet or as_json)
    with steps_bar("measuring", show=show) as advance:
        merged = merge_and_report(
            bundles,
            rule,
            rank=rank,
            weights=_parse_weights(weights),
            without=without or (),
            allow_partial=allow_partial,
            on_progress=advance,
        )
    with steps_bar("writing", show=show) as advance:
        merged.curvature.save(output, max_shard_size=max_shard_size, on_progress=advance)
    seconds, bundle, about = time.perf_counter() - start, Bundle(output), merged.curvature.about
    assert about.merge is not None
    if as_json:
        result: MergeOutput = {
            "path": str(output),
            "sha256": bundle.digest,
            "bytes": bundle.nbytes,
            "seconds": seconds,
            "rule": about.merge.rule,
            "rank": about.merge.rank,
            "parents": [
                {
                    "sha256": parent.sha256,
                    "weight": parent.weight,
                    "task": parent.task,
                    "dataset_size": parent.dataset_size,
                }
                for parent in about.merge.parents
            ],
            **_merge_report_json(merged.report),
        }
        print_json(result)
    elif show:
        if blocks:
            _print_merged_blocks(merged.report)
        blocks_text = counted(len(merged.report.blocks), "block")
        size = f"{blocks_text}, {human_bytes(bundle.nbytes)}, in {human_seconds(seconds)}"
        print_line(f"wrote {output}: {_describe(about.merge)}: {size}")
        _print_errors(merged.report, rule)
        task = without[0] if without else "TASK"
        print_next("train", *model_arguments(about.base), "--task", task, "--reg", output)


def _parse_weights(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(weight) for weight in text.split(",")]
    except ValueError as error:
        raise KfacpackError(f"--weights {text!r}: expected numbers separated by commas, such as 1,1,2") from error


def _describe(merge: Merge) -> str:
    rank = f" (rank {merge.rank})" if merge.rank else ""
    parents = abbreviate(f"{parent.task or parent.sha256[:12]} × {parent.weight:.3g}" for parent in merge.parents)
    return f"{merge.rule} merge{rank} of {parents}"


class MergeErrorsOutput(TypedDict):
    """The approximation error and its bound, relative to the Frobenius norm of the exact result."""

    frobenius: float | None
    """The relative approximation error; null if a task was subtracted, because the error is then unknown."""
    bound: float | None
    """Bound on this error from the TAK paper; null if the merge is exact or the error is unknown."""


class BlockMergeOutput(MergeErrorsOutput):
    """Approximation errors of one merged block."""

    name: str
    terms: int
    """Number of Kronecker products of this block, summed over all inputs."""
    missing: list[str]
    """Inputs that do not contain the block."""


class MergeReportOutput(MergeErrorsOutput):
    """Approximation errors of a merged bundle."""

    subtracted: list[str]
    """Tasks that were subtracted."""
    blocks: list[BlockMergeOutput]


class ParentOutput(TypedDict):
    """A bundle that was merged. If an input is itself a merged bundle, its parents are listed instead."""

    sha256: str
    """Digest of the bundle."""
    weight: float
    task: str | None
    dataset_size: int | None


class MergeOutput(MergeReportOutput):
    """Output of `kfacpack merge --json`."""

    path: str
    sha256: str
    """Digest of the merged bundle."""
    bytes: int
    seconds: float
    rule: str
    rank: int | None
    """Number of Kronecker products per block; null for rules without a rank."""
    parents: list[ParentOutput]


def _merge_report_json(report: MergeReport) -> MergeReportOutput:
    def errors(block: BlockMergeReport) -> MergeErrorsOutput:
        frobenius = None if report.subtracted else block.frobenius
        return {"frobenius": frobenius, "bound": block.relative_bound if _has_bound(report) else None}

    blocks: list[BlockMergeOutput] = [
        {"name": block.name, "terms": block.terms, "missing": list(block.missing), **errors(block)}
        for block in report.blocks
    ]
    return {"subtracted": list(report.subtracted), **errors(report.total), "blocks": blocks}


def _has_bound(report: MergeReport) -> bool:
    return report.measured and not report.subtracted


def _print_errors(report: MergeReport, rule: str) -> None:
    if report.subtracted:
        remedy = "to get a result with a known error, merge the bundles of the remaining tasks instead"
        print_line(f"the error after a subtraction is unknown; {remedy}")
    elif report.measured:
        total, worst = report.total, max(report.blocks, key=lambda block: block.frobenius)
        print_line(
            f"relative error of G: {total.frobenius:.2g} (Frobenius norm), at most {worst.frobenius:.2g} "
            f"in a single block ({worst.name}); the bound from the TAK paper is {total.relative_bound:.2g}"
        )
    elif rule == "shards":
        print_line("the merge is exact, provided that no example is in two shards (not checked)")
    else:
        print_line("the merge is exact; there is no approximation error")
    for block in report.partial:
        print_line(
            f"block {block.name} is missing from {', '.join(block.missing)}; it is merged from the other bundles"
        )


def _print_merged_blocks(report: MergeReport) -> None:
    table = plain_table("block", numbers=("terms", "relative error", "bound (TAK paper)"))
    for block in report.blocks:
        error = "unknown" if report.subtracted else f"{block.frobenius:.2g}"
        bound = f"{block.relative_bound:.2g}" if _has_bound(report) else ""
        table.add_row(Text(block.name, overflow="fold"), str(block.terms), error, bound)
    out.print(table)
