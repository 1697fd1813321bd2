"""Measurements that share the outputs of a vector give the same results and run the model once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from evaluation.toy import EVALUATION_SETS, TASKS, task_vector
from toys import toy_model

from kfacpack.evaluation.accuracy import scores
from kfacpack.evaluation.disentanglement import disentanglement, localisation
from kfacpack.evaluation.edited_model import OutputCache
from kfacpack.models.heads import head_for


@pytest.fixture
def prepared():
    """The number of examples in each batch that was prepared."""
    return []


@pytest.fixture
def model(prepared):
    toy = toy_model()

    def prepare(examples, task):
        prepared.append(len(examples))
        return toy.prepare(examples, task)

    return replace(toy, prepare=prepare)


def measure(model, sets, vectors):
    """Returns several measurements, also with multiples of the vectors."""
    one, two = sets["one"], sets["two"]
    head = head_for(toy_model(), TASKS["one"], kind="prototypes")
    return (
        scores(model, head, one, vectors["one"], (0.0, 0.5, 1.0), batch_size=6),
        scores(model, head, one, -vectors["one"], (0.5,), batch_size=6),
        disentanglement(
            model,
            (one, two),
            (vectors["one"], vectors["two"]),
            alphas=[0.5, 1.0],
            heads={name: head_for(toy_model(), TASKS[name], kind="prototypes") for name in ("one", "two")},
            batch_size=6,
        ),
        localisation(model, [one, two], vectors, batch_size=6),
    )


def test_shared_outputs_give_the_same_results(model, prepared):
    vectors = {name: task_vector(model, TASKS[name]) for name in ("one", "two")}
    prepared.clear()
    expected = measure(model, EVALUATION_SETS, vectors)
    examples = sum(prepared)
    prepared.clear()
    sets = {name: replace(examples, outputs=OutputCache()) for name, examples in EVALUATION_SETS.items()}
    assert measure(model, sets, vectors) == expected
    # Vector "one" on task "one", then vector "two" on it and both on task "two".
    assert sum(prepared) == 3 * 20 < examples
    prepared.clear()
    assert measure(model, sets, vectors) == expected
    assert not prepared


def test_other_batches_and_other_models_do_not_share_outputs(model, prepared):
    vectors = {"one": task_vector(model, TASKS["one"])}
    sets = [replace(EVALUATION_SETS[name], outputs=OutputCache()) for name in ("one", "two")]
    localisation(model, sets, vectors, batch_size=6)
    prepared.clear()
    localisation(model, sets, vectors, batch_size=7)
    assert sum(prepared) == 2 * 20
    prepared.clear()
    other = toy_model()
    localisation(replace(model, module=other.module, forward=other.forward), sets, vectors, batch_size=6)
    assert sum(prepared) == 2 * 20


@pytest.mark.parametrize("max_bytes", [1, 2 * 20 * 6 * 8])
def test_a_full_cache_discards_what_was_not_used_for_longest(model, prepared, max_bytes):
    vectors = [task_vector(model, TASKS["one"], seed=seed) for seed in (0, 1)]
    head = head_for(toy_model(), TASKS["one"], kind="prototypes")
    one = replace(EVALUATION_SETS["one"], outputs=OutputCache(max_bytes))
    expected = [scores(model, head, EVALUATION_SETS["one"], vector, (1.0,)) for vector in vectors]
    for _ in range(2):
        for vector, score in zip(vectors, expected, strict=True):
            prepared.clear()
            assert scores(model, head, one, vector, (1.0,)) == score
            assert sum(prepared) == 20
            assert scores(model, head, one, vector, (1.0,)) == score
            assert sum(prepared) == (40 if max_bytes == 1 else 20)
