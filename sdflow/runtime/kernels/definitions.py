"""Reference results of the operators in numpy: cases, random inputs, and results by definition."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sdflow.onnx_model.phases import PHASES

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class GroupNormCase:
    """A group normalization.

    shape: of x, NHWC. skip: none, `full` (like x) or `row` (N, C). kept: also output x + skip + bias. groups: number of
    channel groups. single: float32 instead of float16.
    """

    shape: tuple[int, int, int, int]
    skip: str = "none"
    bias: bool = False
    kept: bool = False
    silu: bool = True
    groups: int = 32
    single: bool = False

    @property
    def operator(self) -> str:
        """Name of the operator for this type."""
        return "GroupNormSingle" if self.single else "GroupNorm"


CASES = (
    GroupNormCase((2, 32, 32, 320), silu=False),  # groups of 10, across vectors
    GroupNormCase((2, 16, 17, 640), skip="row", bias=True),
    GroupNormCase((3, 5, 3, 1280), skip="full", bias=True, kept=True),
    GroupNormCase((2, 8, 8, 2560), skip="full", kept=True),
    GroupNormCase((1, 1, 7, 960), skip="full", bias=True),
    GroupNormCase((1, 129, 127, 256), skip="row", bias=True, kept=True),  # just fits in one pass
    GroupNormCase((1, 128, 130, 128)),  # groups of 4; from here on, x is read twice
    GroupNormCase((1, 160, 161, 256), skip="full", bias=True, kept=True),
    GroupNormCase((2, 160, 160, 128), skip="full", silu=False),
    GroupNormCase((1, 130, 128, 320), skip="row", bias=True),
    GroupNormCase((2, 96, 161, 320), skip="row", kept=True),
    GroupNormCase((1, 128, 130, 128), single=True),
    GroupNormCase((2, 33, 31, 320), skip="full", bias=True, kept=True, single=True),
)


GELU_SHAPES = ((2, 77, 2560), (1, 5, 10240), (3, 2, 48), (1, 2003, 2560), (1, 3, 12800))
"""Shapes of BiasSplitGelu's x. In the second to last, a thread handles several rows; in the last, a row takes two
blocks."""


INTERLEAVED = (((2, 5, 8, 32), False), ((1, 2, 3, 2560), False), ((3, 130, 66, 1024), True), ((1, 3, 2, 16), True))
"""InterleavePhases: shape of x, and whether it is float32."""


GEGLU_SHAPES = ((2, 77, 1280, 192), (3, 300, 136, 384), (1, 2003, 320, 2560), (1, 2003, 1024, 5120))
"""Geglu: shape of x and width of the result. In the last two, a block has several tiles, wide ones in the last."""


@dataclass(frozen=True)
class AttentionCase:
    """An attention with `heads` heads of `size` channels. parts: number of tensors that hold query, key and value."""

    images: int
    queries: int
    keys: int
    heads: int
    size: int
    parts: int = 3


ATTENTIONS = (
    AttentionCase(2, 4096, 77, 2, 40),
    AttentionCase(2, 1000, 77, 20, 64),
    AttentionCase(3, 65, 77, 2, 80),
    AttentionCase(2, 64, 77, 8, 160),
    AttentionCase(1, 17, 4, 3, 64),
    AttentionCase(2, 300, 154, 2, 40),
    AttentionCase(1, 257, 231, 5, 64),
    AttentionCase(2, 130, 81, 2, 80),
    AttentionCase(1, 33, 231, 2, 160),
    AttentionCase(2, 256, 16, 4, 40, parts=2),
    AttentionCase(2, 1, 77, 4, 64, parts=2),
    AttentionCase(2, 64, 64, 8, 160, parts=1),
    AttentionCase(1, 256, 256, 2, 160, parts=1),
)


def gelu_feeds(shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Return random x of this shape and bias, in the operator's order."""
    import numpy as np

    random = np.random.default_rng(1)
    return {
        "x": random.normal(size=shape).astype(np.float16),
        "bias": random.normal(size=shape[-1:]).astype(np.float16),
    }


def gelu_expected(feeds: dict[str, np.ndarray]) -> np.ndarray:
    """Return BiasSplitGelu's result, half as wide as x, by definition."""
    import numpy as np

    return _gated(feeds["x"].astype(np.float64) + feeds["bias"])


def _gated(both: np.ndarray) -> np.ndarray:
    """Uses torch's erf in float64: numpy has none, and Python's dominated the proof's time."""
    import numpy as np
    import torch

    plain, gate = np.split(both, 2, axis=-1)
    result: np.ndarray = plain * gate * 0.5 * (1 + torch.erf(torch.from_numpy(gate / math.sqrt(2))).numpy())
    return result


def phases(shape: tuple[int, int, int, int], single: bool) -> np.ndarray:
    """Return random values of this shape, float32 or float16."""
    import numpy as np

    return np.random.default_rng(2).normal(size=shape).astype(np.float32 if single else np.float16)


def interleave_expected(x: np.ndarray) -> np.ndarray:
    """Return InterleavePhases's result by definition: x is (images, rows + 1, columns + 1, 4 x channels), the result
    (images, 2 x rows, 2 x columns, channels)."""
    import numpy as np

    images, rows, columns, channels = x.shape
    y = np.empty((images, 2 * (rows - 1), 2 * (columns - 1), channels // 4), x.dtype)
    for (row, column), phase in zip(PHASES, np.split(x, 4, axis=3), strict=True):
        y[:, row::2, column::2] = phase[:, row : rows - 1 + row, column : columns - 1 + column]
    return y


def geglu_feeds(shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Return random x, weight and bias, in the operator's order; the gate's deviation is about 1.4. shape: rows, depth and
    width of the result."""
    import numpy as np

    *rows, depth, width = shape
    random = np.random.default_rng(2)
    return {
        "x": random.normal(size=(*rows, depth)).astype(np.float16),
        "weight": (random.normal(size=(depth, 2 * width)) / math.sqrt(depth)).astype(np.float16),
        "bias": random.normal(size=2 * width).astype(np.float16),
    }


def geglu_expected(feeds: dict[str, np.ndarray]) -> np.ndarray:
    """Return Geglu's result, (rows, width), by definition."""
    import numpy as np

    return _gated(feeds["x"].astype(np.float64) @ feeds["weight"].astype(np.float64) + feeds["bias"])


def attention_scale(case: AttentionCase) -> float:
    """Return a larger scale than usual, so that a few keys dominate."""
    return 2 / math.sqrt(case.size)


def attention_feeds(case: AttentionCase) -> dict[str, np.ndarray]:
    """Return random query, key and value in the case's number of tensors, in the operator's order."""
    import numpy as np

    random = np.random.default_rng(4)
    rows = {"query": case.queries, "key": case.keys, "value": case.keys}
    shapes: dict[str, tuple[int, ...]] = {
        name: (case.images, count, case.heads * case.size) for name, count in rows.items()
    }
    if case.parts < 3:
        packed = "key" if case.parts == 2 else "query"
        shapes = dict(list(shapes.items())[: case.parts])
        shapes[packed] = (case.images, case.keys, case.heads, 4 - case.parts, case.size)
    return {name: random.normal(size=shape).astype(np.float16) for name, shape in shapes.items()}


def attention_expected(feeds: dict[str, np.ndarray], case: AttentionCase) -> np.ndarray:
    """Return FewKeysAttention's result, (images, queries, heads x size), by definition."""
    import numpy as np

    by_head = [value.reshape(*value.shape[:2], case.heads, -1, case.size) for value in feeds.values()]
    parts = [value[:, :, :, i] for value in by_head for i in range(value.shape[3])]
    query, key, value = (part.astype(np.float64).swapaxes(1, 2) for part in parts)
    scores = attention_scale(case) * (query @ key.swapaxes(2, 3))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    result: np.ndarray = (weights / weights.sum(-1, keepdims=True)) @ value
    return result.swapaxes(1, 2).reshape(case.images, case.queries, -1)


EPSILON = 1e-5


INPUTS = ("x", "gamma", "beta", "skip", "bias")
"""GroupNorm's inputs, in order."""


def group_norm_feeds(case: GroupNormCase) -> dict[str, np.ndarray]:
    """Return the case's inputs: x (images, height, width, channels), random with a different mean and spread per channel,
    and its weights."""
    import numpy as np

    random = np.random.default_rng(0)
    channels = case.shape[3]

    def values(*shape: int) -> np.ndarray:
        return _spread(random, shape).astype(np.float32 if case.single else np.float16)

    feeds = {"x": values(*case.shape)}
    for name in ("gamma", "beta"):
        feeds[name] = random.normal(size=channels).astype(np.float32)
    if case.skip != "none":
        feeds["skip"] = values(*(case.shape if case.skip == "full" else (case.shape[0], channels)))
    if case.bias:
        feeds["bias"] = values(channels)
    return feeds


def _spread(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return normal values with a different mean and spread per channel."""
    spread, mean = random.uniform(0.5, 2, shape[-1]), random.normal(size=shape[-1])
    result: np.ndarray = random.normal(size=shape) * spread + mean
    return result


def group_norm_expected(feeds: dict[str, np.ndarray], case: GroupNormCase) -> dict[str, np.ndarray]:
    """Return y and the sum, both in the shape of x, by definition."""
    import numpy as np

    images, height, width, channels = case.shape
    total = feeds["x"].astype(np.float32)
    if "bias" in feeds:
        total = total + feeds["bias"].astype(np.float32)
    if "skip" in feeds:
        skip = feeds["skip"].astype(np.float32)
        total = total + (skip if skip.ndim == 4 else skip[:, None, None, :])
    grouped = total.reshape(images, height * width, case.groups, channels // case.groups).astype(np.float64)
    mean, variance = (np.mean(grouped, (1, 3), keepdims=True), np.var(grouped, (1, 3), keepdims=True))
    normal = ((grouped - mean) / np.sqrt(variance + EPSILON)).reshape(case.shape)
    y = normal * feeds["gamma"] + feeds["beta"]
    return {"y": y / (1 + np.exp(-y)) if case.silu else y, "sum": total}
