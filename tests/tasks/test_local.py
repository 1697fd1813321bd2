"""Tasks in local folders: layouts, splits, labels, and errors that name the file at fault."""

from __future__ import annotations

from pathlib import Path

import datasets
import numpy as np
import pytest
from kit import refused
from PIL import Image

from kfacpack.errors import KfacpackError
from kfacpack.tasks.data_files import SHARD
from kfacpack.tasks.registry import load_task

SHARED = Path(__file__).resolve().parents[3] / "shared"
PICTURES = [Image.new("RGB", (6, 4), (red, 10, 20)) for red in range(5)]
LABELS = [2, 0, 1, 1, 2]


def image_data(**more):
    features = {"img": datasets.Image(), "fine": datasets.ClassLabel(names=["a", "b", "c"])}
    columns = {"img": PICTURES, "fine": LABELS, **{name: values for name, (values, _) in more.items()}}
    features.update({name: feature for name, (_, feature) in more.items()})
    return datasets.Dataset.from_dict(columns, datasets.Features(features))


def text_data(labels=(0, 1, 0)):
    features = datasets.Features(
        premise=datasets.Value("string"),
        hypothesis=datasets.Value("string"),
        idx=datasets.Value("int32"),
        label=datasets.ClassLabel(names=["yes", "no"]),
    )
    texts = {"premise": ["one", "two", "three"], "hypothesis": ["uno", "dos", "tres"], "idx": [7, 8, 9]}
    return datasets.Dataset.from_dict({**texts, "label": labels}, features)


@pytest.fixture(autouse=True)
def _quiet_writing():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def write(data, folder, name="train-00000-of-00001.parquet"):
    folder.mkdir(parents=True, exist_ok=True)
    data.to_parquet(folder / name)
    return folder


@pytest.mark.parametrize("place", [".", "data", "odd [name]*"])
def test_images_in_the_hubs_parquet_layout(tmp_path, place):
    folder = write(image_data(), tmp_path / place)
    write(image_data().select([1]), folder, "test-00000-of-00001.parquet")
    task = load_task("mine", tmp_path if place == "data" else folder)
    assert task.splits == ("train", "test")
    assert task.classes == ("a", "b", "c")
    split = task.split("train")
    assert [dict(split[k]).keys() for k in range(len(split))] == [{"image"}] * 5
    assert [split[k]["image"].getpixel((0, 0))[0] for k in range(5)] == [0, 1, 2, 3, 4]
    assert [split.label(k) for k in range(5)] == LABELS
    assert (split.source.split, split.source.license) == ("train", None)
    assert len(task.split("test")) == 1
    assert task.sizes == {"train": 5, "test": 1}
    assert task.templates == ("a photo of a {}.",)
    assert (task.source, task.license) == ((tmp_path if place == "data" else folder).resolve().name, None)


def numbered(count):
    features = datasets.Features(text=datasets.Value("string"), label=datasets.ClassLabel(names=["even", "odd"]))
    rows = {"text": [str(k) for k in range(count)], "label": [k % 2 for k in range(count)]}
    return datasets.Dataset.from_dict(rows, features)


def texts_of(split):
    return [int(split[k]["text"]) for k in range(len(split))]


@pytest.mark.parametrize("count", [10, 107, 1000])
def test_a_tenth_of_train_is_held_out_for_validation(tmp_path, count):
    write(numbered(count), tmp_path)
    write(numbered(4), tmp_path, "test.parquet")
    task = load_task("mine", tmp_path)
    assert task.splits == ("train", "validation", "test")
    assert task.sizes == {"train": count - count // 10, "validation": count // 10, "test": 4}
    train, validation = task.split("train"), task.split("validation")
    assert (len(train), len(validation)) == (task.sizes["train"], task.sizes["validation"])
    assert sorted(texts_of(train) + texts_of(validation)) == list(range(count)), "every example is in exactly one split"
    assert texts_of(train) == sorted(texts_of(train))
    assert texts_of(validation) == texts_of(load_task("again", tmp_path).split("validation"))
    for split in (train, validation):
        assert [split.label(k) for k in range(len(split))] == [number % 2 for number in texts_of(split)]
    assert (train.source.split, validation.source.split) == ("train", "validation")
    if count == 1000:
        # Every class is represented, whether examples are sorted by class or classes alternate.
        assert all(sum(number // 100 == k for number in texts_of(validation)) == 10 for k in range(10))
        assert 30 < sum(number % 2 for number in texts_of(validation)) < 70


def test_no_more_than_five_thousand_are_held_out(tmp_path):
    features = datasets.Features(text=datasets.Value("string"))
    write(datasets.Dataset.from_dict({"text": ["same"] * 60_000}, features), tmp_path)
    assert load_task("mine", tmp_path).sizes == {"train": 55_000, "validation": 5_000}


@pytest.mark.parametrize("name", ["validation", "valid", "val", "dev"])
def test_a_stored_validation_split_may_have_any_of_its_names(tmp_path, name):
    write(numbered(30), tmp_path)
    write(numbered(7), tmp_path, f"{name}-00000-of-00001.parquet")
    task = load_task("mine", tmp_path)
    assert task.sizes == {"train": 30, "validation": 7}
    assert texts_of(task.split("validation")) == list(range(7))
    pictures = tmp_path / "pictures"
    for split, count in (("train", 12), (name, 2)):
        (pictures / split / "ant").mkdir(parents=True)
        for k in range(count):
            PICTURES[0].save(pictures / split / "ant" / f"{k}.png")
    assert load_task("mine", pictures).sizes == {"train": 12, "validation": 2}


def test_errors_in_held_out_examples_name_the_row_in_the_file(tmp_path):
    (tmp_path / "cat").mkdir()
    for k in range(10):
        (tmp_path / "cat" / f"{k}.png").write_bytes(b"no picture")
    task = load_task("mine", tmp_path)
    named = set()
    for split in ("train", "validation"):
        for k in range(task.sizes[split]):
            with refused(KfacpackError, tmp_path / "cat", ".png: the image cannot be read") as caught:
                task.split(split)[k]
            named.add(str(caught.value).split(".png")[0][-1])
    assert named == set("0123456789")
    write(numbered(20).map(lambda row: {"text": None}), tmp_path / "holes")
    validation = load_task("mine", tmp_path / "holes").split("validation")
    with refused(KfacpackError, "split 'train', row 1", "'text' is null"):
        validation[1]


def test_texts_keep_their_columns_and_order(tmp_path):
    task = load_task("mine", write(text_data(), tmp_path / "rte"))
    assert (task.sizes, task.templates) == ({"train": 3}, ())
    split = task.split("train")
    assert list(split[1].items()) == [("premise", "two"), ("hypothesis", "dos")]
    assert split.label(1) == 1
    assert split.source.dataset == "rte"


def test_shards_are_joined_to_one_split(tmp_path):
    for k in range(2):
        write(image_data().shard(2, k, contiguous=True), tmp_path, f"train-0000{k}-of-00002.parquet")
    split = load_task("mine", tmp_path).split("train")
    assert [split.label(k) for k in range(len(split))] == LABELS
    assert SHARD.fullmatch("validation_matched-00000-of-00001.parquet")[1] == "validation_matched"


@pytest.mark.parametrize("splits", [("train", "test"), ()])
def test_images_in_one_folder_per_class(tmp_path, splits):
    for split in splits or (".",):
        for name in ("cat", "ant", "bee")[: 3 if split != "test" else 1]:
            (tmp_path / split / name).mkdir(parents=True)
            for k in range(2):
                PICTURES[k].save(tmp_path / split / name / f"{k}.png")
            (tmp_path / split / name / "notes.txt").write_text("no picture")
    task = load_task("mine", tmp_path)
    assert task.splits == (splits or ("train",))
    assert task.classes == ("ant", "bee", "cat")
    assert task.sizes == ({"train": 6, "test": 2} if splits else {"train": 6})
    assert task.templates == ("a photo of a {}.",)
    train = task.split("train")
    assert [train.label(k) for k in range(len(train))] == [0, 0, 1, 1, 2, 2]
    assert train[1]["image"].getpixel((0, 0)) == (1, 10, 20)
    if splits:
        assert task.split("test").label(0) == 2  # label 2, although test has no other class


def test_split_folders_are_not_classes(tmp_path):
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        PICTURES[0].save(tmp_path / split / "0.png")
    with refused(KfacpackError, "'test/0.png'", "in a split folder", "not in a class folder"):
        load_task("mine", tmp_path)
    (tmp_path / "train" / "ant").mkdir()
    PICTURES[0].save(tmp_path / "train" / "ant" / "0.png")
    assert load_task("mine", tmp_path).sizes == {"train": 1}


def test_a_file_name_that_is_not_utf8_is_refused(tmp_path):
    try:
        (tmp_path / "caf\udce9").mkdir()
    except OSError:
        pytest.skip("the file system only allows names in UTF-8")
    PICTURES[0].save(tmp_path / "caf\udce9" / "0.png")
    with refused(KfacpackError, "udce9/0.png", "UTF-8"):
        load_task("mine", tmp_path)


def test_missing_shards_are_counted(tmp_path):
    """As after an interrupted download."""
    write(text_data(), tmp_path, "train-00000-of-00003.parquet")
    write(text_data(), tmp_path, "test-00000-of-00001.parquet")
    task = load_task("mine", tmp_path)
    assert task.sizes["train"] == 3
    assert task.notices("tiny") == ("mine: 2 of 3 files of split 'train' are missing",)
    for number in (1, 2):
        write(text_data(), tmp_path, f"train-0000{number}-of-00003.parquet")
    assert load_task("mine", tmp_path).notices("tiny") == ()


def test_reading_leaves_no_files_and_prints_nothing(tmp_path, monkeypatch, capfd):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    datasets.enable_progress_bars()
    folder = write(image_data(), tmp_path / "data-set")
    capfd.readouterr()
    split = load_task("mine", folder).split("train")
    assert split[4]["image"].size == (6, 4)
    assert list((tmp_path / "tmp").iterdir()) == []
    assert not datasets.are_progress_bars_disabled()
    assert capfd.readouterr() == ("", "")


def test_a_folder_without_data_is_refused(tmp_path):
    with refused(KfacpackError, tmp_path / "nowhere", "no such folder", "train-*.parquet"):
        load_task("mine", tmp_path / "nowhere")
    with refused(KfacpackError, tmp_path, "found nothing", "train-*.parquet"):
        load_task("mine", tmp_path)
    (tmp_path / "readme.md").write_text("hello")
    with refused(KfacpackError, tmp_path, "found readme.md", "train-*.parquet"):
        load_task("mine", tmp_path)
    with refused(KfacpackError, tmp_path / "readme.md", "not a folder"):
        load_task("mine", tmp_path / "readme.md")


def test_broken_files_are_named(tmp_path):
    folder = write(image_data(), tmp_path)
    file = folder / "train-00000-of-00001.parquet"
    whole = file.read_bytes()
    for content in (b"", b"nonsense", whole[:-20]):
        file.write_bytes(content)
        with refused(KfacpackError, "train-00000-of-00001.parquet: ", "readable parquet file"):
            load_task("mine", folder).split("train")
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    file.write_bytes(whole[:4] + bytes(footer - 4) + whole[footer:])
    with refused(KfacpackError, "cannot be read"):
        load_task("mine", folder).split("train")[0]


def test_a_broken_image_is_named(tmp_path):
    (tmp_path / "cat").mkdir()
    PICTURES[0].save(tmp_path / "cat" / "0.png")
    (tmp_path / "cat" / "1.png").write_bytes(b"no picture")
    split = load_task("mine", tmp_path).split("train")
    assert split[0]["image"].size == (6, 4)
    with refused(KfacpackError, "cat/1.png: the image cannot be read"):
        split[1]


def test_an_image_with_a_huge_declared_size_is_named(tmp_path):
    """Pillow raises another class of error than for a broken file."""
    (tmp_path / "cat").mkdir()
    file = tmp_path / "cat" / "0.bmp"
    PICTURES[0].save(file)
    width, height = bytes([6, 0, 0, 0]), bytes([4, 0, 0, 0])
    file.write_bytes(file.read_bytes().replace(width + height, 2 * (30_000).to_bytes(4, "little")))
    with refused(KfacpackError, "cat/0.bmp: the image cannot be read", "900000000 pixels"):
        load_task("mine", tmp_path).split("train")[0]


@pytest.mark.parametrize("kind", ["png", "tif", "pgm"])
def test_sixteen_bit_greyscale_is_scaled(tmp_path, kind):
    (tmp_path / "grey").mkdir()
    levels = np.array([[0, 257, 32_896, 65_535]], dtype=np.uint16)
    file = tmp_path / "grey" / f"0.{kind}"
    if kind == "pgm":  # which Pillow writes with 16 bits only since 10.2
        file.write_bytes(b"P5 4 1 65535\n" + levels.astype(">u2").tobytes())
    else:
        Image.fromarray(levels).save(file)
    image = load_task("mine", tmp_path).split("train")[0]["image"]
    assert list(image.convert("RGB").tobytes()[::3]) == [0, 1, 128, 255]
    assert image.format is not None


@pytest.mark.parametrize(("dtype", "kind"), [(np.float32, "floating-point"), (np.int32, "32-bit")])
def test_pixels_without_a_known_white_level_are_refused(tmp_path, dtype, kind):
    (tmp_path / "grey").mkdir()
    Image.fromarray(np.ones((2, 2), dtype)).save(tmp_path / "grey" / "0.tif")
    with refused(KfacpackError, "0.tif", kind):
        load_task("mine", tmp_path).split("train")[0]


def test_unsuitable_columns_are_refused(tmp_path):
    numbers = datasets.Dataset.from_dict({"x": [1.0], "y": [2]})
    with refused(KfacpackError, "images or strings", "x, y"):
        load_task("mine", write(numbers, tmp_path / "numbers")).split("train")
    two = image_data(mask=(PICTURES, datasets.Image()))
    with refused(KfacpackError, "2 columns contain images: img, mask", "expected only one"):
        load_task("mine", write(two, tmp_path / "two")).split("train")
    unlabelled = load_task("mine", write(image_data().remove_columns("fine"), tmp_path / "bare"))
    assert unlabelled.classes is None
    with refused(KfacpackError, "column of class labels", "--columns label=COLUMN"):
        unlabelled.split("train").label(0)


def test_splits_must_exist_have_examples_and_agree_on_classes(tmp_path):
    folder = write(text_data(), tmp_path)
    with refused(KfacpackError, "unknown split 'test'", "available splits: train"):
        load_task("mine", folder).split("test")
    write(text_data().select([]), folder, "test.parquet")
    with refused(KfacpackError, "split 'test' has no examples"):
        load_task("mine", folder).split("test")
    renamed = text_data().cast_column("label", datasets.ClassLabel(names=["no", "yes"]))
    write(renamed, folder, "validation.parquet")
    with refused(KfacpackError, "classes of split 'validation'", "those of split 'train'"):
        load_task("mine", folder).split("validation")


def test_rows_without_label_or_text_are_named(tmp_path):
    split = load_task("mine", write(text_data(labels=[0, -1, None]), tmp_path / "labels")).split("train")
    assert split.label(0) == 0
    for row, label in ((1, -1), (2, None)):
        with refused(KfacpackError, f"row {row}: label {label}", "not a class"):
            split.label(row)
    holes = text_data().map(lambda row: {"premise": None if row["idx"] == 8 else row["premise"]})
    with refused(KfacpackError, "row 1: 'premise' is null"):
        load_task("mine", write(holes, tmp_path / "holes")).split("train")[1]


@pytest.mark.parametrize(
    ("name", "closest"), [("digit", "digits"), ("DTD", "dtd"), ("eurosta", "eurosat"), ("digit@1/2", "digits")]
)
def test_an_unknown_task_suggests_the_closest_name(name, closest):
    with refused(
        KfacpackError, f"unknown task {name.partition('@')[0]!r}; did you mean {closest!r}?", "kfacpack tasks"
    ):
        load_task(name)


def test_an_unknown_task_without_a_close_name_suggests_none():
    with refused(KfacpackError, "nothing", "kfacpack tasks", "--data") as caught:
        load_task("nothing")
    assert "did you mean" not in str(caught.value)


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs real data in ../shared")
@pytest.mark.parametrize(
    ("name", "classes", "columns"),
    [("mnist", 10, ["image"]), ("stanford_cars", 40, ["image"]), ("mnli", 3, ["premise", "hypothesis"])],
)
def test_real_data(name, classes, columns):
    task = load_task(name, SHARED / "data" / name)
    split = task.split("test")
    assert len(task.classes) == classes
    assert list(split[0]) == columns
    assert {split.label(k) for k in range(len(split))} == set(range(classes))


LINE = '{"prompt": "one", "completion": " two"}\n'


@pytest.mark.parametrize(
    ("content", "facts"),
    [
        (LINE.replace("two", "é").encode("latin-1"), ("train.jsonl", "UTF8")),
        (LINE.replace('" two"', "2").encode(), ("completion", "int64")),
        (LINE.replace('" two"', '["two"]').encode(), ("completion",)),
        (LINE.encode("utf-16"), ("train.jsonl",)),
        (b"", ("train.jsonl",)),
    ],
)
def test_unreadable_lines_and_completions_that_are_no_texts_are_refused(tmp_path, content, facts):
    (tmp_path / "train.jsonl").write_bytes(content)
    with refused(KfacpackError, *facts):
        load_task("mine", tmp_path).split("train")[0]


@pytest.mark.parametrize("content", ["\ufeff" + LINE, LINE.replace("\n", "\r\n"), LINE.replace("one", "x" * 2**21)])
def test_byte_order_marks_line_ends_and_long_lines_are_read(tmp_path, content):
    (tmp_path / "train.jsonl").write_bytes(content.encode())
    example = load_task("mine", tmp_path).split("train")[0]
    assert (example["prompt"][0], example["completion"]) in (("o", " two"), ("x", " two"))


def test_a_split_with_other_input_columns_is_refused(tmp_path):
    (tmp_path / "train.jsonl").write_text(LINE)
    (tmp_path / "test.jsonl").write_text('{"prompt": "one", "answer": " two"}\n')
    task = load_task("mine", tmp_path)
    with refused(KfacpackError, "'test'", "answer", "completion"):
        task.split("test")
