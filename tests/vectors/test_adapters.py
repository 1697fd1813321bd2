"""Vectors of LoRA adapters that peft wrote: the change equals peft's, outputs equal those of the merged model."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from hashlib import sha256

import pytest
import torch
from kit import refused
from safetensors.torch import load_file, save_file
from torch import nn
from vectors.stock_training import batch_of, train

import kfacpack as kp
from kfacpack._compat import make_torchvision_importable

make_torchvision_importable()
peft = pytest.importorskip("peft", reason="peft is not installed; it is in the extra 'dev'")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def bert(bert_folder):
    return kp.load_model(f"hf:{bert_folder}")


def extracted(model, source, **options) -> tuple[kp.TaskVector, list[str]]:
    notes: list[str] = []
    return kp.TaskVector.from_checkpoint(model, source, on_note=notes.append, **options), notes


def adapted(model: kp.Model, folder, outputs=None, **config) -> nn.Module:
    """Trains an adapter by peft, saves it and returns peft's model."""
    torch.manual_seed(5)
    wrapped = peft.get_peft_model(copy.deepcopy(model.module), peft.LoraConfig(**config))
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:  # B is zero in the beginning, and a few steps leave it tiny
            nn.init.normal_(parameter, std=0.25)
    train(wrapped, outputs or batch_of(model))
    wrapped.save_pretrained(folder)
    return wrapped


def check_against_peft(model: kp.Model, wrapped: nn.Module, tau: kp.TaskVector, outputs=None) -> None:
    """Compares the changes with get_delta_weight, and weights and outputs with merge_and_unload."""
    outputs = outputs or batch_of(model)
    compared = 0
    for name, layer in wrapped.base_model.model.named_modules():
        if hasattr(layer, "get_delta_weight") and "default" in getattr(layer, "scaling", {}):
            weight = f"{name}.weight"
            expected = layer.get_delta_weight("default").detach()
            torch.testing.assert_close(tau[weight], expected.reshape(tau[weight].shape), atol=1e-6, rtol=1e-5)
            if (factors := tau.factors(weight)) is not None:
                torch.testing.assert_close(factors[0] @ factors[1], expected.flatten(1), atol=1e-6, rtol=1e-5)
            compared += 1
    assert compared
    merged = copy.deepcopy(wrapped).merge_and_unload().eval()
    edited = tau.apply(model.module)
    for name, value in merged.state_dict().items():
        torch.testing.assert_close(edited.state_dict()[name], value, atol=1e-6, rtol=1e-5, msg=name)
    with torch.no_grad():
        assert (outputs(edited) - outputs(merged)).abs().max() < 1e-5
        assert (outputs(edited) - outputs(model.module)).abs().max() > 3e-5


CONFIGS = {
    "plain": {"r": 2, "lora_alpha": 6, "target_modules": ["query", "value"]},
    "patterns": {
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["query", "value", "dense"],
        "rank_pattern": {"value": 3, r"layer\.0\.output\.dense": 1},
        "alpha_pattern": {"layer.1.attention.self.query": 9, "value": 1},
    },
    "rslora": {"r": 3, "lora_alpha": 4, "use_rslora": True, "target_modules": ["query"]},
    "bias": {"r": 2, "bias": "lora_only", "target_modules": ["query"]},
    "all biases": {"r": 2, "bias": "all", "target_modules": ["query"]},
    "modules_to_save": {"r": 2, "target_modules": ["query"], "modules_to_save": ["pooler", "output.LayerNorm"]},
    "layers": {"r": 2, "target_modules": ["query"], "layers_to_transform": [1], "layers_pattern": "layer"},
    "embeddings": {"r": 2, "target_modules": ["word_embeddings", "query"]},
    "gaussian": {"r": 2, "init_lora_weights": "gaussian", "target_modules": "all-linear"},
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_changes_and_outputs_equal_those_of_peft(bert, tmp_path, config):
    wrapped = adapted(bert, tmp_path / "adapter", **config)
    tau, _ = extracted(bert, tmp_path / "adapter", task="toy")
    check_against_peft(bert, wrapped, tau)
    ranks = {name: tau.rank(name) for name in tau}
    assert {rank for name, rank in ranks.items() if "query.weight" in name} <= {0, config["r"]}
    assert all(rank is not None for name, rank in ranks.items() if "dense.weight" in name and "pooler" not in name)
    tau.save(tmp_path / "tau.safetensors")
    read = kp.TaskVector.load(tmp_path / "tau.safetensors")
    assert [read.rank(name) for name in read] == list(ranks.values())
    check_against_peft(bert, wrapped, read)


def test_t5(t5_folder, tmp_path):
    model = kp.load_model(f"t5:{t5_folder}")
    wrapped = adapted(model, tmp_path, r=2, target_modules=["q", "v", "wo"], task_type="SEQ_2_SEQ_LM")
    check_against_peft(model, wrapped, extracted(model, tmp_path)[0])


def test_timm(tmp_path):
    model = kp.load_model("timm:test_vit", weights="random")
    wrapped = adapted(model, tmp_path, r=2, target_modules=["qkv", "fc1", "patch_embed.proj"], modules_to_save=["head"])
    tau, notes = extracted(model, tmp_path)
    check_against_peft(model, wrapped, tau)
    assert tau.rank("patch_embed.proj.weight") == 2, "a convolution"
    assert any("frozen" in note for note in notes)


def test_open_clip(tiny_clip, tmp_path):
    model = kp.load_model(tiny_clip, weights="random")
    wrapped = adapted(model, tmp_path, r=2, target_modules=r"visual\..*(c_fc|c_proj)")
    tau, _ = extracted(model, tmp_path)
    check_against_peft(model, wrapped, tau)
    adapted(model, tmp_path / "attention", r=2, target_modules=r"visual\..*attn")
    with refused(kp.BundleError, "MultiheadAttention", "resblocks.0.attn", "merge_and_unload"):
        extracted(model, tmp_path / "attention")


def test_conv1d_stores_its_weight_transposed(bert, tmp_path):
    """GPT-2 has transformers' Conv1D, whose weight is (in, out)."""
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    module = GPT2Model(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32, n_positions=16)).eval()
    model = replace(bert, module=module, family="test", name="gpt2", frozen=())
    wrapped = adapted(model, tmp_path, r=2, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    tau, _ = extracted(model, tmp_path)
    assert tau["h.0.attn.c_attn.weight"].shape == (16, 48)
    check_against_peft(model, wrapped, tau)


def test_adapters_of_classifiers(bert, bert_folder, tmp_path):
    from transformers import BertForSequenceClassification

    torch.manual_seed(1)
    classifier = BertForSequenceClassification.from_pretrained(bert_folder, num_labels=3)
    model = replace(bert, module=classifier)
    wrapped = adapted(
        model, tmp_path, lambda module: module(input_ids=torch.arange(4, 10)[None]).logits, r=2,
        target_modules=["query"], task_type="SEQ_CLS",
    )  # fmt: skip
    tau, notes = extracted(bert, tmp_path, task="nli")
    assert any("'classifier.weight'" in note for note in notes)
    assert any("'bert.'" in note for note in notes)
    merged = copy.deepcopy(wrapped).merge_and_unload().eval()
    ids = torch.arange(4, 10)[None]
    with torch.no_grad():
        expected = merged.bert(input_ids=ids).last_hidden_state
        assert (tau.apply(bert.module)(input_ids=ids).last_hidden_state - expected).abs().max() < 1e-5


def test_sums_of_adapters_stay_small(bert, tmp_path):
    vectors = []
    for number, rank in enumerate((1, 2, 1)):
        adapted(bert, tmp_path / str(number), r=rank, target_modules=["query", "intermediate.dense"])
        vectors.append(extracted(bert, tmp_path / str(number), task=f"task {number}")[0])
    total = vectors[0] + 0.5 * vectors[1] - vectors[2]
    name = "encoder.layer.0.intermediate.dense.weight"
    assert total.rank(name) == 4
    expected = vectors[0][name] + 0.5 * vectors[1][name] - vectors[2][name]
    torch.testing.assert_close(total[name], expected)
    total.save(tmp_path / "sum.safetensors")
    stored = load_file(tmp_path / "sum.safetensors")
    assert sum(tensor.numel() for tensor in stored.values()) == 4 * 2 * ((16 + 16) + (32 + 16))


@pytest.fixture
def adapter(bert, tmp_path):
    adapted(bert, tmp_path / "adapter", r=2, target_modules=["query"])
    return tmp_path / "adapter"


def edit(adapter, **changes) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"use_dora": True}, ("DoRA", "use_dora")),
        ({"peft_type": "ADALORA"}, ("ADALORA", "peft_type")),
        ({"peft_type": "LOHA"}, ("LOHA",)),
        ({"peft_type": "LOKR"}, ("LOKR",)),
        ({"peft_type": "IA3"}, ("IA3",)),
        ({"peft_type": "PROMPT_TUNING"}, ("PROMPT_TUNING",)),
        ({"peft_type": None}, ("None", "peft_type")),
        ({"megatron_config": {"x": 1}}, ("Megatron",)),
        ({"layer_replication": [[0, 1]]}, ("replication",)),
        ({"trainable_token_indices": [1]}, ("trainable tokens",)),
        ({"init_lora_weights": "pissa_niter_4"}, ("pissa_niter_4", "init_lora_weights")),
        ({"lora_bias": True}, ("lora_bias",)),
        ({"r": 3}, ("rank 3", "[2, 16]")),
        ({"r": "many"}, ("many", ": r")),
        ({"lora_alpha": 0}, ("lora_alpha",)),
        ({"rank_pattern": {"query": 1}}, ("rank 1",)),
        ({"rank_pattern": [1]}, ("rank_pattern",)),
        ({"alpha_pattern": {"(": 1}}, ("alpha_pattern", "'('")),
        ({"alpha_pattern": {"(a+)+": 1}}, ("alpha_pattern", "repeated")),
    ],
    ids=str,
)
def test_other_adapters_are_refused_by_name(bert, adapter, changes, facts):
    edit(adapter, **changes)
    with refused(kp.BundleError, adapter, *facts):
        extracted(bert, adapter)


def test_incomplete_adapters_are_refused(bert, adapter):
    path = adapter / "adapter_model.safetensors"
    tensors, raw = load_file(path), path.read_bytes()
    first = next(name for name in tensors if "lora_A" in name)
    for change, *facts in (
        (lambda t: t.pop(first), "A is missing", "layer"),
        (lambda t: t.update({first.replace("lora_A.weight", "lora_magnitude_vector"): torch.ones(16)}), "magnitude"),
        (lambda t: t.update({first: torch.ones(2, 5)}), "[2, 5]", "[16, 16]", "another base"),
        (lambda t: t.update({first: torch.full((2, 16), float("nan"))}), "NaN"),
        (lambda t: t.clear(), "no tensors"),
    ):
        changed = dict(tensors)
        change(changed)
        save_file(changed, path)
        with refused(kp.BundleError, *facts):
            extracted(bert, adapter)
    save_file({name.replace("encoder.layer.0", "encoder.layer.7"): value for name, value in tensors.items()}, path)
    with refused(kp.TaskVectorError, "layer.7", "not an adapter for"):
        extracted(bert, adapter)
    path.write_bytes(raw[:-3])
    with refused(kp.BundleError, "download it again"):
        extracted(bert, adapter)
    path.unlink()
    with refused(kp.BundleError, "adapter_model.safetensors"):
        extracted(bert, adapter)
    (adapter / "adapter_model.bin").write_bytes(b"\x80")
    with refused(kp.BundleError, "adapter_model.bin", "save_file"):
        extracted(bert, adapter)


def test_adapters_of_other_models_are_refused(adapter, t5_folder, tiny_clip):
    for model in (kp.load_model(f"t5:{t5_folder}"), kp.load_model(tiny_clip, weights="random")):
        with refused(kp.TaskVectorError, adapter, "architecture"):
            extracted(model, adapter)


def test_a_stated_base_model_is_compared(bert, adapter):
    edit(adapter, base_model_name_or_path="owner/another-model")
    assert any("owner/another-model" in note for note in extracted(bert, adapter)[1])
    edit(adapter, base_model_name_or_path=f"owner/{bert.name}")
    assert not any("names the base model" in note for note in extracted(bert, adapter)[1])
    by_file, _ = extracted(bert, adapter / "adapter_model.safetensors")
    assert by_file.digest == extracted(bert, adapter)[0].digest


def test_ranks_that_are_too_large_are_stored_dense(bert, tmp_path):
    wrapped = adapted(bert, tmp_path, r=12, target_modules=["query"])
    tau, _ = extracted(bert, tmp_path)
    assert tau.rank("encoder.layer.0.attention.self.query.weight") is None
    check_against_peft(bert, wrapped, tau)


def test_the_config_of_an_adapter_is_recorded_as_well(bert, tmp_path):
    adapted(bert, tmp_path / "adapter", **CONFIGS["plain"])
    tau, _ = extracted(bert, tmp_path / "adapter")
    (checkpoint,) = tau.about.checkpoints
    names = ("adapter_model.safetensors", "adapter_config.json")
    assert (checkpoint.name, checkpoint.kind) == ("adapter", "adapter")
    assert {file.name: file.sha256 for file in checkpoint.files} == {
        name: sha256((tmp_path / "adapter" / name).read_bytes()).hexdigest() for name in names
    }
    assert extracted(bert, tmp_path / "adapter" / names[0])[0].about.checkpoints == tau.about.checkpoints
