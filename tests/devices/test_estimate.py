"""Estimates and linearised models on a device equal those on the CPU, and mix no devices."""

from __future__ import annotations

import pytest
import torch
from devices.conftest import assert_same, assert_same_curvature, model_on
from torch import nn
from torch.nn.attention import SDPBackend
from toys import ToyTask

import kfacpack as kp

PROBES = [("exact", "orthogonal"), ("mc", "orthogonal"), ("mc", "rademacher"), ("mc", "gaussian")]


class Masked(nn.Module):
    """Tokens (N, R) with padding -> (N, 3)."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.attn = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.out = nn.Linear(4, 3)

    def forward(self, tokens, attention_mask):
        x = self.embed(tokens)
        hidden = attention_mask == 0
        y = self.norm(x + self.attn(x, x, x, key_padding_mask=hidden, need_weights=False)[0])
        return self.out(y.masked_fill(hidden[..., None], 0).sum(1) / attention_mask.sum(1, keepdim=True))


def masked_batches():
    generator = torch.Generator().manual_seed(0)
    lengths = [[5, 3, 1], [2, 5, 4]]
    return [
        {
            "tokens": torch.randint(7, (3, 5), generator=generator),
            "attention_mask": torch.tensor([[int(k < n) for k in range(5)] for n in row]),
        }
        for row in lengths
    ]


def masked_model(device):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Masked().to(device)


def inputs(count=6):
    split = ToyTask().split("train")
    return split.x[:count].float().split(4)


@pytest.mark.parametrize(("fisher", "probe"), PROBES)
def test_estimates_with_every_probe(pair, fisher, probe):
    settings = {"fisher": fisher, "probe": probe, "samples": 2}
    expected, actual = (kp.estimate(model, inputs(), **settings) for model in pair)
    assert_same_curvature(actual, expected)


@pytest.mark.parametrize(
    "settings",
    [
        {"sharing": "reduce"},
        {"structure": "diagonal"},
        {"offload": True},
        {"compress": "block:2"},
        {"compress": "block:2+int8"},
        {"compress": "svd:2+int8"},
        {"compress": "prune:40%"},
        {"compress": "bf16"},
    ],
    ids=lambda settings: "-".join(map(str, *settings.items())),
)
def test_estimates_in_every_form(pair, tmp_path, settings):
    expected, actual = (kp.estimate(model, inputs(), fisher="exact", **settings) for model in pair)
    assert_same_curvature(actual, expected, 2e-2)
    actual.save(tmp_path / "device.kfac")
    assert kp.verify(tmp_path / "device.kfac")
    assert_same_curvature(kp.load(tmp_path / "device.kfac"), actual, 1e-6)


@pytest.mark.parametrize("structure", ["kronecker", "diagonal"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_masked_estimates(device, structure, sharing):
    settings = {"fisher": "exact", "structure": structure, "sharing": sharing}
    expected, actual = (kp.estimate(masked_model(where), masked_batches(), **settings) for where in ("cpu", device))
    assert_same_curvature(actual, expected)


@pytest.mark.parametrize("family", ["t5", "hf"])
def test_estimates_of_text_models(device, family, t5_folder, bert_folder):
    examples = [
        {"premise": "a dog runs over the green field", "hypothesis": "an animal moves"},
        {"premise": "nobody sleeps", "hypothesis": "a dog"},
    ]
    folder = t5_folder if family == "t5" else bert_folder
    curvatures = []
    for where in ("cpu", device):
        model = kp.load_model(f"{family}:{folder}", device=where)
        curvatures.append(kp.estimate(model, [model.prepare(examples, "mnli")], samples=2, params="*.1.*"))
    assert_same_curvature(curvatures[1], curvatures[0])


def test_an_estimate_continues_after_an_interruption(device, tmp_path):
    task, settings = ToyTask("toy", size=20), {"examples": 12, "batch_size": 4, "output": tmp_path / "toy.kfac"}
    with pytest.raises(kp.Interrupted):
        kp.estimate_task(model_on(device), task, stopped=lambda: True, **settings)
    resumed = kp.estimate_task(model_on(device), task, resume=True, **settings)
    assert_same_curvature(resumed, kp.estimate_task(model_on("cpu"), task, examples=12, batch_size=4))


def test_a_float64_model_is_estimated_in_float64(device, float64):
    expected, actual = (
        kp.estimate(model_on(where, torch.float64), inputs(), fisher="exact") for where in ("cpu", device)
    )
    assert_same_curvature(actual, expected, 1e-6)
    assert {matrix.dtype for block in actual.blocks for _, matrix in block.structure.matrices()} == {torch.float64}


def gradient(model, x, tau):
    lin = kp.linearize(model)
    device = next(model.module.parameters()).device
    leaves = {name: value.detach().to(device).requires_grad_() for name, value in tau.items()}
    f = lin(x, leaves)
    f.square().sum().backward()
    return f, {name: leaf.grad for name, leaf in leaves.items()}


def direction(model):
    generator = torch.Generator().manual_seed(2)
    return {name: 0.1 * torch.randn(p.shape, generator=generator) for name, p in model.module.named_parameters()}


def assert_same_gradients(pair, rtol):
    x, tau = inputs()[0], direction(pair[0])
    (expected, expected_grads), (actual, grads) = (gradient(model, x, tau) for model in pair)
    assert_same(actual, expected, rtol)
    for name, value in expected_grads.items():
        assert_same(grads[name], value, rtol)


def test_linearised_outputs_and_gradients(pair):
    assert_same_gradients(pair, 1e-4)


@pytest.mark.parametrize("kernel", [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION])
def test_linearised_gradients_through_the_attention_kernels_of_a_gpu(pair, standin, kernel):
    device = next(pair[1].module.parameters()).device.type
    autocast = kernel is SDPBackend.FLASH_ATTENTION  # which supports half precision only
    with standin.attention_kernel(kernel), torch.autocast(device, torch.bfloat16, enabled=autocast):
        assert_same_gradients(pair, 5e-2 if autocast else 1e-4)


def test_linearised_text_models(device, t5_folder, bert_folder):
    for family, folder in (("t5", t5_folder), ("hf", bert_folder)):
        outputs = []
        for where in ("cpu", device):
            model = kp.load_model(f"{family}:{folder}", device=where)
            batch = model.prepare([{"premise": "a dog runs", "hypothesis": "an animal moves"}], "mnli")
            generator = torch.Generator().manual_seed(0)
            lin = kp.linearize(model)
            tau = {name: torch.randn(zero.shape, generator=generator).to(where) for name, zero in lin.zeros().items()}
            outputs.append(torch.cat(lin.outputs(batch, tau)))
        assert_same(outputs[1], outputs[0], 1e-3)


@pytest.mark.parametrize("fisher", ["exact", "mc"])
def test_the_metric_of_a_language_model_needs_no_float64(device, lm_folders, fisher):
    text = [{"prompt": "a dog runs", "completion": " over the field"}, {"prompt": "nobody", "completion": " sleeps"}]
    options = {"metric": "kl", "fisher": fisher, "params": ["model.norm.weight", "model.layers.1.mlp.down_proj.weight"]}
    curvatures = []
    for where in ("cpu", device):
        model = kp.load_model(f"lm:{lm_folders['llama']}", device=where)
        curvatures.append(kp.estimate(model, [model.prepare(text, "texts")], **options))
    expected, actual = curvatures
    assert_same_curvature(actual, expected, 1e-3)
