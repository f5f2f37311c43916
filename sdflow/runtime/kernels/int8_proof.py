"""Test the int8 operators on this device against numpy.

Rows without rotation and sums are exact, so rows must be equal to the bit, and a product as near to the exact value as
its last rounding allows. Rotated rows are compared with products of the matrix in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sdflow.distance import relative_l2
from sdflow.runtime.kernels.hopper import has_bfloat16
from sdflow.runtime.kernels.one_node import result_of, run_node
from sdflow.runtime.kernels.transformer_definitions import BFLOAT16
from sdflow.tolerances import INT8_ROTATED_LIMIT, INT8_ROUNDINGS

if TYPE_CHECKING:
    import numpy as np

SMALLEST_SCALE = 2.0**-126
ANY, WIDE, NARROW, TURING = range(4)
"""Values of the attribute `kernel` of Int8Product."""


@dataclass(frozen=True)
class Int8RowsCase:
    """Rows of int8. shape: of x, channels last. rotation: size of the Hadamard matrix, 0: none."""

    shape: tuple[int, ...]
    rotation: int = 0
    bfloat16: bool = False

    @property
    def operator(self) -> str:
        """The operator's name."""
        return f"Int8Rows{BFLOAT16 * self.bfloat16}"


@dataclass(frozen=True)
class Int8ProductCase:
    """A product of rows (images, rows, k) and a weight (n, k). kernel: the operator's attribute."""

    images: int
    rows: int
    k: int
    n: int
    kernel: int = ANY
    bias: bool = False
    bfloat16: bool = False

    @property
    def operator(self) -> str:
        """The operator's name."""
        return f"Int8Product{BFLOAT16 * self.bfloat16}"


ROWS_CASES = (
    Int8RowsCase((2, 79, 640)),
    Int8RowsCase((3, 5120), rotation=64),
    Int8RowsCase((40, 3072), bfloat16=True),
    Int8RowsCase((2, 30, 1536), rotation=256),
    Int8RowsCase((3, 12288), bfloat16=True),
    Int8RowsCase((4, 9216), rotation=16, bfloat16=True),
)
PRODUCT_CASES = (
    Int8ProductCase(2, 79, 640, 640),
    Int8ProductCase(1, 64, 1280, 3840, bias=True, bfloat16=True),
    *(Int8ProductCase(2, 333, 1104, 1288, kernel, bias=kernel != NARROW) for kernel in (WIDE, NARROW, TURING)),
    *(Int8ProductCase(1, 1000, 3072, 520, kernel, bfloat16=True) for kernel in (WIDE, NARROW)),
    Int8ProductCase(1, 1000, 3072, 520, TURING),
)


def int8_differences(library: Path) -> dict[str, tuple[float, float]]:
    """Return case -> (difference from numpy, limit), of the cases that this GPU's kernels are for."""
    newer = has_bfloat16()
    found = {}
    for case in ROWS_CASES:
        if newer or not case.bfloat16:
            found[f"{case}"] = (rows_difference(library, case), INT8_ROTATED_LIMIT if case.rotation else 0.0)
    for product in PRODUCT_CASES:
        if newer or not (product.bfloat16 or product.kernel in (WIDE, NARROW)):
            found[f"{product}"] = (product_difference(library, product), INT8_ROUNDINGS)
    return found


def rows_difference(library: Path, case: Int8RowsCase) -> float:
    """Return the relative L2 distance of the dequantized rows to numpy's."""
    from onnx import TensorProto

    x = rows_feed(case)
    results = {"rows": (TensorProto.INT8, case.shape), "scales": (TensorProto.FLOAT, None)}
    found = run_node(library, case.operator, {"x": x}, results, attributes={"rotation": case.rotation})
    return relative_l2(dequantized(found["rows"], found["scales"]), dequantized(*quantized(x, case.rotation)))


def rows_feed(case: Int8RowsCase) -> np.ndarray:
    """Return random values; rows differ in magnitude, and the first one is 0."""
    import ml_dtypes
    import numpy as np

    random = np.random.default_rng(5)
    x = random.normal(size=case.shape) * random.uniform(0.01, 30, (*case.shape[:-1], 1))
    x[..., 0, :] = 0
    return x.astype(ml_dtypes.bfloat16 if case.bfloat16 else np.float16)


def quantized(values: np.ndarray, rotation: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return Int8Rows's result by definition: int8, and row scales."""
    import numpy as np

    exact = values.astype(np.float32)
    if rotation:
        turn: np.ndarray = np.ones((1, 1))
        while len(turn) < rotation:
            turn = np.kron(turn, [[1, 1], [1, -1]])
        groups = exact.astype(np.float64).reshape(-1, rotation) @ turn / rotation**0.5
        exact = groups.reshape(exact.shape).astype(np.float32)
    largest = np.abs(exact).max(-1, keepdims=True)
    scales = largest / np.float32(127)
    nothing = scales < np.float32(SMALLEST_SCALE)
    up = np.float32(127) / np.where(nothing, np.float32(127), largest)
    made = np.rint(exact * up).astype(np.int8)
    return made, np.where(nothing, np.float32(1), scales).reshape(-1)


def dequantized(rows: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the values of int8 rows with scales."""
    import numpy as np

    result: np.ndarray = (rows.astype(np.float64).reshape(len(scales), -1) * scales[:, None]).reshape(rows.shape)
    return result


def product_difference(library: Path, case: Int8ProductCase) -> float:
    """Return the largest error of Int8Product's result, as `in_roundings`."""
    from onnx import TensorProto

    feeds = product_feeds(case)
    exact, size = product_expected(feeds)
    element = TensorProto.BFLOAT16 if case.bfloat16 else TensorProto.FLOAT16
    made = result_of(library, case.operator, feeds, exact.shape, element, attributes={"kernel": case.kernel})
    return in_roundings(made, exact, size, bfloat16=case.bfloat16)


def product_feeds(case: Int8ProductCase) -> dict[str, np.ndarray]:
    """Return random rows and weights with scales, in the operator's order, and the bias if the case has one."""
    import ml_dtypes
    import numpy as np

    random = np.random.default_rng(6)
    shape = (case.images, case.rows, case.k)
    rows, weight = (random.integers(-127, 128, each, np.int8) for each in (shape, (case.n, case.k)))
    sizes = random.uniform(0.1, 3, case.images * case.rows), random.uniform(0.1, 3, case.n) / case.k**0.5
    scales, weight_scales = ((each / 127).astype(np.float32) for each in sizes)
    feeds = {"rows": rows, "scales": scales, "weight": weight, "weight_scales": weight_scales}
    if case.bias:
        feeds["bias"] = random.normal(size=case.n).astype(ml_dtypes.bfloat16 if case.bfloat16 else np.float16)
    return feeds


def product_expected(feeds: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return Int8Product's exact result and the sum of magnitudes of what is added up last, (images, rows, n) each."""
    import numpy as np

    rows, weight = (feeds[name].astype(np.float64) for name in ("rows", "weight"))
    product = rows @ weight.T * feeds["scales"].reshape(*rows.shape[:-1], 1) * feeds["weight_scales"]
    bias = feeds["bias"].astype(np.float64) if "bias" in feeds else np.zeros(len(weight))
    return product + bias, np.abs(product) + np.abs(bias)


def in_roundings(found: np.ndarray, exact: np.ndarray, size: np.ndarray, *, bfloat16: bool) -> float:
    """Return the largest error, in units of what rounding the exact value to 16 bits and float32's roundings of values of
    this size may amount to."""
    import numpy as np

    fraction, smallest = (7, -126) if bfloat16 else (10, -14)
    exponent = np.maximum(np.frexp(exact)[1] - 1, smallest)
    allowed = np.ldexp(0.5, exponent - fraction) + size * 2.0**-22
    return float((np.abs(found.astype(np.float64) - exact) / allowed).max())
