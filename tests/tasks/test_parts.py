"""Class splits NAME@k/n: trained separately and evaluated on the union of the classes."""

from __future__ import annotations

import json
import warnings
from itertools import product

import numpy as np
import pytest
import torch
from kfacpack_cli.main import app
from kit import of_task, refused, warned
from PIL import Image
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

import kfacpack as kp
from kfacpack.errors import KfacpackError
from kfacpack.format.identity import share_classes
from kfacpack.training.regularizer import OwnTaskWarning

FEW = ["--params", "visual.transformer.resblocks.3.*", "--batch-size", "6"]
PARTS = ("digits@1/2", "digits@2/2")


def run(*arguments):
    result = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Bundles of both parts, their merge, vectors after two steps, and their sum."""
    folder = tmp_path_factory.mktemp("parts")
    for k, part in enumerate(PARTS, start=1):
        run("estimate", "--task", part, "--examples", "16", *FEW[:2], "-o", folder / f"{k}.kfac", "-q")
    run("merge", folder / "1.kfac", folder / "2.kfac", "-o", folder / "both.kfac", "-q")
    for k, part in enumerate(PARTS, start=1):
        reg = ["--reg", folder / "both.kfac", "--reg", folder / f"{k}.kfac"]
        run("train", "--task", part, *FEW, "--steps", 2, *reg, "-o", folder / f"{k}.safetensors", "-q")
    run("add", folder / "1.safetensors", folder / "2.safetensors", "-o", folder / "sum.safetensors", "-q")
    return folder


def test_parts_are_even_and_make_up_the_whole():
    whole = kp.load_task("digits")
    for n in (1, 2, 3, 5):
        parts = [kp.load_task(f"digits@{k}/{n}") for k in range(1, n + 1)]
        groups = [list(part.own_classes) for part in parts]
        assert [number for group in groups for number in group] == list(range(10))
        assert max(map(len, groups)) - min(map(len, groups)) <= 1
        for split in ("train", "validation", "test"):
            assert sum(part.sizes[split] for part in parts) == whole.sizes[split]
    part, view = kp.load_task("digits@2/5"), kp.load_task("digits@2/5").split("test")
    true = whole.split("test")
    numbers = [number for number in range(len(true)) if true.label(number) in (2, 3)]
    assert (part.classes, len(view)) == (whole.classes, len(numbers))
    for place, number in ((0, numbers[0]), (len(numbers) - 1, numbers[-1])):
        assert view.label(place) == true.label(number)
        assert np.array_equal(np.asarray(view[place]["image"]), np.asarray(true[number]["image"]))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("digits@3/2", "NAME@k/n"),
        ("digits@0/2", "NAME@k/n"),
        ("digits@", "NAME@k/n"),
        ("digits@one", "NAME@k/n"),
        ("@1/2", "NAME@k/n"),
        ("digits@1/11", "10 classes.*11 parts.*at most 5 parts"),
        ("digits@1/6", "fewer than two"),
        ("nothing@1/2", "unknown task 'nothing'"),
        ("digits@1/2@1/2", "digits@1/2 is already a class split"),
    ],
)
def test_invalid_class_splits_are_refused(name, problem):
    with pytest.raises(KfacpackError, match=problem) as caught:
        kp.load_task(name)
    assert name.partition("@")[0] in str(caught.value)
    assert CliRunner().invoke(app, ["eval", "--task", name]).exit_code == 2


def test_a_folder_can_be_divided(tmp_path):
    for split in ("train", "test"):
        for name in "abcd":
            (tmp_path / split / name).mkdir(parents=True)
            Image.new("L", (8, 8), 100).save(tmp_path / split / name / "1.png")
    part = kp.load_task("mine@2/2", tmp_path)
    split = part.split("test")
    assert (part.name, part.classes, [split.label(n) for n in range(len(split))]) == ("mine@2/2", tuple("abcd"), [2, 3])


def test_a_part_without_examples_in_a_split_is_refused(tmp_path):
    for split, names in (("train", "abcd"), ("test", "ab")):
        for name in names:
            (tmp_path / split / name).mkdir(parents=True)
            Image.new("L", (8, 8), 100).save(tmp_path / split / name / "1.png")
    part = kp.load_task("mine@2/2", tmp_path)
    assert part.sizes["test"] == 0
    with refused(KfacpackError, "mine@2/2: split 'test'", "classes (c, d"):
        part.split("test")


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        ("cars", "cars", True),
        ("cars", "cars@1/4", True),
        ("cars@1/2", "cars@2/2", False),
        ("cars@2/4", "cars@1/2", True),
        ("cars@3/4", "cars@1/2", False),
        ("cars@1/2", "dtd@1/2", False),
        ("a@b", "a", False),
    ],
)
def test_names_tell_whether_classes_are_shared(one, other, shared):
    assert share_classes(one, other) == share_classes(other, one) == shared


@pytest.mark.parametrize("classes", [4, 7, 10, 47])
def test_parts_reported_as_disjoint_share_no_class(classes):
    def own(k, n):
        return set(range((k - 1) * classes // n, k * classes // n))

    every = [(k, n) for n in range(1, classes // 2 + 1) for k in range(1, n + 1)]
    for (k, n), (j, m) in product(every, every):
        assert share_classes(f"x@{k}/{n}", f"x@{j}/{m}") or not own(k, n) & own(j, m)


def test_a_part_and_its_whole_are_not_counted_twice():
    whole, part, rest = (of_task(name, 10, seed) for seed, name in enumerate(("cars", "cars@1/2", "cars@2/2")))
    with refused(KfacpackError, "'cars' and 'cars@1/2'", "twice"):
        kp.merge([whole, part])
    assert len(kp.merge([part, rest]).about.merge.parents) == 2
    with warned(OwnTaskWarning, "'cars@1/2', the task being trained", "'cars'"):
        kp.Regularizer(whole, exclude_task="cars@1/2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kp.Regularizer([part, rest], exclude_task="cars@1/2")


def test_the_whole_pipeline_works_with_parts(folder):
    """Bundles, vectors and their sum, evaluated on each part and on the union."""
    merged = kp.load(folder / "both.kfac")
    assert {parent.task for parent in merged.about.merge.parents} == set(PARTS)
    vectors = [kp.TaskVector.load(folder / f"{k}.safetensors") for k in (1, 2)]
    assert [vector.tasks for vector in vectors] == [(part,) for part in PARTS]
    assert vectors[0].about.tasks[0].source.dataset_size == kp.load_task(PARTS[0]).sizes["train"]
    heads = [vector.heads[part] for vector, part in zip(vectors, PARTS, strict=True)]
    assert heads[0].difference(heads[1]) is None
    assert len(heads[0].classes) == 10
    result = run("eval", "--task", "digits", *PARTS, "--vector", folder / "sum.safetensors", "--json")
    assert "has no head" not in result.stderr, "the parts have the head of the whole task"
    scores = json.loads(result.stdout)["tasks"]
    right = {name: round(score["accuracy"] * score["examples"]) for name, score in scores.items()}
    assert sum(scores[part]["examples"] for part in PARTS) == scores["digits"]["examples"]
    assert sum(right[part] for part in PARTS) == right["digits"]  # evaluation distinguishes all ten classes


def test_training_distinguishes_only_the_own_classes(folder):
    """The first recorded loss is that among the part's own five classes."""
    model, part = kp.load_model("tiny"), kp.load_task(PARTS[1])
    split = part.split("train")
    from kfacpack.training.optimizer import BatchOrder

    numbers = BatchOrder(len(split), 6, 0).batch(0)
    with torch.no_grad():
        f = model.forward(model.prepare([split[number] for number in numbers], part.name))
    logits = kp.head_for(model, part).logits(f)[:, 5:]
    labels = torch.tensor([split.label(number) - 5 for number in numbers])
    first = json.loads((folder / "2.metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] == pytest.approx(float(cross_entropy(logits, labels)), rel=1e-4)
    assert first["accuracy"] == pytest.approx(float((logits.argmax(1) == labels).float().mean()))


def test_a_part_has_the_prototypes_of_the_whole(folder):
    from kfacpack.evaluation.accuracy import vector_head

    model = kp.load_model("tiny")
    heads = [kp.head_for(model, kp.load_task(name), kind="prototypes") for name in ("digits", "digits@2/5")]
    assert heads[0].difference(heads[1]) is None
    vectors = [kp.TaskVector.load(folder / f"{k}.safetensors") for k in (1, 2)]
    own = vector_head(kp.load_task("digits"), vectors[0] + vectors[1])
    assert own is not None
    assert own.difference(vectors[1].heads[PARTS[1]]) is None
    assert vector_head(kp.load_task("mnist"), vectors[0]) is None
