"""`kfacpack extract`, from the command line, and the vectors it writes in other commands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from hashlib import sha256

import pytest
import torch
from hub.conftest import disconnect, hub  # noqa: F401 - fixtures
from kfacpack_cli.main import app
from models.conftest import bert_folder  # noqa: F401 - a fixture
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import kfacpack as kp
from kfacpack._compat import make_torchvision_importable


def run(*arguments, code=0):
    result = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A checkpoint of `tiny` whose vision tower was changed."""
    state = {name: value.clone() for name, value in kp.load_model("tiny").module.state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    for name, value in state.items():
        if name.startswith("visual.transformer") and value.dim() == 2:
            value += 0.01 * torch.randn(value.shape, generator=generator)
    path = tmp_path_factory.mktemp("tuned") / "tuned.safetensors"
    save_file(state, path)
    return path


def test_extract_and_save_the_model_again(tuned, tmp_path):
    vector, model = tmp_path / "digits.safetensors", tmp_path / "model.safetensors"
    result = run("extract", tuned, "--task", "digits", "-o", vector)
    assert "unchanged" in result.stdout
    assert f"next: kfacpack eval --vector {vector} --task digits" in result.stdout
    run("add", vector, "-o", tmp_path / "sum.safetensors", "--save-model", model)
    ours, theirs = load_file(model), load_file(tuned)
    assert set(ours) == set(theirs)
    assert all(
        torch.equal(ours[name].view(torch.uint8), theirs[name].view(torch.uint8)) for name in ours if ours[name].dim()
    )
    evaluated = run("eval", "--vector", vector, "--task", "digits", "--examples", 16, "--json")
    assert json.loads(evaluated.stdout)["tasks"]["digits"]["examples"] == 16
    assert run("extract", tuned, "-o", tmp_path / "q.safetensors", "--quiet").output == ""
    assert kp.TaskVector.load(tmp_path / "q.safetensors").tasks == ()


def manifest_of(path):
    return json.loads(run("inspect", path, "--json").stdout)["manifest"]


def test_json(tuned, tmp_path):
    output = json.loads(run("extract", tuned, "--task", "t", "-o", tmp_path / "t.safetensors", "--json").stdout)
    vector = kp.TaskVector.load(tmp_path / "t.safetensors")
    assert output["sha256"] == vector.digest
    assert output["bytes"] == (tmp_path / "t.safetensors").stat().st_size
    assert output["dense"] + output["unchanged"] == output["parameters"] == len(vector)
    assert (output["factored"], output["ranks"], output["tasks"]) == (0, [], ["t"])
    # Unchanged parameters take no space.
    assert output["bytes"] < tuned.stat().st_size


def test_trained_and_extracted_vectors_can_be_added(tuned, tmp_path):
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    run("extract", tuned, "--task", "one", "-o", one)
    few = ("--steps", 1, "--batch-size", 4, "--head", "prototypes", "--regime", "full")
    run("train", "--task", "weaves", *few, "-o", two)
    run("add", one, two, "-o", tmp_path / "sum.safetensors")
    total = kp.TaskVector.load(tmp_path / "sum.safetensors")
    first, second = kp.TaskVector.load(one), kp.TaskVector.load(two)
    assert set(total) == {*first, *second}
    for name in second:
        torch.testing.assert_close(total[name], second[name] + first.get(name, 0))
    assert total.tasks == ("one", "weaves")
    run("add", one, two, "--method", "ties", "-o", tmp_path / "ties.safetensors")


def test_bad_input_writes_nothing(tuned, tmp_path, bert_folder):  # noqa: F811
    output = tmp_path / "out.safetensors"
    torch.save({}, tmp_path / "a.bin")
    for arguments, *facts in (
        ((tmp_path / "a.bin",), "not a safetensors file"),
        ((tmp_path / "nothing.safetensors",), "No such file"),
        ((bert_folder,), "architecture"),
        ((tuned, "--model", "nothing"), "nothing"),
        ((tuned, "--weights", "random", "--image-size", 0), "image-size"),
        ((tuned, "--task", "a\\b"), "name"),
    ):
        result = run("extract", *arguments, "-o", output, code=2)
        assert all(fact in result.stderr for fact in facts), result.stderr
        assert not output.exists()
    assert "also an input" in run("extract", tuned, "-o", tuned, code=2).stderr
    assert "also an input" in run("extract", tuned.parent, "-o", tuned, code=2).stderr
    assert "no such folder" in run("extract", tuned, "-o", tmp_path / "no" / "t.safetensors", code=2).stderr
    assert run("extract", tmp_path / "a.bin", "-o", output, "--json", code=2).stdout == ""


def test_notes_are_printed_to_stderr(tuned, tmp_path):
    state = {f"model.{name}": value for name, value in load_file(tuned).items()}
    state["model.logit_scale"] = state["model.logit_scale"] + 1
    state["classifier.weight"] = torch.ones(3, 3)
    save_file(state, tmp_path / "wrapped.safetensors")
    result = run("extract", tmp_path / "wrapped.safetensors", "-o", tmp_path / "t.safetensors")
    for fact in ("'model.'", "'classifier.weight'", "'logit_scale'"):
        assert fact in result.stderr
    assert "note:" not in result.stdout


def test_an_interrupted_extraction_leaves_the_old_file(tuned, tmp_path):
    output = tmp_path / "t.safetensors"
    output.write_bytes(b"old")
    program = (
        "import signal, time, kfacpack.vectors.storage as s\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it\n"
        "read = s.InMemoryVector.read\n"
        "def slow(self, name):\n    print('writing', flush=True); time.sleep(0.2); return read(self, name)\n"
        "s.InMemoryVector.read = slow\n"
        "from kfacpack_cli import run; run()"
    )
    words = [sys.executable, "-c", program, "extract", str(tuned), "-o", str(output), "--quiet"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ)) as process:
        assert process.stdout.readline() == b"writing\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert output.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["t.safetensors"]


@pytest.mark.filterwarnings("ignore")
def test_checkpoints_and_adapters_on_the_hub(hub, disconnect, bert_folder, tmp_path):  # noqa: F811
    make_torchvision_importable()
    peft = pytest.importorskip("peft", reason="peft is not installed; it is in the extra 'dev'")
    model = kp.load_model(f"hf:{bert_folder}")
    module = model.module
    wrapped = peft.get_peft_model(module, peft.LoraConfig(r=2, target_modules=["query"], init_lora_weights=False))
    wrapped.save_pretrained(tmp_path / "adapter")
    merged = wrapped.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged", max_shard_size="5KB")
    for name in ("adapter", "merged"):
        files = {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()}
        hub.put(f"owner/{name}", files)
        hub.put("owner/all", {f"{name}/{file}": content for file, content in files.items()})
    base = ("--model", f"hf:{bert_folder}", "--json")
    weight = "encoder.layer.0.attention.self.query.weight"
    vectors = {}
    for place in ("owner/adapter", "owner/adapter@main", "owner/merged", "owner/all/adapter", "owner/all/merged"):
        output = json.loads(run("extract", f"hf://{place}", *base, "-o", tmp_path / "t.safetensors").stdout)
        tau = kp.TaskVector.load(tmp_path / "t.safetensors")
        vectors[place] = output["sha256"], tau.rank(weight), manifest_of(tmp_path / "t.safetensors")
    assert vectors["owner/adapter"] == vectors["owner/adapter@main"]
    assert (vectors["owner/adapter"][1], vectors["owner/merged"][1]) == (2, None)
    for name in ("adapter", "merged"):
        places = [vectors[place][2] for place in (f"owner/{name}", f"owner/all/{name}")]
        recorded = [manifest.pop("checkpoints")[0] for manifest in places]
        assert places[0] == places[1]  # including the digests of all tensors
        assert [checkpoint["name"] for checkpoint in recorded] == [f"hf://owner/{name}", f"hf://owner/all/{name}"]
        branches = [hub.repos[repository].branches["main"] for repository in (f"owner/{name}", "owner/all")]
        assert [checkpoint["revision"] for checkpoint in recorded] == branches
        content = hub.files(f"owner/{name}")
        for checkpoint in recorded:
            assert len(checkpoint["files"]) == sum(file.endswith(".safetensors") for file in content) + (
                name == "adapter"
            )
            for file in checkpoint["files"]:
                assert file["sha256"] == sha256(content[file["name"]]).hexdigest()
    hub.put("owner/pickle", {"pytorch_model.bin": b"\x80", "config.json": b"{}"})
    assert (
        "other formats" in run("extract", "hf://owner/pickle", *base, "-o", tmp_path / "p.safetensors", code=2).stderr
    )
    hub.put("owner/partial", {k: v for k, v in hub.files("owner/merged").items() if "00002" not in k})
    assert "missing" in run("extract", "hf://owner/partial", *base, "-o", tmp_path / "p.safetensors", code=2).stderr
    assert "does not exist" in run("extract", "hf://owner/no", *base, "-o", tmp_path / "p.safetensors", code=2).stderr
    assert not (tmp_path / "p.safetensors").exists()
    disconnect()
    for place in ("owner/adapter", "owner/merged", "owner/all/merged"):
        output = json.loads(run("extract", f"hf://{place}", *base, "-o", tmp_path / "t.safetensors").stdout)
        assert output["sha256"] == vectors[place][0], "the cache suffices"
    assert "reached" in run("extract", "hf://owner/other", *base, "-o", tmp_path / "p.safetensors", code=2).stderr


def test_an_adapter_with_names_of_the_vision_tower(tmp_path):
    """Without `visual.`, the names are those of the text tower, which must not make them ambiguous."""
    layer, folder = "visual.transformer.resblocks.0.mlp.c_fc", tmp_path / "adapter"
    generator = torch.Generator().manual_seed(0)
    A, B = torch.randn(4, 128, generator=generator), torch.randn(512, 4, generator=generator)
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    prefix = f"base_model.model.{layer}"
    save_file({f"{prefix}.lora_A.weight": A, f"{prefix}.lora_B.weight": B}, folder / "adapter_model.safetensors")
    output = tmp_path / "vector.safetensors"
    assert json.loads(run("extract", folder, "-o", output, "--json").stdout)["ranks"] == [4]
    torch.testing.assert_close(kp.TaskVector.load(output)[f"{layer}.weight"], 2 * B @ A)


def test_outputs_that_are_folders_are_refused_before_any_work(tuned, tmp_path):
    for output in (tmp_path, "."):
        result = run("extract", tuned, "-o", output, code=2)
        assert result.stderr.count("\n") == 1
    assert "CHECKPOINT" in run("extract", "", "-o", tmp_path / "x.safetensors", code=2).stderr
    assert not list(tmp_path.iterdir())


def test_inspect_shows_an_extracted_vector(tuned, tmp_path):
    output = tmp_path / "t.safetensors"
    extracted = json.loads(run("extract", tuned, "--task", "t", "-o", output, "--json").stdout)
    shown = json.loads(run("inspect", output, "--json").stdout)
    forms = [parameter["form"] for parameter in shown["parameters"]]
    assert (forms.count("dense"), forms.count("unchanged")) == (extracted["dense"], extracted["unchanged"])
    assert sum(parameter["remainder"] is not None for parameter in shown["parameters"]) == extracted["remainders"]
    digest = sha256(tuned.read_bytes()).hexdigest()
    assert shown["manifest"]["checkpoints"] == [
        {"name": tuned.name, "kind": "weights", "files": [{"name": tuned.name, "sha256": digest}]}
    ]
    for words in (("inspect", output), ("inspect", output, "--blocks")):
        text = run(*words).stdout
        assert tuned.name in text
        assert digest[:16] in text
        assert str(tuned.parent) not in text
    assert str(tuned.parent).encode() not in output.read_bytes()


def test_a_sum_lists_the_checkpoints_of_its_addends(tuned, tmp_path):
    other = tmp_path / "other.safetensors"
    save_file({name: 1.01 * value if value.dim() == 2 else value for name, value in load_file(tuned).items()}, other)
    for name, source in (("one", tuned), ("two", other)):
        run("extract", source, "--task", name, "-o", tmp_path / f"{name}.safetensors")
    both = [tmp_path / "one.safetensors", tmp_path / "two.safetensors"]
    names = [tuned.name, "other.safetensors"]
    for method in ("sum", "ties"):
        run("add", *both, "--method", method, "-o", tmp_path / "both.safetensors")
        assert [entry["name"] for entry in manifest_of(tmp_path / "both.safetensors")["checkpoints"]] == names
    run("negate", both[0], "-o", tmp_path / "negated.safetensors")
    assert [entry["name"] for entry in manifest_of(tmp_path / "negated.safetensors")["checkpoints"]] == names[:1]
    one = kp.TaskVector.load(both[0])
    assert [entry.name for entry in (one + kp.TaskVector.load(both[1]) - 0.5 * one).about.checkpoints] == names
