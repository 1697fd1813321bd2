"""Bundles and vectors read from the Hub: whole, by the header, cut off, altered, private, without a network."""

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


# How huggingface_hub calls its own HTTP library.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


def run(*arguments, code=0):
    done = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done


@pytest.fixture
def stocked(hub, shelf):
    hub.put("owner/repo", {path.name: path.read_bytes() for path in shelf.iterdir()})
    return hub


def cached(tmp_path, name="large.kfac"):
    return next((tmp_path / "cache").rglob(f"snapshots/*/{name}")).resolve()


def same(one: kp.Curvature, other: kp.Curvature) -> bool:
    return one.digest == other.digest


def touch(bundle: kp.Bundle) -> None:
    for name in bundle.tensors:
        bundle.bytes_of(name)


def test_a_bundle_and_a_vector_are_read_by_name(stocked, shelf):
    assert same(kp.load("hf://owner/repo@main/large.kfac"), kp.load(shelf / "large.kfac"))
    ours, theirs = kp.TaskVector.load("hf://owner/repo/one.safetensors"), kp.TaskVector.load(shelf / "one.safetensors")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert str(kp.Bundle("hf://owner/repo/one.kfac").path) == "hf://owner/repo/one.kfac"
    assert not stocked.leaked


def test_a_second_look_fetches_nothing(stocked, shelf):
    kp.load(LARGE)
    before = stocked.served()
    kp.load(LARGE)
    assert stocked.served() == before > (shelf / "large.kfac").stat().st_size - 1


def test_revisions_are_branches_tags_commits_and_pull_requests(stocked, shelf):
    first = stocked.repos["owner/repo"].branches["main"]
    stocked.put("owner/repo", {"t.kfac": (shelf / "one.kfac").read_bytes()}, "refs/pr/1")
    commit = stocked.put("owner/repo", {"t.kfac": (shelf / "two.kfac").read_bytes()})
    assert same(kp.load("hf://owner/repo@refs%2Fpr%2F1/t.kfac"), kp.load(shelf / "one.kfac"))
    assert same(kp.load(f"hf://owner/repo@{commit}/t.kfac"), kp.load(shelf / "two.kfac"))
    with refused(kp.KfacpackError):
        kp.load(f"hf://owner/repo@{first}/t.kfac")
    with refused(kp.KfacpackError, "nowhere"):
        kp.load("hf://owner/repo@nowhere/t.kfac")


def test_inspect_fetches_the_header_alone(stocked, shelf):
    told = json.loads(run("inspect", LARGE, "--json").stdout)
    local = json.loads(run("inspect", shelf / "large.kfac", "--json").stdout)
    assert {**told, "path": None} == {**local, "path": None}
    assert told["path"] == LARGE
    raw = (shelf / "large.kfac").read_bytes()
    header = 8 + int.from_bytes(raw[:8], "little")
    assert stocked.served() == header < len(raw) / 20


def test_every_command_takes_references(stocked, shelf, tmp_path):
    place = "hf://owner/repo@main"
    assert "holds" in run("verify", f"{place}/one.kfac").stdout
    merged = tmp_path / "merged.kfac"
    run("merge", f"{place}/one.kfac", f"{place}/two.kfac", "-o", merged)
    assert merged.read_bytes() == (shelf / "both.kfac").read_bytes()
    run("compress", f"{place}/one.kfac", "int8", "-o", tmp_path / "small.kfac")
    run("add", f"{place}/one.safetensors", f"{place}/two.safetensors", "-o", tmp_path / "sum.safetensors")
    assert (tmp_path / "sum.safetensors").read_bytes() == (shelf / "sum.safetensors").read_bytes()
    run("negate", f"{place}/one.safetensors", "-o", tmp_path / "negated.safetensors")
    run("measure", "spectra", f"{place}/one.kfac", "--json")
    run("export", f"{place}/one.kfac", "-o", tmp_path / "factors.safetensors")
    penalty = kp.Regularizer([f"{place}/one.kfac"], strength=1.0)
    assert penalty.tasks == ("one",)
    assert "write a file" in run("merge", merged, merged, "-o", "hf://owner/repo/m.kfac", code=2).stderr


def test_a_cut_connection_is_taken_up_again(stocked, shelf, monkeypatch):
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    # huggingface_hub keeps what has arrived in pieces of this size.
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    stocked.cut_after = [100_500, 50_500]
    assert same(kp.load(LARGE), kp.load(shelf / "large.kfac"))
    served = [size for method, path, size in stocked.log if method == "GET" and path.startswith("/large/")]
    size = (shelf / "large.kfac").stat().st_size
    assert served == [100_500, 50_500, size - 100_000 - 50_000], "what had arrived was not fetched again"


def test_bytes_that_were_altered_on_the_way_are_refused_and_not_kept(stocked, tmp_path):
    stocked.altered = True
    with refused(kp.KfacpackError, "SHA-256"):
        kp.load(LARGE)
    stocked.altered = False
    assert kp.load(LARGE).blocks


def test_a_truncated_copy_in_the_cache_is_fetched_anew(stocked, shelf, tmp_path):
    kp.load(LARGE)
    path = cached(tmp_path)
    path.write_bytes(path.read_bytes()[:1000])
    assert same(kp.load(LARGE), kp.load(shelf / "large.kfac"))


def test_an_altered_copy_in_the_cache_is_told_and_pull_heals_it(stocked, shelf, tmp_path):
    kp.load(LARGE)
    path = cached(tmp_path)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with refused(kp.BundleError, LARGE):
        touch(kp.Bundle(LARGE))
    run("pull", LARGE, "-o", tmp_path / "healed.kfac")
    assert (tmp_path / "healed.kfac").read_bytes() == (shelf / "large.kfac").read_bytes()
    assert run("verify", LARGE).exit_code == 0


def test_a_private_repository_needs_a_log_in(stocked, log_in):
    stocked.repos["owner/repo"].private = True
    for _ in range(2):
        with refused(kp.KfacpackError):
            kp.load(LARGE)
        log_in("stranger")
    assert "hf_stranger" not in run("inspect", LARGE, code=2).output
    log_in("owner")
    assert kp.load(LARGE).blocks
    assert not stocked.leaked, "the token went to another host"


@pytest.mark.parametrize(
    ("token", "gated", "status", "words"),
    [
        ("nobody", False, 0, "does not know who you are"),
        ("stranger", True, 0, "owner/repo is gated"),
        (None, True, 0, "owner/repo is gated"),
        ("owner", False, 503, "answers 503"),
        ("owner", False, 403, "may not do this with owner/repo"),
    ],
)
def test_refusals_are_told_with_what_to_do(stocked, log_in, token, gated, status, words, monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    if token:
        log_in(token)
    stocked.repos["owner/repo"].gated, stocked.broken = gated, status
    told = run("inspect", LARGE, code=2).stderr
    assert told.startswith(f"error: {LARGE}: ")
    assert words in told
    assert "hf auth login" in told or status == 503


def test_a_missing_file_is_told_with_what_there_is(stocked):
    told = run("inspect", "hf://owner/repo/none.kfac", code=2).stderr
    assert "owner/repo has no such file" in told
    listed = json.loads(run("pull", "owner/repo", "--list", "--json").stdout)
    assert {"name": "one.kfac", "bytes": len(stocked.files("owner/repo")["one.kfac"])} in listed["files"]


def test_without_a_network_the_cache_serves(stocked, shelf, unplug, monkeypatch):
    kp.load(LARGE)
    unplug()
    assert same(kp.load(LARGE), kp.load(shelf / "large.kfac"))
    assert run("inspect", LARGE).exit_code == 0
    assert "cannot be reached" in run("inspect", "hf://owner/repo/one.kfac", code=2).stderr
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert same(kp.load(LARGE), kp.load(shelf / "large.kfac"))
    assert "HF_HUB_OFFLINE is set" in run("inspect", "hf://owner/repo/one.kfac", code=2).stderr


def test_while_the_hub_is_too_busy_the_cache_serves(stocked, shelf, monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    kp.load(LARGE)
    stocked.broken = 503
    assert same(kp.load(LARGE), kp.load(shelf / "large.kfac"))


def test_the_command_asks_the_hub_that_the_environment_names(stocked, tmp_path):
    environment = {**os.environ, "HF_ENDPOINT": stocked.endpoint, "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "kfacpack_cli", "inspect", LARGE, "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["path"] == LARGE
    assert done.stderr == ""
    assert 0 < stocked.served(containing="/large/") < len(stocked.files("owner/repo")["large.kfac"]) / 20
