"""Sections on why it works, or does not: how vectors disturb each other, where they act, what bundles foretell."""

from __future__ import annotations

from kfacpack.reporting.content import Cell, Picture, Section, Table, text
from kfacpack.reporting.naming import file_name
from kfacpack.reporting.results import Results
from kfacpack.reporting.statistics import mean_maps, over_seeds, ratios


def disentanglement(results: Results) -> Section | None:
    found = [(number, arm, mean_maps(arm.seeds)) for number, arm in enumerate(results.arms, 1)]
    if not any(maps for _, _, maps in found):
        return None
    # One scale of colours for all, so that they may be compared.
    top = max(value for _, _, maps in found for each, _ in maps for row in each.xi for value in row)
    pictures = [
        Picture(
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
            Picture(
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
    table = Table(
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
            Picture(
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
    table = Table(caption="Predicted drift divided by measured drift", columns=["arm", *heads], rows=rows)
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
    table = Table(caption=f"The {len(blocks)} factors", columns=columns, rows=rows, folded=len(rows) > 12)
    picture = Picture(
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
