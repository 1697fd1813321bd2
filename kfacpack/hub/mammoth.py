"""The factors that the method's authors publish, as their framework mammoth stores them.

A task is five files, PREFIX_aaT.pt, _ggT.pt, _ffT.pt, _num_aaT.pt and _num_ggT.pt, with PREFIX = DATASET_task_NUMBER.
The first three are dictionaries, from the names of parameters of the vision tower to sums over N examples, the last
two are N. With a, g, v, s as in the spec's section 6, and R positions:

    aaT = Σ_n 1/R Σ_r a aᵀ     ggT = Σ_{n,s} 1/R Σ_r g gᵀ     of layers that see every token, biases joined
    aaT = Σ_n a aᵀ             ggT = Σ_{n,s} g gᵀ             of the output projection
    ffT = Σ_{n,s} v vᵀ                                        of norms and of the class token

with s over M Gaussian directions, by whose number nothing is divided, or over the C unit vectors. So, with w = 1/M
or 1, our A is aaT / N, our B is w R/N · ggT (w/N · ggT for the projection), and our G is w/N · ffT.

Their tower is OpenAI's with its attention replaced by one made of linear layers, which renames parameters.

Factors that others published, into a bundle: a layout of theirs is one file and one line here.
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
    fetch_file,
    listing,
    published_folder,
    read_pickle,
)
from kfacpack.hub.mammoth_factors import TOWER, MammothLayer, block_of, check, examples_of, layers_of
from kfacpack.models.functional import select_parameters

if TYPE_CHECKING:
    from kfacpack.hub.importer import ImportProgress
    from kfacpack.models.model import Model


PARTS = ("aaT", "ggT", "ffT", "num_aaT", "num_ggT")
FILE = re.compile(rf"(?P<prefix>.+_task_\d+)_(?P<part>{'|'.join(PARTS)})\.pt")
TASKS = {
    "seq-8vision": ("stanford_cars", "dtd", "eurosat", "gtsrb", "mnist", "resisc45", "sun397", "svhn"),
}
"""Which task has which number in the data sets that mammoth trains on one after the other."""


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
    progress: ImportProgress = lambda done, total: None,
) -> ImportResult:
    """Write the bundle of one published task, whole or not at all.

    - source: the folder of the files, or hf://owner/repo/folder.
    - model: the one they were computed with; its weights are compared with what the factors show of theirs.
    - task: what the bundle calls it; for a data set in `TASKS`, it also says which files are meant.
    - files: their common start, DATASET_task_NUMBER, where a folder has those of several tasks.
    - fisher, samples: how f was asked, which no file says: "exact", or in so many random directions ("mc").
    - params: names or patterns of the parameters to take; None takes all that the model's family does not freeze.
    - dataset_size: of the whole data set, by which merging weights tasks.
    """
    _require_samples(fisher, samples)
    layers = layers_of(model)
    chosen = _chosen(model, layers, params)
    place, names = listing(published_folder(source))
    prefix = _prefix(place, names, task, files)
    wanted = {part: f"{prefix}_{part}.pt" for part in PARTS}
    if missing := [name for name in wanted.values() if name not in names]:
        raise KfacpackError(f"{place}: {missing[0]!r} is missing. A task is five files: {', '.join(wanted.values())}")
    folder, commit = fetch_file(place, wanted.values())
    if isinstance(place, HubFolder) and (cut := [name for name in wanted.values() if not (folder / name).is_file()]):
        raise KfacpackError(f"{place}: {cut[0]!r} was not fetched. {DOWNLOAD_AGAIN}")
    with read_pickle({part: folder / name for part, name in wanted.items()}, output.absolute().parent) as found:
        examples = examples_of(found)
        compared = check(found, layers, model, examples)
        data = Source(
            task=_task_name(prefix, task),
            dataset=f"{prefix}, of mammoth",
            revision=commit,
            examples=examples,
            dataset_size=dataset_size,
        )
        about = _about(model, chosen, _estimate(found, fisher, samples), data)
        share = 1.0 / (samples or 1) / examples
        curvature = Curvature([block_of(found, layer, examples, share) for layer in chosen], about)
        curvature.save(output, progress=progress)
    Bundle(output)
    return ImportResult(
        path=output,
        task=data.task,
        files=tuple(wanted.values()),
        blocks=len(chosen),
        parameters=len(curvature.parameters),
        examples=examples,
        positions=max(layer.positions for layer in layers),
        weights_compared=compared,
        left_out=tuple(_left_out(model, layers, chosen, names, set(wanted.values()))),
    )


def _chosen(model: Model, layers: Sequence[MammothLayer], params: Sequence[str] | None) -> list[MammothLayer]:
    """The layers whose parameters are wanted; all of a layer's, or none."""
    wanted = select_parameters(model.module, params, model.frozen)
    published = {name for layer in layers for name in layer.parameters}
    if params is None and (other := [name for name in wanted if name not in published]):
        problem = f"the parameter {other[0]!r} of {model.name} is none that factors are published of"
        raise KfacpackError(f"{problem}. Give the model they were computed with, or choose parameters with --params")
    chosen = [layer for layer in layers if any(name in wanted for name in layer.parameters)]
    for layer in chosen:
        if lacking := [name for name in layer.parameters if name not in wanted]:
            problem = f"{layer.name!r} is joined with {lacking[0]!r}, which --params does not name"
            raise KfacpackError(f"{problem}. Name both, or neither")
    if not chosen:
        raise KfacpackError(f"--params {' '.join(params or ())}: no factors are published of these")
    return chosen


def _require_samples(fisher: Fisher, samples: int | None) -> None:
    if fisher == "mc" and samples is None:
        raise KfacpackError(
            "the files do not say in how many random directions f was asked, and are not divided by it: give "
            "--samples M (mammoth's --fisher_num_samples_expectation, 1 if it was not given), or --fisher exact where "
            "that was 0"
        )
    if fisher == "exact" and samples is not None:
        raise KfacpackError("--fisher exact asks f in every direction, so --samples does not go with it")
    if samples is not None and samples < 1:
        raise KfacpackError(f"--samples {samples}: expected at least one direction")


def _prefix(place: Path | HubFolder, names: Sequence[str], task: str | None, files: str | None) -> str:
    """Which five files are meant."""
    matches = [match for name in names if (match := FILE.fullmatch(name))]
    there = sorted({match["prefix"] for match in matches}, key=lambda each: (len(each), each))
    if not there:
        raise KfacpackError(f"{place}: has no file such as seq-8vision_task_0_aaT.pt, of factors that mammoth stored")
    listed = ", ".join(f"{each} ({name})" if (name := _known_task(each)) else each for each in there)
    if files is not None:
        if files not in there:
            raise KfacpackError(f"{place}: has no files that begin with {printable(files)!r}; there are {listed}")
        return files
    if task is not None and any(task in TASKS.get(each.rpartition("_task_")[0], ()) for each in there):
        there = [each for each in there if _known_task(each) == task]
        if not there:
            raise KfacpackError(
                f"{place}: has no files of {task}; there are {listed}. Choose by --files, or another name"
            )
    if len(there) > 1:
        raise KfacpackError(f"{place}: has the files of several tasks; choose one with --files. There are {listed}")
    return there[0]


def _known_task(prefix: str) -> str | None:
    dataset, _, number = prefix.rpartition("_task_")
    tasks = TASKS.get(dataset, ())
    return tasks[int(number)] if int(number) < len(tasks) else None


def _task_name(prefix: str, task: str | None) -> str:
    return task or _known_task(prefix) or prefix


def _about(model: Model, chosen: Sequence[MammothLayer], estimate: Estimate, source: Source) -> About:
    covered = [name for layer in chosen for name in layer.parameters]
    return About(base=model.base(covered), function=model.function, estimate=estimate, source=source)


def _estimate(found: Mapping[str, UnpickledTensors], fisher: Fisher, samples: int | None) -> Estimate:
    words: dict[str, FloatType] = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    sums = words[next(iter(found["ggT"].specs.values())).dtype]
    if fisher == "exact":
        return Estimate(fisher="exact", model_dtype="float32", accumulation_dtype=sums)
    return Estimate(fisher="mc", probe="gaussian", probes=samples, model_dtype="float32", accumulation_dtype=sums)


def _left_out(
    model: Model, layers: Sequence[MammothLayer], chosen: Sequence[MammothLayer], names: Sequence[str], taken: set[str]
) -> Iterator[tuple[str, str]]:
    for layer in layers:
        if layer not in chosen:
            yield layer.name, "not chosen"
    published = {name for layer in layers for name in layer.parameters}
    for name, _ in model.module.named_parameters():
        if name.startswith(TOWER) and name not in published:
            yield name, "not among the published factors"
    for name in names:
        if name not in taken:
            match = FILE.fullmatch(name)
            yield name, f"of {_known_task(match['prefix']) or match['prefix']}" if match else "another file"


IMPORTERS: dict[str, Importer] = {"mammoth": import_mammoth}
"""By what `kfacpack import` calls the layout."""
