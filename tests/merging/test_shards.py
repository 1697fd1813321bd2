"""Merged estimates from parts of the data equal the estimate from all of it."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from kit import refused
from torch import nn

import kfacpack as kp

EXAMPLES = 24


class Positions(nn.Module):
    """Layers that are used at several positions, a norm, a scale and an embedding."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, 6)
        self.scale = nn.Parameter(torch.randn(6))
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 3)

    def forward(self, input_ids, attention_mask):
        h = self.norm(self.words(input_ids)) * self.scale
        h = self.down(torch.tanh(self.up(h)))
        mask = attention_mask[..., None].float()
        return (h * mask).sum(1) / mask.sum(1)


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return Positions()


@pytest.fixture(scope="module")
def sentences():
    """Sentences of different lengths, so that shards differ in their number of positions."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(9, (EXAMPLES, 7), generator=generator)
    lengths = torch.randint(1, 8, (EXAMPLES,), generator=generator)
    return {"input_ids": ids, "attention_mask": (torch.arange(7) < lengths[:, None]).long()}


def part(batch, start, stop):
    return {key: value[start:stop] for key, value in batch.items()}


def source(examples, task="toy", size=1000):
    return kp.Source(task=task, examples=examples, dataset_size=size)


def of_part(net, batch, start, stop, **more):
    about = {"fisher": "exact", "source": source(stop - start), **more}
    return kp.estimate(net, [part(batch, start, stop)], **about)


def assert_same(merged, whole, rtol):
    assert [block.name for block in merged.blocks] == [block.name for block in whole.blocks]
    for ours, theirs in zip(merged.blocks, whole.blocks, strict=True):
        pairs = zip(ours.structure.matrices(), theirs.structure.matrices(), strict=True)
        for (role, matrix), (_, expected) in pairs:
            size = float(expected.dense().abs().max())
            torch.testing.assert_close(matrix.dense(), expected.dense(), rtol=rtol, atol=rtol * size, msg=role)
            assert (matrix.examples, matrix.positions) == (expected.examples, expected.positions)
            assert matrix.form == expected.form


@pytest.mark.parametrize("more", [{}, {"sharing": "reduce"}, {"structure": "diagonal"}, {"compress": "block:2"}])
def test_eight_shards_equal_one_run(net, sentences, more):
    edges = [0, 1, 2, 6, 9, 13, 14, 20, EXAMPLES]
    shards = [of_part(net, sentences, *edge, **more) for edge in pairwise(edges)]
    whole = of_part(net, sentences, 0, EXAMPLES, **more)
    merged = kp.merge(shards, "shards")
    assert_same(merged, whole, 1e-6)
    assert merged.about.source == whole.about.source
    assert merged.about.estimate == whole.about.estimate
    for ours, theirs in zip((merged.about, *merged.blocks), (whole.about, *whole.blocks), strict=True):
        assert [loss.step for loss in ours.losses] == [loss.step for loss in theirs.losses]
    weights = [parent.weight for parent in merged.about.merge.parents]
    assert weights == pytest.approx([(b - a) / EXAMPLES for a, b in pairwise(edges)])
    assert sum(parent.dataset_size for parent in merged.about.merge.parents) == 1000


def test_results_are_bit_identical_if_the_arithmetic_is_exact():
    """With integers and shards of two examples each, nothing is rounded."""
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape, generator=generator).float())
    x = torch.randint(-3, 4, (16, 4), generator=generator).float()
    shards = [kp.estimate(net, [x[k : k + 2]], fisher="exact") for k in range(0, 16, 2)]
    merged, whole = kp.merge(shards, "shards"), kp.estimate(net, [x], fisher="exact")
    for ours, theirs in zip(merged.blocks, whole.blocks, strict=True):
        for (_, matrix), (_, expected) in zip(ours.structure.matrices(), theirs.structure.matrices(), strict=True):
            assert torch.equal(matrix.dense(), expected.dense())


def test_shards_of_shards_are_shards(net, sentences):
    a, b, c = (of_part(net, sentences, *edge) for edge in ((0, 5), (5, 9), (9, EXAMPLES)))
    merged = kp.merge([kp.merge([a, b], "shards"), c], "shards")
    assert_same(merged, of_part(net, sentences, 0, EXAMPLES), 1e-6)
    assert len(merged.about.merge.parents) == 3
    assert sum(parent.dataset_size for parent in merged.about.merge.parents) == 1000
    assert sum(parent.weight for parent in merged.about.merge.parents) == pytest.approx(1)


def test_a_task_from_shards_counts_as_one_task(net, sentences):
    halves = [of_part(net, sentences, *edge) for edge in ((0, 12), (12, EXAMPLES))]
    whole = of_part(net, sentences, 0, EXAMPLES)
    other = of_part(net, sentences, 3, 9, source=source(6, "other", 500))
    merged, expected = (kp.merge([curvature, other]) for curvature in (kp.merge(halves, "shards"), whole))
    assert_same(merged, expected, 1e-6)
    weights = [parent.weight for parent in merged.about.merge.parents]
    assert weights == pytest.approx([2 / 3, 2 / 3, 2 / 3])
    assert [parent.dataset_size for parent in merged.about.merge.parents] == [500, 500, 500]
    # The task can be subtracted again as a whole.
    left = kp.merge([merged, kp.merge(halves, "shards")], without="toy")
    for ours, theirs in zip(left.blocks, other.blocks, strict=True):
        for (_, matrix), (_, expected) in zip(ours.structure.matrices(), theirs.structure.matrices(), strict=True):
            torch.testing.assert_close(matrix.dense(), expected.dense(), rtol=1e-4, atol=1e-5)


def test_inputs_that_are_not_shards_of_one_task_are_rejected(net, sentences):
    one, two = (of_part(net, sentences, *edge) for edge in ((0, 12), (12, EXAMPLES)))

    def merge_fails(inputs, *facts, **options):
        with refused(kp.KfacpackError, *facts):
            kp.merge(inputs, "shards", **options)

    merge_fails([one, one], "input 1 and input 2", one.digest[:12], "twice")
    merge_fails([one, two], "weighted by their numbers of examples", weights=[1, 2])
    merge_fails([one, of_part(net, sentences, 3, 9, source=source(6, "other"))], "tasks, 'toy' and 'other'")
    merge_fails([one, of_part(net, sentences, 3, 9, source=source(6, size=7))], "different data")
    merge_fails([one, of_part(net, sentences, 3, 9, fisher="mc")], "estimated with different settings")
    small = [of_part(net, sentences, *edge, source=source(12, size=20)) for edge in ((0, 12), (8, 20))]
    merge_fails(small, "24 examples", "20", "twice")
    other = of_part(net, sentences, 12, EXAMPLES, source=source(12, "other"))
    merge_fails([kp.merge([one, other], weights=[1, 1]), of_part(net, sentences, 3, 9)], "input 1", "merged by 'tak'")
    with refused(kp.KfacpackError, "'toy'", "shards"):
        kp.merge([one, two])
    uncounted = [
        kp.CurvatureBlock(
            b.name, b.operation, b.join, b.structure.map_matrices(lambda m: kp.Packed.from_dense(m.dense()))
        )
        for b in one.blocks
    ]
    merge_fails([kp.Curvature(uncounted, one.about), two], "input 1", "number of examples")
