"""The embedded model `tiny`: a stock open_clip model with consistent files."""

from __future__ import annotations

import gzip
from hashlib import sha256

import pytest
import torch
from kit import refused
from safetensors.torch import load_file, save_file

from kfacpack.demo import EMBEDDED_MODELS
from kfacpack.errors import KfacpackError
from kfacpack.models.families import load_model

TINY = EMBEDDED_MODELS["tiny"]


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny")


def test_tiny_is_open_clips_own_model_with_the_packaged_weights(tiny, pictures):
    import open_clip

    stock = open_clip.create_model("tiny", pretrained=str(TINY.weights)).eval()
    batch = tiny.prepare(pictures, "any")
    assert torch.equal(tiny.forward(batch), stock.encode_image(batch, normalize=True))
    stored = load_file(TINY.weights)
    assert stored.keys() == tiny.module.state_dict().keys()
    assert all(torch.equal(value, stored[name].float()) for name, value in tiny.module.state_dict().items())
    assert (tiny.family, tiny.name) == ("open_clip", "tiny")
    assert sha256(TINY.weights.read_bytes()).hexdigest().startswith(tiny.revision)


def test_tiny_is_small():
    assert TINY.weights.stat().st_size < 6e6
    assert 1e6 < TINY.parameters < 3e6


def test_declared_facts_match_the_model(tiny):
    assert TINY.parameters == sum(parameter.numel() for parameter in tiny.module.parameters())
    assert TINY.architecture["embed_dim"] == tiny.function.width


def test_images_are_scaled_to_minus_one_to_one(tiny):
    from PIL import Image

    size = TINY.architecture["vision_cfg"]["image_size"]
    for level, value in ((0, -1.0), (255, 1.0)):
        batch = tiny.prepare([{"image": Image.new("L", (50, 40), level)}], "any")
        torch.testing.assert_close(batch, torch.full((1, 3, size, size), value))


def test_every_token_has_an_embedding():
    """An empty line among the merges would be an empty token and shift all following ones."""
    merges = gzip.decompress(TINY.merges.read_bytes()).decode("utf-8").split("\n")[1:]
    assert all(len(merge.split()) == 2 for merge in merges)
    assert TINY.architecture["text_cfg"]["vocab_size"] >= 2 * 256 + len(merges) + 2


def test_texts_are_tokenized_with_the_packaged_merges(tiny):
    from open_clip.tokenizer import SimpleTokenizer

    texts = ["a photo of the digit three.", "red stripes"]
    length = TINY.architecture["text_cfg"]["context_length"]
    tokens = SimpleTokenizer(bpe_path=str(TINY.merges), context_length=length)(texts)
    assert torch.equal(tiny.encode_text(texts), tiny.module.encode_text(tokens, normalize=True))


def test_other_weights_can_be_used(tmp_path, pictures):
    random = load_model("tiny", weights="random", seed=4)
    assert random.revision == "random-4"
    save_file(random.module.state_dict(), tmp_path / "own.safetensors")
    own = load_model("tiny", weights=tmp_path / "own.safetensors")
    assert own.revision is None
    batch = random.prepare(pictures, "any")
    assert torch.equal(own.forward(batch), random.forward(batch))
    larger = load_model("tiny", weights=tmp_path / "own.safetensors", image_size=56)
    assert larger.forward(larger.prepare(pictures, "any")).shape == (3, own.function.width)


@pytest.mark.parametrize("vision_alone", [False, True])
def test_half_precision_weights_can_be_resized(tiny, tmp_path, pictures, vision_alone):
    """torch cannot resample in half precision on a CPU, so it is done in float32."""
    stored = {name: value for name, value in load_file(TINY.weights).items() if not vision_alone or "visual." in name}
    whole = {name: value.float() for name, value in stored.items()}
    outputs = []
    for name, state in (("half", stored), ("whole", whole)):
        save_file(state, tmp_path / f"{name}.safetensors")
        model = load_model("tiny", weights=tmp_path / f"{name}.safetensors", image_size=56)
        outputs.append(model.forward(model.prepare(pictures, "any")))
    assert torch.equal(*outputs)
    assert load_model("tiny", image_size=56).function.detail.startswith("encode_image(x, normalize=True) of 56x56")


def test_tiny_has_no_tags():
    with refused(KfacpackError, "tag 'openai' for tiny", "available tags: none"):
        load_model("tiny/openai")
    with refused(KfacpackError, "'tinny'; did you mean 'tiny'"):
        load_model("tinny")
