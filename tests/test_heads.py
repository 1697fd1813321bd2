"""Heads: CLIP's zero-shot classifier, prototypes from centred class means, and errors if neither is possible."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from image_folders import write_images
from kit import refused
from torch.nn.functional import cross_entropy

from kfacpack.errors import KfacpackError
from kfacpack.models import heads
from kfacpack.models.families import load_model
from kfacpack.models.heads import Head, head_for
from kfacpack.tasks.registry import load_task


@pytest.fixture(scope="module")
def model():
    return load_model("tiny", weights="random", seed=2)


@pytest.fixture
def vision_only(model):
    """The same model without its text tower."""
    return replace(model, encode_text=None)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    counts = {
        "train": {"red": 3, "green": 5, "blue": 4},
        "validation": {"red": 1},
        "test": {"red": 2, "green": 2, "blue": 2},
    }
    return load_task("colours", write_images(tmp_path_factory.mktemp("colours"), counts))


class ChangedTask:
    """A task with some attributes replaced."""

    def __init__(self, task, **changed):
        self._task, self._changed = task, changed

    def __getattr__(self, name):
        return self._changed[name] if name in self._changed else getattr(self._task, name)


def features(model, task, split="train"):
    """f (N, C) and labels (N,) of a whole split, one example at a time."""
    examples = task.split(split)
    batches = (model.prepare([examples[n]], task.name) for n in range(len(examples)))
    f = torch.cat([model.forward(batch) for batch in batches]).detach()
    return f, torch.tensor([examples.label(n) for n in range(len(examples))])


def test_a_head_is_an_affine_map():
    head = Head(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([0.5, 0.0]), ("one", "two"), "text")
    f = torch.tensor([[1.0, 1.0], [-1.0, 3.0]], dtype=torch.float16, requires_grad=True)
    logits = head.logits(f)
    assert logits.tolist() == [[1.5, 2.0], [-0.5, 6.0]]
    assert logits.dtype == torch.float32
    assert torch.autograd.grad(logits.sum(), f)[0].tolist() == [[1.0, 2.0], [1.0, 2.0]]


def test_texts_give_open_clips_own_zero_shot_classifier(model, task):
    import open_clip

    from kfacpack.demo import EMBEDDED_MODELS

    templates = ("a photo of a {}.", "a {}", "something {} on the table")
    tokenizer = open_clip.get_tokenizer("tiny", bpe_path=str(EMBEDDED_MODELS["tiny"].merges))
    stock = open_clip.build_zero_shot_classifier(model.module, tokenizer, task.classes, templates)
    head = head_for(model, ChangedTask(task, templates=templates))
    torch.testing.assert_close(head.weight, model.logit_scale * stock.T)
    assert head.bias.tolist() == [0, 0, 0]
    assert (head.origin, head.classes) == ("text", ("blue", "green", "red"))
    assert not head.weight.requires_grad


def test_prompts_contain_class_names_with_spaces(model, task):
    prompts = []

    def record(texts):
        prompts.extend(texts)
        return model.encode_text(texts)

    named = ChangedTask(task, classes=("sea_blue", "{green}", "red"), templates=("a {}.", "the {} one"))
    head_for(replace(model, encode_text=record), named)
    assert prompts == ["a sea blue.", "the sea blue one", "a {green}.", "the {green} one", "a red.", "the red one"]


def test_prototypes_are_centred_class_means(vision_only, task):
    f, labels = features(vision_only, task)
    means = torch.stack([f[labels == k].mean(0) for k in range(3)])
    centre = means.mean(0)
    directions = (means - centre) / (means - centre).norm(dim=1, keepdim=True)
    head = head_for(vision_only, task, batch_size=5)
    assert head.origin == "prototypes"
    test_f, _ = features(vision_only, task, "test")
    scale = float(head.weight[0].norm())
    torch.testing.assert_close(head.logits(test_f), scale * (test_f - centre) @ directions.T, rtol=1e-4, atol=1e-4)
    # The scale minimises the training loss, up to the model's own scale.
    cosines, others = (f - centre) @ directions.T, (0.7 * scale, min(1.3 * scale, vision_only.logit_scale))
    losses = [float(cross_entropy(factor * cosines, labels)) for factor in (scale, *others)]
    assert losses[0] <= min(losses) + 1e-3
    assert scale <= vision_only.logit_scale
    assert head.weight.dtype == head.bias.dtype == torch.float32


def test_prototypes_do_not_depend_on_the_batch_size(vision_only, task):
    one, many = (head_for(vision_only, task, batch_size=size) for size in (1, 64))
    torch.testing.assert_close(one.weight, many.weight, rtol=1e-4, atol=1e-5)


def test_a_large_class_is_represented_by_evenly_spaced_examples(vision_only, task, monkeypatch):
    monkeypatch.setattr(heads, "MAX_PER_CLASS", 2)
    f, labels = features(vision_only, task)
    places = [(labels == k).nonzero().flatten() for k in range(3)]
    means = torch.stack([f[place[[0, len(place) // 2]]].mean(0) for place in places])
    directions = torch.nn.functional.normalize(means - means.mean(0), dim=1)
    weight = head_for(vision_only, task).weight
    torch.testing.assert_close(weight / weight.norm(dim=1, keepdim=True), directions, rtol=1e-4, atol=1e-4)


def test_progress_counts_the_training_examples(vision_only, task):
    progress = []
    head_for(vision_only, task, batch_size=5, on_progress=lambda done, total: progress.append((done, total)))
    assert progress == [(0, 12), (5, 12), (10, 12), (12, 12)]


def test_auto_chooses_the_first_kind_that_is_possible(model, vision_only, task):
    assert head_for(model, task).origin == "text"
    assert head_for(model, ChangedTask(task, templates=())).origin == "prototypes"
    assert head_for(vision_only, task).origin == "prototypes"
    assert head_for(model, task, kind="prototypes").origin == "prototypes"


def test_a_class_without_examples_is_named(vision_only, tmp_path):
    counts = {"train": {"red": 2, "green": 2}, "test": {"red": 1, "green": 1, "blue": 1}}
    task = load_task("colours", write_images(tmp_path, counts))
    with refused(KfacpackError, "colours: class 'blue' has no examples in split 'train'"):
        head_for(vision_only, task)


def test_impossible_heads_are_refused(model, vision_only, task):
    with refused(KfacpackError, "tiny has no text tower", "--head prototypes"):
        head_for(vision_only, task, kind="text")
    with refused(KfacpackError, "colours has no prompt templates"):
        head_for(model, ChangedTask(task, templates=()), kind="text")
    for kind in ("text", "prototypes"):
        with refused(KfacpackError, "colours: the class names are unknown"):
            head_for(model, ChangedTask(task, classes=None), kind=kind)
    with refused(KfacpackError, "head 'guess'", "auto, text, words or prototypes"):
        head_for(model, task, kind="guess")
