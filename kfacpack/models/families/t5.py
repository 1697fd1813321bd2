"""T5 models, such as `t5:google-t5/t5-base` or `t5:DIR`.

f is the decoder's last hidden state at the position that predicts the label.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kfacpack.errors import KfacpackError
from kfacpack.format.manifest import Function
from kfacpack.models.families.transformers_loading import (
    config_and_tokenizer,
    identity_fields,
    load_pretrained,
    max_length,
    public_name,
    text_columns,
    word_rows,
)
from kfacpack.models.model import CachedRepository, Model, ModelRequest
from kfacpack.models.prompts import CONFIG_KEY, PromptStyle, label_words, prompt_style, prompts
from kfacpack.tasks.task import Example

FROZEN = ("shared.weight", "*embed_tokens*", "*relative_attention_bias*", "lm_head*")
"""fnmatch patterns of the embeddings, the position biases and the output layer."""


class T5Family:
    """T5, T5 v1.1 and flan-T5 models from transformers."""

    prefix = name = "t5"
    form = "t5:NAME_OR_DIR"
    takes_folder = True
    f = "the decoder's last hidden state at the position that predicts the label"
    head = "words"
    prompt_styles: tuple[PromptStyle, ...] = ("t5", "flan")

    def load(self, request: ModelRequest) -> Model:
        """Loads a model. The prompt style is recorded in the module's config, so that checkpoints keep it."""
        name, device = request.name, request.device
        config, tokenizer = config_and_tokenizer(request, self.prefix)
        if config.model_type != "t5":
            problem = f"t5:{name} is a {config.model_type!r} model, expected 't5'"
            raise KfacpackError(f"{problem}; use hf:NAME for text encoders")
        from transformers import T5ForConditionalGeneration

        module, missing = load_pretrained(T5ForConditionalGeneration, config, request)
        limit = max_length(tokenizer, config)
        default: PromptStyle = "flan" if "flan" in public_name(name).lower() else "t5"
        style = request.prompts or prompt_style(config, default, self.prompt_styles)
        setattr(module.config, CONFIG_KEY, style)
        start_token = getattr(config, "decoder_start_token_id", None)
        start_token = config.pad_token_id if start_token is None else start_token  # transformers' own default

        def forward(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            """Returns f, (N, d_model), for inputs (N, length). The decoder input is the start token alone."""
            ids, mask = input_ids.to(device), attention_mask.to(device)
            start = torch.full((len(ids), 1), start_token, device=device)
            encoded = module.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
            decoded = module.decoder(
                input_ids=start, encoder_hidden_states=encoded, encoder_attention_mask=mask, use_cache=False
            )
            f: Tensor = decoded.last_hidden_state[:, 0]
            return f

        def prepare(examples: Sequence[Example], task: str) -> dict[str, Tensor]:
            """Tokenizes the examples as prompts in the model's style."""
            rows = prompts(text_columns(examples, f"t5:{name}", task), task, style)
            tokens = tokenizer(rows, padding=True, truncation=True, max_length=limit, return_tensors="pt")
            return {key: tokens[key] for key in ("input_ids", "attention_mask")}

        def output_layer() -> Tensor:
            """Returns the weights of the output layer, including the factor by which T5 v1.0 scales f."""
            # Versions of transformers before 5 have no separate attribute for this factor.
            scales: bool = getattr(config, "scale_decoder_outputs", config.tie_word_embeddings)
            weight: Tensor = module.lm_head.weight.detach()
            return weight * config.d_model**-0.5 if scales else weight

        return Model(
            **identity_fields(request, self.name, config, module, tokenizer, missing),
            forward=forward,
            function=Function(
                output="hidden-state",
                normalized=False,
                width=int(config.d_model),
                detail="decoder's last hidden state, after its final norm and before lm_head, at the first position: "
                "decoder input is the start token alone",
            ),
            frozen=FROZEN,
            prepare=prepare,
            output_layer=output_layer,
            word_weights=lambda words: word_rows(output_layer(), tokenizer, words, f"t5:{name}"),
            label_words=lambda classes, task: label_words(classes, task, style),
            preprocessing=f"prompts in the style of {style!r}, at most {limit} tokens",
        )

    def downloaded_names(self, repository: CachedRepository) -> Iterator[str]:
        """Yields `t5:NAME` if the cached repository NAME contains a T5 model."""
        if repository.config.get("model_type") == "t5" and repository.is_for_transformers:
            yield f"t5:{repository.name}"
