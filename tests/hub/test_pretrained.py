"""`from_pretrained`, `save_pretrained` and `push_to_hub` of curvatures and task vectors."""

from __future__ import annotations

import shutil

import pytest
import torch
from hub.repositories import card_problems
from kit import random_tau, refused

import kfacpack as kp
from kfacpack.errors import HubError
from kfacpack.hub import push as pretrained

# How huggingface_hub calls its own HTTP library.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

KINDS = {"curvature": ("one.kfac", "curvature.kfac"), "vector": ("one.safetensors", "vector.safetensors")}


def opened(artifacts, kind):
    """Returns a class, an artifact from the artifacts, and its default file name."""
    cls, load = {"curvature": (kp.Curvature, kp.load), "vector": (kp.TaskVector, kp.TaskVector.load)}[kind]
    name, default = KINDS[kind]
    return cls, load(artifacts / name), default


@pytest.fixture
def owner(hub, log_in):
    log_in("owner")
    return hub


@pytest.mark.parametrize("kind", KINDS)
def test_save_and_load_in_a_directory(artifacts, tmp_path, kind):
    cls, artifact, default = opened(artifacts, kind)
    folder = tmp_path / "new" / "folder"
    assert pretrained.save_pretrained(artifact, folder) == folder / default
    for source in (folder, str(folder), folder / default):
        assert pretrained.from_pretrained(cls, source).digest == artifact.digest
    other = pretrained.save_pretrained(artifact, folder, filename=f"mine{(folder / default).suffix}")
    assert pretrained.from_pretrained(cls, folder, filename=other.name).digest == artifact.digest


@pytest.mark.parametrize("kind", KINDS)
def test_push_and_load_from_the_hub(owner, artifacts, disconnect, kind):
    cls, artifact, default = opened(artifacts, kind)
    result = pretrained.push_to_hub(artifact, "owner/repo", license="apache-2.0", commit_message="First")
    files = owner.files("owner/repo")
    assert set(files) == {default, "README.md"}
    assert card_problems(files["README.md"].decode()) == []
    assert owner.repos["owner/repo"].messages == ["First"]
    assert result.commit == owner.repos["owner/repo"].branches["main"]
    for source in ("owner/repo", "hf://owner/repo", "owner/repo@main", f"hf://owner/repo/{default}"):
        assert pretrained.from_pretrained(cls, source).digest == artifact.digest
    assert pretrained.from_pretrained(cls, "owner/repo", result.commit).digest == artifact.digest
    disconnect()
    assert pretrained.from_pretrained(cls, "owner/repo").digest == artifact.digest


@pytest.mark.parametrize("kind", KINDS)
def test_the_methods_of_the_classes(owner, artifacts, tmp_path, kind):
    cls, artifact, default = opened(artifacts, kind)
    assert artifact.save_pretrained(tmp_path / "local") == tmp_path / "local" / default
    assert cls.from_pretrained(tmp_path / "local").digest == artifact.digest
    name = f"mine{(tmp_path / default).suffix}"
    artifact.push_to_hub("owner/repo", revision="next", private=True, filename=name)
    assert owner.repos["owner/repo"].private
    assert name in owner.files("owner/repo", "next")
    loaded = cls.from_pretrained("owner/repo", revision="next", filename=name)
    assert type(loaded) is cls
    assert loaded.digest == artifact.digest


def test_a_curvature_from_the_hub_computes_the_same(owner, artifacts):
    curvature = kp.load(artifacts / "one.kfac")
    curvature.push_to_hub("owner/repo")
    tau = random_tau(curvature)
    assert torch.equal(kp.Curvature.from_pretrained("owner/repo").quadratic(tau), curvature.quadratic(tau))


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_default_name_the_only_file_of_the_kind_is_loaded(owner, artifacts, tmp_path, kind):
    cls, artifact, _ = opened(artifacts, kind)
    names = [name for name, _ in KINDS.values()]
    for name in names:
        shutil.copy(artifacts / name, tmp_path / name)
    owner.put("owner/repo", {name: (artifacts / name).read_bytes() for name in names})
    assert pretrained.from_pretrained(cls, tmp_path).digest == artifact.digest
    assert pretrained.from_pretrained(cls, "owner/repo").digest == artifact.digest


@pytest.mark.parametrize("kind", KINDS)
def test_ambiguous_and_missing_files_are_refused(owner, artifacts, tmp_path, kind):
    cls, _, default = opened(artifacts, kind)
    names = {"curvature": ("one.kfac", "two.kfac"), "vector": ("one.safetensors", "two.safetensors")}[kind]
    for name in names:
        shutil.copy(artifacts / name, tmp_path / name)
    owner.put("owner/repo", {name: (artifacts / name).read_bytes() for name in names})
    for source in (tmp_path, "owner/repo"):
        with refused(kp.KfacpackError, source, *names, "filename"):
            pretrained.from_pretrained(cls, source)
    (tmp_path / "empty").mkdir()
    owner.put("owner/empty", {"notes.txt": b"none"})
    for source in (tmp_path / "empty", "owner/empty"):
        with refused(kp.KfacpackError, source, default):
            pretrained.from_pretrained(cls, source)


def test_contradictory_arguments_are_refused(owner, artifacts, tmp_path):
    def load(*arguments):
        return pretrained.from_pretrained(kp.Curvature, *arguments)

    with refused(kp.KfacpackError, "one.kfac", "filename"):
        load(artifacts / "one.kfac", None, "two.kfac")
    with refused(kp.KfacpackError, "hf://owner/repo/one.kfac", "filename"):
        load("hf://owner/repo/one.kfac", None, "two.kfac")
    with refused(kp.KfacpackError, "owner/repo@main", "'main'", "'next'"):
        load("owner/repo@main", "next")
    with refused(kp.KfacpackError, "revision", "'next'"):
        load(artifacts, "next")
    with refused(kp.KfacpackError, "no_such.kfac"):
        load("no_such.kfac")
    with refused(HubError, "owner/nothing"):
        load("owner/nothing")
    curvature = kp.load(artifacts / "one.kfac")
    with refused(kp.KfacpackError, "a/b.kfac"):
        curvature.save_pretrained(tmp_path, filename="a/b.kfac")
    (tmp_path / "file").write_text("")
    with refused(kp.KfacpackError, tmp_path / "file"):
        curvature.save_pretrained(tmp_path / "file")
