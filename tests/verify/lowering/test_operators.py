"""Each lowered operator against its published definition, with random shapes, attributes and optional inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tests.verify.lowering.definitions as define
from tests.verify.lowering.run_node import close, run_lowered

few = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
dtypes = st.sampled_from([np.float32, np.float16])
sizes = st.integers(1, 5)
seeds = st.integers(0, 2**31)

FILTER = -16.0
"""Where a whole row is masked, float32 would lose the scores in the default of -10000; test_cpu_kernels.py has that."""


def values(seed: int, dtype: Any, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [(2 * generator.standard_normal(shape)).astype(dtype) for shape in shapes]


def exact(*arrays: Any) -> list[Any]:
    return [None if array is None else array.astype(np.float64) for array in arrays]


@few
@given(seeds, dtypes, sizes, sizes, st.integers(1, 6), st.booleans())
def test_gelus(seed: int, dtype: Any, n: int, s: int, half: int, has_bias: bool) -> None:
    x, bias = values(seed, dtype, (n, s, 2 * half), (2 * half,))
    x64, bias64 = exact(x, bias)
    close(run_lowered("Gelu", {"x": x}, ["y"])[0], define.gelu(x64))
    close(run_lowered("BiasGelu", {"x": x, "b": bias}, ["y"])[0], define.bias_gelu(x64, bias64))
    given_bias = {"b": bias} if has_bias else {}
    close(run_lowered("FastGelu", {"x": x} | given_bias, ["y"])[0], define.fast_gelu(x64, *exact(*given_bias.values())))
    close(run_lowered("BiasSplitGelu", {"x": x, "b": bias}, ["y"])[0], define.bias_split_gelu(x64, bias64))


@few
@given(seeds, dtypes, sizes, sizes, sizes, st.sampled_from([None, 1.0, 0.5, -2.0]))
def test_quick_gelu(seed: int, dtype: Any, n: int, s: int, c: int, alpha: float | None) -> None:
    (x,) = values(seed, dtype, (n, s, c))
    attributes = {} if alpha is None else {"alpha": alpha}
    close(run_lowered("QuickGelu", {"x": x}, ["y"], **attributes)[0], define.quick_gelu(*exact(x), **attributes))


@few
@given(seeds, dtypes, sizes, sizes, sizes)
def test_bias_add(seed: int, dtype: Any, n: int, s: int, c: int) -> None:
    x, bias, skip = values(seed, dtype, (n, s, c), (c,), (n, s, c))
    close(run_lowered("BiasAdd", {"x": x, "b": bias, "s": skip}, ["y"])[0], define.bias_add(*exact(x, bias, skip)))


@few
@given(seeds, dtypes, dtypes, sizes, sizes, sizes, sizes, sizes, st.integers(0, 1), st.integers(0, 1))
def test_group_norm(
    seed: int, dtype: Any, affine: Any, n: int, h: int, w: int, groups: int, each: int, last: int, activation: int
) -> None:
    c = groups * each
    (x,) = values(seed, dtype, (n, h, w, c) if last else (n, c, h, w))
    gamma, beta = values(seed + 1, affine, (c,), (c,))
    attributes = {"groups": groups, "activation": activation, "channels_last": last, "epsilon": 1e-3}
    (y,) = run_lowered("GroupNorm", {"x": x, "g": gamma, "b": beta}, ["y"], **attributes)
    close(y, define.group_norm(*exact(x, gamma, beta), **attributes))


@few
@given(
    seeds, dtypes, sizes, sizes, sizes, sizes, sizes, st.integers(0, 1), st.integers(0, 1),
    st.sampled_from(["full", "N11C", "NC"]), st.booleans(),
)  # fmt: skip
def test_skip_group_norm(
    seed: int,
    dtype: Any,
    n: int,
    h: int,
    w: int,
    groups: int,
    each: int,
    last: int,
    activation: int,
    form: str,
    b: bool,
) -> None:
    c = groups * each
    x_shape = (n, h, w, c) if last else (n, c, h, w)
    skip_shape = {"full": x_shape, "N11C": (n, 1, 1, c) if last else (n, c, 1, 1), "NC": (n, c)}[form]
    x, skip, bias = values(seed, dtype, x_shape, skip_shape, (c,))
    gamma, beta = values(seed + 1, np.float32, (c,), (c,))
    attributes = {"groups": groups, "activation": activation, "channels_last": last, "epsilon": 1e-3}
    inputs = {"x": x, "g": gamma, "b": beta, "skip": skip, "bias": bias if b else None}
    y, s = run_lowered("SkipGroupNorm", inputs, ["y", "s"], **attributes)
    total = define.skip_sum(*exact(x, skip, bias if b else None), channels_last=last)
    close(s, total)
    close(y, define.group_norm(*exact(s, gamma, beta), **attributes))
    (alone,) = run_lowered("SkipGroupNorm", inputs, ["y"], **attributes)
    assert np.array_equal(alone, y)


@few
@given(
    seeds, dtypes, sizes, st.integers(3, 6), st.integers(3, 6), st.integers(1, 2), sizes, st.integers(1, 2),
    st.tuples(*[st.integers(0, 2)] * 4), st.tuples(*[st.integers(1, 2)] * 2), st.tuples(*[st.integers(1, 2)] * 2),
    st.booleans(),
)  # fmt: skip
def test_nhwc_conv(
    seed: int, dtype: Any, n: int, h: int, w: int, each: int, m: int, group: int, pads: Any, strides: Any, dilations: Any,
    b: bool,
) -> None:  # fmt: skip
    x, weight, bias = values(seed, dtype, (n, h, w, each * group), (m * group, 2, 2, each), (m * group,))
    attributes = {"pads": pads, "strides": strides, "dilations": dilations, "group": group}
    inputs = {"x": x, "w": weight, "b": bias if b else None}
    (y,) = run_lowered("NhwcConv", inputs, ["y"], kernel_shape=[2, 2], **attributes)
    close(y, define.conv(*exact(x, weight, bias if b else None), **attributes))


@few
@given(
    seeds,
    dtypes,
    sizes,
    sizes,
    st.integers(2, 8),
    st.sampled_from(["full", "one", "flat"]),
    st.booleans(),
    st.booleans(),
)
def test_skip_layer_normalization(
    seed: int, dtype: Any, n: int, s: int, c: int, form: str, has_beta: bool, has_bias: bool
) -> None:
    skip_shape = {"full": (n, s, c), "one": (1, s, c), "flat": (s, c)}[form]
    x, skip, gamma, beta, bias = values(seed, dtype, (n, s, c), skip_shape, (c,), (c,), (c,))
    beta, bias = beta if has_beta else None, bias if has_bias else None
    inputs = {"x": x, "skip": skip, "gamma": gamma, "beta": beta, "bias": bias}
    y, total = run_lowered("SkipLayerNormalization", inputs, ["y", "", "", "sum"], epsilon=1e-3)
    x64, skip64, gamma64, beta64, bias64 = exact(x, skip, gamma, beta, bias)
    close(total, x64 + skip64 + (0 if bias64 is None else bias64))
    close(y, define.layer_norm(*exact(total), gamma64, beta64, 1e-3))


@given(seeds, dtypes, dtypes, sizes, sizes, st.integers(2, 8))
def test_simplified_layer_normalization(seed: int, dtype: Any, scale_dtype: Any, n: int, s: int, c: int) -> None:
    """The result has the scale's type, which need not be the values'."""
    (x,), (scale,) = values(seed, dtype, (n, s, c)), values(seed + 1, scale_dtype, (c,))
    inputs = {"x": x, "scale": scale}
    (y,) = run_lowered("SimplifiedLayerNormalization", inputs, ["y"], epsilon=1e-3, axis=-1, stash_type=1)
    assert y.dtype == scale.dtype
    close(y, define.root_mean_square_norm(*exact(x, scale), 1e-3))


@given(seeds, dtypes, sizes, sizes, st.integers(2, 8), st.booleans())
def test_skip_simplified_layer_normalization(seed: int, dtype: Any, n: int, s: int, c: int, has_bias: bool) -> None:
    x, skip, gamma, bias = values(seed, dtype, (n, s, c), (n, s, c), (c,), (c,))
    inputs = {"x": x, "skip": skip, "gamma": gamma, "bias": bias if has_bias else None}
    y, total = run_lowered("SkipSimplifiedLayerNormalization", inputs, ["y", "", "", "sum"], epsilon=1e-3)
    x64, skip64, gamma64, bias64 = exact(x, skip, gamma, bias if has_bias else None)
    close(total, x64 + skip64 + (0 if bias64 is None else bias64))
    (total64,) = exact(total)
    close(y, define.root_mean_square_norm(total64, gamma64, 1e-3))


def masks(form: str, n: int, s: int, keys: int, seed: int) -> tuple[np.ndarray | None, Any]:
    """A mask of that form, and whether it masks (image, query, key)."""
    generator = np.random.default_rng(seed)
    ends = generator.integers(1, keys + 1, n).astype(np.int32)
    starts = generator.integers(0, ends).astype(np.int32)
    if form == "ends":
        return ends, lambda image, query, key: key >= ends[image]
    if form == "ends and starts":
        return np.concatenate([ends, starts]), lambda image, query, key: key >= ends[image] or key < starts[image]
    if form == "offsets":
        offsets = np.concatenate([ends, np.arange(n + 1) * s, np.arange(n + 1) * keys]).astype(np.int32)
        return offsets, lambda image, query, key: key >= ends[image]
    if form == "keys":
        mask = generator.integers(0, 2, (n, keys)).astype(np.int32)
        return mask, lambda image, query, key: mask[image, key] == 0
    if form == "scores":
        mask = generator.integers(0, 2, (n, s, keys)).astype(np.int32)
        return mask, lambda image, query, key: mask[image, query, key] == 0
    if form == "square":
        longest = keys + 2
        mask = generator.integers(0, 2, (n, 1, longest, longest)).astype(np.int32)
        return mask, lambda image, query, key: mask[image, 0, keys - s + query, key] == 0
    return None, lambda image, query, key: False


@few
@given(
    seeds, dtypes, st.sampled_from(["qkv", "kv", "apart", "apart, keys by head"]), st.integers(1, 3), st.integers(1, 4),
    st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.sampled_from([None, 0.3]),
    st.sampled_from(["", "ends", "offsets", "keys", "scores"]), st.sampled_from([None, (0, 0), (0, 1), (1, 0), (1, 1)]),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_multi_head_attention(
    seed: int, dtype: Any, form: str, n: int, s: int, keys: int, heads: int, size: int, v_size: int, scale: float | None,
    mask_form: str, bias_broadcast: tuple[int, int] | None, has_bias: bool, causal: bool,
) -> None:  # fmt: skip
    keys = s if form == "qkv" else keys
    v_size = v_size if "apart" in form else size
    q, k, v, bias = values(
        seed,
        dtype,
        (n, s, heads, size),
        (n, keys, heads, size),
        (n, keys, heads, v_size),
        (heads * (2 * size + v_size),),
    )
    has_bias = has_bias and form != "apart, keys by head"
    packed = {
        "qkv": lambda: (np.stack([q, k, v], 3), None, None),
        "kv": lambda: (q.reshape(n, s, -1), np.stack([k, v], 3), None),
        "apart": lambda: (q.reshape(n, s, -1), k.reshape(n, keys, -1), v.reshape(n, keys, -1)),
        "apart, keys by head": lambda: (q.reshape(n, s, -1), k.swapaxes(1, 2), v.swapaxes(1, 2)),
    }[form]()
    mask, masked = masks(mask_form, n, s, keys, seed)
    added = None
    if bias_broadcast is not None:
        shape = (n if bias_broadcast[0] else 1, heads if bias_broadcast[1] else 1, s, keys)
        (added,) = values(seed + 1, dtype, shape)
    inputs = dict(zip(("q", "k", "v"), packed, strict=True))
    inputs |= {"bias": bias if has_bias else None, "mask": mask, "added": added}
    attributes: dict[str, Any] = {"num_heads": heads, "unidirectional": int(causal), "mask_filter_value": FILTER}
    attributes |= {} if scale is None else {"scale": scale}
    (y,) = run_lowered("MultiHeadAttention", inputs, ["y"], **attributes)
    if has_bias:
        parts = np.split(bias, [heads * size, 2 * heads * size])
        q, k, v = (
            (x.astype(np.float64) + part.reshape(heads, -1)).astype(dtype)
            for x, part in zip((q, k, v), parts, strict=True)
        )
    expected = define.attend(
        *exact(q, k, v), scale=scale or 0, bias=added, masked=masked, filter_value=FILTER, causal=causal
    )
    close(y, expected, roundings=4)


@few
@given(
    seeds, dtypes, st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4),
    st.integers(1, 6), st.sampled_from([None, 0.3]), st.sampled_from(["", "ends", "ends and starts", "keys", "scores", "square"]),
    st.booleans(), st.booleans(), st.booleans(),
)  # fmt: skip
def test_attention(
    seed: int, dtype: Any, n: int, s: int, heads: int, size: int, v_size: int, width: int, scale: float | None,
    mask_form: str, has_bias: bool, has_added: bool, causal: bool,
) -> None:  # fmt: skip
    widths = [heads * size, heads * size, heads * v_size]
    x, weights, bias, added = values(seed, dtype, (n, s, width), (width, sum(widths)), (sum(widths),), (1, heads, s, s))
    weights = (weights / 4).astype(dtype)
    mask, masked = masks(mask_form, n, s, s, seed)
    attributes: dict[str, Any] = {"num_heads": heads, "unidirectional": int(causal), "mask_filter_value": FILTER}
    attributes |= {} if scale is None else {"scale": scale}
    attributes |= {} if v_size == size else {"qkv_hidden_sizes": widths}
    inputs = {"x": x, "w": weights, "b": bias if has_bias else None, "mask": mask, "past": None}
    inputs |= {"added": added if has_added else None}
    (y,) = run_lowered("Attention", inputs, ["y"], **attributes)
    qkv = x.astype(np.float64) @ weights.astype(np.float64) + (bias.astype(np.float64) if has_bias else 0)
    q, k, v = (part.reshape(n, s, heads, -1) for part in np.split(qkv.astype(dtype), np.cumsum(widths)[:2], axis=2))
    expected = define.attend(
        *exact(q, k, v),
        scale=scale or 0,
        bias=added if has_added else None,
        masked=masked,
        filter_value=FILTER,
        causal=causal,
    )
    close(y, expected, roundings=6)


@pytest.mark.parametrize("channels_last", [0, 1])
def test_the_channel_groups_are_consecutive_channels(channels_last: int) -> None:
    """Two groups of very different values: any other grouping would mix them."""
    x = np.zeros((1, 2, 2, 4) if channels_last else (1, 4, 2, 2), np.float32)
    view = x if channels_last else np.moveaxis(x, 1, -1)
    view[0, :, :, :2], view[0, 0, :, 0], view[0, :, :, 2:] = 5, 6, -100
    one, zero = np.ones(4, np.float32), np.zeros(4, np.float32)
    inputs = {"x": x, "g": one, "b": zero}
    (y,) = run_lowered("GroupNorm", inputs, ["y"], groups=2, activation=0, channels_last=channels_last)
    y = y if channels_last else np.moveaxis(y, 1, -1)
    assert np.all(y[..., 2:] == 0)
    assert np.all(y[0, 0, :, 0] > 1)
