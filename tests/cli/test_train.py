"""`kfacpack train`, from the command line."""

from __future__ import annotations

import json
import shlex
import signal
import time

import pytest
from kfacpack_cli.main import app
from processes import Python, python_twice
from typer.testing import CliRunner

import kfacpack as kp

FEW = ["--params", "visual.transformer.resblocks.3.*", "--batch-size", "6"]
"""Few enough parameters to train quickly."""


def run(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """Bundles of two tasks, and their merge."""
    folder = tmp_path_factory.mktemp("bundles")
    for task in ("digits", "mnist"):
        result = run("estimate", "--task", task, "--examples", "16", *FEW[:2], "-o", folder / f"{task}.kfac", "-q")
        assert result.exit_code == 0, result.stderr
    run("merge", folder / "digits.kfac", folder / "mnist.kfac", "-o", folder / "both.kfac", "-q")
    return folder


def test_a_vector_with_a_penalty(bundles, tmp_path):
    output = tmp_path / "digits.safetensors"
    result = run(
        "train", "--task", "digits", *FEW, "--steps", 3, "--reg", bundles / "mnist.kfac", "-o", output, "--json"
    )
    assert result.exit_code == 0, result.stderr
    summary = json.loads(result.stdout)
    vector = kp.TaskVector.load(output)
    assert (summary["path"], summary["sha256"], summary["bytes"]) == (str(output), vector.digest, output.stat().st_size)
    assert (summary["held"], summary["steps"], summary["regime"]) == (["mnist"], 3, "linear")
    assert summary["penalty"] > 0
    assert len((tmp_path / "digits.metrics.jsonl").read_text().splitlines()) == 3
    assert vector.about.tasks[0].training.bundles == (kp.Bundle(bundles / "mnist.kfac").digest,)
    scores = json.loads(run("eval", "--task", "digits", "--vector", output, "--examples", 40, "--json").stdout)
    assert 0 <= scores["tasks"]["digits"]["accuracy"] <= 1
    assert scores["tasks"]["digits"]["head"] == "text"


def test_the_own_task_is_subtracted_or_causes_a_warning(bundles, tmp_path):
    common = ["train", "--task", "digits", *FEW, "--steps", 2, "-o", tmp_path / "t.safetensors"]
    both = ["--reg", bundles / "both.kfac", "--reg", bundles / "digits.kfac"]
    result = run(*common, *both, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["held"] == ["mnist"]
    assert not result.stderr
    result = run(*common, "--reg", bundles / "both.kfac")
    assert result.exit_code == 0
    assert "the penalty also restricts changes of f on 'digits'" in result.stderr.replace("\n", " ")
    assert "protected tasks: digits, mnist" in result.stdout
    assert "also restricts changes of f on 'digits'" in run(
        *common, "--reg", bundles / "both.kfac", "--json"
    ).stderr.replace("\n", " ")
    before = (bundles / "both.kfac").read_bytes()
    result = run(*common[:-1], bundles / "both.kfac", "--reg", bundles / "both.kfac")
    assert result.exit_code == 2
    assert "is also an input" in result.stderr
    assert (bundles / "both.kfac").read_bytes() == before
    result = run(*common, "--reg", bundles / "digits.kfac")
    assert result.exit_code == 2
    assert "contain only 'digits'" in result.stderr


def test_parameters_that_no_bundle_covers_are_reported(bundles, tmp_path):
    common = ["train", "--task", "digits", *FEW, "--params", "visual.ln_p*", "--steps", 1, "--lr", 1e-4, "--reg"]
    common += [bundles / "mnist.kfac", "-o", tmp_path / "t.safetensors"]
    names = [name for name, _ in kp.load_model("tiny").module.named_parameters() if name.startswith("visual.ln_p")]
    result = run(*common)
    assert f"trained parameters that no bundle covers: {len(names)} ({names[0]}" in result.stderr
    assert not run(*common, "--quiet").stderr
    assert json.loads(run(*common, "--json").stdout)["unpenalised"] == names


def test_an_unusable_metrics_path_is_refused_before_the_model_is_loaded(tmp_path):
    (tmp_path / "t.metrics.jsonl").mkdir()
    result = run("train", "--model", "no such model", "--task", "digits", "-o", tmp_path / "t.safetensors")
    assert result.exit_code == 2
    assert f"{tmp_path / 't.metrics.jsonl'}: is a folder" in result.stderr.replace("\n", "")


def test_other_regimes_and_a_penalty_on_data(tmp_path):
    for regime in ("full", "attention"):
        output = tmp_path / f"{regime}.safetensors"
        assert run("train", "--task", "digits", *FEW, "--steps", 2, "--regime", regime, "-o", output).exit_code == 0
        assert kp.TaskVector.load(output).regime == regime
    output = tmp_path / "data.safetensors"
    result = run("train", "--task", "digits", *FEW, "--steps", 2, "--reg-data", "faces", "-o", output, "--json")
    assert json.loads(result.stdout)["held"] == ["faces"]


@pytest.fixture(scope="module")
def uninterrupted(bundles, tmp_path_factory):
    """The arguments and the vector of an uninterrupted run."""
    common = ["train", "--task", "digits", *FEW, "--steps", "10", "--reg", str(bundles / "mnist.kfac")]
    path = tmp_path_factory.mktemp("whole") / "whole.safetensors"
    assert run(*common, "-o", path, "-q").exit_code == 0
    return common, path


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_killed_and_resumed_run_gives_the_same_bytes(uninterrupted, tmp_path, number):
    common, whole = uninterrupted
    parts = tmp_path / "parts.safetensors"
    program = (
        "import time\n"
        "from kfacpack.training.trainer import Trainer\n"
        "add_gradient = Trainer._add_loss_gradient\n"
        "Trainer._add_loss_gradient = lambda *args: (time.sleep(0.1), add_gradient(*args))[1]\n"
        "Trainer.run.__kwdefaults__['every'] = 0.0\n"
        "import kfacpack_cli; kfacpack_cli.run()"
    )
    metrics = parts.with_suffix(".metrics.jsonl")
    with Python("-c", program, *common, "-o", parts) as process:
        while process.returncode is None and not (metrics.exists() and len(metrics.read_text().splitlines()) >= 4):
            time.sleep(0.01)
        process.send_signal(number)
        result = process.wait(120)
    assert result.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
    assert not parts.exists()
    assert run(*common, "-o", parts).exit_code == 2  # an unfinished run exists
    assert run(*common, "-o", parts, "--resume").exit_code == 0
    again = run(*common, "-o", parts, "--resume")
    assert again.exit_code == 2
    assert "is finished" in again.stderr
    assert parts.read_bytes() == whole.read_bytes()
    assert metrics.read_text() == whole.with_suffix(".metrics.jsonl").read_text()
    for path in (parts, whole):
        assert sorted(file.name for file in path.parent.iterdir()) == [f"{path.stem}.metrics.jsonl", path.name]


@pytest.mark.parametrize("penalty", ["--reg", "--reg-data"])
def test_two_processes_give_the_same_vector_as_one(bundles, tmp_path, penalty):
    # Adam divides by the size of the gradient. Where that is nearly zero, float32 results are mostly rounding errors.
    exact = penalty == "--reg-data"
    options = ["--reg-data", "faces", "--dtype", "float64"] if exact else ["--reg", bundles / "mnist.kfac"]
    common = ["train", "--task", "digits", *FEW, "--steps", "5", "--micro-batch-size", "2", *options, "-o"]
    assert run(*common, tmp_path / "one.safetensors").exit_code == 0
    results = python_twice("-m", "kfacpack_cli", *common, tmp_path / "two.safetensors", "--json")
    assert [result.returncode for result in results] == [0, 0], results
    # Only one of the processes prints and writes.
    assert json.loads("".join(result.stdout for result in results))["steps"] == 5
    one, two = (kp.TaskVector.load(tmp_path / f"{name}.safetensors") for name in ("one", "two"))
    assert one.about == two.about
    difference = sum(float((two[name] - one[name]).square().sum()) for name in one)
    assert difference**0.5 < (1e-6 if exact else 1e-2) * sum(float(one[name].square().sum()) for name in one) ** 0.5


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--task", "digitz"], "unknown task 'digitz'; did you mean 'digits'"),
        (["--reg", "/no/such.kfac"], "/no/such.kfac: No such file"),
        (["--reg-data", "digits"], "digits is the task being trained"),
        (["--strength", "-1", "--reg", "BUNDLE"], "strength -1"),
        (["--weight", "norm", "--reg", "BUNDLE"], "such as norm=10"),
        (["--weight", "norm=2", "--weight", "norm=3", "--reg", "BUNDLE"], "norm is given twice"),
        (["--weight", "nothing=2", "--reg", "BUNDLE"], "unknown group 'nothing'"),
        (["--reg", "BUNDLE", "--reg-data", "faces"], "or from data (--reg-data, reg_data), got both"),
        (["--reg-every", "4"], "--reg-every"),
        (["--strength", "2"], "--strength (strength) needs a penalty"),
        (["--reg-data", "faces", "--reg-data", "faces"], "faces is given twice"),
        (["--epochs", "0"], "epochs 0"),
        (["--reg-data", "faces", "--strength", "nan"], "strength nan"),
        (["--reg-data", "nothing"], "unknown task 'nothing'"),
        (["--reg-data", "faces="], "--reg-data 'faces=': expected TASK=DIR, such as cars=data/cars"),
        (["--preset", "tak", "--reg", "BUNDLE"], "no published strength for tiny"),
        (["--steps", "2", "--epochs", "1"], "steps or epochs, got both"),
        (["--lr", "nan"], "learning rate nan"),
        (["--lr", "1e39"], "learning rate 1e+39"),
        (["--strength", "1e300", "--reg", "BUNDLE"], "strength 1e+300: expected"),
        (["--weight", "norm=1e300", "--reg", "BUNDLE"], "the weight of 'norm' is 1e+300, expected"),
        (["--seed", str(2**64)], "seed 18446744073709551616: expected an integer from 0 to 2^64 - 1"),
        (["-o", "."], ".: is a folder"),
        (["--params", "ln_final.*"], "f does not depend on the chosen parameters (ln_final.weight"),
        (["--params", "nothing"], "no parameter matches 'nothing'"),
        (["-o", "/no/such/folder/t.safetensors"], "/no/such/folder"),
        (
            ["--model", "timm:vit_tiny_patch16_224", "--weights", "random", "--reg", "BUNDLE"],
            "was estimated for a different f",
        ),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else None,
)
def test_wrong_input_is_refused_and_nothing_is_written(bundles, tmp_path, wrong, words):
    arguments = [str(bundles / "mnist.kfac") if argument == "BUNDLE" else argument for argument in wrong]
    task = [] if "--task" in wrong else ["--task", "digits"]
    output = [] if "-o" in wrong else ["-o", tmp_path / "t.safetensors"]
    result = run("train", *task, *output, *arguments)
    assert result.exit_code == 2
    assert words in result.stderr.replace("\n", " ")
    assert not list(tmp_path.iterdir())


def test_a_task_with_one_class_is_refused(tmp_path):
    from image_folders import write_images

    write_images(tmp_path / "data", {"train": {"red": 3}, "test": {"red": 2}})
    result = run("train", "--task", "alone", "--data", tmp_path / "data", "-o", tmp_path / "t.safetensors")
    assert result.exit_code == 2
    assert "has only one class" in result.stderr


def test_the_next_command_has_the_options_of_the_data(tmp_path):
    from image_folders import write_images

    data = write_images(tmp_path / "two colours", {split: {"red": 3, "blue": 3} for split in ("train", "test")})
    result = run("train", "--task", "mine", "--data", data, *FEW, "--steps", 1, "-o", tmp_path / "t.safetensors")
    assert result.exit_code == 0, result.stderr
    words = shlex.split(result.stdout.splitlines()[-1].removeprefix("next: kfacpack "))
    assert words[0] == "eval"
    assert run(*words).exit_code == 0


def test_the_next_command_has_the_options_of_the_model(tmp_path):
    """Without --weights, eval would load other weights and refuse the vector."""
    model = ("--model", "tiny", "--weights", "random")
    result = run("train", "--task", "digits", *model, *FEW, "--steps", 1, "-o", tmp_path / "t.safetensors")
    assert result.exit_code == 0, result.stderr
    words = shlex.split(result.stdout.splitlines()[-1].removeprefix("next: kfacpack "))
    assert words[words.index("--weights") + 1] == "random"
