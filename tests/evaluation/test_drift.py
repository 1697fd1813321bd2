"""Predicted drift is τᵀ G τ, measured drift E ‖J τ‖²; for an exact bundle they are equal."""

from __future__ import annotations

import pytest
import torch
from evaluation.toy import (
    EVALUATION_SETS,
    TASKS,
    bundle_of,
    change,
    crossed_model,
    emulate_device,
    inputs,
    linear_model,
    task_vector,
)
from kit import dense_block, refused
from toys import toy_model

import kfacpack as kp
from kfacpack.curvature.blocks import gather
from kfacpack.evaluation.accuracy import EvaluationSet
from kfacpack.evaluation.bundle_quality import drift


@pytest.fixture(scope="module")
def model():
    return toy_model()


def test_an_exact_bundle_predicts_the_measured_drift():
    """In a deep linear net, every block is exact on the examples that it was estimated from."""
    model = linear_model()
    vectors = {name: task_vector(model, TASKS[name]) for name in ("one", "two")}
    result = drift(
        model,
        [EVALUATION_SETS["one"]],
        vectors,
        {"one": bundle_of(model, TASKS["one"], "test")},
        layer_examples=20,
        batch_size=6,
    )
    assert [(row["vector"], row["block"]) for row in result["layers"]] == [
        (name, block) for name in vectors for block in ("0.weight", "1.weight")
    ]
    for row in result["layers"]:
        assert row["predicted"] == pytest.approx(row["measured"], rel=1e-5)
        tau = {row["block"]: vectors[row["vector"]][row["block"]]}
        brute = change(model, inputs(model, EVALUATION_SETS["one"]), tau).square().sum() / 20
        assert row["measured"] == pytest.approx(float(brute), rel=1e-5)
    # The sum of the blocks omits the terms between blocks, which the measurement includes.
    for pair in result["pairs"]:
        blocks = sum(row["predicted"] for row in result["layers"] if row["vector"] == pair["vector"])
        assert pair["predicted"] == pytest.approx(blocks)
        assert pair["predicted"] != pytest.approx(pair["measured"], rel=1e-3)


def test_every_vector_is_compared_with_every_bundle(model):
    vectors = {name: task_vector(model, TASKS[name]) for name in ("one", "three")}
    bundles = {name: bundle_of(model, TASKS[name]) for name in ("two", "one")}
    progress = []
    result = drift(
        model,
        list(EVALUATION_SETS.values()),
        vectors,
        bundles,
        layer_examples=8,
        batch_size=5,
        on_progress=lambda done, total: progress.append((done, total)),
    )
    total = 2 * 20 + 8 * 2 * sum(len(bundle.blocks) for bundle in bundles.values())
    assert (progress[0], progress[-1]) == ((0, total), (total, total))
    assert [(row["vector"], row["task"]) for row in result["pairs"]] == [
        (vector, task) for task in bundles for vector in vectors
    ]
    for row in result["pairs"]:
        brute = change(model, inputs(model, EVALUATION_SETS[row["task"]]), vectors[row["vector"]]).square().sum() / 20
        assert row["measured"] == pytest.approx(float(brute), rel=1e-5)
        assert row["predicted"] == pytest.approx(float(bundles[row["task"]].quadratic(vectors[row["vector"]])))
    rows = {(row["vector"], row["task"], row["block"]): row for row in result["layers"]}
    assert len(rows) == len(result["layers"]) == 2 * sum(len(bundle.blocks) for bundle in bundles.values())
    block = next(block for block in bundles["two"].blocks if block.name == "mlp.weight")
    row = rows["three", "two", block.name]
    tau = {name: vectors["three"][name] for name in block.parameters}
    assert list(tau) == ["mlp.weight", "mlp.bias"]
    delta = gather(tau, block.join, {name: tuple(value.shape) for name, value in tau.items()}).double().flatten()
    assert row["predicted"] == pytest.approx(float(delta @ dense_block(block) @ delta), rel=1e-5)
    assert row["measured"] == pytest.approx(brute_force(model, EVALUATION_SETS["two"], 8, tau), rel=1e-5)


def brute_force(model, evaluation_set, count, tau):
    """Returns E ‖J τ‖² over the first examples."""
    first = EvaluationSet(
        evaluation_set.task, evaluation_set.split, evaluation_set.numbers[:count], evaluation_set.labels[:count]
    )
    return float(change(model, inputs(model, first), tau).square().sum() / count)


def test_blocks_that_share_a_projection_are_measured_on_their_rows():
    model = crossed_model()
    vector, bundle = task_vector(model, TASKS["one"]), bundle_of(model, TASKS["two"])
    result = drift(model, [EVALUATION_SETS["two"]], {"one": vector}, {"two": bundle}, layer_examples=5)
    spans = {block.name: block.join.pieces[0].rows for block in bundle.blocks if block.join.pieces[0].rows}
    assert sorted(spans.values()) == [(0, 4), (4, 12)]
    for row in result["layers"]:
        if row["block"] in spans:
            start, stop = spans[row["block"]]
            tau = {name: torch.zeros_like(vector[name]) for name in ("attn.in_proj_weight", "attn.in_proj_bias")}
            for name in tau:
                tau[name][start:stop] = vector[name][start:stop]
            assert row["measured"] == pytest.approx(brute_force(model, EVALUATION_SETS["two"], 5, tau), rel=1e-5)


def test_nonlinear_vectors_are_measured_in_the_edited_model(model):
    vector = task_vector(model, TASKS["one"], "attention", params="attn.in_proj")
    result = drift(
        model, [EVALUATION_SETS["two"]], {"one": vector}, {"two": bundle_of(model, TASKS["two"])}, layer_examples=3
    )
    x = inputs(model, EVALUATION_SETS["two"])
    with torch.no_grad():
        brute = (vector.apply(model.module)(x) - model.module(x)).square().sum() / 20
    assert result["pairs"][0]["measured"] == pytest.approx(float(brute), rel=1e-5)
    assert {row["block"].partition("[")[0] for row in result["layers"]} == {"attn.in_proj_weight"}


def test_a_device_without_float64_gives_the_same_drift(monkeypatch):
    model = toy_model(dtype=torch.float32)
    vectors, bundles = {"one": task_vector(model, TASKS["one"])}, {"two": bundle_of(model, TASKS["two"])}
    expected = drift(model, [EVALUATION_SETS["two"]], vectors, bundles, layer_examples=8)
    emulate_device(monkeypatch)
    assert drift(model, [EVALUATION_SETS["two"]], vectors, bundles, layer_examples=8) == expected


def test_layers_may_be_left_out(model):
    vector = task_vector(model, TASKS["one"])
    bundle = bundle_of(model, TASKS["two"])
    assert not drift(model, [EVALUATION_SETS["two"]], {"one": vector}, {"two": bundle}, layer_examples=0)["layers"]


def test_incompatible_inputs_are_refused(model):
    vector, bundle = task_vector(model, TASKS["one"]), bundle_of(model, TASKS["two"])
    with refused(kp.KfacpackError, "no examples of two"):
        drift(model, [EVALUATION_SETS["one"]], {"one": vector}, {"two": bundle})
    with refused(kp.KfacpackError, "at least one bundle"):
        drift(model, [EVALUATION_SETS["one"]], {"one": vector}, {})
    other = bundle_of(toy_model(seed=1), TASKS["two"])
    with refused(
        kp.TaskVectorError, "bundle for two", "base models (attentive and attentive)", "'attn.in_proj_weight'"
    ):
        drift(model, [EVALUATION_SETS["two"]], {"one": vector}, {"two": other})
    part = kp.estimate(model.module, [inputs(model, EVALUATION_SETS["two"])], params="mlp.*", function=model.function)
    with refused(kp.TaskVectorError, "'attn.in_proj_weight'", "bundle for two does not cover", "--params"):
        drift(model, [EVALUATION_SETS["two"]], {"one": vector}, {"two": part})
    wide = kp.estimate(model.module, [inputs(model, EVALUATION_SETS["two"])])
    with refused(kp.TaskVectorError, "bundle for two", "other of width 6; embedding of width 6"):
        drift(model, [EVALUATION_SETS["two"]], {"one": vector}, {"two": wide})


def test_vectors_may_cover_different_parameters(model):
    """Outside the linear regime, each vector is compared by the blocks of its own parameters, in either order."""
    params = {"one": ("mlp",), "three": None}
    vectors = {name: task_vector(model, TASKS[name], "full", params=params[name]) for name in ("one", "three")}
    bundle = bundle_of(model, TASKS["two"])
    for order in (("one", "three"), ("three", "one")):
        result = drift(
            model,
            [EVALUATION_SETS["two"]],
            {name: vectors[name] for name in order},
            {"two": bundle},
            layer_examples=8,
        )
        blocks = {name: [row["block"] for row in result["layers"] if row["vector"] == name] for name in order}
        assert blocks["three"] == [block.name for block in bundle.blocks]
        assert 0 < len(blocks["one"]) < len(blocks["three"])
        assert all(block.startswith("mlp") for block in blocks["one"])
        x = inputs(model, EVALUATION_SETS["two"])[:8]
        for row in result["layers"]:
            covered = next(block.parameters for block in bundle.blocks if block.name == row["block"])
            tau = {name: value for name, value in vectors[row["vector"]].items() if name in covered}
            brute = change(model, x, tau).square().sum() / 8
            assert row["measured"] == pytest.approx(float(brute), rel=1e-4)


def test_every_vector_must_be_covered_by_the_bundles(model):
    vectors = {
        "one": task_vector(model, TASKS["one"], "full", params=("mlp",)),
        "three": task_vector(model, TASKS["three"], "full"),
    }
    evaluation_set = EVALUATION_SETS["two"]
    x = inputs(model, evaluation_set)
    about = {"name": model.name, "function": model.function, "source": kp.Source(task="two", dataset_size=20)}
    bundle = kp.estimate(model.module, [x], fisher="exact", forward=model.forward, params=["mlp*"], **about)
    with refused(kp.TaskVectorError, "does not cover"):
        drift(model, [evaluation_set], vectors, {"two": bundle})
