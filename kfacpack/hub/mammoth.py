"""`kp.import_mammoth`: imports the factors that the method's authors publish, in the layout of their framework mammoth.

A task consists of five files, PREFIX_aaT.pt, _ggT.pt, _ffT.pt, _num_aaT.pt and _num_ggT.pt, with PREFIX =
DATASET_task_NUMBER. The first three are dictionaries from names of parameters of the vision tower to sums over N
examples; the last two contain N. With a, g, v, s as in section 6 of the spec, and R positions:

    aaT = Σ_n 1/R Σ_r a aᵀ     ggT = Σ_{n,s} 1/R Σ_r g gᵀ     for layers that process every token, biases joined
    aaT = Σ_n a aᵀ             ggT = Σ_{n,s} g gᵀ             for the output projection
    ffT = Σ_{n,s} v vᵀ                                        for norms and the class token

where s runs over M Gaussian directions, without division by M, or over the C unit vectors. With w = 1/M or 1, A is
therefore aaT / N, B is w R/N · ggT (w/N · ggT for the projection), and G is w/N · ffT.

The tower is OpenAI's, with attention implemented by linear layers, which changes the names of parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kfacpack.curvature.curvature import Curvature
from kfacpack.errors import KfacpackError, printable
from kfacpack.format.container import DOWNLOAD_AGAIN
from kfacpack.format.manifest import About, Estimate, Fisher, FloatType, Source
from kfacpack.format.reader import Bundle
from kfacpack.hub.importer import (
    HubFolder,
    Importer,
    ImportResult,
    UnpickledTensors,
    fetch_files,
    list_files,
    published_folder,
    read_pickle,
)
from kfacpack.hub.mammoth_factors import TOWER, MammothLayer, block_of, check, examples_of, layers_of
from kfacpack.models.functional import select_parameters

if TYPE_CHECKING:
    from kfacpack.format.units import OnProgress
    from kfacpack.models.model import Model


PARTS = ("aaT", "ggT", "ffT", "num_aaT", "num_ggT")
FILE = re.compile(rf"(?P<prefix>.+_task_\d+)_(?P<part>{'|'.join(PARTS)})\.pt")
TASKS = {
    "seq-8vision": ("stanford_cars", "dtd", "eurosat", "gtsrb", "mnist", "resisc45", "sun397", "svhn"),
}
"""Names of tasks in the order of their numbers, by dataset of mammoth."""


def import_mammoth(
    source: str | Path,
    model: Model,
    output: Path,
    *,
    task: str | None = None,
    files: str | None = None,
    fisher: Fisher = "mc",
    samples: int | None = None,
    params: Sequence[str] | None = None,
    dataset_size: int | None = None,
    on_progress: OnProgress = lambda done, total: None,
) -> ImportResult:
    """Converts the published factors of one task into a bundle, which is written atomically.

    Args:
        source: The folder with the files, or `hf://owner/repo/folder`.
        model: The model that the factors were computed with. Its weights are compared with the factors.
        output: The bundle to write.
        task: Task name in the bundle. For a dataset in `TASKS`, it also selects the files.
        files: Common prefix of the files, DATASET_task_NUMBER, if the folder contains several tasks.
        fisher: "mc" if the factors were computed with random directions, "exact" if they were computed with all
            directions. The files do not record it.
        samples: Number of random directions for "mc". The files do not record it.
        params: Names or patterns of the parameters to import. Defaults to all that the model's family does not freeze.
        dataset_size: Size of the whole dataset, which is the task's weight in a merge.
        on_progress: Called with the number of written tensors and the number of all tensors.

    Returns:
        A summary of the import.

    Raises:
        KfacpackError: If files are missing or invalid, or if they do not match the model.
        HubError: If files on the Hub cannot be read.

    Example:
        >>> model = kp.load_model("ViT-B-16/openai")
        >>> kp.import_mammoth("hf://owner/repo/kfac", model, Path("dtd.kfac"), task="dtd", samples=1)
    """
    _require_samples(fisher, samples)
    layers = layers_of(model)
    selected = _select_layers(model, layers, params)
    location, names = list_files(published_folder(source))
    prefix = _select_prefix(location, names, task, files)
    file_names = {part: f"{prefix}_{part}.pt" for part in PARTS}
    if missing := [name for name in file_names.values() if name not in names]:
        expected = f"A task consists of five files: {', '.join(file_names.values())}"
        raise KfacpackError(f"{location}: {missing[0]!r} is missing. {expected}")
    folder, commit = fetch_files(location, file_names.values())
    absent = [name for name in file_names.values() if not (folder / name).is_file()]
    if isinstance(location, HubFolder) and absent:
        raise KfacpackError(f"{location}: {absent[0]!r} was not downloaded. {DOWNLOAD_AGAIN}")
    paths = {part: folder / name for part, name in file_names.items()}
    with read_pickle(paths, output.absolute().parent) as tensors:
        examples = examples_of(tensors)
        compared = check(tensors, layers, model, examples)
        data = Source(
            task=_task_name(prefix, task),
            dataset=f"{prefix}, of mammoth",
            revision=commit,
            examples=examples,
            dataset_size=dataset_size,
        )
        about = _about(model, selected, _estimate(tensors, fisher, samples), data)
        share = 1.0 / (samples or 1) / examples
        curvature = Curvature([block_of(tensors, layer, examples, share) for layer in selected], about)
        curvature.save(output, on_progress=on_progress)
    Bundle(output)
    return ImportResult(
        path=output,
        task=data.task,
        files=tuple(file_names.values()),
        blocks=len(selected),
        parameters=len(curvature.parameters),
        examples=examples,
        positions=max(layer.positions for layer in layers),
        weights_compared=compared,
        left_out=tuple(_left_out(model, layers, selected, names, set(file_names.values()))),
    )


def _select_layers(model: Model, layers: Sequence[MammothLayer], params: Sequence[str] | None) -> list[MammothLayer]:
    """Returns the layers with selected parameters, of which either all or none must be selected."""
    selected = select_parameters(model.module, params, model.frozen)
    published = {name for layer in layers for name in layer.parameters}
    if params is None and (other := [name for name in selected if name not in published]):
        problem = f"no factors are published for the parameter {other[0]!r} of {model.name}"
        raise KfacpackError(f"{problem}. Pass the model they were computed with, or select parameters with `params`")
    selected_layers = [layer for layer in layers if any(name in selected for name in layer.parameters)]
    for layer in selected_layers:
        if lacking := [name for name in layer.parameters if name not in selected]:
            problem = f"{layer.name!r} is joined with {lacking[0]!r}, which `params` does not select"
            raise KfacpackError(f"{problem}. Select both or neither")
    if not selected_layers:
        raise KfacpackError(f"params {' '.join(params or ())}: no factors are published for these parameters")
    return selected_layers


def _require_samples(fisher: Fisher, samples: int | None) -> None:
    if fisher == "mc" and samples is None:
        raise KfacpackError(
            "`samples` is required: the files do not record the number of random directions, by which the sums must be "
            "divided. It is mammoth's option fisher_num_samples_expectation, 1 by default; if that was 0, set fisher "
            "to exact"
        )
    if fisher == "exact" and samples is not None:
        raise KfacpackError("`samples` cannot be combined with fisher exact, which uses all directions")
    if samples is not None and samples < 1:
        raise KfacpackError(f"samples {samples}: expected at least 1")


def _select_prefix(location: Path | HubFolder, names: Sequence[str], task: str | None, files: str | None) -> str:
    """Returns the prefix of the five files to import."""
    matches = [match for name in names if (match := FILE.fullmatch(name))]
    prefixes = sorted({match["prefix"] for match in matches}, key=lambda prefix: (len(prefix), prefix))
    if not prefixes:
        raise KfacpackError(f"{location}: contains no factors of mammoth, such as seq-8vision_task_0_aaT.pt")
    available = ", ".join(f"{prefix} ({name})" if (name := _task_of(prefix)) else prefix for prefix in prefixes)
    if files is not None:
        if files not in prefixes:
            raise KfacpackError(f"{location}: no files begin with {printable(files)!r}; available: {available}")
        return files
    if task is not None and any(task in TASKS.get(prefix.rpartition("_task_")[0], ()) for prefix in prefixes):
        prefixes = [prefix for prefix in prefixes if _task_of(prefix) == task]
        if not prefixes:
            remedy = "Select files with `files`, or pass another task name"
            raise KfacpackError(f"{location}: contains no files of {task}; available: {available}. {remedy}")
    if len(prefixes) > 1:
        raise KfacpackError(f"{location}: contains several tasks; select one with `files`. Available: {available}")
    return prefixes[0]


def _task_of(prefix: str) -> str | None:
    dataset, _, number = prefix.rpartition("_task_")
    tasks = TASKS.get(dataset, ())
    return tasks[int(number)] if int(number) < len(tasks) else None


def _task_name(prefix: str, task: str | None) -> str:
    return task or _task_of(prefix) or prefix


def _about(model: Model, layers: Sequence[MammothLayer], estimate: Estimate, source: Source) -> About:
    covered = [name for layer in layers for name in layer.parameters]
    return About(base=model.base(covered), function=model.function, estimate=estimate, source=source)


def _estimate(tensors: Mapping[str, UnpickledTensors], fisher: Fisher, samples: int | None) -> Estimate:
    dtypes: dict[str, FloatType] = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    sums = dtypes[next(iter(tensors["ggT"].specs.values())).dtype]
    if fisher == "exact":
        return Estimate(fisher="exact", model_dtype="float32", accumulation_dtype=sums)
    return Estimate(fisher="mc", probe="gaussian", probes=samples, model_dtype="float32", accumulation_dtype=sums)


def _left_out(
    model: Model, layers: Sequence[MammothLayer], selected: Sequence[MammothLayer], names: Sequence[str], read: set[str]
) -> Iterator[tuple[str, str]]:
    """Yields the names that were not imported, each with the reason."""
    for layer in layers:
        if layer not in selected:
            yield layer.name, "not selected"
    published = {name for layer in layers for name in layer.parameters}
    for name, _ in model.module.named_parameters():
        if name.startswith(TOWER) and name not in published:
            yield name, "not among the published factors"
    for name in names:
        if name not in read:
            match = FILE.fullmatch(name)
            task = match and (_task_of(match["prefix"]) or match["prefix"])
            yield name, f"belongs to {task}" if task else "not a file of factors"


IMPORTERS: dict[str, Importer] = {"mammoth": import_mammoth}
"""Importers by the name of their layout in `kfacpack import`."""
