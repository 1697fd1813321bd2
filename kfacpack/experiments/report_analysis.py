"""The report sections on disentanglement, localisation, drift, spectra, the bundles and the provenance."""

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
    """Returns the section on the disentanglement error ξ for pairs of vectors."""
    by_arm = [(number, arm, mean_maps(arm.seeds)) for number, arm in enumerate(results.arms, 1)]
    if not any(maps for _, _, maps in by_arm):
        return None
    # With a common colour scale, the maps can be compared.
    top = max(value for _, _, maps in by_arm for result, _ in maps for row in result.xi for value in row)
    pictures = [
        ReportFigure(
            file=file_name("disentanglement", number, arm.name, *result.tasks),
            figure="disentanglement",
            data=result.model_dump(mode="json"),
            options={"top": top},
            alt=f"Heat map of ξ for the vectors of {result.tasks[0]} and {result.tasks[1]}, arm {arm.name}.",
            caption=f"{arm.name}: {result.tasks[0]} and {result.tasks[1]}"
            + (f", mean over {seeds} seeds" if seeds > 1 else ""),
        )
        for number, arm, maps in by_arm
        for result, seeds in maps
    ]
    return Section(
        id="disentanglement",
        title="Disentanglement: do two vectors interfere?",
        how_to_read="ξ is the sum of two fractions, one for each task: the fraction of the task's examples whose "
        "predictions change when the other task's vector is added. Dark colours mean a small ξ, which is good. If a "
        "large area is dark, α can be chosen freely. All maps have the same colour scale.",
        pictures=pictures,
    )


def localisation(results: Results) -> Section | None:
    """Returns the section on localisation, which shows on which tasks the vectors change the model's output."""
    by_arm = [
        (number, arm, seeds)
        for number, arm in enumerate(results.arms, 1)
        if (seeds := [seed for seed in arm.seeds if seed.localisation])
    ]
    if not by_arm:
        return None
    pictures, columns = [], ["vector"]
    for number, arm, seeds in by_arm:
        first = seeds[0].localisation
        assert first is not None
        pictures.append(
            ReportFigure(
                file=file_name("localisation", number, arm.name),
                figure="localisation",
                data=first.model_dump(mode="json"),
                alt=f"For each vector of arm {arm.name}: the change in f on its own task and on the other tasks.",
                caption=f"{arm.name}, seed {seeds[0].seed}",
            )
        )
        columns.append(arm.name)
    rows = [
        [text(task)] + [
            over_seeds("score", (s.localisation.vectors[task].auroc for s in seeds
                                  if s.localisation and task in s.localisation.vectors))
            for _, _, seeds in by_arm
        ]
        for task in results.names
    ]  # fmt: skip
    last = [over_seeds("score", (s.localisation.auroc for s in seeds if s.localisation)) for _, _, seeds in by_arm]
    table = ReportTable(
        caption="AUROC: how well ‖Δf‖² separates the examples of a vector's own task from those of other tasks",
        columns=columns,
        rows=[*rows, [text("mean"), *last]],
        last_is_mean=True,
    )
    return Section(
        id="localisation",
        title="Localisation: where do the vectors act?",
        how_to_read="A vector should change the model's output f on the examples of its own task, but not on those of "
        "other tasks. The further apart the two markers of a row are, the better. An AUROC of 1 is perfect, and 0.5 "
        "corresponds to chance. Δf is the change in f. In the regime “linear”, it is J τ, where J is the Jacobian of f "
        "and τ is the vector. In other regimes, it is f with the vector minus f without the vector.",
        tables=[table],
        pictures=pictures,
    )


def drift(results: Results) -> Section | None:
    """Returns the section that compares predicted with measured drift."""
    pictures, rows = [], []
    for number, arm in enumerate(results.arms, 1):
        drifts = [seed.drift for seed in arm.seeds if seed.drift]
        if not drifts:
            continue
        pairs = [pair for result in drifts for pair in result.pairs]
        layers = [layer for result in drifts for layer in result.layers]
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
                alt=f"Scatter plot of measured against predicted drift for the vectors of arm {arm.name}.",
                caption=arm.name,
            )
        )
    if not pictures:
        return None
    heads = [
        f"{group}, {column}" for group in ("own task", "other tasks", "layers") for column in ("median", "within ×2")
    ]
    table = ReportTable(caption="Predicted drift divided by measured drift", columns=["arm", *heads], rows=rows)
    return Section(
        id="drift",
        title="Drift: do the bundles predict the change in f?",
        how_to_read="A bundle predicts, without the data, how much a vector changes the model's output f on the task "
        "of the bundle. Points on the dashed line are predicted exactly. Below the line, the prediction is too large; "
        "above the line, it is too small. Single layers are usually close to the line. Whole vectors are usually above "
        "the line: the changes in f that the layers of a trained vector cause add up, but a bundle contains no cross "
        "terms between layers.",
        pictures=pictures,
        tables=[table],
    )


def spectra(results: Results) -> Section | None:
    """Returns the section with the eigenvalues of one bundle's factors."""
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
    table = ReportTable(caption=f"All factors ({len(blocks)})", columns=columns, rows=rows, folded=len(rows) > 12)
    picture = ReportFigure(
        file="spectra",
        figure="spectra",
        data=results.spectra.model_dump(mode="json"),
        alt="Line chart of the eigenvalues of the factors by rank, with logarithmic axes.",
        caption="Eigenvalues of the curvature factors by rank.",
    )
    return Section(
        id="spectra",
        title="Spectra of the factors",
        how_to_read="A steep line means that few directions dominate the factor, which can then be compressed well.",
        pictures=[picture],
        tables=[table],
    )


def bundles(results: Results) -> Section | None:
    """Returns the section with the sizes of the bundles and the errors of the merged bundles."""
    tables = [
        *([_task_bundles(results)] if results.bundles else []),
        *([_merged_bundles(results)] if results.merges else []),
    ]
    if not tables:
        return None
    return Section(
        id="bundles",
        title="Bundles",
        how_to_read="Bundles are shared instead of data. The tables list the size of each file and, for merged "
        "bundles, the error relative to the exact sum of the bundles.",
        tables=tables,
    )


def _task_bundles(results: Results) -> ReportTable:
    return ReportTable(
        caption="Bundles of the tasks",
        columns=["task", "structure", "seed", "size", "dense size", "share", "file", "SHA-256"],
        rows=[
            [
                text(bundle.task),
                text(f"{bundle.structure}, {bundle.compress}" if bundle.compress else bundle.structure),
                _seed(bundle.seed),
                Cell(kind="bytes", value=bundle.bytes),
                Cell(kind="bytes", value=bundle.dense_bytes),
                Cell(kind="percent", value=bundle.bytes / bundle.dense_bytes if bundle.dense_bytes else None),
                Cell(kind="code", value=bundle.file),
                Cell(kind="code", value=bundle.sha256),
            ]
            for bundle in results.bundles
        ],
        folded=len(results.bundles) > 12,
    )


def _merged_bundles(results: Results) -> ReportTable:
    return ReportTable(
        caption="Merged bundles for the penalty. “without” is the task whose vector is trained with the bundle",
        columns=["without", "rule", "structure", "seed", "size", "relative error", "file"],
        rows=[
            [
                text(merge.without),
                text(f"{merge.rule}, rank {merge.rank}" if merge.rank > 1 else merge.rule),
                text(merge.structure),
                _seed(merge.seed),
                Cell(kind="bytes", value=merge.bytes),
                Cell(kind="percent", value=merge.error),
                Cell(kind="code", value=merge.file),
            ]
            for merge in results.merges
        ],
        folded=len(results.merges) > 12,
    )


def provenance(results: Results, times: Times | None) -> Section:
    """Returns the section with versions, hashes, tasks, times, commands and the plan."""
    facts = [[text(name), Cell(kind="code", value=version)] for name, version in sorted(results.versions.items())]
    facts += [
        [text("model"), Cell(kind="code", value=f"{results.model.name} ({results.model.family})")],
        [text("model, SHA-256"), Cell(kind="code", value=results.model.sha256)],
        [text("plan, SHA-256"), Cell(kind="code", value=results.plan.sha256)],
        [text("seeds"), Cell(kind="code", value=", ".join(map(str, results.seeds)))],
    ]
    tables = [
        ReportTable(caption="Versions and hashes", columns=["name", "value"], rows=facts),
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
            [
                text(stage.name),
                Cell(kind="seconds", value=stage.seconds),
                text("reused" if stage.reused else "executed"),
            ]
            for stage in times.stages
        ]
        total_seconds = sum(stage.seconds for stage in times.stages)
        rows.append([text("total of all stages"), Cell(kind="seconds", value=total_seconds), text(None)])
        rows.append([text("last run"), Cell(kind="seconds", value=times.seconds), text(None)])
        caption = "Duration of each stage when it was executed, and of the last run, which wrote these results"
        tables.append(
            ReportTable(caption=caption, columns=["stage", "time", "status"], rows=rows, folded=len(rows) > 24)
        )
        if times.peak_bytes is not None:
            peak = [[text("peak of the last run"), Cell(kind="bytes", value=times.peak_bytes)]]
            tables.append(ReportTable(caption="Memory", columns=["name", "size"], rows=peak))
    return Section(
        id="provenance",
        title="Reproducing this report",
        how_to_read="The plan and the commands below reproduce this report with the versions listed here.",
        tables=tables,
        listings=[
            CodeListing(
                caption="Commands, to be run in the folder that contains results.json",
                text="\n".join(results.commands),
            ),
            CodeListing(caption="Plan", text=results.plan.text),
        ],
    )


def _seed(seed: int | None) -> Cell:
    return Cell(kind="number", value=seed)
