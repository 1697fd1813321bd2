"""Text encoders like BERT: `hf:sentence-transformers/all-MiniLM-L6-v2`, `hf:DIR`. f is their mean, normalised."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import normalize

from kfacpack.errors import KfacpackError
from kfacpack.format.manifest import Function
from kfacpack.models.families.transformers_loading import (
    config_and_tokenizer,
    folder_of,
    load_pretrained,
    max_length,
    public_name,
    texts,
)
from kfacpack.models.model import CachedRepository, Model, ModelRequest
from kfacpack.models.prompts import PromptStyle
from kfacpack.tasks.task import Example


class EncoderFamily:
    prefix = name = "hf"
    form = "hf:NAME_OR_DIR"
    takes_folder = True
    f = "the mean over the tokens of a text encoder of transformers, normalised"
    head = "prototypes"
    prompt_styles: tuple[PromptStyle, ...] = ()

    def load(self, asked: ModelRequest) -> Model:
        name, weights, image_size, dtype, device, seed, _ = asked
        if image_size is not None:
            raise KfacpackError(f"hf:{name} reads text: it takes no image size")
        config, tokenizer = config_and_tokenizer(name, self.prefix)
        encoder_class = _encoder_class(config, name)
        module, missing = load_pretrained(encoder_class, config, name, weights, dtype, seed, unused="pooler.")
        module = module.to(device).eval()
        limit = max_length(tokenizer, config)

        def forward(input_ids: Tensor, attention_mask: Tensor, **more: Tensor) -> Tensor:
            """All (N, length) -> (N, hidden): the mean over the tokens that are no padding."""
            mask = attention_mask.to(device)
            more = {key: value.to(device) for key, value in more.items()}
            hidden = module(input_ids=input_ids.to(device), attention_mask=mask, **more).last_hidden_state
            counted = mask.unsqueeze(-1).to(hidden.dtype)
            return normalize((hidden * counted).sum(1) / counted.sum(1), dim=-1)

        def prepare(examples: Sequence[Example], task: str) -> dict[str, Tensor]:
            """One column is a sentence, two are a pair of sentences, as BERT reads pairs."""
            columns = texts(examples, f"hf:{name}", task)
            if len(columns) > 2:
                problem = f"reads one text or a pair, an example of {task!r} has {', '.join(columns)}"
                raise KfacpackError(f"hf:{name} {problem}: leave the other columns out of the data")
            tokens = tokenizer(*columns.values(), padding=True, truncation=True, max_length=limit, return_tensors="pt")
            return dict(tokens)

        return Model(
            family=self.name,
            name=public_name(name),
            revision=asked.revision(getattr(config, "_commit_hash", None)),
            module=module,
            forward=forward,
            function=Function(
                output="embedding",
                normalized=True,
                width=int(config.hidden_size),
                detail="mean of the last hidden state over the attention mask, normalised",
            ),
            frozen=(*_embeddings(module), "pooler.*"),
            prepare=prepare,
            checkpoint=folder_of(module, tokenizer, missing),
            preprocessing=f"the text, or the pair of texts, at most {limit} tokens",
        )

    def downloaded(self, repository: CachedRepository) -> Iterator[str]:
        from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as ENCODERS

        config = repository.config
        if (
            config.get("model_type") in ENCODERS
            and not config.get("is_encoder_decoder")
            and repository.is_for_transformers
        ):
            yield f"hf:{repository.name}"


def _encoder_class(config: Any, name: str) -> Any:
    """The class that AutoModel would choose."""
    from transformers import MODEL_FOR_MASKED_LM_MAPPING, MODEL_MAPPING

    # A causal or a vision model would give numbers too, but no mean over a text that means anything.
    if config.is_encoder_decoder or type(config) not in MODEL_FOR_MASKED_LM_MAPPING:
        remedy = "t5: takes T5 models, timm: and open_clip names take vision models"
        raise KfacpackError(f"hf:{name} is a {config.model_type!r} model, expected a text encoder like BERT; {remedy}")
    return MODEL_MAPPING[type(config)]


def _embeddings(module: nn.Module) -> tuple[str, ...]:
    """Words, positions, token types; not the norm behind them."""
    return tuple(f"{name}.weight" for name, each in module.named_modules() if isinstance(each, nn.Embedding))
