"""Inputs that do not belong together are rejected; the error names both files and the difference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kit import dense_block, of_task, refused, small_curvature

import kfacpack as kp
from kfacpack.format.manifest import base_digest
from kfacpack.merging.merge import merge_and_report


def save(curvature, path, **changes):
    kp.Curvature(curvature.blocks, curvature.about.model_copy(update=changes)).save(path)
    return path


@pytest.fixture
def one(tmp_path):
    return save(of_task("one"), tmp_path / "one.kfac")


@pytest.fixture
def two(tmp_path):
    return save(of_task("two", seed=31), tmp_path / "two.kfac")


def merge_fails(inputs, *facts, **options):
    """Checks that the merge raises an error that mentions each fact."""
    with refused(kp.KfacpackError, *facts):
        kp.merge(inputs, **options)


def without_blocks(curvature, *names):
    """The curvature without some of its blocks."""
    blocks = [block for block in curvature.blocks if block.name not in names]
    covered = {parameter for block in blocks for parameter in block.parameters}
    parameters = tuple(p for p in curvature.about.base.parameters if p.name in covered)
    base = curvature.about.base.model_copy(update={"parameters": parameters, "sha256": base_digest(parameters)})
    return kp.Curvature(blocks, curvature.about.model_copy(update={"base": base}))


def test_another_base_model(one, tmp_path):
    other = save(small_curvature("packed", seed=3), tmp_path / "other.kfac")
    merge_fails([one, other], one, other, "base model", "small and small", "'one.weight'")


def test_nothing_in_common(tmp_path):
    names = [block.name for block in of_task("x").blocks]
    rest = save(without_blocks(of_task("x"), *names[-1:]), tmp_path / "rest.kfac")
    last = save(without_blocks(of_task("y"), *names[:-1]), tmp_path / "last.kfac")
    merge_fails([rest, last], rest, last, "no parameter in common", allow_partial=True)


def test_another_f(one, tmp_path):
    logits = kp.Function(output="logits", normalized=False, width=4)
    other = save(of_task("o", seed=1), tmp_path / "o.kfac", function=logits)
    merge_fails([one, other], one, other, "normalised embedding of width 4; logits of width 4")
    details = [
        save(
            of_task(f"d{k}", seed=k),
            tmp_path / f"d{k}.kfac",
            function=kp.Function(output="other", normalized=False, width=4, detail=f"layer {k}"),
        )
        for k in range(2)
    ]
    merge_fails(details, *details, "other of width 4 (layer 0); other of width 4 (layer 1)")


def test_another_scaling(one, tmp_path):
    other = save(of_task("o", seed=1), tmp_path / "o.kfac", scaling=kp.REDUCE)
    merge_fails([one, other], one, other, "scaling", "'expand'", "'reduce'")


def test_parents_that_overlap(one, two, tmp_path):
    merge_fails([one, one], one, kp.Bundle(one).digest[:12], "twice")
    both, pair = tmp_path / "both.kfac", tmp_path / "pair.kfac"
    kp.merge([one, two]).save(both)
    merge_fails([both, two], both, two, kp.Bundle(two).digest[:12], "for the task 'two'", "twice", "--without two")
    other = save(of_task("three", seed=62), tmp_path / "three.kfac")
    kp.merge([two, other]).save(pair)
    merge_fails([both, pair], both, pair, kp.Bundle(two).digest[:12], "twice")


def test_missing_blocks(one, two, tmp_path):
    less = save(without_blocks(of_task("less", seed=5), "norm", "proj"), tmp_path / "less.kfac")
    for inputs in ((one, less, two), (less, one, two)):
        merge_fails(inputs, f"{less} does not have the block 'norm'", one, "2 missing blocks", "--allow-partial")


@pytest.mark.parametrize("rule", ["tak", "optimal", "stack"])
def test_a_partial_block_is_the_sum_over_those_that_have_it(one, two, tmp_path, rule):
    less = save(without_blocks(of_task("less", seed=5), "norm", "proj"), tmp_path / "less.kfac")
    merged = merge_and_report([less, one, two], rule, allow_partial=True)
    assert [(block.name, block.missing) for block in merged.report.partial] == [
        ("norm", (str(less),)),
        ("proj", (str(less),)),
    ]
    assert merged.curvature.parameters == kp.load(one).parameters
    assert [block.name for block in merged.curvature.blocks] == [block.name for block in kp.load(one).blocks]
    blocks = {block.name: block for block in merged.curvature.blocks}
    assert [loss.step for loss in blocks["norm"].losses] == ["partial"]
    assert "partial" not in [loss.step for loss in blocks["one.weight"].losses]
    norms = [{b.name: b for b in kp.load(path).blocks}["norm"] for path in (one, two)]
    torch.testing.assert_close(dense_block(blocks["norm"]), sum(map(dense_block, norms)))
    pairs = [{b.name: b for b in kp.load(path).blocks}["proj"].structure.terms[0] for path in (one, two)]
    if rule == "tak":
        ((B, A, _),) = blocks["proj"].structure.terms
        torch.testing.assert_close(B.dense(), sum(b.dense() for b, _, _ in pairs))
        torch.testing.assert_close(A.dense(), sum(a.dense() for _, a, _ in pairs) / 2)
    merged.curvature.save(tmp_path / "m.kfac")
    assert kp.verify(tmp_path / "m.kfac").holds
    merge_fails(
        [tmp_path / "m.kfac", one], tmp_path / "m.kfac", "'partial'" if rule == "tak" else repr(rule), without="one"
    )


def test_another_partition(one, tmp_path):
    curvature = of_task("o", seed=1)
    upper, lower = curvature.blocks[2:4]
    join = kp.Join(rows=4, columns=3, pieces=(kp.Piece(parameter="attn.in_proj_weight"),))
    factors = kp.Kronecker.of(kp.Packed.from_dense(torch.eye(4)), kp.Packed.from_dense(torch.eye(3)))
    fused = kp.CurvatureBlock("attn", "linear", join, factors)
    blocks = [fused if block is upper else block for block in curvature.blocks if block is not lower]
    other = save(kp.Curvature(blocks, curvature.about), tmp_path / "o.kfac")
    for allow in (False, True):
        merge_fails([one, other], one, other, "'attn.in_proj_weight'", "blocks", allow_partial=allow)


def test_another_join_or_structure(one, tmp_path):
    curvature = of_task("o", seed=1)
    norm = curvature.blocks[4]
    swapped = tuple(replace_at(piece, at) for piece, at in zip(norm.join.pieces, [(0, 1), (0, 0)], strict=True))
    blocks = list(curvature.blocks)
    blocks[4] = replace(norm, join=norm.join.model_copy(update={"pieces": swapped}))
    kp.Curvature(blocks, curvature.about).save(tmp_path / "o.kfac")
    merge_fails([one, tmp_path / "o.kfac"], one, tmp_path / "o.kfac", "arrange the parameters", "'norm'")
    factors = kp.Kronecker.of(kp.Packed.from_dense(torch.eye(3)), kp.Packed.from_dense(torch.eye(2)))
    blocks[4] = replace(norm, structure=factors)
    kp.Curvature(blocks, curvature.about).save(tmp_path / "o.kfac")
    merge_fails([one, tmp_path / "o.kfac"], one, tmp_path / "o.kfac", "'norm'", "Kronecker", "single matrix")


def replace_at(piece, at):
    return piece.model_copy(update={"at": at})


def test_rules_and_ranks(one, two):
    merge_fails([one, two], "'best'", "tak, stack, optimal, shards", rule="best")
    merge_fails([one, two], "'tak' takes no rank", rank=2)
    merge_fails([one, two], "rank of at least 1", "got 0", rule="optimal", rank=0)
    merge_fails([one, two], "rank is 5", "at most 4", rule="optimal", rank=5)
    merge_fails([], "nothing to merge")


def test_weights(one, two, tmp_path):
    unknown = save(of_task("u", None, seed=1), tmp_path / "u.kfac")
    merge_fails([one, unknown], f"{unknown}: ", "size of its dataset", "--weights 1,1 (weights=[1, 1])")
    assert kp.merge([one, unknown], weights=[1, 1]).about.merge.parents[1].dataset_size is None
    merge_fails([one, two], "weights is 3", "expected 2", weights=[1, 2, 3])
    for bad in (0, -1, float("nan"), float("inf")):
        merge_fails([one, two], f"{two}: the weight is {bad}", "1e-30", weights=[1, bad])


def test_subtractions_that_would_not_be_exact(one, two, tmp_path):
    three = save(of_task("three", seed=62), tmp_path / "three.kfac")
    for rule in ("optimal", "stack"):
        kp.merge([one, two, three], rule).save(tmp_path / "all.kfac")
        merge_fails([tmp_path / "all.kfac", two], tmp_path / "all.kfac", repr(rule), "requires tak", without="two")
    everything = kp.merge([one, two, three])
    small = tmp_path / "small.kfac"
    kp.compress(everything, "int8").save(small)
    merge_fails([small, two], small, "'int8'", "Merge the bundles of the other tasks again", without="two")
    mixed = kp.merge([kp.merge([one, two], "optimal"), three])
    merge_fails([mixed, two], "'optimal:1'", without="two")
    pair = kp.merge([one, two], "optimal")
    merge_fails([everything, pair], "merged by 'optimal'", without=["one", "two"])
    uneven = kp.merge([one, two], weights=[1, 5])
    merge_fails([everything, uneven], "input 1", "input 2", "weights", without=["one", "two"])


def test_tak_refuses_merged_inputs_of_higher_rank(one, two, tmp_path):
    three = save(of_task("three", seed=62), tmp_path / "three.kfac")
    pair = kp.merge([one, two], "optimal", rank=2)
    merge_fails([pair, three], "input 1", "'optimal' at rank 2")
    assert len(kp.merge([pair, three], "stack").blocks) == len(pair.blocks)


@pytest.mark.parametrize(
    ("inputs", "facts"),
    [
        ("dtd.kfac", ("a list of curvatures", "got a single curvature")),
        ([1, 2], ("input 1", "got int")),
        ([None], ("input 1", "got NoneType")),
    ],
)
def test_inputs_must_be_a_list_of_curvatures_or_paths(inputs, facts):
    with refused(kp.KfacpackError, *facts):
        kp.merge(inputs)


def test_tasks_that_cannot_be_left_out(one, two, tmp_path):
    merge_fails([one, two], "task 'three'", "available tasks: one, two", without="three")
    merge_fails([one, two], "no input remains", "one, two", without=["one", "two"])
    merged = kp.merge([one, two])
    merge_fails([merged], "input 1: contains the task 'two'", "the bundle of this task", without="two")
    merge_fails(
        [merged, of_task("two", seed=99)], "input 1: contains the task 'two'", "the bundle of this task", without="two"
    )


def test_a_damaged_input_is_named(one, two):
    raw = bytearray(two.read_bytes())
    raw[-3] ^= 1
    two.write_bytes(raw)
    with pytest.raises(kp.KfacpackError) as caught:
        kp.merge([one, two])
    assert str(caught.value).startswith(str(two))
