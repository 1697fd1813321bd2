"""How `kfacpack measure` shows what it found: tables for a terminal.

`kfacpack measure`: why vectors add up or do not, and whether a bundle is any good.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer
from rich.table import Table
from rich.text import Text

from kfacpack.errors import KfacpackError, printable
from kfacpack.format.manifest import FloatType
from kfacpack.format.reference import locate
from kfacpack.format.writer import write_atomically
from kfacpack.models.prompts import PromptStyle

from .console import examples_bar, loading, out, print_json, steps_bar
from .options import (
    DATA,
    DEVICE,
    DTYPE,
    IMAGE_SIZE,
    MODEL_NAME,
    PROMPTS,
    QUIET,
    RUN,
    WEIGHTS,
    WORKERS,
    File,
    check_output,
    folders_of,
    load_model_option,
    load_task_option,
    option,
)

if TYPE_CHECKING:
    from kfacpack.curvature.curvature import Curvature
    from kfacpack.evaluation.accuracy import EvaluationSet
    from kfacpack.vectors.task_vector import TaskVector


def _disentanglement(found: dict[str, Any]) -> Iterator[Table | Text]:
    first, second = (printable(name) for name in found["tasks"])
    table = _table("α", *(f"{alpha:g}" for alpha in found["alphas"]))
    for alpha, row in zip(found["alphas"], found["xi"], strict=True):
        table.add_row(f"{alpha:g}", *(f"{100 * xi:.0f}" for xi in row))
    yield table
    sizes = " and ".join(f"{size:,}" for size in found["examples"].values())
    yield Text(f"ξ in %, of 200; down: α of {first}, across: α of {second}; {sizes} examples", style="dim")


def _localisation(found: dict[str, Any]) -> Iterator[Table | Text]:
    table = _table("vector", "on task", "off task", "AUROC")
    for name, each in found["vectors"].items():
        numbers = f"{each['on']['mean']:.3g}", f"{each['off']['mean']:.3g}", f"{each['auroc']:.3f}"
        table.add_row(Text(printable(name), overflow="fold"), *numbers)
    if len(found["vectors"]) > 1:
        table.add_row("mean", "", "", f"{found['auroc']:.3f}", style="bold")
    yield table
    yield Text("the mean of the squared change of f, and how well it tells the tasks apart", style="dim")


def _drift(found: dict[str, Any]) -> Iterator[Table | Text]:
    table = _table("vector", "task", "predicted", "measured", "ratio", words=2)
    for each in found["pairs"]:
        names = (Text(printable(each[key]), overflow="fold") for key in ("vector", "task"))
        table.add_row(*names, f"{each['predicted']:.3g}", f"{each['measured']:.3g}", _ratio(each))
    yield table
    # A layer that moves nothing has no ratio.
    moved = sorted((each for each in found["layers"] if each["measured"] > 0), key=_quotient)
    if moved:
        low, middle, high = (_ratio(moved[int(share * (len(moved) - 1))]) for share in (0.05, 0.5, 0.95))
        words = f"ratios of {len(moved):,} single layers: {middle} in the middle, nine in ten from {low} to {high}"
        yield Text(words, style="dim")


def _quotient(each: dict[str, float]) -> float:
    return each["predicted"] / each["measured"]


def _ratio(each: dict[str, float]) -> str:
    return f"{_quotient(each):.2f}" if each["measured"] > 0 else ""


def _spectra(found: dict[str, Any]) -> Iterator[Table | Text]:
    table = _table("block", "side", "size", "trace", "largest", "effective rank", words=2)
    for each in found["blocks"]:
        numbers = f"{each['trace']:.3g}", f"{each['eigenvalues'][0]:.3g}", f"{each['effective_rank']:.1f}"
        table.add_row(Text(printable(each["name"]), overflow="fold"), each["side"], f"{each['size']:,}", *numbers)
    yield table


def _table(*headings: str, words: int = 1) -> Table:
    """The first columns are words, the others numbers."""
    table = Table(*headings[:words], box=None, header_style="bold", pad_edge=False)
    for heading in headings[words:]:
        table.add_column(heading, justify="right")
    return table


TABLES: dict[str, Callable[[dict[str, Any]], Iterator[Table | Text]]] = {
    "disentanglement": _disentanglement,
    "localisation": _localisation,
    "drift": _drift,
    "spectra": _spectra,
}


Measurement = Literal["disentanglement", "localisation", "drift", "spectra"]
MEASURE = "The measurement"
ALPHAS = "-1:2:0.25"
LAYER_EXAMPLES = 64


def measure(
    what: Measurement = typer.Argument(..., metavar="WHAT", help="disentanglement, localisation, drift or spectra."),
    vectors: list[File] | None = typer.Argument(
        None, metavar="FILE.safetensors...", help="Task vectors, of one task each; for spectra, a bundle."
    ),
    bundle: list[File] | None = option(
        MEASURE,
        None,
        "--bundle",
        metavar="FILE.kfac",
        help="For drift, bundles of one task each, whose prediction is measured; repeatable. For spectra, one.",
    ),
    alpha: str | None = option(
        MEASURE,
        None,
        "--alpha",
        metavar="α,α|FROM:TO:STEP",
        help=f"For disentanglement, what each vector is multiplied by; else {ALPHAS}.",
    ),
    layer_examples: int | None = option(
        MEASURE,
        None,
        "--layer-examples",
        min=0,
        metavar="N",
        help=f"For drift, how many examples each layer is measured on, else {LAYER_EXAMPLES}; 0 for no layers.",
    ),
    model: str = MODEL_NAME,
    weights: str | None = WEIGHTS,
    image_size: int | None = IMAGE_SIZE,
    prompts: PromptStyle | None = PROMPTS,
    device: str = DEVICE,
    dtype: FloatType = DTYPE,
    task: list[str] | None = option(
        DATA, None, "--task", metavar="TASK", help="For localisation, a task more that no vector is of; repeatable."
    ),
    data: list[str] | None = option(
        DATA, None, "--data", metavar="TASK=DIR", help="Where a task's data is, unless it is registered; repeatable."
    ),
    split: str = option(DATA, "test", "--split", help="The split to take examples from."),
    examples: str = option(DATA, "256", "--examples", metavar="N|P%|all", help="How many of each task."),
    batch_size: int = option(RUN, 64, "--batch-size", min=1, help="Examples at a time."),
    output: Path | None = option(RUN, None, "--output", "-o", metavar="FILE.json", help="Write the numbers there."),
    figure: Path | None = option(RUN, None, "--figure", metavar="FILE.png|svg", help="Draw them there."),
    as_json: bool = option(RUN, False, "--json", help="Print the numbers as JSON."),
    workers: int | None = WORKERS,
    quiet: bool = QUIET,
) -> None:
    """Measure what task vectors do to each other's tasks, or what a bundle says of them.

    disentanglement: how many answers on two vectors' tasks change when the other vector is added, for each pair of α.

    localisation: how far each vector moves f on its own task and on others, and how well that tells them apart (AUROC).

    drift: how far bundles say that vectors move f on the bundles' tasks, against how far they do move it there.

    spectra: the eigenvalues of a bundle's matrices.
    """
    files, bundles = list(vectors or ()), list(bundle or ())
    if what == "spectra":
        files, bundles = [], [*files, *bundles]
    _check_counts(what, files, bundles)
    for name, given, belongs in (
        ("--alpha", alpha, "disentanglement"),
        ("--layer-examples", layer_examples, "drift"),
        ("--task", task or None, "localisation"),
    ):
        if given is not None and what != belongs:
            raise KfacpackError(f"{name} is about {belongs}, and not about {what}; leave it out")
    _check_outputs(output, figure, [*files, *bundles, *([weights] if weights else ())])
    # They bring torch, which --help has no need to wait for.
    import kfacpack as kp

    show = not (quiet or as_json)
    if what == "spectra":
        with steps_bar(locate(bundles[0]).name, show=show) as advance:
            found = kp.spectra(kp.load(bundles[0]), on_progress=advance)
    else:
        from kfacpack.estimation.distributed import local_device
        from kfacpack.format.units import parse_alphas
        from kfacpack.models.data_loading import use_workers

        use_workers(workers)
        place, alphas = local_device(device), parse_alphas(alpha or ALPHAS)
        taus, curvatures = _vectors(files), _bundles(bundles)
        names = list(curvatures) or [*taus, *(task or ())]
        with loading(", ".join([*names, model]), show=show):
            exams = _evaluation_sets(names, data or (), split, examples, model, quiet=quiet)
            loaded = load_model_option(model, weights, image_size, dtype, place, prompts=prompts)
        with examples_bar(what, show=show) as advance:
            how: dict[str, Any] = {"batch_size": batch_size, "on_progress": advance}
            if what == "disentanglement":
                first, second = taus.values()
                found = kp.disentanglement(loaded, (exams[0], exams[1]), (first, second), alphas, **how)
            elif what == "localisation":
                found = kp.localisation(loaded, exams, taus, **how)
            else:
                few = LAYER_EXAMPLES if layer_examples is None else layer_examples
                found = kp.drift(loaded, exams, taus, curvatures, layer_examples=few, **how)
    _write(what, found, output, figure)
    if as_json:
        print_json(found)
    elif show:
        for part in TABLES[what](found):
            out.print(part)


def _check_counts(what: Measurement, vectors: list[File], bundles: list[File]) -> None:
    """Before anything is opened: how many vectors and bundles a measurement takes."""
    expected, fits = {
        "disentanglement": ("two vectors", len(vectors) == 2 and not bundles),
        "localisation": ("one vector or more", bool(vectors) and not bundles),
        "drift": ("one vector or more, and --bundle once or more", bool(vectors) and bool(bundles)),
        "spectra": ("one bundle", len(bundles) == 1),
    }[what]
    if not fits:
        found = f"{len(vectors)} vector{'s' * (len(vectors) != 1)} and {len(bundles)} bundle{'s' * (len(bundles) != 1)}"
        raise KfacpackError(f"measure {what}: expected {expected}, found {found}")


def _check_outputs(output: Path | None, figure: Path | None, inputs: list[File]) -> None:
    if figure and figure.suffix.lower() not in (".png", ".svg"):
        raise KfacpackError(f"{figure}: a figure is a PNG or an SVG; give it a name that ends in .png or .svg")
    if output and figure and output.absolute() == figure.absolute():
        raise KfacpackError(f"{output}: is both --output and --figure; give them different names")
    for each in filter(None, (output, figure)):
        check_output(each, inputs)


def _vectors(files: list[File]) -> dict[str, TaskVector]:
    """By task."""
    from kfacpack.vectors.task_vector import TaskVector

    found: dict[str, TaskVector] = {}
    for file in files:
        vector = TaskVector.load(file)
        if len(vector.tasks) != 1:
            tasks = printable(", ".join(vector.tasks))
            raise KfacpackError(f"{file}: is of {len(vector.tasks)} tasks ({tasks}), expected a vector of one")
        _write_figure(found, vector.tasks[0], vector, file)
    return found


def _bundles(files: list[File]) -> dict[str, Curvature]:
    """By task."""
    from kfacpack.curvature.curvature import load

    found: dict[str, Curvature] = {}
    for file in files:
        curvature = load(file)
        if curvature.about.source is None:
            problem = "is of no single task, as it is merged or does not say"
            raise KfacpackError(f"{file}: {problem}. Drift is measured on a task's data: give its own bundle")
        _write_figure(found, curvature.about.source.task, curvature, file)
    return found


def _write_figure(found: dict[str, Any], task: str, what: Any, file: File) -> None:
    if task in found:
        raise KfacpackError(f"{file}: is of {printable(task)}, as another that is given; give one for each task")
    found[task] = what


def _evaluation_sets(
    names: list[str], data: Sequence[str], split: str, examples: str, model: str, *, quiet: bool
) -> list[EvaluationSet]:
    from kfacpack.evaluation.accuracy import EvaluationSet
    from kfacpack.format.identity import base_task_name
    from kfacpack.tasks.registry import PUBLISHED, TASKS

    folders = folders_of(names, data)
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise KfacpackError(f"--task {printable(twice[0])}: its examples are there already; name it once")
    known = {**TASKS, **PUBLISHED}
    if unknown := [name for name in names if name not in folders and base_task_name(name) not in known]:
        name = printable(unknown[0])
        raise KfacpackError(f"{name!r} is no registered task; say where its data is: --data {name}=DIR")
    tasks = [load_task_option(name, folders.get(name), None, model, quiet=quiet) for name in names]
    return [EvaluationSet.of(task, split, examples) for task in tasks]


def _write(what: Measurement, found: dict[str, Any], output: Path | None, figure: Path | None) -> None:
    if output:
        write_atomically(output, f"{json.dumps(found, indent=2)}\n".encode())
    if figure:
        from kfacpack.experiments.figure_style import save
        from kfacpack.experiments.figures import FIGURES

        save(FIGURES[what](found), figure)
