"""CLIP of transformers: the same f and logits as open_clip for the same weights, and transformers' own pixels."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from estimation.nets import ggn
from kit import refused
from linearization.jvp_reference import assert_exact
from PIL import Image
from safetensors.torch import load_file, save_file

import kfacpack as kp
from kfacpack._compat import make_torchvision_importable
from kfacpack.errors import KfacpackError
from kfacpack.models.families import load_model
from kfacpack.models.heads import text_head
from kfacpack.training.regimes import REGIMES

TEXTS = ["a photo of a dog.", "a cat", "stripes and dots on a very long winding road to nowhere"]


class Animals:
    """A task with class names and templates."""

    name, classes, templates = "animals", ("dog", "grey_cat"), ("a photo of a {}.", "a {}")


@pytest.fixture(scope="session")
def tokenizer_files(tmp_path_factory):
    """The vocabulary and merges of CLIP, which come with open_clip, in transformers' layout."""
    make_torchvision_importable()
    from open_clip.tokenizer import SimpleTokenizer
    from transformers import CLIPTokenizer

    folder, own = tmp_path_factory.mktemp("tokenizer"), SimpleTokenizer(context_length=8)
    names = {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}
    (folder / "vocab.json").write_text(
        json.dumps({names.get(word, word): number for word, number in own.encoder.items()})
    )
    merges = sorted(own.bpe_ranks, key=own.bpe_ranks.get)
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, merges)]))
    words = [line.split() for line in (folder / "merges.txt").read_text().splitlines()[1:]]
    vocabulary = json.loads((folder / "vocab.json").read_text())
    try:
        tokenizer = CLIPTokenizer(vocab=vocabulary, merges=[tuple(pair) for pair in words], model_max_length=8)
    except TypeError:  # transformers 4 reads files
        tokenizer = CLIPTokenizer(folder / "vocab.json", folder / "merges.txt", model_max_length=8)
    target = tmp_path_factory.mktemp("saved")
    tokenizer.save_pretrained(target)
    return target


def converted(state, layers, text_layers):
    """Returns the weights of open_clip's ViT under the names of `CLIPModel`."""
    names = {
        "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
        "visual.class_embedding": "vision_model.embeddings.class_embedding",
        "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
        "positional_embedding": "text_model.embeddings.position_embedding.weight",
        "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
        "logit_scale": "logit_scale",
    }
    for part in ("weight", "bias"):
        names[f"visual.ln_pre.{part}"] = f"vision_model.pre_layrnorm.{part}"
        names[f"visual.ln_post.{part}"] = f"vision_model.post_layernorm.{part}"
        names[f"ln_final.{part}"] = f"text_model.final_layer_norm.{part}"
    result = {theirs: state[ours].clone() for ours, theirs in names.items()}
    result["visual_projection.weight"] = state["visual.proj"].T.contiguous()
    result["text_projection.weight"] = state["text_projection"].T.contiguous()
    for tower, target, count in (("visual.", "vision_model", layers), ("", "text_model", text_layers)):
        for k in range(count):
            ours, theirs = f"{tower}transformer.resblocks.{k}.", f"{target}.encoder.layers.{k}."
            for part in ("weight", "bias"):
                for name, chunk in zip("qkv", state[f"{ours}attn.in_proj_{part}"].chunk(3), strict=True):
                    result[f"{theirs}self_attn.{name}_proj.{part}"] = chunk.clone()
                for one, other in (
                    ("attn.out_proj", "self_attn.out_proj"),
                    ("ln_1", "layer_norm1"),
                    ("ln_2", "layer_norm2"),
                    ("mlp.c_fc", "mlp.fc1"),
                    ("mlp.c_proj", "mlp.fc2"),
                ):
                    result[f"{theirs}{other}.{part}"] = state[f"{ours}{one}.{part}"].clone()
    return result


@pytest.fixture(scope="session", params=["quick_gelu", "gelu"])
def same_model(request, tmp_path_factory, tokenizer_files):
    """An open_clip model, and a folder of transformers' CLIP with its weights."""
    import open_clip
    from transformers import CLIPConfig, CLIPModel

    name = f"ViT-{request.param}-test"
    path = tmp_path_factory.mktemp("configs") / f"{name}.json"
    vision = {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8}
    text = {"context_length": 8, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
    config = {"embed_dim": 24, "vision_cfg": vision, "text_cfg": text, "quick_gelu": request.param == "quick_gelu"}
    path.write_text(json.dumps(config))
    open_clip.add_model_config(path)
    ours = load_model(name, weights="random", seed=3)

    common = {"hidden_act": request.param, "projection_dim": 24}
    tower = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    words = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    stock = CLIPModel(
        CLIPConfig(
            vision_config={**common, **tower, "image_size": 32, "patch_size": 8},
            text_config={**common, **words, "max_position_embeddings": 8},
            projection_dim=24,
        )
    )
    stock.load_state_dict(converted(ours.module.state_dict(), 2, 1))
    folder = tmp_path_factory.mktemp(request.param)
    shutil.copytree(tokenizer_files, folder, dirs_exist_ok=True)
    stock.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": 32, "crop_size": 32, "resample": 3}))
    return name, folder


@pytest.fixture
def clip_folder(same_model):
    return same_model[1]


def test_f_and_logits_are_those_of_open_clip(same_model, pictures):
    name, folder = same_model
    ours, theirs = load_model(f"clip:{folder}"), load_model(name, weights="random", seed=3)
    batch = theirs.prepare(pictures, "any")
    f, expected = ours.forward(batch), theirs.forward(batch)
    torch.testing.assert_close(f, expected, rtol=0, atol=1e-5)
    assert ours.function.width == theirs.function.width == 24
    torch.testing.assert_close(ours.encode_text(TEXTS), theirs.encode_text(TEXTS), rtol=0, atol=1e-5)
    heads = [text_head(model, Animals()) for model in (ours, theirs)]
    logits = [head.logits(output) for head, output in zip(heads, (f, expected), strict=True)]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-4)
    assert ours.logit_scale == pytest.approx(theirs.logit_scale)


@pytest.mark.parametrize("size", [16, 48, 56])
def test_f_is_that_of_open_clip_at_another_image_size(same_model, size, pictures, tmp_path):
    name, folder = same_model
    save_file(load_model(name, weights="random", seed=3).module.state_dict(), tmp_path / "own.safetensors")
    theirs = load_model(name, weights=tmp_path / "own.safetensors", image_size=size)
    ours = load_model(f"clip:{folder}", image_size=size)
    batch = ours.prepare(pictures, "any")
    assert batch.shape == (3, 3, size, size)
    torch.testing.assert_close(ours.forward(batch), theirs.forward(batch), rtol=0, atol=1e-5)


def test_the_module_is_that_of_transformers(clip_folder, pictures):
    from transformers import CLIPModel

    model, stock = load_model(f"clip:{clip_folder}"), CLIPModel.from_pretrained(clip_folder).eval()
    assert list(model.module.state_dict()) == list(stock.state_dict())
    batch = model.prepare(pictures, "any")
    with torch.no_grad():
        output = stock(pixel_values=batch, input_ids=torch.tensor([[49406, 320, 49407]]))
    torch.testing.assert_close(model.forward(batch), output.image_embeds, rtol=0, atol=1e-6)
    published = {name for name in load_file(clip_folder / "model.safetensors") if name.startswith("vision_model.")}
    assert published == {name for name in model.module.state_dict() if name.startswith("vision_model.")}


@pytest.mark.parametrize(
    "config",
    [
        {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}, "resample": 3},
        {"size": 37, "crop_size": 32, "resample": 2, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]},
        {"size": {"height": 32, "width": 32}, "do_center_crop": False},
        {},
    ],
)
def test_pixels_are_those_of_the_image_processor(clip_folder, config, pictures, tmp_path):
    import transformers

    folder = tmp_path / "model"
    shutil.copytree(clip_folder, folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(config))
    if not config:
        (folder / "preprocessor_config.json").unlink()
        config = {"size": 32, "crop_size": 32}
    processor = getattr(transformers, "CLIPImageProcessorPil", transformers.CLIPImageProcessor)(**config)
    odd = [{"image": Image.effect_noise((61, 40), 60).convert("RGB")}, {"image": Image.new("RGB", (32, 75), "red")}]
    examples = [*pictures, *odd]
    images = [example["image"].convert("RGB") for example in examples]
    expected = processor(images=images, return_tensors="pt")["pixel_values"]
    pixels = load_model(f"clip:{folder}").prepare(examples, "any")
    torch.testing.assert_close(pixels, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "facts"),
    [
        ({"do_resize": False}, ("do_resize is false",)),
        ({"size": 32, "crop_size": {"height": 32, "width": 16}}, ("crop_size",)),
        ({"size": 48, "crop_size": 48}, ("images of 48x48 pixels", "expects 32x32", "--image-size")),
        ({"size": 20, "crop_size": 32}, ("resized to 20", "32")),
        ({"size": 32, "do_center_crop": False, "crop_size": 1, "do_rescale": False}, ("do_rescale is false",)),
    ],
)
def test_preprocessing_that_cannot_be_followed_is_refused(clip_folder, config, facts, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(clip_folder, folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(config))
    with refused(KfacpackError, folder, "preprocessor_config.json", *facts):
        load_model(f"clip:{folder}")


def test_frozen_parameters_and_the_attention_regime(clip_folder, pictures):
    model = load_model(f"clip:{clip_folder}")
    model.forward(model.prepare(pictures, "any")).sum().backward()
    trained = set(REGIMES["full"](model).parameters)
    used = {name for name, parameter in model.module.named_parameters() if parameter.grad is not None}
    embeddings = {f"vision_model.embeddings.{part}_embedding.weight" for part in ("patch", "position")}
    assert trained == used - embeddings
    attention = REGIMES["attention"](model).parameters
    assert len(attention) == 2 * 4 * 2
    assert all(".self_attn." in name for name in attention)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-9)])
def test_the_linearised_model_equals_jvp(clip_folder, dtype, tolerance, pictures):
    model = load_model(f"clip:{clip_folder}", dtype=dtype)
    lin = assert_exact(model, model.prepare(pictures, "any").to(dtype), tolerance, all_modes=True)
    assert lin.programs == 2, lin.untraced
    assert {"visual_projection.weight", "vision_model.embeddings.class_embedding"} <= set(lin.parameters)


def test_curvature_equals_brute_force(clip_folder, pictures):
    model = load_model(f"clip:{clip_folder}", dtype=torch.float64)
    x = model.prepare(pictures, "any").double()
    whole = kp.estimate(model, [x])
    assert set(whole.parameters) == set(REGIMES["full"](model).parameters)
    blocks = {block.name: block.operation for block in whole.blocks}
    assert blocks["vision_model.encoder.layers.0.self_attn.q_proj.weight"] == "linear"
    dense = ["vision_model.embeddings.class_embedding", "vision_model.post_layernorm.weight"]
    exact = kp.estimate(model, [x], fisher="exact", params=[*dense, "visual_projection.weight"])
    model.module.forward = model.forward
    for block in exact.blocks:
        expected = ggn(model.module, x, block.parameters)
        if block.parameters[0] in dense:
            torch.testing.assert_close(block.structure.matrix.dense(torch.float64), expected, rtol=1e-7, atol=1e-12)
    one = kp.estimate(model, [x[:1]], fisher="exact", params=["visual_projection.weight"], forward=model.forward)
    ((B, A, _),) = one.blocks[0].structure.terms
    torch.testing.assert_close(
        torch.kron(B.dense(torch.float64), A.dense(torch.float64)),
        ggn(model.module, x[:1], ("visual_projection.weight",)),
        rtol=1e-6,
        atol=1e-10,
    )


@pytest.mark.parametrize("size", [None, 48])
def test_a_saved_model_is_loaded_by_transformers(clip_folder, size, pictures, tmp_path):
    import transformers

    model = load_model(f"clip:{clip_folder}", image_size=size)
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5))
    model.checkpoint.save(tmp_path / "edited")
    assert model.checkpoint.load_command(tmp_path / "edited").startswith("transformers.CLIPModel.from_pretrained(")
    stock = transformers.CLIPModel.from_pretrained(tmp_path / "edited")
    for name, value in model.module.state_dict().items():
        assert torch.equal(stock.state_dict()[name], value), name
    again = load_model(f"clip:{tmp_path / 'edited'}")
    batch = model.prepare(pictures, "any")
    assert torch.equal(again.prepare(pictures, "any"), batch)
    assert torch.equal(again.forward(batch), model.forward(batch))
    assert torch.equal(again.encode_text(TEXTS), model.encode_text(TEXTS))
    weights = tmp_path / "edited" / "model.safetensors"
    assert torch.equal(
        load_model(f"clip:{clip_folder}", weights=weights, image_size=size).forward(batch), again.forward(batch)
    )


@pytest.mark.parametrize("prefixed", [True, False])
def test_a_vision_tower_without_projection_has_another_f(clip_folder, prefixed, pictures, tmp_path):
    """Names in published files of CLIPVisionModel have the prefix; transformers 5 writes them without it."""
    import transformers
    from transformers import CLIPVisionModel

    if not prefixed and int(transformers.__version__.partition(".")[0]) < 5:
        pytest.skip("transformers 4 does not read names without the prefix")

    stock = CLIPVisionModel.from_pretrained(clip_folder).eval()
    stock.save_pretrained(tmp_path / "vision")
    file = tmp_path / "vision" / "model.safetensors"
    plain = {name.removeprefix("vision_model."): value.clone() for name, value in load_file(file).items()}
    names = {name: f"vision_model.{name}" if prefixed else name for name in plain}
    save_file({names[name]: value for name, value in plain.items()}, file, {"format": "pt"})
    model = load_model(f"clip:{tmp_path / 'vision'}")
    whole = load_model(f"clip:{clip_folder}")
    assert model.encode_text is None
    assert model.function.width == 32
    assert "without the projection" in model.function.detail
    batch = whole.prepare(pictures, "any")
    pooled = stock(pixel_values=batch).pooler_output
    torch.testing.assert_close(model.forward(batch), torch.nn.functional.normalize(pooled, dim=-1))
    tower = {name for name in whole.module.state_dict() if name.startswith("vision_model.")}
    assert {name for name in model.module.state_dict() if name.startswith("vision_model.")} == tower
    assert "visual_projection.weight" not in REGIMES["full"](model).parameters
    model.checkpoint.save(tmp_path / "saved")
    assert not any("projection" in name for name in load_file(tmp_path / "saved" / "model.safetensors"))


def test_a_vision_tower_with_projection_has_the_same_f(clip_folder, pictures, tmp_path):
    from transformers import CLIPVisionModelWithProjection

    CLIPVisionModelWithProjection.from_pretrained(clip_folder).save_pretrained(tmp_path / "vision")
    model, whole = load_model(f"clip:{tmp_path / 'vision'}"), load_model(f"clip:{clip_folder}")
    batch = whole.prepare(pictures, "any")
    assert torch.equal(model.forward(batch), whole.forward(batch))
    assert (model.encode_text, model.logit_scale) == (None, 100)
    file = tmp_path / "vision" / "model.safetensors"
    from_file = load_model(f"clip:{clip_folder}", weights=file)
    assert torch.equal(from_file.forward(batch), whole.forward(batch))
    assert from_file.encode_text is None
    from_file.checkpoint.save(tmp_path / "saved")
    assert set(load_file(tmp_path / "saved" / "model.safetensors")) == set(load_file(file))


def test_damaged_weights_are_refused(clip_folder, bert_folder, tmp_path):
    state = load_file(clip_folder / "model.safetensors")
    path = tmp_path / "wrong.safetensors"
    for name in ("vision_model.encoder.layers.1.mlp.fc1.bias", "visual_projection.weight", "logit_scale"):
        save_file({key: value for key, value in state.items() if key != name}, path, {"format": "pt"})
        with refused(KfacpackError, path, f"{name!r} is missing"):
            load_model(f"clip:{clip_folder}", weights=path)
    save_file({**state, "visual_projection.weight": torch.zeros(3, 4)}, path, {"format": "pt"})
    with refused(KfacpackError, path, "visual_projection.weight", "has shape [3, 4], expected [24, 32]"):
        load_model(f"clip:{clip_folder}", weights=path)
    with refused(KfacpackError, "a 'bert' model", "expected 'clip'"):
        load_model(f"clip:{bert_folder}")
    with refused(KfacpackError, "no such folder", "config.json"):
        load_model("clip:./nowhere")
    with refused(KfacpackError, "image size 4", "patch size 8"):
        load_model(f"clip:{clip_folder}", image_size=4)
    shutil.copytree(clip_folder, tmp_path / "copy")
    (tmp_path / "copy" / "model.safetensors").unlink()
    torch.save(state, tmp_path / "copy" / "pytorch_model.bin")
    with refused(KfacpackError, tmp_path / "copy", "safetensors", "--weights"):
        load_model(f"clip:{tmp_path / 'copy'}")


def test_a_folder_without_tokenizer_has_f_but_no_text_head(clip_folder, tmp_path, pictures):
    (tmp_path / "bare").mkdir()
    for file in ("config.json", "model.safetensors"):
        shutil.copy(clip_folder / file, tmp_path / "bare")
    model = load_model(f"clip:{tmp_path / 'bare'}")
    assert model.forward(model.prepare(pictures, "any")).shape == (3, 24)
    with refused(KfacpackError, tmp_path / "bare", "tokenizer", "--head prototypes"):
        model.encode_text(TEXTS)
    model.checkpoint.save(tmp_path / "saved")
    assert load_model(f"clip:{tmp_path / 'saved'}").function == model.function


def test_random_weights_depend_on_the_seed(clip_folder, pictures):
    one, same, other = (
        load_model(f"clip:{clip_folder}", weights="random", seed=seed, image_size=16) for seed in (1, 1, 2)
    )
    f = [model.forward(model.prepare(pictures, "any")) for model in (one, same, other)]
    assert torch.equal(f[0], f[1])
    assert not torch.equal(f[0], f[2])
    assert one.revision == "random-1"
    half = load_model(f"clip:{clip_folder}", dtype=torch.bfloat16, image_size=48)
    assert half.forward(half.prepare(pictures, "any")).dtype is torch.bfloat16


@pytest.mark.parametrize("prefixed", [True, False])
def test_a_fine_tuned_vision_tower_is_a_vector_of_the_whole_model(clip_folder, prefixed, pictures, tmp_path):
    """As the fine-tuned checkpoints of CLIPVisionModel are published, with either form of their names."""
    from transformers import CLIPVisionModel

    stock = CLIPVisionModel.from_pretrained(clip_folder)
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5))
    stock.save_pretrained(tmp_path / "tuned")
    file = tmp_path / "tuned" / "model.safetensors"
    plain = {name.removeprefix("vision_model."): value.clone() for name, value in load_file(file).items()}
    save_file({f"vision_model.{n}" if prefixed else n: value for n, value in plain.items()}, file, {"format": "pt"})
    base = load_model(f"clip:{clip_folder}")
    vector = kp.TaskVector.from_checkpoint(base, tmp_path / "tuned", task="dtd")
    edited = vector.apply(base.module)
    assert all(torch.equal(edited.state_dict()[f"vision_model.{name}"], value) for name, value in plain.items())


def test_an_exported_adapter_has_the_outputs_of_the_vector_and_extracts_to_it(clip_folder, pictures, tmp_path):
    peft = pytest.importorskip("peft")
    model = load_model(f"clip:{clip_folder}")
    layers = [name for name, value in model.module.named_parameters() if value.dim() == 2 and "encoder" in name]
    changes = {
        name: 0.1 * torch.randn(model.module.state_dict()[name].shape, generator=torch.Generator().manual_seed(k))
        for k, name in enumerate(layers)
        if name.startswith("vision_model.")
    }
    about = kp.AboutVector(base=model.base(changes), function=model.function, regime="full", tasks=())
    vector, x = kp.TaskVector(changes, about), model.prepare(pictures, "any")
    bundle = kp.estimate(model, [x], params=list(changes))
    result = kp.export_lora(vector, tmp_path / "lora", rank=4, bundle=bundle, model=model)
    assert len(result.matrices) == len(changes) == 12
    assert all(matrix.metric_error <= matrix.svd_metric_error for matrix in result.matrices)
    extracted = kp.TaskVector.from_checkpoint(model, tmp_path / "lora", task="dtd")
    expected = extracted.apply(model.module)
    whole = load_model(f"clip:{clip_folder}").module
    adapted = peft.PeftModel.from_pretrained(whole, tmp_path / "lora").eval()
    with torch.no_grad():
        outputs = [net.vision_model(pixel_values=x).pooler_output for net in (adapted.base_model.model, expected)]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-5)
    again = kp.export_lora(extracted, tmp_path / "again", rank=4, model=model)
    assert again.error < 1e-6
    assert {matrix.method for matrix in again.matrices} == {"factors"}
