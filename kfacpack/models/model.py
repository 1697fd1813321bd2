"""A name that nobody knows, answered with those it may have meant.

What of the Hub's models lies in this machine's cache already: looking makes no request.

What a model is to us: a stock module, the function f whose drift is measured, and how examples become its input.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from kfacpack.curvature.curvature import identify
from kfacpack.errors import KfacpackError, printable
from kfacpack.format.manifest import Base, Function
from kfacpack.models.prompts import PromptStyle
from kfacpack.models.weights import Checkpoint
from kfacpack.tasks.task import Example


class UnknownModel(KfacpackError):  # noqa: N818 - named for what it is, as in "raise UnknownModel"
    """A name that is none of a library's."""


def unknown_model(library: str, name: str, known: Iterable[str]) -> UnknownModel:
    by_lower = {each.lower(): each for each in known}
    # OpenAI writes ViT-B/32, open_clip ViT-B-32.
    close = get_close_matches(name.lower().replace("/", "-"), by_lower, n=5, cutoff=0.5)
    meant = f"; close to it are {', '.join(by_lower[each] for each in close)}" if close else ""
    return UnknownModel(f"{printable(name)!r} is no model that {library} knows{meant}")


@dataclass(frozen=True)
class CachedRepository:
    """A model repository's newest snapshot in the cache."""

    name: str
    """owner/repository."""
    revision: str
    files: Mapping[str, Path]
    """A file's name in the repository -> where it is."""

    @property
    def nbytes(self) -> int:
        return sum(file.stat().st_size for file in self.files.values())

    @cached_property
    def config(self) -> dict[str, Any]:
        """What its config.json says; nothing if there is none that can be read."""
        try:
            said = json.loads(self.files["config.json"].read_bytes())
        except (KeyError, OSError, ValueError):
            return {}
        return said if isinstance(said, dict) else {}

    @property
    def is_for_transformers(self) -> bool:
        """Whether weights and a tokenizer are there, as `t5:` and `hf:` need them."""
        weights = any(name.startswith("model") and name.endswith(".safetensors") for name in self.files)
        return weights and any(name in self.files for name in ("tokenizer.json", "tokenizer_config.json"))


def cached_repositories() -> Iterator[CachedRepository]:
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return
    for each in sorted(cache.repos, key=lambda each: each.repo_id):
        if each.repo_type == "model" and each.revisions:
            newest = max(each.revisions, key=lambda revision: revision.last_modified)
            files = {
                file.file_path.relative_to(newest.snapshot_path).as_posix(): file.file_path for file in newest.files
            }
            yield CachedRepository(each.repo_id, newest.commit_hash, files)


Batch = Tensor | dict[str, Tensor]
"""On the CPU. A tensor is the only argument of `forward`, a dictionary holds its keyword arguments."""

WeightsSource = Path | Literal["random"] | None
"""A safetensors file, a random initialisation that was asked for, or None: what the name stands for."""


@dataclass(frozen=True)
class Model:
    """A model as its library builds it, in eval mode, on a device: no wrapper, no surgery, no renamed parameter."""

    family: str
    name: str
    """As the user gave it, without the family's prefix; of a directory, its own name."""
    revision: str | None
    """The pretrained tag or commit, "random-SEED", or None when only the weights themselves tell."""
    module: nn.Module
    forward: Callable[..., Tensor]
    """forward(batch) or forward(**batch) -> f, (N, C). Moves its input to the module's device and dtype."""
    function: Function
    frozen: tuple[str, ...]
    """fnmatch patterns of the state-dict names that are neither estimated nor trained unless they are asked for."""
    prepare: Callable[[Sequence[Example], str], Batch]
    """N examples and their task's name -> a batch."""
    preprocessing: str
    """What `prepare` does, in one line, for the manifest."""
    checkpoint: Checkpoint
    """How the module's weights, as they are when asked, are written so that its own library loads them."""
    encode_text: Callable[[Sequence[str]], Tensor] | None = None
    """N texts -> their normalised embeddings beside f, (N, C), without gradient; None without a trained text tower."""
    word_weights: Callable[[Sequence[str]], Tensor] | None = None
    """K words -> (K, C): by which f becomes the logit of each as the next word; None where f predicts no words."""
    label_words: Callable[[Sequence[str], str], Sequence[str]] | None = None
    """K class names and their task's name -> K words for `word_weights`; None where `word_weights` is None."""
    logit_scale: float = 100.0
    """What cosines are multiplied by to become logits: the model's own, or else what CLIP's training arrives at."""

    def base(self, parameters: Collection[str]) -> Base:
        """Which model it is, by its name and by the weights of these parameters, as they are now."""
        return identify(self.module, parameters, family=self.family, name=self.name, revision=self.revision)


class ModelRequest(NamedTuple):
    """What a family is asked for."""

    name: str
    weights: WeightsSource
    image_size: int | None
    dtype: torch.dtype
    device: torch.device
    seed: int
    prompts: PromptStyle | None = None
    """Prompt style, for families that have several; None: the model's own."""

    def revision(self, published: str | None) -> str | None:
        """Which weights they are: those that were published under this tag or commit, unless others were asked for."""
        if self.weights == "random":
            return f"random-{self.seed}"
        return published if self.weights is None else None


class ModelFamily(Protocol):
    """One kind of model, one file."""

    prefix: str
    """What stands before the colon in `--model`; empty for the family whose names need none."""
    name: str
    """What a `Model` and a manifest call it."""
    form: str
    """What `--model` may say."""
    takes_folder: bool
    """Whether what follows the colon may be a folder."""
    f: str
    """What f is, in words."""
    head: str
    """What heads its models have, unless another is asked for: of texts, of words or of prototypes."""
    prompt_styles: tuple[PromptStyle, ...]
    """Prompt styles that can be asked for; empty where a family has only one way to read an example."""

    def load(self, asked: ModelRequest) -> Model: ...

    def downloaded(self, repository: CachedRepository) -> Iterator[str]:
        """Which of its models have their weights in a repository of the Hub's cache, as `--model` names them."""


@contextmanager
def seeded_rng(seed: int) -> Iterator[None]:
    """The libraries initialise from torch's global generator: seeded here, and given back as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
