"""BERT-like text encoders, such as `hf:sentence-transformers/all-MiniLM-L6-v2` or `hf:DIR`.

f is the normalised mean of the last hidden state over the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.nn.functional import normalize

from kfacpack.errors import KfacpackError
from kfacpack.format.manifest import Function
from kfacpack.models.families.transformers_loading import (
    config_and_tokenizer,
    embedding_names,
    identity_fields,
    load_layerwise,
    max_length,
    text_columns,
)
from kfacpack.models.model import CachedRepository, Model, ModelRequest
from kfacpack.models.prompts import PromptStyle
from kfacpack.tasks.task import Example


class EncoderFamily:
    """Text encoders from transformers."""

    prefix = name = "hf"
    form = "hf:NAME_OR_DIR"
    takes_folder = True
    f = "the normalised mean of a text encoder's last hidden state over the tokens"
    head = "prototypes"
    prompt_styles: tuple[PromptStyle, ...] = ()

    def load(self, request: ModelRequest) -> Model:
        """Loads an encoder. Its pooler, which f does not use, may be missing from the weights."""
        name, device = request.name, request.device
        config, tokenizer = config_and_tokenizer(request, self.prefix)
        encoder = _encoder_class(config, name)
        module, missing, layer_weights = load_layerwise(encoder, config, request, unused=("pooler.",))
        limit = max_length(tokenizer, config)

        def forward(input_ids: Tensor, attention_mask: Tensor, **inputs: Tensor) -> Tensor:
            """Returns f, (N, hidden), for inputs (N, length). Padding tokens are excluded from the mean."""
            mask = attention_mask.to(device)
            inputs = {key: value.to(device) for key, value in inputs.items()}
            hidden = module(input_ids=input_ids.to(device), attention_mask=mask, **inputs).last_hidden_state
            weight = mask.unsqueeze(-1).to(hidden.dtype)
            return normalize((hidden * weight).sum(1) / weight.sum(1), dim=-1)

        def prepare(examples: Sequence[Example], task: str) -> dict[str, Tensor]:
            """Tokenizes sentences (one column) or pairs of sentences (two columns) in the input format of BERT."""
            columns = text_columns(examples, f"hf:{name}", task)
            if len(columns) > 2:
                problem = f"the task {task!r} has the columns {', '.join(columns)}"
                expected = f"hf:{name} expects one text or a pair of texts"
                raise KfacpackError(f"{expected}, but {problem}; keep at most two text columns")
            tokens = tokenizer(*columns.values(), padding=True, truncation=True, max_length=limit, return_tensors="pt")
            return dict(tokens)

        return Model(
            **identity_fields(request, self.name, config, module, tokenizer, missing),
            forward=forward,
            function=Function(
                output="embedding",
                normalized=True,
                width=int(config.hidden_size),
                detail="mean of the last hidden state over the attention mask, normalised",
            ),
            frozen=(*embedding_names(module), "pooler.*"),
            prepare=prepare,
            layer_weights=layer_weights,
            preprocessing=f"the text, or the pair of texts, at most {limit} tokens",
        )

    def downloaded_names(self, repository: CachedRepository) -> Iterator[str]:
        """Yields `hf:NAME` if the cached repository NAME contains a text encoder."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as ENCODERS

        config = repository.config
        if (
            config.get("model_type") in ENCODERS
            and not config.get("is_encoder_decoder")
            and repository.is_for_transformers
        ):
            yield f"hf:{repository.name}"


def _encoder_class(config: Any, name: str) -> Any:
    """Returns the model class that transformers' `AutoModel` would choose for a config."""
    from transformers import MODEL_FOR_MASKED_LM_MAPPING, MODEL_MAPPING

    # Causal and vision models would run as well, but the mean over their tokens is not a text embedding.
    if config.is_encoder_decoder or type(config) not in MODEL_FOR_MASKED_LM_MAPPING:
        remedy = (
            "use t5:NAME for T5 models, lm:NAME for causal language models, and timm:NAME or the name of an open_clip "
            "model for vision models"
        )
        raise KfacpackError(f"hf:{name} is a {config.model_type!r} model, expected a text encoder like BERT; {remedy}")
    return MODEL_MAPPING[type(config)]
