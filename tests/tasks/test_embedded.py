"""Embedded tasks: the recorded bytes, no duplicate images, and a cache that may be missing or damaged."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from itertools import combinations, product

import numpy as np
import pytest
import torch
from kit import refused
from PIL import Image
from safetensors.numpy import load, save

from kfacpack.demo import embedded_task, photo_tasks
from kfacpack.demo.embedded_task import downsample, images_digest, to_grayscale, upsample
from kfacpack.errors import KfacpackError
from kfacpack.tasks.data_files import PackageData
from kfacpack.tasks.registry import TASKS, load_task

NAMES = sorted(TASKS)
CREATE_DIGITS = """
import sys
from kfacpack.tasks.registry import load_task
task = load_task("digits")
assert len(task.split("train")) == 1000
heavy = {"datasets", "mlxtend", "pandas", "skimage", "sklearn", "torch"} & set(sys.modules)
assert not heavy, heavy
"""
DAMAGES = {
    "cut": lambda whole: whole[:-50],
    "one bit": lambda whole: whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:],
    "empty": lambda whole: b"",
    "nonsense": lambda whole: b"nonsense" * 100,
    "others": lambda whole: save({name: array[::-1].copy() for name, array in load(whole).items()}),
    "no labels": lambda whole: save({name: array for name, array in load(whole).items() if name != "test.labels"}),
    "floats": lambda whole: save({name: array / np.float32(3) for name, array in load(whole).items()}),
}


@pytest.fixture(scope="module")
def generated():
    return {name: load_task(name).make() for name in NAMES}


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KFACPACK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def must_not_be_called():
    raise AssertionError("the images were created again")


@pytest.mark.parametrize("name", NAMES)
def test_images_have_the_recorded_digest(generated, name):
    assert images_digest(generated[name]) == load_task(name).sha256


@pytest.mark.parametrize("name", NAMES)
def test_splits_have_the_declared_sizes_and_classes(generated, name):
    task = load_task(name)
    assert task.name == name
    assert task.splits == ("train", "validation", "test")
    assert {split: len(examples.labels) for split, examples in generated[name].items()} == dict(task.sizes)
    for images, labels in generated[name].values():
        assert images.shape in [(len(labels), 28, 28), (len(labels), 28, 28, 3)]
        assert set(labels.tolist()) == set(range(len(task.classes)))


@pytest.mark.parametrize("name", NAMES)
def test_no_image_occurs_twice(generated, name):
    pictures = [picture.tobytes() for images, _ in generated[name].values() for picture in images]
    assert len(set(pictures)) == len(pictures)


@pytest.mark.parametrize("name", NAMES)
def test_templates_contain_the_class_once(name):
    task = load_task(name)
    assert len(set(task.classes)) == len(task.classes)
    assert task.templates
    for template in task.templates:
        assert template.format("CLASS").count("CLASS") == 1
    assert task.source
    assert task.license


def test_materials_of_different_splits_share_no_pixel():
    for surface in photo_tasks.SURFACES.values():
        size = photo_tasks.SCIKIT_IMAGE.read(f"data/{surface.file}.png", photo_tasks._read_photo).shape
        for boxes in surface.regions.values():
            for left, top, right, bottom in boxes:
                assert 0 <= left < right <= size[1]
                assert 0 <= top < bottom <= size[0]
        for one, other in combinations(surface.regions.values(), 2):
            for (left, top, right, bottom), (x0, y0, x1, y1) in product(one, other):
                assert right <= x0 or x1 <= left or bottom <= y0 or y1 <= top


def test_an_example_is_an_image_with_a_label(generated):
    task = load_task("digits")
    split = task.split("validation")
    example = split[7]
    assert list(example) == ["image"]
    assert (example["image"].mode, example["image"].size) == ("L", (28, 28))
    np.testing.assert_array_equal(np.asarray(example["image"]), generated["digits"]["validation"].images[7])
    assert split.label(7) == generated["digits"]["validation"].labels[7]
    assert (split.source.dataset, split.source.split, split.source.license) == (task.source, "validation", "CC BY 4.0")
    with refused(KfacpackError, "digits: unknown split 'dev'", "train, validation, test"):
        task.split("dev")


def test_colour_images_stay_rgb(own_cache):
    base = load_task("faces")
    coloured = {
        split: examples._replace(images=np.stack([examples.images] * 3, -1)) for split, examples in base.make().items()
    }
    task = replace(base, make=lambda: coloured, sha256=images_digest(coloured))
    for _ in range(2):
        assert replace(task).split("train")[0]["image"].mode == "RGB"


def test_upsampling_is_bilinear():
    pictures = np.random.default_rng(0).integers(0, 17, (5, 9, 9))
    expected = torch.nn.functional.interpolate(
        torch.from_numpy(pictures).double()[None], size=(28, 28), mode="bilinear", align_corners=False
    )[0]
    assert np.abs(upsample(pictures, 28, 16) - expected.numpy() * 255 / 16).max() <= 0.5 + 1e-9


def test_downsampling_and_greyscale_are_rounded_means():
    pictures = np.random.default_rng(0).integers(0, 256, (3, 8, 6))
    assert np.abs(downsample(pictures) - pictures.reshape(3, 4, 2, 3, 2).mean((2, 4))).max() <= 0.5
    assert to_grayscale(np.array([[255, 255, 255], [0, 0, 0], [255, 0, 0]])).tolist() == [255, 0, 76]


def test_tables_are_read():
    table = photo_tasks.read_digits_table(b"0,255,3\n16,0,9\n", 3)
    np.testing.assert_array_equal(table, np.array([[0, 255, 3], [16, 0, 9]], np.uint8), strict=True)


def test_packages_are_not_imported_for_their_data(own_cache):
    subprocess.run([sys.executable, "-c", CREATE_DIGITS], check=True)


def test_images_are_read_from_the_cache(own_cache):
    first = load_task("faces").split("train")
    assert [file.name for file in own_cache.iterdir()] == [f"faces-{load_task('faces').sha256[:16]}.safetensors"]
    again = replace(load_task("faces"), make=must_not_be_called).split("train")
    assert [again[k]["image"].tobytes() for k in range(9)] == [first[k]["image"].tobytes() for k in range(9)]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_rebuilt(own_cache, damage):
    task = load_task("faces")
    task.split("train")
    file = embedded_task.cache_path("faces", task.sha256)
    whole = file.read_bytes()
    file.write_bytes(DAMAGES[damage](whole))
    load_task("faces").split("train")
    assert file.read_bytes() == whole


def test_an_unusable_cache_is_ignored(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("KFACPACK_CACHE", str(tmp_path / "file" / "cache"))
    times = []
    task = replace(load_task("faces"), make=lambda: times.append(1) or load_task("faces").make())
    assert [len(task.split(split)) for split in task.splits] == [100, 20, 80]
    assert len(times) == 1


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("KFACPACK_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("pathlib.Path.home", no_home)
    assert embedded_task.cache_path("faces", "0" * 64) is None
    assert len(load_task("faces").split("train")) == 100


def test_location_of_the_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("KFACPACK_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    for shared, folder in ((str(tmp_path / "xdg"), tmp_path / "xdg"), ("relative", tmp_path / ".cache")):
        monkeypatch.setenv("XDG_CACHE_HOME", shared)
        assert embedded_task.cache_path("faces", "ab" * 32) == folder / "kfacpack" / f"faces-{'ab' * 8}.safetensors"


def test_processes_may_create_the_same_task_concurrently(own_cache):
    running = [subprocess.Popen([sys.executable, "-c", CREATE_DIGITS], env=os.environ.copy()) for _ in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert [file.suffix for file in own_cache.iterdir()] == [".safetensors"]
    replace(load_task("digits"), make=must_not_be_called).split("train")


def test_data_with_another_digest_is_refused(own_cache):
    expected = load_task("digits").sha256
    other = replace(load_task("digits"), sha256="0" * 64)
    remedy = "pip install --force-reinstall --no-deps scikit-learn=="
    with refused(KfacpackError, "digits", f"sha256 {expected}, expected {'0' * 64}", remedy) as raised:
        other.split("train")
    assert version("scikit-learn") in str(raised.value)
    assert not own_cache.exists()
    with refused(KfacpackError, "digits", "drawn with numpy", "reinstall kfacpack"):
        replace(other, package=None).split("train")


def test_a_missing_or_damaged_package_is_refused(tmp_path, monkeypatch):
    absent = PackageData("no-such-thing", "no_such_thing", tested="1.0")
    with refused(KfacpackError, "no-such-thing, which is not installed", "pip install 'kfacpack[demo]'"):
        absent.read("data.csv.gz", bytes)
    (tmp_path / "hollow_package").mkdir()
    (tmp_path / "hollow_package" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "hollow_package" / "bad").write_bytes(b"no picture, no archive")
    monkeypatch.syspath_prepend(tmp_path)
    hollow = PackageData("hollow", "hollow_package", tested="1.0")
    with refused(KfacpackError, "absent: cannot be read: No such file", "hollow of unknown version", "hollow==1.0"):
        hollow.read("absent", bytes)
    for decode in (
        photo_tasks._read_photo,
        lambda data: photo_tasks.read_digits_table(data, 3),
        lambda data: Image.open(tmp_path / "none"),
    ):
        with refused(KfacpackError, "bad: cannot be read", "hollow==1.0"):
            hollow.read("bad", decode)
