"""`kfacpack measure`: measures disentanglement, localisation, drift, interference, or the spectra of a bundle."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer
from rich.table import Table
from rich.text import Text

from kfacpack._compat import require
from kfacpack.errors import KfacpackError, printable
from kfacpack.format.container import first_duplicate
from kfacpack.format.manifest import FloatType
from kfacpack.format.reference import locate
from kfacpack.format.writer import write_atomically
from kfacpack.models.prompts import PromptStyle

from .console import examples_bar, loading, name_cell, out, plain_table, print_json, print_line, steps_bar
from .evaluator import MAX_COLUMN_WIDTH, split_columns
from .options import (
    AS_JSON,
    BATCH_SIZE,
    DATA_PANEL,
    DEVICE,
    DTYPE,
    IMAGE_SIZE,
    MODEL_NAME,
    PROMPTS,
    QUIET,
    RUN_PANEL,
    WEIGHTS,
    WORKERS,
    File,
    check_output,
    data_folders,
    examples_option,
    load_model_option,
    load_task_option,
    option,
    output_option,
    split_option,
)

if TYPE_CHECKING:
    from kfacpack.curvature.curvature import Curvature
    from kfacpack.evaluation.accuracy import EvaluationSet
    from kfacpack.models.model import Model
    from kfacpack.vectors.task_vector import TaskVector


def _disentanglement(result: dict[str, Any]) -> Iterator[Table | Text]:
    first, second = (printable(name) for name in result["tasks"])
    table = plain_table("α", numbers=[f"{alpha:g}" for alpha in result["alphas"]])
    for alpha, row in zip(result["alphas"], result["xi"], strict=True):
        table.add_row(f"{alpha:g}", *(f"{100 * xi:.0f}" for xi in row))
    yield table
    sizes = " and ".join(f"{size:,}" for size in result["examples"].values())
    yield Text(f"ξ in %, at most 200; rows: α of {first}, columns: α of {second}; {sizes} examples", style="dim")


def _localisation(result: dict[str, Any]) -> Iterator[Table | Text]:
    table = plain_table("vector", numbers=("on task", "off task", "AUROC"))
    for name, vector in result["vectors"].items():
        numbers = f"{vector['on']['mean']:.3g}", f"{vector['off']['mean']:.3g}", f"{vector['auroc']:.3f}"
        table.add_row(name_cell(name), *numbers)
    if len(result["vectors"]) > 1:
        table.add_row("mean", "", "", f"{result['auroc']:.3f}", style="bold")
    yield table
    yield Text("mean squared change in f, and AUROC for separating the tasks by this change", style="dim")


def _drift(result: dict[str, Any]) -> Iterator[Table | Text]:
    table = plain_table("vector", "task", numbers=("predicted", "measured", "ratio"))
    for pair in result["pairs"]:
        names = (name_cell(pair[key]) for key in ("vector", "task"))
        table.add_row(*names, f"{pair['predicted']:.3g}", f"{pair['measured']:.3g}", _format_ratio(pair))
    yield table
    # Layers without measured drift are left out, because their ratio is undefined.
    layers = sorted((layer for layer in result["layers"] if layer["measured"] > 0), key=_ratio)
    if layers:
        low, median, high = (_format_ratio(layers[int(share * (len(layers) - 1))]) for share in (0.05, 0.5, 0.95))
        ratios = f"median {median}, 90% of them between {low} and {high}"
        yield Text(f"ratios for individual layers ({len(layers):,}): {ratios}", style="dim")


def _ratio(entry: dict[str, float]) -> float:
    return entry["predicted"] / entry["measured"]


def _format_ratio(entry: dict[str, float]) -> str:
    return f"{_ratio(entry):.2f}" if entry["measured"] > 0 else ""


def _interference(result: dict[str, Any]) -> Iterator[Table | Text]:
    names = [task["task"] for task in result["tasks"]]
    drifts = {(pair["vector"], pair["task"]): pair for pair in result["pairs"]}
    longest = min(max(map(len, result["vectors"])), MAX_COLUMN_WIDTH)
    for columns in split_columns(names, reserved=longest, padding=2):
        table = plain_table("vector")
        for name in columns:
            table.add_column(name_cell(name), justify="right", max_width=MAX_COLUMN_WIDTH, overflow="fold")
        for vector in result["vectors"]:
            table.add_row(name_cell(vector), *(_format_interference(drifts[vector, name]) for name in columns))
        yield table
    yield Text("predicted drift τᵀGτ of each vector (row) on each task (column); own tasks in brackets", style="dim")
    yield Text()
    table = plain_table("task", numbers=("own vector", "other vectors", "ratio"))
    table.add_column("largest part: vector, block", overflow="fold")
    for task in result["tasks"]:
        others = [pair for pair in result["pairs"] if pair["task"] == task["task"] and not pair["own"]]
        own, ratio = (format(task[key], digits) if task[key] is not None else "" for key, digits in OWN_FORMATS)
        table.add_row(name_cell(task["task"]), own, f"{task['others']:.3g}", ratio, _main_sources(others))
    yield table
    for block in result["blocks"][:TOP_BLOCKS]:
        yield Text(f"{block['share']:6.1%}  {printable(block['block'])}")
    if result["blocks"]:
        more = f"; --json lists all {len(result['blocks'])} blocks" if len(result["blocks"]) > TOP_BLOCKS else ""
        yield Text(f"blocks with the largest shares of the drift on other tasks{more}", style="dim")
    yield from _ranked_pairs(result)


def _ranked_pairs(result: dict[str, Any]) -> Iterator[Table | Text]:
    """Yields a table of pairs of a vector and another task, in descending order of `aligned` (see `InterferencePair`).

    Each row is one pair. The table contains all pairs whose drift was measured. If no drift was measured, the table
    contains the first `TOP_PAIRS` pairs.
    """
    others = sorted((pair for pair in result["pairs"] if not pair["own"]), key=lambda pair: -pair["aligned"])
    measured = [pair for pair in others if pair["measured"] is not None]
    columns = ("aligned", "predicted", "measured") if measured else ("aligned", "predicted")
    table = plain_table("vector", "task", numbers=columns)
    for pair in measured or others[:TOP_PAIRS]:
        names = (name_cell(pair[key]) for key in ("vector", "task"))
        table.add_row(*names, *(f"{pair[key]:.3g}" for key in columns))
    if others:
        yield Text()
        yield table
        yield Text(
            "sorted by `aligned`, the drift if all blocks changed f in the same direction: (Σ √q)², where q is the "
            "drift of one block",
            style="dim",
        )
    if result["spearman"] is not None and result["spearman_aligned"] is not None:
        yield Text(
            f"Spearman rank correlation with the measured drift on other tasks ({len(measured)} pairs): "
            f"{result['spearman_aligned']:.3f} for aligned, {result['spearman']:.3f} for predicted"
        )


def _format_interference(pair: dict[str, Any]) -> Text:
    return Text(f"[{pair['predicted']:.2g}]" if pair["own"] else f"{pair['predicted']:.2g} ")


def _main_sources(pairs: list[dict[str, Any]]) -> Text:
    """Returns the names of the vector and the block that contribute most to the drift on a task.

    The vector is the one with the largest `aligned` drift. The block has the largest share of this vector's drift.

    Args:
        pairs: The drift that each vector of another task causes on the task.
    """
    if not pairs:
        return Text()
    pair = max(pairs, key=lambda pair: pair["aligned"])
    block = max(pair["blocks"], key=pair["blocks"].__getitem__)
    return Text(printable(f"{pair['vector']}, {block}"))


def _spectra(result: dict[str, Any]) -> Iterator[Table | Text]:
    table = plain_table("block", "side", numbers=("size", "trace", "largest", "effective rank"))
    for block in result["blocks"]:
        numbers = f"{block['trace']:.3g}", f"{block['eigenvalues'][0]:.3g}", f"{block['effective_rank']:.1f}"
        table.add_row(name_cell(block["name"]), block["side"], f"{block['size']:,}", *numbers)
    yield table


TABLES: dict[str, Callable[[dict[str, Any]], Iterator[Table | Text]]] = {
    "disentanglement": _disentanglement,
    "localisation": _localisation,
    "drift": _drift,
    "interference": _interference,
    "spectra": _spectra,
}


Measurement = Literal["disentanglement", "localisation", "drift", "interference", "spectra"]
MEASUREMENT_PANEL = "Measurement"
ALPHAS = "-1:2:0.25"
LAYER_EXAMPLES = 64
TOP_BLOCKS = 5
TOP_PAIRS = 5
"""Maximum number of pairs (a vector and another task) that are listed by `kfacpack measure interference` if no drift is
measured."""
OWN_FORMATS = ("own", ".3g"), ("relative", ".2f")


def measure(
    what: Measurement = typer.Argument(
        ..., metavar="MEASUREMENT", help="One of disentanglement, localisation, drift, interference and spectra."
    ),
    vectors: list[File] | None = typer.Argument(
        None, metavar="FILE.safetensors...", help="Task vectors, each for a single task. For spectra, a bundle."
    ),
    bundle: list[File] | None = option(
        MEASUREMENT_PANEL,
        None,
        "--bundle",
        metavar="FILE.kfac",
        help="drift: bundle of a task on which the drift is predicted and measured; repeatable. interference: bundle "
        "of a single task, or merged bundle; repeatable. spectra: bundle to analyse.",
    ),
    alpha: str | None = option(
        MEASUREMENT_PANEL,
        None,
        "--alpha",
        metavar="α|α,α|FROM:TO:STEP",
        help=f"disentanglement: values of α for both vectors, as a list or a range. [default: {ALPHAS}]",
    ),
    layer_examples: int | None = option(
        MEASUREMENT_PANEL,
        None,
        "--layer-examples",
        min=0,
        metavar="N",
        help="drift: number of examples on which the drift of individual layers is measured; 0 skips this measurement. "
        f"[default: {LAYER_EXAMPLES}]",
    ),
    measured: bool = option(
        MEASUREMENT_PANEL,
        False,
        "--measured",
        help="interference: measure the drift on examples of every task that has its own bundle, and compare it with "
        "the prediction. By default, the drift is measured only on tasks whose data is passed with --data.",
    ),
    model: str = MODEL_NAME,
    weights: str | None = WEIGHTS,
    image_size: int | None = IMAGE_SIZE,
    prompts: PromptStyle | None = PROMPTS,
    device: str = DEVICE,
    dtype: FloatType = DTYPE,
    task: list[str] | None = option(
        DATA_PANEL,
        None,
        "--task",
        metavar="TASK",
        help="localisation: additional task for which there is no vector; repeatable.",
    ),
    data: list[str] | None = option(
        DATA_PANEL, None, "--data", metavar="TASK=DIR", help="Data of a task: a folder or hf://datasets/…; repeatable."
    ),
    split: str = split_option("test"),
    examples: str = examples_option("256"),
    batch_size: int = BATCH_SIZE,
    output: Path | None = output_option("FILE.json", None, "Also write the result to this JSON file."),
    figure: Path | None = option(
        RUN_PANEL, None, "--figure", metavar="FILE.png|svg", help="Also save a figure of the result to this file."
    ),
    as_json: bool = AS_JSON,
    workers: int | None = WORKERS,
    quiet: bool = QUIET,
) -> None:
    """Measure how task vectors affect each other's tasks, or how well a bundle predicts this effect.

    disentanglement: for two vectors, the share of predictions on one vector's task that change when the other vector is
    also added. The shares on the two tasks are summed, for every pair of values of α.

    localisation: the change in the output f that each vector causes on its own task and on other tasks, and how well
    this change separates the tasks (AUROC).

    drift: the change in f that each vector causes on a task, as predicted by the bundle of the task and as measured on
    examples.

    interference: the change in f that each vector causes on each task, and the blocks that contribute most to this
    change. Both are predicted from the bundles alone, without data or a model.

    spectra: the eigenvalues of a bundle's matrices.
    """
    files, bundles = list(vectors or ()), list(bundle or ())
    if what == "spectra":
        files, bundles = [], [*files, *bundles]
    _check_counts(what, files, bundles)
    for flag, value, measurement in (
        ("--alpha", alpha, "disentanglement"),
        ("--layer-examples", layer_examples, "drift"),
        ("--task", task or None, "localisation"),
        ("--measured", measured or None, "interference"),
    ):
        if value is not None and what != measurement:
            raise KfacpackError(f"{flag} applies only to `measure {measurement}`; omit it for {what}")
    _check_outputs(output, figure, [*files, *bundles, *([weights] if weights else ())])
    # Imported here so that --help does not wait for torch.
    import kfacpack as kp

    show = not (quiet or as_json)
    result: Mapping[str, Any]
    if what == "spectra":
        with steps_bar(locate(bundles[0]).name, show=show) as advance:
            result = kp.spectra(kp.load(bundles[0]), on_progress=advance)
    else:
        from kfacpack.estimation.distributed import local_device
        from kfacpack.format.units import parse_alphas
        from kfacpack.models.data_loading import use_workers

        use_workers(workers)
        torch_device, alphas = local_device(device), parse_alphas(alpha or ALPHAS)
        taus, curvatures = _load_vectors(files), _load_bundles(bundles, allow_merged=what == "interference")
        names = list(curvatures) or [*taus, *(task or ())]
        if what == "interference":
            names = _measured_tasks(curvatures, data or (), measured=measured)
        sets: list[EvaluationSet] = []
        loaded_model: Model | None = None
        if names:
            with loading(", ".join([*names, model]), show=show):
                sets = _evaluation_sets(names, data or (), split, examples, model, quiet=quiet)
                loaded_model = load_model_option(model, weights, image_size, dtype, torch_device, prompts=prompts)
        with examples_bar(what, show=show) if names else steps_bar(what, show=show) as advance:
            settings: dict[str, Any] = {"batch_size": batch_size, "on_progress": advance}
            if loaded_model is None or what == "interference":
                result = kp.interference(taus, curvatures, model=loaded_model, evaluation_sets=sets, **settings)
            elif what == "disentanglement":
                first, second = taus.values()
                result = kp.disentanglement(
                    loaded_model, (sets[0], sets[1]), (first, second), alphas=alphas, **settings
                )
            elif what == "localisation":
                result = kp.localisation(loaded_model, sets, taus, **settings)
            else:
                settings["layer_examples"] = LAYER_EXAMPLES if layer_examples is None else layer_examples
                result = kp.drift(loaded_model, sets, taus, curvatures, **settings)
    _write(what, result, output, figure)
    if as_json:
        print_json(result)
    elif show:
        for part in TABLES[what](dict(result)):
            out.print(part)
        if written := [str(path) for path in (output, figure) if path]:
            print_line(f"wrote {' and '.join(written)}")


def _check_counts(what: Measurement, vectors: list[File], bundles: list[File]) -> None:
    """Checks the number of vectors and bundles before any file is opened."""
    expected, valid = {
        "disentanglement": ("two vectors", len(vectors) == 2 and not bundles),
        "localisation": ("at least one vector", bool(vectors) and not bundles),
        "drift": ("at least one vector and one bundle (--bundle)", bool(vectors) and bool(bundles)),
        "interference": ("at least one vector and one bundle (--bundle)", bool(vectors) and bool(bundles)),
        "spectra": ("one bundle", len(bundles) == 1),
    }[what]
    if not valid:
        counts = f"vectors given: {len(vectors)}, bundles given: {len(bundles)}"
        raise KfacpackError(f"measure {what}: expected {expected}; {counts}")


def _check_outputs(output: Path | None, figure: Path | None, inputs: list[File]) -> None:
    if figure and figure.suffix.lower() not in (".png", ".svg"):
        raise KfacpackError(f"{figure}: expected a file name that ends in .png or .svg")
    if output and figure and output.absolute() == figure.absolute():
        raise KfacpackError(f"{output}: --output and --figure name the same file; pass different paths")
    for path in filter(None, (output, figure)):
        check_output(path, inputs)
    if figure:
        require("matplotlib", extra="report", feature="--figure")


def _load_vectors(files: list[File]) -> dict[str, TaskVector]:
    """Returns the task vectors, keyed by task."""
    from kfacpack.vectors.task_vector import TaskVector

    vectors: dict[str, TaskVector] = {}
    for file in files:
        vector = TaskVector.load(file)
        if len(vector.tasks) != 1:
            tasks = printable(", ".join(vector.tasks))
            raise KfacpackError(f"{file}: expected a vector of one task, got {len(vector.tasks)} ({tasks or 'none'})")
        _require_new_task(vectors, vector.tasks[0], file)
        vectors[vector.tasks[0]] = vector
    return vectors


def _load_bundles(files: list[File], *, allow_merged: bool) -> dict[str, Curvature]:
    """Returns the curvatures, keyed by task or, for merged bundles, by the file name without the suffix."""
    from kfacpack.curvature.curvature import load

    curvatures: dict[str, Curvature] = {}
    for file in files:
        curvature = load(file)
        if curvature.about.source is None and not (allow_merged and curvature.about.merge):
            problem = "expected a bundle of one task, got a bundle that is merged or does not name its task"
            if allow_merged:
                problem = "expected a bundle of one task or a merged bundle, got a bundle that does not name its task"
            raise KfacpackError(f"{file}: {problem}")
        name = curvature.about.source.task if curvature.about.source else Path(locate(file).name).stem
        if curvature.about.source is None and name in curvatures:
            raise KfacpackError(f"{file}: there is already a bundle named {printable(name)!r}; rename one of the files")
        _require_new_task(curvatures, name, file)
        curvatures[name] = curvature
    return curvatures


def _measured_tasks(curvatures: Mapping[str, Curvature], data: Sequence[str], *, measured: bool) -> list[str]:
    """Returns the tasks on which `kfacpack measure interference` measures the drift.

    If `measured` is true, these are all tasks that have their own bundle. Otherwise, these are only the tasks that are
    named in `data`, the values of --data.
    """
    tasks = [name for name, curvature in curvatures.items() if curvature.about.source]
    if measured and not tasks:
        problem = "--measured requires a bundle of a single task, but every bundle is merged"
        raise KfacpackError(f"{problem}; pass a bundle of a single task or omit --measured")
    folders = data_folders(tasks, data)
    return [name for name in tasks if measured or name in folders]


def _require_new_task(loaded: Mapping[str, object], task: str, file: File) -> None:
    if task in loaded:
        raise KfacpackError(f"{file}: there is already a file for task {printable(task)!r}; pass one file per task")


def _evaluation_sets(
    names: list[str], data: Sequence[str], split: str, examples: str, model: str, *, quiet: bool
) -> list[EvaluationSet]:
    from kfacpack.evaluation.accuracy import EvaluationSet
    from kfacpack.format.identity import base_task_name
    from kfacpack.tasks.registry import PUBLISHED, TASKS

    folders = data_folders(names, data)
    if repeated := first_duplicate(names):
        problem = "the task is given twice or is already the task of a vector"
        raise KfacpackError(f"--task {printable(repeated)}: {problem}; omit it")
    registered = {**TASKS, **PUBLISHED}
    if unknown := [name for name in names if name not in folders and base_task_name(name) not in registered]:
        name = printable(unknown[0])
        raise KfacpackError(f"unknown task {name!r}; pass its data with --data {name}=DIR")
    tasks = [load_task_option(name, folders.get(name), None, model, quiet=quiet) for name in names]
    return [EvaluationSet.of(task, split, examples) for task in tasks]


def _write(what: Measurement, result: Mapping[str, Any], output: Path | None, figure: Path | None) -> None:
    if output:
        write_atomically(output, f"{json.dumps(result, indent=2)}\n".encode())
    if figure:
        from kfacpack.experiments.figure_style import save
        from kfacpack.experiments.figures import FIGURES

        save(FIGURES[what](result), figure)
