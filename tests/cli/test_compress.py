"""`kfacpack compress` and `estimate --compress`, from the command line."""

from __future__ import annotations

import json

import pytest
import torch
from kfacpack_cli.main import app
from kit import random_tau, refused, small_curvature
from safetensors.torch import save_file
from typer.testing import CliRunner

import kfacpack as kp


@pytest.fixture
def bundle(tmp_path):
    small_curvature("packed", out=40, inputs=50).save(tmp_path / "toy.kfac")
    return tmp_path / "toy.kfac"


def run(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)


def test_compress_reports_size_and_errors(bundle, tmp_path):
    result = run("compress", bundle, "block:4+int8", "-o", tmp_path / "small.kfac")
    assert result.exit_code == 0
    for words in (
        "small.kfac",
        "of the size as dense float32",
        "(Frobenius norm)",
        "on random task vectors",
        "unchanged blocks: 1 of ",
        "(scale)",
    ):
        assert words in result.stdout.replace("\n", " ")
    assert (tmp_path / "small.kfac").stat().st_size < bundle.stat().st_size
    assert kp.load(tmp_path / "small.kfac").blocks[0].losses[0].step == "block:4+int8"
    assert "block:4+int8" in run("inspect", tmp_path / "small.kfac", "--blocks").stdout


def test_json_has_every_block(bundle, tmp_path):
    curvature, target = kp.load(bundle), tmp_path / "small.kfac"
    tau = random_tau(curvature)
    save_file({**tau, "of.no.interest": torch.zeros(2)}, tmp_path / "tau.safetensors")
    completed = run("compress", bundle, "svd:25%", "-o", target, "--vector", tmp_path / "tau.safetensors", "--json")
    result = json.loads(completed.stdout)
    assert not completed.stderr
    assert (result["path"], result["bytes"], result["sha256"]) == (
        str(target),
        target.stat().st_size,
        kp.Bundle(target).digest,
    )
    assert [block["name"] for block in result["blocks"]] == [block.name for block in curvature.blocks]
    q, after = (float(curv.quadratic(tau)) for curv in (curvature, kp.load(target)))
    assert result["quadratic"]["vector"] == pytest.approx(abs(after - q) / q, rel=1e-4)
    recorded = [block.losses[-1] for block in kp.load(target).blocks if block.losses]
    measured = [block for block in result["blocks"] if block["step"]]
    assert [loss.frobenius for loss in recorded] == pytest.approx([block["frobenius"] for block in measured], rel=1e-5)
    small = kp.load(target)
    assert [loss.vector for loss in recorded] == pytest.approx(
        [block["quadratic"]["vector"] for block in measured], rel=1e-5
    )
    (whole,) = small.about.losses
    assert (whole.step, whole.frobenius) == ("svd:25%", pytest.approx(result["frobenius"], rel=1e-5))
    assert whole.quadratic == pytest.approx(result["quadratic"]["random"], rel=1e-5)
    assert whole.vector == pytest.approx(result["quadratic"]["vector"], rel=1e-5)
    assert "svd:25% (error of G" in run("inspect", target).stdout.replace("\n", " ")
    assert result["ratio"] == pytest.approx(result["bytes"] / result["dense_bytes"])


def test_a_budget_and_a_list_of_blocks(bundle, tmp_path):
    limit = int(0.7 * bundle.stat().st_size)
    result = run("compress", bundle, "--budget", limit, "-o", tmp_path / "small.kfac", "--blocks")
    assert result.exit_code == 0
    assert (tmp_path / "small.kfac").stat().st_size <= limit
    for block in kp.load(bundle).blocks:
        assert block.name in result.stdout


def test_a_budget_includes_the_recorded_errors(bundle, tmp_path):
    limit = int(0.7 * bundle.stat().st_size)
    save_file(random_tau(kp.load(bundle)), tmp_path / "tau.safetensors")
    to = ["-o", tmp_path / "small.kfac", "--vector", tmp_path / "tau.safetensors"]
    assert run("compress", bundle, "--budget", limit, *to).exit_code == 0
    assert (tmp_path / "small.kfac").stat().st_size <= limit
    assert kp.load(tmp_path / "small.kfac").about.losses[0].step == "budget"


def test_a_dry_run_writes_nothing(bundle, tmp_path):
    result = json.loads(run("compress", bundle, "int8", "--dry-run", "--json").stdout)
    assert list(tmp_path.iterdir()) == [bundle]
    run("compress", bundle, "int8", "-o", tmp_path / "small.kfac", "--quiet")
    assert result["path"] is None
    assert result["bytes"] == (tmp_path / "small.kfac").stat().st_size


def test_quiet_prints_nothing(bundle, tmp_path):
    result = run("compress", bundle, "int8", "-o", tmp_path / "small.kfac", "-q")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")


def test_the_same_command_gives_the_same_bytes(bundle, tmp_path):
    for name in ("a.kfac", "b.kfac"):
        run("compress", bundle, "svd:4+int8", "-o", tmp_path / name, "-q")
    assert (tmp_path / "a.kfac").read_bytes() == (tmp_path / "b.kfac").read_bytes()


def test_the_vector_is_never_overwritten(bundle, tmp_path):
    vector = tmp_path / "tau.safetensors"
    save_file(random_tau(kp.load(bundle)), vector)
    content = vector.read_bytes()
    (hard_link := tmp_path / "same.safetensors").hardlink_to(vector)
    for output in (vector, hard_link):
        result = run("compress", bundle, "int8", "--vector", vector, "-o", output)
        assert result.exit_code == 2
        assert str(output) in result.stderr.replace("\n", "")
        assert vector.read_bytes() == content


def test_bad_input_is_refused_and_nothing_is_written(bundle, tmp_path):
    tau = random_tau(kp.load(bundle))
    first = next(iter(tau))
    vectors = {
        "missing": {name: value for name, value in tau.items() if name != first},
        "shape": {**tau, first: torch.zeros(3)},
        "whole": {**tau, first: torch.zeros(tau[first].shape, dtype=torch.int32)},
        "nan": {**tau, first: torch.full(tau[first].shape, torch.nan)},
    }
    for name, tensors in vectors.items():
        save_file(tensors, tmp_path / name)
    before, content = sorted(tmp_path.iterdir()), bundle.read_bytes()
    (link := tmp_path / "link.kfac").symlink_to(bundle)
    to = ["-o", tmp_path / "small.kfac"]
    for arguments, words in (
        (["int8"], "-o SMALL.kfac"),
        (to, "either a codec, such as block:8+int8, or a budget, such as 70MB or 10%; got neither"),
        (["int8", "--budget", "10%", *to], "or a budget, such as 70MB or 10%; got both"),
        (["wavelet:3", *to], "Available codecs: block:K"),
        (["--budget", "lots", *to], "expected a size such as 70MB"),
        (["--budget", "10B", *to], "budget '10B' is 10 bytes, but the smallest file found has"),
        (["int8", "-o", bundle], "is also an input"),
        (["int8", "-o", link], "is also an input"),
        (["int8", "-o", "/no/such/folder/s.kfac"], "/no/such/folder"),
        (["int8", *to, "--vector", tmp_path / "missing"], f"has no tensor {first!r}; missing parameters: 1 of 10"),
        (["int8", *to, "--vector", tmp_path / "shape"], "expected a floating-point tensor of"),
        (["int8", *to, "--vector", tmp_path / "whole"], "is I32"),
        (["int8", *to, "--vector", tmp_path / "nan"], f"tensor {first!r}: contains NaN"),
        (["int8", *to, "--vector", "/no/such/vector"], "/no/such/vector"),
    ):
        result = run("compress", bundle, *arguments)
        assert result.exit_code == 2
        assert words in result.stderr.replace("\n", " ")
    link.unlink()
    assert sorted(tmp_path.iterdir()) == before
    assert bundle.read_bytes() == content
    assert run("compress", tmp_path / "missing", "int8", *to).exit_code == 2  # no bundle
    assert run("compress", tmp_path / "nowhere", "int8", *to).exit_code == 2


def test_an_estimate_can_be_compressed_at_once():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 48), torch.nn.LayerNorm(48), torch.nn.Linear(48, 8))
    x = torch.randn(30, 40)
    full = kp.estimate(model, [x])
    for spec in ("svd:4+int8", "prune:10%", "fp16"):
        micro_batch_size, later = kp.estimate(model, [x], compress=spec), kp.compress(full, spec)
        tau = random_tau(full)
        torch.testing.assert_close(micro_batch_size.quadratic(tau), later.quadratic(tau))
        assert [block.losses for block in micro_batch_size.blocks] == [block.losses for block in later.blocks]
    direct = kp.estimate(model, [x], compress="block:4+int8")
    assert [(loss.step, loss.frobenius is None) for loss in direct.blocks[0].losses] == [
        ("block:4", True),
        ("int8", False),
    ]
    torch.testing.assert_close(direct.quadratic(tau), kp.compress(full, "block:4+int8").quadratic(tau))
    assert [(loss.step, loss.frobenius) for loss in direct.about.losses] == [("block:4+int8", None)]
    for codec in ("svd:4", "int8", "svd:4+fp16"):
        with refused(kp.KfacpackError, repr(codec), "diagonal", "fp16 or bf16"):
            kp.estimate(model, [x], structure="diagonal", compress=codec)
    assert kp.estimate(model, [x], structure="diagonal", compress="fp16").nbytes < full.nbytes
