"""Tiny models of every family, with the names and files of real ones, and no network."""

from __future__ import annotations

import json

import pytest
import torch
from PIL import Image

from kfacpack._compat import make_torchvision_importable

SENTENCES = "mnli premise hypothesis : a dog runs over the green field an animal moves nobody sleeps"

LABELS = "entailment neutral contradiction not entails"


@pytest.fixture(autouse=True)
def _no_network(monkeypatch, tmp_path):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture(scope="session")
def tiny_clip(tmp_path_factory):
    """Name of an open_clip model with 16 dimensions, patches of 8 pixels and images of 32."""
    make_torchvision_importable()
    import open_clip

    path = tmp_path_factory.mktemp("configs") / "ViT-tiny-test.json"
    vision = {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8}
    text = {"context_length": 8, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
    path.write_text(json.dumps({"embed_dim": 16, "vision_cfg": vision, "text_cfg": text}))
    open_clip.add_model_config(path)
    return path.stem


def write_tokenizer(folder, start, end):
    """Writes a word-level tokenizer; a pair is `start one end two end`, with token type 1 for the second text."""
    make_torchvision_importable()
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {
        word: index for index, word in enumerate(["<pad>", "<unk>", start, end, *SENTENCES.split(), *LABELS.split()])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}",
        pair=f"{start} $A {end} $B:1 {end}:1",
        special_tokens=[(start, 2), (end, 3)],
    )
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "model_max_length": 32}
    names["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return len(vocabulary)


@pytest.fixture(scope="session")
def t5_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("t5")
    size = write_tokenizer(folder, "<s>", "</s>")
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(vocab_size=size, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0)
    T5ForConditionalGeneration(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def bert_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    size = write_tokenizer(folder, "[CLS]", "[SEP]")
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=size, max_position_embeddings=32, **shape)).save_pretrained(folder)
    return folder


@pytest.fixture
def pictures():
    """Three examples that are not square: RGB, greyscale and palette."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (3, 40, 52, 3), dtype=torch.uint8, generator=generator)
    images = [Image.fromarray(pixels.numpy()) for pixels in noise]
    return [{"image": image} for image in (images[0], images[1].convert("L"), images[2].quantize(16))]


@pytest.fixture
def pairs():
    return [
        {"premise": "a dog runs over the green field", "hypothesis": "an animal moves"},
        {"premise": "nobody sleeps", "hypothesis": "a dog"},
    ]


LM_CORPUS = [
    "Premise: a dog runs over the green field\nHypothesis: an animal moves\nAnswer: yes maybe no",
    "Text: nobody sleeps\nClaim: a dog\nThe claim is correct unclear wrong",
    "The sentence is true false. Paragraph sentence given Does the premise entail the hypothesis?",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_lm(folder, kind, chat=False):
    """Writes a causal language model with two layers and a byte-level tokenizer trained on a few sentences."""
    make_torchvision_importable()
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|user|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=special, initial_alphabet=alphabet, min_frequency=1, show_progress=False
    )
    tokenizer.train_from_iterator(LM_CORPUS * 20, trainer)
    size = tokenizer.get_vocab_size()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>", model_max_length=96
    )
    if chat:
        fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    shape = {
        "vocab_size": size,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 96,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "initializer_range": 0.3,
    }
    gpt2 = {"vocab_size": size, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 96, "initializer_range": 0.3}
    configs = {
        "llama": lambda: transformers.LlamaConfig(**shape, tie_word_embeddings=True),
        "qwen2": lambda: transformers.Qwen2Config(**shape, tie_word_embeddings=False),
        "mistral": lambda: transformers.MistralConfig(**shape),
        "gpt2": lambda: transformers.GPT2Config(**gpt2, bos_token_id=0, eos_token_id=0),
        "mixtral": lambda: transformers.MixtralConfig(**shape, num_local_experts=2),
        "gemma2": lambda: transformers.Gemma2Config(**shape, head_dim=4, final_logit_softcapping=0.1),
    }
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(configs[kind]()).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def lm_folders(tmp_path_factory):
    """Folders of causal language models, by kind."""
    kinds = ("llama", "qwen2", "mistral", "gpt2")
    return {kind: write_lm(tmp_path_factory.mktemp(kind), kind) for kind in kinds}
