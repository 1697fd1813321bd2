"""What a model is to us: a stock module, the function f whose drift is measured, and how examples become its input."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from kfacpack.bundle.manifest import Base, Function
from kfacpack.curvature.identify import identify
from kfacpack.models.checkpoint import Checkpoint
from kfacpack.models.downloaded import Repository
from kfacpack.prompts import PromptStyle
from kfacpack.tasks.base import Example

Batch = Tensor | dict[str, Tensor]
"""On the CPU. A tensor is the only argument of `forward`, a dictionary holds its keyword arguments."""

Weights = Path | Literal["random"] | None
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


class Request(NamedTuple):
    """What a family is asked for."""

    name: str
    weights: Weights
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


class Family(Protocol):
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

    def load(self, asked: Request) -> Model: ...

    def downloaded(self, repository: Repository) -> Iterator[str]:
        """Which of its models have their weights in a repository of the Hub's cache, as `--model` names them."""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The libraries initialise from torch's global generator: seeded here, and given back as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
