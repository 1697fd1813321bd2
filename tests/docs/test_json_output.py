"""What the commands print with `--json` has the published JSON Schema, and no key that the schema does not have."""

from __future__ import annotations

import json

import jsonschema
import pytest
import torch
from command_pages import command_pages
from hub.conftest import artifacts, hub, log_in  # noqa: F401 - fixtures
from hub.published import factors_of, store
from json_pages import OUTPUTS, field_descriptions, schema
from kfacpack_cli.main import app
from models.conftest import tiny_clip  # noqa: F401 - a fixture
from typer.testing import CliRunner

import kfacpack as kp

FEW = ["--examples", 8, "--batch-size", 8]
# Further measurements are covered by `kfacpack measure`, which prints them in the same form.
PLAN = """\
name: two tasks
model: {name: tiny, head: prototypes}
tasks: [digits, weaves]
curvature: {examples: 4}
training: {steps: 1, batch_size: 4}
arms:
  without: {penalty: none}
  kfac: {penalty: kronecker, strength: 80}
evaluation:
  examples: 8
  alphas: "0,1"
"""


def closed(part):
    """Returns a schema that allows no other keys."""
    if isinstance(part, list):
        return [closed(item) for item in part]
    if not isinstance(part, dict):
        return part
    inner = {key: closed(value) for key, value in part.items()}
    return inner | {"additionalProperties": False} if isinstance(part.get("properties"), dict) else inner


def check(command, *arguments, form="", code=0):
    words = [command, *map(str, arguments), "--json"]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == code, result.output
    output = json.loads(result.stdout)
    jsonschema.validate(output, closed(schema(OUTPUTS[command][form])))
    return output


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two bundles, their merge, two vectors and their sum."""
    path = tmp_path_factory.mktemp("files")
    model = kp.load_model("tiny")
    for task in ("digits", "weaves"):
        bundle, vector = path / f"{task}.kfac", path / f"{task}.safetensors"
        kp.estimate_task(model, task, output=bundle, examples=8)
        kp.train(model, task, output=vector, steps=1, batch_size=4, head="prototypes")
    return path


def test_every_output_has_a_schema():
    with_json = {page.name for page in command_pages() for parameter in page.parameters if "--json" in parameter.names}
    assert set(OUTPUTS) == with_json


def test_schemas_are_valid_and_described():
    for outputs in OUTPUTS.values():
        for output in outputs.values():
            described = schema(output)
            jsonschema.Draft202012Validator.check_schema(described)
            assert described["properties"]
    assert field_descriptions()["MergeOutput"]["frobenius"], "descriptions of inherited fields are found"


def test_bundles(folder, tmp_path):
    one, two = folder / "digits.kfac", folder / "weaves.kfac"
    common = ["--task", "digits", *FEW]
    check("estimate", *common, "-o", tmp_path / "a.kfac")
    check("estimate", *common, "--compress", "int8", "-o", tmp_path / "b.kfac")
    check("estimate", *common, "--dry-run", form="--dry-run")
    check("inspect", one)
    for options in ((), ("--norms",)):
        check("inspect", folder / "digits.safetensors", *options, form="VECTOR.safetensors")
    check("compress", one, "block:8+int8", "--vector", folder / "digits.safetensors", "-o", tmp_path / "c.kfac")
    check("compress", one, "int8", "--dry-run")
    check("merge", one, two, "-o", tmp_path / "d.kfac")
    check("merge", tmp_path / "d.kfac", two, "--without", "weaves", "-o", tmp_path / "e.kfac")
    check("export", one, "-o", tmp_path / "f.safetensors")
    adapter = ["export", folder / "digits.safetensors", "--lora", 4, "-o"]
    check(*adapter, tmp_path / "lora", form="--lora RANK")
    check(*adapter, tmp_path / "metric", "--bundle", one, form="--lora RANK")


def test_verification(folder, tmp_path):
    bundle = folder / "digits.kfac"
    damaged = tmp_path / "damaged.kfac"
    damaged.write_bytes(bundle.read_bytes()[:-1] + b"\1")
    other = tmp_path / "other.kfac"
    other.write_bytes(b"")
    assert check("verify", damaged, bundle, code=1)["bundles"][0]["checks"][0]["failures"]
    assert check("verify", other, bundle, code=2)["unreadable"]


def test_vectors(folder, tmp_path):
    vectors = [folder / "digits.safetensors", folder / "weaves.safetensors"]
    few = ["--steps", 1, "--batch-size", 4, "--head", "prototypes"]
    check("train", "--task", "digits", *few, "--reg", folder / "weaves.kfac", "-o", tmp_path / "a.safetensors")
    check("add", *vectors, "-o", tmp_path / "sum.safetensors", "--save-model", tmp_path / "model.safetensors")
    check("add", *vectors, "--method", "ties", "-o", tmp_path / "ties.safetensors")
    bundles = [word for task in ("digits", "weaves") for word in ("--bundle", folder / f"{task}.kfac")]
    check("add", *vectors, "--method", "fisher", *bundles, "-o", tmp_path / "fisher.safetensors")
    reg = ["--own", folder / "digits.kfac", "--reg", folder / "weaves.kfac", "--iterations", 1]
    check("refine", vectors[0], *reg, "-o", tmp_path / "refined.safetensors")
    check("negate", vectors[0], "-o", tmp_path / "negated.safetensors")
    check("extract", tmp_path / "model.safetensors", "-o", tmp_path / "extracted.safetensors", "--task", "both")


def test_evaluation(folder):
    both = ["--task", "digits", "weaves", *FEW]
    vector = ["--vector", folder / "digits.safetensors"]
    check("eval", *both)
    check("eval", *both, *vector, "--individual", "digits=0.5")
    check("eval", *both, *vector, "--alpha", "0,1", form="--alpha FROM:TO:STEP")
    check("eval", *both, *vector, "--alpha", "0,1", "--choose", form="--choose")
    check("eval", "--task", "digits", *FEW, *vector, "--control", "weaves", "--alpha", "0,1", form="--control TASK")


def test_measurements(folder):
    vectors = [folder / "digits.safetensors", folder / "weaves.safetensors"]
    bundle = ["--bundle", folder / "weaves.kfac"]
    check("measure", "disentanglement", *vectors, *FEW, "--alpha", "0,1", form="disentanglement")
    check("measure", "localisation", *vectors, *FEW, form="localisation")
    check("measure", "drift", vectors[0], *bundle, *FEW, "--layer-examples", 1, form="drift")
    check("measure", "interference", vectors[0], *bundle, *FEW, "--measured", form="interference")
    check("measure", "spectra", *bundle, form="spectra")


def test_lists(tmp_path):
    check("models")
    check("models", "tiny", form="MODEL")
    check("tasks")
    check("tasks", "digits", "--sheet", tmp_path / "digits.png", form="TASK")
    check("tasks", "dtd", form="TASK (on the Hub)")


def test_runs(tmp_path, monkeypatch):
    plan, out = tmp_path / "plan.yaml", tmp_path / "out"
    plan.write_text(PLAN, encoding="utf-8")
    check("run", plan, "-o", out, "--dry-run", form="--dry-run")
    check("run", plan, "--dry-run", "--gpu", "A100", form="--dry-run --gpu NAME")
    with monkeypatch.context() as patch:  # drawing figures takes seconds
        patch.setattr("kfacpack.experiments.report.report", lambda folder, page: page)
        patch.setattr("kfacpack.experiments.plan_file.plan_text", lambda all_tasks: PLAN)
        check("run", plan, "-o", out)
        check("demo", "-o", out)  # whose plan is that of the run
    check("report", out, "-o", tmp_path / "report.html")


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_the_hub(hub, log_in, artifacts, tmp_path):  # noqa: F811
    log_in("owner")
    files = artifacts / "one.kfac", artifacts / "one.safetensors"
    check("push", *files, "owner/repo", "--dry-run")
    check("push", *files, "owner/repo")
    check("pull", "owner/repo", "--list", form="--list")
    check("pull", "owner/repo", "-o", tmp_path)
    assert check("search", "--task", "one")["repositories"]


def test_imports(tiny_clip, tmp_path):  # noqa: F811
    model = kp.load_model(tiny_clip, weights="random")
    pictures = [torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))]
    unit = torch.eye(model.function.width, dtype=torch.float64)[:1]
    store(tmp_path, "mine_task_0", *factors_of(model.module, pictures, lambda number, f: [unit]))
    named = ["--model", model.name, "--weights", "random", "--task", "mine", "--samples", 1]
    check("import", "mammoth", tmp_path, *named, "-o", tmp_path / "imported.kfac")
