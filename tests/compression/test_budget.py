"""A budget is kept to the byte, with a smaller error than any single codec."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import refused, small_curvature
from sklearn.datasets import load_digits
from torch import nn

import kfacpack as kp
from kfacpack.compression.compress import choose_codecs, compress_with
from kfacpack.curvature.saving import file_size
from kfacpack.format.units import parse_size

SINGLE = ["int8", "fp16", "bf16", "block:2", "block:8", "block:8+int8", "block:5+fp16", "svd:16", "svd:25%+int8"]


@pytest.fixture(scope="module")
def digits() -> kp.Curvature:
    """The curvature of a small network on real images."""
    torch.manual_seed(0)
    x = torch.from_numpy(load_digits().data[:200]).float() / 16
    model = nn.Sequential(
        nn.Linear(64, 96), nn.LayerNorm(96), nn.GELU(), nn.Linear(96, 64), nn.GELU(), nn.Linear(64, 10)
    )
    return kp.estimate(model, x.split(50), fisher="exact")


@pytest.mark.parametrize("spec", SINGLE)
def test_a_budget_has_a_smaller_error_than_one_codec_for_all(digits, spec):
    uniform, loss = compress_with(digits, choose_codecs(digits, spec, None))
    chosen, budget_loss = compress_with(digits, choose_codecs(digits, None, file_size(uniform)))
    assert file_size(chosen) <= file_size(uniform)
    assert budget_loss.moments.quadratic <= loss.moments.quadratic


@pytest.mark.parametrize("budget", ["40%", "20%", "10%", "60kB"])
def test_the_file_is_within_its_budget(digits, tmp_path, budget):
    small, report = compress_with(digits, choose_codecs(digits, None, budget))
    small.save(tmp_path / "t.kfac")
    assert (tmp_path / "t.kfac").stat().st_size == file_size(small) <= parse_size(budget, report.dense_bytes)
    assert kp.verify(tmp_path / "t.kfac").holds


def test_a_larger_budget_has_no_larger_error(digits):
    """The objective is the product of the errors on random τ and along the curvature."""
    errors = [
        compress_with(digits, choose_codecs(digits, None, f"{share}%"))[1].moments for share in (10, 20, 30, 45, 60)
    ]
    products = [moments.quadratic * moments.along for moments in errors]
    assert products == sorted(products, reverse=True)
    assert products[-1] == 0


@settings(max_examples=4)
@given(seed=st.integers(0, 2**16), share=st.floats(0.4, 1.0))
def test_budget_with_shared_matrices_and_several_terms(seed, share):
    curvature = small_curvature("packed", seed, out=60, inputs=70)
    limit = int(file_size(curvature) * share)
    small = kp.compress(curvature, budget=limit)
    assert file_size(small) <= limit
    one, two = small.blocks[:2]
    assert one.structure.terms[0][1] is two.structure.terms[0][1] is two.structure.terms[1][1]


def test_impossible_requests_are_refused(digits):
    with refused(kp.KfacpackError, "'2kB'", "2,000 bytes", "smallest file"):
        kp.compress(digits, budget="2kB")
    for both in ({}, {"spec": "int8", "budget": "10%"}):
        with refused(kp.KfacpackError, "codec", "budget", "both" if both else "neither"):
            kp.compress(digits, **both)


@pytest.mark.parametrize(
    ("size", "bytes_"),
    [("70MB", 70_000_000), ("1.5 GB", 1_500_000_000), ("10%", 100), ("12.5%", 125), (4096, 4096), ("300", 300)],
)
def test_sizes_are_parsed(size, bytes_):
    assert parse_size(size, 1000) == bytes_


@pytest.mark.parametrize("size", ["", "MB", "-3MB", "0", "10 %%", "1e3", "70 TiB", True, None])
def test_other_sizes_are_refused(size):
    with refused(kp.KfacpackError, f"budget {size!r}", "70MB"):
        parse_size(size, 1000)
