"""Merge methods against brute force in numpy, written from the papers' definitions, and their invariants."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kit import refused
from vectors.curvature_cases import bundle, vector
from vectors.method_cases import CASES, arrays, assert_same, drawn, every_method, vector_of

import kfacpack as kp
from kfacpack.curvature.matrices.dense import Dense
from kfacpack.format.manifest import OutputScale
from kfacpack.vectors.methods import METHODS, iso
from kfacpack.vectors.methods.iso import split_rank
from kfacpack.vectors.methods.method import MethodInput
from kfacpack.vectors.methods.ties import threshold

# Brute force: T dictionaries of arrays -> one.


def brute_ties(parts, keep=0.2, mean=False):
    flat = np.stack([np.concatenate([p.ravel() for p in part.values()]) for part in parts])
    for row in flat:
        order = np.argsort(-np.abs(row))
        row[order[max(1, round(keep * len(row))) :]] = 0.0
    merged = np.zeros(flat.shape[1])
    for column in range(flat.shape[1]):
        values = flat[:, column]
        mass = values[values > 0].sum(), -values[values < 0].sum()
        agreeing = values[values > 0] if mass[0] > mass[1] else values[values < 0] if mass[1] > mass[0] else values[:0]
        if len(agreeing):
            merged[column] = agreeing.mean() if mean else agreeing.sum()
    return unflattened(merged, parts[0])


def unflattened(flat, like):
    result, start = {}, 0
    for name, value in like.items():
        result[name] = flat[start : start + value.size].reshape(value.shape)
        start += value.size
    return result


def plain(parts, name, mean):
    return sum(part[name] for part in parts) / (len(parts) if mean else 1)


def whitened(columns):
    """X (XᵀX)^(-1/2): the nearest matrix with orthonormal columns."""
    values, vectors = np.linalg.eigh(columns.T @ columns)
    return columns @ vectors @ np.diag(values**-0.5) @ vectors.T


def brute_tsv(parts, mean=False):
    result = {}
    for name, first in parts[0].items():
        if first.ndim != 2:
            result[name] = plain(parts, name, mean)
            continue
        k = min(first.shape) // len(parts)
        svds = [np.linalg.svd(part[name]) for part in parts]
        U = whitened(np.hstack([U[:, :k] for U, _, _ in svds]))
        V = whitened(np.hstack([Vh[:k].T for _, _, Vh in svds]))
        result[name] = U @ np.diag(np.concatenate([s[:k] for _, s, _ in svds])) @ V.T
    return result


def brute_iso(parts, mean=False):
    result = {}
    for name, first in parts[0].items():
        if first.ndim != 2:
            result[name] = plain(parts, name, mean)
            continue
        U, s, Vh = np.linalg.svd(plain(parts, name, mean=False), full_matrices=False)
        result[name] = s.sum() / len(s) * U @ Vh
    return result


def brute_iso_cts(parts, common=0.8, mean=False):
    result = {}
    for name, first in parts[0].items():
        if first.ndim != 2:
            result[name] = plain(parts, name, mean)
            continue
        r = min(first.shape)
        own = min(round((r - int(r * common)) / len(parts)), r // len(parts))
        k = r - own * len(parts)
        U, s, Vh = np.linalg.svd(plain(parts, name, mean=False))
        lefts, values, rights = [U[:, :k]], [*s[:k]], [Vh[:k].T]
        outside = np.eye(len(first)) - U[:, :k] @ U[:, :k].T
        for part in parts:
            u, s, vh = np.linalg.svd(outside @ part[name])
            lefts.append(u[:, :own])
            values += [*s[:own]]
            rights.append(vh[:own].T)
        assert len(values) == r
        result[name] = np.mean(values) * whitened(np.hstack(lefts)) @ whitened(np.hstack(rights)).T
    return result


BRUTE = {"ties": brute_ties, "tsv": brute_tsv, "iso": brute_iso, "iso-cts": brute_iso_cts}


@pytest.mark.parametrize(("method", "settings"), [case for case in CASES if case[0] in BRUTE], ids=str)
@pytest.mark.parametrize("alphas", [(1.0, 1.0, 1.0), (0.5, -2.0, 1.5), (0.7,)], ids=str)
def test_the_result_is_that_of_the_paper(method, settings, alphas):
    vectors = drawn(len(alphas))
    parts = [arrays(tau, alpha) for tau, alpha in zip(vectors, alphas, strict=True)]
    assert_same(kp.add(vectors, method, alpha=alphas, **settings), BRUTE[method](parts, **settings))


def test_sum_equals_arithmetic_on_vectors(tmp_path):
    one, two, three = drawn(3)
    result = kp.add([one, two, three], alpha=[1, 0.5, -2])
    by_hand = one + 0.5 * two - 2 * three
    assert result.about == by_hand.about
    assert result.about.method is None
    assert result.digest == by_hand.digest
    assert_same(
        result, {name: a + 0.5 * two[name].numpy() - 2 * three[name].numpy() for name, a in arrays(one).items()}
    )


def test_a_vector_and_its_negative_are_exactly_zero(tmp_path):
    tau = drawn(1)[0]
    (-tau).save(tmp_path / "negative.safetensors")
    nothing = kp.add([tau, tmp_path / "negative.safetensors"])
    assert all(not nothing[name].any() for name in nothing)
    assert [addend.coefficient for addend in nothing.about.addends] == [0.0]


@every_method
def test_order_does_not_matter(method, settings):
    one, two, three = drawn(3)
    result = kp.add([one, two, three], method, alpha=[1, 0.5, 2], **settings)
    assert_same(kp.add([three, one, two], method, alpha=[2, 1, 0.5], **settings), arrays(result), 1e-6)


@every_method
@pytest.mark.parametrize("factor", [3.0, -0.25])
def test_alpha_multiplies_the_result(method, settings, factor):
    vectors = drawn(3)
    once = kp.add(vectors, method, **settings)
    assert_same(kp.add(vectors, method, alpha=factor, **settings), arrays(once, factor), 1e-6)
    assert_same(kp.add(vectors, method, alpha=[factor] * 3, **settings), arrays(once, factor), 1e-6)
    about, expected = (factor * once).about, kp.add(vectors, method, alpha=factor, **settings).about
    assert without_reports(about) == without_reports(expected)
    for block, other in zip(reports(about), reports(expected), strict=True):
        assert (block.before, block.after) == pytest.approx((other.before, other.after))


def reports(about):
    return about.method.blocks if about.method else ()


def without_reports(about):
    return about.model_copy(update={"method": about.method and about.method.model_copy(update={"blocks": ()})})


def test_one_vector_alone():
    tau = drawn(1)[0]
    alone = {name: kp.add([tau], name) for name, method in METHODS.items() if not method.needs_bundles}
    assert all(torch.equal(alone["actmat"][name], tau[name]) for name in tau)
    assert_same(alone["tsv"], arrays(tau), 1e-6)
    assert_same(alone["iso-cts"], arrays(alone["iso"]), 1e-5)
    for name in ("tall", "wide"):
        spectrum = np.linalg.svd(alone["iso"][name].numpy(), compute_uv=False)
        before = np.linalg.svd(tau[name].numpy(), compute_uv=False)
        np.testing.assert_allclose(spectrum, before.mean(), rtol=1e-5)
    values = np.concatenate([value.ravel() for value in arrays(tau).values()])
    kept = np.concatenate([value.ravel() for value in arrays(alone["ties"]).values()])
    assert np.count_nonzero(kept) == round(0.2 * len(values))
    assert set(kept[kept != 0]) <= set(values)
    assert np.abs(kept[kept != 0]).min() >= np.abs(values[kept == 0]).max()


def test_the_threshold_of_ties_is_exact():
    """Tiny, huge, equal and zero magnitudes: the threshold is the same as by sorting."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "spread": torch.randn(999, generator=generator) * 10 ** torch.empty(999).uniform_(-38, 30, generator=generator),
        "equal": torch.full((300,), 0.5),
        "near": 1 + torch.arange(400) * 1e-7,
        "none": torch.zeros(40, 5),
    }
    ordered = np.sort(np.abs(np.concatenate([value.numpy().ravel() for value in tensors.values()])))[::-1]
    for keep in (1e-6, 0.01, 0.2, 0.35, 0.5, 0.9, 1.0):
        assert threshold(tensors, keep) == ordered[max(1, round(keep * len(ordered))) - 1]


def test_ties_elects_no_sign_where_none_wins():
    one, two = vector_of("one", {"a": torch.tensor([1.0, 2.0])}), vector_of("two", {"a": torch.tensor([-1.0, 2.0])})
    assert kp.add([one, two], "ties", keep=1.0)["a"].tolist() == [0.0, 4.0]
    assert kp.add([one, two], "ties", keep=1.0, mean=True)["a"].tolist() == [0.0, 2.0]


def test_dare_drops_and_rescales():
    one, two = (vector_of(task, {"a": torch.full((200, 300), value)}) for task, value in (("one", 1.0), ("two", 10.0)))
    assert_same(kp.add([one, two], "dare", drop=0.0), arrays(one + two))
    result = kp.add([one, two], "dare", drop=0.75)["a"].numpy()
    assert set(np.unique(result)) == {0.0, 4.0, 40.0, 44.0}
    share = np.array([(result == value).mean() for value in (0.0, 4.0, 40.0, 44.0)])
    np.testing.assert_allclose(share, [0.75**2, 0.75 * 0.25, 0.75 * 0.25, 0.25**2], atol=0.01)
    assert result.mean() == pytest.approx(11, rel=0.03)


def test_dare_depends_on_seed_vector_and_parameter_only():
    one, two = drawn(2)
    both, alone = kp.add([one, two], "dare", drop=0.5), kp.add([one], "dare", drop=0.5)
    other = kp.add([two], "dare", drop=0.5)
    backwards = {name: both[name] for name in reversed(both.parameters)}
    for name in both:
        torch.testing.assert_close(both[name], alone[name] + other[name])
        assert torch.equal(both[name], backwards[name])
    assert not torch.equal(alone["tall"], kp.add([one], "dare", drop=0.5, seed=1)["tall"])
    twins = vector_of("twins", {"a": torch.ones(50), "b": torch.ones(50)})
    dropped = kp.add([twins], "dare", drop=0.5)
    assert not torch.equal(dropped["a"], dropped["b"])


def test_tasks_that_are_orthogonal_are_added_up_by_tsv():
    first, second = torch.zeros(8, 6), torch.zeros(8, 6)
    first[:4, :3] = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    second[4:, 3:] = torch.randn(4, 3, generator=torch.Generator().manual_seed(2))
    one, two = vector_of("one", {"a": first}), vector_of("two", {"a": second})
    assert_same(kp.add([one, two], "tsv"), arrays(one + two), 1e-6)


def test_no_directions_are_added_beyond_the_rank():
    """Singular vectors beyond the rank are arbitrary; tasks may share directions, or be zero."""
    generator = torch.Generator().manual_seed(0)
    low = torch.randn(8, 2, generator=generator) @ torch.randn(2, 6, generator=generator)
    one, same, none = (
        vector_of("one", {"a": low}),
        vector_of("two", {"a": 2 * low}),
        vector_of("none", {"a": torch.zeros(8, 6)}),
    )
    for vectors in ([one], [one, none], [one, same], [one, same, none]):
        flat = kp.add(vectors, "iso")["a"].double()
        spectrum = torch.linalg.svdvals(flat)
        total = sum(vectors[1:], vectors[0])["a"].double()
        assert int((spectrum > 1e-5).sum()) == 2
        torch.testing.assert_close(spectrum[:2].sum(), torch.linalg.svdvals(total).sum(), rtol=1e-5, atol=0)
        assert int((torch.linalg.svdvals(kp.add(vectors, "iso-cts", common=0.3)["a"]) > 1e-5).sum()) == 2
    torch.testing.assert_close(kp.add([one, none], "tsv")["a"], low, rtol=1e-4, atol=1e-5)
    # Two tasks with the same directions: each direction once, with the mean of the two singular values.
    torch.testing.assert_close(kp.add([one, same], "tsv")["a"], 1.5 * low, rtol=1e-4, atol=1e-5)
    for name, method in METHODS.items():
        assert method.needs_bundles or not kp.add([none], name)["a"].any()


def test_more_tasks_than_singular_values():
    vectors = drawn(8)
    for method in ("tsv", "iso-cts"):
        result = kp.add(vectors, method)
        assert all(result[name].isfinite().all() and result[name].any() for name in result)


@pytest.mark.parametrize("r", [1, 2, 5, 9, 64])
@pytest.mark.parametrize("tasks", [1, 2, 3, 8])
@pytest.mark.parametrize("common", [0.0, 0.3, 0.8, 1.0])
def test_common_and_task_directions_sum_to_the_rank(r, tasks, common):
    k, own = split_rank(r, tasks, common)
    assert k >= 0
    assert own >= 0
    assert k + own * tasks == r
    if common == 1:
        assert own == 0


def test_the_nearest_orthonormal_columns():
    X = torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    near = iso.orthogonalize(X)
    torch.testing.assert_close(near.T @ near, torch.eye(4, dtype=torch.float64))
    np.testing.assert_allclose(near.numpy(), whitened(X.numpy()), atol=1e-12)


def scaled_f(curvature, factor, *, recorded=True):
    """The curvature of `factor` · f, which is not normalised."""
    scale = OutputScale(mean_square=3.0 * factor**2, variance=2.0 * factor**2) if recorded else None
    function = curvature.about.function.model_copy(update={"normalized": False})
    about = curvature.about.model_copy(update={"function": function, "output_scale": scale})
    blocks = []
    for b in curvature.blocks:
        power = factor ** (2 / len(b.structure.sides))
        scaled = b.structure.map_matrices(lambda matrix, power=power: Dense.of(power * matrix.dense(torch.float64)))
        blocks.append(kp.CurvatureBlock(b.name, b.operation, b.join, scaled))
    return kp.Curvature(blocks, about)


def of_scaled_f(k, size=1.0):
    v = vector(k)
    function = v.about.function.model_copy(update={"normalized": False})
    return kp.TaskVector({n: size * v[n] for n in v}, v.about.model_copy(update={"function": function}))


def test_a_constant_times_f_does_not_change_the_merge():
    vectors = [of_scaled_f(k) for k in range(3)]
    one, other = (
        kp.add(vectors, "curvature", bundles=[scaled_f(bundle(k), factor) for k in range(3)], negligible_drift=10.0)
        for factor in (1.0, 30.0)
    )
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-5, atol=1e-6)


def test_vectors_that_change_f_little_are_merged_close_to_the_prior():
    """As the vectors become smaller, the distance from the sum decreases; large vectors are merged as without κ."""
    bundles = [scaled_f(bundle(k), 1.0) for k in range(3)]

    def merged(size, **settings):
        vectors = [of_scaled_f(k, size) for k in range(3)]
        result, total = kp.add(vectors, "curvature", bundles=bundles, **settings), kp.add(vectors)
        return torch.cat([(result[n] - total[n]).flatten() / size for n in result])

    distances = [float(merged(size).norm()) for size in (1e-4, 1e-2, 1.0, 100.0)]
    assert distances == sorted(distances)
    assert distances[0] < 1e-2 * distances[-1]
    torch.testing.assert_close(merged(100.0), merged(100.0, negligible_drift=0.0), rtol=1e-3, atol=1e-3)


def test_an_unknown_scale_of_f_is_refused():
    vectors, bundles = [of_scaled_f(k) for k in range(2)], [scaled_f(bundle(k), 1.0, recorded=False) for k in range(2)]
    with refused(kp.KfacpackError, "input 1", "scale of f", "--negligible-drift 0"):
        kp.add(vectors, "curvature", bundles=bundles)
    assert kp.add(vectors, "curvature", bundles=bundles, negligible_drift=0.0).about.method.solved
    bundles[1] = scaled_f(bundle(1), 1.0)
    assert kp.add(vectors, "curvature", bundles=bundles).about.method.solved


def test_the_norm_of_factors_is_that_of_their_product():
    v = vector(0)
    generator = torch.Generator().manual_seed(0)
    factors = {"one.weight": (torch.randn(5, 2, generator=generator), torch.randn(2, 6, generator=generator))}
    factored = kp.TaskVector({n: v[n] for n in v if n not in factors}, v.about, factors=factors)
    expected = sum(float(factored[n].double().square().sum()) for n in factored)
    assert MethodInput(0.0, factored, "").squared_norm() == pytest.approx(expected, rel=1e-6)
