"""Causal language models from transformers, such as `lm:HuggingFaceTB/SmolLM2-135M` or `lm:DIR`.

f is the final hidden state, after the last norm, at the positions that predict the answer. An example has one row of f
for each of these positions. The positions depend on the task:

- If the data has the columns `prompt` and `completion`, the completion is predicted.
- If any of the K answers in the task's template has several tokens, all answers are predicted. Each example consists of
  K sequences: each sequence is the prompt, followed by one of the answers. A batch has shape (N, K, length).
- For any other task, only the first token after the prompt is predicted. Each example has one row of f.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kfacpack.errors import KfacpackError, printable
from kfacpack.format.manifest import Function
from kfacpack.models.families.transformers_loading import (
    config_and_tokenizer,
    embedding_names,
    identity_fields,
    load_layerwise,
    max_length,
    text_columns,
    word_rows,
)
from kfacpack.models.functional import ANSWERS
from kfacpack.models.layer_list import LayerList
from kfacpack.models.model import CachedRepository, Model, ModelRequest
from kfacpack.models.prompts import CONFIG_KEY, PromptStyle, answers, label_words, prompt_style, prompts
from kfacpack.tasks.task import COMPLETION_COLUMNS, Example

EXPERTS = ("expert", "moe", "router")
"""Lower-case substrings that identify the class names of mixture-of-experts modules."""


class CausalLMFamily:
    """Causal language models with one linear output layer, such as Llama, Qwen, Mistral, GPT-2 and SmolLM."""

    prefix = name = "lm"
    form = "lm:NAME_OR_DIR"
    takes_folder = True
    f = "the final hidden state of a causal language model at the positions that predict the answer"
    head = "words"
    prompt_styles: tuple[PromptStyle, ...] = ("plain", "chat")

    def load(self, request: ModelRequest) -> Model:
        """Loads a model. The prompt style is recorded in the module's config, so that checkpoints keep it."""
        name, device = request.name, request.device
        config, tokenizer = config_and_tokenizer(request, self.prefix)
        module, missing, layer_weights = load_layerwise(_causal_class(config, name), config, request)
        _require_dense_layers(module, name)
        default: PromptStyle = "chat" if tokenizer.chat_template else "plain"
        style = request.prompts or prompt_style(config, default, self.prompt_styles)
        if style == "chat" and not tokenizer.chat_template:
            problem = f"lm:{name} has no chat template, as is usual for base models"
            raise KfacpackError(f"{problem}; use --prompts plain (prompts='plain'), or an instruction-tuned model")
        setattr(module.config, CONFIG_KEY, style)
        texts = AnswerTexts(f"lm:{name}", tokenizer, style, max_length(tokenizer, config))
        decoder = module.base_model

        def forward(input_ids: Tensor, attention_mask: Tensor, answers: Tensor) -> Tensor:
            """Returns f, (P, hidden), with one row per true element of `answers`, (N, length) or (N, K, length)."""
            ids, mask, chosen = (tensor.to(device).flatten(0, -2) for tensor in (input_ids, attention_mask, answers))
            positions = (mask.long().cumsum(1) - 1).clamp(min=0)
            hidden = decoder(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
            rows = chosen.bool().flatten().nonzero()[:, 0]
            f: Tensor = hidden.last_hidden_state[rows // chosen.shape[1], rows % chosen.shape[1]]
            return f

        def output_layer() -> Tensor:
            weight: Tensor = module.get_output_embeddings().weight.detach()
            return weight

        if layer_weights is None:
            _require_linear_output(module, output_layer(), name)
        else:
            layers = LayerList(module, decoder, dict(module.named_parameters()), layer_weights)
            layers.find_output_form({"input_ids": torch.tensor([[1, 2]], device=device), "use_cache": False})
            with layers.skipped():
                _require_linear_output(module, output_layer(), name)
        return Model(
            **identity_fields(request, self.name, config, module, tokenizer, missing),
            forward=forward,
            function=Function(
                output="hidden-state",
                normalized=False,
                width=int(config.hidden_size),
                detail="final hidden state, after the last norm and before lm_head, at each position that predicts a "
                "token of the answer",
            ),
            frozen=(*embedding_names(module), "lm_head*", "embed_out*"),
            prepare=texts.prepare,
            output_layer=output_layer,
            layer_weights=layer_weights,
            word_weights=lambda words: word_rows(output_layer(), tokenizer, words, f"lm:{name}"),
            label_words=lambda classes, task: label_words(classes, task, style),
            answer_tokens=texts.answer_tokens,
            answer_classes=lambda task: list(answers(task, style)),
            preprocessing=f"prompts in the style of {style!r}, at most {texts.limit} tokens",
        )

    def downloaded_names(self, repository: CachedRepository) -> Iterator[str]:
        """Yields `lm:NAME` if the cached repository NAME contains a causal language model."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_MODELS

        architectures = repository.config.get("architectures") or []
        is_causal = any(CAUSAL_MODELS.get(repository.config.get("model_type", "")) == name for name in architectures)
        if is_causal and repository.is_for_transformers:
            yield f"lm:{repository.name}"


class AnswerTexts:
    """A preprocessor that turns examples into token sequences: prompts, optionally followed by answers.

    The prompt and the answer are tokenized separately, so that the tokens of an answer do not depend on the prompt.

    Args:
        model: Name of the model, for error messages.
        tokenizer: Tokenizer of the model.
        style: Prompt style, `plain` or `chat`.
        limit: Maximum length of a sequence in tokens.
    """

    def __init__(self, model: str, tokenizer: Any, style: PromptStyle, limit: int):
        self._model, self._tokenizer, self._style = model, tokenizer, style
        self.limit = limit

    def prepare(self, examples: Sequence[Example], task: str) -> dict[str, Tensor]:
        """Returns a batch: `input_ids`, `attention_mask` and `answers`, a mask of the positions that predict an answer.

        Args:
            examples: Examples with the columns of the task.
            task: Name of the task.

        Raises:
            KfacpackError: If a column that the template uses is missing, a prompt or completion is empty, or a
                completion is too long for the model.
        """
        columns = text_columns(examples, self._model, task)
        if set(columns) == set(COMPLETION_COLUMNS):
            pairs = zip(*(columns[column] for column in COMPLETION_COLUMNS), strict=True)
            return self._padded(
                [self._sequence(self._prompt(prompt), self._completion(text)) for prompt, text in pairs]
            )
        rows = [self._prompt(text) for text in prompts(columns, task, self._style)]
        labels = self.answer_tokens(task)
        if labels is None:
            # The answer is the token after the prompt. This token is not needed as an input.
            return self._padded([self._sequence(row, [0])[:2] for row in rows], included=0)
        batch = self._padded([self._sequence(row, list(tokens)) for row in rows for tokens in labels])
        return {key: tensor.unflatten(0, (len(rows), len(labels))) for key, tensor in batch.items()}

    def answer_tokens(self, task: str) -> tuple[tuple[int, ...], ...] | None:
        """Returns the tokens of each answer in a task's template, or None if no answer has more than one token."""
        words = answers(task, self._style).values()
        tokens = tuple(tuple(self._tokenizer(word, add_special_tokens=False).input_ids) for word in words)
        return tokens if any(len(answer) > 1 for answer in tokens) else None

    def _prompt(self, text: str) -> list[int]:
        if self._style == "chat":
            messages = [{"role": "user", "content": text}]
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            return self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids  # type: ignore[no-any-return]
        tokens: list[int] = self._tokenizer(text, verbose=False).input_ids
        if tokens and tokens[-1] == self._tokenizer.eos_token_id != self._tokenizer.bos_token_id:
            tokens = tokens[:-1]  # remove the end token that some tokenizers append
        start = self._tokenizer.bos_token_id if self._tokenizer.eos_token_id is None else self._tokenizer.eos_token_id
        return tokens or ([] if start is None else [start])

    def _completion(self, text: str) -> list[int]:
        """Returns the tokens of a completion, followed by the end token if the tokenizer has one."""
        tokens: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        end = self._tokenizer.eos_token_id
        return tokens if end is None or not tokens else [*tokens, end]

    def _sequence(self, prompt: list[int], answer: list[int]) -> tuple[list[int], list[int]]:
        """Returns the prompt and the answer. If they exceed the length limit, the start of the prompt is left out."""
        if not prompt or not answer:
            text = "" if not prompt else f" after the prompt {self._excerpt(prompt)}"
            part = "completion" if prompt else "prompt"
            raise KfacpackError(f"{self._model}: an example has an empty {part}{text}; expected at least one token")
        if len(answer) >= self.limit:
            completion = f"the completion of the prompt {self._excerpt(prompt)}"
            problem = f"{completion} has {len(answer)} tokens, including any end token"
            remedy = f"expected at most {self.limit - 1}, to leave room for the prompt. Shorten or remove this example"
            raise KfacpackError(f"{self._model}: {problem}; {remedy}")
        return prompt[-(self.limit - len(answer)) :], answer

    def _excerpt(self, tokens: list[int]) -> str:
        return repr(printable(self._tokenizer.decode(tokens), max_length=40))

    def _padded(
        self, sequences: Sequence[tuple[list[int], list[int]]], included: int | None = None
    ) -> dict[str, Tensor]:
        """Returns a batch of N sequences, which are padded on the right to the same length.

        Args:
            sequences: For each sequence, the tokens of the prompt and of the answer.
            included: Number of answer tokens to include in the sequences; None includes all of them. The last answer
                token predicts nothing, but it is the target of the position before it.
        """
        rows = [[*prompt, *answer[:included]] for prompt, answer in sequences]
        length = max(map(len, rows), default=0)
        padding = self._tokenizer.pad_token_id or 0
        ids = torch.tensor([[*row, *[padding] * (length - len(row))] for row in rows])
        place, sizes = torch.arange(length), torch.tensor([len(row) for row in rows])[:, None]
        first = torch.tensor([len(prompt) - 1 for prompt, _ in sequences])[:, None]
        last = first + torch.tensor([len(answer) for _, answer in sequences])[:, None]
        return {
            "input_ids": ids,
            "attention_mask": (place < sizes).long(),
            ANSWERS: (place >= first) & (place < last),
        }


def _causal_class(config: Any, name: str) -> Any:
    """Returns the model class that transformers' `AutoModelForCausalLM` would choose for a config."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    architectures = getattr(config, "architectures", None) or []
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or config.is_encoder_decoder:
        remedy = "use t5:NAME for T5 models, and hf:NAME for text encoders"
        raise KfacpackError(f"lm:{name} is a {config.model_type!r} model, expected a causal language model; {remedy}")
    chosen: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    # BERT and other encoders have a causal variant as well, but their published weights are not trained for it.
    if architectures and not any("CausalLM" in part or "LMHead" in part for part in architectures):
        problem = f"lm:{name} contains {architectures[0]}, expected {chosen.__name__}"
        raise KfacpackError(f"{problem}; use hf:NAME for text encoders")
    return chosen


def _require_dense_layers(module: nn.Module, name: str) -> None:
    """Checks that a model is not a mixture of experts, which would use different weights for different tokens."""
    for path, child in module.named_modules():
        if any(part in type(child).__name__.lower() for part in EXPERTS):
            problem = f"lm:{name} is a mixture of experts: {path!r} has type {type(child).__name__}"
            reason = "its experts process different tokens in every batch, so their curvature cannot be estimated"
            raise KfacpackError(f"{problem}; {reason}. Use a dense model")


def _require_linear_output(module: Any, output_layer: Tensor, name: str) -> None:
    """Checks with a short input that the logits are the product of the output layer and the final hidden state."""
    tokens = torch.tensor([[1, 2]], device=output_layer.device)
    with torch.no_grad():
        expected = module(input_ids=tokens, use_cache=False).logits[0].float()
        hidden = module.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0]
    tolerance = torch.finfo(output_layer.dtype).eps ** 0.5 * float(expected.abs().max())
    if not torch.allclose((hidden @ output_layer.T).float(), expected, rtol=0, atol=tolerance):
        problem = f"lm:{name} ({module.config.model_type}): the logits are not the product of the output layer and f"
        raise KfacpackError(f"{problem}; models that scale or cap their logits, or add a bias, are not supported")
