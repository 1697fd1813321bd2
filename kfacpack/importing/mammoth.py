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
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from kfacpack.bundle.container import DOWNLOAD_AGAIN
from kfacpack.bundle.manifest import About, Estimate, Fisher, FloatType, Join, Piece, Source
from kfacpack.bundle.reader import Bundle
from kfacpack.curvature.block import CurvatureBlock, Kronecker, Whole
from kfacpack.curvature.curvature import Curvature
from kfacpack.curvature.matrices import Dense
from kfacpack.curvature.matrices.components import Components
from kfacpack.curvature.matrices.triangle import asymmetry
from kfacpack.errors import KfacpackError, printable
from kfacpack.function.parameters import choose
from kfacpack.importing.imported import Imported
from kfacpack.importing.sources import HubFolder, fetched, listing, place_of
from kfacpack.importing.unpickling import SINGLE, Tensors, unpickled

if TYPE_CHECKING:
    from kfacpack.importing.imported import Progress
    from kfacpack.models import Model

PARTS = ("aaT", "ggT", "ffT", "num_aaT", "num_ggT")
FILE = re.compile(rf"(?P<prefix>.+_task_\d+)_(?P<part>{'|'.join(PARTS)})\.pt")
TASKS = {
    "seq-8vision": ("stanford_cars", "dtd", "eurosat", "gtsrb", "mnist", "resisc45", "sun397", "svhn"),
}
"""Which task has which number in the data sets that mammoth trains on one after the other."""

TOWER = "visual."
KRONECKER = (
    (r"(transformer\.resblocks\.\d+)\.attn\.in_proj_weight", r"\1.attn.qkv.weight", "in_proj_bias"),
    (r"(transformer\.resblocks\.\d+)\.attn\.out_proj\.weight", r"\1.attn.proj.weight", "bias"),
    (r"(transformer\.resblocks\.\d+\.mlp\.c_(fc|proj))\.weight", r"\1.weight", "bias"),
)
"""open_clip's name of a weight, theirs, and the last part of its bias's name: layers that see every token."""
WHOLE = (
    (r"((transformer\.resblocks\.\d+\.ln_[12]|ln_pre|ln_post)\.(weight|bias))", r"\1", "layer_norm"),
    (r"class_embedding", "cls_token_layer.class_embedding", "token"),
)
PROJECTION, THEIR_PROJECTION = "proj", "lin_proj.weight"
ROUNDING = 1e-3
"""How far numbers may be off that were added up in float32 over a whole data set."""


@dataclass(frozen=True)
class Layer:
    """A block of ours, and what is to be known of it there."""

    name: str
    operation: str
    join: Join
    theirs: str
    positions: int
    """R, or 1 where nothing is divided by it."""
    kronecker: bool

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(piece.parameter for piece in self.join.pieces)


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
    progress: Progress = lambda done, total: None,
) -> Imported:
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
    place, names = listing(place_of(source))
    prefix = _prefix(place, names, task, files)
    wanted = {part: f"{prefix}_{part}.pt" for part in PARTS}
    if missing := [name for name in wanted.values() if name not in names]:
        raise KfacpackError(f"{place}: {missing[0]!r} is missing. A task is five files: {', '.join(wanted.values())}")
    folder, commit = fetched(place, wanted.values())
    if isinstance(place, HubFolder) and (cut := [name for name in wanted.values() if not (folder / name).is_file()]):
        raise KfacpackError(f"{place}: {cut[0]!r} was not fetched. {DOWNLOAD_AGAIN}")
    with unpickled({part: folder / name for part, name in wanted.items()}, output.absolute().parent) as found:
        examples = _examples(found)
        compared = _check(found, layers, model, examples)
        data = Source(
            task=_task_name(prefix, task),
            dataset=f"{prefix}, of mammoth",
            revision=commit,
            examples=examples,
            dataset_size=dataset_size,
        )
        about = _about(model, chosen, _estimate(found, fisher, samples), data)
        share = 1.0 / (samples or 1) / examples
        curvature = Curvature([_block(found, layer, examples, share) for layer in chosen], about)
        curvature.save(output, progress=progress)
    Bundle(output)
    return Imported(
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


def layers_of(model: Model) -> list[Layer]:
    """Every block that is published of such a model, in the order of its state dict."""
    shapes = {name: tuple(each.shape) for name, each in model.module.state_dict().items() if name.startswith(TOWER)}
    places = shapes.get(f"{TOWER}positional_embedding")
    if places is None or len(places) != 2 or f"{TOWER}class_embedding" not in shapes:
        problem = f"{model.name} has no vision tower like those that the factors are published of"
        raise KfacpackError(f"{problem}. They are of CLIP's ViT: ViT-B-32/openai, ViT-B-16/openai, ViT-L-14/openai")
    found = [_layer(name, shape, shapes, places[0]) for name, shape in shapes.items()]
    return [layer for layer in found if layer is not None]


def _layer(name: str, shape: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]], positions: int) -> Layer | None:
    inner = name.removeprefix(TOWER)
    if inner == PROJECTION:
        join = Join(rows=shape[1], columns=shape[0], pieces=(Piece(parameter=name, view="transposed"),))
        return Layer(name, "matmul", join, THEIR_PROJECTION, 1, kronecker=True)
    for pattern, theirs, bias in KRONECKER:
        if match := re.fullmatch(pattern, inner):
            beside = f"{name.rpartition('.')[0]}.{bias}"
            pieces: tuple[Piece, ...] = (Piece(parameter=name),)
            if beside in shapes:
                pieces += (Piece(parameter=beside, at=(0, shape[1])),)
            join = Join(rows=shape[0], columns=shape[1] + len(pieces) - 1, pieces=pieces)
            return Layer(name, "linear", join, match.expand(theirs), positions, kronecker=True)
    for pattern, theirs, operation in WHOLE:
        if match := re.fullmatch(pattern, inner):
            join = Join(rows=shape[0], columns=1, pieces=(Piece(parameter=name, view="column"),))
            return Layer(name, operation, join, match.expand(theirs), 1, kronecker=False)
    return None


def _chosen(model: Model, layers: Sequence[Layer], params: Sequence[str] | None) -> list[Layer]:
    """The layers whose parameters are wanted; all of a layer's, or none."""
    wanted = choose(model.module, params, model.frozen)
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


def _examples(found: Mapping[str, Tensors]) -> int:
    """N."""
    counts = {}
    for part in ("num_aaT", "num_ggT"):
        tensors = found[part]
        spec = tensors.specs.get(SINGLE)
        if spec is None or spec.shape not in ((), (1,)):
            raise KfacpackError(f"{tensors.origin}: expected one number, how many examples were added up")
        value = float(tensors[SINGLE].reshape(()).double())
        if not isfinite(value) or value != int(value) or not 0 < value <= 2**53:
            raise KfacpackError(f"{tensors.origin}: says {value:g} examples, expected a positive whole number")
        counts[part] = int(value)
    if counts["num_aaT"] != counts["num_ggT"]:
        said = f"aaT is of {counts['num_aaT']} examples and ggT of {counts['num_ggT']}"
        raise KfacpackError(f"{found['num_ggT'].origin}: {said}; the files are not of one run. {DOWNLOAD_AGAIN}")
    return counts["num_aaT"]


def _check(found: Mapping[str, Tensors], layers: Sequence[Layer], model: Model, examples: int) -> bool:
    """Refuse factors that are not of such a model; whether they are of its weights, if they show it."""
    _check_names(found, layers, model)
    for layer in layers:
        _check_shapes(found, layer, model)
    _check_ones(found, layers, examples)
    return _compare_weights(found, model)


def _check_names(found: Mapping[str, Tensors], layers: Sequence[Layer], model: Model) -> None:
    """Every layer's factors are there, and no others."""
    for part in ("aaT", "ggT", "ffT"):
        expected = {layer.theirs for layer in layers if layer.kronecker == (part != "ffT")}
        tensors = found[part]
        if unknown := sorted(set(tensors.specs) - expected):
            problem = f"has factors of {unknown[0]!r}, which {model.name} has not"
            raise KfacpackError(f"{tensors.origin}: {problem}. Are they of another model? Give it with --model")
        if missing := sorted(expected - set(tensors.specs)):
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            problem = f"has no factor of {missing[0]!r}{more}, which {model.name} has"
            raise KfacpackError(f"{tensors.origin}: {problem}. Are they of another model? Give it with --model")


def _check_shapes(found: Mapping[str, Tensors], layer: Layer, model: Model) -> None:
    rows, columns = layer.join.rows, layer.join.columns
    for part, side in (("aaT", columns), ("ggT", rows)) if layer.kronecker else (("ffT", rows),):
        spec = found[part].specs[layer.theirs]
        if spec.shape != (side, side) or not spec.dtype.endswith(("F16", "F32", "F64")):
            problem = f"{layer.theirs!r} is {spec.dtype} of shape {list(spec.shape)}"
            expected = f"{model.name} needs numbers of shape {[side, side]} for {layer.name!r}"
            raise KfacpackError(f"{found[part].origin}: {problem}, {expected}. Are they of another model?")


def _check_ones(found: Mapping[str, Tensors], layers: Sequence[Layer], examples: int) -> None:
    """A bias's input is one: Σ_n 1/R Σ_r 1 is N, or the sums were not divided as they should be."""
    for layer in layers:
        if layer.kronecker and len(layer.parameters) > 1:
            corner = float(found["aaT"][layer.theirs][-1, -1])
            if not abs(corner - examples) <= ROUNDING * examples:
                problem = (
                    f"the last number of {layer.theirs!r} is {corner:g}, expected {examples}, that of the examples"
                )
                cause = "The sums were divided by something else than the number of positions, or are of other examples"
                raise KfacpackError(f"{found['aaT'].origin}: {problem}. {cause}")


def _compare_weights(found: Mapping[str, Tensors], model: Model) -> bool:
    """Whether the factors are of these weights, from what they say themselves.

    The gradient h at the last norm's output is P g, with g that at the projection's and P the projection: Σ h hᵀ, which
    is what ffT has for the norm's bias, is P (Σ g gᵀ) Pᵀ. Towers of one width have the same shapes, but not the same P.
    """
    theirs = found["ffT"].specs.get("ln_post.bias")
    weight = model.module.state_dict().get(f"{TOWER}{PROJECTION}")
    if theirs is None or weight is None or THEIR_PROJECTION not in found["ggT"].specs:
        return False
    projection = weight.detach().double().cpu()
    expected = projection @ found["ggT"][THEIR_PROJECTION].double() @ projection.T
    gap = float((found["ffT"]["ln_post.bias"].double() - expected).norm() / expected.norm())
    if not gap <= 10 * ROUNDING:
        problem = f"the factors were not computed at the weights of {model.name}: they differ from what its output "
        problem += f"projection makes of them by {gap:.2g} of their size"
        raise KfacpackError(f"{found['ffT'].origin}: {problem}. Give the model and tag that they are of")
    return True


def _about(model: Model, chosen: Sequence[Layer], estimate: Estimate, source: Source) -> About:
    covered = [name for layer in chosen for name in layer.parameters]
    return About(base=model.base(covered), function=model.function, estimate=estimate, source=source)


def _estimate(found: Mapping[str, Tensors], fisher: Fisher, samples: int | None) -> Estimate:
    words: dict[str, FloatType] = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    sums = words[next(iter(found["ggT"].specs.values())).dtype]
    if fisher == "exact":
        return Estimate(fisher="exact", model_dtype="float32", accumulation_dtype=sums)
    return Estimate(fisher="mc", probe="gaussian", probes=samples, model_dtype="float32", accumulation_dtype=sums)


class Scaled(Components):
    """A factor times a number, float32; made each time it is read, so that no more than one is in memory."""

    def __init__(self, tensors: Tensors, name: str, factor: float):
        self.specs = {"data": ("F32", tensors.specs[name].shape)}
        self._tensors, self._name, self._factor = tensors, name, factor

    def __getitem__(self, name: str) -> Tensor:
        full = self._tensors[self._name].double()
        gap, largest = asymmetry(full), float(full.abs().amax())
        where = f"{self._tensors.origin}: {self._name!r}"
        if not isfinite(gap) or not isfinite(largest):
            raise KfacpackError(f"{where}: has numbers that are not finite. {DOWNLOAD_AGAIN}")
        if gap > ROUNDING * largest or bool((full.diagonal() < 0).any()):
            raise KfacpackError(f"{where}: is no sum of squares: not symmetric, or negative on its diagonal")
        return (full + full.T).mul_(self._factor / 2).float()


def _block(found: Mapping[str, Tensors], layer: Layer, examples: int, share: float) -> CurvatureBlock:
    """`share` is w / N."""

    def matrix(part: str, factor: float, positions: int | None) -> Dense:
        components = Scaled(found[part], layer.theirs, factor)
        made = Dense(components.specs["data"][1][0], components, examples=examples, positions=positions)
        made.take_for_sound()
        return made

    if not layer.kronecker:
        return CurvatureBlock(layer.name, layer.operation, layer.join, Whole(matrix("ffT", share, None)))
    places = examples * layer.positions
    B, A = matrix("ggT", share * layer.positions, places), matrix("aaT", 1 / examples, places)
    return CurvatureBlock(layer.name, layer.operation, layer.join, Kronecker.of(B, A))


def _left_out(
    model: Model, layers: Sequence[Layer], chosen: Sequence[Layer], names: Sequence[str], taken: set[str]
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
