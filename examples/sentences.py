"""Shared by the training loop examples: a small BERT with random weights, and texts of two tasks."""

from collections.abc import Callable

import torch
from torch import Tensor

import kfacpack as kp
from kfacpack._compat import make_torchvision_importable

make_torchvision_importable()  # imported by transformers; the build on PyPI fails with a CPU-only torch

from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast  # noqa: E402

WEATHER = [
    f"{when} {what} over {where}"
    for when in ("today", "tonight", "tomorrow")
    for what in ("the sun shines", "rain falls", "fog lies", "a storm passes")
    for where in ("the sea", "the hills", "the town")
]
"""Texts on which the outputs of the model should not change."""
KITCHEN = [
    (f"{verb} {food} {how}", label)
    for verb, label in (("boil", 0), ("bake", 1))
    for food in ("the bread", "the beans", "an egg", "the fish", "potatoes")
    for how in ("slowly", "at once", "for an hour", "with salt")
]
"""Texts of the new task: (text, label)."""

_WORDS = sorted({word for text in [*WEATHER, *(text for text, _ in KITCHEN)] for word in text.split()})


def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer whose tokens are whole words."""
    tokens = Tokenizer(models.WordLevel({word: k for k, word in enumerate(["<pad>", "<unk>", *_WORDS])}, "<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", unk_token="<unk>")


def encoded(texts: list[str]) -> dict[str, Tensor]:
    """Tokenizes texts into one batch."""
    tokens = tokenizer()(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
    return dict(tokens)


def classifier() -> BertForSequenceClassification:
    """Returns a BERT with two layers of width 32; use `from_pretrained(NAME)` for a real one."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(_WORDS) + 2,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config).eval()


def embedding(model: BertForSequenceClassification, batch: dict[str, Tensor]) -> Tensor:
    """Returns f: the pooled output of each text before the classifier, (N, 32)."""
    pooled: Tensor = model.bert(**batch).pooler_output
    return pooled


def weather_bundle(params: list[str]) -> kp.Curvature:
    """Estimates the curvature of these parameters on the weather texts, in batches of 12."""
    model, weather = classifier(), encoded(WEATHER)
    return kp.estimate(
        model,
        [{key: value[k : k + 12] for key, value in weather.items()} for k in range(0, len(WEATHER), 12)],
        samples=4,
        params=params,
        forward=lambda **batch: embedding(model, batch),
    )


def compare(train: Callable[[float], dict[str, float]], strength: float) -> dict[str, dict[str, float]]:
    """Trains without the penalty and with a penalty of this strength; prints and returns both results."""
    results = {"without": train(0.0), "with the penalty": train(strength)}
    for name, result in results.items():
        print(f"{name:20}loss: {result['loss']:.3f}   drift on the weather: {result['drift']:.4f}")
    return results
