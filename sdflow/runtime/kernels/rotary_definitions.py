"""Reference results of RotaryQkv in numpy: cases, random inputs, and results by definition."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

QKV = "RotaryQkv"
PARTS = 3
"""Query, key and value."""
STREAM = ("query", "key", "value", "query_bias", "key_bias", "value_bias", "query_weight", "key_weight")
"""RotaryQkv's inputs per stream, in order."""
TABLES = ("cosine", "sine")
INPUTS = (*(f"{name}{stream}" for stream in range(2) for name in STREAM), *TABLES)
"""All inputs of RotaryQkv."""
EPSILON = 1e-6


@dataclass(frozen=True)
class QkvCase:
    """Inputs of an attention, from one or two streams.

    tokens: per image, for each stream. bias, norm, turned: whether there are biases, head norms, tables. tables: number
    of images they are for: one, or all. packed: width of a single product with query, key and value as adjacent columns
    after eight others; 0: separate products. value: whether there is one. bfloat16: instead of float16.
    """

    images: int
    tokens: tuple[int, ...]
    heads: int
    size: int
    bias: bool = True
    norm: bool = True
    turned: bool = True
    tables: int = 1
    packed: int = 0
    value: bool = True
    bfloat16: bool = False

    @property
    def operator(self) -> str:
        """Name of the operator for this type."""
        return f"{QKV}Bfloat16" if self.bfloat16 else QKV

    @property
    def attributes(self) -> dict[str, float]:
        """The operator's attributes."""
        row = self.heads * self.size
        columns = [8 + part * row if self.packed else 0 for part in range(PARTS)] * 2
        return {
            "num_heads": self.heads,
            "head_size": self.size,
            "epsilon": EPSILON,
            **{f"column{i}": column for i, column in enumerate(columns)},
        }


_QKVS = (
    QkvCase(2, (75, 33), 3, 64, turned=False),
    QkvCase(1, (19, 250), 24, 128, bias=False),
    QkvCase(1, (130,), 24, 128, bias=False, packed=9400),
    QkvCase(2, (65,), 30, 128, bias=False, tables=2, value=False),
    QkvCase(3, (5, 9), 5, 32, norm=False),
    QkvCase(1, (7, 300), 1, 256, norm=False, turned=False),
    QkvCase(2, (41, 40), 70, 64, tables=2),
    QkvCase(1, (1003,), 12, 8),
)
QKVS = (*_QKVS, *(replace(case, bfloat16=True) for case in _QKVS))


def rounded(values: Any, bfloat16: bool) -> np.ndarray:
    """Round to float16 or bfloat16."""
    import onnx

    kind = onnx.TensorProto.BFLOAT16 if bfloat16 else onnx.TensorProto.FLOAT16
    return np.asarray(values).astype(onnx.helper.tensor_dtype_to_np_dtype(kind))


def qkv_feeds(case: QkvCase) -> dict[str, np.ndarray]:
    """Return the case's random inputs by the names in INPUTS: products are (images, tokens, heads x size). A packed stream
    has one product for all."""
    random = np.random.default_rng(5)
    row, feeds = case.heads * case.size, {}
    for stream, tokens in enumerate(case.tokens):
        packed = random.normal(size=(case.images, tokens, case.packed)) if case.packed else None
        for name in STREAM[: PARTS if case.value else PARTS - 1]:
            product = random.normal(size=(case.images, tokens, row)) * 3 if packed is None else packed
            feeds[f"{name}{stream}"] = product
        if case.bias:
            feeds |= {f"{name}_bias{stream}": random.normal(size=row) for name in STREAM[: PARTS if case.value else 2]}
        if case.norm:
            feeds |= {f"{name}_weight{stream}": random.normal(size=case.size) + 2 for name in STREAM[:2]}
    if case.turned:
        angles = random.uniform(0, 7, (case.tables, sum(case.tokens), case.size // 2)).repeat(2, -1)
        feeds |= {"cosine": np.cos(angles), "sine": np.sin(angles)}
    return {name: rounded(feeds[name], case.bfloat16) for name in INPUTS if name in feeds}


def qkv_expected(feeds: dict[str, np.ndarray], attributes: dict[str, float]) -> list[np.ndarray]:
    """Return query, key and, if present, value, (images, tokens of both streams, heads x size), by definition. feeds: by
    the names in INPUTS."""
    heads, size = int(attributes["num_heads"]), int(attributes["head_size"])
    results = []
    for part, name in enumerate(STREAM[:PARTS]):
        joined = []
        for stream in range(2):
            if f"{name}{stream}" not in feeds:
                continue
            column = int(attributes[f"column{stream * PARTS + part}"])
            values = feeds[f"{name}{stream}"].astype(np.float64)[..., column : column + heads * size]
            values = values + feeds.get(f"{name}_bias{stream}", np.zeros(1)).astype(np.float64)
            values = values.reshape(*values.shape[:2], heads, size)
            if f"{name}_weight{stream}" in feeds:
                squares = np.mean(values * values, -1, keepdims=True)
                values = (
                    values
                    / np.sqrt(squares + attributes["epsilon"])
                    * feeds[f"{name}_weight{stream}"].astype(np.float64)
                )
            joined.append(values)
        if not joined:
            continue
        whole = np.concatenate(joined, 1)
        if "cosine" in feeds and name != "value":
            cosine, sine = (feeds[table].astype(np.float64).reshape(-1, whole.shape[1], 1, size) for table in TABLES)
            crossed = np.stack([-whole[..., 1::2], whole[..., ::2]], -1).reshape(whole.shape)
            whole = whole * cosine + crossed * sine
        results.append(whole.reshape(*whole.shape[:2], heads * size))
    return results
