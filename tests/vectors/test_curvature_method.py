"""Merge methods that use bundles: equal to dense solves, matched to their vectors, recorded in the file."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import MATRIX_FORMS, of_task, refused, small_curvature
from vectors.curvature_cases import SIZES, absolute_damping, bundle, dense_merge, vector, weights_of

import kfacpack as kp
from kfacpack.curvature.matrices.dense import Dense
from kfacpack.format.vector_manifest import AboutVector
from kfacpack.merging.solve import SolveSettings, SolveTerm, solve_block
from kfacpack.vectors.methods.curvature import CURVATURE_DAMPING as DAMPING
from kfacpack.vectors.methods.method import MethodInput
from kfacpack.vectors.parameter_change import no_change

METHODS = ("curvature", "regmean", "fisher")
SHAPES = {p.name: p.shape for p in bundle(0).about.base.parameters}


def priors(vectors, prior, alphas=None):
    total = {n: sum(a * v[n].double() for a, v in zip(alphas or [1] * 9, vectors, strict=False)) for n in vectors[0]}
    return {n: {"sum": 1, "mean": 1 / len(vectors), "zero": 0}[prior] * value for n, value in total.items()}


def close(result, expected, tolerance=1e-6):
    for name in result:
        torch.testing.assert_close(result[name].double(), expected[name].double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("tasks", [1, 2, 3, 4])
@pytest.mark.parametrize("form", MATRIX_FORMS)
@pytest.mark.parametrize("method", METHODS)
def test_equals_a_dense_solve(method, form, tasks):
    prior = ("sum", "mean", "zero")[tasks % 3]
    bundles, vectors = [bundle(k, form) for k in range(tasks)], [vector(k) for k in range(tasks)]
    extra = {"negligible_drift": 5.0} if method == "curvature" else {}
    merged = kp.add(vectors, method, bundles=bundles, prior=prior, damping=0.05, task_weights="size", **extra)
    taus = [dict(v) for v in vectors]
    start = priors(vectors, prior)
    terms = list(zip(weights_of(tasks), bundles, taus, strict=True))
    repaired = merged.about.method.repaired
    if method != "curvature" and repaired:
        pytest.skip("a repair of regmean or fisher is a repair of their own matrices, see test_solve.py")
    absolute = absolute_damping(vectors, 5.0) if extra else 0.0
    blocks = bundles[0].blocks
    close(merged, dense_merge(terms, start, SHAPES, blocks, 0.05, method, repaired=repaired, absolute=absolute))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("prior", ["sum", "mean"])
def test_one_vector_is_returned_bit_for_bit(method, prior, tmp_path):
    one = vector(0)
    merged = kp.add([one], method, bundles=[bundle(0)], prior=prior)
    assert all(torch.equal(merged[name].view(torch.int32), one[name].view(torch.int32)) for name in one)
    assert merged.about.method.max_iterations == 0


@pytest.mark.parametrize("method", [*METHODS, "actmat"])
@pytest.mark.parametrize("factor", [3.0, -0.25])
def test_alpha_multiplies_the_result(method, factor):
    vectors, bundles = [vector(k) for k in range(3)], [bundle(k) for k in range(3)]
    given_bundles = None if method == "actmat" else bundles
    once = kp.add(vectors, method, alpha=[1, 0.5, -2], bundles=given_bundles)
    again = kp.add(vectors, method, alpha=[factor, 0.5 * factor, -2 * factor], bundles=given_bundles)
    close(again, {name: factor * once[name].double() for name in once}, 1e-5)
    scaled = (factor * once).about.method.objective
    assert scaled == pytest.approx(again.about.method.objective, rel=1e-5)


def test_alphas_multiply_the_vectors():
    vectors, bundles, alphas = [vector(k) for k in range(2)], [bundle(k) for k in range(2)], [0.5, -2.0]
    merged = kp.add(vectors, "curvature", alpha=alphas, bundles=bundles, task_weights="size")
    taus = [{n: a * v[n].double() for n in v} for a, v in zip(alphas, vectors, strict=True)]
    terms = list(zip(weights_of(2), bundles, taus, strict=True))
    start, absolute = priors(vectors, "sum", alphas), absolute_damping(vectors)
    close(merged, dense_merge(terms, start, SHAPES, bundles[0].blocks, DAMPING, absolute=absolute))


def test_equal_weights():
    vectors, bundles = [vector(k) for k in range(3)], [bundle(k) for k in range(3)]
    merged = kp.add(vectors, "curvature", bundles=bundles)
    terms = list(zip([1.0] * 3, bundles, map(dict, vectors), strict=True))
    start, absolute = priors(vectors, "sum"), absolute_damping(vectors)
    close(merged, dense_merge(terms, start, SHAPES, bundles[0].blocks, DAMPING, absolute=absolute))


def test_regmean_is_that_of_the_paper():
    """W = (Σ W_t A_t) (Σ A_t)⁻¹ without damping, and with smaller off-diagonal entries of A."""
    vectors, bundles = [vector(k) for k in range(3)], [bundle(k) for k in range(3)]
    merged = kp.add(vectors, "regmean", bundles=bundles, damping=1e-9, shrink=0.25)
    A = [b.blocks[0].structure.sides[1][0].dense(torch.float64) for b in bundles]
    A = [0.75 * a + 0.25 * a.diag().diag() for a in A]
    W = [torch.cat([v["one.weight"], v["one.bias"][:, None]], 1).double() for v in vectors]
    expected = sum(w @ a for w, a in zip(W, A, strict=True)) @ torch.linalg.inv(sum(A))
    torch.testing.assert_close(merged["one.weight"].double(), expected[:, :-1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merged["one.bias"].double(), expected[:, -1], rtol=1e-5, atol=1e-5)
    assert merged.about.method.without_curvature == ("norm", "scale", "token")
    torch.testing.assert_close(merged["scale"], sum(v["scale"] for v in vectors))


def test_actmat_uses_the_vectors_alone():
    vectors = [vector(k) for k in range(3)]
    merged = kp.add(vectors, "actmat", damping=1e-6, prior="mean")
    W = [v["one.weight"].double() for v in vectors]
    summed = sum(w.T @ w for w in W)
    system = summed + 1e-6 * summed.trace() / 6 * torch.eye(6, dtype=torch.float64)
    mean = sum(W) / 3
    expected = mean + sum((w - mean) @ w.T @ w for w in W) @ torch.linalg.inv(system)
    torch.testing.assert_close(merged["one.weight"].double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merged["one.bias"], sum(v["one.bias"] for v in vectors) / 3)


@settings(deadline=None, max_examples=15)
@given(st.integers(2, 4), st.sampled_from(["sum", "mean", "zero"]), st.floats(-4, 0))
def test_the_objective_is_no_larger_than_that_of_other_merges(tasks, prior, magnitude):
    """Per block: that of the sum, the mean and RegMean."""
    vectors, bundles, damping = [vector(k) for k in range(tasks)], [bundle(k) for k in range(tasks)], 10.0**magnitude
    merged = kp.add(vectors, "curvature", bundles=bundles, prior=prior, damping=damping, task_weights="size")
    start, weights = priors(vectors, prior), weights_of(tasks)
    others = [priors(vectors, "sum"), priors(vectors, "mean"), kp.add(vectors, "regmean", bundles=bundles)]
    for number, report in enumerate(merged.about.method.blocks):
        blocks = [b.blocks[number] for b in bundles]
        traces = sum(
            w * t * float(torch.tensor([m.dense(torch.float64).trace() for m in ms]).prod())
            for w, block in zip(weights, blocks, strict=True)
            for t, *ms in zip(block.structure.weights, *block.structure.sides, strict=True)
        )
        epsilon = damping * traces / (blocks[0].join.rows * blocks[0].join.columns) + absolute_damping(vectors)
        rows = [piece.rows for piece in blocks[0].join.pieces]

        def part(tau, name, rows=rows):
            return tau[name][slice(*rows[0])] if rows[0] else tau[name]

        def objective(tau, blocks=blocks, epsilon=epsilon, part=part):
            names = blocks[0].parameters
            drift = sum(
                w * float(block.quadratic({n: (tau[n].double() - v[n].double()) for n in names}, SHAPES))
                for w, block, v in zip(weights, blocks, vectors, strict=True)
            )
            return drift + epsilon * sum(float((part(tau, n).double() - part(start, n)).square().sum()) for n in names)

        least = objective(merged)
        assert report.after == pytest.approx(least, rel=1e-3, abs=1e-5)
        assert report.before == pytest.approx(objective(start), rel=1e-4, abs=1e-6)
        assert all(least <= objective(other) * (1 + 1e-5) + 1e-6 for other in others)


@pytest.mark.parametrize("strength", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("form", ["packed", "block", "lowrank", "diagonal", "packed-int8"])
@pytest.mark.parametrize("others", [1, 3])
def test_refine_equals_a_dense_solve(others, form, strength):
    """(G_own + λ Σ w G + ε) τ' = G_own τ + ε τ."""
    tau, own, reg = vector(0), bundle(0, form), [bundle(k, form) for k in range(1, 1 + others)]
    refined = kp.refine(tau, own, reg, strength=strength, damping=0.05, task_weights="size")
    weights = [strength * others * size / sum(SIZES[1 : 1 + others]) for size in SIZES[1 : 1 + others]]
    zero = {name: torch.zeros_like(tau[name]) for name in tau}
    terms = [(1.0, own, dict(tau)), *((w, c, zero) for w, c in zip(weights, reg, strict=True))]
    repaired = refined.about.method.repaired
    close(refined, dense_merge(terms, dict(tau), SHAPES, own.blocks, 0.05, repaired=repaired))
    assert refined.about.method.name == "refine"
    assert refined.about.method.settings["strength"] == strength
    assert refined.about.method.bundles == tuple(c.digest for c in (own, *reg))
    assert [(a.sha256, a.coefficient) for a in refined.about.addends] == [(tau.digest, 1.0)]
    if strength == 0:
        assert all(torch.equal(refined[name], tau[name]) for name in tau)
    else:
        drift = [sum(float(c.quadratic(dict(t))) for c in reg) for t in (tau, refined)]
        assert drift[1] < drift[0]


def test_the_file_records_bundles_and_blocks(tmp_path):
    vectors, bundles = [vector(k) for k in range(2)], [bundle(k) for k in range(2)]
    steps = []
    merged = kp.add(vectors, "curvature", bundles=bundles, on_progress=lambda done, total: steps.append((done, total)))
    merged.save(tmp_path / "merged.safetensors")
    read = kp.TaskVector.load(tmp_path / "merged.safetensors")
    assert (read.about, read.digest) == (merged.about, merged.digest)
    entry = read.about.method
    assert isinstance(entry, kp.MethodEntry)
    assert entry.bundles == tuple(b.digest for b in bundles)
    assert [block.name for block in entry.blocks] == [block.name for block in bundles[0].blocks]
    assert all(isinstance(block, kp.SolvedBlock) and block.after <= block.before for block in entry.blocks)
    assert steps == [(k, len(entry.blocks)) for k in range(len(entry.blocks) + 1)]
    again = kp.add(vectors, "curvature", bundles=bundles)
    again.save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "merged.safetensors").read_bytes()
    assert AboutVector.model_validate(read.about.model_dump()) == read.about


def test_parameters_without_curvature_take_the_prior():
    full = small_curvature()
    part = kp.Curvature(full.blocks[:1], _about(full, "one", "task 0"))
    other = kp.Curvature(small_curvature(seed=9).blocks[:1], _about(full, "one", "task 1"))
    vectors = [vector(k, curvature=full) for k in range(2)]
    merged = kp.add(vectors, "curvature", bundles=[part, other], prior="mean")
    assert len(merged.about.method.solved) == 1
    assert "two.weight" in merged.about.method.without_curvature
    torch.testing.assert_close(merged["two.weight"], (vectors[0]["two.weight"] + vectors[1]["two.weight"]) / 2)
    assert not torch.allclose(merged["one.weight"], (vectors[0]["one.weight"] + vectors[1]["one.weight"]) / 2)


def _about(curvature, prefix, task):
    from kfacpack.format.manifest import base_digest

    base = curvature.about.base
    kept = tuple(p for p in base.parameters if p.name.startswith(f"{prefix}."))
    base = kp.Base(family=base.family, name=base.name, sha256=base_digest(kept), parameters=kept)
    source = kp.Source(task=task, dataset_size=100)
    return curvature.about.model_copy(update={"base": base, "source": source})


def test_a_vector_without_the_bias_of_a_block():
    """The bias cannot change, so the minimum is over the weight alone."""
    names = ("one.weight", "two.weight", "proj")
    vectors, bundles = [vector(k, params=names) for k in range(2)], [bundle(k) for k in range(2)]
    merged = kp.add(vectors, "curvature", bundles=bundles, task_weights="size")
    assert set(merged) == set(names)
    G = [torch.kron(*(s[0].dense(torch.float64) for s in b.blocks[0].structure.sides)) for b in bundles]
    weights, keep = weights_of(2), torch.arange(35).reshape(5, 7)[:, :-1].flatten()
    total = sum(w * g for w, g in zip(weights, G, strict=True))
    epsilon = DAMPING * total.trace() / 35 + absolute_damping(vectors)
    system = (total + epsilon * torch.eye(35, dtype=torch.float64))[keep][:, keep]
    W = [v["one.weight"].double().flatten() for v in vectors]
    right = sum(w * g[keep][:, keep] @ (x - sum(W)) for w, g, x in zip(weights, G, W, strict=True))
    expected = sum(W) + torch.linalg.solve(system, right)
    torch.testing.assert_close(merged["one.weight"].double().flatten(), expected, rtol=1e-5, atol=1e-6)


def test_a_vector_of_several_tasks_takes_a_merged_bundle_or_several():
    both, third = vector(0, tasks=("task 0", "task 1")), vector(2)
    single = [bundle(k) for k in range(3)]
    stacked = kp.merge(single[:2], "stack")
    one = kp.add([both, third], "curvature", bundles=single, task_weights="size")
    other = kp.add([both, third], "curvature", bundles=[single[2], stacked], task_weights="size")
    close(one, dict(other), 1e-5)


def test_bundles_are_matched_in_any_order():
    vectors, bundles = [vector(k) for k in range(3)], [bundle(k) for k in range(3)]
    one = kp.add(vectors, "curvature", bundles=bundles)
    close(kp.add(vectors, "curvature", bundles=bundles[::-1]), dict(one), 1e-6)


def test_missing_and_superfluous_bundles_are_named(tmp_path):
    vectors, bundles = [vector(k) for k in range(2)], [bundle(k) for k in range(3)]
    with refused(kp.KfacpackError, "'curvature'", "'task 0', 'task 1'", "--bundle"):
        kp.add(vectors, "curvature")
    with refused(kp.KfacpackError, "'task 1'", "vector 2", "kfacpack estimate"):
        kp.add(vectors, "curvature", bundles=bundles[:1])
    bundles[2].save(tmp_path / "third.kfac")
    with refused(kp.KfacpackError, "third.kfac", "'task 2'", "task 0, task 1"):
        kp.add(vectors, "regmean", bundles=[*bundles[:2], tmp_path / "third.kfac"])
    with refused(kp.KfacpackError, "input 1", "'task 0', 'task 1'", "different vectors"):
        kp.add(vectors, "fisher", bundles=[kp.merge(bundles[:2])])
    for method in ("sum", "ties", "actmat"):
        with refused(kp.KfacpackError, f"'{method}'", "does not use bundles", "curvature, regmean, fisher"):
            kp.add(vectors, method, bundles=bundles[:2])
    with refused(kp.KfacpackError, "a list of bundles"):
        kp.add(vectors, "curvature", bundles=bundles[0])
    with refused(kp.KfacpackError, "both contain", "task 0"):
        kp.add(vectors, "curvature", bundles=[bundles[0], *bundles[:2]])


def test_bundles_of_another_model_are_refused():
    vectors, bundles = [vector(k) for k in range(2)], [bundle(k) for k in range(2)]
    other = small_curvature(seed=3)
    source = kp.Source(task="task 1", dataset_size=10)
    foreign = kp.Curvature(other.blocks, other.about.model_copy(update={"source": source}))
    with refused(kp.TaskVectorError, "base model", "'one.weight'"):
        kp.add([vectors[1]], "curvature", bundles=[foreign])
    function = bundles[0].about.function.model_copy(update={"width": 7})
    for k, b in enumerate(bundles):
        bundles[k] = kp.Curvature(b.blocks, b.about.model_copy(update={"function": function}))
    with refused(kp.TaskVectorError, "f", "width 4", "width 7"):
        kp.add(vectors, "curvature", bundles=bundles)
    nameless = bundle(0)
    nameless = kp.Curvature(nameless.blocks, nameless.about.model_copy(update={"source": None}))
    with refused(kp.KfacpackError, "does not record its task", "source=kp.Source"):
        kp.add([vectors[0]], "curvature", bundles=[nameless])


def test_unknown_sizes_of_datasets():
    vectors, bundles = [vector(k) for k in range(2)], [bundle(0), of_task("task 1", None, seed=20)]
    blocks = [kp.CurvatureBlock(b.name, b.operation, b.join, b.structure) for b in bundles[1].blocks]
    bundles[1] = kp.Curvature(blocks, bundles[1].about)
    with refused(kp.KfacpackError, "input 2", "size of its dataset", "--task-weights equal"):
        kp.add(vectors, "curvature", bundles=bundles, task_weights="size")
    assert kp.add(vectors, "curvature", bundles=bundles).about.method.solved


@pytest.mark.parametrize(
    ("wrong", "facts"),
    [
        ({"damping": 0}, ("curvature: damping is 0", "(0, ∞)")),
        ({"damping": float("inf")}, ("curvature: damping is inf",)),
        ({"prior": "median"}, ("curvature: prior is 'median'", "sum, mean, zero")),
        ({"tolerance": 1}, ("curvature: tolerance is 1", "(0, 1)")),
        ({"iterations": 0}, ("curvature: iterations is 0", "[1, ∞)")),
        ({"iterations": 1.5}, ("curvature: iterations is 1.5", "an integer")),
        ({"shrink": 0.1}, ("'curvature'", "no setting 'shrink'")),
    ],
    ids=str,
)
def test_invalid_settings(wrong, facts):
    with refused(kp.KfacpackError, *facts):
        kp.add([vector(0)], "curvature", bundles=[bundle(0)], **wrong)


def test_refine_refuses_its_own_task_among_the_others():
    with refused(kp.KfacpackError, "'task 0'", "other tasks", "--without"):
        kp.refine(vector(0), bundle(0), [kp.merge([bundle(1), of_task("task 0", 10, seed=60)])])
    with refused(kp.KfacpackError, "reg", "got none"):
        kp.refine(vector(0), bundle(0), [])
    with refused(kp.KfacpackError, "no vector contains 'task 1'"):
        kp.refine(vector(0), bundle(1), bundle(2))
    with refused(kp.KfacpackError, "refine: strength is -1"):
        kp.refine(vector(0), bundle(0), bundle(1), strength=-1)


class FactoredVector(dict):
    """A vector whose matrices are U V, with the interface of TaskVector.factors."""

    def __init__(self, shapes, rank, seed):
        generator = torch.Generator().manual_seed(seed)
        self.pairs = {}
        for name, shape in shapes.items():
            m, n = (shape[0] if shape else 1), max(1, int(torch.tensor(shape[1:]).prod()) if len(shape) > 1 else 1)
            r = rank if len(shape) > 1 and min(m, n) > rank else 0
            pair = torch.randn(m, r, generator=generator), torch.randn(r, n, generator=generator)
            self.pairs[name] = pair
            self[name] = (pair[0] @ pair[1]).reshape(shape)

    def factors(self, name):
        return self.pairs[name]


def factored_case(tasks=3, rank=1):
    """A linear layer with a bias, a fused projection in two blocks, a transposed matrix and a token."""
    from kit import linear_join, random_psd

    shapes = {"a.weight": (30, 24), "a.bias": (30,), "qk": (40, 20), "p": (18, 26), "token": (1, 5)}

    def dense(side, seed):
        return kp.Dense.of(random_psd(side, seed, torch.float64))

    def blocks(seed):
        joins = {
            "a.weight": linear_join("a", 30, 24),
            "qk[0:20]": kp.Join(rows=20, columns=20, pieces=(kp.Piece(parameter="qk", rows=(0, 20)),)),
            "qk[20:40]": kp.Join(rows=20, columns=20, pieces=(kp.Piece(parameter="qk", rows=(20, 40)),)),
            "p": kp.Join(rows=26, columns=18, pieces=(kp.Piece(parameter="p", view="transposed"),)),
            "token": kp.Join(rows=5, columns=1, pieces=(kp.Piece(parameter="token", view="column"),)),
        }
        return {
            name: (join, kp.Kronecker.of(dense(join.rows, seed + k), dense(join.columns, seed + 50 + k)))
            for k, (name, join) in enumerate(joins.items())
        }

    vectors = [FactoredVector(shapes, rank, seed) for seed in range(tasks)]
    return shapes, [blocks(100 * k) for k in range(tasks)], vectors


@pytest.mark.parametrize("prior", ["sum", "mean", "zero"])
def test_low_rank_vectors_are_merged_in_their_span(prior):
    """The result stays factored and is the minimum over Q_U S Q_V."""
    from kfacpack.curvature.blocks import gather
    from kfacpack.merging.solve import SolveSettings
    from kfacpack.vectors.block_merge import BlockMerger, BlockTask

    shapes, curvatures, taus = factored_case()
    inputs = [MethodInput(alpha, tau, "") for alpha, tau in zip((1.0, 0.5, -2.0), taus, strict=True)]
    weights = (0.5, 1.0, 1.5)
    blocks = [
        BlockTask(name, join, [(w, c[name][1], k) for k, (w, c) in enumerate(zip(weights, curvatures, strict=True))])
        for name, (join, _) in curvatures[0].items()
    ]
    merger = BlockMerger(inputs, shapes, prior, SolveSettings(0.01, 1e-12, 1000))
    solved = merger.run(blocks, len(blocks), lambda done, total: None)
    assert set(solved.factors) == {"a.weight", "qk", "p"}
    values = {name: (U @ V).reshape(shapes[name]) for name, (U, V) in solved.factors.items()} | solved.tensors
    for block in blocks:
        W = [gather({n: i.read(n) for n in shapes}, block.join, shapes) for i in inputs]
        if not any(w.any() for w in W):
            continue
        start = {"sum": sum(W), "mean": sum(W) / 3, "zero": 0 * W[0]}[prior]
        G = [weight * torch.kron(*(s[0].dense(torch.float64) for s in G.sides)) for weight, G, _ in block.curvatures]
        total = sum(G)
        system = total + 0.01 * total.trace() / len(total) * torch.eye(len(total), dtype=torch.float64)
        right = sum(g @ (w - start).flatten() for g, w in zip(G, W, strict=True))
        Q_U = torch.linalg.svd(torch.cat(W, 1), full_matrices=False)
        Q_V = torch.linalg.svd(torch.cat(W), full_matrices=False)
        u = Q_U.U[:, 1e-5 * Q_U.S[0] < Q_U.S]
        v = Q_V.Vh[1e-5 * Q_V.S[0] < Q_V.S]
        basis = torch.kron(u, v.T.contiguous())
        core = torch.linalg.solve(basis.T @ system @ basis, basis.T @ right)
        expected = start + (basis @ core).reshape(start.shape)
        result = gather({n: values[n].double() for n in shapes}, block.join, shapes)
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


def test_a_single_low_rank_vector_keeps_its_factors():
    from kfacpack.merging.solve import SolveSettings
    from kfacpack.vectors.block_merge import BlockMerger, BlockTask

    shapes, curvatures, taus = factored_case(tasks=1)
    blocks = [BlockTask(name, join, [(1.0, G, 0)]) for name, (join, G) in curvatures[0].items()]
    merger = BlockMerger([MethodInput(1.0, taus[0], "")], shapes, "sum", SolveSettings(0.01))
    solved = merger.run(blocks, len(blocks), lambda done, total: None)
    for name, (U, V) in solved.factors.items():
        assert torch.equal(U, taus[0].pairs[name][0])
        assert torch.equal(V, taus[0].pairs[name][1])
    assert {"a.weight", "qk", "p"} <= set(solved.factors)


@pytest.mark.parametrize("method", METHODS)
def test_a_layer_that_no_vector_changes_stays_unchanged(method):
    """Rank 0 in every vector, as in vectors extracted from checkpoints with frozen layers."""
    bundles, vectors = [bundle(k) for k in range(2)], [vector(k) for k in range(2)]
    block = next(block for block in bundles[0].blocks if len(block.structure.sides) == 2)
    unchanged = {name: no_change(SHAPES[name]) for name in block.parameters}
    frozen = [kp.TaskVector({n: v[n] for n in v if n not in unchanged}, v.about, factors=unchanged) for v in vectors]
    zeros = [kp.TaskVector({n: 0 * v[n] if n in unchanged else v[n] for n in v}, v.about) for v in vectors]
    merged, expected = (kp.add(taus, method, bundles=bundles) for taus in (frozen, zeros))
    assert all(not merged[name].any() for name in block.parameters)
    close(merged, expected)


def test_the_bundles_of_tiny_converge_quickly(tmp_path):
    """With default damping, to a relative residual of 1e-4; without a preconditioner it takes over 200 iterations."""
    model = kp.load_model("tiny")
    layer = [name for name in model.module.state_dict() if name.startswith("visual.transformer.resblocks.3.")]
    vectors, bundles = [], []
    for task in ("digits", "hebrew", "emblems"):
        bundles.append(kp.estimate_task(model, task, examples=128, params=layer))
        path = tmp_path / f"{task}.safetensors"
        vectors.append(kp.train(model, task, output=path, steps=5, batch_size=16, head="prototypes", params=layer))
    merged = kp.add(vectors, "curvature", bundles=bundles, tolerance=1e-4)
    method = merged.about.method
    assert 0 < method.max_iterations <= 60
    assert method.worst_residual <= 1e-4
    assert not method.repaired


def test_a_vector_without_a_task_gets_no_bundle(tmp_path):
    """Without the check, its parameters would silently be merged without its own curvature."""
    named = vector(0)
    about = named.about.model_copy(update={"tasks": ()})
    unnamed = kp.TaskVector({name: named[name] for name in named}, about)
    with refused(kp.TaskVectorError, "vector 1", "--task"):
        kp.add([unnamed], "curvature")
    with refused(kp.TaskVectorError, "vector 2", "--task"):
        kp.add([vector(1), unnamed], "curvature", bundles=[bundle(1)])
    with refused(kp.TaskVectorError, "--task"):
        kp.refine(unnamed, bundle(0), bundle(1))


def test_an_indefinite_system_names_its_cause():
    """The message blames negative weights only if there are some, and the damping otherwise."""
    whole, target = kp.Whole(Dense.of(torch.ones(2, 2))), torch.ones(2, 1)
    with refused(kp.KfacpackError, "'block'", "damping 1e-300") as caught:
        solve_block("block", [SolveTerm(1.0, whole, target)], SolveSettings(damping=1e-300))
    assert "negative weight" not in str(caught.value)
    with refused(kp.KfacpackError, "'block'", "negative weight"):
        solve_block("block", [SolveTerm(-1.0, whole, target)], SolveSettings(damping=0.5))


@pytest.mark.parametrize("wrong", [5, None, torch.zeros(3), [5]], ids=lambda value: type(value).__name__)
def test_arguments_of_the_wrong_type(wrong):
    vectors, bundles = [vector(0), vector(1)], [bundle(0), bundle(1)]
    calls = [
        ("vector", lambda: kp.add(wrong, "curvature", bundles=bundles)),
        ("unknown method", lambda: kp.add(vectors, wrong)),
        ("got", lambda: kp.add(vectors, "curvature", bundles=wrong)),
        ("expected a task vector", lambda: kp.refine(wrong, bundles[0], bundles[1])),
        ("got", lambda: kp.refine(vectors[0], wrong, bundles[1])),
        ("got", lambda: kp.refine(vectors[0], bundles[0], wrong)),
        ("vectors: ", lambda: kp.interference(wrong, {"a": bundles[0]})),
        ("bundles: ", lambda: kp.interference({"a": vectors[0]}, wrong)),
        ("vectors: 'a'", lambda: kp.interference({"a": wrong}, {"a": bundles[0]})),
        ("bundles: 'a'", lambda: kp.interference({"a": vectors[0]}, {"a": wrong})),
        ("evaluation_sets", lambda: kp.interference({"a": vectors[0]}, {"a": bundles[0]}, evaluation_sets=wrong)),
        ("export_lora: vector", lambda: kp.export_lora(wrong, "folder", rank=1)),
        ("export_lora: path", lambda: kp.export_lora(vectors[0], wrong, rank=1)),
    ]
    if not isinstance(wrong, int):  # a valid α
        calls.append(("α", lambda: kp.add(vectors, "curvature", bundles=bundles, alpha=wrong)))
    if wrong is not None:  # the default
        calls.append(("export_lora: bundle", lambda: kp.export_lora(vectors[0], "folder", rank=1, bundle=wrong)))
        calls.append(("export_lora: model", lambda: kp.export_lora(vectors[0], "folder", rank=1, model=wrong)))
    for fact, call in calls:
        with refused(kp.KfacpackError, fact):
            call()
