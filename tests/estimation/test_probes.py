"""Random directions are unbiased and reproducible; orthogonal ones are at least as accurate as gaussian ones."""

from __future__ import annotations

import pytest
import torch
from estimation.nets import Transformer, images, mlp, seeded, vectors

import kfacpack as kp
from kfacpack.estimation.options import Probes


def relative_error(estimated, exact, tau):
    return abs(float(estimated.quadratic(tau)) / float(exact.quadratic(tau)) - 1)


def rows(examples):
    """Returns the first row of every example."""
    return [(example, 0) for example in examples]


def random_tau(model, seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.shape, generator=generator, dtype=p.dtype) for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", ["gaussian", "rademacher", "orthogonal"])
@pytest.mark.parametrize("samples", [1, 2, 3])
def test_directions_have_identity_covariance(kind, samples):
    width = 3
    drawn = torch.stack(
        list(Probes("mc", kind, samples, seed=3).draw(rows(range(20000)), torch.zeros(1, width)))
    )  # (M, N, C)
    covariance = torch.einsum("mni,mnj->ij", drawn, drawn) / drawn.shape[:2].numel()
    torch.testing.assert_close(covariance, torch.eye(width, dtype=drawn.dtype), rtol=0, atol=0.05)


def test_the_directions_of_an_example_depend_on_its_number_only():
    probes = Probes("mc", "orthogonal", 2, seed=9)
    f = torch.zeros(1, 6)
    together = list(probes.draw(rows([4, 11, 5]), f))
    alone = list(probes.draw(rows([11]), f))
    for every, one in zip(together, alone, strict=True):
        torch.testing.assert_close(every[1:2], one, rtol=0, atol=1e-12)
    assert not torch.equal(together[0], next(Probes("mc", "orthogonal", 2, seed=10).draw(rows([4, 11, 5]), f)))
    assert not torch.equal(alone[0], next(probes.draw([(11, 1)], f)))


@pytest.mark.parametrize("make", [mlp, lambda: Transformer("fused")], ids=["mlp", "transformer"])
@pytest.mark.parametrize("options", [{}, {"sharing": "reduce"}, {"structure": "diagonal"}], ids=str)
def test_as_many_orthogonal_directions_as_outputs_are_exact(make, options):
    model = seeded(make)
    x = images() if isinstance(model, Transformer) else vectors(5)
    exact = kp.estimate(model, [x], fisher="exact", **options)
    all_three = kp.estimate(model, [x], samples=3, **options)
    tau = random_tau(model, 1)
    for name, value in exact.apply(tau).items():
        torch.testing.assert_close(all_three.apply(tau)[name], value, rtol=1e-9, atol=1e-12)


def test_the_error_falls_with_the_square_root_of_all_directions():
    """Sixteen times as many directions, by examples or by samples, give a quarter of the error, within a third."""
    model, x = seeded(mlp), vectors(5, 4)
    exact = kp.estimate(model, [x], fisher="exact")
    tau = random_tau(model, 2)

    def error(repeats, samples):
        batches = [x] * repeats
        errors = [
            relative_error(kp.estimate(model, batches, samples=samples, probe="gaussian", seed=seed), exact, tau)
            for seed in range(60)
        ]
        return sum(error**2 for error in errors) ** 0.5

    few = error(1, 1)
    assert error(16, 1) == pytest.approx(few / 4, rel=0.33)
    assert error(1, 16) == pytest.approx(few / 4, rel=0.33)
    assert error(4, 4) == pytest.approx(few / 4, rel=0.33)


def test_orthogonal_directions_are_at_least_as_accurate_as_gaussian_ones(capsys):
    class Wide(torch.nn.Module):
        """f of width 8, so that four orthogonal directions are fewer than all."""

        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 8)).double()

        def forward(self, x):
            return self.layers(x)

    model, x = seeded(Wide), vectors(5, 8)
    exact = kp.estimate(model, [x], fisher="exact")
    means = {}
    for kind in ("gaussian", "rademacher", "orthogonal"):
        for samples in (1, 4):
            errors = [
                relative_error(
                    kp.estimate(model, [x], probe=kind, samples=samples, seed=seed), exact, random_tau(model, seed)
                )
                for seed in range(100)
            ]
            means[kind, samples] = sum(errors) / len(errors)
    with capsys.disabled():
        print("\nmean relative error of quadratic, 100 seeds     M = 1    M = 4")
        for kind in ("gaussian", "rademacher", "orthogonal"):
            print(f"  {kind:40} {means[kind, 1]:10.4f} {means[kind, 4]:8.4f}")
    assert means["orthogonal", 1] <= means["gaussian", 1]
    assert means["orthogonal", 4] <= means["gaussian", 4]


def test_invalid_options_are_refused():
    model, x = seeded(mlp), vectors(5)
    for wrong, words in (
        ({"samples": 4}, "4 orthogonal probes .* width 3; expected at most 3"),
        ({"samples": 0}, "samples 0"),
        ({"probe": "normal"}, "'orthogonal', 'rademacher' or 'gaussian'"),
        ({"fisher": "empirical"}, "'mc' or 'exact'"),
        ({"seed": -1}, "seed -1"),
    ):
        with pytest.raises(kp.KfacpackError, match=words):
            kp.estimate(model, [x], **wrong)
