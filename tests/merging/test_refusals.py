"""What does not belong together is refused, in words that name both files and what differs."""

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


def complaint(*inputs, **more):
    with pytest.raises(kp.KfacpackError) as caught:
        kp.merge(inputs, **more)
    return str(caught.value)


def without_blocks(curvature, *names):
    """A curvature that covers less."""
    blocks = [block for block in curvature.blocks if block.name not in names]
    covered = {parameter for block in blocks for parameter in block.parameters}
    parameters = tuple(p for p in curvature.about.base.parameters if p.name in covered)
    base = curvature.about.base.model_copy(update={"parameters": parameters, "sha256": base_digest(parameters)})
    return kp.Curvature(blocks, curvature.about.model_copy(update={"base": base}))


def test_another_base_model(one, tmp_path):
    other = small_curvature("packed", seed=3)
    said = complaint(one, save(other, tmp_path / "other.kfac"))
    assert f"{one} and {tmp_path / 'other.kfac'} are of different base models (small and small)" in said
    assert "the parameter 'one.weight' is not the same" in said


def test_nothing_in_common(one, tmp_path):
    names = [block.name for block in of_task("x").blocks]
    rest, last = without_blocks(of_task("x"), *names[-1:]), without_blocks(of_task("y"), *names[:-1])
    said = complaint(save(rest, tmp_path / "rest.kfac"), save(last, tmp_path / "last.kfac"), allow_partial=True)
    assert "cover no parameter in common" in said


def test_another_f(one, tmp_path):
    logits = kp.Function(output="logits", normalized=False, width=4)
    other = save(of_task("o", seed=1), tmp_path / "o.kfac", function=logits)
    said = complaint(one, other)
    assert said == f"{one} and {other} are of different f: normalised embedding of width 4; logits of width 4"
    details = [
        save(
            of_task(f"d{k}", seed=k),
            tmp_path / f"d{k}.kfac",
            function=kp.Function(output="other", normalized=False, width=4, detail=f"layer {k}"),
        )
        for k in range(2)
    ]
    assert "of different f: other of width 4 (layer 0); other of width 4 (layer 1)" in complaint(*details)


def test_another_scaling(one, tmp_path):
    other = save(of_task("o", seed=1), tmp_path / "o.kfac", scaling=kp.REDUCE)
    assert f"{one} and {other} are scaled differently: 'expand' and 'reduce'" in complaint(one, other)


def test_parents_that_overlap(one, two, tmp_path):
    assert f"{one} and {one} both contain the bundle" in complaint(one, one)
    kp.merge([one, two]).save(tmp_path / "both.kfac")
    said = complaint(tmp_path / "both.kfac", two)
    assert f"{tmp_path / 'both.kfac'} and {two} both contain the bundle" in said
    assert "of two, which would count twice. To subtract it: --without two" in said
    other = save(of_task("three", seed=62), tmp_path / "three.kfac")
    kp.merge([two, other]).save(tmp_path / "pair.kfac")
    assert "would count twice" in complaint(tmp_path / "both.kfac", tmp_path / "pair.kfac")


def test_missing_blocks(one, two, tmp_path):
    less = save(without_blocks(of_task("less", seed=5), "norm", "proj"), tmp_path / "less.kfac")
    for inputs in ((one, less, two), (less, one, two)):
        said = complaint(*inputs)
        assert f"{less} has no block 'norm' and 1 more, which {one} has" in said
        assert "--allow-partial" in said


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
    found = {block.name: block for block in merged.curvature.blocks}
    assert [loss.step for loss in found["norm"].losses] == ["partial"]
    assert "partial" not in [loss.step for loss in found["one.weight"].losses]
    norms = [{b.name: b for b in kp.load(path).blocks}["norm"] for path in (one, two)]
    torch.testing.assert_close(dense_block(found["norm"]), sum(map(dense_block, norms)))
    pairs = [{b.name: b for b in kp.load(path).blocks}["proj"].structure.terms[0] for path in (one, two)]
    if rule == "tak":
        ((B, A, _),) = found["proj"].structure.terms
        torch.testing.assert_close(B.dense(), sum(b.dense() for b, _, _ in pairs))
        torch.testing.assert_close(A.dense(), sum(a.dense() for _, a, _ in pairs) / 2)
    merged.curvature.save(tmp_path / "m.kfac")
    assert kp.verify(tmp_path / "m.kfac").holds
    reason = "went through 'partial'" if rule == "tak" else f"was merged by {rule!r}"
    assert reason in complaint(tmp_path / "m.kfac", one, without="one")


def test_another_partition(one, tmp_path):
    curvature = of_task("o", seed=1)
    upper, lower = curvature.blocks[2:4]
    join = kp.Join(rows=4, columns=3, pieces=(kp.Piece(parameter="attn.in_proj_weight"),))
    factors = kp.Kronecker.of(kp.Packed.from_dense(torch.eye(4)), kp.Packed.from_dense(torch.eye(3)))
    fused = kp.CurvatureBlock("attn", "linear", join, factors)
    blocks = [fused if block is upper else block for block in curvature.blocks if block is not lower]
    other = save(kp.Curvature(blocks, curvature.about), tmp_path / "o.kfac")
    for allow in (False, True):
        said = complaint(one, other, allow_partial=allow)
        assert said == f"{one} and {other} divide the parameter 'attn.in_proj_weight' into different blocks"


def test_another_join_or_structure(one, tmp_path):
    curvature = of_task("o", seed=1)
    norm = curvature.blocks[4]
    swapped = tuple(replace_at(piece, at) for piece, at in zip(norm.join.pieces, [(0, 1), (0, 0)], strict=True))
    blocks = list(curvature.blocks)
    blocks[4] = replace(norm, join=norm.join.model_copy(update={"pieces": swapped}))
    kp.Curvature(blocks, curvature.about).save(tmp_path / "o.kfac")
    assert "join other parameters in the block 'norm'" in complaint(one, tmp_path / "o.kfac")
    factors = kp.Kronecker.of(kp.Packed.from_dense(torch.eye(3)), kp.Packed.from_dense(torch.eye(2)))
    blocks[4] = replace(norm, structure=factors)
    kp.Curvature(blocks, curvature.about).save(tmp_path / "o.kfac")
    assert "hold the block 'norm' differently" in complaint(one, tmp_path / "o.kfac")


def replace_at(piece, at):
    return piece.model_copy(update={"at": at})


def test_rules_and_ranks(one, two):
    assert "no rule 'best'; there are tak, stack, optimal, shards" in complaint(one, two, rule="best")
    assert "the rule 'tak' has no rank" in complaint(one, two, rank=2)
    assert "the rank is at least 1, not 0" in complaint(one, two, rule="optimal", rank=0)
    assert "the rank is 5, and the inputs have 4 terms together" in complaint(one, two, rule="optimal", rank=5)
    assert "nothing to merge" in complaint()


def test_weights(one, two, tmp_path):
    unknown = save(of_task("u", None, seed=1), tmp_path / "u.kfac")
    said = complaint(one, unknown)
    assert said.startswith(f"{unknown}: does not say how large its data set is")
    assert "--weights 1,1 (weights=[1, 1])" in said
    assert kp.merge([one, unknown], weights=[1, 1]).about.merge.parents[1].dataset_size is None
    assert "expected 2 weights, one for each input, found 3" in complaint(one, two, weights=[1, 2, 3])
    for bad in (0, -1, float("nan"), float("inf")):
        assert f"{two}: its weight is {bad}, expected a positive number" in complaint(one, two, weights=[1, bad])


def test_subtractions_that_would_not_be_exact(one, two, tmp_path):
    three = save(of_task("three", seed=62), tmp_path / "three.kfac")
    for rule in ("optimal", "stack"):
        kp.merge([one, two, three], rule).save(tmp_path / "all.kfac")
        said = complaint(tmp_path / "all.kfac", two, without="two")
        assert f"was merged by '{rule}'; to subtract exactly takes tak" in said
    everything = kp.merge([one, two, three])
    kp.compress(everything, "int8").save(tmp_path / "small.kfac")
    said = complaint(tmp_path / "small.kfac", two, without="two")
    assert "it went through 'int8'" in said
    assert "Merge the other tasks' bundles anew" in said
    mixed = kp.merge([kp.merge([one, two], "optimal"), three])
    assert "went through 'optimal:1'" in complaint(mixed, two, without="two")
    assert "was merged by 'optimal'" in complaint(everything, kp.merge([one, two], "optimal"), without=["one", "two"])
    uneven = kp.merge([one, two], weights=[1, 5])
    assert "has its parents with other weights" in complaint(everything, uneven, without=["one", "two"])


def test_what_tak_cannot_merge_again(one, two, tmp_path):
    three = save(of_task("three", seed=62), tmp_path / "three.kfac")
    pair = kp.merge([one, two], "optimal", 2)
    assert "merged by 'optimal' at rank 2, whose terms stand for no tasks" in complaint(pair, three)
    assert len(kp.merge([pair, three], "stack").blocks) == len(pair.blocks)


@pytest.mark.parametrize("inputs", ["dtd.kfac", [1, 2], [None]])
def test_what_is_no_list_of_curvatures_is_refused(inputs):
    with refused(kp.KfacpackError):
        kp.merge(inputs)


def test_tasks_that_cannot_be_left_out(one, two, tmp_path):
    assert "no input is of the task 'three'; there are one, two" in complaint(one, two, without="three")
    assert "nothing remains without one, two" in complaint(one, two, without=["one", "two"])
    merged = kp.merge([one, two])
    said = complaint(merged, without="two")
    assert "contains 'two', and no input is that very bundle, which could be subtracted" in said
    other = of_task("two", seed=99)
    assert "contains 'two', and no input is that very bundle" in complaint(merged, other, without="two")


def test_a_damaged_input_is_named(one, two):
    raw = bytearray(two.read_bytes())
    raw[-3] ^= 1
    two.write_bytes(raw)
    assert complaint(one, two).startswith(str(two))
