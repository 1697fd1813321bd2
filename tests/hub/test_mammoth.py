"""Imported factors equal kfacpack's own estimate; invalid files are rejected and leave nothing behind."""

from __future__ import annotations

import json
import shutil
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hub.conftest import disconnect, hub  # noqa: F401 - fixtures
from hub.published import factors_of, store
from kfacpack_cli.main import app
from kit import refused
from models.conftest import tiny_clip  # noqa: F401 - a fixture
from safetensors.torch import save_file
from typer.testing import CliRunner

import kfacpack as kp
from kfacpack.estimation.options import Probes
from kfacpack.hub.importer import SINGLE_TENSOR, HubFolder, UnpickledTensors, published_folder
from kfacpack.models.families import load_model

PREFIX = "seq-8vision_task_1"
PARTS = ("aaT", "ggT", "ffT", "num_aaT", "num_ggT")
SIZES = (3, 2)


def pictures():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, 3, 32, 32, generator=generator) for size in SIZES]


@pytest.fixture(scope="module")
def model(tiny_clip):  # noqa: F811
    return load_model(tiny_clip, weights="random", dtype=torch.float32)


@pytest.fixture(scope="module")
def exact(model):
    """Factors computed with all C directions."""
    width = model.function.width
    units = [unit.expand(1, width) for unit in torch.eye(width, dtype=torch.float64)]
    return factors_of(model.module, pictures(), lambda number, f: units)


@pytest.fixture
def folder(exact, tmp_path):
    path = tmp_path / "published"
    path.mkdir()
    store(path, PREFIX, *exact)
    return path


@pytest.fixture
def in_process(monkeypatch):
    """Reads files in this process, which is faster, for tests of their content."""

    @contextmanager
    def read(files, scratch):
        with TemporaryDirectory() as folder:
            tensors = {}
            for key, path in files.items():
                content = torch.load(path, weights_only=True)
                named = content if isinstance(content, dict) else {SINGLE_TENSOR: content}
                save_file({name: tensor.contiguous() for name, tensor in named.items()}, f"{folder}/{key}")
                tensors[key] = UnpickledTensors(path, Path(folder) / key)
            yield tensors

    monkeypatch.setattr("kfacpack.hub.mammoth.read_pickle", read)


def in_float64(tiny_clip):  # noqa: F811
    return load_model(tiny_clip, weights="random", dtype=torch.float64)


def estimated(model, **options):
    wanted = [name for name in model.module.state_dict() if name.startswith("visual.")]
    frozen = {"visual.conv1.weight", "visual.positional_embedding"}
    return kp.estimate(
        model.module,
        [batch.double() for batch in pictures()],
        forward=model.forward,
        params=[name for name in wanted if name not in frozen],
        **options,
    )


def assert_same(result, expected):
    """Every matrix of every block, to 1e-5 of its size."""
    assert [block.name for block in result.blocks] == [block.name for block in expected.blocks]
    for one, other in zip(result.blocks, expected.blocks, strict=True):
        assert (one.join, one.operation) == (other.join, other.operation)
        pairs = zip(one.structure.matrices(), other.structure.matrices(), strict=True)
        for (role, ours), (same_role, theirs) in pairs:
            assert role == same_role
            gap = (ours.dense(torch.float64) - theirs.dense(torch.float64)).norm()
            assert gap <= 1e-5 * theirs.dense(torch.float64).norm(), (one.name, role)
            assert (ours.examples, ours.positions) == (theirs.examples, theirs.positions)


def test_exact_factors_equal_the_estimate(folder, model, tiny_clip, tmp_path):  # noqa: F811
    imported_bundle = kp.import_mammoth(folder, model, tmp_path / "dtd.kfac", fisher="exact", dataset_size=7)
    curvature = kp.load(tmp_path / "dtd.kfac")
    assert_same(curvature, estimated(in_float64(tiny_clip), fisher="exact"))
    assert (imported_bundle.task, imported_bundle.examples, imported_bundle.positions) == ("dtd", sum(SIZES), 17)
    assert imported_bundle.weights_compared
    assert dict(imported_bundle.left_out).keys() == {"visual.conv1.weight", "visual.positional_embedding"}
    about = curvature.about
    assert (about.source.task, about.source.examples, about.source.dataset_size) == ("dtd", sum(SIZES), 7)
    assert (about.estimate.fisher, about.scaling, about.function) == ("exact", kp.EXPAND, model.function)
    assert kp.verify(tmp_path / "dtd.kfac", model.module).holds


def test_random_directions_are_divided_by_their_number(model, tiny_clip, tmp_path):  # noqa: F811
    probes, starts = Probes("mc", "gaussian", 3, 5), (0, SIZES[0])

    def directions(number, f):
        return probes.draw([(starts[number] + k, 0) for k in range(len(f))], f)

    store(tmp_path, "own_task_0", *factors_of(model.module, pictures(), directions), dtype=torch.float64)
    kp.import_mammoth(tmp_path, model, tmp_path / "own.kfac", samples=3)
    curvature = kp.load(tmp_path / "own.kfac")
    assert_same(curvature, estimated(in_float64(tiny_clip), probe="gaussian", samples=3, seed=5))
    estimate = curvature.about.estimate
    assert (estimate.probe, estimate.probes, estimate.accumulation_dtype) == ("gaussian", 3, "float64")
    assert curvature.about.source.task == "own_task_0"


def import_fails(source, model, tmp_path, *facts, **options):
    """Checks that the import raises an error that mentions each fact, and that it leaves no files behind."""
    before = sorted(tmp_path.iterdir())
    with refused(kp.KfacpackError, *facts):
        kp.import_mammoth(source, model, tmp_path / "imported.kfac", **{"fisher": "exact", **options})
    assert sorted(tmp_path.iterdir()) == before


def changed(folder, part, change):
    path = folder / f"{PREFIX}_{part}.pt"
    sums = torch.load(path, weights_only=True)
    torch.save(change(sums), path)


LAYER = "transformer.resblocks.1.mlp.c_fc.weight"


def with_layer(change):
    return lambda sums: {**sums, LAYER: change(sums[LAYER])}


CHANGES = {
    "no layer": (
        "ggT",
        lambda sums: {name: matrix for name, matrix in sums.items() if name != LAYER},
        (LAYER, "no factors", "_ggT.pt"),
    ),
    "unknown layer": ("ffT", lambda sums: {**sums, "more": torch.eye(2)}, ("'more'", "ViT-tiny-test")),
    "shape": ("aaT", with_layer(lambda m: torch.eye(32)), (LAYER, "[32, 32]", "[33, 33]")),
    "whole numbers": ("ggT", with_layer(lambda m: m.long()), (LAYER, "I64")),
    "not finite": ("ggT", with_layer(lambda m: m * torch.nan), (LAYER, "NaN")),
    "not symmetric": ("ggT", with_layer(torch.triu), (LAYER, "not symmetric")),
    "divided": ("aaT", with_layer(lambda m: m / 5), (LAYER, "number of examples, 5", "divided")),
    "other weights": (
        "ffT",
        lambda sums: {**sums, "ln_post.bias": 1.1 * sums["ln_post.bias"]},
        ("not computed at the weights", "_ffT.pt"),
    ),
    "counts differ": ("num_ggT", lambda count: count + 1, ("records 6 examples for ggT", "aaT records 5")),
    "no examples": ("num_aaT", lambda count: count * 0, ("0 examples",)),
    "a dictionary of counts": ("num_aaT", lambda count: {"n": count}, ("is not a single number",)),
}


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.usefixtures("in_process")
def test_invalid_content_is_rejected(kind, folder, model, tmp_path):
    part, change, facts = CHANGES[kind]
    changed(folder, part, change)
    import_fails(folder, model, tmp_path, *facts)


@pytest.mark.parametrize("part", ["aaT", "num_ggT"])
def test_a_missing_file_is_named(part, folder, model, tmp_path):
    (folder / f"{PREFIX}_{part}.pt").unlink()
    import_fails(folder, model, tmp_path, f"'{PREFIX}_{part}.pt' is missing")


def test_truncated_and_other_files_are_rejected(folder, model, tmp_path):
    path = folder / f"{PREFIX}_ggT.pt"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    import_fails(folder, model, tmp_path, path, "download it again")
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    import_fails(folder, model, tmp_path, path, "Git LFS pointer")
    path.write_bytes(b"")
    import_fails(folder, model, tmp_path, path, "is empty")


@pytest.mark.usefixtures("in_process")
def test_another_model_is_refused(folder, tmp_path, model):
    trunk = load_model("timm:vit_tiny_patch16_224", weights="random")
    import_fails(folder, trunk, tmp_path, trunk.name, "no vision tower")
    import_fails(folder, load_model("tiny"), tmp_path, "no factors", "of tiny")
    other = load_model(model.name, weights="random", seed=1)
    import_fails(folder, other, tmp_path, "not computed at the weights", model.name)


def test_the_number_of_directions_is_required(folder, model, tmp_path):
    import_fails(folder, model, tmp_path, "samples", fisher="mc")
    import_fails(folder, model, tmp_path, "fisher 'exact'", "samples", samples=2)


@pytest.mark.usefixtures("in_process")
def test_one_of_several_tasks_is_chosen(folder, model, tmp_path):
    for part in PARTS:
        shutil.copy(folder / f"{PREFIX}_{part}.pt", folder / f"seq-8vision_task_7_{part}.pt")
    (folder / "notes.txt").write_text("hello")
    available = "seq-8vision_task_1 (dtd), seq-8vision_task_7 (svhn)"
    import_fails(folder, model, tmp_path, available, "files")
    import_fails(folder, model, tmp_path, "prefix 'x'", available, files="x")
    imported_bundle = kp.import_mammoth(folder, model, tmp_path / "imported.kfac", task="svhn", fisher="exact")
    assert imported_bundle.files[0] == "seq-8vision_task_7_aaT.pt"
    left = dict(imported_bundle.left_out)
    assert left["notes.txt"] == "not a file with factors"
    assert left["seq-8vision_task_1_ggT.pt"] == "belongs to dtd"
    import_fails(tmp_path, model, tmp_path, tmp_path, "seq-8vision_task_0_aaT.pt")
    import_fails(tmp_path / "nowhere", model, tmp_path, tmp_path / "nowhere", "folder")
    import_fails("~nosuch/x", model, tmp_path, "~nosuch/x: ", "home directory")


@pytest.mark.usefixtures("in_process")
def test_some_parameters_only(folder, model, tmp_path):
    imported_bundle = kp.import_mammoth(folder, model, tmp_path / "imported.kfac", fisher="exact", params=["*.mlp.*"])
    assert imported_bundle.blocks == 4
    assert dict(imported_bundle.left_out)["visual.proj"] == "not selected"
    import_fails(folder, model, tmp_path, ".c_fc.weight'", ".c_fc.bias'", "params", params=["*.c_fc.weight"])
    import_fails(folder, model, tmp_path, "params logit_scale", "no factors", params=["logit_scale"])


def test_places_on_the_hub():
    assert published_folder("hf://a/b") == HubFolder("a/b", "", None)
    assert published_folder("hf://a/b/c/d@main") == HubFolder("a/b", "c/d", "main")
    assert published_folder("hf://a/b@v1/c") == HubFolder("a/b", "c", "v1")
    assert published_folder("hf://a/b@v1") == HubFolder("a/b", "", "v1")
    with refused(kp.KfacpackError, "hf://a: ", "hf://owner/repo"):
        published_folder("hf://a")


def put(server, folder, branch="main"):
    """Publishes the files like the authors do, with other tasks and folders in the repository."""
    files = {f"vitb16/kfac/{file.name}": file.read_bytes() for file in folder.iterdir()}
    other = {f"vitb16/kfac/{PREFIX[:-1]}7_{part}.pt": b"of svhn" for part in PARTS}
    other |= {"vitb16/kfac/deep/x_task_0_aaT.pt": b"", "vitb16/ewc/x_task_0_aaT.pt": b"", "README.md": b"# TAK\n"}
    return server.put("owner/TAK", {**files, **other}, branch)


def imported(place, model, path, *more, code=0):
    arguments = ["import", "mammoth", place, "--model", model.name, "--weights", "random", "--fisher", "exact"]
    result = CliRunner().invoke(app, [*map(str, arguments), "-o", str(path), *more], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


def test_from_the_hub_as_from_the_folder(folder, model, tmp_path, hub, disconnect):  # noqa: F811
    commit = put(hub, folder)
    place = "hf://owner/TAK/vitb16/kfac"
    stdout = imported(place, model, tmp_path / "hub.kfac", "--task", "dtd", "--json").stdout
    assert {"what": "seq-8vision_task_7_ffT.pt", "why": "belongs to svhn"} in json.loads(stdout)["left_out"]
    assert sorted(hub.fetched()) == sorted(f"vitb16/kfac/{PREFIX}_{part}.pt" for part in PARTS), "and no others"

    imported(folder, model, tmp_path / "folder.kfac", "--task", "dtd")
    ours, theirs = (kp.Bundle(tmp_path / name) for name in ("hub.kfac", "folder.kfac"))
    assert {name: bytes(ours.bytes_of(name)) for name in ours.tensors} == {
        name: bytes(theirs.bytes_of(name)) for name in theirs.tensors
    }
    assert ours.manifest.source == theirs.manifest.source.model_copy(update={"revision": commit})
    assert ours.manifest.blocks == theirs.manifest.blocks

    disconnect()
    imported(place, model, tmp_path / "cache.kfac", "--task", "dtd")
    assert (tmp_path / "cache.kfac").read_bytes() == (tmp_path / "hub.kfac").read_bytes()
    stderr = imported(place, model, tmp_path / "other.kfac", "--task", "svhn", code=2).stderr
    for fact in (f"{place} (cached files only", "no files for the task svhn"):
        assert fact in stderr
    assert not (tmp_path / "other.kfac").exists(), "the cached files belong to another task"


@pytest.mark.usefixtures("in_process")
def test_a_revision_of_the_hub(folder, model, tmp_path, hub, disconnect):  # noqa: F811
    hub.put("owner/TAK", {"README.md": b"# TAK\n"})
    commit = put(hub, folder, "v1")
    for prepare in (lambda: None, disconnect):
        prepare()
        for place in ("TAK@v1/vitb16/kfac", "TAK/vitb16/kfac@v1", f"TAK@{commit}/vitb16/kfac"):
            kp.import_mammoth(f"hf://owner/{place}", model, tmp_path / "imported.kfac", files=PREFIX, fisher="exact")
            assert kp.Bundle(tmp_path / "imported.kfac").manifest.source.revision == commit
    place = "hf://owner/TAK/vitb16/kfac"
    import_fails(place, model, tmp_path, f"{place}: the Hub (http", "cannot be reached")


@pytest.mark.parametrize("about", [None, {"private": True}, {"gated": True}])
def test_repositories_that_cannot_be_read(folder, model, tmp_path, hub, disconnect, about):  # noqa: F811
    if about:
        files = {file.name: file.read_bytes() for file in folder.iterdir()}
        hub.put("owner/TAK", files, **about)
    out = tmp_path / "out"
    out.mkdir()
    problem = "owner/TAK is gated" if about == {"gated": True} else "the repository owner/TAK does not exist"
    import_fails("hf://owner/TAK", model, out, problem, "hf auth login", "pass the folder")
    disconnect()
    import_fails("hf://owner/TAK", model, out, "hf://owner/TAK: the Hub (http", "cannot be reached", "pass the folder")


@pytest.mark.usefixtures("in_process")
def test_files_of_another_task_are_not_imported(folder, model, tmp_path):
    import_fails(folder, model, tmp_path, "no files for the task svhn", "seq-8vision_task_1 (dtd)", task="svhn")
    imported_bundle = kp.import_mammoth(
        folder, model, tmp_path / "imported.kfac", task="svhn", files=PREFIX, fisher="exact"
    )
    assert imported_bundle.task == "svhn", "an explicit prefix overrides the task name"


def test_the_command(folder, model, tmp_path):
    (folder / "notes.txt").write_text("hello")
    arguments = [
        "import",
        "mammoth",
        folder,
        "--model",
        model.name,
        "--weights",
        "random",
        "-o",
        tmp_path / "imported.kfac",
    ]

    def run(*more):
        return CliRunner().invoke(app, [str(argument) for argument in (*arguments, *more)], catch_exceptions=False)

    result = run()
    assert result.exit_code == 2
    assert "samples" in result.stderr
    assert not (tmp_path / "imported.kfac").exists()
    result = run("--fisher", "exact")
    assert result.exit_code == 0
    assert "wrote" in result.stdout
    assert "not imported: notes.txt (not a file with factors)" in result.stdout
    assert "not imported: visual.conv1.weight" in result.stdout
    output = json.loads(run("--fisher", "exact", "--task", "mine", "--json").stdout)
    assert (output["task"], output["examples"], output["positions"], output["weights_compared"]) == (
        "mine",
        5,
        17,
        True,
    )
    assert output["sha256"] == kp.Bundle(tmp_path / "imported.kfac").digest
    assert {"what": "notes.txt", "why": "not a file with factors"} in output["left_out"]
