"""`kfacpack models`, from the command line."""

from __future__ import annotations

import json

import pytest
from kfacpack_cli.main import app
from typer.testing import CliRunner

from kfacpack.demo import EMBEDDED_MODELS
from kfacpack.models.families import FAMILIES, load_model


def run(*arguments, code=0):
    result = CliRunner().invoke(app, ["models", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


def test_every_family_and_every_embedded_model_is_listed():
    output = json.loads(run("--json").stdout)
    assert [entry["family"] for entry in output["families"]] == [family.name for family in FAMILIES.values()]
    assert {entry["family"]: entry["head"] for entry in output["families"]}["open_clip"] == "text"
    tiny = output["embedded"][0]
    assert tiny["name"] == "tiny"
    assert tiny["bytes"] == EMBEDDED_MODELS["tiny"].weights.stat().st_size
    assert tiny["parameters"] == sum(entry.numel() for entry in load_model("tiny").module.parameters())
    shown = run().stdout
    for words in ("tiny", f"{tiny['parameters']:,}", "timm:NAME", "t5:NAME_OR_DIR", "prototypes"):
        assert words in shown


def add_to_cache(cache, repository, files):
    """Creates a repository in the layout of huggingface_hub's cache."""
    snapshot = cache / f"models--{repository.replace('/', '--')}" / "snapshots" / ("0" * 39 + "1")
    for name, content in files.items():
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).write_text(content)
    refs = snapshot.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text(snapshot.name)


def test_downloaded_models_are_listed_by_their_option(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert json.loads(run("--json").stdout)["downloaded"] == []
    whole = {"model.safetensors": "1234", "tokenizer.json": "{}"}
    add_to_cache(tmp_path, "laion/CLIP-ViT-B-32-laion2B-s34B-b79K", {"open_clip_model.safetensors": "123"})
    add_to_cache(tmp_path, "laion/CLIP-ViT-H-14-laion2B-s32B-b79K", {"open_clip_pytorch_model.bin": "a pickle"})
    add_to_cache(tmp_path, "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k", {"model.safetensors": "1"})
    add_to_cache(tmp_path, "google-t5/t5-small", {"config.json": '{"model_type": "t5"}', **whole})
    llama = '{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}'
    add_to_cache(tmp_path, "somebody/llama", {"config.json": llama, **whole})
    add_to_cache(tmp_path, "somebody/bert", {"config.json": '{"model_type": "bert"}', **whole})
    add_to_cache(tmp_path, "openai/clip-vit-base-patch32", {"config.json": '{"model_type": "clip"}', **whole})
    vision = {"config.json": '{"model_type": "clip_vision_model"}', "model.safetensors": "1"}
    add_to_cache(tmp_path, "somebody/clip_dtd", vision)
    add_to_cache(tmp_path, "somebody/without-weights", {"config.json": '{"model_type": "bert"}'})
    add_to_cache(tmp_path, "somebody/damaged", {"config.json": "{", **whole})
    output = {entry["model"]: entry for entry in json.loads(run("--json").stdout)["downloaded"]}
    assert set(output) == {
        "ViT-B-32/laion2b_s34b_b79k",
        "timm:vit_tiny_patch16_224.augreg_in21k_ft_in1k",
        "t5:google-t5/t5-small",
        "lm:somebody/llama",
        "hf:somebody/bert",
        "clip:openai/clip-vit-base-patch32",
        "clip:somebody/clip_dtd",
    }
    assert output["ViT-B-32/laion2b_s34b_b79k"]["bytes"] == 3
    assert "timm:vit_tiny_patch16_224" in run().stdout


def test_the_family_of_a_model_is_listed():
    for spec in ("tiny", "timm:test_vit"):
        model = load_model(spec, weights="random")
        assert model.family in {family.name for family in FAMILIES.values()}


def test_showing_one_model():
    output = json.loads(run("timm:test_vit", "--weights", "random", "--image-size", 32, "--json").stdout)
    assert (output["family"], output["revision"], output["width"], output["head"]) == (
        "timm",
        "random-0",
        64,
        "prototypes",
    )
    assert "pos_embed" in output["frozen"]
    shown = run("tiny").stdout
    for words in ("tiny (open_clip)", EMBEDDED_MODELS["tiny"].revision, "of width 128", "visual.conv1.weight", "text"):
        assert words in shown


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["ViT-B-33"], "'ViT-B-33'; did you mean 'ViT-B-32'"),
        (["--weights", "random"], "--weights and --image-size need a model"),
        (["--image-size", "28"], "--weights and --image-size need a model"),
        (["tiny", "--weights", "/no/such.safetensors"], "/no/such.safetensors"),
    ],
)
def test_wrong_input_is_refused(wrong, words):
    result = run(*wrong, code=2)
    assert words in result.stderr
    assert not result.stdout
