"""`kfacpack compress`: writes a smaller bundle and reports the approximation error."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.text import Text
from typing_extensions import TypedDict

from kfacpack.errors import KfacpackError, abbreviate
from kfacpack.format.reader import Bundle
from kfacpack.format.units import human_bytes

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


COMPRESSION_PANEL = "Compression"


class QuadraticErrorOutput(TypedDict):
    """Relative errors of τᵀGτ."""

    random: float
    """On random task vectors."""
    along: float
    """On vectors along the curvature, τ ~ N(0, G)."""
    vector: float | None
    """On the vector of `--vector`; null without it."""


class BlockCompressionOutput(TypedDict):
    """Compression of one block."""

    name: str
    step: str | None
    """The codecs that were applied; null if the block is unchanged."""
    kept: list[str]
    """Roles of the matrices that are unchanged, because the codec would not make them smaller."""
    bytes: int
    dense_bytes: int
    """Bytes of the dense matrices in float32."""
    ratio: float | None
    """`bytes` divided by `dense_bytes`."""
    frobenius: float
    """Relative error of the block in the Frobenius norm."""
    quadratic: QuadraticErrorOutput


class CompressionOutput(TypedDict):
    """Size and errors of a compression."""

    dense_bytes: int
    """Bytes of all dense matrices in float32."""
    ratio: float
    """Bytes of the file divided by `dense_bytes`."""
    frobenius: float
    """Relative error of G in the Frobenius norm."""
    quadratic: QuadraticErrorOutput
    blocks: list[BlockCompressionOutput]


class CompressOutput(CompressionOutput):
    """Output of `kfacpack compress --json`."""

    path: str | None
    """The file; null with `--dry-run`."""
    sha256: str | None
    """Digest of the file; null with `--dry-run`."""
    bytes: int
    """Size of the file."""
    input_bytes: int
    """Size of the file that was compressed."""


def compress(
    bundle: File = typer.Argument(..., metavar="FILE.kfac", help="Bundle to compress."),
    spec: str | None = typer.Argument(
        None,
        metavar="CODEC",
        help="block:K, svd:R, svd:P%, prune:P%, int8, fp16 or bf16; joined by +, such as block:8+int8.",
    ),
    output: Path | None = output_option("SMALL.kfac", None),
    budget: str | None = option(
        COMPRESSION_PANEL,
        None,
        "--budget",
        metavar="SIZE|P%",
        help="Maximum file size, such as 70MB or 10% (of dense float32), instead of CODEC. The codec of each matrix is "
        "then chosen to minimise the error.",
    ),
    vector: File | None = option(
        RUN_PANEL, None, "--vector", metavar="FILE.safetensors", help="Also measure the error on this task vector."
    ),
    blocks: bool = option(RUN_PANEL, False, "--blocks", help="List the codec, size and errors of every block."),
    dry_run: bool = option(RUN_PANEL, False, "--dry-run", help="Show the size and the errors; write nothing."),
    max_shard_size: str | None = MAX_SHARD_SIZE,
    as_json: bool = AS_JSON,
    quiet: bool = QUIET,
) -> None:
    """Compress a bundle and report the approximation error of G and of τᵀGτ.

    The error of τᵀGτ is measured on random task vectors τ and on vectors along the curvature, τ ~ N(0, G), which are
    closer to trained ones; --vector adds the error on a trained one. The errors are recorded in the new bundle.

    A matrix that the codec would not make smaller is left unchanged. The codecs block and svd keep matrices positive
    semi-definite, as do int8 after svd and, up to rounding, fp16 and bf16; check the others with `kfacpack verify`.
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
        action = "would be" if path is None else f"wrote {output}:"
        print_report(report, f"{action} {human_bytes(size)}, from {human_bytes(source.nbytes)}", size)
        if path is not None:
            print_next("train", *model_arguments(curvature.about.base), "--task", "TASK", "--reg", output)


def report_json(report: CompressionReport, size: int) -> CompressionOutput:
    """Returns a compression report as JSON.

    Args:
        report: The report.
        size: Bytes of the compressed file.
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
    """Prints a compression report: the ratio to dense float32, the errors, and the unchanged blocks.

    Args:
        report: The report.
        heading: Printed before the ratio.
        size: Bytes of the compressed file.
    """
    from kfacpack.compression.compression_report import relative_error

    dense = human_bytes(report.dense_bytes)
    print_line(f"{heading}: {size / report.dense_bytes:.2%} of dense float32 ({dense})")
    error = relative_error(report.on_vector)
    on_vector = "" if error is None else f", {error:.2g} on the task vector"
    print_line(
        f"relative error: {report.moments.frobenius:.2g} of G (Frobenius norm); of τᵀGτ "
        f"{report.moments.quadratic:.2g} on random task vectors (root mean square), {report.moments.along:.2g} "
        f"on vectors along the curvature{on_vector}"
    )
    if unchanged := [block.name for block in report.blocks if block.step is None]:
        names = abbreviate(unchanged, limit=3)
        print_line(f"{len(unchanged)} of {len(report.blocks)} blocks are unchanged: {names}")


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
