"""Image models: stock modules, functions and transforms; errors for weights that do not fit name the tensor."""

from __future__ import annotations

import io
import shutil
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from kit import refused
from safetensors.torch import load_file, save_file
from torch.nn.functional import normalize

from kfacpack.errors import KfacpackError
from kfacpack.models.families import load_model

SHARED = Path(__file__).resolve().parents[3] / "shared"
TIMM = "timm:test_vit"  # two blocks of 64 dimensions, patches of 16 pixels


@pytest.fixture(scope="module")
def timm_file(tmp_path_factory):
    """A complete weights file for images of 64 pixels."""
    path = tmp_path_factory.mktemp("timm") / "vit.safetensors"
    save_file(load_model(TIMM, weights="random", image_size=64, seed=5).module.state_dict(), path)
    return path


@pytest.fixture
def clip_file(tiny_clip, tmp_path):
    path = tmp_path / "clip.safetensors"
    save_file(load_model(tiny_clip, weights="random", seed=5).module.state_dict(), path)
    return path


@pytest.fixture(params=["open_clip", "timm"])
def image_model(request, tiny_clip):
    return load_model({"open_clip": tiny_clip, "timm": TIMM}[request.param], weights="random", image_size=32, seed=3)


def edited(source, target, edit):
    state = load_file(source)
    edit(state)
    save_file(state, target)
    return target


def test_f_has_unit_norm_and_the_declared_width(image_model, pictures):
    f = image_model.forward(image_model.prepare(pictures, "any"))
    assert f.shape == (3, image_model.function.width)
    torch.testing.assert_close(f.norm(dim=1), torch.ones(3))
    assert image_model.function.normalized
    assert not image_model.module.training


def test_clip_is_open_clips_own_model(tiny_clip, clip_file, pictures):
    import open_clip

    stock, _, transform = open_clip.create_model_and_transforms(tiny_clip, pretrained=str(clip_file))
    ours = load_model(tiny_clip, weights=clip_file)
    batch = ours.prepare(pictures, "any")
    assert torch.equal(batch, torch.stack([transform(example["image"].convert("RGB")) for example in pictures]))
    assert torch.equal(ours.forward(batch), stock.eval().encode_image(batch, normalize=True))
    assert list(ours.module.state_dict()) == list(stock.state_dict())
    assert ours.revision is None


def test_timm_is_timms_own_model(timm_file, pictures):
    import timm

    ours = load_model(TIMM, weights=timm_file, image_size=64)
    stock = timm.create_model("test_vit", img_size=64).eval()
    stock.load_state_dict(load_file(timm_file))
    setting = timm.data.resolve_model_data_config(stock, {"input_size": (3, 64, 64)})
    transform = timm.data.create_transform(**setting, is_training=False)
    batch = ours.prepare(pictures, "any")
    assert torch.equal(batch, torch.stack([transform(example["image"].convert("RGB")) for example in pictures]))
    features = stock.forward_head(stock.forward_features(batch), pre_logits=True)
    assert torch.equal(ours.forward(batch), normalize(features, dim=-1))
    assert list(ours.module.state_dict()) == list(stock.state_dict())


def test_embeddings_and_unused_parameters_are_frozen(image_model, pictures):
    module = image_model.module
    image_model.forward(image_model.prepare(pictures, "any")).sum().backward()
    frozen = {name for name, _ in module.named_parameters() if any(fnmatchcase(name, p) for p in image_model.frozen)}
    unused = {name for name, parameter in module.named_parameters() if parameter.grad is None}
    assert unused <= frozen
    used_but_frozen = {name.split(".")[-1] if "conv" not in name else "conv1" for name in frozen - unused}
    assert used_but_frozen in ({"conv1", "positional_embedding"}, {"weight", "bias", "pos_embed"})


def test_random_weights_depend_on_the_seed_and_are_recorded(tiny_clip):
    before = torch.get_rng_state()
    one, same, other = (load_model(tiny_clip, weights="random", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert (one.revision, other.revision) == ("random-1", "random-2")
    assert torch.equal(one.module.visual.proj, same.module.visual.proj)
    assert not torch.equal(one.module.visual.proj, other.module.visual.proj)


def test_a_file_may_hold_the_vision_tower_alone(tiny_clip, clip_file, tmp_path, pictures):
    path = tmp_path / "vision.safetensors"
    save_file({name: tensor for name, tensor in load_file(clip_file).items() if name.startswith("visual.")}, path)
    whole, vision = load_model(tiny_clip, weights=clip_file), load_model(tiny_clip, weights=path)
    batch = whole.prepare(pictures, "any")
    assert torch.equal(whole.forward(batch), vision.forward(batch))


@pytest.mark.parametrize("kind", ["whole", "vision"])
def test_clip_resamples_its_position_embedding(tiny_clip, clip_file, tmp_path, kind):
    state = {
        name: tensor for name, tensor in load_file(clip_file).items() if kind == "whole" or name.startswith("visual.")
    }
    state["visual.positional_embedding"][1:] = 0.25  # resampling keeps a constant
    save_file(state, tmp_path / "constant.safetensors")
    model = load_model(tiny_clip, weights=tmp_path / "constant.safetensors", image_size=64)
    embedding = model.module.visual.positional_embedding
    assert embedding.shape == (1 + 8 * 8, 32)
    torch.testing.assert_close(embedding[1:], torch.full((64, 32), 0.25))
    assert torch.equal(embedding[0], state["visual.positional_embedding"][0])


def test_timm_resamples_its_position_embedding(timm_file, pictures):
    model = load_model(TIMM, weights=timm_file, image_size=96)
    assert model.module.pos_embed.shape == (1, 1 + 6 * 6, 64)
    assert torch.equal(model.module.cls_token, load_file(timm_file)["cls_token"])
    assert model.prepare(pictures, "any").shape == (3, 3, 96, 96)


@pytest.mark.parametrize("classes", [0, 7])
def test_a_timm_file_may_have_another_classifier(timm_file, tmp_path, classes):
    def replace_head(state):
        for name in ("head.weight", "head.bias"):
            state[name] = state[name][:classes].clone()
            if not classes:
                del state[name]

    path = edited(timm_file, tmp_path / "other.safetensors", replace_head)
    model = load_model(TIMM, weights=path, image_size=64)
    assert set(model.module.state_dict()) == set(load_file(path))


def test_a_missing_or_misshapen_tensor_is_named(tiny_clip, clip_file, timm_file, tmp_path):
    cases = [
        (tiny_clip, clip_file, "visual.proj", 32),
        (TIMM, timm_file, "blocks.1.attn.qkv.bias", 64),
    ]
    for spec, source, name, size in cases:
        path = tmp_path / "wrong.safetensors"
        with refused(KfacpackError, path, "does not contain the weights", f"{name!r} is missing"):
            load_model(spec, weights=edited(source, path, lambda state: state.pop(name)), image_size=size)  # noqa: B023
        edited(source, path, lambda state: state.update({name: torch.zeros(3, 4)}))  # noqa: B023
        with refused(KfacpackError, name, "has shape [3, 4], expected"):
            load_model(spec, weights=path, image_size=size)
        edited(source, path, lambda state: state.update(stranger=torch.zeros(1)))
        with refused(KfacpackError, path, "stranger"):
            load_model(spec, weights=path, image_size=size)


def test_only_a_valid_safetensors_file_is_loaded(tiny_clip, clip_file, tmp_path):
    pickled = io.BytesIO()
    torch.save(load_file(clip_file), pickled)
    whole = clip_file.read_bytes()
    for content, problem in [
        (pickled.getvalue(), "pickles and other formats are never loaded"),
        (whole[:-5], "wrong.safetensors"),
        (whole[:100], "the file ends at byte 100"),
        (b"", "expected at least 8 bytes, got 0"),
    ]:
        (tmp_path / "wrong.safetensors").write_bytes(content)
        for spec in (tiny_clip, TIMM):
            with pytest.raises(KfacpackError, match=problem):
                load_model(spec, weights=tmp_path / "wrong.safetensors")
    shutil.copy(clip_file, tmp_path / "weights.bin")
    with refused(KfacpackError, tmp_path / "weights.bin", "must end in .safetensors"):
        load_model(tiny_clip, weights=tmp_path / "weights.bin")
    with refused(KfacpackError, tmp_path / "nothing.safetensors", "No such file"):
        load_model(tiny_clip, weights=tmp_path / "nothing.safetensors")


def test_an_image_model_refuses_a_text_task(image_model, pairs):
    with refused(KfacpackError, "expects images", "'snli'", "'premise', 'hypothesis'"):
        image_model.prepare(pairs, "snli")


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs real weights in ../shared")
def test_the_real_vit_tiny_loads_at_96_pixels(pictures):
    path = SHARED / "models" / "vit_tiny_patch16_224.safetensors"
    model = load_model("timm:vit_tiny_patch16_224", weights=path, image_size=96)
    real = load_file(path)
    assert set(model.module.state_dict()) == set(real)
    assert all(
        torch.equal(tensor, real[name]) for name, tensor in model.module.state_dict().items() if name != "pos_embed"
    )
    assert model.forward(model.prepare(pictures, "any")).shape == (3, 192)
