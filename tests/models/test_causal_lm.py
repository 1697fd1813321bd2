"""Causal language models: f and logits as transformers computes them, factors equal to brute force, the KL metric."""

from __future__ import annotations

import pytest
import torch
from kit import refused
from models.conftest import write_lm
from torch.func import functional_call, jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel

import kfacpack as kp
from kfacpack._compat import make_torchvision_importable
from kfacpack.training.penalty_weights import STRENGTH, STRENGTH_KL

KINDS = ("llama", "qwen2", "gpt2")
COMPLETIONS = [
    {"prompt": "a dog runs", "completion": " over the green field"},
    {"prompt": "nobody", "completion": " sleeps"},
    {"prompt": "an animal moves over the field", "completion": " a dog"},
]


@pytest.fixture(scope="module", params=KINDS)
def model(request, lm_folders):
    return kp.load_model(f"lm:{lm_folders[request.param]}", dtype=torch.float64)


def single(batch, number):
    """Returns one example of a batch, without padding."""
    kept = batch["attention_mask"][number].bool()
    return {key: value[number : number + 1, kept] for key, value in batch.items()}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral", "gpt2"])
def test_logits_of_the_answers_are_transformers_own(kind, lm_folders):
    make_torchvision_importable()
    from transformers import AutoModelForCausalLM

    model = kp.load_model(f"lm:{lm_folders[kind]}")
    stock = AutoModelForCausalLM.from_pretrained(lm_folders[kind]).eval()
    batch = model.prepare(COMPLETIONS, "texts")
    rows = iter(model.forward(**batch) @ model.output_layer().T)
    for number in range(len(COMPLETIONS)):
        alone = single(batch, number)
        with torch.no_grad():
            expected = stock(input_ids=alone["input_ids"]).logits[alone["answers"]]
        for row in expected:
            torch.testing.assert_close(next(rows), row, rtol=1e-4, atol=1e-5)
    assert next(rows, None) is None


def test_padding_on_the_left_does_not_change_f(model):
    batch = model.prepare(COMPLETIONS, "texts")
    sizes = batch["attention_mask"].sum(1)
    length = batch["input_ids"].shape[1]
    left = {
        key: torch.stack([row.roll(int(length - size)) for row, size in zip(value, sizes, strict=True)])
        for key, value in batch.items()
    }
    torch.testing.assert_close(model.forward(**left), model.forward(**batch), rtol=1e-9, atol=1e-9)


def brute_force(model, batch, name):
    """Returns the factors (B, A) of a layer, or G of a vector, by definition, one example after the other."""
    module, state = model.module, dict(model.module.named_parameters())
    layer = module.get_submodule(name.rpartition(".")[0])
    rows, positions, total, A = 0, 0, 0.0, 0.0
    for number in range(len(batch["input_ids"])):
        example, recorded = single(batch, number), {}

        def shifted(delta, example=example, recorded=recorded):
            def shift(_, inputs, output):
                recorded["input"], recorded["output"] = inputs[0].detach(), output.detach()
                return output + delta

            handle = layer.register_forward_hook(shift)
            try:
                return model.forward(**example)
            finally:
                handle.remove()

        with sdpa_kernel(SDPBackend.MATH):
            if state[name].dim() == 1:

                def f(value, example=example):
                    # The decoder is called through the module, so that its parameters can be replaced.
                    inputs = {key: example[key] for key in ("input_ids", "attention_mask")}
                    output = functional_call(
                        module, {name: value}, (), {**inputs, "output_hidden_states": True, "use_cache": False}
                    )
                    return output.hidden_states[-1][example["answers"]]

                J = jacrev(f)(state[name].detach()).flatten(0, 1)
                total = total + J.T @ J
                rows += int(example["answers"].sum())
                continue
            shifted(torch.zeros(()))
            J = jacrev(shifted)(torch.zeros_like(recorded["output"]))
        a, g = recorded["input"][0], J.flatten(0, 2).flatten(0, -2)
        if getattr(layer, "bias", None) is not None:
            a = torch.cat([a, torch.ones_like(a[:, :1])], dim=1)
        A, total = A + a.T @ a, total + g.T @ g
        rows, positions = rows + len(J), positions + len(a)
    return total / rows, A / positions if positions else None


def test_exact_factors_equal_brute_force(model):
    batch = model.prepare(COMPLETIONS, "texts")
    curvature = kp.estimate(model, [batch], fisher="exact")
    names = [name for name in curvature.parameters if "weight" in name]
    assert not any("embed" in name or "wte" in name or "lm_head" in name for name in names)
    checked = 0
    for block in curvature.blocks:
        matrices = {role: matrix.dense(torch.float64) for role, matrix in block.structure.matrices()}
        total, A = brute_force(model, batch, block.parameters[0])
        torch.testing.assert_close(matrices.get("B", matrices.get("G")), total, rtol=1e-5, atol=1e-9)
        if A is not None:
            torch.testing.assert_close(matrices["A"], A, rtol=1e-5, atol=1e-9)
        checked += 1
    assert checked == len(curvature.blocks) > 8


def test_several_rows_are_estimated_without_bias(lm_folders):
    """The random probes of an example's rows share a backward pass; their mean is the exact curvature."""
    torch.manual_seed(0)
    model = kp.load_model(f"lm:{lm_folders['llama']}", dtype=torch.float64)
    batch, names = model.prepare(COMPLETIONS, "texts"), ["model.layers.1.mlp.down_proj.weight", "model.norm.weight"]
    for metric in ("l2", "kl"):
        exact = kp.estimate(model, [batch], fisher="exact", params=names, metric=metric)
        random = kp.estimate(model, [batch] * 20, samples=16, params=names, metric=metric)
        tau = {
            name: torch.randn(p.shape, dtype=p.dtype) for name, p in model.module.named_parameters() if name in names
        }
        assert float(random.quadratic(tau)) == pytest.approx(float(exact.quadratic(tau)), rel=0.1)


@pytest.mark.parametrize("fisher", ["exact", "mc"])
def test_half_the_quadratic_form_of_kl_is_the_divergence(model, fisher):
    """Holds for a small change of the last norm, whose block is not approximated."""
    torch.manual_seed(0)
    batch = model.prepare(COMPLETIONS, "texts")
    named = dict(model.module.named_parameters())
    name = next(name for name in ("model.norm.weight", "transformer.ln_f.weight") if name in named)
    samples = {"fisher": "exact"} if fisher == "exact" else {"samples": 400}
    curvature = kp.estimate(model, [batch], metric="kl", params=[name], **samples)
    tau = {name: 0.01 * torch.randn_like(named[name])}
    W = model.output_layer()

    def log_p():
        with torch.no_grad():
            return (model.forward(**batch) @ W.T).log_softmax(1)

    before = log_p()
    with torch.no_grad():
        named[name] += tau[name]
        after = log_p()
        named[name] -= tau[name]
    divergence = (before.exp() * (before - after)).sum(1).mean()
    assert 0.5 * float(curvature.quadratic(tau)) == pytest.approx(float(divergence), rel=0.1)
    assert curvature.about.metric == "kl"


def test_one_example_with_one_position_is_exact_in_the_last_layer(lm_folders):
    model = kp.load_model(f"lm:{lm_folders['llama']}", dtype=torch.float64)
    batch = {key: value[:1, :1] for key, value in model.prepare(COMPLETIONS, "texts").items()}
    batch["answers"] = torch.ones_like(batch["answers"])
    weight = model.module.model.layers[1].mlp.down_proj.weight
    curvature = kp.estimate(model, [batch], metric="kl", fisher="exact", params=["model.layers.1.mlp.down_proj.weight"])
    torch.manual_seed(1)
    tau, W = 0.003 * torch.randn_like(weight), model.output_layer()
    with torch.no_grad():
        before = (model.forward(**batch) @ W.T).log_softmax(1)
        weight += tau
        after = (model.forward(**batch) @ W.T).log_softmax(1)
        weight -= tau
    divergence = float((before.exp() * (before - after)).sum())
    half = 0.5 * float(curvature.quadratic({"model.layers.1.mlp.down_proj.weight": tau}))
    assert half == pytest.approx(divergence, rel=0.1)


def test_bundles_with_different_metrics_are_not_combined(lm_folders, tmp_path):
    model = kp.load_model(f"lm:{lm_folders['llama']}")
    batch = model.prepare(COMPLETIONS, "texts")
    paths = [tmp_path / "l2.kfac", tmp_path / "kl.kfac"]
    for metric, path in zip(("l2", "kl"), paths, strict=True):
        source = kp.Source(task=metric, dataset_size=3)
        kp.estimate(model, [batch], metric=metric, source=source, params=["*.norm.weight"]).save(path)
    assert kp.load(paths[1]).about.metric == "kl"
    assert kp.load(paths[0]).about.metric is None
    with refused(kp.KfacpackError, "l2.kfac", "kl.kfac", "metric"):
        kp.merge(paths)
    with refused(kp.KfacpackError, "metric"):
        kp.Regularizer(paths)
    assert kp.Regularizer([paths[1]]).output_scale == 1
    assert (kp.Regularizer([paths[1]]).strength, kp.Regularizer([paths[0]]).strength) == (STRENGTH_KL, STRENGTH)


@pytest.mark.parametrize(("spec", "metric"), [("tiny", "kl"), ("tiny", "l1")])
def test_a_metric_that_does_not_fit_the_model_is_refused(spec, metric):
    with refused(kp.KfacpackError, repr(metric)):
        kp.estimate_task(spec, "digits", examples=4, metric=metric)


@pytest.mark.parametrize(("kind", "fact"), [("mixtral", "MixtralSparseMoeBlock"), ("gemma2", "gemma2")])
def test_unsupported_architectures_are_refused_by_name(kind, fact, tmp_path):
    with refused(kp.KfacpackError, fact):
        kp.load_model(f"lm:{write_lm(tmp_path, kind)}")


def test_models_of_other_kinds_are_refused(bert_folder, t5_folder, lm_folders):
    for folder, kind in ((bert_folder, "Bert"), (t5_folder, "t5")):
        with refused(kp.KfacpackError, kind):
            kp.load_model(f"lm:{folder}")
    with refused(kp.KfacpackError, "llama", "lm:"):
        kp.load_model(f"hf:{lm_folders['llama']}")


def test_the_family_freezes_the_embeddings(model):
    names = set(dict(model.module.named_parameters()))
    from kfacpack.models.functional import select_parameters

    frozen = names - set(select_parameters(model.module, None, model.frozen))
    assert frozen
    assert all(part in ("embed_tokens", "wte", "wpe", "lm_head") for part in (name.split(".")[-2] for name in frozen))
