"""Parents and their weights, merging of merged curvatures, subtraction of tasks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit import dense_block, of_task, random_tau, refused

import kfacpack as kp

seeds = st.integers(0, 2**16)


def tasks(seed=0):
    """The tasks a, b, c, d."""
    return [of_task(task, 100 + 70 * number, seed + 31 * number) for number, task in enumerate("abcd")]


def assert_same(one, other, rtol=2e-5):
    assert [block.name for block in one.blocks] == [block.name for block in other.blocks]
    for ours, theirs in zip(one.blocks, other.blocks, strict=True):
        G = dense_block(theirs)
        torch.testing.assert_close(dense_block(ours), G, rtol=rtol, atol=rtol * float(G.abs().max()))


def assert_same_parents(one, other):
    ours, theirs = ({p.sha256: p for p in curvature.about.merge.parents} for curvature in (one, other))
    assert ours.keys() == theirs.keys()
    for digest, parent in ours.items():
        assert parent.weight == pytest.approx(theirs[digest].weight)
        assert (parent.task, parent.dataset_size) == (theirs[digest].task, theirs[digest].dataset_size)


def test_estimates_without_a_source_are_weighted_by_their_examples():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    few, many = (kp.estimate(model, [torch.randn(count, 3)], fisher="exact") for count in (8, 24))
    merged = kp.merge([few, many])
    assert [parent.weight for parent in merged.about.merge.parents] == [0.5, 1.5]
    assert [parent.dataset_size for parent in merged.about.merge.parents] == [8, 24]
    tau = {"weight": torch.randn(2, 3), "bias": torch.randn(2)}
    whole = kp.merge([few, many], "stack").quadratic(tau)
    torch.testing.assert_close(whole, 0.5 * few.quadratic(tau) + 1.5 * many.quadratic(tau))


@pytest.fixture
def paths(tmp_path):
    for curvature in tasks():
        curvature.save(tmp_path / f"{curvature.about.source.task}.kfac")
    return [tmp_path / f"{task}.kfac" for task in "abcd"]


def test_parents_are_listed_with_weights_that_average_one(paths):
    merge = kp.merge(paths).about.merge
    assert merge.rule == "tak"
    assert merge.rank is None
    assert [parent.sha256 for parent in merge.parents] == [kp.Bundle(path).digest for path in paths]
    assert [parent.task for parent in merge.parents] == ["a", "b", "c", "d"]
    assert [parent.dataset_size for parent in merge.parents] == [100, 170, 240, 310]
    weights = [parent.weight for parent in merge.parents]
    assert sum(weights) == pytest.approx(4)
    assert weights == pytest.approx([4 * size / 820 for size in (100, 170, 240, 310)])
    assert kp.merge(paths, "optimal", rank=2).about.merge.rank == 2


def test_weights_replace_data_set_sizes_and_only_their_ratios_matter(paths):
    weights = [p.weight for p in kp.merge(paths, weights=[100, 170, 240, 310]).about.merge.parents]
    assert weights == [p.weight for p in kp.merge(paths).about.merge.parents]
    assert [p.weight for p in kp.merge(paths[:2], weights=[1, 3]).about.merge.parents] == [0.5, 1.5]


def test_a_curvature_in_memory_has_the_digest_of_its_file(tmp_path):
    curvature = of_task("a", stored_as="block-int8")
    digest = curvature.digest
    curvature.save(tmp_path / "a.kfac")
    assert kp.Bundle(tmp_path / "a.kfac").digest == digest == kp.load(tmp_path / "a.kfac").digest


@pytest.mark.parametrize("rule", ["tak", "stack"])
@given(seed=seeds)
def test_merging_in_steps_is_merging_at_once(rule, seed):
    a, b, c, d = tasks(seed)
    micro_batch_size = kp.merge([a, b, c, d], rule)
    in_steps = kp.merge([kp.merge([kp.merge([a, b], rule), c], rule), d], rule)
    assert_same(in_steps, micro_batch_size)
    assert_same_parents(in_steps, micro_batch_size)
    in_pairs = kp.merge([kp.merge([a, b], "stack"), kp.merge([c, d], rule)], rule)
    assert_same(in_pairs, micro_batch_size)
    assert_same_parents(in_pairs, micro_batch_size)


def test_a_merged_bundle_can_be_loaded_and_verified(paths, tmp_path):
    for rule, rank in (("tak", 1), ("stack", 1), ("optimal", 3)):
        merged = kp.merge(paths, rule, rank=rank)
        merged.save(tmp_path / "m.kfac")
        loaded = kp.load(tmp_path / "m.kfac")
        assert loaded.about == merged.about
        assert [block.losses for block in loaded.blocks] == [block.losses for block in merged.blocks]
        assert_same(loaded, merged)
        assert kp.verify(tmp_path / "m.kfac").holds


def test_saving_caches_nothing(paths, tmp_path):
    merged = kp.merge(paths)
    merged.save(tmp_path / "m.kfac")
    components = [matrix.components for block in merged.blocks for _, matrix in block.structure.matrices()]
    assert all(tensors._cached is None for tensors in components)
    merged.quadratic(random_tau(merged))
    assert all(tensors._cached is not None for tensors in components)


@given(seed=seeds)
def test_subtracting_a_task_equals_merging_without_it(seed):
    curvatures = tasks(seed)
    everything = kp.merge(curvatures)
    for own in curvatures:
        task = own.about.source.task
        others = kp.merge([other for other in curvatures if other is not own])
        for merged in (kp.merge([everything, own], without=task), kp.merge(curvatures, without=task)):
            assert_same(merged, others)
            assert_same_parents(merged, others)


def test_several_tasks_are_subtracted_and_others_added(paths, tmp_path):
    a, b, c, d = paths
    everything = kp.merge([a, b, c])
    everything.save(tmp_path / "all.kfac")
    expected = kp.merge([c, d])
    assert_same(kp.merge([everything, a, b, d], without=["a", "b"]), expected)
    # A merged bundle of several tasks is subtracted at once, whether it is a sum or has several terms.
    for rule in ("tak", "stack"):
        merged = kp.merge([tmp_path / "all.kfac", kp.merge([a, b], rule), d], without=["a", "b"])
        assert_same(merged, expected)
        assert_same_parents(merged, expected)


def test_subtraction_from_a_stack_is_refused(paths):
    with refused(kp.SubtractionError, "stack", "tak"):
        kp.merge([kp.merge(paths, "stack")], without="b")


def test_a_difference_is_valid_and_its_error_is_recorded_as_unknown(paths, tmp_path):
    kp.merge([kp.merge(paths), paths[1]], without="b").save(tmp_path / "others.kfac")
    assert kp.verify(tmp_path / "others.kfac").holds
    bundle = kp.Bundle(tmp_path / "others.kfac")
    assert all(matrix.psd for matrix in bundle.manifest.matrices)
    assert [(loss.step, loss.frobenius) for loss in bundle.manifest.blocks[0].losses] == [("tak", None)]


def test_differences_dominated_by_rounding_are_not_declared_psd_or_refused():
    """If nearly all of a sum is subtracted, the difference consists of rounding errors."""
    own, other = of_task("own", 100, 1), of_task("other", 100, 1)

    def without_own(factor: float) -> kp.Curvature:
        small = [
            replace(block, structure=block.structure.map_matrices(lambda m: kp.Packed.from_dense(m.dense() * factor)))
            for block in other.blocks
        ]
        return kp.merge([kp.merge([own, kp.Curvature(small, other.about)]), own], without="own")

    assert all(matrix.psd for _, matrix in without_own(0.1).blocks[0].structure.matrices())
    assert not any(matrix.psd for _, matrix in without_own(1e-3).blocks[0].structure.matrices())
    with refused(kp.KfacpackError, "input 1", "rounding", "'one.weight'"):
        without_own(1e-5)


def test_compressed_parents_can_be_subtracted(paths, tmp_path):
    small = []
    for path in paths:
        kp.compress(kp.load(path), "int8").save(tmp_path / path.name)
        small.append(tmp_path / path.name)
    rest = kp.merge([kp.merge(small), small[0]], without=kp.load(small[0]).about.source.task)
    assert_same(rest, kp.merge(small[1:]))
    assert [loss.step for loss in rest.about.losses] == [loss.step for loss in kp.merge(small).about.losses]


def test_earlier_losses_of_the_inputs_are_kept(paths):
    first, second = (kp.compress(kp.load(path), "int8") for path in paths[:2])
    steps = [[loss.step for loss in block.losses] for block in kp.merge([first, second]).blocks]
    assert steps[0] == [first.blocks[0].losses[0].step, "tak"]
    merged = kp.merge([first, second])
    errors = [report.blocks[0].losses[0].frobenius for report in (first, second)]
    assert merged.blocks[0].losses[0].frobenius == max(errors)


def test_common_settings_of_the_estimates_are_kept(paths):
    assert kp.merge(paths).about.estimate == kp.load(paths[0]).about.estimate
    other = kp.load(paths[1])
    seeded = other.about.estimate.model_copy(update={"seed": 8})
    changed = kp.Curvature(other.blocks, other.about.model_copy(update={"estimate": seeded}))
    estimate = kp.merge([paths[0], changed]).about.estimate
    assert (estimate.seed, estimate.fisher, estimate.probes) == (None, "mc", 2)
    exact = kp.Curvature(other.blocks, other.about.model_copy(update={"estimate": kp.Estimate(fisher="exact")}))
    assert kp.merge([paths[0], exact]).about.estimate is None
