"""Eigenvalues of every form of matrix equal those of the dense matrix."""

from __future__ import annotations

import pytest
import torch
from kit import MATRIX_FORMS, random_psd, small_curvature
from toys import on_device

import kfacpack as kp
from kfacpack.evaluation.bundle_quality import MAX_EIGENVALUES, effective_rank, spectra


@pytest.mark.parametrize("stored_as", MATRIX_FORMS)
@pytest.mark.parametrize("side", [1, 7, 12])
def test_every_form_has_the_eigenvalues_of_its_dense_matrix(stored_as, side):
    matrix = MATRIX_FORMS[stored_as](random_psd(side, 3))
    expected = torch.linalg.eigvalsh(matrix.dense(torch.float64)).flip(0)
    eigenvalues = matrix.eigenvalues()
    assert eigenvalues.dtype == torch.float64
    torch.testing.assert_close(eigenvalues, expected, rtol=1e-9, atol=1e-12)


def test_structured_matrices_are_not_converted_to_dense(monkeypatch):
    for form in (kp.Diagonal, kp.BlockDiagonal, kp.LowRank):
        monkeypatch.setattr(form, "dense", lambda *_: pytest.fail("was made dense"))
    assert kp.Diagonal.of(torch.arange(100_000.0)).eigenvalues()[0] == 99_999
    assert len(MATRIX_FORMS["block"](random_psd(10, 0)).eigenvalues()) == 10
    assert len(kp.LowRank.from_dense(random_psd(10, 0), 0).eigenvalues()) == 10


def test_every_matrix_of_every_block_is_listed():
    curvature = small_curvature("packed")
    progress = []
    entries = spectra(curvature, on_progress=lambda done, total: progress.append((done, total)))["blocks"]
    listed = [(block.name, *entry) for block in curvature.blocks for entry in block.structure.matrices()]
    assert len(entries) == len(listed)
    assert progress[-1] == (len({id(matrix) for _, _, matrix in listed}),) * 2
    assert {(spectrum["name"], spectrum["side"]) for spectrum in entries} >= {
        ("one.weight", "A"),
        ("one.weight", "B"),
        ("two.weight (term 2)", "B"),
        ("norm", "G"),
    }
    for spectrum, (_, _, matrix) in zip(entries, listed, strict=True):
        dense = matrix.dense(torch.float64)
        assert spectrum["size"] == len(dense)
        assert spectrum["trace"] == pytest.approx(float(dense.trace()))
        assert spectrum["ranks"] == list(range(1, len(dense) + 1))
        assert spectrum["eigenvalues"] == pytest.approx(torch.linalg.eigvalsh(dense).flip(0).tolist(), abs=1e-12)


def test_some_eigenvalues_of_a_large_matrix_are_listed():
    values = torch.linspace(5000, 1, 5000, dtype=torch.float64)
    block = kp.CurvatureBlock(
        "w",
        "multiply",
        kp.Join(rows=5000, columns=1, pieces=(kp.Piece(parameter="w", view="column"),)),
        kp.Whole(kp.Diagonal.of(values.flip(0).clone())),
    )
    about = small_curvature("dense").about
    base = kp.identify({"w": torch.zeros(5000)}, ["w"], family="test", name="wide")
    (spectrum,) = spectra(kp.Curvature([block], about.model_copy(update={"base": base})))["blocks"]
    assert len(spectrum["ranks"]) == len(set(spectrum["ranks"])) <= MAX_EIGENVALUES
    assert (spectrum["ranks"][0], spectrum["ranks"][-1]) == (1, 5000)
    assert spectrum["eigenvalues"] == [float(values[rank - 1]) for rank in spectrum["ranks"]]
    ratios = [b / a for a, b in zip(spectrum["ranks"], spectrum["ranks"][1:], strict=False) if a > 100]
    assert max(ratios) / min(ratios) < 1.03


def test_the_effective_rank_counts_equal_directions():
    assert effective_rank(torch.tensor([2.0, 2.0, 2.0, 0.0])) == pytest.approx(3)
    assert effective_rank(torch.tensor([5.0, 0.0, -1e-9])) == pytest.approx(1)
    assert effective_rank(torch.zeros(3)) == 0
    assert effective_rank(*on_device(torch.ones(4))) == pytest.approx(4), "on a device without float64"
    halves = torch.tensor([0.5, 0.25, 0.25])
    assert effective_rank(halves) == pytest.approx(2**1.5)
