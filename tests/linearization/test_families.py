"""Linearised models of every family equal `torch.func.jvp`, in float32 and float64."""

from __future__ import annotations

import inspect

import pytest
import torch
from linearization.jvp_reference import assert_exact, random_tau
from models.conftest import write_lm

import kfacpack as kp
from kfacpack.models.families import load_model

PRECISIONS = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-9)])


@PRECISIONS
@pytest.mark.parametrize("spec", ["clip", "tiny", "timm:vit_tiny_patch16_224"])
def test_vision_models(spec, dtype, tolerance, tiny_clip, pictures):
    """open_clip's attention is the fused nn.MultiheadAttention."""
    more = {"clip": {"weights": "random"}, "tiny": {}}.get(spec, {"weights": "random", "image_size": 32})
    model = load_model(tiny_clip if spec == "clip" else spec, dtype=dtype, **more)
    lin = assert_exact(model, model.prepare(pictures, "any").to(dtype), tolerance, all_modes=True)
    assert lin.programs == 2, lin.untraced
    frozen = ("conv1", "positional", "pos_embed", "patch_embed", "token_embedding")
    assert not any(part in name for name in lin.parameters for part in frozen)
    if spec == "clip":
        assert "visual.transformer.resblocks.0.attn.in_proj_weight" in lin.parameters
        assert {"visual.proj", "visual.class_embedding"} <= set(lin.parameters)


def t5_tolerance(tolerance: float) -> float:
    """Earlier versions of transformers compute the softmax of T5's attention in float32, whatever the model's dtype."""
    from transformers.models.t5 import modeling_t5

    return max(tolerance, 1e-5) if "softmax(scores.float()" in inspect.getsource(modeling_t5) else tolerance


@PRECISIONS
@pytest.mark.parametrize("family", ["t5", "hf"])
def test_text_models_on_padded_batches(family, dtype, tolerance, request, pairs):
    folder = request.getfixturevalue("t5_folder" if family == "t5" else "bert_folder")
    model = load_model(f"{family}:{folder}", dtype=dtype)
    batch = model.prepare(pairs, "mnli")
    assert not batch["attention_mask"].all()
    tolerance = t5_tolerance(tolerance) if family == "t5" else tolerance
    lin = assert_exact(model, batch, tolerance, all_modes=True)
    assert lin.programs == 2, lin.untraced


@PRECISIONS
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_language_models(kind, dtype, tolerance, tmp_path, pairs):
    """One row of f for each answer, and one for each token of completions."""
    model = load_model(f"lm:{write_lm(tmp_path, kind)}", dtype=dtype)
    completions = [{"prompt": "a dog runs", "completion": " over the field"}, {"prompt": "a", "completion": " dog"}]
    for examples, task in ((pairs, "mnli"), (completions, "texts")):
        lin = assert_exact(model, model.prepare(examples, task), tolerance, all_modes=True)
        assert lin.programs == 2, lin.untraced


@pytest.mark.parametrize("family", ["t5", "hf"])
def test_batches_with_and_without_padding_have_their_own_programs(family, request, pairs):
    """transformers asks whether a mask contains padding, and computes without a mask if it does not."""
    folder = request.getfixturevalue("t5_folder" if family == "t5" else "bert_folder")
    model = load_model(f"{family}:{folder}", dtype=torch.float64)
    padded = model.prepare(pairs, "mnli")
    whole = {**padded, "attention_mask": torch.ones_like(padded["attention_mask"])}
    shorter = {**padded, "attention_mask": padded["attention_mask"].clone()}
    shorter["attention_mask"][1, 3:] = 0
    lin, plain = kp.linearize(model), kp.linearize(model, trace=False)
    tau = random_tau(lin)
    for batch in (whole, padded, whole, shorter, whole, padded, whole, shorter, padded, whole):
        actual, expected = lin.at(batch, tau), plain.at(batch, tau)
        assert torch.equal(actual.f, expected.f)
        assert torch.equal(actual.change, expected.change)
        gradients = expected.gradient(expected.f)
        assert all(torch.equal(value, gradients[name]) for name, value in actual.gradient(expected.f).items())
    assert lin.programs == 2, lin.untraced


def test_parameters_that_a_family_freezes_can_be_selected(t5_folder, pairs):
    """T5 learns the bias of its attention, so the attention mask has a tangent."""
    model = load_model(f"t5:{t5_folder}", dtype=torch.float64)
    tolerance = t5_tolerance(1e-9)
    assert_exact(model, model.prepare(pairs, "mnli"), tolerance, params=["*relative_attention_bias*", "shared.weight"])
