"""`kfacpack measure`, from the command line."""

from __future__ import annotations

import json

import pytest
import torch
from image_folders import write_images
from kfacpack_cli.main import app
from typer.testing import CliRunner

import kfacpack as kp
from kfacpack.format.vector_manifest import AboutVector, TaskEntry
from kfacpack.models.families import load_model
from kfacpack.tasks.registry import load_task

COUNTS = {split: dict.fromkeys(("red", "green", "blue"), 4) for split in ("train", "test")}
PARAMS = ("visual.transformer.resblocks.3.mlp.c_proj.weight", "visual.transformer.resblocks.3.mlp.c_proj.bias")


def run(*arguments, code=0):
    result = CliRunner().invoke(app, ["measure", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


def measure_json(*arguments):
    result = run(*arguments, "--json")
    assert not result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    """A folder with images, vectors and bundles of two tasks."""
    folder = tmp_path_factory.mktemp("artifacts")
    model = load_model("tiny")
    for seed, name in enumerate(("morning", "evening")):
        task = load_task(name, write_images(folder / name, COUNTS, seed))
        generator = torch.Generator().manual_seed(seed)
        tau = {
            entry: 0.05 * torch.randn(model.module.get_parameter(entry).shape, generator=generator) for entry in PARAMS
        }
        about = AboutVector(
            base=kp.identify(model.module, list(PARAMS), family=model.family, name=model.name),
            function=model.function,
            regime="linear",
            tasks=(TaskEntry(source=kp.Source(task=name, dataset_size=12)),),
        )
        kp.TaskVector(tau, about, {name: kp.head_for(model, task)}).save(folder / f"{name}.safetensors")
        split = task.split("train")
        batch = model.prepare([split[number] for number in range(len(split))], name)
        result = {"name": model.name, "function": model.function, "source": kp.Source(task=name, dataset_size=12)}
        curvature = kp.estimate(model.module, [batch], params=list(PARAMS), forward=model.forward, **result)
        curvature.save(folder / f"{name}.kfac")
    both = sum(kp.TaskVector.load(folder / f"{name}.safetensors") for name in ("morning", "evening"))
    both.save(folder / "both.safetensors")
    kp.merge([kp.load(folder / f"{name}.kfac") for name in ("morning", "evening")]).save(folder / "both.kfac")
    return folder


def vectors(artifacts):
    return [artifacts / "morning.safetensors", artifacts / "evening.safetensors"]


def data(artifacts, *names):
    return [word for name in names or ("morning", "evening") for word in ("--data", f"{name}={artifacts / name}")]


def test_disentanglement_with_output_and_figure(artifacts, tmp_path):
    files = ["-o", tmp_path / "d.json", "--figure", tmp_path / "d.png"]
    result = measure_json("disentanglement", *vectors(artifacts), *data(artifacts), "--alpha", "-1:1:1", *files)
    assert (result["tasks"], result["alphas"]) == (["morning", "evening"], [-1.0, 0.0, 1.0])
    assert result["examples"] == {"morning": 12, "evening": 12}
    assert [len(row) for row in result["xi"]] == [3, 3, 3]
    assert result["xi"][1][1] == 0
    assert json.loads((tmp_path / "d.json").read_text()) == result
    assert (tmp_path / "d.png").read_bytes().startswith(b"\x89PNG")


def test_localisation_and_its_table(artifacts):
    result = measure_json("localisation", *vectors(artifacts), *data(artifacts), "--examples", 6)
    assert list(result["vectors"]) == ["morning", "evening"]
    assert result["vectors"]["morning"]["off"]["examples"] == 6
    alone = [artifacts / "morning.safetensors", "--task", "evening", *data(artifacts)]
    assert measure_json("localisation", *alone, "--examples", 6)["vectors"]["morning"] == result["vectors"]["morning"]
    lines = run("localisation", *alone).stdout.splitlines()
    assert lines[0].split() == ["vector", "on", "task", "off", "task", "AUROC"]
    assert lines[1].split()[0] == "morning"
    assert not run("localisation", *alone, "--quiet").output


def test_drift_and_its_table(artifacts, tmp_path):
    common = ["drift", *vectors(artifacts), "--bundle", artifacts / "evening.kfac", *data(artifacts, "evening")]
    result = measure_json(*common, "--split", "train")
    assert [(entry["vector"], entry["task"]) for entry in result["pairs"]] == [
        ("morning", "evening"),
        ("evening", "evening"),
    ]
    for pair, layer in zip(result["pairs"], result["layers"], strict=True):
        assert layer["block"] == PARAMS[0]
        # There is only one block, and it was estimated on the same examples.
        assert pair["predicted"] == layer["predicted"]
        assert pair["measured"] == pytest.approx(layer["measured"], rel=1e-5)
    table = run(*common, "--figure", tmp_path / "drift.svg").stdout
    assert "ratios for individual layers (2)" in table
    assert (tmp_path / "drift.svg").read_text().lstrip().startswith("<?xml")
    assert "individual layers" not in run(*common, "--layer-examples", 0).stdout


def bundles(artifacts, *names):
    return [word for name in names for word in ("--bundle", artifacts / f"{name}.kfac")]


def test_interference_needs_neither_data_nor_model(artifacts, tmp_path):
    """The weights that --model names do not exist, so loading the model would fail."""
    common = ["interference", *vectors(artifacts), *bundles(artifacts, "morning", "evening", "both")]
    common += ["--weights", tmp_path / "nowhere.safetensors"]
    result = measure_json(*common, "-o", tmp_path / "i.json", "--figure", tmp_path / "i.png")
    assert result["vectors"] == ["morning", "evening"]
    assert [(task["task"], task["tasks"]) for task in result["tasks"]] == [
        ("morning", ["morning"]),
        ("evening", ["evening"]),
        ("both", ["morning", "evening"]),
    ]
    for pair in result["pairs"]:
        curvature = kp.load(artifacts / f"{pair['task']}.kfac")
        tau = kp.TaskVector.load(artifacts / f"{pair['vector']}.safetensors")
        assert pair["predicted"] == pytest.approx(float(curvature.quadratic(tau)), rel=1e-5)
        assert pair["measured"] is None
        assert list(pair["blocks"]) == [PARAMS[0]]
    assert result["spearman"] is None
    assert json.loads((tmp_path / "i.json").read_text()) == result
    assert (tmp_path / "i.png").read_bytes().startswith(b"\x89PNG")
    lines = run(*common).stdout.splitlines()
    assert lines[0].split() == ["vector", "morning", "evening", "both"]
    assert [word.startswith("[") for word in lines[1].split()[1:]] == [True, False, True]
    others = sorted((pair for pair in result["pairs"] if not pair["own"]), key=lambda pair: -pair["aligned"])
    start = next(k for k, line in enumerate(lines) if line.split() == ["vector", "task", "aligned", "predicted"])
    ranked = [tuple(line.split()[:2]) for line in lines[start + 1 : start + 1 + len(others)]]
    assert ranked == [(pair["vector"], pair["task"]) for pair in others]
    assert not run(*common, "--quiet").output


def test_interference_is_measured_where_data_is_given(artifacts):
    common = ["interference", *vectors(artifacts), *bundles(artifacts, "morning", "evening", "both")]
    some = measure_json(*common, *data(artifacts, "evening"))
    assert [pair["measured"] is not None for pair in some["pairs"]] == [False, True, False] * 2
    drift = measure_json(
        "drift", *vectors(artifacts), *bundles(artifacts, "evening"), *data(artifacts, "evening"), "--layer-examples", 0
    )
    assert [pair["measured"] for pair in drift["pairs"]] == [
        pair["measured"] for pair in some["pairs"] if pair["task"] == "evening"
    ]
    every = measure_json(*common, *data(artifacts), "--measured")
    assert [pair["measured"] is not None for pair in every["pairs"]] == [True, True, False] * 2


def test_spectra_and_its_table(artifacts):
    result = measure_json("spectra", "--bundle", artifacts / "morning.kfac")
    assert [(entry["name"], entry["side"]) for entry in result["blocks"]] == [(PARAMS[0], "B"), (PARAMS[0], "A")]
    lines = run("spectra", artifacts / "both.kfac").stdout.splitlines()
    assert lines[0].split() == ["block", "side", "size", "trace", "largest", "effective", "rank"]
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["disentanglement", "morning.safetensors"], "expected two vectors; vectors given: 1, bundles given: 0"),
        (["localisation"], "expected at least one vector"),
        (["drift", "morning.safetensors"], "expected at least one vector and one bundle (--bundle)"),
        (["interference", "morning.safetensors"], "expected at least one vector and one bundle (--bundle)"),
        (
            ["interference", "morning.safetensors", "--bundle", "both.kfac", "--measured"],
            "every bundle is merged",
        ),
        (
            ["interference", "morning.safetensors", "--bundle", "both.kfac", "--data", "both=evening"],
            "task 'both' is not used",
        ),
        (
            ["drift", "morning.safetensors", "--bundle", "evening.kfac", "--measured"],
            "--measured applies only to `measure interference`; omit it for drift",
        ),
        (["spectra", "morning.kfac", "--bundle", "evening.kfac"], "expected one bundle"),
        (["weight", "morning.safetensors"], "weight"),
        (
            ["localisation", "both.safetensors"],
            "both.safetensors: expected a vector of one task, got 2 (morning, evening)",
        ),
        (["localisation", "morning.safetensors", "morning.safetensors"], "task 'morning'; pass one file per task"),
        (
            ["interference", "morning.safetensors", "--bundle", "both.kfac", "--bundle", "both.kfac"],
            "there is already a bundle named 'both'",
        ),
        (["localisation", "morning.kfac"], "morning.kfac"),
        (["drift", "morning.safetensors", "--bundle", "both.kfac"], "both.kfac: expected a bundle of one task"),
        (["localisation", "morning.safetensors"], "--data morning=DIR"),
        (["localisation", "morning.safetensors", "--data", "morning"], "'morning': expected TASK=DIR"),
        (["localisation", "morning.safetensors", "--data", "morning="], "'morning=': expected TASK=DIR"),
        (
            ["localisation", "morning.safetensors", "--data", "noon=x"],
            "task 'noon' is not used by this command; expected morning",
        ),
        (["localisation", "morning.safetensors", "--data", "morning=morning"], "at least one other task"),
        (
            ["localisation", "morning.safetensors", "--alpha", "1"],
            "--alpha applies only to `measure disentanglement`; omit it for localisation",
        ),
        (["disentanglement", "morning.safetensors", "evening.safetensors", "--alpha", "x"], "'x'"),
        (["localisation", "morning.safetensors", "--figure", "out.pdf"], "ends in .png or .svg"),
        (["localisation", "morning.safetensors", "-o", "morning.safetensors"], "is also an input"),
        (["spectra", "--bundle", "nowhere.kfac"], "nowhere.kfac"),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, list) else None,
)
def test_wrong_input_is_refused(artifacts, monkeypatch, wrong, words):
    monkeypatch.chdir(artifacts)
    before = (artifacts / "morning.safetensors").read_bytes()
    result = run(*wrong, code=2)
    assert words in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
    assert not result.stdout
    assert (artifacts / "morning.safetensors").read_bytes() == before
