"""The headline of a report, and its sections on accuracy: summary, results by task, sweeps over α and negation."""

from __future__ import annotations

from statistics import fmean

from kfacpack.experiments.report_content import (
    Cell,
    ReportFigure,
    ReportTable,
    Section,
    file_name,
    mean_sweep,
    over_seeds,
    text,
)
from kfacpack.experiments.results_schema import (
    ArmResult,
    BestAlpha,
    MethodInfo,
    PenaltyResult,
    Results,
    Summary,
    SweepResult,
)

_MAX_NORMALISED = 3
"""The tables by task contain normalised accuracies only if there are at most this many merge methods."""
_MOSTLY_RECOVERED = 0.75
"""Minimum value of "recovered" for which the report states that vectors can be added as they are."""


def headline(results: Results) -> list[Cell]:
    """Returns the conclusion of the report.

    The conclusion compares the arm without a penalty with the best arm whose penalty needs no data from other tasks.
    If no arm has such a penalty, the best of all arms is used instead. If every arm has a penalty, or the arm without a
    penalty is itself the best arm, the conclusion states only the accuracies of the best arm, with all vectors added
    and with each task's own vector. If no arm has a penalty and there are several merge methods, the conclusion
    compares the best method with the sum of the vectors.
    """
    if len(results.methods) > 1 and all(arm.penalty is None for arm in results.arms):
        return _method_headline(results)
    rows = [row for row in results.summary if row.method == "sum"] or results.summary
    arms = {arm.name: arm for arm in results.arms}
    penalties = {row.arm: arm.penalty for row in rows if (arm := arms.get(row.arm))}
    without_data = [row for row in rows if (penalty := penalties.get(row.arm)) and not penalty.data]
    best = max(without_data or rows, key=lambda row: row.added)
    plain = next((row for row in rows if row.arm in penalties and penalties[row.arm] is None), None)
    conclusion = _conclusion(best, plain) if plain and plain != best else ""
    sentences = [
        *_perplexity_sentences(best, plain),
        text(f"{conclusion}With the vectors of all"), Cell(kind="count", value=len(results.tasks)),
        text(f"tasks added to {results.model.name}, the mean test accuracy is"), _share(best.added),
        text("; with each task's own vector alone, it is"), _share(best.individual), text("."),
    ]  # fmt: skip
    if plain is None or plain == best:
        return sentences
    sentences.append(text("Without a penalty, these accuracies are"))
    sentences += [_share(plain.added), text("and"), _share(plain.individual)]
    if best.recovered is None:
        return [*sentences, text(".")]
    note = ", which needs no data from other tasks," if without_data else ""
    return [*sentences, text(f": “{best.arm}”{note} recovers"), _share(best.recovered), text("of the difference.")]


def _perplexity_sentences(best: Summary, plain: Summary | None) -> list[Cell]:
    """Returns sentences on the perplexity with and without a penalty, or an empty list if no task has completions."""
    sentences = []
    for row in (best, *([plain] if plain and plain != best else [])):
        if row.added_perplexity is not None:
            sentences += [
                text(f"“{row.arm}”: the perplexity of the completions is"),
                Cell(kind="number", value=row.added_perplexity), text("with all vectors added and"),
                Cell(kind="number", value=row.individual_perplexity), text("with each task's own vector."),
            ]  # fmt: skip
    return sentences


def _method_headline(results: Results) -> list[Cell]:
    """Returns the conclusion on the merge methods, one sentence for each arm."""
    sentences = []
    for arm in results.arms:
        rows = {row.method: row for row in results.summary if row.arm == arm.name}
        best = max(rows.values(), key=lambda row: row.added)
        method = next(method for method in results.methods if method.label == best.method)
        uses = "which uses the bundles of the tasks" if method.needs_bundles else "which needs no bundles"
        sentences += [
            text(f"{arm.name}: the best method at α = 1 is “{best.method}”, {uses}, with a mean test accuracy of"),
            _share(best.added), text("; with each task's own vector alone, it is"), _share(best.individual),
        ]  # fmt: skip
        if (plain := rows.get("sum")) and plain != best:
            sentences += [text("; with the sum of the vectors, it is"), _share(plain.added)]
        sentences.append(text("."))
    return sentences


def _conclusion(best: Summary, plain: Summary) -> str:
    """Returns a sentence on how the penalty of the arm `best` affects the interference between vectors.

    Returns an empty string if it is not known how much of the accuracy loss the penalty recovers.

    Args:
        best: Summary of an arm with a penalty.
        plain: Summary of the arm without a penalty.
    """
    if plain.added >= plain.individual:
        return "Even without a penalty, the vectors do not interfere with each other. "
    if best.recovered is None:
        return ""
    if best.recovered >= _MOSTLY_RECOVERED:
        return f"Vectors trained with “{best.arm}” can be added as they are. "
    if best.recovered > 0:
        vectors = f"Vectors trained with “{best.arm}”"
        return f"{vectors} interfere with each other less than vectors trained without a penalty. "
    return f"Training with “{best.arm}” does not reduce the interference between the vectors. "


def summary(results: Results) -> Section:
    """Returns the section with the summary of all arms."""
    picture = _bars(results)
    return Section(
        id="summary",
        title="Summary",
        how_to_read="“Own vector” is the accuracy on a task with the vector of this task only; “all added” is the "
        "accuracy of one model with the vectors of all tasks. “Normalised” is “all added” divided by “own vector”, "
        "averaged over tasks. “Recovered” is the fraction by which an arm reduces the accuracy loss from adding the "
        "vectors, compared with the arm without a penalty." + _removed_note(results) + _completions_note(results),
        tables=[_summary_table(results), _arms_table(results), *_methods_tables(results)],
        pictures=[picture] if picture else [],
    )


def _removed_note(results: Results) -> str:
    """Returns the explanation of the column "removed", or an empty string if the results contain no negation."""
    if all(row.removed is None for row in results.summary):
        return ""
    return " “Removed” is the fraction of the accuracy above chance that is lost when a task's vector is subtracted."


def _summary_table(results: Results) -> ReportTable:
    """Returns the table of means over tasks and seeds, without columns that have no values."""
    several = len(results.seeds) > 1

    def cells(row: Summary) -> list[Cell]:
        return [
            text(row.arm),
            text(row.method),
            Cell(kind="percent", value=row.individual, std=row.individual_std if several else None),
            Cell(kind="percent", value=row.added, std=row.added_std if several else None),
            *map(_share, (row.normalized, row.recovered)),
            Cell(kind="number", value=row.best_alpha),
            *map(_share, (row.best, row.removed, row.control_kept)),
            Cell(kind="score", value=row.auroc),
            *(Cell(kind="number", value=value) for value in (row.individual_perplexity, row.added_perplexity)),
        ]

    columns = [
        "arm", "method", "own vector", "all added", "normalised", "recovered", "best\u00a0α", "at best\u00a0α",
        "removed", "control kept", "AUROC", "perplexity, own vector", "perplexity, all added",
    ]  # fmt: skip
    rows = [cells(row) for row in results.summary]
    kept = [k for k in range(len(columns)) if any(row[k].value is not None for row in rows)]
    return ReportTable(
        caption=f"Means over {len(results.tasks)} tasks{_seeds(results)}",
        columns=[columns[k] for k in kept],
        rows=[[row[k] for k in kept] for row in rows],
    )


def _arms_table(results: Results) -> ReportTable:
    return ReportTable(
        caption="Training of the vectors in each arm",
        columns=["arm", "penalty", "regime"],
        rows=[
            [text(arm.name), text("extracted, not trained" if arm.vectors else _penalty(arm.penalty)), text(arm.regime)]
            for arm in results.arms
        ],
    )


def _methods_tables(results: Results) -> list[ReportTable]:
    """Returns a list with the table of merge methods, or an empty list if no method has settings or needs bundles."""
    if not any(method.needs_bundles or method.settings for method in results.methods):
        return []
    rows = [
        [
            text(method.label),
            text(method.name),
            text(", ".join(f"{key} {value}" for key, value in method.settings.items())),
            text(_bundles_of(method)),
        ]
        for method in results.methods
    ]
    columns = ["label", "method", "settings", "needs bundles"]
    return [ReportTable(caption="Merge methods", columns=columns, rows=rows)]


def _bundles_of(method: MethodInfo) -> str:
    compressed = f", compressed by {method.compress}" if method.compress else ""
    return f"yes, one per task{compressed}" if method.needs_bundles else "no"


def _bars(results: Results) -> ReportFigure | None:
    method = _first_method(results)
    arms = {
        arm.name: {
            "individual": {t: fmean(s.individual[t] for s in arm.seeds) for t in results.names},
            "added": {t: fmean(s.added[method].tasks[t].accuracy for s in arm.seeds) for t in results.names},
        }
        for arm in results.arms
        if method in arm.seeds[0].added
    }
    if not arms:
        return None
    return ReportFigure(
        file="bars",
        figure="bars",
        data={"base": {task: results.base.tasks[task].accuracy for task in results.names}, "arms": arms},
        alt=f"Bar chart of accuracy by task for {_listed(list(arms))}: base model, own vector, all vectors added.",
        caption=f"Accuracy by task: base model, the task's own vector, and all vectors combined ({method}).",
    )


def by_task(results: Results) -> Section:
    """Returns the section with the accuracies on every task."""
    return Section(
        id="tasks",
        title="Results by task",
        how_to_read="The columns to the right of “own vector” show the accuracy with the vectors of all tasks. The "
        "closer this accuracy is to “own vector”, the less the vectors interfere with each other.",
        tables=[
            *(_task_table(results, arm) for arm in results.arms),
            *(_perplexity_table(results, arm) for arm in results.arms if arm.seeds[0].individual_perplexity),
        ],
    )


def _perplexity_table(results: Results, arm: ArmResult) -> ReportTable:
    methods = list(arm.seeds[0].added)
    rows = [
        [
            text(task),
            Cell(kind="number", value=results.base.tasks[task].perplexity),
            over_seeds("number", (seed.individual_perplexity[task] for seed in arm.seeds)),
            *(
                over_seeds("number", (seed.added[method].tasks[task].perplexity for seed in arm.seeds))
                for method in methods
            ),
        ]
        for task in arm.seeds[0].individual_perplexity
    ]
    return ReportTable(
        caption=f"{arm.name}: perplexity per token of the test completions{_seeds(results)}",
        columns=["task", "base model", "own vector", *methods],
        rows=rows,
    )


def _task_table(results: Results, arm: ArmResult) -> ReportTable:
    methods = list(arm.seeds[0].added)
    normalised = len(methods) <= _MAX_NORMALISED
    rows = []
    for task in results.names:
        row = [text(task), Cell(kind="percent", value=results.base.tasks[task].accuracy)]
        row.append(over_seeds("percent", (seed.individual[task] for seed in arm.seeds)))
        for method in methods:
            scores = [seed.added[method].tasks[task] for seed in arm.seeds]
            row.append(over_seeds("percent", (score.accuracy for score in scores)))
            if normalised:
                row.append(over_seeds("percent", (score.normalized for score in scores)))
        rows.append(row)
    last = [text("mean"), Cell(kind="percent", value=results.base.mean)]
    last.append(over_seeds("percent", (fmean(seed.individual.values()) for seed in arm.seeds)))
    for method in methods:
        last.append(over_seeds("percent", (seed.added[method].mean.accuracy for seed in arm.seeds)))
        if normalised:
            last.append(over_seeds("percent", (seed.added[method].mean.normalized for seed in arm.seeds)))
    heads = [name for method in methods for name in (method, *([f"{method}, normalised"] if normalised else []))]
    return ReportTable(
        caption=f"{arm.name}: accuracy on the test examples{_seeds(results)}",
        columns=["task", "base model", "own vector", *heads],
        rows=[*rows, last],
        last_is_mean=True,
    )


def over_alpha(results: Results) -> Section | None:
    """Returns the section with the accuracy as a function of α and the α selected on the validation examples."""
    sweeps = {arm.name: sweep for arm in results.arms if (sweep := mean_sweep(arm.seeds))}
    if not sweeps:
        return None
    levels = {
        "own vectors (mean over arms)": fmean(fmean(s.individual.values()) for a in results.arms for s in a.seeds),
        "base model": results.base.mean,
    }
    by_method = {arm.name: _method_sweeps(arm) for arm in results.arms}
    several = any(len(curves) > 1 for curves in by_method.values())
    first = next(iter(results.arms[0].seeds[0].added))  # `SeedResult.sweep` is the sweep of the first method
    rows = [
        [
            text(arm.name),
            *([text(label)] if several else []),
            *(over_seeds("percent", (seed.added[label].mean.accuracy for seed in arm.seeds)) for _ in range(several)),
            over_seeds("number", (entry.alpha for entry in chosen)),
            over_seeds("percent", (entry.validation for entry in chosen)),
            over_seeds("percent", (entry.test for entry in chosen)),
        ]
        for arm in results.arms
        for label in arm.seeds[0].added
        if (chosen := _best_alphas(arm, label))
    ]
    columns = ["arm", *(["method", "test at α\u00a0=\u00a01"] if several else []), "best α", "validation", "test"]
    table = ReportTable(caption="Best α, selected on the validation examples", columns=columns, rows=rows)
    picture = ReportFigure(
        file="sweep",
        figure="sweep",
        data={name: sweep.model_dump(mode="json") for name, sweep in sweeps.items()},
        options={"references": levels},
        alt=f"Line chart of mean accuracy against α, one line for each of {_listed(list(sweeps))}.",
        caption="Mean accuracy over all tasks if the sum of the vectors is scaled by α."
        if first == "sum" and not several
        else f"Mean accuracy over all tasks if the merged vector (method: {first}) is scaled by α.",
    )
    pictures = [
        ReportFigure(
            file=file_name("methods", number, arm),
            figure="sweep",
            data={label: curve.model_dump(mode="json") for label, curve in curves.items()},
            options={"references": {"base model": results.base.mean}},
            alt=f"Line chart of mean accuracy against α for arm {arm}, one line for each of {_listed(list(curves))}.",
            caption=f"{arm}: mean accuracy over all tasks when the merged vector is scaled by α, by merge method.",
        )
        for number, (arm, curves) in enumerate(by_method.items(), start=1)
        if len(curves) > 1
    ]
    return Section(
        id="sweep",
        title="Accuracy over α",
        how_to_read="A flat maximum that includes α = 1 is good, because α then needs no tuning.",
        pictures=[picture, *pictures],
        tables=[table] if rows else [],
    )


def _method_sweeps(arm: ArmResult) -> dict[str, SweepResult]:
    """Returns the sweep of each merge method that was evaluated at every α, averaged over seeds."""
    first, *others = arm.seeds[0].added
    curves = {first: mean_sweep(arm.seeds)}
    curves |= {label: mean_sweep([seed.added[label] for seed in arm.seeds]) for label in others}
    return {label: curve for label, curve in curves.items() if curve}


def _best_alphas(arm: ArmResult, label: str) -> list[BestAlpha]:
    """Returns the best α of a merge method for each seed, or an empty list if only α = 1 was evaluated."""
    is_first = label == next(iter(arm.seeds[0].added))
    entries = [seed.best if is_first else seed.added[label].best for seed in arm.seeds]
    return [entry for entry in entries if entry]


def negation(results: Results) -> Section | None:
    """Returns the section on removing tasks by subtracting their vectors."""
    tables = []
    for arm in results.arms:
        negations = [seed.negation for seed in arm.seeds if seed.negation]
        if not negations:
            continue
        first = negations[0]
        rows = []
        for task in first.tasks:
            entries = [result.tasks[task] for result in negations if task in result.tasks]
            rows.append(
                [
                    text(task),
                    over_seeds("number", (entry.alpha for entry in entries)),
                    over_seeds("percent", (entry.before for entry in entries)),
                    over_seeds("percent", (entry.accuracy for entry in entries)),
                    over_seeds("percent", (entry.chance for entry in entries)),
                    over_seeds("percent", (entry.removed for entry in entries)),
                    text(entries[0].control_task or first.control),
                    over_seeds("percent", (entry.control_before for entry in entries)),
                    over_seeds("percent", (entry.control for entry in entries)),
                ]
            )
        columns = ["task", "α", "before", "after", "chance", "removed", "control", "control before", "control after"]
        caption = (
            f"{arm.name}: test accuracy before and after the vector is subtracted{_seeds(results)}. "
            f"α is chosen so that the control task keeps at least {first.keep:.0%} of its validation accuracy"
        )
        tables.append(ReportTable(caption=caption, columns=columns, rows=rows))
    if not tables:
        return None
    return Section(
        id="negation",
        title="Removing a task",
        how_to_read="The vector of each task is multiplied by α and subtracted. α is selected on the validation "
        "examples. Of the values at which the control task keeps enough of its accuracy, the one that lowers the "
        "accuracy on the task most is selected. “After” should be close to “chance”, and the accuracy on the control "
        "task should hardly change.",
        tables=tables,
    )


def _completions_note(results: Results) -> str:
    if not any(row.added_perplexity for row in results.summary):
        return ""
    return (
        " For tasks with completions, accuracy is the fraction of tokens that are predicted correctly. “Perplexity” is "
        "the perplexity per token, as a geometric mean over tasks; lower is better."
    )


def _share(value: float | None) -> Cell:
    return Cell(kind="percent", value=value)


def _seeds(results: Results) -> str:
    return f", mean ± standard deviation over {len(results.seeds)} seeds" if len(results.seeds) > 1 else ""


def _penalty(penalty: PenaltyResult | None) -> str:
    if penalty is None:
        return "none"
    words = (penalty.structure, penalty.rule, f"rank {penalty.rank}" if penalty.rank > 1 else None)
    source = "data of the other tasks" if penalty.data else " ".join(filter(None, words))
    return f"{source}, λ = {penalty.strength:g}"


def _first_method(results: Results) -> str:
    methods = list(results.arms[0].seeds[0].added) or [""]
    return "sum" if "sum" in methods else methods[0]


def _listed(names: list[str]) -> str:
    return ", ".join(names)
