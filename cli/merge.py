"""`kfacpack merge`: many bundles into one, and what that loses."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table
from rich.text import Text

from kfacpack.errors import KfacpackError
from kfacpack.format.reader import Bundle
from kfacpack.format.units import human_bytes, human_seconds

from .console import out, print_json, steps_bar
from .options import QUIET, RUN, File, check_output, option

if TYPE_CHECKING:
    from kfacpack.format.manifest import Merge
    from kfacpack.merging.merge import BlockMergeReport, MergeReport


MERGE_PANEL = "The merge"


def merge(
    bundles: list[File] = typer.Argument(..., metavar="FILE.kfac...", help="The bundles to merge."),
    output: Path = option(RUN, ..., "--output", "-o", metavar="MERGED.kfac", help="The file to write."),
    rule: str = option(
        MERGE_PANEL,
        "tak",
        "--rule",
        help="tak: the paper's, one Kronecker product. optimal: the nearest sum of --rank products. stack: every term, "
        "exact. shards: estimates of one task from different examples, exact.",
    ),
    rank: int = option(
        MERGE_PANEL, 1, "--rank", metavar="R", help="With optimal: how many Kronecker products a block keeps."
    ),
    weights: str | None = option(
        MERGE_PANEL,
        None,
        "--weights",
        metavar="W,W,...",
        help="One number for each bundle, in the place of its data set's size. Only their ratios matter.",
    ),
    without: list[str] | None = option(
        MERGE_PANEL,
        None,
        "--without",
        metavar="TASK",
        help="Leave this task out; repeatable. If it is inside a bundle that tak merged, its own bundle, which must be "
        "given, too, is subtracted.",
    ),
    allow_partial: bool = option(
        MERGE_PANEL, False, "--allow-partial", help="Add up a block that some bundles lack over those that have it."
    ),
    blocks: bool = option(RUN, False, "--blocks", help="List every block with its error."),
    as_json: bool = option(RUN, False, "--json", help="Print parents, weights and errors, block by block, as JSON."),
    quiet: bool = QUIET,
) -> None:
    """Merge bundles of many tasks into one that stands for Σ w_t G_t, and say what that loses.

    The weights are the sizes of the tasks' data sets, scaled to average one. One bundle of all tasks serves each of
    them: 'kfacpack merge all.kfac dtd.kfac --without dtd -o others.kfac' is what training on dtd needs.
    """
    # It brings torch, which --help has no need to wait for.
    from kfacpack.merging.merge import merge_and_report

    check_output(output, bundles)
    start, show = time.perf_counter(), not (quiet or as_json)
    with steps_bar("measuring", show=show) as advance:
        merged = merge_and_report(
            bundles, rule, rank, _numbers(weights), without=without or (), allow_partial=allow_partial, progress=advance
        )
    with steps_bar("writing", show=show) as advance:
        merged.curvature.save(output, progress=advance)
    seconds, made, about = time.perf_counter() - start, Bundle(output), merged.curvature.about.merge
    assert about is not None
    if as_json:
        said = {"path": str(output), "sha256": made.digest, "bytes": made.nbytes, "seconds": seconds}
        print_json({**said, **about.model_dump(mode="json"), **_report_json(merged.report)})
    elif not quiet:
        if blocks:
            _print_blocks(merged.report)
        size = f"{len(merged.report.blocks)} blocks, {human_bytes(made.nbytes)}, in {human_seconds(seconds)}"
        out.print(Text(f"wrote {output}: {_words(about)}: {size}"), soft_wrap=True)
        _print_errors(merged.report, rule)


def _numbers(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(each) for each in text.split(",")]
    except ValueError as error:
        raise KfacpackError(f"--weights {text!r}: expected numbers with commas between, such as 1,1,2") from error


def _words(about: Merge) -> str:
    rank = f" of rank {about.rank}" if about.rank else ""
    parents = [f"{parent.task or parent.sha256[:12]} × {parent.weight:.3g}" for parent in about.parents]
    more = [f"and {len(parents) - 16} more"] if len(parents) > 16 else []
    return f"{about.rule}{rank} of {', '.join([*parents[:16], *more])}"


def _report_json(report: MergeReport) -> dict[str, Any]:
    def errors(block: BlockMergeReport) -> dict[str, Any]:
        known, measured = not report.subtracted, report.measured and not report.subtracted
        return {"frobenius": block.frobenius if known else None, "bound": block.relative_bound if measured else None}

    blocks = [
        {"name": block.name, "terms": block.terms, "missing": list(block.missing), **errors(block)}
        for block in report.blocks
    ]
    return {"subtracted": list(report.subtracted), **errors(report.total), "blocks": blocks}


def _print_errors(report: MergeReport, rule: str) -> None:
    if report.subtracted:
        out.print("its error is not known after a subtraction; merge the other tasks' own bundles to have it measured")
    elif report.measured:
        total, worst = report.total, max(report.blocks, key=lambda block: block.frobenius)
        out.print(
            Text(
                f"relative error {total.frobenius:.2g} of G (Frobenius norm), at most {worst.frobenius:.2g} "
                f"in one block ({worst.name}); the paper's bound is {total.relative_bound:.2g}"
            ),
            soft_wrap=True,
        )
    elif rule == "shards":
        out.print("nothing is lost, if no example is in two of them: that was not checked")
    else:
        out.print("nothing is lost")
    for block in report.partial:
        lacking = ", ".join(block.missing)
        out.print(Text(f"partial: {block.name} is not in {lacking}, and is added up without"), soft_wrap=True)


def _print_blocks(report: MergeReport) -> None:
    table = Table("block", box=None, header_style="bold", pad_edge=False)
    for heading in ("terms", "relative error", "the paper's bound"):
        table.add_column(heading, justify="right")
    for block in report.blocks:
        error = "not known" if report.subtracted else f"{block.frobenius:.2g}"
        bound = f"{block.relative_bound:.2g}" if report.measured and not report.subtracted else ""
        table.add_row(Text(block.name, overflow="fold"), str(block.terms), error, bound)
    out.print(table)
