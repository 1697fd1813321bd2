"""Whether data is the same is told from few examples and all labels, wherever the change is that they show."""

from __future__ import annotations

from toys import ToyTask, toy_model

from kfacpack.models.data_loading import fingerprint


def test_it_is_that_of_the_content():
    model, split = toy_model(), ToyTask(size=30).split("train")
    before = fingerprint(model, split, "toy", labels=True)
    assert fingerprint(toy_model(1), ToyTask(size=30).split("train"), "toy", labels=True) == before
    assert fingerprint(model, split, "toy") != fingerprint(model, split, "toy", range(29))
    for number in range(30):
        changed = ToyTask(size=30).split("train")
        changed.x[number, 0, 0] += 1e-9
        assert fingerprint(model, changed, "toy", labels=True) != before
        relabelled = ToyTask(size=30).split("train")
        relabelled.labels[number] += 1
        assert fingerprint(model, relabelled, "toy", labels=True) != before
        assert fingerprint(model, relabelled, "toy") == fingerprint(model, split, "toy")


def test_of_many_examples_it_looks_at_a_few_from_end_to_end():
    looked_at: list[int] = []

    class Watched:
        def __init__(self, split):
            self.split, self.source = split, split.source

        def __len__(self):
            return len(self.split)

        def __getitem__(self, number):
            looked_at.append(number)
            return self.split[number]

    for size in (1, 2, 31, 32, 33, 1000):
        looked_at.clear()
        fingerprint(toy_model(), Watched(ToyTask(size=size).split("train")), "toy")
        assert len(looked_at) == len(set(looked_at)) == min(size, 32)
        assert {0, size - 1} <= set(looked_at)
