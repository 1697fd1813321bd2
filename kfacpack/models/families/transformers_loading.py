"""What `t5:` and `hf:` share: a config, a tokenizer and weights by transformers' own loaders, and texts of examples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from kfacpack._compat import make_torchvision_importable, silence_logging
from kfacpack.errors import KfacpackError, first_line, printable
from kfacpack.models.model import WeightsSource, seeded_rng
from kfacpack.models.weights import LOCAL_WEIGHTS, CheckpointFolder, as_call, check_safetensors, refuse_weights
from kfacpack.tasks.task import Example

LONGEST = 512
"""Tokens of a text that are read at most, whatever a tokenizer would allow."""
# Neither a pickle nor code that comes with a model is ever run.
_SAFE = {"use_safetensors": True, "trust_remote_code": False}


@contextmanager
def transformers_quiet() -> Iterator[None]:
    make_torchvision_importable()
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with silence_logging():
            yield
    finally:
        if shown:
            logging.enable_progress_bar()


def public_name(name: str) -> str:
    """What a bundle calls the model: of a directory its own name alone, not where it lies on this machine."""
    return Path(name).resolve().name if Path(name).is_dir() else name


def config_and_tokenizer(name: str, prefix: str) -> tuple[Any, Any]:
    """Of a directory, if there is one of that name, or else of a Hub repository."""
    looks_local = name.startswith((".", "/", "~"))
    if looks_local and not Path(name).is_dir():
        raise KfacpackError(f"{prefix}:{name}: no such directory; expected one that holds config.json and a tokenizer")
    with transformers_quiet():
        from transformers import AutoConfig, AutoTokenizer

        try:
            config = AutoConfig.from_pretrained(name, trust_remote_code=False)
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        except Exception as error:  # whatever a damaged directory makes transformers, tokenizers or the Hub raise
            expected = "Expected a directory with config.json, a tokenizer and model.safetensors, or such a Hub name"
            problem = f"{prefix}:{name}: its config and tokenizer cannot be loaded: {first_line(error)}"
            raise KfacpackError(f"{problem}. {expected}") from error
    return config, tokenizer


def load_pretrained(
    model_class: Any,
    config: Any,
    name: str,
    weights: WeightsSource,
    dtype: torch.dtype,
    seed: int,
    unused: str = "",
) -> tuple[Any, frozenset[str]]:
    """A model with all its weights: transformers would fill in random numbers for those it does not find.

    `unused`: the prefix of parameters that f does not use, which may be missing; those that are come with the model.
    """
    from safetensors.torch import load_file

    with transformers_quiet(), seeded_rng(seed):
        if weights == "random":
            return model_class(config).to(dtype), frozenset()
        for file in [weights] if weights else sorted(Path(name).glob("*.safetensors")):
            check_safetensors(file)
        given = load_file(weights) if weights else {}
        try:
            if weights:
                model, found = model_class.from_pretrained(
                    None, config=config, state_dict=given, dtype=dtype, output_loading_info=True
                )
            else:
                model, found = model_class.from_pretrained(
                    name, config=config, dtype=dtype, output_loading_info=True, **_SAFE
                )
        except Exception as error:  # the Hub's, transformers' and safetensors' errors have no common base
            if weights:
                # A file leaves tied weights out, so that only those it has can be compared.
                expected = {key: each for key, each in model_class(config).state_dict().items() if key in given}
                raise refuse_weights(weights, name, error, lambda: expected) from error
            problem = f"{name}: its weights cannot be loaded as safetensors: {first_line(error)}"
            raise KfacpackError(f"{problem}. {LOCAL_WEIGHTS}") from error
    if missing := sorted(key for key in found["missing_keys"] if not (unused and key.startswith(unused))):
        raise KfacpackError(f"{weights or name}: these are not the weights of this model: {missing[0]!r} is missing")
    return model, frozenset(found["missing_keys"])


def folder_of(module: Any, tokenizer: Any, missing: frozenset[str]) -> CheckpointFolder:
    """Config, weights and tokenizer, as transformers lays them out. What is random because it was missing stays out."""

    def fill(folder: Path) -> None:
        with transformers_quiet():
            state = {name: value for name, value in module.state_dict().items() if name not in missing}
            module.save_pretrained(folder, state_dict=state if missing else None)
            tokenizer.save_pretrained(folder)

    return CheckpointFolder(
        fill, lambda path: as_call(f"transformers.{type(module).__name__}.from_pretrained", str(path))
    )


def texts(examples: Sequence[Example], model: str, task: str) -> dict[str, list[str]]:
    """Column -> the N examples' strings."""
    columns = list(examples[0]) if examples else []
    for example in examples:
        for column, value in example.items():
            if not isinstance(value, str):
                found = f"{printable(column)!r} holds {type(value).__name__}"
                raise KfacpackError(f"{model} takes texts, in an example of {task!r} {found}: choose an image model")
    return {column: [example[column] for example in examples] for column in columns}


def max_length(tokenizer: Any, config: Any) -> int:
    allowed = (LONGEST, tokenizer.model_max_length, getattr(config, "max_position_embeddings", None) or LONGEST)
    return int(min(allowed))
