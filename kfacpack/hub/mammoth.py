"""`kp.import_mammoth`: imports published Kronecker factors that have the layout of the framework mammoth.

The factors of a task are stored in five files, PREFIX_aaT.pt, _ggT.pt, _ffT.pt, _num_aaT.pt and _num_ggT.pt, where
PREFIX is DATASET_task_NUMBER. The first three files contain dictionaries that map parameter names of the vision tower
to sums over N examples. The last two files contain N. As in section 6 of the spec, R is the number of positions per
example, a the input of a layer, g the gradient of sᵀf with respect to the output of the layer, and v the gradient of
sᵀf with respect to the parameters:

    aaT = Σ_n 1/R Σ_r a aᵀ     ggT = Σ_{n,s} 1/R Σ_r g gᵀ     for layers that process every token, with their biases
    aaT = Σ_n a aᵀ             ggT = Σ_{n,s} g gᵀ             for the output projection
    ffT = Σ_{n,s} v vᵀ                                        for norms and the class token

The sums over s run either over M random Gaussian directions, without division by M, or over the unit vectors, one for
each component of f. Let w be 1/M in the first case and 1 in the second. Then A is aaT / N, and B is w R/N · ggT
(w/N · ggT for the projection). The block G of a norm or of the class token is w/N · ffT.

In mammoth's vision tower, the projections inside the attention layers and the output projection are linear layers of
their own. Some parameter names therefore differ from those in open_clip.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from kfacpack.curvature.blocks import CurvatureBlock, Kronecker, Whole
from kfacpack.curvature.curvature import Curvature
from kfacpack.curvature.matrices.components import MatrixTensors, asymmetry
from kfacpack.curvature.matrices.dense import Dense
from kfacpack.errors import KfacpackError, printable
from kfacpack.format.container import DOWNLOAD_AGAIN
from kfacpack.format.manifest import About, Estimate, Fisher, FloatType, Join, Piece, Source
from kfacpack.format.reader import Bundle
from kfacpack.hub.importer import (
    SINGLE_TENSOR,
    HubFolder,
    Importer,
    ImportResult,
    UnpickledTensors,
    fetch_files,
    list_files,
    published_folder,
    read_pickle,
)
from kfacpack.models.functional import select_parameters

if TYPE_CHECKING:
    from kfacpack.format.units import OnProgress
    from kfacpack.models.model import Model


TOWER = "visual."
KRONECKER = (
    (r"(transformer\.resblocks\.\d+)\.attn\.in_proj_weight", r"\1.attn.qkv.weight", "in_proj_bias"),
    (r"(transformer\.resblocks\.\d+)\.attn\.out_proj\.weight", r"\1.attn.proj.weight", "bias"),
    (r"(transformer\.resblocks\.\d+\.mlp\.c_(fc|proj))\.weight", r"\1.weight", "bias"),
)
"""Layers that process every token: weight name in open_clip, name in mammoth, and last part of the bias name."""
WHOLE = (
    (r"((transformer\.resblocks\.\d+\.ln_[12]|ln_pre|ln_post)\.(weight|bias))", r"\1", "layer_norm"),
    (r"class_embedding", "cls_token_layer.class_embedding", "token"),
)
"""Parameters whose block is one whole matrix: name in open_clip, name in mammoth, and the operation."""
PROJECTION, MAMMOTH_PROJECTION = "proj", "lin_proj.weight"
ROUNDING = 1e-3
"""Maximum relative rounding error that is expected in float32 sums over a whole dataset."""
OTHER_MODEL = "Pass the model with which the factors were computed"


@dataclass(frozen=True)
class MammothLayer:
    """A block and the name of its factors in mammoth's files."""

    name: str
    operation: str
    join: Join
    mammoth_name: str
    """Name of the factors in mammoth's files."""
    positions: int
    """Number of positions R, or 1 if the sums are not divided by R."""
    kronecker: bool
    """Whether the block is a Kronecker product rather than one whole matrix."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that the block covers."""
        return tuple(piece.parameter for piece in self.join.pieces)


def layers_of(model: Model) -> list[MammothLayer]:
    """Returns the blocks of a model for which factors are published, in the order of the model's state dict.

    Raises:
        KfacpackError: If the model has no CLIP vision tower.
    """
    state = model.module.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items() if name.startswith(TOWER)}
    embedding = shapes.get(f"{TOWER}positional_embedding")
    if embedding is None or len(embedding) != 2 or f"{TOWER}class_embedding" not in shapes:
        problem = f"{model.name} has no vision tower for which factors are published"
        expected = "expected a CLIP model such as ViT-B-32/openai, ViT-B-16/openai or ViT-L-14/openai"
        raise KfacpackError(f"{problem}; {expected}")
    layers = [_layer(name, shape, shapes, embedding[0]) for name, shape in shapes.items()]
    return [layer for layer in layers if layer is not None]


def _layer(
    name: str, shape: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]], positions: int
) -> MammothLayer | None:
    """Returns the block of a parameter, or None if the parameter has no block of its own.

    For example, a bias that is joined to its weight has no block of its own.
    """
    inner = name.removeprefix(TOWER)
    if inner == PROJECTION:
        join = Join(rows=shape[1], columns=shape[0], pieces=(Piece(parameter=name, view="transposed"),))
        return MammothLayer(name, "matmul", join, MAMMOTH_PROJECTION, 1, kronecker=True)
    for pattern, template, bias in KRONECKER:
        if match := re.fullmatch(pattern, inner):
            bias_name = f"{name.rpartition('.')[0]}.{bias}"
            pieces: tuple[Piece, ...] = (Piece(parameter=name),)
            if bias_name in shapes:
                pieces += (Piece(parameter=bias_name, at=(0, shape[1])),)
            join = Join(rows=shape[0], columns=shape[1] + len(pieces) - 1, pieces=pieces)
            return MammothLayer(name, "linear", join, match.expand(template), positions, kronecker=True)
    for pattern, template, operation in WHOLE:
        if match := re.fullmatch(pattern, inner):
            join = Join(rows=shape[0], columns=1, pieces=(Piece(parameter=name, view="column"),))
            return MammothLayer(name, operation, join, match.expand(template), 1, kronecker=False)
    return None


def examples_of(files: Mapping[str, UnpickledTensors]) -> int:
    """Reads the number of examples N.

    Args:
        files: Tensors of the five files, by part (aaT, ggT, ffT, num_aaT, num_ggT).

    Returns:
        The number of examples.

    Raises:
        KfacpackError: If num_aaT or num_ggT is not a positive integer, or if the two numbers differ.
    """
    counts = {}
    for part in ("num_aaT", "num_ggT"):
        tensors = files[part]
        spec = tensors.specs.get(SINGLE_TENSOR)
        if spec is None or spec.shape not in ((), (1,)):
            raise KfacpackError(f"{tensors.origin}: is not a single number; expected the number of examples")
        value = float(tensors[SINGLE_TENSOR].reshape(()).double())
        if not isfinite(value) or value != int(value) or not 0 < value <= 2**53:
            raise KfacpackError(f"{tensors.origin}: records {value:g} examples, expected a positive integer")
        counts[part] = int(value)
    if counts["num_aaT"] != counts["num_ggT"]:
        problem = f"records {counts['num_ggT']} examples for ggT, but the file for aaT records {counts['num_aaT']}"
        cause = "the files are not from the same run. Download all five files again from their publisher"
        raise KfacpackError(f"{files['num_ggT'].origin}: {problem}; {cause}")
    return counts["num_aaT"]


def check(files: Mapping[str, UnpickledTensors], layers: Sequence[MammothLayer], model: Model, examples: int) -> bool:
    """Checks that published factors match a model.

    Args:
        files: Tensors of the five files, by part.
        layers: The model's blocks.
        model: The model.
        examples: The number of examples N.

    Returns:
        Whether it was verified that the factors were computed at the model's weights. False if the files do not contain
        the factors that this check needs.

    Raises:
        KfacpackError: If names, shapes or scaling do not match, or if the factors were computed at different weights.
    """
    _check_names(files, layers, model)
    for layer in layers:
        _check_shapes(files, layer, model)
    _check_ones(files, layers, examples)
    return _compare_weights(files, model)


def _check_names(files: Mapping[str, UnpickledTensors], layers: Sequence[MammothLayer], model: Model) -> None:
    """Checks that the files contain factors for every layer of the model and for no other layers."""
    for part in ("aaT", "ggT", "ffT"):
        expected = {layer.mammoth_name for layer in layers if layer.kronecker == (part != "ffT")}
        tensors = files[part]
        if unknown := sorted(set(tensors.specs) - expected):
            problem = f"has factors for the layer {unknown[0]!r}, which {model.name} does not have"
            raise KfacpackError(f"{tensors.origin}: {problem}. {OTHER_MODEL}")
        if missing := sorted(expected - set(tensors.specs)):
            others = len(missing) - 1
            more = f" and {others} other layer{'s' if others > 1 else ''}" if others else ""
            problem = f"has no factors for {missing[0]!r}{more} of {model.name}"
            raise KfacpackError(f"{tensors.origin}: {problem}. {OTHER_MODEL}")


def _check_shapes(files: Mapping[str, UnpickledTensors], layer: MammothLayer, model: Model) -> None:
    rows, columns = layer.join.rows, layer.join.columns
    for part, side in (("aaT", columns), ("ggT", rows)) if layer.kronecker else (("ffT", rows),):
        spec = files[part].specs[layer.mammoth_name]
        if spec.shape != (side, side) or not spec.dtype.endswith(("F16", "F32", "F64")):
            problem = f"{layer.mammoth_name!r} has dtype {spec.dtype} and shape {list(spec.shape)}"
            expected = f"expected a floating-point tensor of shape {[side, side]} for {layer.name!r} of {model.name}"
            raise KfacpackError(f"{files[part].origin}: {problem}, {expected}. {OTHER_MODEL}")


def _check_ones(files: Mapping[str, UnpickledTensors], layers: Sequence[MammothLayer], examples: int) -> None:
    """Checks the scaling of aaT.

    A bias is joined to its weight as a column whose input a is always 1. The last entry of aaT is therefore
    Σ_n 1/R Σ_r 1, which must equal the number of examples N.
    """
    for layer in layers:
        if layer.kronecker and len(layer.parameters) > 1:
            corner = float(files["aaT"][layer.mammoth_name][-1, -1])
            if not abs(corner - examples) <= ROUNDING * examples:
                expected = f"expected the number of examples, {examples}"
                problem = f"the last entry of {layer.mammoth_name!r} is {corner:g}, {expected}"
                cause = "The sums were not divided by the number of positions, or were computed on other examples"
                raise KfacpackError(f"{files['aaT'].origin}: {problem}. {cause}")


def _compare_weights(files: Mapping[str, UnpickledTensors], model: Model) -> bool:
    """Checks that factors were computed at the model's weights. Returns False if the required factors are missing.

    The gradient h with respect to the output of the last norm is P g, where g is the gradient with respect to the
    output of the projection P. Therefore Σ h hᵀ, which is ffT of the norm's bias, equals P (Σ g gᵀ) Pᵀ. Comparing
    shapes is not enough, because other models of the same width have the same shapes.
    """
    bias = files["ffT"].specs.get("ln_post.bias")
    weight = model.module.state_dict().get(f"{TOWER}{PROJECTION}")
    if bias is None or weight is None or MAMMOTH_PROJECTION not in files["ggT"].specs:
        return False
    projection = weight.detach().double().cpu()
    expected = projection @ files["ggT"][MAMMOTH_PROJECTION].double() @ projection.T
    gap = float((files["ffT"]["ln_post.bias"].double() - expected).norm() / expected.norm())
    if not gap <= 10 * ROUNDING:
        problem = f"the factors were not computed at the weights of {model.name}: their relative difference from the "
        problem += f"factors implied by the model's output projection is {gap:.2g}, expected at most {10 * ROUNDING:g}"
        raise KfacpackError(f"{files['ffT'].origin}: {problem}. {OTHER_MODEL}")
    return True


class ScaledTensors(MatrixTensors):
    """A published factor multiplied by a number, as a float32 tensor.

    The product is computed on every access, so that only one product is in memory at a time.
    """

    def __init__(self, tensors: UnpickledTensors, name: str, factor: float):
        self.specs = {"data": ("F32", tensors.specs[name].shape)}
        self._tensors, self._name, self._factor = tensors, name, factor

    def __getitem__(self, name: str) -> Tensor:
        full = self._tensors[self._name].double()
        gap, largest = asymmetry(full), float(full.abs().amax())
        where = f"{self._tensors.origin}: {self._name!r}"
        if not isfinite(gap) or not isfinite(largest):
            raise KfacpackError(f"{where}: contains NaN or Inf. {DOWNLOAD_AGAIN}")
        if gap > ROUNDING * largest or bool((full.diagonal() < 0).any()):
            problem = "is not a sum of outer products: it is not symmetric, or its diagonal has negative entries"
            raise KfacpackError(f"{where}: {problem}")
        return (full + full.T).mul_(self._factor / 2).float()


def block_of(files: Mapping[str, UnpickledTensors], layer: MammothLayer, examples: int, share: float) -> CurvatureBlock:
    """Converts the factors of a layer into a block.

    Args:
        files: Tensors of the five files, by part.
        layer: The layer.
        examples: The number of examples N.
        share: The number w / N; see the docstring of this module.
    """

    def matrix(part: str, factor: float, positions: int | None) -> Dense:
        components = ScaledTensors(files[part], layer.mammoth_name, factor)
        dense = Dense(components.specs["data"][1][0], components, examples=examples, positions=positions)
        dense.skip_validation()
        return dense

    if not layer.kronecker:
        return CurvatureBlock(layer.name, layer.operation, layer.join, Whole(matrix("ffT", share, None)))
    positions = examples * layer.positions
    B, A = matrix("ggT", share * layer.positions, positions), matrix("aaT", 1 / examples, positions)
    return CurvatureBlock(layer.name, layer.operation, layer.join, Kronecker.of(B, A))


PARTS = ("aaT", "ggT", "ffT", "num_aaT", "num_ggT")
FILE = re.compile(rf"(?P<prefix>.+_task_\d+)_(?P<part>{'|'.join(PARTS)})\.pt")
TASKS = {
    "seq-8vision": ("stanford_cars", "dtd", "eurosat", "gtsrb", "mnist", "resisc45", "sun397", "svhn"),
}
"""For each dataset in mammoth, the names of its tasks in the order of the task numbers."""


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
    """Converts the published factors of one task into a bundle and writes it atomically.

    Args:
        source: The folder with the files, or `hf://owner/repo/folder`.
        model: The model with which the factors were computed. Its weights are compared with the factors.
        output: The bundle to write.
        task: Name of the task in the bundle. If the files belong to a dataset in `TASKS`, the name also selects
            the files.
        files: Common prefix of the names of the files, DATASET_task_NUMBER. Required if the folder contains several
            tasks and `task` does not select one of them.
        fisher: "mc" if the factors were computed with random directions, "exact" if they were computed with all
            directions. The files do not record this.
        samples: Number of random directions for "mc". The files do not record this number.
        params: Names or patterns of the parameters to import. By default, all parameters are imported except those that
            the model family freezes.
        dataset_size: Number of examples in the whole dataset. It determines the weight of the task in a merge.
        on_progress: Called with the number of tensors written so far and the total number of tensors.

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
        raise KfacpackError(f"{location}: {absent[0]!r} was not downloaded. Run the import again")
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
    """Returns the layers whose parameters are selected. For each layer, all parameters or none must be selected."""
    selected = select_parameters(model.module, params, model.frozen)
    published = {name for layer in layers for name in layer.parameters}
    if params is None and (other := [name for name in selected if name not in published]):
        problem = f"no factors are published for the parameter {other[0]!r} of {model.name}"
        raise KfacpackError(f"{problem}. {OTHER_MODEL}, or select parameters with `params`")
    selected_layers = [layer for layer in layers if any(name in selected for name in layer.parameters)]
    for layer in selected_layers:
        if lacking := [name for name in layer.parameters if name not in selected]:
            chosen = next(name for name in layer.parameters if name in selected)
            problem = f"{chosen!r} shares a block with {lacking[0]!r}, which `params` does not select"
            raise KfacpackError(f"{problem}. Select both or neither")
    if not selected_layers:
        raise KfacpackError(f"params {' '.join(params or ())}: no factors are published for any selected parameter")
    return selected_layers


def _require_samples(fisher: Fisher, samples: int | None) -> None:
    if fisher == "mc" and samples is None:
        raise KfacpackError(
            "`samples` is required: the files do not record the number of random directions, by which the sums must be "
            "divided. Pass the value of mammoth's option fisher_num_samples_expectation, which is 1 by default; if "
            "it was 0, set fisher to 'exact' instead"
        )
    if fisher == "exact" and samples is not None:
        raise KfacpackError("`samples` cannot be combined with fisher 'exact', which uses all directions")
    if samples is not None and samples < 1:
        raise KfacpackError(f"samples {samples}: expected at least 1")


def _select_prefix(location: Path | HubFolder, names: Sequence[str], task: str | None, files: str | None) -> str:
    """Returns the common prefix of the names of the five files to import."""
    matches = [match for name in names if (match := FILE.fullmatch(name))]
    prefixes = sorted({match["prefix"] for match in matches}, key=lambda prefix: (len(prefix), prefix))
    if not prefixes:
        expected = "expected files such as seq-8vision_task_0_aaT.pt"
        raise KfacpackError(f"{location}: contains no factors in mammoth's layout; {expected}")
    available = ", ".join(f"{prefix} ({name})" if (name := _task_of(prefix)) else prefix for prefix in prefixes)
    if files is not None:
        if files not in prefixes:
            problem = f"no files have the prefix {printable(files)!r}"
            raise KfacpackError(f"{location}: {problem}; available prefixes: {available}")
        return files
    if task is not None and any(task in TASKS.get(prefix.rpartition("_task_")[0], ()) for prefix in prefixes):
        prefixes = [prefix for prefix in prefixes if _task_of(prefix) == task]
        if not prefixes:
            remedy = "Select files with `files`, or pass another task name"
            problem = f"contains no files for the task {task}"
            raise KfacpackError(f"{location}: {problem}; available prefixes: {available}. {remedy}")
    if len(prefixes) > 1:
        remedy = f"select one with `files`. Available prefixes: {available}"
        raise KfacpackError(f"{location}: contains several tasks; {remedy}")
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
    """Yields the names of blocks, parameters and files that were not imported, each with the reason."""
    for layer in layers:
        if layer not in selected:
            yield layer.name, "not selected"
    published = {name for layer in layers for name in layer.parameters}
    for name, _ in model.module.named_parameters():
        if name.startswith(TOWER) and name not in published:
            yield name, "no factors are published for this parameter"
    for name in names:
        if name not in read:
            match = FILE.fullmatch(name)
            task = match and (_task_of(match["prefix"]) or match["prefix"])
            yield name, f"belongs to {task}" if task else "not a file with factors"


IMPORTERS: dict[str, Importer] = {"mammoth": import_mammoth}
"""Importers by the name of the layout that they read. `kfacpack import` accepts these names."""
