"""For the examples of loops: a small BERT of random weights, sentences that it is to tell apart, and others."""

import torch
from torch import Tensor

from kfacpack._compat import make_torchvision_importable

make_torchvision_importable()  # transformers imports it, and PyPI's does not load beside a torch for the CPU alone

from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast  # noqa: E402

WEATHER = [
    f"{when} {what} over {where}"
    for when in ("today", "tonight", "tomorrow")
    for what in ("the sun shines", "rain falls", "fog lies", "a storm passes")
    for where in ("the sea", "the hills", "the town")
]
"""What the model is used for already, and should go on saying the same of."""
KITCHEN = [
    (f"{verb} {food} {how}", label)
    for verb, label in (("boil", 0), ("bake", 1))
    for food in ("the bread", "the beans", "an egg", "the fish", "potatoes")
    for how in ("slowly", "at once", "for an hour", "with salt")
]
"""What it is to learn: (text, label)."""

_WORDS = sorted({word for text in [*WEATHER, *(text for text, _ in KITCHEN)] for word in text.split()})


def tokenizer() -> PreTrainedTokenizerFast:
    """Whole words."""
    known = Tokenizer(models.WordLevel({word: k for k, word in enumerate(["<pad>", "<unk>", *_WORDS])}, "<unk>"))
    known.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=known, pad_token="<pad>", unk_token="<unk>")


def encoded(texts: list[str]) -> dict[str, Tensor]:
    tokens = tokenizer()(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
    return dict(tokens)


def weather_batches() -> list[dict[str, Tensor]]:
    weather = encoded(WEATHER)
    return [{key: value[k : k + 12] for key, value in weather.items()} for k in range(0, len(WEATHER), 12)]


def classifier() -> BertForSequenceClassification:
    """Two layers of width 32; as `BertForSequenceClassification.from_pretrained(NAME)` gives a real one."""
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
    """f: what BERT says of each text, (N, 32), before any classifier."""
    pooled: Tensor = model.bert(**batch).pooler_output
    return pooled


def said(name: str, found: dict[str, float]) -> str:
    return f"{name:20}loss: {found['loss']:.3f}   drift on the weather: {found['drift']:.4f}"
