"""Runs the plans of this folder, and writes RESULTS.md, its figures and a page of the documentation from their results.

    python examples/paper/results.py run [-o DIR] [--jobs N] [PLAN …]   # run plans at the small scale; resumable
    python examples/paper/results.py collect DIR PLAN                   # shorten DIR/results.json to results/PLAN.json
    python examples/paper/results.py write                              # RESULTS.md, docs/paper.md and the figures

All plans use one output folder, in which files are named by a hash of what determines them. Bundles and vectors that
several plans need are therefore computed once. `results/PLAN.json` has the numbers that tables, verdicts and figures
use. `claims.py` has the claims and the numbers of the paper, `criteria.py` the criteria.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from claims import PLANS, PlanPage
from criteria import Claim
from measures import Results, percent

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
RESULTS = FOLDER / "results"
FIGURES = ROOT / "docs" / "assets" / "paper"
DIGITS = 5


def rounded(value: Any) -> Any:
    """Rounds all numbers of a JSON value."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    return [rounded(entry) for entry in value] if isinstance(value, list) else value


def shortened(results: dict[str, Any]) -> dict[str, Any]:
    """Returns the numbers of `results.json` that the tables and figures use."""
    return rounded(
        {
            "name": results["name"],
            "model": results["model"]["name"],
            "tasks": [task["name"] for task in results["tasks"]],
            "seeds": results["seeds"],
            "versions": results["versions"],
            "plan_sha256": results["plan"]["sha256"],
            "base": results["base"]["mean"],
            "dense_bytes": max((bundle["dense_bytes"] or 0 for bundle in results["bundles"]), default=None),
            "merge_errors": merge_errors(results["merges"]),
            "arms": {arm["name"]: shortened_arm(arm) for arm in results["arms"]},
        }
    )


def merge_errors(merges: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Returns the mean error of merged Kronecker bundles by rule."""
    errors: dict[str, list[float]] = {}
    for merge in merges:
        if merge["structure"] == "kronecker" and merge["error"] is not None:
            rank = f" {merge['rank']}" if merge["rank"] > 1 else ""
            errors.setdefault(f"{merge['rule']}{rank}", []).append(merge["error"])
    return {rule: fmean(values) for rule, values in errors.items()}


def shortened_arm(arm: dict[str, Any]) -> dict[str, Any]:
    """Returns the numbers of one arm."""
    return {
        "regime": arm["regime"],
        "penalty": arm["penalty"],
        "bundle_bytes": arm.get("bundle_bytes"),
        "seeds": [shortened_seed(seed) for seed in arm["seeds"]],
    }


def shortened_seed(seed: dict[str, Any]) -> dict[str, Any]:
    """Returns the numbers of one arm with one seed."""
    first = next(iter(seed["added"]))
    methods = {
        label: {
            "accuracy": added["mean"]["accuracy"],
            "normalized": added["mean"]["normalized"],
            "best": (seed["best"] if label == first else added.get("best")) or None,
            "sweep": _sweep(seed["sweep"] if label == first else added.get("sweep")),
        }
        for label, added in seed["added"].items()
    }
    negated = (seed["negation"] or {}).get("tasks", {}).values()
    located = (seed["localisation"] or {}).get("vectors", {}).values()
    drift = (seed["drift"] or {}).get("pairs", [])
    return {
        "individual": fmean(seed["individual"].values()),
        "methods": methods,
        "negation": {
            key: fmean(task[key] for task in negated) for key in ("before", "accuracy", "control_before", "control")
        }
        if negated
        else None,
        "auroc": seed["localisation"]["auroc"] if located else None,
        "scores": {
            side: [fmean(task[side]["quantiles"][k] for task in located) for k in range(5)] for side in ("on", "off")
        }
        if located
        else None,
        "disentanglement": [
            {"tasks": grid["tasks"], "alphas": grid["alphas"], "xi": grid["xi"]}
            for grid in seed["disentanglement"] or []
        ],
        "drift": [[pair["predicted"], pair["measured"]] for pair in drift if pair["vector"] != pair["task"]],
    }


def _sweep(sweep: dict[str, Any] | None) -> dict[str, Any] | None:
    return {"alphas": sweep["alphas"], "mean": sweep["mean"]} if sweep else None


def collect(run: Path, plan: str) -> Path:
    """Writes the shortened results of a run; returns the file."""
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    RESULTS.mkdir(exist_ok=True)
    target = RESULTS / f"{plan}.json"
    target.write_text(json.dumps(shortened(results), ensure_ascii=False) + "\n", encoding="utf-8")
    return target


def missing_variables(plan: Path) -> list[str]:
    """Returns the environment variables of a plan, without its scales, that are not set."""
    text = plan.read_text(encoding="utf-8").partition("\nscales:")[0]
    return sorted({name for name in re.findall(r"\$(\w+)", text) if name not in os.environ})


def run_plans(names: Sequence[str], output: Path, jobs: int | None) -> None:
    """Runs plans one after the other, collects their results, and writes the pages."""
    for name in names:
        plan = FOLDER / f"{name}.yaml"
        if not plan.exists():  # the cost is measured by a script
            subprocess.run([sys.executable, FOLDER / f"{name}.py", RESULTS / f"{name}.json"], check=True)
            continue
        if variables := missing_variables(plan):
            print(f"{name}: skipped, because {', '.join(variables)} is not set", flush=True)
            continue
        options = ["--threads", "1", *(["--jobs", str(jobs)] if jobs else [])]
        command = [sys.executable, "-m", "kfacpack_cli", "run", str(plan), "-o", str(output), *options]
        print(f"{name}: {' '.join(command[1:])}", flush=True)
        subprocess.run(command, check=True)
        (output / "report.html").replace(output / f"{name}.html")
        collect(output, name)
    write()


def read_results() -> dict[str, Results]:
    """Reads the committed results by plan."""
    return {
        path.stem: Results(json.loads(path.read_text(encoding="utf-8")))
        for path in sorted(RESULTS.glob("*.json"))
        if path.stem in PLANS
    }


INTRODUCTION = """\
Each claim of the paper is tested on `tiny`, the small CLIP model in the package, with its eight tasks and three seeds,
unless stated otherwise. The paper's numbers are those of CLIP on eight vision tasks, so only the comparisons between
rows are expected to agree, not the values. Accuracies are means over tasks, in percent, with the standard deviation
over seeds. `make paper` repeats all runs. The plans are in `examples/paper`; `kfacpack run PLAN --scale full` runs them
at the size of the paper, and `--dry-run --gpu A100` checks such a run without weights and data.

A claim that one row is better than another *holds* if the difference, paired by seed, is positive and at least as large
as its standard deviation over seeds. A claim that one row is within a bound of another holds if its mean is lower by at
most the bound. An accuracy is flat if it changes by at most 2 points. A claim *cannot be tested at this size* if the
penalty itself changes the accuracy by less than twice the bound. The criteria are in `criteria.py`, and were fixed
before the runs."""


def page(all_results: dict[str, Results], figures: str) -> str:
    """Returns the page in Markdown.

    Args:
        all_results: The results by plan.
        figures: Path of the folder of the figures, from the page.
    """
    lines = [
        "# The paper, claim by claim",
        "",
        "<!-- Written by examples/paper/results.py from examples/paper/results. Do not edit. -->",
        "",
        *INTRODUCTION.splitlines(),
        "",
        "| claim | verdict |",
        "|---|---|",
    ]
    for name, plan in PLANS.items():
        for claim in plan.claims:
            lines.append(f"| {claim.text} | {verdict_of(claim, all_results.get(name))[0]} |")
    for name, plan in PLANS.items():
        lines += ["", *section(name, plan, all_results.get(name), figures)]
    return "\n".join(lines) + "\n"


def verdict_of(claim: Claim, results: Results | None) -> tuple[str, str]:
    """Returns the verdict of a claim and its reason."""
    return ("not run yet", "") if results is None else claim.decide(results)


def section(name: str, plan: PlanPage, results: Results | None, figures: str) -> list[str]:
    """Returns the section of one plan, as lines."""
    source = f"examples/paper/{name}.{'yaml' if (FOLDER / f'{name}.yaml').exists() else 'py'}"
    lines = [f"## {plan.title}", "", f"`{source}`. In the paper: {plan.source}.", ""]
    if results is None:
        return [*lines, "Not run yet.", "", *(f"- {claim.text}: not run yet." for claim in plan.claims)]
    lines += [*plan.table(results, plan.paper, plan.paper_heading), ""]
    for claim in plan.claims:
        verdict, reason = claim.decide(results)
        lines.append(f"- **{claim.text}: {verdict}.** {reason}")
    if plan.note:
        lines += ["", plan.note]
    if results.content.get("seeds"):
        seeds, tasks = len(results.content["seeds"]), len(results.content["tasks"])
        lines += ["", f"{results.content['model']}, {tasks} tasks, {seeds} seeds; base model {percent(results.base)}."]
    for file in figure_files(name):
        lines += ["", f"![{plan.title}]({figures}/{file})"]
    return lines


def figure_files(name: str) -> list[str]:
    """Returns the file names of a plan's figures."""
    return [f"{name}-{figure}.svg" if number else f"{name}.svg" for number, figure in enumerate(PLANS[name].figures)]


def write() -> None:
    """Writes RESULTS.md, the page of the documentation and the figures."""
    all_results = read_results()
    (FOLDER / "RESULTS.md").write_text(page(all_results, "../../docs/assets/paper"), encoding="utf-8")
    (ROOT / "docs" / "paper.md").write_text(page(all_results, "assets/paper"), encoding="utf-8")
    from figures import draw

    FIGURES.mkdir(parents=True, exist_ok=True)
    for name, results in all_results.items():
        for figure, file in zip(PLANS[name].figures, figure_files(name), strict=True):
            draw(figure, results, FIGURES / file)


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description="Runs the plans of the paper and writes their results.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run plans at the small scale")
    run.add_argument("plans", nargs="*", help=f"by default all: {', '.join(PLANS)}")
    run.add_argument("-o", "--output", type=Path, default=Path("paper"))
    run.add_argument("--jobs", type=int)
    shorten = commands.add_parser("collect", help="shorten the results of a run")
    shorten.add_argument("run", type=Path)
    shorten.add_argument("plan", choices=list(PLANS))
    commands.add_parser("write", help="write RESULTS.md, docs/paper.md and the figures")
    options = parser.parse_args()
    if options.command == "run":
        if unknown := [name for name in options.plans if name not in PLANS]:
            sys.exit(f"unknown plan {unknown[0]!r}; expected one of: {', '.join(PLANS)}")
        run_plans(options.plans or list(PLANS), options.output, options.jobs)
    elif options.command == "collect":
        print(collect(options.run, options.plan))
    else:
        write()


if __name__ == "__main__":
    main()
