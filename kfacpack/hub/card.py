"""Model cards and summaries of bundles and task vectors, generated from their manifests.

The generated part of a card lies between two marker comments and is replaced by every push. Text outside the markers
and unknown metadata are kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kfacpack.errors import HubError, abbreviate, counted, first_line
from kfacpack.format.identity import base_task_name
from kfacpack.format.reference import COMMIT, Reference
from kfacpack.format.units import human_bytes
from kfacpack.tasks.registry import PUBLISHED, TASKS

if TYPE_CHECKING:
    from huggingface_hub import ModelCard

    from kfacpack.format.manifest import Base, Function, Source
    from kfacpack.format.reader import Bundle
    from kfacpack.format.vector_manifest import CheckpointEntry, VectorManifest
    from kfacpack.hub.repository import Artifact
    from kfacpack.vectors.storage import VectorFile


def bundle_summary(bundle: Bundle) -> Iterator[tuple[str, str]]:
    """Summarises a bundle for `kfacpack inspect`, `kfacpack pull` and model cards.

    Yields:
        Pairs of a label and a value.
    """
    manifest = bundle.manifest
    base, function, source, estimate, merge = (
        manifest.base, manifest.function, manifest.source, manifest.estimate, manifest.merge,
    )  # fmt: skip
    if source:
        yield from _summarise_source(source)
    if merge:
        parents = abbreviate(f"{parent.task or parent.sha256[:12]} × {parent.weight:.4g}" for parent in merge.parents)
        rank = f" of rank {merge.rank}" if merge.rank else ""
        yield "merged", f"{merge.rule}{rank}: {parents}"
    yield from _summarise_model(base, function)
    if scale := manifest.output_scale:
        yield "scale of f", f"E‖f‖² = {scale.mean_square:.4g}, variance {scale.variance:.4g}"
    elif not (function.normalized or manifest.metric):
        yield "scale of f", "not recorded; penalties use the absolute drift"
    if estimate:
        probe = f"{estimate.probe} probe{'s' if estimate.probes != 1 else ''} per example"
        probes = f"{estimate.probes} {probe}" if estimate.probes else None
        seed = f"seed {estimate.seed}" if estimate.seed is not None else None
        model = f"model in {estimate.model_dtype}" if estimate.model_dtype else None
        sums = f"sums in {estimate.accumulation_dtype}" if estimate.accumulation_dtype else None
        yield "estimate", ", ".join(filter(None, [estimate.fisher, probes, seed, model, sums]))
    if manifest.metric:
        yield "metric", f"{manifest.metric}: ½ τᵀGτ approximates a KL divergence in nats"
    yield "scaling", f"{manifest.scaling.sharing}, scaled like the true GGN (1/N Σ JᵀJ)"
    psd = sum(matrix.psd for matrix in manifest.matrices)
    if psd < len(manifest.matrices):
        yield "psd", f"guaranteed to be positive semi-definite: {psd} of {len(manifest.matrices)} matrices"
    if manifest.losses:
        steps = (f"{loss.step} (error of G {relative_error(loss.frobenius)})" for loss in manifest.losses)
        yield "lossy steps", abbreviate(steps)
    dense = bundle.dense_bytes
    share = f", {bundle.nbytes / dense:.1%} of dense float32 ({human_bytes(dense)})" if bundle.nbytes < dense else ""
    yield "size", human_bytes(bundle.nbytes) + share
    yield "content", f"sha256 {bundle.digest}"
    yield "format", f"{manifest.version}" + (f", written by {manifest.producer}" if manifest.producer else "")


def vector_summary(file: VectorFile) -> Iterator[tuple[str, str]]:
    """Summarises a task vector for `kfacpack inspect`, `kfacpack pull` and model cards.

    Yields:
        Pairs of a label and a value.
    """
    manifest = file.manifest
    if len(manifest.tasks) == 1:
        yield from _summarise_source(manifest.tasks[0].source)
    else:
        yield "tasks", abbreviate((task.name for task in manifest.tasks), limit=64)
    if manifest.addends:
        method = manifest.method.name if manifest.method else "sum"
        parts = (
            f"{'+'.join(addend.tasks) or addend.sha256[:12]} × {addend.coefficient:.4g}" for addend in manifest.addends
        )
        yield "merged", f"{method}: {abbreviate(parts)}"
    if manifest.checkpoints:
        yield "extracted from", abbreviate(map(summarise_checkpoint, manifest.checkpoints))
    yield from _summarise_model(manifest.base, manifest.function)
    yield "regime", REGIME_DESCRIPTIONS.get(manifest.regime, manifest.regime)
    for task in manifest.tasks if len(manifest.tasks) == 1 else ():
        if task.training:
            settings = [f"{key} {value}" for key, value in task.training.settings.items()]
            bundles = len(task.training.bundles)
            penalty = f"penalty from {bundles} bundle{'s' if bundles > 1 else ''}" if bundles else "without a penalty"
            seed = [] if task.training.seed is None else [f"seed {task.training.seed}"]
            yield "training", abbreviate([penalty, *seed, *settings])
    if heads := [
        f"{task.name} ({task.head.origin}, {counted(len(task.head.classes), 'class', 'classes')})"
        for task in manifest.tasks
        if task.head
    ]:
        yield "heads", abbreviate(heads)
    if manifest.storage:
        yield "storage", ", ".join(_summarise_storage(manifest))
    yield "size", f"{human_bytes(file.nbytes)}, {counted(len(manifest.base.parameters), 'parameter')}"
    yield "content", f"sha256 {file.digest}"
    yield "format", f"{manifest.version}" + (f", written by {manifest.producer}" if manifest.producer else "")


def summarise_checkpoint(checkpoint: CheckpointEntry) -> str:
    """Returns the location of a checkpoint and the beginning of the digest of its first file."""
    kind = "adapter " if checkpoint.kind == "adapter" else ""
    more = len(checkpoint.files) - 1
    # An adapter consists of weights and a config, so a single further file is expected.
    others = "" if more <= (1 if kind else 0) else f" and {more} more file{'s' if more > 1 else ''}"
    return f"{kind}{checkpoint.location} (sha256 {checkpoint.files[0].sha256[:16]}…{others})"


def _summarise_storage(manifest: VectorManifest) -> Iterator[str]:
    """Yields one description for each storage form, with the number of parameters that are stored in this form."""
    ranks = [entry.rank for entry in manifest.storage if entry.rank]
    if ranks:
        span = f"{min(ranks)}" if min(ranks) == max(ranks) else f"{min(ranks)} to {max(ranks)}"
        yield f"{len(ranks)} parameter{'s' if len(ranks) > 1 else ''} as factors of rank {span}"
    if unchanged := sum(entry.rank == 0 for entry in manifest.storage):
        yield f"{unchanged} unchanged"
    if entries := [entry.entries for entry in manifest.storage if entry.entries is not None]:
        yield f"{len(entries)} sparse, with {(total := sum(entries)):,} element{'s' if total != 1 else ''}"
    if dense := len(manifest.base.parameters) - len(ranks) - unchanged - len(entries):
        exact = sum(entry.remainder is not None for entry in manifest.storage)
        yield f"{dense} dense" + (f" ({exact} with a remainder)" if exact else "")


REGIME_DESCRIPTIONS = {
    "linear": "linear: trained and applied in the linearised model",
    "full": "full: all parameters, without linearisation",
    "attention": "attention: the attention layers, without linearisation",
    "sparse": "sparse: the least sensitive weights, without linearisation",
}
"""Descriptions of the training regimes, keyed by their names in manifests."""


def _summarise_source(source: Source) -> Iterator[tuple[str, str]]:
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


def _summarise_model(base: Base, function: Function) -> Iterator[tuple[str, str]]:
    revision = f", {base.revision}" if base.revision else ""
    yield "base model", f"{base.name} ({base.family}{revision})"
    yield "", f"sha256 {base.sha256[:16]}… over {counted(len(base.parameters), 'parameter')}"
    normalized = "normalised " if function.normalized else ""
    detail = f": {function.detail}" if function.detail else ""
    yield "f", f"{normalized}{function.output} of width {function.width}{detail}"


def relative_error(relative: float | None) -> str:
    """Formats a relative error. None is formatted as `not measured`."""
    return "not measured" if relative is None else f"{relative:.2g}"


BEGIN = "<!-- kfacpack begins: generated by `kfacpack push`; text outside of these comments is kept -->"
END = "<!-- kfacpack ends -->"
_GENERATED_SECTION = re.compile(r"<!-- kfacpack begins.*?-->.*?<!-- kfacpack ends -->", re.DOTALL)

TAGS = ("kfac", "task-arithmetic")
BASE_TAG, TASK_TAG = "kfac-base:", "kfac-task:"
"""Prefixes of the tags for the base model and the tasks. The Hub's own tag `base_model` accepts only Hub ids."""
_MAX_SECTIONS = 64
"""Maximum number of files that have their own section in a model card."""


def card_for(
    repository: str,
    items: Sequence[Artifact],
    existing: str | None = None,
    *,
    revision: str | None = None,
    license: str | None = None,
    base_model: str | None = None,
) -> str:
    """Creates or updates the model card of a repository.

    Args:
        repository: Name of the repository, `owner/repo`.
        items: The bundles and task vectors of the repository.
        existing: Text of the current card, if there is one.
        revision: Branch from which the usage examples load the files.
        license: License identifier for the metadata. By default, an existing license is kept.
        base_model: Hub id of the base model for the metadata. By default, existing ids are kept, and the ids of
            the files' base models are added.

    Returns:
        The text of the card.

    Raises:
        HubError: If the metadata of the existing card cannot be parsed.
    """
    generated = f"{BEGIN}\n\n{_body(repository, items, revision)}\n{END}"
    card = _parse(
        repository, existing if existing is not None else f"---\n{{}}\n---\n\n# {repository}\n\n{generated}\n"
    )
    text = card.text
    # The replacement is a function, so that backslashes are not interpreted as group references.
    card.text = (
        _GENERATED_SECTION.sub(lambda _: generated, text, count=1)
        if _GENERATED_SECTION.search(text)
        else f"{text.rstrip()}\n\n{generated}\n"
    )
    _set_metadata(card, items, license, base_model)
    return str(card)


def _parse(repository: str, content: str) -> ModelCard:
    from huggingface_hub import ModelCard
    from yaml import YAMLError

    try:
        return ModelCard(content if content.lstrip().startswith("---") else f"---\n{{}}\n---\n{content}")
    except (ValueError, YAMLError) as error:
        problem = f"the metadata at the top of README.md cannot be parsed: {first_line(error)}"
        raise HubError(repository, problem, "Correct the metadata on the Hub and push again") from error


def _set_metadata(card: ModelCard, items: Sequence[Artifact], license: str | None, base_model: str | None) -> None:
    data: Any = card.data  # its declared type lacks the fields of ModelCardData
    kept = [tag for tag in _listed(data.tags) if not tag.startswith((BASE_TAG, TASK_TAG))]
    bases = [f"{BASE_TAG}{item.base.name}" for item in items]
    tasks = [f"{TASK_TAG}{task}" for item in items for task in item.tasks]
    data.tags = _unique([*kept, *TAGS, *bases, *tasks])
    data.library_name = data.library_name or "kfacpack"
    ids = [base_model] if base_model else [model for item in items if (model := hub_id(item.base))]
    models = _unique([*([] if base_model else _listed(data.base_model)), *ids])
    data.base_model = models[0] if len(models) == 1 else models or None
    datasets = [dataset for item in items for source in item.sources if (dataset := dataset_id(source))]
    data.datasets = _unique([*_listed(data.datasets), *datasets]) or None
    data.license = license or data.license


def _listed(value: Any) -> list[str]:
    """Converts a metadata value, which may be None, a string or a list, to a list of strings."""
    return [] if value is None else [value] if isinstance(value, str) else [str(item) for item in value]


def _unique(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


def _body(repository: str, items: Sequence[Artifact], revision: str | None) -> str:
    lines = [
        "Curvature (Kronecker factors) and task vectors for task arithmetic in the format of kfacpack: safetensors "
        "files with a manifest that records their contents, base model and data.",
        "",
        "| file | kind | base model | tasks | size |",
        "|---|---|---|---|---|",
    ]
    for item in items:
        tasks = _cell(", ".join(item.tasks[:16]) + (", …" if len(item.tasks) > 16 else ""))
        size = human_bytes(item.file.nbytes)
        lines.append(f"| {_code(item.name)} | {item.label} | {_cell(item.base.name)} | {tasks} | {size} |")
    for item in items[:_MAX_SECTIONS]:
        lines += ["", *_section(repository, item, revision)]
    return "\n".join(lines) + "\n"


def _section(repository: str, item: Artifact, revision: str | None) -> Iterator[str]:
    location = str(Reference(repository, item.name, revision))
    yield f"## {_code(item.name)}"
    yield ""
    yield from ("```sh", *item.commands(location), "```", "", "```python", *item.python(location), "```", "")
    yield from ("| | |", "|---|---|")
    for label, value in item.summary:
        yield f"| {_LABELS.get(label, label)} | {_cell(value)} |"


_LABELS = {"license": "license of the data", "merged": "merge history"}


def _cell(text: str) -> str:
    """Escapes HTML, links and column separators in text for a table cell, and replaces backticks by apostrophes."""
    for char, escaped in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "\\|"), ("`", "'"), ("[", "\\[")):
        text = text.replace(char, escaped)
    return text


def _code(name: str) -> str:
    return f"`{_cell(name)}`"


_MODEL_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_DATASET_ID = re.compile(r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}")


def hub_id(base: Base) -> str | None:
    """Returns the Hub id of a base model, or None if the weights are random or the Hub id is not known."""
    if base.revision is None or base.revision.startswith("random-") or base.family not in _HUB_IDS:
        return None
    model_id = _HUB_IDS[base.family](base.name, base.revision)
    return model_id if model_id and _MODEL_ID.fullmatch(model_id) else None


@contextmanager
def _importable() -> Iterator[None]:
    """Makes open_clip and timm importable, even if torchvision is a CUDA build and torch is CPU-only."""
    from kfacpack._compat import compiler_deferred, make_torchvision_importable

    with compiler_deferred():
        make_torchvision_importable()
        yield


def _open_clip_id(name: str, tag: str) -> str | None:
    from kfacpack.demo import EMBEDDED_MODELS

    if name in EMBEDDED_MODELS:
        return None
    with _importable():
        import open_clip

    location = open_clip.get_pretrained_cfg(name, tag).get("hf_hub", "")
    return "/".join(location.split("/")[:2]).partition("@")[0] or None


def _timm_id(name: str, tag: str) -> str | None:
    with _importable():
        from timm.models import get_pretrained_cfg, is_model

    architecture = name.partition(".")[0]
    config = get_pretrained_cfg(f"{architecture}.{tag}") if is_model(architecture) else None
    return config.hf_hub_id.partition("@")[0] if config and config.hf_hub_id else None


def _transformers_id(name: str, revision: str) -> str | None:
    # A local directory has no commit.
    return name if COMMIT.fullmatch(revision) else None


_HUB_IDS: dict[str, Callable[[str, str], str | None]] = {
    "open_clip": _open_clip_id,
    "timm": _timm_id,
    "clip": _transformers_id,
    "t5": _transformers_id,
    "lm": _transformers_id,
    "hf": _transformers_id,
}
"""For each model family, the function that takes the name and revision of a model and returns its Hub id."""


def model_option(base: Base) -> str | None:
    """Returns the value of `--model` that selects a base model, or None if the model family is unknown."""
    from kfacpack.demo import EMBEDDED_MODELS
    from kfacpack.models.families import FAMILIES

    prefix = next((family.prefix for family in FAMILIES.values() if family.name == base.family), None)
    if prefix is None:
        return None
    if prefix:
        return f"{prefix}:{base.name}"
    has_tag = base.name not in EMBEDDED_MODELS and base.revision and not base.revision.startswith("random-")
    return f"{base.name}/{base.revision}" if has_tag else base.name


_TAGGED: dict[str, tuple[str, Callable[[str, str], str | None]]] = {"": ("/", _open_clip_id), "timm": (".", _timm_id)}
"""The separator between name and tag, and the function that returns the Hub id, by prefix of `--model`.

Contains only the prefixes whose model names may have a tag.
"""


def model_from_option(option: str) -> tuple[str, str]:
    """Returns the name and the Hub id of the model that a value of the option `--model` selects.

    Args:
        option: The value of `--model`, such as `ViT-B-32/openai` or `timm:NAME`, or a Hub id.

    Returns:
        The name, which is the value without its prefix, and the Hub id. A value without a pretrained tag may be a name
        or a Hub id, so it is returned as both.
    """
    from kfacpack.models.families import split_spec
    from kfacpack.models.families.transformers_loading import public_name

    prefix, name = split_spec(option)
    if prefix in _TAGGED:
        separator, id_of = _TAGGED[prefix]
        plain, _, tag = name.partition(separator)
        return name, (id_of(plain, tag) if tag else None) or name
    name = public_name(name)
    return name, name


def dataset_id(source: Source) -> str | None:
    """Returns the Hub id of a dataset, or None if the dataset was not loaded from the Hub."""
    return source.dataset if source.dataset and _DATASET_ID.fullmatch(source.dataset) else None


def data_option(source: Source) -> str:
    """Returns the `--data` option that selects a task's data, with a leading space.

    The result is an empty string if the name of the task alone selects the data.
    """
    name = base_task_name(source.task)
    embedded, published = TASKS.get(name), PUBLISHED.get(name)
    if embedded and embedded().source == source.dataset:
        return ""
    dataset, revision = dataset_id(source), source.revision
    if published and not dataset:
        dataset, revision = published.repository, None  # a local copy of the published dataset
    if not dataset:
        return " --data DIR"
    if published and not embedded and dataset == published.repository:
        return ""
    return f" --data hf://datasets/{dataset}" + (f"@{revision}" if revision else "")
