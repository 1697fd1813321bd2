"""Reading bundles and vectors from the Hub: whole files, headers, failures, private repositories, offline mode."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from huggingface_hub import constants
from kfacpack_cli.main import app
from kit import refused
from typer.testing import CliRunner

import kfacpack as kp

LARGE = "hf://owner/repo/large.kfac"

# A deprecated call inside huggingface_hub.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


def run(*arguments, code=0):
    result = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def hub_with_files(hub, artifacts):
    hub.put("owner/repo", {path.name: path.read_bytes() for path in artifacts.iterdir()})
    return hub


def cached(tmp_path, name="large.kfac"):
    return next((tmp_path / "cache").rglob(f"snapshots/*/{name}")).resolve()


def same(one: kp.Curvature, other: kp.Curvature) -> bool:
    return one.digest == other.digest


def touch(bundle: kp.Bundle) -> None:
    for name in bundle.tensors:
        bundle.bytes_of(name)


def test_bundles_and_vectors_are_read_by_reference(hub_with_files, artifacts):
    assert same(kp.load("hf://owner/repo@main/large.kfac"), kp.load(artifacts / "large.kfac"))
    ours, theirs = (
        kp.TaskVector.load("hf://owner/repo/one.safetensors"),
        kp.TaskVector.load(artifacts / "one.safetensors"),
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert str(kp.Bundle("hf://owner/repo/one.kfac").path) == "hf://owner/repo/one.kfac"
    assert not hub_with_files.leaked


def test_cached_files_are_not_downloaded_again(hub_with_files, artifacts):
    kp.load(LARGE)
    before = hub_with_files.served()
    kp.load(LARGE)
    assert hub_with_files.served() == before > (artifacts / "large.kfac").stat().st_size - 1


def test_revisions_may_be_branches_commits_and_pull_requests(hub_with_files, artifacts):
    first = hub_with_files.repos["owner/repo"].branches["main"]
    hub_with_files.put("owner/repo", {"t.kfac": (artifacts / "one.kfac").read_bytes()}, "refs/pr/1")
    commit = hub_with_files.put("owner/repo", {"t.kfac": (artifacts / "two.kfac").read_bytes()})
    assert same(kp.load("hf://owner/repo@refs%2Fpr%2F1/t.kfac"), kp.load(artifacts / "one.kfac"))
    assert same(kp.load(f"hf://owner/repo@{commit}/t.kfac"), kp.load(artifacts / "two.kfac"))
    with refused(kp.KfacpackError, "no such file", first, "--list", target=f"hf://owner/repo@{first}/t.kfac"):
        kp.load(f"hf://owner/repo@{first}/t.kfac")
    with refused(kp.KfacpackError, "no revision 'nowhere'", target="hf://owner/repo@nowhere/t.kfac"):
        kp.load("hf://owner/repo@nowhere/t.kfac")


def test_inspect_downloads_only_the_header(hub_with_files, artifacts):
    remote = json.loads(run("inspect", LARGE, "--json").stdout)
    local = json.loads(run("inspect", artifacts / "large.kfac", "--json").stdout)
    assert {**remote, "path": None} == {**local, "path": None}
    assert remote["path"] == LARGE
    raw = (artifacts / "large.kfac").read_bytes()
    header = 8 + int.from_bytes(raw[:8], "little")
    assert hub_with_files.served() == header < len(raw) / 20


def test_every_command_accepts_references(hub_with_files, artifacts, tmp_path):
    place = "hf://owner/repo@main"
    assert "passed" in run("verify", f"{place}/one.kfac").stdout
    merged = tmp_path / "merged.kfac"
    run("merge", f"{place}/one.kfac", f"{place}/two.kfac", "-o", merged)
    assert merged.read_bytes() == (artifacts / "both.kfac").read_bytes()
    run("compress", f"{place}/one.kfac", "int8", "-o", tmp_path / "small.kfac")
    run("add", f"{place}/one.safetensors", f"{place}/two.safetensors", "-o", tmp_path / "sum.safetensors")
    assert (tmp_path / "sum.safetensors").read_bytes() == (artifacts / "sum.safetensors").read_bytes()
    run("negate", f"{place}/one.safetensors", "-o", tmp_path / "negated.safetensors")
    run("measure", "spectra", f"{place}/one.kfac", "--json")
    run("export", f"{place}/one.kfac", "-o", tmp_path / "factors.safetensors")
    penalty = kp.Regularizer([f"{place}/one.kfac"], strength=1.0)
    assert penalty.tasks == ("one",)
    assert "write a file" in run("merge", merged, merged, "-o", "hf://owner/repo/m.kfac", code=2).stderr


def test_an_interrupted_download_is_resumed(hub_with_files, artifacts, monkeypatch):
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    # huggingface_hub writes a download to disk in pieces of this size.
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    hub_with_files.cut_after = [100_500, 50_500]
    assert same(kp.load(LARGE), kp.load(artifacts / "large.kfac"))
    served = [size for method, path, size in hub_with_files.log if method == "GET" and path.startswith("/large/")]
    size = (artifacts / "large.kfac").stat().st_size
    assert served == [100_500, 50_500, size - 100_000 - 50_000], "bytes that had arrived were downloaded again"


def test_a_corrupted_download_is_rejected_and_not_cached(hub_with_files, tmp_path):
    hub_with_files.altered = True
    with refused(kp.KfacpackError, "the download differs", "SHA-256", target=LARGE):
        kp.load(LARGE)
    hub_with_files.altered = False
    assert kp.load(LARGE).blocks


def test_a_truncated_cached_file_is_downloaded_again(hub_with_files, artifacts, tmp_path):
    kp.load(LARGE)
    path = cached(tmp_path)
    path.write_bytes(path.read_bytes()[:1000])
    assert same(kp.load(LARGE), kp.load(artifacts / "large.kfac"))


def test_a_corrupted_cached_file_is_reported_and_repaired_by_pull(hub_with_files, artifacts, tmp_path):
    kp.load(LARGE)
    path = cached(tmp_path)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with refused(kp.BundleError, "SHA-256", f"kfacpack pull {LARGE}", path=LARGE):
        touch(kp.Bundle(LARGE))
    run("pull", LARGE, "-o", tmp_path / "repaired.kfac")
    assert (tmp_path / "repaired.kfac").read_bytes() == (artifacts / "large.kfac").read_bytes()
    assert run("verify", LARGE).exit_code == 0


def test_a_private_repository_requires_a_login(hub_with_files, log_in):
    hub_with_files.repos["owner/repo"].private = True
    for _ in range(2):
        with refused(kp.KfacpackError, "owner/repo", "private", "hf auth login", target=LARGE):
            kp.load(LARGE)
        log_in("stranger")
    assert "hf_stranger" not in run("inspect", LARGE, code=2).output
    log_in("owner")
    assert kp.load(LARGE).blocks
    assert not hub_with_files.leaked, "the token went to another host"


@pytest.mark.parametrize(
    ("token", "gated", "status", "words"),
    [
        ("nobody", False, 0, "authentication"),
        ("stranger", True, 0, "owner/repo is gated"),
        (None, True, 0, "owner/repo is gated"),
        ("owner", False, 503, "status 503"),
        ("owner", False, 403, "permission denied for owner/repo"),
    ],
)
def test_errors_of_the_hub_are_reported_with_a_remedy(hub_with_files, log_in, token, gated, status, words, monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    if token:
        log_in(token)
    hub_with_files.repos["owner/repo"].gated, hub_with_files.broken = gated, status
    message = run("inspect", LARGE, code=2).stderr
    assert message.startswith(f"error: {LARGE}: ")
    assert words in message
    assert "hf auth login" in message or status == 503


def test_a_missing_file_is_reported_with_the_command_that_lists_files(hub_with_files):
    message = run("inspect", "hf://owner/repo/none.kfac", code=2).stderr
    assert "owner/repo has no such file" in message
    assert "kfacpack pull owner/repo --list" in message
    listed = json.loads(run("pull", "owner/repo", "--list", "--json").stdout)
    assert {"name": "one.kfac", "bytes": len(hub_with_files.files("owner/repo")["one.kfac"])} in listed["files"]
    for ignored in ("one.kfac", "--force"):
        assert "--list" in run("pull", "owner/repo", "--list", ignored, code=2).stderr


def test_the_cache_is_used_without_a_network(hub_with_files, artifacts, disconnect, monkeypatch):
    kp.load(LARGE)
    disconnect()
    assert same(kp.load(LARGE), kp.load(artifacts / "large.kfac"))
    assert run("inspect", LARGE).exit_code == 0
    assert "cannot be reached" in run("inspect", "hf://owner/repo/one.kfac", code=2).stderr
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert same(kp.load(LARGE), kp.load(artifacts / "large.kfac"))
    assert "HF_HUB_OFFLINE is set" in run("inspect", "hf://owner/repo/one.kfac", code=2).stderr


def test_the_cache_is_used_while_the_hub_is_busy(hub_with_files, artifacts, monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    kp.load(LARGE)
    hub_with_files.broken = 503
    assert same(kp.load(LARGE), kp.load(artifacts / "large.kfac"))


def test_the_command_line_uses_hf_endpoint(hub_with_files, tmp_path):
    environment = {**os.environ, "HF_ENDPOINT": hub_with_files.endpoint, "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "kfacpack_cli", "inspect", LARGE, "--json"]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(process.stdout)["path"] == LARGE
    assert process.stderr == ""
    assert 0 < hub_with_files.served(containing="/large/") < len(hub_with_files.files("owner/repo")["large.kfac"]) / 20
