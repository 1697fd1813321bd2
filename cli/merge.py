"""`kfacpack merge`: merges bundles and reports the approximation error."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.text import Text
from typing_extensions import TypedDict

from kfacpack.errors import KfacpackError, abbreviate
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
    from kfacpack.format.manifest import Merge
    from kfacpack.merging.merge import BlockMergeReport, MergeReport


MERGE_PANEL = "Merge"


def merge(
    bundles: list[File] = typer.Argument(..., metavar="FILE.kfac...", help="Bundles to merge."),
    output: Path = output_option("MERGED.kfac"),
    rule: str = option(
        MERGE_PANEL,
        "tak",
        "--rule",
        metavar="RULE",
        help="tak: one Kronecker product per block, as in the paper. optimal: the nearest sum of --rank products. "
        "stack: the exact sum, with all terms. shards: the exact sum of estimates of one task on different examples.",
    ),
    rank: int = option(MERGE_PANEL, 1, "--rank", metavar="R", help="optimal: number of Kronecker products per block."),
    weights: str | None = option(
        MERGE_PANEL,
        None,
        "--weights",
        metavar="W,W,...",
        help="One weight per bundle; only ratios matter. [default: the dataset sizes]",
    ),
    without: list[str] | None = option(
        MERGE_PANEL,
        None,
        "--without",
        metavar="TASK",
        help="Leave out this task; repeatable. If it is part of a bundle merged with tak, its own bundle must be among "
        "the inputs and is subtracted.",
    ),
    allow_partial: bool = option(
        MERGE_PANEL,
        False,
        "--allow-partial",
        help="Merge a block that is missing in some bundles from the other bundles.",
    ),
    blocks: bool = option(RUN_PANEL, False, "--blocks", help="List the error of every block."),
    max_shard_size: str | None = MAX_SHARD_SIZE,
    as_json: bool = AS_JSON,
    quiet: bool = QUIET,
) -> None:
    """Merge bundles of several tasks into one that represents Σ w_t G_t, and report the approximation error.

    By default, the weights w_t are the dataset sizes, scaled to a mean of one.

    A bundle of all tasks can be reused to train each of them:
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
            **_report_json(merged.report),
        }
        print_json(result)
    elif show:
        if blocks:
            _print_blocks(merged.report)
        size = f"{len(merged.report.blocks)} blocks, {human_bytes(bundle.nbytes)}, in {human_seconds(seconds)}"
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
    rank = f" of rank {merge.rank}" if merge.rank else ""
    parents = abbreviate(f"{parent.task or parent.sha256[:12]} × {parent.weight:.3g}" for parent in merge.parents)
    return f"{merge.rule}{rank} of {parents}"


class MergeErrorsOutput(TypedDict):
    """Relative errors in the Frobenius norm."""

    frobenius: float | None
    """The approximation error; null if it is unknown, because a task was subtracted."""
    bound: float | None
    """The paper's bound on the error; null if the merge is exact or the error is unknown."""


class BlockMergeOutput(MergeErrorsOutput):
    """Errors of one block."""

    name: str
    terms: int
    """Number of terms of all inputs together."""
    missing: list[str]
    """Inputs that do not have the block."""


class MergeReportOutput(MergeErrorsOutput):
    """Errors of a merge."""

    subtracted: list[str]
    """Tasks that were subtracted."""
    blocks: list[BlockMergeOutput]


class ParentOutput(TypedDict):
    """A bundle that was merged. Parents of parents are listed directly, not nested."""

    sha256: str
    """Digest of its file."""
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
    """Number of Kronecker terms per block; null for rules without a rank."""
    parents: list[ParentOutput]


def _report_json(report: MergeReport) -> MergeReportOutput:
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
        print_line("the error after a subtraction is unknown; to measure it, merge the bundles of the other tasks")
    elif report.measured:
        total, worst = report.total, max(report.blocks, key=lambda block: block.frobenius)
        print_line(
            f"relative error {total.frobenius:.2g} of G (Frobenius norm), at most {worst.frobenius:.2g} "
            f"in one block ({worst.name}); the paper's bound is {total.relative_bound:.2g}"
        )
    elif rule == "shards":
        print_line("exact, provided that no example is in two shards (not checked)")
    else:
        print_line("exact: no approximation error")
    for block in report.partial:
        print_line(
            f"partial: block {block.name} is missing in {', '.join(block.missing)}; merged from the other bundles"
        )


def _print_blocks(report: MergeReport) -> None:
    table = plain_table("block", numbers=("terms", "relative error", "the paper's bound"))
    for block in report.blocks:
        error = "unknown" if report.subtracted else f"{block.frobenius:.2g}"
        bound = f"{block.relative_bound:.2g}" if _has_bound(report) else ""
        table.add_row(Text(block.name, overflow="fold"), str(block.terms), error, bound)
    out.print(table)
