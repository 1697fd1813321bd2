"""The regime `sparse`: its masks equal brute force, and only the weights in them change."""

from __future__ import annotations

import pytest
import torch
from kit import refused
from toys import ToyTask, toy_model
from training.test_job import bundle_of

import kfacpack as kp
from kfacpack._random import CounterRandom
from kfacpack.training.regimes import REGIMES, ROUNDS, block_diagonal, calibrated_masks, lowest, masks_from_bundles
from kfacpack.vectors.storage import VectorFile

SETTINGS = {"steps": 5, "batch_size": 10, "lr": 0.02}


@pytest.fixture(scope="module")
def other():
    return bundle_of(toy_model(), ToyTask("other", seed=5))


def smallest(scores, count):
    """Masks of the `count` smallest scores by a complete sort; equal scores in their order."""
    flat = torch.cat([score.flatten() for score in scores.values()])
    mask = torch.zeros(len(flat), dtype=torch.bool)
    mask[torch.sort(flat, stable=True).indices[:count]] = True
    parts = mask.split([score.numel() for score in scores.values()])
    return {name: part.reshape(scores[name].shape) for name, part in zip(scores, parts, strict=True)}


def test_weights_of_layers_are_candidates_and_biases_are_not():
    names = list(REGIMES["sparse"](toy_model()).parameters)
    assert "attn.in_proj_weight" in names
    assert "attn.out_proj.weight" in names
    assert not [name for name in names if name.endswith("bias")]
    tiny = kp.load_model("tiny")
    candidates = REGIMES["sparse"](tiny).parameters
    assert set(candidates) < set(REGIMES["full"](tiny).parameters)
    assert all(name.endswith("weight") for name in candidates)


def test_equal_scores_are_selected_in_their_order():
    scores = {"a": torch.tensor([[1.0, 0.0], [0.0, 2.0]]), "b": torch.tensor([0.0, torch.inf])}
    for count in range(1, 6):
        selected, expected = lowest(scores, count), smallest(scores, count)
        assert all(torch.equal(selected[name], expected[name]) for name in scores)


def test_calibration_equals_brute_force():
    """Four rounds of squared gradients, example by example, with the weights outside the mask multiplied by 0.1."""
    model, task, keep, seed = toy_model(), ToyTask(size=12), 0.2, 3
    head, names = kp.head_for(model, task), list(REGIMES["sparse"](model).parameters)
    split = task.split("validation")
    total = sum(model.module.get_parameter(name).numel() for name in names)
    kept = {name: torch.ones_like(model.module.get_parameter(name), dtype=torch.bool) for name in names}
    for number in range(ROUNDS):
        module = toy_model().module
        with torch.no_grad():
            for name in names:
                module.get_parameter(name).mul_(torch.where(kept[name], 1.0, 0.1))
        draws = CounterRandom(f"sampled logits, round {number}", seed).uniform(12)
        scores = {name: torch.zeros_like(module.get_parameter(name)) for name in names}
        for position in range(12):
            module.zero_grad()
            logits = head.logits(module(split[position]["x"][None]))[0]
            steps = logits.softmax(0).cumsum(0)
            logits[int((steps < float(draws[position])).sum())].backward()
            for name in names:
                scores[name] += module.get_parameter(name).grad.square()
        ranked = {name: score.masked_fill(~kept[name], torch.inf) for name, score in scores.items()}
        kept = smallest(ranked, -int(-total * keep ** ((number + 1) / ROUNDS) // 1))
    masks = calibrated_masks(REGIMES["sparse"](model), head, task, keep, seed)
    assert list(masks.tensors) == names
    assert all(torch.equal(masks.tensors[name], kept[name]) for name in names)
    assert sum(int(mask.sum()) for mask in masks.tensors.values()) == -int(-total * keep // 1)


def test_masks_of_bundles_are_the_smallest_diagonal_elements(other):
    model = toy_model()
    regime = REGIMES["sparse"](model)
    shapes = {parameter.name: parameter.shape for parameter in other.about.base.parameters}
    diagonal = {}
    for name in regime.parameters:
        diagonal[name] = torch.zeros(shapes[name], dtype=torch.float64)
        for index in range(diagonal[name].numel()):
            unit = torch.zeros(shapes[name], dtype=torch.float64)
            unit.view(-1)[index] = 1
            diagonal[name].view(-1)[index] = other.quadratic({name: unit})
    by_block = {}
    for block in other.blocks:
        by_block |= block_diagonal(block, shapes)
    for name, values in diagonal.items():
        torch.testing.assert_close(by_block[name], values)
    masks = masks_from_bundles(regime, kp.Regularizer(other), 0.3)
    scores = {name: by_block[name].float() for name in diagonal}
    expected = smallest(scores, -int(-0.3 * sum(value.numel() for value in diagonal.values()) // 1))
    assert all(torch.equal(masks.tensors[name], expected[name]) for name in diagonal)


@pytest.mark.parametrize("source", ["validation", "bundles"])
def test_only_weights_in_the_mask_change_and_only_they_are_stored(source, other, tmp_path):
    model, mask = toy_model(), {"mask": other} if source == "bundles" else {}
    dense, path = tmp_path / "full.safetensors", tmp_path / "sparse.safetensors"
    kp.train(model, ToyTask(), regime="full", output=dense, **SETTINGS)
    trained = kp.train(model, ToyTask(), regime="sparse", output=path, **mask, **SETTINGS)
    vector = kp.TaskVector.load(path)
    total = sum(vector[name].numel() for name in vector)
    changed = sum(int(vector[name].count_nonzero()) for name in vector)
    assert 0 < changed <= -int(-0.1 * total // 1)
    assert sum(len(part[0]) for name in vector if (part := vector.sparse(name))) >= changed
    assert path.stat().st_size < dense.stat().st_size
    assert vector.digest == trained.digest
    assert vector.about.tasks[0].training.settings["clip"] == 1.0
    assert VectorFile(path).manifest.version == "1.2"
    assert VectorFile(dense).manifest.version == "1.0"
    edited = vector.apply(model.module)
    for name, before in model.module.state_dict().items():
        same = edited.state_dict()[name] == before
        assert bool(same.all()) if name not in vector else int((~same).sum()) <= int(vector[name].count_nonzero())


def test_the_defaults_are_those_of_the_published_method(tmp_path):
    kp.train(toy_model(), ToyTask(), regime="sparse", output=tmp_path / "t.safetensors", steps=1, batch_size=4)
    settings = kp.TaskVector.load(tmp_path / "t.safetensors").about.tasks[0].training.settings
    assert {key: settings[key] for key in ("lr", "weight_decay", "clip", "keep")} == {
        "lr": 1e-5,
        "weight_decay": 0.1,
        "clip": 1.0,
        "keep": 0.1,
    }


def test_options_of_other_regimes_are_refused(other):
    with refused(kp.KfacpackError, "keep", "linear"):
        kp.train(toy_model(), ToyTask(), keep=0.5)
    with refused(kp.KfacpackError, "mask", "full"):
        kp.train(toy_model(), ToyTask(), regime="full", mask=other)
    with refused(kp.KfacpackError, "keep", "1.5"):
        kp.train(toy_model(), ToyTask(), regime="sparse", keep=1.5)
    only = bundle_of(toy_model(), ToyTask())
    with refused(kp.KfacpackError, "toy"):
        kp.train(toy_model(), ToyTask(), regime="sparse", mask=only)
    for keep in ("half", True, float("nan")):
        with refused(kp.KfacpackError, "keep", keep):
            kp.train(toy_model(), ToyTask(), regime="sparse", keep=keep)
