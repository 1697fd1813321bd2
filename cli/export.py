"""`kfacpack export`: the factors as plain safetensors."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.text import Text

from kfacpack.bundle.manifest import FloatType
from kfacpack.bundle.reader import Bundle

from .console import human_bytes, out, print_json
from .options import QUIET, RUN, File, check_output, option
from .progress import steps_bar


def export(
    bundle: File = typer.Argument(..., metavar="FILE.kfac", help="The bundle."),
    output: Path = option(RUN, ..., "--output", "-o", metavar="FACTORS.safetensors", help="The file to write."),
    dtype: FloatType = option(RUN, "float32", "--dtype", help="The type of the matrices' numbers."),
    as_json: bool = option(RUN, False, "--json", help="Print what was written as JSON."),
    quiet: bool = QUIET,
) -> None:
    """Write a bundle's factors as plain safetensors, for programs that know nothing of kfacpack.

    Every matrix is dense, whatever the bundle holds it in: PARAMETER/A and PARAMETER/B, or PARAMETER/G; diagonal ones
    are vectors. The file's metadata says how parameters join to the matrix that they act on, how they are scaled, and
    in three lines how to apply them.
    """
    # It brings torch, which --help has no need to wait for.
    from kfacpack.curvature.loading import from_bundle
    from kfacpack.exporting import export as write

    opened = Bundle(bundle)
    check_output(output, [bundle])
    curvature = from_bundle(opened)
    with steps_bar("writing", show=not (quiet or as_json)) as advance:
        write(curvature, output, dtype=dtype, progress=advance)
    size = output.stat().st_size
    if as_json:
        print_json({"path": str(output), "bytes": size, "dtype": dtype, "blocks": len(curvature.blocks)})
    elif not quiet:
        blocks = f"{len(curvature.blocks)} blocks, dense, {dtype}"
        out.print(Text(f"wrote {output}: {blocks}, {human_bytes(size)}, from {human_bytes(opened.nbytes)}"))
