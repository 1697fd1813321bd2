"""Predicted interference equals τᵀ G τ by brute force, block by block, and is compared with measured drift by rank."""

from __future__ import annotations

import pytest
import torch
from evaluation.toy import EVALUATION_SETS, TASKS, bundle_of, crossed_model, inputs, linear_model, task_vector
from kit import MATRIX_FORMS, dense_block, refused, small_curvature
from toys import toy_model

import kfacpack as kp
from kfacpack.curvature.blocks import gather
from kfacpack.evaluation.bundle_quality import drift, predicted_drift
from kfacpack.evaluation.interference import interference, spearman
from kfacpack.vectors.storage import InMemoryVector


@pytest.fixture(scope="module")
def model():
    return toy_model()


@pytest.fixture(scope="module")
def vectors(model):
    return {name: task_vector(model, TASKS[name]) for name in TASKS}


@pytest.fixture(scope="module")
def bundles(model):
    return {name: bundle_of(model, TASKS[name]) for name in TASKS}


class FactoredVector(InMemoryVector):
    """A vector whose matrices have rank two and are given as factors; other parameters are dense."""

    def __init__(self, about, generator):
        self.pairs, tensors = {}, {}
        for parameter in about.base.parameters:
            rows, columns = (*parameter.shape, 1)[0], torch.Size(parameter.shape[1:]).numel()
            rank = 0 if parameter.name.endswith("out_proj.weight") else 2
            U, V = (torch.randn(s, generator=generator) for s in ((rows, rank), (rank, columns)))
            tensors[parameter.name] = (U @ V).reshape(parameter.shape)
            if len(parameter.shape) > 1:
                self.pairs[parameter.name] = U, V
        super().__init__(tensors, about, {})

    def factors(self, name):
        return self.pairs.get(name)

    def read(self, name):
        assert not (self.forbidden and name in self.pairs), f"{name} was multiplied out"
        return super().read(name)

    forbidden = False


def factored(about, seed=0):
    storage = FactoredVector(about, torch.Generator().manual_seed(seed))
    dense = kp.TaskVector({name: storage.read(name) for name in kp.TaskVector.from_storage(storage)}, about)
    return storage, kp.TaskVector.from_storage(storage), dense


def test_predicted_drift_equals_brute_force(vectors, bundles):
    result = interference(vectors, bundles)
    assert [(pair["vector"], pair["task"]) for pair in result["pairs"]] == [(s, t) for s in TASKS for t in TASKS]
    for pair in result["pairs"]:
        tau, bundle = vectors[pair["vector"]], bundles[pair["task"]]
        assert list(pair["blocks"]) == [block.name for block in bundle.blocks]
        for block in bundle.blocks:
            shapes = {name: tuple(tau[name].shape) for name in block.parameters}
            delta = gather(tau, block.join, shapes).double().flatten()
            assert pair["blocks"][block.name] == pytest.approx(float(delta @ dense_block(block) @ delta), rel=1e-5)
        assert pair["predicted"] == pytest.approx(sum(pair["blocks"].values()))
        assert pair["predicted"] == pytest.approx(float(bundle.quadratic(tau)), rel=1e-5)
        assert pair["own"] == (pair["vector"] == pair["task"])


def test_ratios_and_sums(vectors, bundles):
    result = interference({name: vectors[name] for name in ("one", "two")}, bundles)
    drifts = {(pair["vector"], pair["task"]): pair["predicted"] for pair in result["pairs"]}
    for pair in result["pairs"]:
        own = drifts[pair["vector"], pair["vector"]]
        assert pair["relative"] == pytest.approx(drifts[pair["vector"], pair["task"]] / own)
    one, _, three = result["tasks"]
    assert (one["own"], one["others"]) == (drifts["one", "one"], drifts["two", "one"])
    assert one["relative"] == pytest.approx(drifts["two", "one"] / drifts["one", "one"])
    assert (three["own"], three["relative"]) == (None, None)
    assert three["others"] == pytest.approx(drifts["one", "three"] + drifts["two", "three"])
    totals = {block["block"]: block["predicted"] for block in result["blocks"]}
    others = [pair for pair in result["pairs"] if not pair["own"]]
    assert totals == pytest.approx({name: sum(pair["blocks"][name] for pair in others) for name in totals})
    assert list(totals.values()) == sorted(totals.values(), reverse=True)
    assert sum(block["share"] for block in result["blocks"]) == pytest.approx(1)


def test_the_bound_is_reached_if_all_blocks_change_f_alike():
    """Two layers of a deep linear net, each with the same change of f, measured together."""
    model = linear_model()
    first, second = (p.detach() for p in model.module.parameters())
    bundle = bundle_of(model, TASKS["one"], "test")
    # W2 ΔW1 = W2 W1 and ΔW2 W1 = W2 W1: the changes of f are equal, and their sum is twice as large.
    tensors = {"0.weight": first.float(), "1.weight": second.float()}
    vector = kp.TaskVector(tensors, task_vector(model, TASKS["one"]).about.model_copy(update={"tasks": ()}))
    sets = [EVALUATION_SETS["one"]]
    (pair,) = interference({"two": vector}, {"one": bundle}, model=model, evaluation_sets=sets)["pairs"]
    assert pair["aligned"] == pytest.approx(pair["measured"], rel=1e-4)
    assert pair["predicted"] == pytest.approx(pair["measured"] / 2, rel=1e-4)


def test_scaling_a_vector_scales_its_row_quadratically(vectors, bundles):
    before = interference({"one": vectors["one"]}, bundles)
    after = interference({"one": -3.0 * vectors["one"]}, bundles)
    for small, large in zip(before["pairs"], after["pairs"], strict=True):
        assert large["predicted"] == pytest.approx(9 * small["predicted"], rel=1e-5)
        assert large["relative"] == pytest.approx(small["relative"], rel=1e-5)


@pytest.mark.parametrize("rule", ["stack", "tak"])
def test_merged_bundles_are_columns(vectors, bundles, rule):
    merged = kp.merge([bundles["one"], bundles["two"]], rule=rule, weights=[1, 1])
    result = interference(vectors, {**bundles, "pair": merged})
    drifts = {(pair["vector"], pair["task"]): pair["predicted"] for pair in result["pairs"]}
    own = {pair["vector"]: pair["own"] for pair in result["pairs"] if pair["task"] == "pair"}
    assert own == {"one": True, "two": True, "three": False}
    if rule == "stack":
        for name in vectors:
            assert drifts[name, "pair"] == pytest.approx(drifts[name, "one"] + drifts[name, "two"], rel=1e-5)
    column = result["tasks"][-1]
    assert (column["tasks"], column["own"], column["relative"]) == (["one", "two"], None, None)
    assert column["others"] == pytest.approx(drifts["three", "pair"])


@pytest.mark.parametrize("make", [toy_model, crossed_model, linear_model])
def test_factored_vectors_are_not_multiplied_out(make):
    model = make()
    bundles = {name: bundle_of(model, TASKS[name]) for name in ("one", "two")}
    storage, vector, dense = factored(task_vector(model, TASKS["one"]).about)
    kronecker = [block for block in bundles["one"].blocks if len(block.structure.sides) == 2]
    assert kronecker
    # Dense blocks need ΔW; where they have none of the factored parameters, nothing may be multiplied out.
    storage.forbidden = all(
        name not in storage.pairs
        for block in bundles["one"].blocks
        if block not in kronecker
        for name in block.parameters
    )
    predicted = predicted_drift({"one": vector}, bundles)
    expected = predicted_drift({"one": dense}, bundles)
    for key, blocks in expected.items():
        assert predicted[key] == pytest.approx(blocks, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("form", MATRIX_FORMS)
def test_factored_and_dense_vectors_agree_for_every_form_of_matrix(form):
    """Also for transposed parameters, slices of a fused projection, norms and tokens."""
    curvature = small_curvature(form)
    reference = task_vector(toy_model(), TASKS["one"]).about
    about = reference.model_copy(update={"base": curvature.about.base})
    _, vector, dense = factored(about, seed=1)
    (predicted,) = predicted_drift({"one": vector}, {"toy": curvature}).values()
    scale = float(curvature.quadratic(dense).abs())
    assert sum(predicted.values()) == pytest.approx(float(curvature.quadratic(dense)), rel=1e-3, abs=1e-4 * scale)


def test_measured_drift_is_that_of_drift(model, vectors, bundles):
    sets = list(EVALUATION_SETS.values())
    progress = []
    result = interference(
        vectors, bundles, model=model, evaluation_sets=sets, on_progress=lambda *state: progress.append(state)
    )
    pairs = {(pair["vector"], pair["task"]): pair for pair in result["pairs"]}
    for row in drift(model, sets, vectors, bundles, layer_examples=0)["pairs"]:
        pair = pairs[row["vector"], row["task"]]
        assert (pair["measured"], pair["predicted"]) == (row["measured"], row["predicted"])
    off = [pair for pair in result["pairs"] if not pair["own"]]
    predicted, aligned, measured = (
        torch.tensor([pair[key] for pair in off]) for key in ("predicted", "aligned", "measured")
    )
    assert result["spearman"] == pytest.approx(spearman(predicted, measured))
    assert result["spearman_aligned"] == pytest.approx(spearman(aligned, measured))
    for pair in result["pairs"]:
        assert pair["predicted"] <= pair["aligned"] <= len(pair["blocks"]) * pair["predicted"] * (1 + 1e-6)
    assert progress[-1] == (60, 60)
    one = interference(vectors, bundles, model=model, evaluation_sets=sets[:1])
    assert [pair["measured"] is not None for pair in one["pairs"]] == [True, False, False] * 3
    assert one["spearman"] is one["spearman_aligned"] is None


def test_spearman_averages_the_ranks_of_ties():
    x = torch.tensor([1.0, 2.0, 2.0, 5.0, 4.0])
    assert spearman(x, x) == pytest.approx(1)
    assert spearman(x, -x.exp()) == pytest.approx(-1)
    assert spearman(x, torch.tensor([3.0, 1.0, 4.0, 1.0, 5.0])) == pytest.approx(-0.75 / 9.5)
    assert spearman(x, torch.ones(5)) is None


def test_incompatible_inputs_are_refused(model, vectors, bundles):
    sets = list(EVALUATION_SETS.values())
    with refused(kp.KfacpackError, "vectors: 0, bundles: 3"):
        interference({}, bundles)
    with refused(kp.KfacpackError, "vectors: 3, bundles: 0"):
        interference(vectors, {})
    with refused(kp.KfacpackError, "model="):
        interference(vectors, bundles, evaluation_sets=sets)
    with refused(kp.KfacpackError, "examples of two", "one"):
        interference(vectors, {"one": bundles["one"]}, model=model, evaluation_sets=sets[1:2])
    other = bundle_of(toy_model(seed=1), TASKS["two"])
    with refused(kp.TaskVectorError, "bundle for two", "base models", "'attn.in_proj_weight'"):
        interference(vectors, {"one": bundles["one"], "two": other})
    part = kp.estimate(model.module, [inputs(model, EVALUATION_SETS["two"])], params="mlp.*", function=model.function)
    with refused(kp.TaskVectorError, "'attn.in_proj_weight'", "bundle for two does not cover", "--params"):
        interference(vectors, {"two": part})
    wide = kp.estimate(model.module, [inputs(model, EVALUATION_SETS["two"])])
    with refused(kp.TaskVectorError, "bundle for two", "other of width 6; embedding of width 6"):
        interference(vectors, {"two": wide})
    partial = {"one": vectors["one"], "two": task_vector(model, TASKS["two"], params="mlp.")}
    assert len(interference(partial, bundles)["pairs"]) == 6
    with refused(kp.KfacpackError, "different parameters", "attn.in_proj_weight"):
        interference(partial, bundles, model=model, evaluation_sets=sets)
    with refused(kp.KfacpackError, "vectors", "1 of type int"):
        interference({1: vectors["one"]}, bundles)
