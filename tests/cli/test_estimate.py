"""`kfacpack estimate`, from the command line."""

from __future__ import annotations

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kfacpack_cli.main import app
from kit import refused
from PIL import Image
from processes import Python, python
from safetensors import safe_open
from typer.testing import CliRunner

import kfacpack as kp
from kfacpack.estimation.resume import PartialFile

TIMM = ["--model", "timm:test_vit", "--weights", "random", "--image-size", "32"]
SMALL = [*TIMM, "--params", "blocks.5.*", "--params", "cls_token"]


def run(*arguments, code=0):
    """Runs the command in this process."""
    result = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


def kfacpack(*arguments, launcher=()):
    """Runs the command in a new process, or in several that a launcher starts."""
    result = python(*launcher, "-m", "kfacpack_cli", *arguments)
    assert result.returncode == 0, result.stderr
    return result


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A folder of 24 pictures in two classes, of which two are held out for validation."""
    folder = tmp_path_factory.mktemp("pictures")
    generator = np.random.default_rng(0)
    for name in ("dark", "light"):
        (folder / "train" / name).mkdir(parents=True)
        for number in range(12):
            pixels = generator.integers(0, 128, (32, 32, 3), dtype=np.uint8) + (128 if name == "light" else 0)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / "train" / name / f"{number}.png")
    return folder


@pytest.fixture
def bundle(tmp_path):
    return tmp_path / "estimate.kfac"


@pytest.mark.parametrize("command", [("estimate", "-o"), ("eval", "--csv")])
def test_the_weights_are_never_overwritten(command, pictures, tmp_path):
    weights = tmp_path / "weights.safetensors"
    weights.write_bytes(b"weights")
    name, option = command
    arguments = ["--model", "timm:test_vit", "--weights", weights, "--task", "light", "--data", pictures]
    result = run(name, *arguments, option, weights, code=2)
    assert str(weights) in result.stderr.replace("\n", "")
    assert "input" in result.stderr
    assert weights.read_bytes() == b"weights"


def test_a_bundle_from_a_folder_of_pictures(pictures, bundle):
    result = run("estimate", *SMALL, "--task", "light", "--data", pictures, "-o", bundle, "--json")
    output = json.loads(result.stdout)
    assert output["path"] == str(bundle)
    assert (output["examples"], output["dataset_size"], output["bytes"]) == (22, 22, bundle.stat().st_size)
    assert not result.stderr
    about = kp.load(bundle).about
    assert (about.base.family, about.base.name, about.base.revision) == ("timm", "test_vit", "random-0")
    assert (about.source.task, about.source.split, about.source.examples) == ("light", "train", 22)
    assert about.estimate.probes == 1
    assert kp.verify(bundle).holds
    assert sorted(path.name for path in bundle.parent.iterdir()) == ["estimate.kfac"]


def test_the_bytes_depend_on_the_seed_only(pictures, tmp_path):
    common = ["estimate", *SMALL, "--task", "light", "--data", pictures, "--examples", "50%", "--batch-size", "5", "-q"]
    for name, seed, start in (("one", 1, run), ("again", 1, kfacpack), ("other", 2, run)):
        result = start(*common, "--seed", seed, "--weights", "random", "-o", tmp_path / name)
        assert not result.stdout + result.stderr
    one, again, other = ((tmp_path / name).read_bytes() for name in ("one", "again", "other"))
    assert one == again
    assert one != other


def test_a_dry_run_shows_the_plan_and_writes_nothing(pictures, bundle):
    common = ["estimate", *SMALL, "--task", "light", "--data", pictures, "-o", bundle, "--dry-run"]
    shown = run(*common).stdout
    for words in (
        "blocks.5.attn.qkv.weight",
        "blocks.5.attn.qkv.bias",
        "kronecker",
        "frozen: ",
        "pos_embed",
        "peak memory",
    ):
        assert words in shown
    plan = json.loads(run(*common, "--json").stdout)
    assert not bundle.exists()
    run(*common[:-1])
    manifest = kp.Bundle(bundle).manifest
    assert [block["name"] for block in plan["blocks"]] == [block.name for block in manifest.blocks]
    tensors = kp.Bundle(bundle).tensors.values()
    assert plan["bytes"] == sum(tensor.nbytes for tensor in tensors)
    assert {"pos_embed", "patch_embed.proj.weight", "blocks.0.norm1.weight"} <= set(plan["frozen"])


@pytest.fixture(scope="module")
def uninterrupted(pictures, tmp_path_factory):
    """The bundle of an uninterrupted run."""
    path = tmp_path_factory.mktemp("whole") / "whole.kfac"
    run("estimate", *SMALL, "--task", "light", "--data", pictures, "--batch-size", "1", "-o", path)
    return path


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_and_resumed_run_gives_the_same_bytes(pictures, tmp_path, uninterrupted, number):
    common = ["estimate", *SMALL, "--task", "light", "--data", pictures, "--batch-size", "1", "-o"]
    resumed = tmp_path / "resumed.kfac"
    # Every batch is slow and its state is stored, so that the run can be stopped half-way.
    slow = (
        "import time\n"
        "from kfacpack.estimation.accumulator import CurvatureAccumulator\n"
        "from kfacpack.estimation.task_estimate import TaskEstimate\n"
        "add_batch = CurvatureAccumulator.add_batch\n"
        "CurvatureAccumulator.add_batch = lambda *args: (time.sleep(0.2), add_batch(*args))[1]\n"
        "TaskEstimate.run.__kwdefaults__['every'] = 0.0\n"
        "import kfacpack_cli; kfacpack_cli.run()"
    )
    partial = tmp_path / "resumed.kfac.partial"
    until = time.monotonic() + 300
    with Python("-c", slow, *common, resumed) as process:
        while not partial.exists():
            assert process.returncode is None
            assert time.monotonic() < until
            time.sleep(0.05)
        time.sleep(0.5)
        process.send_signal(number)
        result = process.wait()
    if number == signal.SIGKILL:
        assert result.returncode == -signal.SIGKILL
    else:
        assert result.returncode == 130
        assert "--resume" in result.stderr
    assert not resumed.exists()
    assert partial.exists()
    if number == signal.SIGKILL:
        assert "--resume" in run(*common, resumed, code=2).stderr
        assert "batch_size = 1" in run(*common, resumed, "--resume", "--batch-size", 2, code=2).stderr
    run(*common, resumed, "--resume")
    assert "is finished" in run(*common, resumed, "--resume", code=2).stderr
    assert resumed.read_bytes() == uninterrupted.read_bytes()
    assert not partial.exists()


def test_an_unfinished_run_with_a_flipped_byte_is_refused(tmp_path):
    estimation = SimpleNamespace(tensors=lambda: iter([("sum", torch.arange(100.0))]))
    partial = PartialFile(tmp_path / "t.kfac.partial", "an estimate", {"seed": 1})
    partial.save(estimation, 3, now=True)
    assert partial.restore(estimation) == 3
    raw = bytearray(partial.path.read_bytes())
    raw[-7] ^= 1
    partial.path.write_bytes(raw)
    with refused(kp.KfacpackError, "t.kfac.partial", "'sum'", "digest", "Remove the file"):
        partial.restore(estimation)


def test_two_runs_may_save_their_state_to_one_file(tmp_path):
    def save(seed):
        estimation = SimpleNamespace(tensors=lambda: iter([("sum", torch.full((1000,), float(seed)))]))
        for done in range(50):
            partial(seed).save(estimation, done, now=True)

    def partial(seed):
        return PartialFile(tmp_path / "t.kfac.partial", "an estimate", {"seed": seed})

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(save, (0, 1)))
    assert [path.name for path in tmp_path.iterdir()] == ["t.kfac.partial"]
    with safe_open(tmp_path / "t.kfac.partial", "pt") as file:
        last = int(file.get_tensor("sum")[0])
    assert partial(last).restore(SimpleNamespace(tensors=lambda: iter([("sum", torch.zeros(1000))]))) == 49


def test_a_damaged_unfinished_run_is_refused(pictures, bundle):
    bundle.with_name("estimate.kfac.partial").write_bytes(b"no such thing")
    common = ["estimate", *SMALL, "--task", "light", "--data", pictures, "-o", bundle]
    assert "Remove the file" in run(*common, "--resume", code=2).stderr


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_launched_processes_give_the_same_curvature_as_one(pictures, tmp_path, launcher):
    """torchrun starts two processes. On a CPU, accelerate always starts one; on GPUs it uses torchrun."""
    common = ["estimate", *SMALL, "--task", "light", "--data", pictures, "--batch-size", "5", "--samples", "2", "-o"]
    run(*common, tmp_path / "one.kfac")
    if launcher == "torchrun":
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    else:
        pytest.importorskip("accelerate")
        launch = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
    result = kfacpack(*common, tmp_path / "two.kfac", "--json", launcher=launch)
    assert json.loads(result.stdout)["examples"] == 22
    one, two = kp.load(tmp_path / "one.kfac"), kp.load(tmp_path / "two.kfac")
    assert one.about == two.about
    generator = torch.Generator().manual_seed(0)
    tau = {p.name: torch.randn(p.shape, generator=generator) for p in one.about.base.parameters}
    for name, value in one.apply(tau).items():
        torch.testing.assert_close(two.apply(tau)[name], value, rtol=1e-4, atol=1e-4 * float(value.abs().max()))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--model", "ViT-B-33"], "ViT-B-32"),
        (["--model", "timm:test_vit", "--weights", "/no/such/file"], "/no/such/file"),
        (["--data", "/no/such/folder"], "/no/such/folder"),
        (["--examples", "0"], "expected a number such as 256"),
        (["--examples", "120%"], "120%"),
        (["--split", "nowhere"], "nowhere"),
        (["--compress", "wavelet:4"], "block:K"),
        (["--compress", "block:4000"], "4000"),
        (["--params", "nothing.*"], "'nothing.*'"),
        (["-o", "/no/such/folder/t.kfac"], "/no/such/folder"),
        (["--samples", "500"], "output of width 64"),
        (["--device", "cuda:7"], "cuda:7"),
        (["--device", "bogus"], "bogus"),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, list) else None,
)
def test_wrong_input_is_refused_and_nothing_is_written(pictures, tmp_path, wrong, words):
    common = ["estimate", *SMALL, "--task", "light", "--data", pictures, "-o", tmp_path / "t.kfac"]
    result = run(*common, *wrong, code=2)
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())


def test_the_error_for_an_unknown_task_names_the_option_data():
    assert "--data DIR" in run("estimate", *SMALL, "--task", "unknown-task", code=2).stderr


def test_the_script_of_the_readme_predicts_the_drift_it_measures(tmp_path):
    example = Path(__file__).resolve().parents[2] / "examples" / "own_module.py"
    result = python(example, tmp_path / "own.kfac")
    assert result.returncode == 0, result.stderr
    predicted, measured = (float(line.split()[-1]) for line in result.stdout.splitlines())
    assert predicted == pytest.approx(measured, rel=0.25)
    assert kp.verify(tmp_path / "own.kfac").holds
