"""Sections on how often models are right: in short, by task, over α, and with a task taken away."""

from __future__ import annotations

from statistics import fmean

from kfacpack.experiments.report_content import Cell, ReportFigure, ReportTable, Section, mean_sweep, over_seeds, text
from kfacpack.experiments.results_schema import ArmResult, PenaltyResult, Results, Summary


def headline(results: Results) -> list[Cell]:
    """The best penalty that takes no data of other tasks, beside none; or the best arm, if there are no two such."""
    rows = [row for row in results.summary if row.method == "sum"] or results.summary
    arms = {arm.name: arm for arm in results.arms}
    penalties = {row.arm: arm.penalty for row in rows if (arm := arms.get(row.arm))}
    dataless = [row for row in rows if (penalty := penalties.get(row.arm)) and not penalty.data]
    best = max(dataless or rows, key=lambda row: row.added)
    plain = next((row for row in rows if row.arm in penalties and penalties[row.arm] is None), None)
    sentence = [
        text(f"{results.model.name}, with the vectors of"),
        Cell(kind="count", value=len(results.tasks)),
        text("tasks added: it is right on"),
    ]
    if plain is None or plain == best:
        return [*sentence, _share(best.added), text("of the test examples on average, against"),
                _share(best.individual), text("with each task's own vector alone.")]  # fmt: skip
    sentence += [
        _share(plain.added), text("of the test examples without a penalty and on"), _share(best.added),
        text(f"with “{best.arm}”; each task's own vector alone reaches"), _share(best.individual),
    ]  # fmt: skip
    if best.recovered is None:
        return [*sentence, text(".")]
    return [*sentence, text(". Of what adding loses, “" + best.arm + "” gets back"), _share(best.recovered), text(".")]


def summary(results: Results) -> Section:
    picture = _bars(results)
    return Section(
        id="summary",
        title="In short",
        how_to_read="“Own vector” is the accuracy of each task with its vector alone, “all added” that of one model "
        "with every vector; “normalised” is the mean of the tasks' ratios, “recovered” the share of what the arm "
        "without a penalty loses by adding that this arm does not, “removed” the share of its margin over chance that "
        "a negated task loses.",
        tables=[_summary_table(results), _arms_table(results)],
        pictures=[picture] if picture else [],
    )


def _summary_table(results: Results) -> ReportTable:
    """Columns that no arm has anything in are left out."""
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
        ]

    columns = [
        "arm", "method", "own vector", "all added", "normalised", "recovered", "best\u00a0α", "at best\u00a0α",
        "removed", "control kept", "AUROC",
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
        caption="How the vectors of each arm were trained",
        columns=["arm", "penalty", "regime"],
        rows=[[text(arm.name), text(_penalty(arm.penalty)), text(arm.regime)] for arm in results.arms],
    )


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
        alt=f"Bars of accuracy by task, for {_listed(list(arms))}: base model, own vector, all added.",
        caption=f"Accuracy by task: the base model, with the task's own vector, and with all vectors ({method}).",
    )


def by_task(results: Results) -> Section:
    return Section(
        id="tasks",
        title="Task by task",
        how_to_read="The closer the columns to the right come to “own vector”, the less the tasks disturb each other.",
        tables=[_task_table(results, arm) for arm in results.arms],
    )


def _task_table(results: Results, arm: ArmResult) -> ReportTable:
    methods = list(arm.seeds[0].added)
    rows = []
    for task in results.names:
        row = [text(task), Cell(kind="percent", value=results.base.tasks[task].accuracy)]
        row.append(over_seeds("percent", (seed.individual[task] for seed in arm.seeds)))
        for method in methods:
            scores = [seed.added[method].tasks[task] for seed in arm.seeds]
            row.append(over_seeds("percent", (score.accuracy for score in scores)))
            row.append(over_seeds("percent", (score.normalized for score in scores)))
        rows.append(row)
    last = [text("mean"), Cell(kind="percent", value=results.base.mean)]
    last.append(over_seeds("percent", (fmean(seed.individual.values()) for seed in arm.seeds)))
    for method in methods:
        last.append(over_seeds("percent", (seed.added[method].mean.accuracy for seed in arm.seeds)))
        last.append(over_seeds("percent", (seed.added[method].mean.normalized for seed in arm.seeds)))
    heads = [name for method in methods for name in (method, f"{method}, normalised")]
    return ReportTable(
        caption=f"{arm.name}: accuracy on the test examples{_seeds(results)}",
        columns=["task", "base model", "own vector", *heads],
        rows=[*rows, last],
        last_is_mean=True,
    )


def over_alpha(results: Results) -> Section | None:
    sweeps = {arm.name: sweep for arm in results.arms if (sweep := mean_sweep(arm.seeds))}
    if not sweeps:
        return None
    levels = {
        "own vectors (mean of the arms)": fmean(fmean(s.individual.values()) for a in results.arms for s in a.seeds),
        "base model": results.base.mean,
    }
    rows = [
        [
            text(arm.name),
            over_seeds("number", (seed.best.alpha for seed in arm.seeds if seed.best)),
            over_seeds("percent", (seed.best.validation for seed in arm.seeds if seed.best)),
            over_seeds("percent", (seed.best.test for seed in arm.seeds if seed.best)),
        ]
        for arm in results.arms
        if any(seed.best for seed in arm.seeds)
    ]
    columns = ["arm", "best α", "validation", "test"]
    table = ReportTable(caption="The best α, chosen on validation examples, never on test", columns=columns, rows=rows)
    picture = ReportFigure(
        file="sweep",
        figure="sweep",
        data={name: sweep.model_dump(mode="json") for name, sweep in sweeps.items()},
        options={"references": levels},
        alt=f"Mean accuracy over α, a line each for {_listed(list(sweeps))}.",
        caption="Mean accuracy over the tasks when the sum of all vectors is scaled by α.",
    )
    return Section(
        id="sweep",
        title="Over α",
        how_to_read="A flat top is good: α then needs no tuning, and α = 1 is as good as any.",
        pictures=[picture],
        tables=[table] if rows else [],
    )


def negation(results: Results) -> Section | None:
    tables = []
    for arm in results.arms:
        found = [seed.negation for seed in arm.seeds if seed.negation]
        if not found:
            continue
        rows = []
        for task in found[0].tasks:
            each = [said.tasks[task] for said in found if task in said.tasks]
            rows.append(
                [
                    text(task),
                    over_seeds("number", (n.alpha for n in each)),
                    over_seeds("percent", (n.before for n in each)),
                    over_seeds("percent", (n.accuracy for n in each)),
                    over_seeds("percent", (n.chance for n in each)),
                    over_seeds("percent", (n.removed for n in each)),
                    text(each[0].control_task or found[0].control),
                    over_seeds("percent", (n.control_before for n in each)),
                    over_seeds("percent", (n.control for n in each)),
                ]
            )
        columns = ["task", "α", "before", "after", "chance", "removed", "control", "its before", "its after"]
        caption = f"{arm.name}: the control keeps {found[0].keep:.0%} on validation{_seeds(results)}"
        tables.append(ReportTable(caption=caption, columns=columns, rows=rows))
    if not tables:
        return None
    return Section(
        id="negation",
        title="Taking a task away",
        how_to_read="Each task's vector is subtracted as far as the control task allows; “after” should be near "
        "“chance”, and the control as good as before.",
        tables=tables,
    )


def _share(value: float | None) -> Cell:
    return Cell(kind="percent", value=value)


def _seeds(results: Results) -> str:
    return f", mean ± standard deviation over {len(results.seeds)} seeds" if len(results.seeds) > 1 else ""


def _penalty(penalty: PenaltyResult | None) -> str:
    if penalty is None:
        return "none"
    words = (penalty.structure, penalty.rule, f"of rank {penalty.rank}" if penalty.rank > 1 else None)
    source = "data of the other tasks" if penalty.data else " ".join(filter(None, words))
    return f"{source}, λ = {penalty.strength:g}"


def _first_method(results: Results) -> str:
    methods = list(results.arms[0].seeds[0].added) or [""]
    return "sum" if "sum" in methods else methods[0]


def _listed(names: list[str]) -> str:
    return ", ".join(names)
