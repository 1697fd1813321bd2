"""Estimates that go layer by layer give the bytes of an ordinary estimate, and refuse models that cannot be divided."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from kit import refused
from models.conftest import SENTENCES
from torch import nn
from toys import ToyTask, toy_model

import kfacpack as kp
from kfacpack.estimation.options import EstimateOptions
from kfacpack.estimation.resume import Interrupted
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
