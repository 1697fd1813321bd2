"""Sections on why it works, or does not: how vectors disturb each other, where they act, what bundles foretell.

Sections on how it was made: bundles and merges, versions, hashes, commands, the plan, times.
"""

from __future__ import annotations

from kfacpack.experiments.report_content import (
    Cell,
    CodeListing,
    ReportFigure,
    ReportTable,
    Section,
    file_name,
    mean_maps,
    over_seeds,
    ratios,
    text,
)
from kfacpack.experiments.results_schema import Results, Times


def disentanglement(results: Results) -> Section | None:
    found = [(number, arm, mean_maps(arm.seeds)) for number, arm in enumerate(results.arms, 1)]
    if not any(maps for _, _, maps in found):
        return None
    # One scale of colours for all, so that they may be compared.
    top = max(value for _, _, maps in found for each, _ in maps for row in each.xi for value in row)
    pictures = [
        ReportFigure(
            file=file_name("disentanglement", number, arm.name, *each.tasks),
            figure="disentanglement",
            data=each.model_dump(mode="json"),
            options={"top": top},
            alt=f"Heat map of ξ for the vectors of {each.tasks[0]} and {each.tasks[1]}, trained as {arm.name}.",
            caption=f"{arm.name}: {each.tasks[0]} and {each.tasks[1]}" + (f", mean of {seeds} seeds" * (seeds > 1)),
        )
        for number, arm, maps in found
        for each, seeds in maps
    ]
    return Section(
        id="disentanglement",
        title="Do two vectors disturb each other?",
        how_to_read="ξ is how often the prediction with both vectors differs from that with the task's own alone: "
        "dark is good, and a wide dark field means that α may be chosen freely. All maps share one scale.",
        pictures=pictures,
    )


def localisation(results: Results) -> Section | None:
    found = [
        (number, arm, [seed for seed in arm.seeds if seed.localisation]) for number, arm in enumerate(results.arms, 1)
    ]
    found = [each for each in found if each[2]]
    if not found:
        return None
    pictures, columns = [], ["vector of"]
    for number, arm, seeds in found:
        first = seeds[0].localisation
        assert first is not None
        pictures.append(
            ReportFigure(
                file=file_name("localisation", number, arm.name),
                figure="localisation",
                data=first.model_dump(mode="json"),
                alt=f"For each vector of {arm.name}: how far it moves f on its own task and on the others.",
                caption=f"{arm.name}, seed {seeds[0].seed}",
            )
        )
        columns.append(arm.name)
    rows = [
        [text(task)] + [
            over_seeds("score", (s.localisation.vectors[task].auroc for s in seeds
                                  if s.localisation and task in s.localisation.vectors))
            for _, _, seeds in found
        ]
        for task in results.names
    ]  # fmt: skip
    last = [over_seeds("score", (s.localisation.auroc for s in seeds if s.localisation)) for _, _, seeds in found]
    table = ReportTable(
        caption="AUROC: how well the size of the move tells a vector's own examples from others",
        columns=columns,
        rows=[*rows, [text("mean"), *last]],
        last_is_mean=True,
    )
    return Section(
        id="localisation",
        title="Where does a vector act?",
        how_to_read="A vector should move f on its own task's examples and leave all others alone: the further apart "
        "the two marks of a row, the better; an AUROC of 1 is perfect, of 0.5 chance. Δf is J τ for linearised "
        "vectors, and f with the vector minus f without it for others.",
        tables=[table],
        pictures=pictures,
    )


def drift(results: Results) -> Section | None:
    pictures, rows = [], []
    for number, arm in enumerate(results.arms, 1):
        found = [seed.drift for seed in arm.seeds if seed.drift]
        if not found:
            continue
        pairs = [pair for each in found for pair in each.pairs]
        layers = [layer for each in found for layer in each.layers]
        groups = ([p for p in pairs if p.vector == p.task], [p for p in pairs if p.vector != p.task], layers)
        rows.append([text(arm.name), *(cell for group in groups for cell in ratios(group))])
        data = {
            "pairs": [pair.model_dump(mode="json") for pair in pairs],
            "layers": [layer.model_dump(mode="json") for layer in layers],
        }
        pictures.append(
            ReportFigure(
                file=file_name("drift", number, arm.name),
                figure="drift",
                data=data,
                alt=f"Drift that bundles predict for the vectors of {arm.name}, against the drift measured on data.",
                caption=arm.name,
            )
        )
    if not pictures:
        return None
    heads = [f"{group}, {what}" for group in ("own task", "other tasks", "layers") for what in ("median", "within ×2")]
    table = ReportTable(caption="Predicted drift divided by measured drift", columns=["arm", *heads], rows=rows)
    return Section(
        id="drift",
        title="Is a bundle any good?",
        how_to_read="A bundle foretells how far a vector moves f on its task, without the data. On the dashed line it "
        "is right; below it, it foretells too much, above it too little. Single layers lie near it; whole vectors lie "
        "above, since a bundle has nothing between layers, and all layers of a trained vector pull the same way.",
        pictures=pictures,
        tables=[table],
    )


def spectra(results: Results) -> Section | None:
    if results.spectra is None:
        return None
    blocks = results.spectra.blocks
    rows = [
        [
            text(block.name),
            text(block.side),
            Cell(kind="count", value=block.size),
            Cell(kind="number", value=block.trace),
            Cell(kind="number", value=block.effective_rank),
        ]
        for block in blocks
    ]
    columns = ["block", "side", "size", "trace", "effective rank"]
    table = ReportTable(caption=f"The {len(blocks)} factors", columns=columns, rows=rows, folded=len(rows) > 12)
    picture = ReportFigure(
        file="spectra",
        figure="spectra",
        data=results.spectra.model_dump(mode="json"),
        alt="Eigenvalues of the factors over their rank, both axes logarithmic.",
        caption="Eigenvalues of the curvature's factors, over their rank.",
    )
    return Section(
        id="spectra",
        title="Spectra",
        how_to_read="A line that falls steeply belongs to a factor that few directions make up; it compresses well.",
        pictures=[picture],
        tables=[table],
    )


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


def _single(results: Results) -> ReportTable:
    return ReportTable(
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


def _merged(results: Results) -> ReportTable:
    return ReportTable(
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


def provenance(results: Results, times: Times | None) -> Section:
    facts = [[text(name), Cell(kind="code", value=version)] for name, version in sorted(results.versions.items())]
    facts += [
        [text("model"), Cell(kind="code", value=f"{results.model.name} ({results.model.family})")],
        [text("model, SHA-256"), Cell(kind="code", value=results.model.sha256)],
        [text("plan, SHA-256"), Cell(kind="code", value=results.plan.sha256)],
        [text("seeds"), Cell(kind="code", value=", ".join(map(str, results.seeds)))],
    ]
    tables = [
        ReportTable(caption="Versions and hashes", columns=["what", "which"], rows=facts),
        ReportTable(
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
        tables.append(ReportTable(caption=caption, columns=["stage", "time", "how"], rows=rows, folded=len(rows) > 24))
        if times.peak_bytes is not None:
            peak = [[text("peak of the last call"), Cell(kind="bytes", value=times.peak_bytes)]]
            tables.append(ReportTable(caption="Memory", columns=["what", "how much"], rows=peak))
    return Section(
        id="made",
        title="How it was made",
        how_to_read="The plan below, given to these commands under these versions, makes this page again.",
        tables=tables,
        listings=[
            CodeListing(
                caption="Commands, as typed in the run’s folder (where results.json is)",
                text="\n".join(results.commands),
            ),
            CodeListing(caption="The plan", text=results.plan.text),
        ],
    )


def _seed(seed: int | None) -> Cell:
    return Cell(kind="number", value=seed)
