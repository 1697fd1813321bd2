"""What a bundle or a vector says of itself, in words: for `inspect`, for cards, for whoever pulls it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfacpack.reporting.numbers import human_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kfacpack.bundle.manifest import Base, Function, Source
    from kfacpack.bundle.reader import Bundle
    from kfacpack.vectors.leaf import VectorFile


def bundle_facts(bundle: Bundle) -> Iterator[tuple[str, str]]:
    manifest = bundle.manifest
    base, function, source, estimate, merge = (
        manifest.base, manifest.function, manifest.source, manifest.estimate, manifest.merge,
    )  # fmt: skip
    if source:
        yield from _source_facts(source)
    if merge:
        parents = some(f"{parent.task or parent.sha256[:12]} × {parent.weight:.4g}" for parent in merge.parents)
        rank = f" of rank {merge.rank}" if merge.rank else ""
        yield "merged", f"{merge.rule}{rank}: {parents}"
    yield from _model_facts(base, function)
    if scale := manifest.output_scale:
        yield "scale of f", f"E‖f‖² = {scale.mean_square:.4g}, variance {scale.variance:.4g}"
    elif not function.normalized:
        yield "scale of f", "not recorded; a penalty uses the absolute drift"
    if estimate:
        probes = f"{estimate.probes} {estimate.probe} probes per example" if estimate.probes else None
        seed = f"seed {estimate.seed}" if estimate.seed is not None else None
        model = f"model in {estimate.model_dtype}" if estimate.model_dtype else None
        sums = f"sums in {estimate.accumulation_dtype}" if estimate.accumulation_dtype else None
        yield "estimate", ", ".join(filter(None, [estimate.fisher, probes, seed, model, sums]))
    yield "scaling", f"{manifest.scaling.sharing}, as the true GGN (1/N Σ JᵀJ)"
    promised = sum(matrix.psd for matrix in manifest.matrices)
    if promised < len(manifest.matrices):
        yield "psd", f"{promised} of {len(manifest.matrices)} matrices promise to be positive semi-definite"
    if manifest.losses:
        steps = (f"{loss.step} (error of G {relative_error(loss.frobenius)})" for loss in manifest.losses)
        yield "lossy steps", some(steps)
    dense = bundle.dense_bytes
    share = f", {bundle.nbytes / dense:.1%} of dense float32 ({human_bytes(dense)})" if bundle.nbytes < dense else ""
    yield "size", human_bytes(bundle.nbytes) + share
    yield "content", f"sha256 {bundle.digest}"
    yield "format", f"{manifest.version}" + (f", written by {manifest.producer}" if manifest.producer else "")


def vector_facts(file: VectorFile) -> Iterator[tuple[str, str]]:
    manifest = file.manifest
    if len(manifest.tasks) == 1:
        yield from _source_facts(manifest.tasks[0].source)
    else:
        yield "tasks", some((task.name for task in manifest.tasks), most=64)
    if manifest.addends:
        method = manifest.method.name if manifest.method else "sum"
        parts = (f"{'+'.join(each.tasks) or each.sha256[:12]} × {each.coefficient:.4g}" for each in manifest.addends)
        yield "merged", f"{method}: {some(parts)}"
    yield from _model_facts(manifest.base, manifest.function)
    yield "regime", REGIMES[manifest.regime]
    for task in manifest.tasks if len(manifest.tasks) == 1 else ():
        if task.training:
            settings = [f"{key} {value}" for key, value in task.training.settings.items()]
            held = f"under {len(task.training.bundles)} bundles" if task.training.bundles else "without a penalty"
            seed = [] if task.training.seed is None else [f"seed {task.training.seed}"]
            yield "training", some([held, *seed, *settings])
    if heads := [task.name for task in manifest.tasks if task.head]:
        yield "heads", some(heads)
    yield "size", f"{human_bytes(file.nbytes)}, {len(manifest.base.parameters)} parameters"
    yield "content", f"sha256 {file.digest}"
    yield "format", f"{manifest.version}" + (f", written by {manifest.producer}" if manifest.producer else "")


REGIMES = {
    "linear": "linear: trained and used in the linearised model",
    "full": "full: all parameters of the model itself",
    "attention": "attention: the attention layers of the model itself",
}


def _source_facts(source: Source) -> Iterator[tuple[str, str]]:
    yield "task", source.task
    data = [source.dataset, source.split, f"revision {source.revision}" if source.revision else None]
    if any(data):
        yield "data", ", ".join(filter(None, data))
    if source.examples is not None:
        size = f" of {source.dataset_size:,}" if source.dataset_size is not None else ""
        yield "examples", f"{source.examples:,}{size}"
    if source.preprocessing:
        yield "preprocessing", source.preprocessing
    if source.license:
        yield "license", source.license


def _model_facts(base: Base, function: Function) -> Iterator[tuple[str, str]]:
    revision = f", {base.revision}" if base.revision else ""
    yield "base model", f"{base.name} ({base.family}{revision})"
    yield "", f"sha256 {base.sha256[:16]}… over {len(base.parameters)} parameters"
    normalized = "normalised " if function.normalized else ""
    detail = f": {function.detail}" if function.detail else ""
    yield "f", f"{normalized}{function.output} of width {function.width}{detail}"


def some(words: Iterable[str], most: int = 16) -> str:
    """The first of them, and how many more there are: a table is for reading."""
    found = list(words)
    more = [f"and {len(found) - most} more"] if len(found) > most else []
    return ", ".join([*found[:most], *more])


def relative_error(relative: float | None) -> str:
    return "not measured" if relative is None else f"{relative:.2g}"
