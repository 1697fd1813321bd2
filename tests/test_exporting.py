"""Exported factors give the same quadratic as the bundle, with only torch and safetensors."""

from __future__ import annotations

import json

import pytest
import torch
from kfacpack_cli.main import app
from kit import MATRIX_FORMS, of_task, random_tau, refused, small_curvature
from safetensors import safe_open
from typer.testing import CliRunner

import kfacpack as kp


def quadratic(path, tau):
    """Follows the instructions in the file, without kfacpack."""
    with safe_open(path, "pt") as file:
        factors, total = json.loads(file.metadata()["factors"]), 0.0
        for block in factors["blocks"]:
            dW = torch.zeros(block["join"]["rows"], block["join"]["columns"], dtype=torch.float64)
            for piece in block["join"]["pieces"]:
                part = tau[piece["parameter"]].double()
                part = part[slice(*piece["rows"])] if "rows" in piece else part
                matrix = part.reshape(-1, 1) if piece["view"] == "column" else part.reshape(len(part), -1)
                matrix = matrix.T if piece["view"] == "transposed" else matrix
                top, left = piece["at"]
                dW[top : top + matrix.shape[0], left : left + matrix.shape[1]] = matrix

            def times(name, x):
                M = file.get_tensor(name).double()
                return M @ x if M.dim() == 2 else M[:, None] * x

            if "G" in block:
                GdW = times(block["G"], dW.reshape(-1, 1)).reshape(dW.shape)
            else:
                GdW = sum(term["weight"] * times(term["B"], times(term["A"], dW.T).T) for term in block["terms"])
            total += float((dW * GdW).sum())
    return total


@pytest.mark.parametrize("stored_as", MATRIX_FORMS)
def test_every_form_is_exported_dense(stored_as, tmp_path):
    curvature = small_curvature(stored_as)
    tau = random_tau(curvature)
    kp.export(curvature, tmp_path / "factors.safetensors")
    exported = quadratic(tmp_path / "factors.safetensors", tau)
    assert exported == pytest.approx(float(curvature.quadratic(tau)), rel=1e-5)


def test_every_term_of_a_merged_bundle_is_exported(tmp_path):
    one, other = (of_task(task, seed=seed) for seed, task in enumerate(("a", "b")))
    merged = kp.merge([one, other], rule="stack", weights=[1, 2])
    tau = random_tau(one)
    kp.export(merged, tmp_path / "factors.safetensors")
    assert quadratic(tmp_path / "factors.safetensors", tau) == pytest.approx(float(merged.quadratic(tau)), rel=1e-5)


def test_the_command(tmp_path):
    small_curvature("packed").save(tmp_path / "toy.kfac")
    curvature, target = kp.load(tmp_path / "toy.kfac"), tmp_path / "factors.safetensors"

    def run(*arguments):
        return CliRunner().invoke(app, ["export", *map(str, arguments)], catch_exceptions=False)

    result = run(tmp_path / "toy.kfac", "-o", target, "--dtype", "bfloat16", "--json")
    summary = json.loads(result.stdout)
    assert (summary["bytes"], summary["blocks"]) == (target.stat().st_size, len(curvature.blocks))
    with safe_open(target, "pt") as file:
        assert file.get_tensor(f"{curvature.blocks[0].name}/A").dtype is torch.bfloat16
        about = json.loads(file.metadata()["factors"])
        assert about["scaling"]["formula"] == curvature.about.scaling.formula
        assert about["bundle"] == curvature.digest
        assert "B @ dW @ A" in file.metadata()["how"]
    assert "wrote" in run(tmp_path / "toy.kfac", "-o", target).stdout
    assert run(tmp_path / "toy.kfac", "-o", tmp_path / "toy.kfac").exit_code == 2


def test_values_out_of_range_are_refused_and_nothing_is_written(tmp_path):
    curvature = small_curvature("packed")
    name = curvature.blocks[0].name
    large = kp.Curvature(
        [
            kp.CurvatureBlock(
                b.name, b.operation, b.join, b.structure.map_matrices(lambda m: kp.Dense.of(m.dense() * 1e9))
            )
            for b in curvature.blocks
        ],
        curvature.about,
    )
    with refused(kp.KfacpackError, name, "range for float16"):
        kp.export(large, tmp_path / "factors.safetensors", dtype="float16")
    assert not list(tmp_path.iterdir())
