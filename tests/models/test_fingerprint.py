"""Fingerprints detect changes in the sampled examples and in all labels."""

from __future__ import annotations

from toys import ToyTask, toy_model

from kfacpack.models.data_loading import fingerprint


def test_a_fingerprint_depends_on_the_content_only():
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


def test_a_fingerprint_samples_evenly_from_first_to_last():
    accessed: list[int] = []

    class Watched:
        def __init__(self, split):
            self.split, self.source = split, split.source

        def __len__(self):
            return len(self.split)

        def __getitem__(self, number):
            accessed.append(number)
            return self.split[number]

    for size in (1, 2, 31, 32, 33, 1000):
        accessed.clear()
        fingerprint(toy_model(), Watched(ToyTask(size=size).split("train")), "toy")
        assert len(accessed) == len(set(accessed)) == min(size, 32)
        assert {0, size - 1} <= set(accessed)
