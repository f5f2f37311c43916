"""Distances between two results: relative L2 for tensors; PSNR, SSIM and the largest difference for images."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

SSIM_SIGMA, SSIM_REACH = 1.5, 5
SSIM_C1, SSIM_C2 = 0.01**2, 0.03**2


def relative_l2(value: np.ndarray, reference: np.ndarray) -> float:
    """|value - reference| / |reference|, in float64; infinite if a value is not finite or the shapes differ.

    If the reference is all zeros: 0 for zeros, infinite otherwise.
    """
    import numpy as np

    if value.shape != reference.shape or not np.isfinite(value).all():
        return math.inf
    wanted = reference.astype(np.float64)
    away = float(np.linalg.norm(value.astype(np.float64) - wanted))
    size = float(np.linalg.norm(wanted))
    return away / size if size else (math.inf if away else 0.0)


def root_mean_square(values: Iterable[float]) -> float:
    """The root mean square; 0 for no values."""
    every = list(values)
    return math.sqrt(sum(value * value for value in every) / len(every)) if every else 0.0


def largest_difference(image: np.ndarray, reference: np.ndarray) -> float:
    """The largest absolute difference of images in [0, 1]; infinite if a value is not finite."""
    import numpy as np

    if not np.isfinite(image).all():
        return math.inf
    return float(np.abs(image - reference).max())


def psnr(image: np.ndarray, reference: np.ndarray) -> float:
    """Peak signal-to-noise ratio in dB of images in [0, 1]; infinite if they are equal, 0 if a value is not finite."""
    import numpy as np

    if not np.isfinite(image).all():
        return 0.0
    error = float(np.mean((image.astype(np.float64) - reference) ** 2))
    return -10 * math.log10(error) if error else math.inf


def ssim(image: np.ndarray, reference: np.ndarray) -> float:
    """Mean structural similarity of two images, (rows, columns, channels) in [0, 1]; 1 if they are equal, 0 if a value
    is not finite.

    Wang et al. 2004, https://doi.org/10.1109/TIP.2003.819861: an 11x11 Gaussian window with standard deviation 1.5,
    K1 = 0.01, K2 = 0.03; per channel, over windows wholly inside. Raises ValueError below 11 pixels a side.
    """
    import numpy as np

    if min(image.shape[:2]) < 2 * SSIM_REACH + 1:
        raise ValueError(f"an image of {image.shape[0]}x{image.shape[1]} pixels is smaller than the window")
    if not np.isfinite(image).all():
        return 0.0
    x, y = image.astype(np.float64), reference.astype(np.float64)
    mean_x, mean_y = _blurred(x), _blurred(y)
    variance_x = _blurred(x * x) - mean_x**2
    variance_y = _blurred(y * y) - mean_y**2
    covariance = _blurred(x * y) - mean_x * mean_y
    likeness = (2 * mean_x * mean_y + SSIM_C1) * (2 * covariance + SSIM_C2)
    likeness /= (mean_x**2 + mean_y**2 + SSIM_C1) * (variance_x + variance_y + SSIM_C2)
    return float(likeness.mean())


def _blurred(values: np.ndarray) -> np.ndarray:
    """The Gaussian-weighted mean around each inner pixel: along the rows, then along the columns."""
    import numpy as np

    offsets = np.arange(-SSIM_REACH, SSIM_REACH + 1)
    window = np.exp(-(offsets**2) / (2 * SSIM_SIGMA**2))
    window /= window.sum()
    for axis in (0, 1):
        views = np.lib.stride_tricks.sliding_window_view(values, len(window), axis=axis)
        values = views @ window
    return values
