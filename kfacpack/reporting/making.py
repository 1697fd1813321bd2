"""Sections on how it was made: bundles and merges, versions, hashes, commands, the plan, times."""

from __future__ import annotations

from kfacpack.reporting.content import Cell, Listing, Section, Table, text
from kfacpack.reporting.results import Results, Times


def bundles(results: Results) -> Section | None:
    tables = [
        *([_single(results)] if results.bundles else []),
        *([_merged(results)] if results.merges else []),
    ]
    if not tables:
        return None
    return Section(
        id="bundles",
        title="Bundles",
        how_to_read="What is shared instead of data: the size of each file, and how far a merged one is from "
        "the sum of its parts.",
        tables=tables,
    )


def _single(results: Results) -> Table:
    return Table(
        caption="Bundles of single tasks",
        columns=["task", "structure", "seed", "size", "held dense", "share", "file", "SHA-256"],
        rows=[
            [
                text(each.task),
                text(each.structure),
                _seed(each.seed),
                Cell(kind="bytes", value=each.bytes),
                Cell(kind="bytes", value=each.dense_bytes),
                Cell(kind="percent", value=each.bytes / each.dense_bytes if each.dense_bytes else None),
                Cell(kind="code", value=each.file),
                Cell(kind="code", value=each.sha256),
            ]
            for each in results.bundles
        ],
        folded=len(results.bundles) > 12,
    )


def _merged(results: Results) -> Table:
    return Table(
        caption="Merged bundles: of all tasks but one, which that one is trained against",
        columns=["without", "rule", "structure", "seed", "size", "relative error", "file"],
        rows=[
            [
                text(each.without),
                text(f"{each.rule} of rank {each.rank}" if each.rank > 1 else each.rule),
                text(each.structure),
                _seed(each.seed),
                Cell(kind="bytes", value=each.bytes),
                Cell(kind="percent", value=each.error),
                Cell(kind="code", value=each.file),
            ]
            for each in results.merges
        ],
        folded=len(results.merges) > 12,
    )


def made(results: Results, times: Times | None) -> Section:
    facts = [[text(name), Cell(kind="code", value=version)] for name, version in sorted(results.versions.items())]
    facts += [
        [text("model"), Cell(kind="code", value=f"{results.model.name} ({results.model.family})")],
        [text("model, SHA-256"), Cell(kind="code", value=results.model.sha256)],
        [text("plan, SHA-256"), Cell(kind="code", value=results.plan.sha256)],
        [text("seeds"), Cell(kind="code", value=", ".join(map(str, results.seeds)))],
    ]
    tables = [
        Table(caption="Versions and hashes", columns=["what", "which"], rows=facts),
        Table(
            caption="Tasks",
            columns=["task", "classes", "training examples", "test examples", "source"],
            rows=[
                [
                    text(task.name),
                    *(Cell(kind="count", value=number) for number in (task.classes, task.train, task.test)),
                    text(task.source),
                ]
                for task in results.tasks
            ],
        ),
    ]
    if times:
        rows = [
            [text(stage.name), Cell(kind="seconds", value=stage.seconds), text("reused" if stage.reused else "made")]
            for stage in times.stages
        ]
        together = sum(stage.seconds for stage in times.stages)
        rows.append([text("all of these"), Cell(kind="seconds", value=together), text(None)])
        rows.append([text("the last call"), Cell(kind="seconds", value=times.seconds), text(None)])
        caption = "Times: of each stage when it was made, and of the call that wrote these results"
        tables.append(Table(caption=caption, columns=["stage", "time", "how"], rows=rows, folded=len(rows) > 24))
        if times.peak_bytes is not None:
            peak = [[text("peak of the last call"), Cell(kind="bytes", value=times.peak_bytes)]]
            tables.append(Table(caption="Memory", columns=["what", "how much"], rows=peak))
    return Section(
        id="made",
        title="How it was made",
        how_to_read="The plan below, given to these commands under these versions, makes this page again.",
        tables=tables,
        listings=[
            Listing(
                caption="Commands, as typed in the run’s folder (where results.json is)",
                text="\n".join(results.commands),
            ),
            Listing(caption="The plan", text=results.plan.text),
        ],
    )


def _seed(seed: int | None) -> Cell:
    return Cell(kind="number", value=seed)
