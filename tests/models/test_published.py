"""Every published task, from the Hub's layout to a bundle, a vector and an accuracy, with tiny models."""

from __future__ import annotations

import datasets
import pytest
import torch
from dataset_copies import TEXT, VISION, copy

import kfacpack as kp
from kfacpack.estimation.options import EstimateOptions
from kfacpack.estimation.task_estimate import TaskEstimate as Estimate
from kfacpack.models.families import load_model
from kfacpack.models.heads import head_for
from kfacpack.tasks.registry import load_task
from kfacpack.training.optimizer import TrainingSettings
from kfacpack.training.regimes import REGIMES
from kfacpack.training.trainer import Trainer as Train

FEW = {"tiny": ("visual.transformer.resblocks.0.mlp.*",), "t5": ("encoder.block.1.layer.1.*",), "hf": ("*.1.output.*",)}


@pytest.fixture(scope="module")
def task_named(tmp_path_factory):
    """Returns a function from a name to the task, read from a copy that is written on first use."""
    datasets.disable_progress_bars()
    tasks = {}

    def task(name):
        if name not in tasks:
            tasks[name] = load_task(name, copy(name, tmp_path_factory.mktemp(name)))
        return tasks[name]

    yield task
    datasets.enable_progress_bars()


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny")


@pytest.fixture(scope="module")
def t5(t5_folder):
    return load_model(f"t5:{t5_folder}")


@pytest.fixture(scope="module")
def encoder(bert_folder):
    return load_model(f"hf:{bert_folder}")


def check_pipeline(model, task, head, params, folder):
    """Estimates a bundle, trains one step with it, and evaluates."""
    Estimate(model, task, EstimateOptions(), "4", params=params).run(folder / "t.kfac")
    bundle = kp.load(folder / "t.kfac")
    assert bundle.about.source.task == task.name
    assert bundle.about.source.license == task.license
    penalty = kp.Regularizer([folder / "t.kfac"], strength=1.0)
    regime = REGIMES["linear"](model, params)
    vector = Train(regime, task, head, TrainingSettings(steps=1, batch_size=4, lr=1e-3), penalty).run(
        folder / "t.safetensors"
    )
    assert set(vector) == set(bundle.parameters)
    assert any(value.abs().max() > 0 for value in vector.values())
    scored = kp.evaluate(model, task, head=head, vector=vector, examples="4")
    assert 0 <= scored.accuracy <= 1


@pytest.mark.parametrize("name", VISION)
def test_pictures(tiny, task_named, name, tmp_path):
    task = task_named(name)
    head = head_for(tiny, task)
    assert (head.origin, head.classes) == ("text", task.classes)
    assert len(head.weight) == len(task.classes)
    check_pipeline(tiny, task, head, FEW["tiny"], tmp_path)


@pytest.mark.parametrize("name", TEXT)
def test_texts_and_label_words(t5, task_named, name, tmp_path):
    task = task_named(name)
    head = head_for(t5, task)
    assert head.origin == "words", "the classes' names begin with different words"
    assert torch.equal(head.weight, t5.word_weights([label.replace("_", " ") for label in task.classes]))
    check_pipeline(t5, task, head, FEW["t5"], tmp_path)


@pytest.mark.parametrize("name", ["rte", "snli"])
def test_texts_and_prototypes(encoder, task_named, name, tmp_path):
    task = task_named(name)
    head = head_for(encoder, task)
    assert head.origin == "prototypes"
    check_pipeline(encoder, task, head, FEW["hf"], tmp_path)


def test_t5_prompts_have_the_column_order_of_its_training_data(t5, t5_folder, task_named):
    """Whatever the order of the columns in a copy."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(t5_folder)
    for name, first, second in (("mnli", "hypothesis", "premise"), ("rte", "sentence1", "sentence2")):
        example = task_named(name).split("train")[0]
        expected = tokenizer(f"{name} {first}: {example[first]} {second}: {example[second]}").input_ids
        assert t5.prepare([example], name)["input_ids"][0].tolist() == expected
