"""Tasks from the Hub, read with huggingface_hub's own client: by name, by address, from the cache, and errors."""

from __future__ import annotations

import datasets
import pytest
from dataset_copies import copy, pairs
from hub.conftest import disconnect, hub, log_in  # noqa: F401 - fixtures
from huggingface_hub import hf_hub_download
from kfacpack_cli.main import app
from kit import refused
from models.conftest import bert_folder  # noqa: F401 - a fixture
from PIL import Image
from typer.testing import CliRunner

import kfacpack as kp
from kfacpack.tasks.registry import PUBLISHED, load_task

ONE_BLOCK = ("--model", "tiny", "--params", "visual.proj", "-q")
SHARD = "-00000-of-00001.parquet"

# How huggingface_hub calls its own HTTP library.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture(autouse=True)
def _quiet_writing():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def run(*arguments, code=0):
    result = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


def refusal(*arguments):
    message = run("estimate", *ONE_BLOCK, *arguments, code=2).stderr
    assert message.startswith("error: hf://datasets/")
    return message


def files_of(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def tensors(path):
    bundle = kp.Bundle(path)
    return {name: bytes(bundle.bytes_of(name)) for name in bundle.tensors}


@pytest.fixture
def dtd(hub, tmp_path):  # noqa: F811
    """A small tanganke/dtd on the Hub, and a folder with the same files."""
    folder = copy("dtd", tmp_path / "dtd")
    hub.put("datasets/tanganke/dtd", files_of(folder))
    return folder


@pytest.fixture
def glue(hub, tmp_path):  # noqa: F811
    """nyu-mll/glue, whose other configs must not be downloaded."""
    folder = copy("rte", tmp_path / "rte")
    other = {f"{config}/train{SHARD}": b"of another config" for config in ("ax", "mnli", "qnli", "stsb")}
    hub.put("datasets/nyu-mll/glue", {**files_of(folder), **other, "README.md": b"# GLUE\n"})
    return folder


@pytest.mark.parametrize("name", ["dtd", "rte"])
def test_a_published_task_is_downloaded_by_name(name, request, hub, disconnect, tmp_path):  # noqa: F811
    folder = request.getfixturevalue("dtd" if name == "dtd" else "glue")
    model = ONE_BLOCK
    if name == "rte":
        text = request.getfixturevalue("bert_folder")
        model = ("--model", f"hf:{text}", "--params", "encoder.layer.1.output.dense.*", "-q")
    estimate = ("estimate", "--task", name, *model)
    run(*estimate, "-o", tmp_path / "hub.kfac")
    source = kp.Bundle(tmp_path / "hub.kfac").manifest.source
    repository = PUBLISHED[name].repository
    commit = hub.repos[f"datasets/{repository}"].branches["main"]
    assert (source.task, source.dataset, source.revision, source.split) == (name, repository, commit, "train")
    assert (source.examples, source.dataset_size, source.license) == (22, 22, PUBLISHED[name].license)
    inside = "data" if name == "dtd" else "rte"
    assert hub.fetched() == [f"{inside}/train{SHARD}"], "only the requested split, once"

    run(*estimate, "--data", folder, "-o", tmp_path / "folder.kfac")
    assert tensors(tmp_path / "hub.kfac") == tensors(tmp_path / "folder.kfac")

    run(*estimate, "-o", tmp_path / "again.kfac")
    assert len(hub.fetched()) == 1
    requests = len(hub.log)
    disconnect()
    run(*estimate, "-o", tmp_path / "cache.kfac")
    assert (tmp_path / "cache.kfac").read_bytes() == (tmp_path / "hub.kfac").read_bytes()
    assert len(hub.log) == requests
    assert "unknown split 'test'; available splits: train, validation. The Hub cannot be reached" in refusal(
        "--task", name, "--split", "test", "-o", tmp_path / "x.kfac"
    )


def test_files_are_read_from_the_listed_commit(hub, dtd):  # noqa: F811
    first = hub.repos["datasets/tanganke/dtd"].branches["main"]
    task = load_task("dtd")
    later = hub.put("datasets/tanganke/dtd", {f"data/train{SHARD}": b"other bytes"})
    del hub.repos["datasets/tanganke/dtd"].commits[later][f"data/test{SHARD}"]
    for name, size in (("train", 22), ("test", 6)):
        split = task.split(name)
        assert (len(split), split.source.revision) == (size, first)


def own_pictures(folder, colour):
    folder.mkdir()
    Image.new("RGB", (9, 9), colour).save(folder / "0.png")
    shots = [(folder / "0.png").read_bytes()] * 12
    data = {"shot": shots, "caption": ["a"] * 12, "kind": ["dark", "light"] * 6}
    datasets.Dataset.from_dict(data).to_parquet(folder / "train.parquet")
    return (folder / "train.parquet").read_bytes()


@pytest.mark.parametrize("revision", ["v1.0", "refs/pr/3"])
def test_a_private_repository_at_a_revision(hub, log_in, disconnect, tmp_path, revision):  # noqa: F811
    hub.put("datasets/owner/mine", {f"data/train{SHARD}": own_pictures(tmp_path / "main", "red")}, private=True)
    files = {f"data/train{SHARD}": own_pictures(tmp_path / "requested", "blue")}
    commit = hub.put("datasets/owner/mine", files, revision)
    log_in("owner")
    address = f"hf://datasets/owner/mine@{revision}"
    own = ("--columns", "image=shot,label=kind")
    estimate = ("estimate", *ONE_BLOCK, "--task", "mine", *own, "--data")
    run(*estimate, address, "-o", tmp_path / "hub.kfac")
    source = kp.Bundle(tmp_path / "hub.kfac").manifest.source
    assert (source.task, source.dataset, source.revision) == ("mine", "owner/mine", commit)
    run(*estimate, tmp_path / "requested", "-o", tmp_path / "folder.kfac")
    assert tensors(tmp_path / "hub.kfac") == tensors(tmp_path / "folder.kfac")
    assert not hub.leaked, "the token went to another host"
    disconnect()
    run(*estimate, address, "-o", tmp_path / "cache.kfac")
    assert (tmp_path / "cache.kfac").read_bytes() == (tmp_path / "hub.kfac").read_bytes()
    run(*estimate, f"hf://datasets/owner/mine@{commit}", "-o", tmp_path / "cache.kfac")
    assert (tmp_path / "cache.kfac").read_bytes() == (tmp_path / "hub.kfac").read_bytes()
    assert "cannot be reached" in refusal("--task", "mine", *own, "--data", "hf://datasets/owner/mine"), "not fetched"


def test_a_config_in_the_address(hub, glue):  # noqa: F811
    task = load_task("mine", "hf://datasets/nyu-mll/glue/rte", columns="text=sentence1,label=label")
    assert dict(task.split("train")[0]) == {"text": pairs("rte", "train")[0]["sentence1"]}
    message = refusal("--task", "mine", "--data", "hf://datasets/nyu-mll/glue")
    assert "ax, mnli, qnli, rte, stsb" in message
    assert "--data hf://datasets/nyu-mll/glue/ax" in message


@pytest.mark.parametrize("user", [None, "stranger"])
@pytest.mark.parametrize(
    ("about", "problem"),
    [
        (None, "the repository tanganke/dtd does not exist, or it is private"),
        ({"private": True}, "the repository tanganke/dtd does not exist, or it is private"),
        ({"gated": True}, "tanganke/dtd is gated, and you have no access to it. Request access at http://"),
    ],
)
def test_a_refusal_of_the_hub_is_reported_with_a_remedy(hub, log_in, tmp_path, user, about, problem):  # noqa: F811
    if about:
        hub.put("datasets/tanganke/dtd", files_of(copy("dtd", tmp_path / "dtd")), **about)
    if user:
        log_in(user)
    for named in ((), ("--data", "hf://datasets/tanganke/dtd")):
        message = refusal("--task", "dtd", *named)
        assert problem in message
        assert "hf auth login" in message
        assert "--data DIR" in message


def test_a_gated_task_needs_access(hub, log_in, tmp_path):  # noqa: F811
    files = files_of(copy("imagenet", tmp_path / "imagenet"))
    hub.put("datasets/ILSVRC/imagenet-1k", files, gated=True)
    with refused(kp.KfacpackError, "gated", "/datasets/ILSVRC/imagenet-1k", "hf auth login"):
        load_task("imagenet").split("train")
    hub.repos["datasets/owner/imagenet"] = hub.repos["datasets/ILSVRC/imagenet-1k"]
    log_in("owner")
    assert load_task("imagenet", "hf://datasets/owner/imagenet").sizes["train"] == 22


def test_invalid_tokens_and_revisions_are_refused(hub, dtd, log_in):  # noqa: F811
    message = refusal("--task", "dtd", "--data", "hf://datasets/tanganke/dtd@nowhere")
    assert "tanganke/dtd has no revision 'nowhere'" in message
    log_in("nobody")
    message = refusal("--task", "dtd")
    assert "requires authentication" in message
    assert "--data DIR" in message


@pytest.mark.parametrize(("name", "part"), [("dtd", ""), ("rte", " --include 'rte/*'")])
def test_without_a_network_and_a_cache(hub, disconnect, name, part):  # noqa: F811
    disconnect()
    repository = PUBLISHED[name].repository
    message = refusal("--task", name)
    assert f"hf://datasets/{repository}: the Hub (http://127.0.0.1:" in message
    assert "cannot be reached: " in message
    assert f"hf download {repository} --repo-type dataset{part} --local-dir DIR" in message
    assert "--data DIR" in message


def test_a_cached_card_without_data_is_not_used(hub, dtd, disconnect):  # noqa: F811
    hub.put("datasets/tanganke/dtd", {"README.md": b"# Textures\n"})
    hf_hub_download("tanganke/dtd", "README.md", repo_type="dataset")
    disconnect()
    assert "cannot be reached: " in refusal("--task", "dtd")


def test_other_formats_are_read_from_the_hubs_parquet_conversion(hub, disconnect, tmp_path):  # noqa: F811
    hub.put("datasets/someone/csv", {"train.csv": b"a,b\n", "README.md": b"# Numbers\n"})
    with refused(kp.KfacpackError, "no parquet files", "no parquet copy", "--data DIR"):
        load_task("dtd", "hf://datasets/someone/csv")
    converted = files_of(copy("dtd", tmp_path / "converted", viewer=True))
    commit = hub.put("datasets/someone/csv", converted, "refs/convert/parquet")
    for prepare in (lambda: None, disconnect):
        prepare()
        split = load_task("dtd", "hf://datasets/someone/csv").split("train")
        assert (len(split), split.source.dataset, split.source.revision) == (22, "someone/csv", commit)
