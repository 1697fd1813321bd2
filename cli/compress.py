"""`kfacpack compress`: a smaller bundle, and what it loses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table
from rich.text import Text

from kfacpack.errors import KfacpackError
from kfacpack.format.reader import Bundle
from kfacpack.format.units import human_bytes

from .console import out, print_json, steps_bar
from .options import QUIET, RUN, File, check_output, option

if TYPE_CHECKING:
    from kfacpack.compression.compression_report import BlockCompressionReport, CompressionReport


KEPT_PANEL = "What is kept"


def compress(
    bundle: File = typer.Argument(..., metavar="FILE.kfac", help="The bundle to compress."),
    spec: str | None = typer.Argument(
        None, metavar="CODEC", help="block:K, svd:R, svd:P%, prune:P%, then int8, fp16 or bf16: block:8+int8."
    ),
    output: Path | None = option(RUN, None, "--output", "-o", metavar="SMALL.kfac", help="The file to write."),
    budget: str | None = option(
        KEPT_PANEL,
        None,
        "--budget",
        metavar="SIZE|P%",
        help="Instead of a codec: each matrix gets the one with which the file loses least at this size, such as 70MB, "
        "or 10% of dense float32.",
    ),
    vector: File | None = option(
        RUN, None, "--vector", metavar="FILE.safetensors", help="Measure the error of 'quadratic' on this task vector."
    ),
    blocks: bool = option(RUN, False, "--blocks", help="List every block: its codec, bytes and errors."),
    dry_run: bool = option(RUN, False, "--dry-run", help="Show what it would give; write nothing."),
    as_json: bool = option(RUN, False, "--json", help="Print sizes and errors, block by block, as JSON."),
    quiet: bool = QUIET,
) -> None:
    """Write a smaller bundle, and say what it loses: of G (Frobenius norm), and of 'quadratic' on task vectors.

    Those are random ones, and ones along the curvature, τ ~ N(0, G), which trained ones resemble more; --vector takes
    a real one. What was measured is written into the bundle.

    A matrix that a codec would not make smaller stays as it is. Positive semi-definiteness is kept by block and svd, by
    fp16 and bf16 up to their rounding, and by int8 after svd; 'verify' tells.
    """
    # They bring torch, which --help has no need to wait for.
    from kfacpack.compression.compress import choice_of, compress_by
    from kfacpack.curvature.curvature import from_bundle
    from kfacpack.curvature.saving import file_size
    from kfacpack.vectors.tensor_file import read_vector_tensors

    if output is None and not dry_run:
        raise KfacpackError("say where to with -o SMALL.kfac, or look at it first with --dry-run")
    opened = Bundle(bundle)
    if output is not None:
        check_output(output, [bundle])
    curvature = from_bundle(opened)
    tau = read_vector_tensors(vector, curvature) if vector else None
    show = not (quiet or as_json)
    with steps_bar("trying codecs", show=show and budget is not None) as advance:
        choice = choice_of(curvature, spec, budget, advance, with_vector=tau is not None)
    with steps_bar("compressing", show=show) as advance:
        smaller, report = compress_by(curvature, choice, vector=tau, progress=advance)
    said: dict[str, Any] = {"path": None, "sha256": None, "bytes": file_size(smaller)}
    if output is not None and not dry_run:
        smaller.save(output)
        said = {"path": str(output), "sha256": Bundle(output).digest, "bytes": output.stat().st_size}
    if as_json:
        print_json({**said, "input_bytes": opened.nbytes, **report_json(report, said["bytes"])})
    elif not quiet:
        if blocks:
            _print_blocks(report)
        word = "would be" if said["path"] is None else f"wrote {output}:"
        print_report(report, f"{word} {human_bytes(said['bytes'])}, from {human_bytes(opened.nbytes)}", said["bytes"])


def report_json(report: CompressionReport, size: int) -> dict[str, Any]:
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

    found = report.moments
    return {"random": found.quadratic, "along": found.along, "vector": relative_error(report.real)}


def print_report(report: CompressionReport, said: str, size: int) -> None:
    """`said`, the ratio to dense float32, the errors, and what no codec made smaller."""
    from kfacpack.compression.compression_report import relative_error

    dense = human_bytes(report.dense_bytes)
    out.print(Text(f"{said}: {size / report.dense_bytes:.2%} of dense float32 ({dense})"))
    real = relative_error(report.real)
    on_vector = "" if real is None else f", {real:.2g} on the task vector"
    out.print(
        f"relative error: {report.moments.frobenius:.2g} of G (Frobenius norm); of quadratic "
        f"{report.moments.quadratic:.2g} on random task vectors (root mean square), {report.moments.along:.2g} "
        f"on those along the curvature{on_vector}"
    )
    if kept := [block.name for block in report.blocks if block.step is None]:
        some = ", ".join(kept[:3]) + (", …" if len(kept) > 3 else "")
        out.print(Text(f"{len(kept)} of {len(report.blocks)} blocks stay as they are: {some}"), soft_wrap=True)


def _print_blocks(report: CompressionReport) -> None:
    from kfacpack.compression.compression_report import relative_error

    table = Table("block", "codec", box=None, header_style="bold", pad_edge=False)
    with_vector = report.real is not None
    for heading in ("bytes", "of dense", "G", "random τ", "along G", *(["task vector"] * with_vector)):
        table.add_column(heading, justify="right")
    for block in report.blocks:
        ratio = f"{block.bytes / block.dense_bytes:.2%}" if block.dense_bytes else "shared"
        found = block.moments
        errors = [found.frobenius, found.quadratic, found.along, *([relative_error(block.real)] * with_vector)]
        words = ["" if error is None else f"{error:.2g}" for error in errors]
        name = Text(block.name, overflow="fold")
        table.add_row(name, Text(block.step or "as it is"), human_bytes(block.bytes), ratio, *words)
    out.print(table)
