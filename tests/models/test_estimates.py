"""Curvature of every model family equals brute force, from the library and from the command line."""

from __future__ import annotations

import json
import os

import pytest
import torch
from estimation.nets import ggn
from kit import refused
from models.conftest import SENTENCES
from processes import python

import kfacpack as kp
from kfacpack.estimation.options import EstimateOptions
from kfacpack.estimation.task_estimate import TaskEstimate
from kfacpack.models.families import load_model
from kfacpack.tasks.registry import load_task

OFFLINE = {**os.environ, "HF_HUB_OFFLINE": "1"}


@pytest.fixture
def text_data(tmp_path):
    """Sixteen pairs of sentences of unequal length, as parquet in the Hub's layout."""
    import datasets

    words = SENTENCES.split()
    pairs = {
        "premise": [" ".join(words[n : n + 2 + n % 5]) for n in range(16)],
        "hypothesis": [" ".join(words[-2 - n % 4 :]) for n in range(16)],
        "label": [n % 3 for n in range(16)],
    }
    features = datasets.Features(
        premise=datasets.Value("string"),
        hypothesis=datasets.Value("string"),
        label=datasets.ClassLabel(names=["entailment", "neutral", "contradiction"]),
    )
    folder = tmp_path / "pairs"
    folder.mkdir()
    datasets.Dataset.from_dict(pairs, features=features).to_parquet(folder / "train-00000-of-00001.parquet")
    return folder


def curvature_of(spec, folder, tmp_path, **options):
    weights = options.pop("weights", None)
    model = load_model(spec, weights=weights, dtype=torch.float64)
    job = TaskEstimate(model, load_task("mnli", folder), EstimateOptions(fisher="exact", **options), batch_size=5)
    return model, job, job.run(tmp_path / "estimate.kfac")


@pytest.mark.parametrize("family", ["t5", "hf"])
def test_text_models_on_padded_batches(family, request, text_data, tmp_path):
    folder = request.getfixturevalue("t5_folder" if family == "t5" else "bert_folder")
    model, job, curvature = curvature_of(f"{family}:{folder}", text_data, tmp_path)
    unused = {name for name in job.parameters if name.startswith("pooler.")}
    assert set(curvature.parameters) == set(job.parameters) - unused
    kinds = {block.operation for block in curvature.blocks}
    assert kinds == ({"linear", "multiply"} if family == "t5" else {"linear", "layer_norm"})
    names = " ".join(curvature.parameters)
    if family == "t5":
        assert "encoder.block.1.layer.0.SelfAttention.q.weight" in names
        assert "decoder.block.0.layer.1.EncDecAttention.k.weight" in names
        assert "relative_attention_bias" not in names
    else:
        assert "encoder.layer.1.attention.self.query.weight" in names
        assert "word_embeddings" not in names

    # Examples one at a time, without padding, give the same counts and the same values.
    alone = TaskEstimate(model, job.task, job.options, batch_size=1).run(tmp_path / "alone.kfac")
    for ours, theirs in zip(curvature.blocks, alone.blocks, strict=True):
        for (_, one), (_, other) in zip(ours.structure.matrices(), theirs.structure.matrices(), strict=True):
            assert one.positions == other.positions
            torch.testing.assert_close(one.dense(torch.float64), other.dense(torch.float64), rtol=1e-7, atol=1e-12)
    lengths = [int(model.prepare([job.split[n]], "mnli")["attention_mask"].sum()) for n in job.indices]
    name = (
        "encoder.block.0.layer.0.SelfAttention.q.weight"
        if family == "t5"
        else "encoder.layer.0.attention.self.query.weight"
    )
    block = next(block for block in curvature.blocks if block.name == name)
    assert dict(block.structure.matrices())["A"].positions == sum(lengths)


def with_forward(module, forward):
    """Returns the module with f as its forward pass, for brute force."""
    module.forward = forward
    return module


@pytest.mark.parametrize("spec", ["clip", "timm:vit_tiny_patch16_224"])
def test_norms_and_tokens_of_stock_vision_models(spec, tiny_clip, pictures):
    size = None if spec == "clip" else 32
    model = load_model(tiny_clip if spec == "clip" else spec, weights="random", image_size=size, dtype=torch.float64)
    x = model.prepare(pictures, "any").double()
    pick = {
        "clip": ["visual.class_embedding", "visual.ln_post.weight", "visual.transformer.resblocks.1.ln_2.bias"],
        "timm:vit_tiny_patch16_224": ["norm.weight", "blocks.11.norm1.bias"],
    }[spec]
    curvature = kp.estimate(model.module, [x], fisher="exact", forward=model.forward, params=pick)
    assert set(curvature.parameters) == set(pick)
    for block in curvature.blocks:
        expected = ggn(with_forward(model.module, model.forward), x, block.parameters)
        torch.testing.assert_close(block.structure.matrix.dense(torch.float64), expected, rtol=1e-7, atol=1e-12)


def test_open_clip_is_covered_completely_under_its_own_names(tiny_clip, pictures):
    model = load_model(tiny_clip, weights="random")
    x = model.prepare(pictures, "any")
    before = model.forward(x)
    wanted = [n for n, _ in model.module.named_parameters() if n.startswith("visual.")]
    curvature = kp.estimate(model.module, [x], forward=model.forward, params=wanted)
    assert set(curvature.parameters) == set(wanted)
    blocks = {block.name: (block.operation, block.parameters) for block in curvature.blocks}
    stem = "visual.transformer.resblocks.0."
    assert blocks[f"{stem}attn.in_proj_weight"] == (
        "linear",
        (f"{stem}attn.in_proj_weight", f"{stem}attn.in_proj_bias"),
    )
    assert blocks["visual.proj"] == ("matmul", ("visual.proj",))
    assert blocks["visual.class_embedding"][0] == "token"
    assert blocks["visual.conv1.weight"][0] == "convolution"
    assert blocks["visual.positional_embedding"][0] == "add"
    assert torch.equal(model.forward(x), before)


@pytest.mark.parametrize("family", ["t5", "hf"])
def test_text_families_through_the_command(family, request, text_data, tmp_path):
    folder = request.getfixturevalue("t5_folder" if family == "t5" else "bert_folder")
    output = tmp_path / "pairs.kfac"
    arguments = [
        "estimate",
        "--model",
        f"{family}:{folder}",
        "--task",
        "mnli",
        "--data",
        text_data,
        "-o",
        output,
        "--json",
    ]
    result = python("-m", "kfacpack_cli", *arguments, env=OFFLINE)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["examples"] == 15  # of 16; one is held out for validation
    assert not result.stderr
    assert kp.verify(output).holds


def test_a_full_vit_b_32_through_the_command(tmp_path):
    """The stock model at its full size; block:8, so that the file is small."""
    import numpy as np
    from PIL import Image

    (tmp_path / "pictures" / "train" / "noise").mkdir(parents=True)
    for number in range(4):
        pixels = np.random.default_rng(number).integers(0, 256, (224, 224, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "pictures" / "train" / "noise" / f"{number}.png")
    output = tmp_path / "noise.kfac"
    arguments = ["--model", "ViT-B-32", "--weights", "random", "--task", "noise", "--data", tmp_path / "pictures"]
    arguments += ["-o", output, "--json", "--compress", "block:8"]
    result = python("-m", "kfacpack_cli", "estimate", *arguments, env=OFFLINE)
    assert result.returncode == 0, result.stderr
    manifest = kp.Bundle(output).manifest
    assert len(manifest.base.parameters) == 150
    assert sum(block.structure == "kronecker" for block in manifest.blocks) == 49
    assert manifest.function.width == 512


def test_a_loaded_model_defines_f_and_frozen_parameters():
    tiny = load_model("tiny")
    x = torch.rand(4, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    curvature = kp.estimate(tiny, [x])
    covered = list(curvature.parameters)
    by_hand = kp.estimate(tiny.module, [x], forward=tiny.forward, params=covered)
    assert covered == list(kp.linearize(tiny).parameters)
    tau = {name: torch.ones_like(tiny.module.state_dict()[name]) for name in covered}
    torch.testing.assert_close(curvature.quadratic(tau), by_hand.quadratic(tau), rtol=0, atol=0)
    base = curvature.about.base
    assert (base.family, base.name, base.revision) == (tiny.family, tiny.name, tiny.revision)
    assert curvature.about.function == tiny.function
    kp.Regularizer([curvature]).check(tiny)

    other_f = kp.estimate(tiny, [x], forward=lambda x: tiny.module.encode_image(x), params=["visual.proj"])
    assert other_f.about.function != tiny.function
    with refused(kp.KfacpackError, "nn.Module", "kp.load_model", "got str"):
        kp.estimate("tiny", [x])
