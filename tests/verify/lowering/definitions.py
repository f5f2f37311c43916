"""The contrib operators as their published definitions say, in numpy and float64; written from ONNX Runtime's
docs/ContribOperators.md, not from the lowerings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray
_erf = np.vectorize(math.erf, otypes=[np.float64])


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + _erf(x / math.sqrt(2)))


def bias_gelu(a: Array, b: Array) -> Array:
    return gelu(a + b)


def fast_gelu(x: Array, bias: Array | None = None) -> Array:
    x = x if bias is None else x + bias
    return 0.5 * x * (1 + np.tanh(0.7978845608028654 * x + 0.035677408136300125 * x**3))


def quick_gelu(x: Array, alpha: float = 1.702) -> Array:
    return x / (1 + np.exp(-alpha * x))


def bias_split_gelu(x: Array, bias: Array) -> Array:
    left, right = np.split(x + bias, 2, axis=2)
    return left * gelu(right)


def bias_add(x: Array, bias: Array, skip: Array) -> Array:
    return x + bias[None, None, :] + skip


def group_norm(
    x: Array, gamma: Array, beta: Array, *, groups: int, activation: int, epsilon: float = 1e-5, channels_last: int = 1
) -> Array:
    y = np.empty_like(x)
    x_nchw, y_nchw = (np.moveaxis(a, -1, 1) if channels_last else a for a in (x, y))
    per_group = x_nchw.shape[1] // groups
    for image in range(len(x)):
        for channel in range(x_nchw.shape[1]):
            first = channel // per_group * per_group
            group = x_nchw[image, first : first + per_group]
            value = (x_nchw[image, channel] - group.mean()) / math.sqrt(group.var() + epsilon)
            value = gamma[channel] * value + beta[channel]
            y_nchw[image, channel] = silu(value) if activation else value
    return y


def skip_sum(x: Array, skip: Array, bias: Array | None, channels_last: int = 1) -> Array:
    images, channels = len(x), x.shape[-1 if channels_last else 1]
    along = (1, 1, 1, channels) if channels_last else (1, channels, 1, 1)
    s = x + (skip.reshape(images, *along[1:]) if skip.size == images * channels else skip)
    return s if bias is None else s + bias.reshape(along)


def layer_norm(x: Array, gamma: Array, beta: Array | None, epsilon: float = 1e-12) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    y = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon) * gamma
    return y if beta is None else y + beta


def root_mean_square_norm(x: Array, scale: Array, epsilon: float) -> Array:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * scale


def conv(x: Array, w: Array, bias: Array | None, *, pads: Any, strides: Any, dilations: Any, group: int = 1) -> Array:
    """NHWC; w (M, kH, kW, C/group)."""
    top, left, bottom, right = pads
    x = np.pad(x, ((0, 0), (top, bottom), (left, right), (0, 0)))
    n, height, width, channels = x.shape
    m, kernel_h, kernel_w, _ = w.shape
    out_h = (height - dilations[0] * (kernel_h - 1) - 1) // strides[0] + 1
    out_w = (width - dilations[1] * (kernel_w - 1) - 1) // strides[1] + 1
    y = np.zeros((n, out_h, out_w, m), x.dtype)
    for output in range(m):
        of = output // (m // group)
        part = x[..., of * (channels // group) : (of + 1) * (channels // group)]
        for i in range(out_h):
            for j in range(out_w):
                rows = i * strides[0] + dilations[0] * np.arange(kernel_h)
                columns = j * strides[1] + dilations[1] * np.arange(kernel_w)
                y[:, i, j, output] = (part[:, rows][:, :, columns] * w[output]).sum((1, 2, 3))
    return y if bias is None else y + bias


def attend(
    q: Array, k: Array, v: Array, *, scale: float = 0.0, bias: Array | None = None,
    masked: Callable[[int, int, int], bool] = lambda image, query, key: False,
    filter_value: float = -10000.0, causal: bool = False,
) -> Array:  # fmt: skip
    """q (B, S, N, H), k (B, L, N, H), v (B, L, N, Hv), one score at a time."""
    images, queries, heads, size = q.shape
    keys = k.shape[1]
    scale = scale or 1 / math.sqrt(size)
    y = np.zeros((images, queries, heads, v.shape[-1]))
    for image in range(images):
        for head in range(heads):
            for query in range(queries):
                scores = np.zeros(keys)
                for key in range(keys):
                    scores[key] = scale * np.dot(q[image, query, head], k[image, key, head])
                    if bias is not None:
                        scores[key] += np.broadcast_to(bias, (images, heads, queries, keys))[image, head, query, key]
                    if masked(image, query, key):
                        scores[key] += filter_value
                    if causal and key > query:
                        scores[key] = -np.inf
                weights = np.exp(scores - scores.max())
                y[image, query, head] = weights / weights.sum() @ v[image, :, head]
    return y.reshape(images, queries, -1)
