"""Text towers: open_clip's own tokens and embeddings, or none."""

from __future__ import annotations

import json

import pytest
import torch
from kit import refused
from safetensors.torch import save_file

from kfacpack.errors import KfacpackError
from kfacpack.models.families import load_model, open_clip

TEXTS = ["a photo of a dog.", "a cat", "stripes"]


@pytest.fixture
def model(tiny_clip):
    return load_model(tiny_clip, weights="random", seed=3)


def test_texts_are_embedded_as_by_open_clip(model, tiny_clip):
    import open_clip

    tokens = open_clip.get_tokenizer(tiny_clip)(TEXTS)
    embeddings = model.encode_text(TEXTS)
    assert torch.equal(embeddings, model.module.encode_text(tokens, normalize=True))
    assert not embeddings.requires_grad
    assert embeddings.shape == (3, model.function.width)
    torch.testing.assert_close(embeddings.norm(dim=1), torch.ones(3))
    assert model.logit_scale == pytest.approx(float(model.module.logit_scale.detach().exp()))


def test_batches_of_texts_are_embedded_as_single_texts(model, monkeypatch):
    monkeypatch.setattr(open_clip, "TEXT_BATCH_SIZE", 2)
    torch.testing.assert_close(model.encode_text(TEXTS), torch.cat([model.encode_text([text]) for text in TEXTS]))


def test_a_vision_tower_alone_has_no_text_encoder(model, tiny_clip, tmp_path):
    state = model.module.state_dict()
    save_file(state, tmp_path / "whole.safetensors")
    save_file(
        {name: tensor for name, tensor in state.items() if name.startswith("visual.")}, tmp_path / "part.safetensors"
    )
    assert load_model(tiny_clip, weights=tmp_path / "part.safetensors").encode_text is None
    whole = load_model(tiny_clip, weights=tmp_path / "whole.safetensors")
    assert torch.equal(whole.encode_text(TEXTS), model.encode_text(TEXTS))


def test_a_missing_tokenizer_is_reported(tmp_path):
    import open_clip

    vision = {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8}
    text = {"context_length": 8, "vocab_size": 64, "width": 16, "heads": 2, "layers": 1}
    text["hf_tokenizer_name"] = "nobody/nothing"
    path = tmp_path / "ViT-foreign-test.json"
    path.write_text(json.dumps({"embed_dim": 16, "vision_cfg": vision, "text_cfg": text}))
    open_clip.add_model_config(path)
    model = load_model(path.stem, weights="random")
    with refused(KfacpackError, "ViT-foreign-test: the tokenizer", "--head prototypes"):
        model.encode_text(TEXTS)


def test_other_families_have_no_text_tower(bert_folder):
    for spec, weights in ((f"hf:{bert_folder}", None), ("timm:test_vit", "random")):
        model = load_model(spec, weights=weights)
        assert model.encode_text is None
        assert model.logit_scale == 100
