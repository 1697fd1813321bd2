"""Language models from the command line: estimates that go layer by layer, and invalid input in one line."""

from __future__ import annotations

import json
import shutil
import signal
import time

import pytest
from kfacpack_cli.main import app
from models.conftest import write_lm
from processes import Python
from typer.testing import CliRunner

import kfacpack as kp


def run(*arguments, code=0):
    """Runs the command in this process."""
    result = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


def output(*arguments):
    return json.loads(run(*arguments, "--json").stdout)


def error(*arguments):
    """Runs a command with invalid input; returns the error, which is one line."""
    result = run(*arguments, code=2)
    assert not result.stdout
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder with a Llama of two layers with random weights."""
    return write_lm(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A folder with six prompts and completions of unequal length."""
    folder = tmp_path_factory.mktemp("texts")
    rows = [{"prompt": "a dog " + "runs " * number, "completion": " over the field" * (number % 2 + 1)}
            for number in range(1, 7)]  # fmt: skip
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def command(llama, texts):
    return ["estimate", "--model", f"lm:{llama}", "--task", "texts", "--data", texts, "--batch-size", 2]


@pytest.fixture(scope="module")
def ordinary(command, tmp_path_factory):
    """The bundle of an ordinary estimate."""
    path = tmp_path_factory.mktemp("ordinary") / "ordinary.kfac"
    run(*command, "-o", path, "-q")
    return path


def test_a_streamed_estimate_has_the_bytes_of_an_ordinary_one(command, ordinary, tmp_path):
    streamed = output(*command, "--stream", "--stream-folder", tmp_path / "files", "-o", tmp_path / "t.kfac")
    assert (tmp_path / "t.kfac").read_bytes() == ordinary.read_bytes()
    assert streamed["sha256"] == kp.Bundle(ordinary).digest
    assert (streamed["examples"], streamed["bytes"]) == (6, ordinary.stat().st_size)
    parts = output(*command, "--stream", "-o", tmp_path / "parts.kfac.index.json")
    assert parts["sha256"] == streamed["sha256"]
    assert len(list(tmp_path.glob("*.kfac.shard"))) == 3  # two layers and the last norm
    assert run("verify", tmp_path / "parts.kfac.index.json").exit_code == 0
    assert not any((tmp_path / "files").iterdir())


@pytest.mark.parametrize("options", [["--compress", "block:2+int8"], ["--shard", "2/3", "--metric", "kl"]])
def test_streamed_estimates_accept_the_options_of_ordinary_ones(command, tmp_path, options):
    expected = output(*command, *options, "-o", tmp_path / "ordinary.kfac")
    streamed = output(*command, *options, "--stream", "-o", tmp_path / "streamed.kfac")
    assert streamed["sha256"] == expected["sha256"]
    assert streamed.get("compression") == expected.get("compression")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ordinary.kfac", "streamed.kfac"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_streamed_estimate_resumes_to_the_same_bytes(command, ordinary, tmp_path, number):
    resumed = tmp_path / "resumed.kfac"
    slow = (
        "import time\n"
        "from kfacpack.estimation.stream import StreamedEstimate\n"
        "advance = StreamedEstimate._advance\n"
        "StreamedEstimate._advance = lambda *args: (time.sleep(0.05), advance(*args))[1]\n"
        "import kfacpack_cli; kfacpack_cli.run()"
    )
    until = time.monotonic() + 300
    with Python("-c", slow, *command, "--stream", "-o", resumed) as process:
        while not (tmp_path / "resumed.kfac.partial-stream" / "inputs-1-0.safetensors").exists():
            assert process.returncode is None
            assert time.monotonic() < until
            time.sleep(0.02)
        process.send_signal(number)
        result = process.wait()
    assert result.returncode == (130 if number == signal.SIGINT else -number)
    if number == signal.SIGINT:
        assert "--resume" in result.stderr
    else:
        assert "--resume" in error(*command, "--stream", "-o", resumed)
        assert "stream" in error(*command, "-o", resumed, "--resume")
    assert not resumed.exists()
    run(*command, "--stream", "-o", resumed, "--resume", "-q")
    assert resumed.read_bytes() == ordinary.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["resumed.kfac"]


def test_a_dry_run_needs_neither_weights_nor_a_gpu(command, llama, ordinary, tmp_path):
    folder = shutil.copytree(llama, tmp_path / "config")
    (folder / "model.safetensors").unlink()
    dry = [*command, "--model", f"lm:{folder}", "--stream", "--dry-run"]
    forecast = output(*dry)
    tensors = kp.Bundle(ordinary).tensors.values()
    assert forecast["bytes"] == sum(tensor.nbytes for tensor in tensors)
    assert [block["name"] for block in forecast["blocks"]] == [b.name for b in kp.Bundle(ordinary).manifest.blocks]
    assert forecast["stored_bytes"] > 0
    shown = run(*dry, "--gpu", "a100").stdout
    for words in ("hours on a100", "17%", "disk space", "fits in the memory"):
        assert words in shown
    assert [path.name for path in tmp_path.iterdir()] == ["config"]
    assert "A100-80GB" in error(*dry, "--gpu", "A1000")
    assert "no safetensors files" in error(*command, "--model", f"lm:{folder}", "--stream", "-o", tmp_path / "t.kfac")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--stream-folder", "files"], "--stream"),
        (["--gpu", "A100"], "--stream and --dry-run"),
        (["--stream", "--gpu", "A100"], "--dry-run"),
        (["--max-shard-size", "1GB"], ".kfac.index.json"),
    ],
)
def test_options_of_streamed_estimates_without_effect_are_refused(command, tmp_path, wrong, words):
    assert words in error(*command, *wrong, "-o", tmp_path / "t.kfac")
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """A folder with pairs of sentences, whose two class names begin with the same token."""
    import datasets

    columns = {"first": ["a dog runs", "nobody sleeps"] * 3, "second": ["an animal moves"] * 6, "label": [0, 1] * 3}
    text, label = datasets.Value("string"), datasets.ClassLabel(names=["entailing", "entailed"])
    features = datasets.Features(first=text, second=text, label=label)
    folder = tmp_path_factory.mktemp("pairs")
    for split in ("train", "test"):
        datasets.Dataset.from_dict(columns, features=features).to_parquet(folder / f"{split}-00000-of-00001.parquet")
    return folder


def test_a_template_without_its_column_is_refused(llama, pairs, tmp_path):
    arguments = ["--model", f"lm:{llama}", "--task", "mnli", "--data", pairs, "-o", tmp_path / "t.kfac", "-q"]
    line = error("estimate", *arguments)
    for fact in ("premise", "hypothesis", "first, second", "--columns"):
        assert fact in line


def test_labels_with_the_same_first_token_are_refused(llama, pairs):
    line = error("eval", "--model", f"lm:{llama}", "--task", "mine", "--data", pairs, "--head", "words", "-q")
    for fact in ("same token", "entailing", "entailed"):
        assert fact in line


def test_a_chat_template_of_a_base_model_is_refused(command, tmp_path):
    line = error(*command, "--prompts", "chat", "-o", tmp_path / "t.kfac")
    for fact in ("no chat template", "--prompts plain"):
        assert fact in line


@pytest.fixture
def weights_in_parts(llama, tmp_path):
    """A copy of the model whose weights are in several files."""
    from transformers import AutoModelForCausalLM

    folder = shutil.copytree(llama, tmp_path / "parts")
    (folder / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(llama).save_pretrained(folder, max_shard_size="8KB")
    return folder


def a_missing_file(folder):
    file = sorted(folder.glob("model-*.safetensors"))[-1]
    file.unlink()
    return file.name


def a_truncated_file(folder):
    file = sorted(folder.glob("model-*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:-8])
    return file.name


def a_truncated_index(folder):
    index = folder / "model.safetensors.index.json"
    index.write_bytes(index.read_bytes()[:-40])
    return index.name


@pytest.mark.parametrize("stream", [[], ["--stream"]])
@pytest.mark.parametrize("damage", [a_missing_file, a_truncated_file, a_truncated_index])
def test_incomplete_weights_are_refused(command, weights_in_parts, tmp_path, stream, damage):
    damaged = damage(weights_in_parts)
    line = error(*command, "--model", f"lm:{weights_in_parts}", *stream, "-o", tmp_path / "t.kfac")
    assert damaged in line
    assert not (tmp_path / "t.kfac").exists()


@pytest.mark.parametrize("damage", ["missing shard", "truncated index"])
def test_incomplete_bundles_are_refused(command, tmp_path, damage):
    index = tmp_path / "parts.kfac.index.json"
    run(*command, "--stream", "-o", index, "-q")
    if damage == "missing shard":
        file = min(tmp_path.glob("*.kfac.shard"))
        file.unlink()
    else:
        file = index
        index.write_bytes(index.read_bytes()[:-40])
    for arguments in (["inspect", index], ["compress", index, "int8", "-o", tmp_path / "small.kfac"]):
        line = error(*arguments)
        assert file.name in line
        assert index.name in line
