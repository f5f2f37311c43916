"""Test the float8 operators on this device against numpy.

E4M3 rounding comes from ml_dtypes, which ONNX depends on. Products are compared with float64 products of the same
quantized numbers; verification of a model measures the quantization error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sdflow.distance import relative_l2
from sdflow.runtime.kernels.definitions import gelu_expected, gelu_feeds
from sdflow.runtime.kernels.hopper import on_hopper
from sdflow.runtime.kernels.one_node import result_of, run_node
from sdflow.runtime.kernels.transformer_definitions import BFLOAT16, SCALES
from sdflow.tolerances import FLOAT8_PRODUCT_LIMIT, FLOAT8_ROWS_LIMIT, KERNEL_LIMIT_BFLOAT16

if TYPE_CHECKING:
    import numpy as np

EPSILON = 1e-5


@dataclass(frozen=True)
class RowsCase:
    """Rows of float8. operator: the operator's name. shape: of the dequantized values, channels last. kept: whether
    Float8LayerNorm also outputs the sum. first, behind: rows of each image in x before and after these."""

    operator: str
    shape: tuple[int, ...]
    kept: bool = False
    first: int = 0
    behind: int = 0

    @property
    def attributes(self) -> dict[str, float]:
        """The operator's attributes."""
        if self.operator.startswith("Float8Rows"):
            return {"tokens": self.shape[1] if self.first or self.behind else 0, "first": self.first}
        return {"epsilon": EPSILON} if self.operator == "Float8LayerNorm" else {}

    @property
    def bfloat16(self) -> bool:
        """Whether the type is bfloat16 rather than float16."""
        return self.operator.endswith(BFLOAT16)


ROWS_CASES = (
    RowsCase("Float8Rows", (2, 77, 640)),
    RowsCase("Float8Rows", (3, 5120)),
    RowsCase("Float8RowsBfloat16", (40, 3072)),
    RowsCase("Float8Rows", (2, 30, 1536), first=7, behind=3),
    RowsCase("Float8RowsBfloat16", (3, 12288)),
    RowsCase("Float8SplitGelu", (2, 33, 2560)),
    RowsCase("Float8SplitGelu", (5, 5120)),
    RowsCase("Float8LayerNorm", (2, 39, 1280), kept=True),
    RowsCase("Float8LayerNorm", (9, 640)),
)

PRODUCTS = ((2, 77, 640, 640), (1, 64, 1280, 3840), (3, 5, 2560, 640), (1, 2000, 656, 1280), (2, 1010, 320, 3840))
"""Images, rows, K, N. On an H200, the last two run on sdflow's kernel."""
GATED_PRODUCTS = ((2, 77, 656, 2560), (1, 300, 320, 5120))
"""Images, rows, K, N of the product."""


def float8_differences(library: Path) -> dict[str, tuple[float, float]]:
    """Return case -> (relative L2 distance to numpy, limit)."""
    found = {f"{case}": (rows_difference(library, case), FLOAT8_ROWS_LIMIT) for case in ROWS_CASES}
    for shape in PRODUCTS:
        found[f"Float8Product, {shape}"] = (product_difference(library, shape), FLOAT8_PRODUCT_LIMIT)
        apart = product_difference(library, shape, bfloat16=True)
        found[f"Float8ProductBfloat16, {shape}"] = (apart, max(FLOAT8_PRODUCT_LIMIT, KERNEL_LIMIT_BFLOAT16))
    for shape in GATED_PRODUCTS if on_hopper() else ():
        found[f"Float8GatedProduct, {shape}"] = (gated_difference(library, shape), FLOAT8_PRODUCT_LIMIT)
    return found


def rows_difference(library: Path, case: RowsCase) -> float:
    """Return the larger relative L2 distance to numpy: of the dequantized rows, or of the sum."""
    from onnx import TensorProto

    feeds = rows_feeds(case)
    results = {"rows": (TensorProto.UINT8, case.shape), "scales": (TensorProto.FLOAT, None)}
    results |= {"sum": (TensorProto.FLOAT16, case.shape)} if case.kept else {}
    found = run_node(library, case.operator, feeds, results, attributes=case.attributes)
    wanted = rows_expected(feeds, case)
    again = dequantized(*quantized(wanted["rows"], case.bfloat16))
    apart = relative_l2(dequantized(found["rows"], found["scales"]), again)
    return max(apart, relative_l2(found["sum"], wanted["sum"])) if case.kept else apart


def results_apart(
    found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], *, bfloat16: bool
) -> dict[str, float]:
    """Return result -> relative L2 distance. E4M3 results are compared using the same scales, and scales separately: a
    value rounded differently to 16 bits may be its row's maximum and shift the whole row."""
    apart = {}
    for name, value in expected.items():
        scales = found.get(f"{name}{SCALES}")
        if scales is None:
            apart[name] = relative_l2(found[name], value)
            continue
        again = quantized(value, bfloat16, scales)
        rows = relative_l2(dequantized(found[name], scales), dequantized(*again))
        apart[name] = max(rows, relative_l2(scales, quantized(value, bfloat16)[1]))
    return apart


def rows_feeds(case: RowsCase) -> dict[str, np.ndarray]:
    """Return random inputs, in the operator's order; rows of Float8Rows differ in magnitude, and one is 0."""
    import ml_dtypes
    import numpy as np

    random = np.random.default_rng(2)
    if case.operator == "Float8SplitGelu":
        return gelu_feeds((*case.shape[:-1], 2 * case.shape[-1]))
    shape = list(case.shape)
    shape[-2] += case.first + case.behind
    x = random.normal(size=shape) * random.uniform(0.01, 30, (*shape[:-1], 1))
    if case.operator.startswith("Float8Rows"):
        x[..., 0, :] = 0
        return {"x": x.astype(ml_dtypes.bfloat16 if case.bfloat16 else np.float16)}
    feeds = {"x": x, "skip": random.normal(size=case.shape) + 1}
    feeds |= {name: random.normal(size=case.shape[-1]) for name in ("gamma", "beta", "bias")}
    return {name: value.astype(np.float16) for name, value in feeds.items()}


def rows_expected(feeds: dict[str, np.ndarray], case: RowsCase) -> dict[str, np.ndarray]:
    """Return the rows' exact values and the sum."""
    import numpy as np

    if case.operator.startswith("Float8Rows"):
        return {"rows": feeds["x"][..., case.first : case.first + case.shape[-2], :]}
    if case.operator == "Float8SplitGelu":
        return {"rows": gelu_expected(feeds)}
    total = (feeds["x"].astype(np.float32) + feeds["skip"] + feeds["bias"]).astype(np.float16)
    exact = total.astype(np.float64)
    normal = (exact - exact.mean(-1, keepdims=True)) / np.sqrt(exact.var(-1, keepdims=True) + EPSILON)
    return {"rows": normal * feeds["gamma"] + feeds["beta"], "sum": total}


def quantized(
    values: np.ndarray, bfloat16: bool = False, scales: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return Float8Rows's result by definition: E4M3 bits, and row scales. scales: used instead of computed ones."""
    import ml_dtypes
    import numpy as np

    exact = values.astype(ml_dtypes.bfloat16 if bfloat16 else np.float16).astype(np.float32)
    largest = np.abs(exact).max(-1, keepdims=True)
    if scales is not None:
        largest = scales.reshape(largest.shape) * np.float32(448)
    up = np.divide(np.float32(448), largest, out=np.ones_like(largest), where=largest > 0)
    own = np.where(largest > 0, largest / np.float32(448), np.float32(1))
    bits = np.clip(exact * up, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return bits, own.reshape(-1) if scales is None else scales


def dequantized(bits: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the values of float8 rows with scales."""
    import ml_dtypes
    import numpy as np

    values = bits.view(ml_dtypes.float8_e4m3fn).astype(np.float64).reshape(len(scales), -1) * scales[:, None]
    result: np.ndarray = values.reshape(bits.shape)
    return result


def product_difference(library: Path, shape: tuple[int, int, int, int], *, bfloat16: bool = False) -> float:
    """Return the relative L2 distance of Float8Product to numpy's product of the same numbers."""
    from onnx import TensorProto

    feeds = product_feeds(shape)
    expected, operator = product_expected(feeds), f"Float8Product{BFLOAT16 * bfloat16}"
    element, outputs = TensorProto.BFLOAT16 if bfloat16 else TensorProto.FLOAT16, ("y", "workspace")
    return relative_l2(result_of(library, operator, feeds, expected.shape, element, outputs=outputs), expected)


def gated_difference(library: Path, shape: tuple[int, int, int, int]) -> float:
    """Return the relative L2 distance of Float8GatedProduct to numpy's gated product of the same numbers."""
    feeds = gated_feeds(shape)
    expected = gated_expected(feeds)
    return relative_l2(result_of(library, "Float8GatedProduct", feeds, expected.shape), expected)


def gated_feeds(shape: tuple[int, int, int, int]) -> dict[str, np.ndarray]:
    """Return `product_feeds` of this shape with n biases."""
    import numpy as np

    bias = np.random.default_rng(4).normal(size=shape[3]).astype(np.float16)
    return product_feeds(shape) | {"bias": bias}


def gated_expected(feeds: dict[str, np.ndarray]) -> np.ndarray:
    """Return Float8GatedProduct's result, (images, rows, n / 2), by definition."""
    return gelu_expected({"x": product_expected(feeds), "bias": feeds["bias"]})


def product_feeds(shape: tuple[int, int, int, int]) -> dict[str, np.ndarray]:
    """Return random rows and weights, in the operator's order. shape: images, rows, k and n."""
    import numpy as np

    images, rows, k, n = shape
    random = np.random.default_rng(3)
    bits, scales = quantized(random.normal(size=(images, rows, k)) * random.uniform(0.1, 3, (images, rows, 1)))
    weight, weight_scales = quantized(random.normal(size=(n, k)) * random.uniform(0.1, 3, (n, 1)) / k**0.5)
    return {"rows": bits, "scales": scales, "weight": weight, "weight_scales": weight_scales}


def product_expected(feeds: dict[str, np.ndarray]) -> np.ndarray:
    """Return Float8Product's result, (images, rows, n), by definition."""
    rows, weight = (
        dequantized(feeds[name], feeds[scales]) for name, scales in (("rows", "scales"), ("weight", "weight_scales"))
    )
    result: np.ndarray = rows @ weight.T
    return result
