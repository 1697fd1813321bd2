"""Published tasks: copies in the Hub's layout are read by their definition, from a folder or from the Hub cache."""

from __future__ import annotations

import datasets
import pytest
import yaml
from dataset_copies import COUNTS, TEXT, VISION, copy, pairs, pictures
from huggingface_hub import constants
from kit import refused
from PIL import Image
from pyarrow import parquet

from kfacpack.errors import KfacpackError
from kfacpack.tasks.data_files import parquet_files
from kfacpack.tasks.data_sources import DatasetRepository, data_source_of
from kfacpack.tasks.published_tasks import GTSRB_SIGNS
from kfacpack.tasks.published_tasks import imagenet_classes as imagenet_words
from kfacpack.tasks.registry import PUBLISHED, TASKS, load_task

NAMES = [*VISION, *TEXT]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def _quiet_writing():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    datasets.disable_progress_bars()
    return {name: copy(name, tmp_path_factory.mktemp(name)) for name in NAMES}


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    """No network, and an empty Hub cache."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def cached(hub, name, source):
    """Puts a copy into the Hub cache."""
    definition = PUBLISHED[name]
    folder = hub / f"datasets--{definition.repository.replace('/', '--')}"
    ref = folder / "refs" / (definition.revision or "main")
    ref.parent.mkdir(parents=True)
    ref.write_text(COMMIT)
    (folder / "snapshots").mkdir()
    (folder / "snapshots" / COMMIT).symlink_to(source, target_is_directory=True)
    return folder


def test_every_published_task_has_a_copy_here():
    assert set(NAMES) == set(PUBLISHED)


@pytest.mark.parametrize("name", NAMES)
def test_splits_are_those_of_prior_work(copies, name):
    task = load_task(name, copies[name])
    serving = {"mnli": "validation_matched", "rte": "validation", "qnli": "validation", "imagenet": "validation"}
    test = COUNTS[serving.get(name, "test")]
    expected = {"train": 22, "validation": 2, "test": test}  # a tenth is held out
    if name in ("snli", "sick", "scitail"):
        expected = {"train": 24, "validation": 5, "test": test}
    if name == "snli":  # in every split, the one row without a label is left out
        expected = {split: size - 1 for split, size in expected.items()}
    assert dict(task.sizes) == expected
    assert task.splits == ("train", "validation", "test")
    for split, size in expected.items():
        examples = task.split(split)
        assert len(examples) == size
        assert {examples.label(row) for row in range(size)} <= set(range(len(task.classes)))
        assert (examples.source.split, examples.source.license) == (split, PUBLISHED[name].license)


@pytest.mark.parametrize("name", NAMES)
def test_examples_have_the_defined_columns(copies, name):
    task = load_task(name, copies[name])
    example = task.split("train")[0]
    if name in VISION:
        assert list(example) == ["image"]
        assert task.templates
        assert all(template.format("CLASS").count("CLASS") == 1 for template in task.templates)
        assert len(set(task.templates)) == len(task.templates)
    else:
        stored = pairs(name, "train")
        assert list(example) == list(TEXT[name][2])
        assert example == {column: stored[0][column] for column in example}
        assert task.templates == ()
        assert task.classes == tuple(TEXT[name][3] or ("entails", "neutral"))
    assert task.notices("ViT-B-32") == (
        ("snli: rows without a label are left out: 1 in train, 1 in validation, 1 in test",) if name == "snli" else ()
    )


def test_text_labels_are_class_names(copies):
    split = load_task("scitail", copies["scitail"]).split("test")
    stored = pairs("scitail", "test")["label"]
    assert [("entails", "neutral")[split.label(row)] for row in range(len(split))] == list(stored)


def test_dropping_unlabelled_rows_keeps_the_other_labels(copies):
    split = load_task("snli", copies["snli"]).split("test")
    stored = [row for row in pairs("snli", "test") if row["label"] >= 0]
    assert [split.label(row) for row in range(len(split))] == [row["label"] for row in stored]
    assert [split[row]["premise"] for row in range(len(split))] == [row["premise"] for row in stored]


@pytest.mark.parametrize("name", ["dtd", "svhn", "rte", "sick"])
def test_the_layout_of_the_hubs_own_conversion(copies, name, tmp_path):
    other = load_task(name, copy(name, tmp_path / "viewer", viewer=True))
    task = load_task(name, copies[name])
    assert (other.sizes, other.classes) == (task.sizes, task.classes)
    assert [other.split("test").label(row) for row in range(5)] == [task.split("test").label(row) for row in range(5)]


@pytest.mark.parametrize("name", ["gtsrb", "svhn", "sick", "mnli"])
def test_the_hub_cache_gives_the_same_task_as_a_folder(copies, name, offline):
    cached(offline, name, copies[name])
    task, local = load_task(name), load_task(name, copies[name])
    assert (task.sizes, task.classes, task.templates) == (local.sizes, local.classes, local.templates)
    cached_split, local_split = task.split("test"), local.split("test")
    for row in range(3):
        ours, theirs = (
            {key: _bytes(value) for key, value in split[row].items()} for split in (cached_split, local_split)
        )
        assert ours == theirs
    assert (cached_split.source.dataset, cached_split.source.revision) == (PUBLISHED[name].repository, COMMIT)
    assert (local_split.source.dataset, local_split.source.revision) == (copies[name].name, None)


def _bytes(value):
    return value.tobytes() if isinstance(value, Image.Image) else value


def test_only_the_files_of_a_split_are_downloaded(copies, offline, monkeypatch):
    downloaded = []
    original = DatasetRepository.file
    monkeypatch.setattr(DatasetRepository, "file", lambda place, path: downloaded.append(path) or original(place, path))
    cached(offline, "dtd", copies["dtd"])
    assert len(load_task("dtd").split("test")) == 6
    assert set(downloaded) == {"data/test-00000-of-00001.parquet", "data/train-00000-of-00001.parquet"}
    cached(offline, "gtsrb", copies["gtsrb"])
    _ = load_task("gtsrb").sizes
    assert not any(corrupted in path for path in downloaded for corrupted in ("contrast", "spatter"))


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(TASKS)))
def test_without_network_the_error_names_the_repository_and_the_remedy(name):
    repository = PUBLISHED[name].repository
    with refused(KfacpackError, f"datasets/{repository}", "not in the cache", "HF_HUB_OFFLINE") as raised:
        load_task(name)
    assert f"hf download {repository} --repo-type dataset" in str(raised.value)
    assert str(raised.value).endswith("--local-dir DIR. Then pass that folder: --data DIR (data=DIR)")


def test_a_split_missing_from_the_cache_is_refused(tmp_path, offline):
    part = tmp_path / "part" / "data"
    part.mkdir(parents=True)
    pictures("dtd", "train").to_parquet(part / "train-00000-of-00001.parquet")
    cached(offline, "dtd", part.parent)
    task = load_task("dtd")
    assert len(task.split("train")) == 22
    with refused(KfacpackError, "unknown split 'test'", "train, validation", "Hub cannot be reached"):
        task.split("test")


@pytest.mark.parametrize(
    ("address", "repository", "revision", "config"),
    [
        ("hf://datasets/ylecun/mnist", "ylecun/mnist", None, None),
        ("hf://datasets/nyu-mll/glue/rte", "nyu-mll/glue", None, "rte"),
        ("hf://datasets/a/b@v1.0/c/", "a/b", "v1.0", "c"),
        ("hf://datasets/a/b@refs/convert/parquet/c", "a/b", "refs/convert/parquet", "c"),
        ("hf://datasets/a/b@refs%2Fpr%2F3", "a/b", "refs/pr/3", None),
    ],
)
def test_addresses(address, repository, revision, config):
    place, parsed_config = data_source_of(address)
    assert (place.source, place._revision, parsed_config) == (repository, revision, config)


@pytest.mark.parametrize("address", ["hf://someone/model", "hf://datasets/mnist", "hf://datasets/a/b/c/d"])
def test_invalid_addresses_are_refused(address):
    with refused(KfacpackError, address, "the address of a dataset", "hf://datasets/OWNER/REPO"):
        load_task("mine", address)


def test_mnist_is_complete_only_with_data(copies, offline):
    ours = load_task("mnist")
    assert ours.sizes["test"] == 1000
    (notice,) = ours.notices("ViT-B-32/openai")
    assert "its test split has 1,000 examples" in notice
    assert "--data hf://datasets/ylecun/mnist" in notice
    assert ours.notices("tiny") == ()
    assert load_task("digits").notices("ViT-B-32/openai") == ()
    cached(offline, "mnist", copies["mnist"])
    whole = load_task("mnist", "hf://datasets/ylecun/mnist")
    assert (whole.source, whole.classes) == ("ylecun/mnist", tuple("0123456789"))
    assert whole.notices("ViT-B-32/openai") == ()


def test_class_names_for_prompts(copies):
    assert load_task("resisc45", copies["resisc45"]).classes == ("airplane", "baseball diamond")
    assert load_task("stanford_cars", copies["stanford_cars"]).classes[1] == "Ram C/V Cargo Van Minivan 2012"
    eurosat, gtsrb, sun = (PUBLISHED[name].words for name in ("eurosat", "gtsrb", "sun397"))
    assert eurosat(["AnnualCrop", "annual crop land", "SeaLake"]) == ("annual crop land",) * 2 + ("lake or sea",)
    assert sun(["/c/church/outdoor", "airplane_cabin"]) == ("church outdoor", "airplane cabin")
    german, english = zip(*GTSRB_SIGNS, strict=True)
    assert len(set(english)) == 43
    assert gtsrb(german) == gtsrb(english) == english
    assert gtsrb(["00014", "00000"]) == gtsrb(["stopp", "20_kmh"]) == ("stop", english[0])


def test_imagenet_class_names_by_position_wordnet_id_and_name():
    whole = imagenet_words(["tench, Tinca tinca", *map(str, range(999))])
    assert (len(whole), whole[:2]) == (1000, ("tench", "goldfish"))
    assert imagenet_words(["n01443537", "n01440764"]) == ("goldfish", "tench")
    assert imagenet_words(["goldfish, Carassius auratus", "home_made"]) == ("goldfish", "home made")
    assert len(PUBLISHED["imagenet"].templates) == 80


def test_definitions_apply_to_image_folders(tmp_path):
    for split, name in (("train", "n01443537"), ("val", "n01443537"), ("train", "n01440764")):
        (tmp_path / split / name).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / split / name / "0.png")
    task = load_task("imagenet", tmp_path)
    assert (task.classes, task.sizes) == (("tench", "goldfish"), {"train": 2, "test": 1})


def renamed(name, folder, **names):
    folder.mkdir()
    for split in ("train", "test"):
        data = (pictures if name in VISION else pairs)(name, split)
        data.rename_columns(names).to_parquet(folder / f"{split}.parquet")
    return folder


def test_columns_of_other_copies(tmp_path):
    rte = renamed("rte", tmp_path / "rte", sentence1="premise", sentence2="hypothesis")
    split = load_task("rte", rte).split("train")
    assert list(split[0]) == ["sentence1", "sentence2"]
    odd = load_task("rte", renamed("rte", tmp_path / "odd", sentence1="one", sentence2="two"))
    assert list(odd.split("train")[0]) == ["one", "two"]
    note = "rte: the expected columns are missing; the input columns were found by type: one, two"
    assert odd.notices("tiny") == (note,)
    renamed_columns = load_task("rte", tmp_path / "odd", columns="sentence1=two,sentence2=one")
    stored = odd.split("train")[0]
    assert list(renamed_columns.split("train")[0].items()) == [
        ("sentence1", stored["two"]),
        ("sentence2", stored["one"]),
    ]
    assert renamed_columns.notices("tiny") == ()


def own(folder, **columns):
    folder.mkdir(exist_ok=True)
    datasets.Dataset.from_dict(columns).to_parquet(folder / "train.parquet")
    return folder


def test_labels_from_own_columns(tmp_path):
    texts = ["x", "y", "z", "w"]
    folder = own(tmp_path / "own", a=texts, b=texts[::-1], mood=["good", "bad", "good", "so so"], stars=[5, 1, 5, 10])
    task = load_task("mine", folder, columns="text=b,label=mood")
    assert task.classes == ("bad", "good", "so so")
    assert [task.split("train").label(row) for row in range(4)] == [1, 0, 1, 2]
    assert dict(task.split("train")[0]) == {"text": "w"}
    assert task.notices("tiny") == ("mine: the 3 classes are the values of column 'mood' in train: bad, good, so so",)
    task = load_task("mine", folder, columns="label=stars")
    assert task.classes == ("1", "5", "10")
    assert [task.split("train").label(row) for row in range(4)] == [1, 0, 1, 2]
    assert list(task.split("train")[0]) == ["a", "b", "mood"]
    other = datasets.Dataset.from_dict({"a": ["x"], "b": ["y"], "mood": ["new"], "stars": [1]})
    other.to_parquet(folder / "test.parquet")
    with refused(KfacpackError, "row 0: label new", "not a class"):
        load_task("mine", folder, columns="text=b,label=mood").split("test").label(0)


def test_images_stored_as_bytes(tmp_path):
    file = tmp_path / "red.png"
    Image.new("RGB", (3, 2), (200, 0, 0)).save(file)
    folder = own(tmp_path / "own", shot=[file.read_bytes()] * 2, kind=["a", "b"])
    split = load_task("mine", folder, columns="image=shot,label=kind").split("train")
    assert split[1]["image"].getpixel((0, 0)) == (200, 0, 0)


def plain(name, folder):
    """A copy without the Hub's types, as programs other than datasets write parquet."""
    copy(name, folder)
    for file in folder.rglob("*.parquet"):
        table = parquet.read_table(file)
        parquet.write_table(table.replace_schema_metadata(None), file)
    return folder


def card(name, folder, **more):
    """Writes a dataset card; its first entry is of another config."""
    features = (pictures if name in VISION else pairs)(name, "train").features._to_yaml_list()
    of = {"config_name": PUBLISHED[name].config or "default", "features": features, **more}
    other = {"config_name": "other", "features": [{"name": "x", "dtype": "string"}]}
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump({'dataset_info': [other, of]})}---\n# Data\n")


@pytest.mark.parametrize("name", ["dtd", "svhn", "rte", "snli"])
def test_column_types_from_the_card(copies, tmp_path, name):
    folder = plain(name, tmp_path / name)
    bare = load_task(name, folder)
    numbers = ", ".join(bare.classes)
    notice = f"{name}: the {len(bare.classes)} classes are the values of column 'label' in train: {numbers}"
    assert notice in bare.notices("tiny"), "integers are not class names"
    card(name, folder)
    task, whole = load_task(name, folder), load_task(name, copies[name])
    assert (task.classes, task.sizes) == (whole.classes, whole.sizes)
    assert task.notices("tiny") == whole.notices("tiny")
    for split in ("train", "test"):
        typed, reference = task.split(split), whole.split(split)
        assert [typed.label(row) for row in range(5)] == [reference.label(row) for row in range(5)]
        assert list(map(_bytes, typed[0].values())) == list(map(_bytes, reference[0].values()))


@pytest.mark.parametrize("text", ["", "---\nno: [\n---\n", "---\ndataset_info: 3\n---\n", "---\n- a\n---\n"])
def test_an_invalid_card_is_ignored(tmp_path, text):
    folder = plain("rte", tmp_path / "rte")
    (folder / "README.md").write_text(text)
    assert load_task("rte", folder).classes == ("0", "1")
    card("rte", folder, features=[{"name": "sentence1", "dtype": "string"}])
    assert load_task("rte", folder).classes == ("0", "1"), "the card describes other columns"


def test_a_column_named_label_is_not_an_input(tmp_path):
    task = load_task("mine", own(tmp_path / "texts", text=["x", "y"], label=["good", "bad"]))
    assert (task.classes, dict(task.split("train")[0])) == (("bad", "good"), {"text": "x"})
    task = load_task("mine", plain("dtd", tmp_path / "pictures"))
    assert task.classes == ("0", "1", "2")
    assert task.split("train")[0]["image"].size == (12, 9)


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ("image", "expected image=COLUMN,label=COLUMN"),
        ("a=b,a=c", "expected image=COLUMN,label=COLUMN"),
        ("image=x,text=y", "an image cannot be combined with other inputs"),
        ("text=nowhere", "no column 'nowhere'; available columns: a, score"),
        ("image=a", "column 'a' has type .*; expected a column of images"),
        ("text=score", "column 'score' has type .*; expected a column of strings"),
        ("text=a,label=score", "column 'score' has type .*; expected ClassLabel, strings or integers"),
    ],
)
def test_invalid_columns_are_refused(tmp_path, columns, problem):
    folder = own(tmp_path / "own", a=["x"], score=[0.5])
    with pytest.raises(KfacpackError, match=problem):
        load_task("mine", folder, columns=columns).split("train")


def test_columns_need_data(tmp_path):
    with refused(KfacpackError, "--columns", "--data DIR"):
        load_task("digits", columns="image=x")
    folder = own(tmp_path / "own", a=["x"], label=[None])
    with refused(KfacpackError, "label column 'label'", "ClassLabel"):
        _ = load_task("mine", folder, columns="text=a,label=label").classes


def test_layouts():
    train = "train-00000-of-00001.parquet"
    assert parquet_files([f"data/{train}", "README.md"], None, "here") == {"train": [f"data/{train}"]}
    hashed = "data/train-00000-of-00002-704ee106f89006a9.parquet"
    assert parquet_files([hashed], None, "here") == {"train": [hashed]}
    for inside in ("train/part-0.parquet", "data/train/x.parquet", f"train/{train}", f"one/train/{train}"):
        assert parquet_files([inside], None, "here") == {"train": [inside]}
    assert parquet_files([f"test/{train}"], "test", "here") == {"train": [f"test/{train}"]}, (
        "a config may have any name"
    )
    two = [f"rte/{train}", f"mnli/{train}"]
    assert parquet_files(two, "rte", "here") == {"train": [f"rte/{train}"]}
    with refused(KfacpackError, "here: the data has several configs", "mnli, rte", "--data here/mnli"):
        parquet_files(two, None, "here")
    with refused(KfacpackError, "no config 'qnli'", "mnli, rte", "--data here/mnli"):
        parquet_files(two, "qnli", "here")
    assert parquet_files(two[:1], None, "here") == {"train": [f"rte/{train}"]}
    assert parquet_files([train, *two], "qnli", "here") == {"train": [train]}
    assert parquet_files([".cache/x.txt"], None, "here") == {}
    # A config named by the user is never replaced by files without a config.
    assert parquet_files([train, *two], "rte", "here", exact=True) == {"train": [f"rte/{train}"]}
    assert parquet_files([train], "default", "here", exact=True) == {"train": [train]}
    with refused(KfacpackError, "no config 'qnli'", "mnli, rte"):
        parquet_files([train, *two], "qnli", "here", exact=True)
    with refused(KfacpackError, "no config 'qnli'", "no configs", "--data here"):
        parquet_files([train], "qnli", "here", exact=True)


def test_a_folder_with_several_configs_is_refused(tmp_path):
    for config in ("one", "two"):
        own(tmp_path / config, a=["x"])
    with refused(KfacpackError, "several configs", "one, two"):
        load_task("mine", tmp_path)
    assert load_task("mine", tmp_path / "two").sizes == {"train": 1}
