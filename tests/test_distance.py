"""The measures against what they are by definition."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sdflow.distance import largest_difference, psnr, relative_l2, root_mean_square, ssim

RANDOM = np.random.default_rng(0)
IMAGE = RANDOM.random((24, 32, 3))


def test_relative_l2_is_the_share_of_the_reference_that_is_off() -> None:
    assert relative_l2(1.01 * IMAGE, IMAGE) == pytest.approx(0.01)
    assert relative_l2(IMAGE, IMAGE) == 0


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_value_that_is_not_finite_is_infinitely_far(wrong: float) -> None:
    damaged = IMAGE.copy()
    damaged[3, 4, 1] = wrong
    assert relative_l2(damaged, IMAGE) == math.inf


def test_another_shape_is_infinitely_far() -> None:
    assert relative_l2(IMAGE[:1], IMAGE) == math.inf


def test_against_zeros_only_zeros_are_near() -> None:
    assert relative_l2(np.zeros(3), np.zeros(3)) == 0
    assert relative_l2(np.ones(3), np.zeros(3)) == math.inf


def test_float16_is_compared_without_overflow() -> None:
    large = np.full(1000, 60000, np.float16)
    assert relative_l2(large, large.astype(np.float32)) == 0


def test_root_mean_square() -> None:
    assert root_mean_square([3, 4]) == pytest.approx(math.sqrt(12.5))
    assert root_mean_square([]) == 0


def test_psnr_of_a_uniform_error() -> None:
    assert psnr(IMAGE + 0.01, IMAGE) == pytest.approx(40)
    assert psnr(IMAGE, IMAGE) == math.inf


def test_largest_difference() -> None:
    damaged = IMAGE.copy()
    damaged[5, 6, 2] += 0.25
    assert largest_difference(damaged, IMAGE) == pytest.approx(0.25)


def test_ssim_is_the_formula_of_the_paper_at_each_window() -> None:
    """Wang et al. 2004, equation 13, computed window by window."""
    other = np.clip(IMAGE + 0.1 * RANDOM.standard_normal(IMAGE.shape), 0, 1)
    offsets = np.arange(-5, 6)
    window = np.exp(-(offsets[:, None] ** 2 + offsets[None] ** 2) / (2 * 1.5**2))
    window /= window.sum()
    values = []
    for channel in range(3):
        for row in range(5, 19):
            for column in range(5, 27):
                x, y = (p[row - 5 : row + 6, column - 5 : column + 6, channel] for p in (other, IMAGE))
                mean_x, mean_y = (window * x).sum(), (window * y).sum()
                variance_x, variance_y = (window * (x - mean_x) ** 2).sum(), (window * (y - mean_y) ** 2).sum()
                covariance = (window * (x - mean_x) * (y - mean_y)).sum()
                top = (2 * mean_x * mean_y + 0.01**2) * (2 * covariance + 0.03**2)
                values.append(top / ((mean_x**2 + mean_y**2 + 0.01**2) * (variance_x + variance_y + 0.03**2)))
    assert ssim(other, IMAGE) == pytest.approx(np.mean(values), abs=1e-12)
    assert ssim(IMAGE, IMAGE) == pytest.approx(1)


def test_ssim_refuses_an_image_smaller_than_its_window() -> None:
    with pytest.raises(ValueError, match="10x32"):
        ssim(IMAGE[:10], IMAGE[:10])
