"""Drawing primitives against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kfacpack._random import CounterRandom
from kfacpack.demo import canvas


def one(value: float) -> np.ndarray:
    return np.array([value], dtype=np.float32)


def test_points_are_pixel_centres():
    x, y = canvas.grid_points(2, 4)
    assert x.shape == y.shape == (2, 4, 4)
    assert x[1, 2].tolist() == [-0.75, -0.25, 0.25, 0.75]
    assert y[1, :, 2].tolist() == [-0.75, -0.25, 0.25, 0.75]


@pytest.mark.parametrize("degrees", [-80, -10, 0, 30, 89])
def test_rotate_is_a_rotation(degrees):
    x, y = canvas.grid_points(1, 6)
    angle = math.radians(degrees)
    u, v = canvas.rotate(x, y, one(math.tan(angle / 2)))
    np.testing.assert_allclose(u, math.cos(angle) * x + math.sin(angle) * y, atol=1e-6)
    np.testing.assert_allclose(v, math.cos(angle) * y - math.sin(angle) * x, atol=1e-6)


def test_sampling_an_image_at_its_pixels_returns_it():
    pictures = CounterRandom("pictures").uniform((3, 7, 7))
    np.testing.assert_allclose(canvas.sample_field(pictures, *canvas.grid_points(3, 7)), pictures, atol=1e-6)


def test_sampling_interpolates_and_repeats_the_border():
    picture = np.array([[[0.0, 1.0], [2.0, 3.0]]], dtype=np.float32)
    x, y = (np.array([[[a, b]]], dtype=np.float32) for a, b in ((0.0, -5.0), (0.0, 5.0)))
    assert canvas.sample_field(picture, x, y).tolist() == [[[1.5, 2.0]]]


def test_a_glyph_covers_its_square_only():
    x, y = canvas.translate(*canvas.grid_points(1), (one(0.5), one(0.0)), one(8 / 14))
    coverage = canvas.stamp_glyph(np.ones((1, 8, 8), np.float32), x, y)
    assert coverage.sum() == 8 * 8
    assert np.argwhere(coverage[0]).mean(axis=0) == pytest.approx([13.5, 20.5], abs=0.5)


def test_blur_keeps_the_mean_and_dilate_grows():
    coverage = np.zeros((2, 28, 28), np.float32)
    coverage[:, 8:20, 12:15] = 1
    assert canvas.blur(coverage, np.ones(2, np.float32)).sum() == pytest.approx(coverage.sum(), rel=1e-5)
    thin, thick = canvas.dilate(coverage, np.array([-0.2, 0.9], np.float32)).sum(axis=(1, 2))
    assert thin < coverage[0].sum() < thick


def test_wave_is_a_triangle_wave():
    assert canvas.wave(np.array([0, 0.25, 0.5, 0.75, 1, -0.25], np.float32)).tolist() == [1, 0.5, 0, 0.5, 1, 0.5]


def test_pixels_are_rounded_and_clipped():
    assert canvas.pixels(np.array([-1, 0, 0.5, 1, 7], np.float32)).tolist() == [0, 0, 128, 255, 255]
