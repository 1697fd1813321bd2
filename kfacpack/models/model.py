"""The model interface: a module, the function f that it computes, and the preparation of its inputs.

A family (`kfacpack.models.families`) builds `Model` objects from a `ModelRequest`. This module also lists the model
repositories in the local Hub cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from kfacpack.curvature.curvature import identify
from kfacpack.errors import KfacpackError, did_you_mean, printable
from kfacpack.format.manifest import Base, Function
from kfacpack.models.layer_list import LayerWeights
from kfacpack.models.prompts import PromptStyle
from kfacpack.models.weights import Checkpoint
from kfacpack.tasks.task import Example


class UnknownModel(KfacpackError):  # noqa: N818 - part of the public API under this name
    """Raised if a library has no model with the requested name."""


def unknown_model(library: str, name: str, names: Iterable[str]) -> UnknownModel:
    """Returns the error for an unknown model name. The error message suggests similar names.

    Args:
        library: Name of the library, such as `"timm"`.
        name: The unknown model name.
        names: All model names of the library.
    """
    # The model that OpenAI calls ViT-B/32 is called ViT-B-32 in open_clip.
    suggestion = did_you_mean(name.replace("/", "-"), names, count=5, cutoff=0.5)
    return UnknownModel(f"unknown {library} model {printable(name)!r}{suggestion}")


@dataclass(frozen=True)
class CachedRepository:
    """The newest snapshot of a model repository in the Hub cache."""

    name: str
    """Repository id, `owner/repository`."""
    revision: str
    """Commit of the snapshot."""
    files: Mapping[str, Path]
    """Local paths of the files, by file name in the repository."""

    @property
    def nbytes(self) -> int:
        """Total size of the files in bytes."""
        return sum(file.stat().st_size for file in self.files.values())

    @cached_property
    def config(self) -> dict[str, Any]:
        """Content of config.json; empty if the file is missing or invalid."""
        try:
            config = json.loads(self.files["config.json"].read_bytes())
        except (KeyError, OSError, ValueError):
            return {}
        return config if isinstance(config, dict) else {}

    @property
    def has_safetensors(self) -> bool:
        """Whether the repository has safetensors weights in transformers' layout."""
        return any(name.startswith("model") and name.endswith(".safetensors") for name in self.files)

    @property
    def is_for_transformers(self) -> bool:
        """Whether the repository has safetensors weights and a tokenizer, which `t5:`, `lm:` and `hf:` models need."""
        return self.has_safetensors and any(name in self.files for name in ("tokenizer.json", "tokenizer_config.json"))


def cached_repositories() -> Iterator[CachedRepository]:
    """Yields the model repositories in the local Hub cache, sorted by name, without network access."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return
    for repository in sorted(cache.repos, key=lambda repository: repository.repo_id):
        if repository.repo_type == "model" and repository.revisions:
            newest = max(repository.revisions, key=lambda revision: revision.last_modified)
            files = {
                file.file_path.relative_to(newest.snapshot_path).as_posix(): file.file_path for file in newest.files
            }
            yield CachedRepository(repository.repo_id, newest.commit_hash, files)


Batch = Tensor | dict[str, Tensor]
"""Model input: a tensor, which is the only argument of `forward`, or a dict of keyword arguments."""

WeightsSource = Path | Literal["random"] | None
"""A safetensors file, `"random"` for a random initialisation, or None for the published weights of the model."""


@dataclass(frozen=True)
class Model:
    """A model from another library, in eval mode, with the parameter names of that library."""

    family: str
    """Name of the family, as recorded in manifests."""
    name: str
    """Model name without the family's prefix. For a model in a folder, this is the name of the folder."""
    revision: str | None
    """Tag, commit or digest of the weights; `"random-SEED"` for random weights, or None for local weights."""
    module: nn.Module
    """The module, as built by the model's library."""
    forward: Callable[..., Tensor]
    """`forward(batch)` or `forward(**batch)` returns f, (N, C).

    Inputs are moved to the module's device, and images are converted to its dtype.
    """
    function: Function
    """Description of f for manifests."""
    frozen: tuple[str, ...]
    """fnmatch patterns of the parameters that are excluded from curvature estimates and from training by default."""
    prepare: Callable[[Sequence[Example], str], Batch]
    """Turns N examples and the name of their task into a batch on the CPU."""
    preprocessing: str
    """One-line description of `prepare`, for the manifest."""
    checkpoint: Checkpoint
    """Saves the module's current weights in a format that the model's library can load."""
    encode_text: Callable[[Sequence[str]], Tensor] | None = None
    """Maps N texts to normalised embeddings, (N, C), without gradients; None if there is no trained text tower."""
    word_weights: Callable[[Sequence[str]], Tensor] | None = None
    """Maps K words to the rows of the output layer that predict them, (K, C); None if f does not predict words."""
    label_words: Callable[[Sequence[str], str], Sequence[str]] | None = None
    """Maps K class names and a task name to K words for `word_weights`; None if `word_weights` is None."""
    answer_tokens: Callable[[str], Sequence[Sequence[int]] | None] | None = None
    """Maps a task name to the tokens of each of the task's answers.

    If this attribute is None, or the function returns None, f has one row per example, except in tasks with prompts and
    completions.
    """
    answer_classes: Callable[[str], Sequence[str]] | None = None
    """Maps a task name to the class of each answer in `answer_tokens`; None if `answer_tokens` is None."""
    output_layer: Callable[[], Tensor] | None = None
    """Returns the matrix W, (vocabulary, C), for which softmax(W f) are the probabilities of the next token.

    None if f does not predict tokens.
    """
    layer_weights: LayerWeights | None = None
    """Object that loads the weights of a layer when the layer is used; None if all weights are in memory."""
    logit_scale: float = 100.0
    """Factor that converts cosine similarities to logits. The default is the value at the end of CLIP's training."""

    def __repr__(self) -> str:
        count = sum(parameter.numel() for parameter in self.module.parameters())
        return f"<Model {self.name} ({self.family}): {count:,} parameters, f of width {self.function.width}>"

    def base(self, parameters: Collection[str]) -> Base:
        """Returns the identity of the model: its family, name and revision, and digests of its current parameters.

        Args:
            parameters: State-dict names of the parameters to include.
        """
        return identify(self.module, parameters, family=self.family, name=self.name, revision=self.revision)


def unwrap_model(model: nn.Module | Model) -> tuple[nn.Module, Callable[..., Tensor], tuple[str, ...]]:
    """Returns the module of a model, the function that computes f, and the patterns of the frozen parameters.

    Args:
        model: A `Model`, or a module whose output is f. For a module, there are no patterns.

    Raises:
        KfacpackError: If `model` is neither a `Model` nor a module.
    """
    if isinstance(model, Model):
        return model.module, model.forward, model.frozen
    if isinstance(model, nn.Module):
        return model, model, ()
    raise KfacpackError(f"expected an nn.Module or a model from kp.load_model, got {type(model).__name__}")


Loading = Literal["memory", "layers", "shapes"]
"""How weights are loaded: all at once, layer by layer when they are used, or not at all (arbitrary values)."""


class ModelRequest(NamedTuple):
    """Arguments of `ModelFamily.load`."""

    name: str
    """Model name without the family's prefix."""
    weights: WeightsSource
    """Source of the weights."""
    image_size: int | None
    """Side length of the input images in pixels; None for the size in the model's config."""
    dtype: torch.dtype
    """Dtype of the module."""
    device: torch.device
    """Device of the module."""
    seed: int
    """Seed of a random initialisation."""
    prompts: PromptStyle | None = None
    """Prompt style, for families with several styles; None for the model's own style."""
    loading: Loading = "memory"
    """How weights are loaded. The families `hf` and `lm` support all values; other families always use `memory`."""

    def revision(self, published: str | None) -> str | None:
        """Returns the revision of the requested weights: `published`, `"random-SEED"`, or None for weights in a file.

        Args:
            published: Tag, commit or digest of the published weights.
        """
        if self.weights == "random":
            return f"random-{self.seed}"
        return published if self.weights is None else None


class ModelFamily(Protocol):
    """A family of models, such as T5. Each family has one module and one entry in `FAMILIES`."""

    prefix: str
    """The part of a model name before the colon; empty for open_clip, whose model names have no prefix."""
    name: str
    """Name of the family in `Model.family` and in manifests."""
    form: str
    """Accepted forms of a model's name, for error messages."""
    takes_folder: bool
    """Whether the part of a model name after the colon may be a folder."""
    f: str
    """Description of f."""
    head: str
    """Default kind of head: text, words or prototypes."""
    prompt_styles: tuple[PromptStyle, ...]
    """Available prompt styles; empty if the family formats examples in only one way."""

    def load(self, request: ModelRequest) -> Model:
        """Loads a model.

        Raises:
            UnknownModel: If the library has no model with this name.
            KfacpackError: If the weights are missing, invalid or do not match the model.
        """
        ...

    def downloaded_names(self, repository: CachedRepository) -> Iterator[str]:
        """Yields the names, including the prefix, of the family's models in a cached repository."""
        ...


@contextmanager
def seeded_rng(seed: int) -> Iterator[None]:
    """Context manager that seeds torch's global generator for initialising weights, and restores its state on exit."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
