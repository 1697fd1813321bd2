"""`kfacpack compress`: writes a smaller bundle and reports the approximation error."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.text import Text

from kfacpack.errors import KfacpackError, abbreviate
from kfacpack.format.reader import Bundle
from kfacpack.format.units import human_bytes

from .console import out, plain_table, print_json, print_line, print_next, steps_bar
from .options import AS_JSON, QUIET, RUN_PANEL, File, check_output, model_arguments, option, output_option

if TYPE_CHECKING:
    from kfacpack.compression.compression_report import BlockCompressionReport, CompressionReport


COMPRESSION_PANEL = "Compression"


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
    from kfacpack.vectors.tensor_file import read_vector_tensors

    if output is None and not dry_run:
        raise KfacpackError("no output file; give -o SMALL.kfac, or --dry-run to show only the size and the errors")
    source = Bundle(bundle)
    if output is not None:
        check_output(output, [bundle])
    curvature = from_bundle(source)
    tau = read_vector_tensors(vector, curvature) if vector else None
    show = not (quiet or as_json)
    with steps_bar("trying codecs", show=show and budget is not None) as advance:
        choice = choose_codecs(curvature, spec, budget, advance, with_vector=tau is not None)
    with steps_bar("compressing", show=show) as advance:
        compressed, report = compress_with(curvature, choice, vector=tau, on_progress=advance)
    file: dict[str, Any] = {"path": None, "sha256": None, "bytes": file_size(compressed)}
    if output is not None and not dry_run:
        compressed.save(output)
        file = {"path": str(output), "sha256": Bundle(output).digest, "bytes": output.stat().st_size}
    if as_json:
        print_json({**file, "input_bytes": source.nbytes, **report_json(report, file["bytes"])})
    elif show:
        if blocks:
            _print_blocks(report)
        action = "would be" if file["path"] is None else f"wrote {output}:"
        sizes = f"{human_bytes(file['bytes'])}, from {human_bytes(source.nbytes)}"
        print_report(report, f"{action} {sizes}", file["bytes"])
        if file["path"] is not None:
            print_next("train", *model_arguments(curvature.about.base), "--task", "TASK", "--reg", output)


def report_json(report: CompressionReport, size: int) -> dict[str, Any]:
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


def _block_json(block: BlockCompressionReport) -> dict[str, Any]:
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


def _quadratic_json(report: CompressionReport | BlockCompressionReport) -> dict[str, float | None]:
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
