"""Estimates that go layer by layer give the bytes of an ordinary estimate, and refuse models that cannot be divided."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from kit import refused
from models.conftest import SENTENCES
from torch import nn
from toys import ToyTask, toy_model

import kfacpack as kp
from kfacpack.estimation.options import EstimateOptions
from kfacpack.estimation.resume import Interrupted, require_unfinished
from kfacpack.estimation.task_estimate import TaskEstimate

FAMILIES = ("llama", "qwen2", "gpt2", "bert", "timm", "tiny_clip")


@pytest.fixture(scope="module")
def pairs_task(tmp_path_factory):
    """Ten pairs of sentences of unequal length."""
    import datasets

    words = SENTENCES.split()
    pairs = {
        "premise": [" ".join(words[n : n + 2 + n % 5]) for n in range(10)],
        "hypothesis": [" ".join(words[-2 - n % 4 :]) for n in range(10)],
        "label": [n % 3 for n in range(10)],
    }
    features = datasets.Features(
        premise=datasets.Value("string"),
        hypothesis=datasets.Value("string"),
        label=datasets.ClassLabel(names=["entailment", "neutral", "contradiction"]),
    )
    folder = tmp_path_factory.mktemp("pairs")
    datasets.Dataset.from_dict(pairs, features=features).to_parquet(folder / "train-00000-of-00001.parquet")
    return kp.load_task("mnli", data=folder)


def model_and_task(family, request, pairs_task, **options):
    if family == "timm":
        return kp.load_model("timm:test_vit", weights="random", image_size=32, **options), kp.load_task("digits")
    if family == "tiny_clip":
        name = request.getfixturevalue("tiny_clip")
        return kp.load_model(name, weights="random", **options), kp.load_task("digits")
    folder = (
        request.getfixturevalue("bert_folder") if family == "bert" else request.getfixturevalue("lm_folders")[family]
    )
    return kp.load_model(f"{'hf' if family == 'bert' else 'lm'}:{folder}", **options), pairs_task


@pytest.mark.parametrize("family", FAMILIES)
def test_the_bytes_are_those_of_an_ordinary_estimate(family, request, pairs_task, tmp_path):
    model, task = model_and_task(family, request, pairs_task)
    common = {"examples": 7, "batch_size": 3, "samples": 2, "compress": "int8"}
    kp.estimate_task(model, task, output=tmp_path / "ordinary.kfac", **common)
    kp.estimate_task(model, task, output=tmp_path / "streamed.kfac", stream=True, **common)
    assert (tmp_path / "streamed.kfac").read_bytes() == (tmp_path / "ordinary.kfac").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ordinary.kfac", "streamed.kfac"]


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize(
    "options", [{"fisher": "exact"}, {"shard": (2, 2), "sharing": "reduce", "compress": "block:2"}]
)
def test_weights_that_are_loaded_layer_by_layer(family, options, request, pairs_task):
    whole, task = model_and_task(family, request, pairs_task)
    parts, _ = model_and_task(family, request, pairs_task, loading="layers")
    assert any(parameter.is_meta for parameter in parts.module.parameters())
    ordinary, streamed = (
        kp.estimate_task(model, task, examples=4, batch_size=2, stream=model is parts, **options)
        for model in (whole, parts)
    )
    assert streamed.digest == ordinary.digest
    assert any(parameter.is_meta for parameter in parts.module.parameters())


def streamed(model, task, **options):
    estimate = {"examples": "6", "batch_size": 2} | options
    return TaskEstimate(model, task, EstimateOptions(compress="int8"), **estimate, stream=True)


def test_a_run_that_is_stopped_anywhere_resumes_to_the_same_bytes(request, pairs_task, tmp_path):
    model, task = model_and_task("llama", request, pairs_task)
    streamed(model, task).run(tmp_path / "whole.kfac")
    target = tmp_path / "stopped.kfac"
    for attempt in range(40):  # every run stops after a few batches
        calls = iter(range(attempt % 5 + 3))
        try:
            streamed(model, task).run(target, resume=attempt > 0, stopped=lambda calls=calls: next(calls, None) is None)
            break
        except Interrupted:
            assert not target.exists()
    assert attempt > 3
    assert target.read_bytes() == (tmp_path / "whole.kfac").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"whole.kfac", "stopped.kfac"}


def test_an_interrupted_run_is_not_overwritten_or_continued_with_other_settings(request, pairs_task, tmp_path):
    model, task = model_and_task("gpt2", request, pairs_task)
    target = tmp_path / "stopped.kfac"
    batches = iter(range(4))  # three batches of the stem, one of the first layer
    with pytest.raises(Interrupted):
        streamed(model, task).run(target, stopped=lambda: next(batches, None) is None)
    with refused(kp.KfacpackError, "--resume"):
        streamed(model, task).run(target)
    with refused(kp.KfacpackError, "batch_size"):
        streamed(model, task, batch_size=3).run(target, resume=True)
    (next(target.parent.glob("*.partial-stream")) / "inputs-0-0.safetensors").write_bytes(b"damaged")
    with refused(kp.KfacpackError, "inputs-0-0"):
        streamed(model, task).run(target, resume=True)


def test_segments_become_the_files_of_a_bundle_with_an_index(request, pairs_task, tmp_path):
    model, task = model_and_task("llama", request, pairs_task)
    index = tmp_path / "parts.kfac.index.json"
    whole = kp.estimate_task(model, task, examples=4, batch_size=2)
    assert kp.estimate_task(model, task, examples=4, batch_size=2, stream=True, output=index).digest == whole.digest
    assert len(list(tmp_path.glob("*.kfac.shard"))) == 3  # two layers and the head; the stem is frozen
    assert kp.verify(index).holds


@pytest.mark.parametrize("params", [("model.layers.1.*",), ("model.norm.weight",), ("model.layers.0.mlp.*",)])
def test_a_part_of_the_parameters(params, request, pairs_task):
    if params == ("model.norm.weight",):
        with refused(kp.KfacpackError, "no ModuleList or Sequential"):
            kp.estimate_task(*model_and_task("llama", request, pairs_task), examples=2, params=params, stream=True)
        return
    model, task = model_and_task("llama", request, pairs_task)
    common = {"examples": 4, "batch_size": 2, "params": params}
    ordinary = kp.estimate_task(model, task, **common)
    assert kp.estimate_task(model, task, stream=True, **common).digest == ordinary.digest


def test_the_metric_of_the_output_distribution(request, pairs_task):
    model, task = model_and_task("qwen2", request, pairs_task)
    common = {"examples": 4, "batch_size": 2, "metric": "kl", "samples": 2}
    ordinary = kp.estimate_task(model, task, **common)
    assert kp.estimate_task(model, task, stream=True, **common).digest == ordinary.digest


class Stack(nn.Module):
    """Two layers over five positions of width four, combined in several ways."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        if kind == "shared parameter":
            self.layers[1].weight = self.layers[0].weight
        self.head = nn.Linear(4, 6)

    def forward(self, x):
        first = self.layers[0](x)
        second = self.layers[1](first + x if self.kind == "between" else first)
        return self.head(second + first if self.kind == "skip" else second).mean(1)


@pytest.mark.parametrize(
    ("kind", "fact"),
    [
        ("shared parameter", "layers.0.weight"),
        ("between", "in order"),
        ("skip", "other than the last"),
        ("plain", None),
        ("no ModuleList", "no ModuleList"),
    ],
)
def test_models_that_cannot_be_divided_are_refused(kind, fact):
    model = toy_model()
    if kind != "no ModuleList":
        torch.manual_seed(0)
        module = Stack(kind).double()
        model = replace(model, module=module, forward=module)
    if fact is None:
        ordinary = kp.estimate_task(model, ToyTask(), examples=4, batch_size=2)
        assert kp.estimate_task(model, ToyTask(), examples=4, batch_size=2, stream=True).digest == ordinary.digest
        return
    with refused(kp.KfacpackError, fact, "stream=False"):
        kp.estimate_task(model, ToyTask(), examples=4, batch_size=2, stream=True)


def test_t5_is_refused_with_the_ordinary_way(t5_folder, pairs_task):
    with refused(kp.KfacpackError, "T5", "stream=False"):
        kp.estimate_task(f"t5:{t5_folder}", pairs_task, examples=2, stream=True)


def test_a_forecast_needs_no_weights(lm_folders, pairs_task, tmp_path):
    folder = shutil.copytree(lm_folders["llama"], tmp_path / "config")
    (folder / "model.safetensors").unlink()
    with refused(kp.KfacpackError, "no safetensors files", "--weights random"):
        kp.load_model(f"lm:{folder}", loading="layers")
    shapes = kp.load_model(f"lm:{folder}", loading="shapes")
    options = EstimateOptions(compress="block:2+int8")
    forecast = TaskEstimate(shapes, pairs_task, options, "6", 2, stream=True).forecast()
    model = kp.load_model(f"lm:{lm_folders['llama']}")
    curvature = TaskEstimate(model, pairs_task, options, "6", 2, stream=True).run(tmp_path / "estimate.kfac")
    assert [block.name for block in forecast.blocks] == [block.name for block in curvature.blocks]
    assert forecast.bytes == sum(spec.nbytes for spec in curvature.bundle.tensors.values())
    assert forecast.peak_memory > 0 < forecast.stored_bytes


def test_a_missing_weight_is_named(lm_folders, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(lm_folders["qwen2"], tmp_path / "incomplete")
    state = load_file(folder / "model.safetensors")
    state.pop("model.layers.1.mlp.up_proj.weight")
    save_file(state, folder / "model.safetensors")
    with refused(kp.KfacpackError, "model.layers.1.mlp.up_proj.weight"):
        kp.load_model(f"lm:{folder}", loading="layers")


def test_weights_in_several_files(lm_folders, pairs_task, tmp_path):
    from transformers import AutoModelForCausalLM

    folder = shutil.copytree(lm_folders["llama"], tmp_path / "parts")
    (folder / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(lm_folders["llama"]).save_pretrained(folder, max_shard_size="8KB")
    assert len(set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values())) > 1
    common = {"examples": 2, "batch_size": 2}
    ordinary = kp.estimate_task(f"lm:{lm_folders['llama']}", pairs_task, **common)
    parts = kp.load_model(f"lm:{folder}", loading="layers")
    streamed_bundle = kp.estimate_task(parts, pairs_task, stream=True, **common)
    assert streamed_bundle.about.base.sha256 == ordinary.about.base.sha256


def test_a_metric_that_does_not_apply_is_refused_before_anything_is_stored(tmp_path):
    model = kp.load_model("timm:test_vit", weights="random", image_size=32)
    with refused(kp.KfacpackError, "'kl'", "test_vit"):
        kp.estimate_task(model, "digits", examples=2, metric="kl", stream=True, output=tmp_path / "kl.kfac")
    assert not list(tmp_path.iterdir())


def test_a_run_is_resumed_with_the_folder_of_its_files(request, pairs_task, tmp_path):
    model, task = model_and_task("llama", request, pairs_task)
    target, folder = tmp_path / "stopped.kfac", tmp_path / "folder"
    batches = iter(range(4))  # three batches of the stem, one of the first layer
    with pytest.raises(Interrupted):
        streamed(model, task, stream_folder=folder).run(target, stopped=lambda: next(batches, None) is None)
    for other in (None, tmp_path / "other"):
        with refused(kp.KfacpackError, "stream_folder", folder):
            streamed(model, task, stream_folder=other).run(target, resume=True)
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "stopped.kfac.partial"}
    streamed(model, task, stream_folder=folder).run(target, resume=True)
    streamed(model, task).run(tmp_path / "whole.kfac")
    assert target.read_bytes() == (tmp_path / "whole.kfac").read_bytes()
    assert not list(folder.iterdir())
    (tmp_path / "stopped.kfac.partial-stream").mkdir()  # left by a process that was killed while it removed the files
    with refused(kp.KfacpackError, target):
        require_unfinished(target)


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"shard": 5}, "5"),
        ({"shard": None}, "None"),
        ({"shard": (1.0, 2.0)}, "2.0"),
        ({"shard": (1, 2, 3)}, "(1, 2, 3)"),
        ({"batch_size": 0}, "0"),
        ({"batch_size": "8"}, "'8'"),
        ({"output": 5}, "int"),
        ({"params": 5}, "int"),
        ({"split": None}, "None"),
        ({"task": 5}, "int"),
    ],
)
def test_arguments_of_other_types_are_refused(options, fact):
    model = kp.load_model("timm:test_vit", weights="random", image_size=32)
    task = options.get("task", "digits")
    rest = {name: value for name, value in options.items() if name != "task"}
    with refused(kp.KfacpackError, fact):
        kp.estimate_task(model, task, stream=True, **{"examples": 2, **rest})
