"""Our operators for int8, run on the CPU as test_kernels_on_cpu.py runs the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from cuda_on_cpu import Gpu, run
from sampled import sampled

from sdflow.runtime.kernels.int8_proof import (
    NARROW,
    TURING,
    WIDE,
    Int8ProductCase,
    Int8RowsCase,
    dequantized,
    in_roundings,
    product_expected,
    product_feeds,
    quantized,
    rows_feed,
)

HOPPER, AMPERE, OLD = Gpu(132), Gpu(108, 80), Gpu(40, 75)


def rows(program: Path, folder: Path, case: Int8RowsCase, gpu: Gpu = HOPPER) -> str:
    """Runs and checks it. Returns the kernel and its blocks."""
    x = rows_feed(case)
    (launch,), outputs = run(program, folder, gpu, case.operator, [x], 2, {"rotation": case.rotation})
    found, scales = np.frombuffer(outputs[0], np.int8).reshape(case.shape), np.frombuffer(outputs[1], np.float32)
    wanted = quantized(x, case.rotation)
    if case.rotation:
        np.testing.assert_allclose(scales, wanted[1], rtol=1e-6)
        assert np.abs(found.astype(int) - wanted[0]).max() <= 1
        assert (found != wanted[0]).mean() < 1e-3
    else:
        np.testing.assert_array_equal(scales, wanted[1])
        np.testing.assert_array_equal(found, wanted[0])
    return launch


@pytest.mark.parametrize(
    ("blocks", "case", "gpu"),
    [
        (2, Int8RowsCase((2, 7, 640)), HOPPER),  # eight rows in a block, the last block not full
        (3, Int8RowsCase((9, 2560), bfloat16=True), AMPERE),  # two warps for a row
        (2, Int8RowsCase((2, 12288), rotation=256, bfloat16=True), HOPPER),  # sixteen warps for a row
        (2, Int8RowsCase((5, 1536), rotation=256), OLD),  # half of the second warp has nothing
        (1, Int8RowsCase((1, 3, 16), rotation=16), HOPPER),
        (1, Int8RowsCase((3, 192), rotation=64), HOPPER),
        (1, Int8RowsCase((2, 8)), OLD),
    ],
    ids=str,
)
def test_rows_are_those_of_their_definition(
    blocks: int, case: Int8RowsCase, gpu: Gpu, program: Path, tmp_path: Path
) -> None:
    launch = rows(program, tmp_path, case, gpu)
    kind, warps = "bfloat16" if case.bfloat16 else "half", 16 if case.shape[-1] > 10240 else 8
    assert launch == f"int8_rows_{kind} ({blocks}, 1, 1) (32, {warps}, 1) 1"


def test_what_is_no_number_stays_none_and_what_is_nearly_nothing_becomes_nothing(program: Path, tmp_path: Path) -> None:
    x = np.ones((4, 64), ml_dtypes.bfloat16)
    x[0, 5], x[1, 63], x[2] = np.nan, np.inf, 1e-40
    _, outputs = run(program, tmp_path, HOPPER, "Int8RowsBfloat16", [x], 2, {"rotation": 0})
    found, scales = np.frombuffer(outputs[0], np.int8).reshape(4, 64), np.frombuffer(outputs[1], np.float32)
    assert not np.isfinite(scales[:2]).any()
    assert (scales[2], scales[3]) == (1, np.float32(1) / np.float32(127))
    assert not found[2].any()
    assert (found[3] == 127).all()


def product(program: Path, folder: Path, case: Int8ProductCase, gpu: Gpu = HOPPER) -> str:
    """Runs and checks it. Returns what was launched."""
    feeds = product_feeds(case)
    inputs = [*feeds.values(), *([] if case.bias else [None])]
    (launch,), (content,) = run(program, folder, gpu, case.operator, inputs, 1, {"kernel": case.kernel})
    exact, size = product_expected(feeds)
    found = np.frombuffer(content, ml_dtypes.bfloat16 if case.bfloat16 else np.float16).reshape(exact.shape)
    assert in_roundings(found, exact, size, bfloat16=case.bfloat16) <= 1.01, "not the product of its definition"
    return launch


UNEVEN = Int8ProductCase(2, 70, 336, 264, bias=True)
"""Two tiles down, three (narrow) or two (wide) across, the last ones not full; more steps than places, the last not full."""


@pytest.mark.parametrize(
    ("launched", "case", "gpu"),
    [
        ("wide_half (4, 1, 1) (256, 1, 1)", replace(UNEVEN, kernel=WIDE), HOPPER),
        ("narrow_half (6, 1, 1) (128, 1, 1)", replace(UNEVEN, kernel=NARROW), HOPPER),
        ("turing_half (6, 1, 1) (128, 1, 1)", replace(UNEVEN, kernel=TURING), HOPPER),
        ("turing_half (6, 1, 1) (128, 1, 1)", UNEVEN, OLD),
        ("narrow_bfloat16 (1, 1, 1) (128, 1, 1)", Int8ProductCase(1, 5, 16, 8, bfloat16=True), AMPERE),
        ("wide_bfloat16 (1, 1, 1) (256, 1, 1)", Int8ProductCase(1, 5, 16, 8, WIDE, bias=True, bfloat16=True), HOPPER),
        ("turing_half (1, 1, 1) (128, 1, 1)", Int8ProductCase(1, 3, 64, 40, TURING), HOPPER),
        ("narrow_half (18, 1, 1) (128, 1, 1)", Int8ProductCase(1, 1100, 32, 256, NARROW), HOPPER),  # more than a group
        ("narrow_half (4, 1, 1) (128, 1, 1)", Int8ProductCase(1, 129, 32, 256), Gpu(2, 89)),
    ],
    ids=str,
)
def test_a_product_is_that_of_its_definition(
    launched: str, case: Int8ProductCase, gpu: Gpu, program: Path, tmp_path: Path
) -> None:
    assert product(program, tmp_path, case, gpu) == f"int8_product_{launched} 1"


def test_rows_and_a_product_of_them_are_the_product_of_what_was_rotated(program: Path, tmp_path: Path) -> None:
    """Weights are rotated by `sdflow.weights.hadamard`, which the kernel must match."""
    from sdflow.weights.hadamard import rotated

    random = np.random.default_rng(7)
    x, weight = random.normal(size=(6, 256)), random.normal(size=(24, 256)) / 16
    x[:, 3] *= 50  # an outlier
    _, outputs = run(program, tmp_path, HOPPER, "Int8Rows", [x.astype(np.float16)], 2, {"rotation": 128})
    given, scales = np.frombuffer(outputs[0], np.int8).reshape(6, 256), np.frombuffer(outputs[1], np.float32)
    found = dequantized(given, scales) @ rotated(weight, 1, 128).T
    wanted = x.astype(np.float16).astype(np.float64) @ weight.T
    assert np.linalg.norm(found - wanted) < 0.02 * np.linalg.norm(wanted)


def operands(rows: int = 2, columns: int = 16, k: int = 16, n: int = 16) -> list[np.ndarray | None]:
    """What a product of two rows reads, with so many scales."""
    scales = np.ones(rows, np.float32), np.ones(columns, np.float32)
    return [np.zeros((2, k), np.int8), scales[0], np.zeros((n, k), np.int8), scales[1], None]


@pytest.mark.parametrize(
    ("message", "gpu", "operator", "inputs", "attributes"),
    [
        ("bfloat16 needs a GPU", OLD, "Int8RowsBfloat16", [np.zeros((2, 16), ml_dtypes.bfloat16)], {"rotation": 0}),
        ("bfloat16 needs a GPU", OLD, "Int8ProductBfloat16", operands(), {"kernel": 0}),
        ("does not have this kernel", OLD, "Int8Product", operands(), {"kernel": WIDE}),
        ("does not have this kernel", HOPPER, "Int8ProductBfloat16", operands(), {"kernel": TURING}),
        ("not for this number of channels", HOPPER, "Int8Rows", [np.zeros((2, 12), np.float16)], {"rotation": 0}),
        ("not for this number of channels", HOPPER, "Int8Rows", [np.zeros((2, 96), np.float16)], {"rotation": 64}),
        ("not for this rotation", HOPPER, "Int8Rows", [np.zeros((2, 96), np.float16)], {"rotation": 48}),
        ("not for matrices of these sizes", HOPPER, "Int8Product", operands(k=24), {"kernel": 0}),
        ("not for matrices of these sizes", HOPPER, "Int8Product", operands(n=12, columns=12), {"kernel": 0}),
        ("not a scale for each row", HOPPER, "Int8Product", operands(rows=1), {"kernel": 0}),
        ("not a scale for each row", HOPPER, "Int8Product", operands(columns=8), {"kernel": 0}),
        (
            "weight and bias are not of the rows' size",
            HOPPER,
            "Int8Product",
            [*operands()[:-1], np.zeros(8, np.float16)],
            {"kernel": 0},
        ),
    ],
)
def test_what_int8_cannot_do_is_refused(
    message: str,
    gpu: Gpu,
    operator: str,
    inputs: list[np.ndarray | None],
    attributes: dict[str, float],
    program: Path,
    tmp_path: Path,
) -> None:
    with pytest.raises(AssertionError, match=message):
        run(program, tmp_path, gpu, operator, inputs, 2 if "Rows" in operator else 1, attributes)


FAULTS = {
    "products of what is not there yet": (
        "int8_product.cu",
        "wait_for_groups<STAGES - 2>();",
        "wait_for_groups<STAGES - 1>();",
        "a copy that its thread did not wait for|depends on which thread comes first",
    ),
    "no wait for the others' copies": (
        "int8_product.cu",
        "        __syncthreads();  // all of this step",
        "        // all of this step",
        "depends on which thread comes first|not the product",
    ),
    "the next tile stored over the one that is read": (
        "int8_product.cu",
        "tile.store(step + 1, held);",
        "tile.store(step, held);",
        "depends on which thread comes first|not the product",
    ),
    "a row too many of y": (
        "int8_product.cu",
        "if (row < size.rows && column",
        "if (row <= size.rows && column",
        "overflow",
    ),
    "chunks beyond the depth": ("int8_product.cu", " && chunk < lanes;", ";", "overflow|not the product"),
    "the other half of b": ("int8_product.cu", "b[j][2], b[j][3]", "b[j][3], b[j][2]", "not the product"),
    "columns out of order": (
        "int8_product.cu",
        "upper ? words[i] : words[i + 2], 2",
        "words[i], 1",
        "not the",
    ),
    "no bias": ("int8_product.c", "inputs[BIAS] ? at[BIAS] : 0, to", "0, to", "not the product"),
    "a row too many": ("int8_rows.cu", "row < all.rows ? all.lanes", "row <= all.rows ? all.lanes", "overflow"),
    "no wait for the largest": (
        "int8_rows.cu",
        "        __syncthreads();\n",
        "",
        "the result depends on which thread comes first|Mismatched elements",
    ),
    "not rotated back": ("int8_rows.cu", "upper ? other - at[i]", "upper ? at[i] - other", "assert|Not equal"),
}
"""What -> source, right, wrong, what shows it."""


@pytest.mark.parametrize("fault", sampled(FAULTS, lambda fault: FAULTS[fault][0], lambda fault: FAULTS[fault][-1]))
def test_a_planted_fault_is_found(fault: str, faulty: Callable[[str, str, str], Path], tmp_path: Path) -> None:
    source, right, wrong, message = FAULTS[fault]
    program = faulty(source, right, wrong)
    with pytest.raises(AssertionError, match=message):
        if source.startswith("int8_product"):
            product(program, tmp_path, replace(UNEVEN, kernel=TURING if "tile.store" in right else NARROW))
        else:
            rows(program, tmp_path, Int8RowsCase((5, 2560), rotation=32 if "upper" in right else 0))
