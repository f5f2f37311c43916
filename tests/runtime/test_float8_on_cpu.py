"""Our operators for float8, run on the CPU as test_kernels_on_cpu.py runs the others, with a cuBLASLt of few lines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from cuda_on_cpu import Gpu, run
from sampled import sampled

from sdflow.distance import relative_l2
from sdflow.runtime.kernels.float8_proof import (
    RowsCase,
    dequantized,
    gated_expected,
    gated_feeds,
    product_expected,
    product_feeds,
    quantized,
    rows_expected,
    rows_feeds,
)

FLAT, WIDE = Gpu(132), (2, 3, 5120)


def rows(program: Path, folder: Path, case: RowsCase, gpu: Gpu = FLAT) -> str:
    """Runs and checks it. Returns the kernel and its blocks."""
    feeds = rows_feeds(case)
    count = 3 if case.kept else 2
    (launch,), outputs = run(program, folder, gpu, case.operator, [*feeds.values()], count, case.attributes)
    expected = rows_expected(feeds, case)
    bits, scales = np.frombuffer(outputs[0], np.uint8).reshape(case.shape), np.frombuffer(outputs[1], np.float32)
    wanted = quantized(expected["rows"], case.bfloat16)
    np.testing.assert_allclose(scales, wanted[1], rtol=2e-3)
    assert relative_l2(dequantized(bits, scales), dequantized(*wanted)) < 2e-3
    if case.operator.startswith("Float8Rows"):
        np.testing.assert_array_equal(bits, wanted[0])
    if case.kept:
        np.testing.assert_array_equal(np.frombuffer(outputs[2], np.float16).reshape(case.shape), expected["sum"])
    return launch


@pytest.mark.parametrize(
    ("blocks", "case"),
    [
        (2, RowsCase("Float8Rows", (2, 7, 640))),  # eight rows in a block, the last block not full
        (1, RowsCase("Float8Rows", (3, 1280))),
        (3, RowsCase("Float8Rows", (9, 2560))),  # two warps for a row
        (1, RowsCase("Float8Rows", (1, 10240))),  # all eight
        (1, RowsCase("Float8RowsBfloat16", (5, 1280))),
        (2, RowsCase("Float8Rows", (3, 4, 640), first=2, behind=1)),
        (1, RowsCase("Float8RowsBfloat16", (2, 3, 64), behind=5)),
        (2, RowsCase("Float8RowsBfloat16", (2, 12288))),  # sixteen
        (1, RowsCase("Float8Rows", (1, 3, 16))),
        (1, RowsCase("Float8SplitGelu", (1, 2, 640))),
        (3, RowsCase("Float8SplitGelu", (5, 5120))),
        (1, RowsCase("Float8LayerNorm", (3, 640))),
        (2, RowsCase("Float8LayerNorm", (2, 5, 1280), kept=True)),
        (2, RowsCase("Float8LayerNorm", (7, 2560), kept=True)),
    ],
    ids=str,
)
def test_rows_are_quantized_right_however_they_are_planned(
    blocks: int, case: RowsCase, program: Path, tmp_path: Path
) -> None:
    launch = rows(program, tmp_path, case)
    kernel = {"Float8SplitGelu": "split_gelu", "Float8LayerNorm": "layer_norm", "Float8Rows": "rows"}.get(
        case.operator, "rows_bfloat16"
    )
    warps = 16 if case.shape[-1] > 10240 else 8
    assert launch == f"float8_{kernel} ({blocks}, 1, 1) (32, {warps}, 1) 1"


def product(
    program: Path, folder: Path, shape: tuple[int, int, int, int], gpu: Gpu = FLAT, *, bfloat16: bool = False
) -> list[str]:
    """Runs and checks it. Returns what was launched."""
    feeds = product_feeds(shape)
    operator = "Float8ProductBfloat16" if bfloat16 else "Float8Product"
    launches, (content, workspace) = run(program, folder, gpu, operator, [*feeds.values()], 2)
    assert bool(workspace) != bool(launches)
    found = np.frombuffer(content, ml_dtypes.bfloat16 if bfloat16 else np.float16).reshape(*shape[:2], shape[3])
    assert relative_l2(found, product_expected(feeds)) < (3e-3 if bfloat16 else 5e-4)
    return launches


def test_a_product_in_bfloat16_is_that_of_its_definition(program: Path, tmp_path: Path) -> None:
    assert not product(program, tmp_path, (2, 5, 64, 48), bfloat16=True)
    launches = product(program, tmp_path, (2, 100, 144, 176), Gpu(4), bfloat16=True)
    assert launches == ["float8_product_bfloat16 (4, 1, 1) (384, 1, 1) 1"]


@pytest.mark.parametrize(
    ("shape", "gpu"),
    [
        ((2, 5, 64, 48), FLAT),
        ((1, 1, 16, 16), FLAT),
        ((1, 33, 128, 16), FLAT),
        ((1, 300, 128, 320), Gpu(2, 89)),
        ((1, 300, 64, 320), Gpu(8)),  # two multiprocessors would have no tile of ours
        ((1, 1000, 784, 16), Gpu(1)),  # longer products of ours than they are quicker for
    ],
    ids=str,
)
def test_a_product_is_that_of_its_definition(
    shape: tuple[int, int, int, int], gpu: Gpu, program: Path, tmp_path: Path
) -> None:
    assert not product(program, tmp_path, shape, gpu)


@pytest.mark.parametrize(
    ("blocks", "processors", "shape"),
    [
        (1, 1, (1, 5, 16, 16)),
        (4, 4, (2, 100, 144, 176)),
        (2, 2, (1, 300, 272, 208)),  # three tiles for each block
        (1, 1, (1, 300, 912, 64)),  # more steps than places
    ],
    ids=str,
)
def test_our_tiles_are_the_product_of_its_definition(
    blocks: int, processors: int, shape: tuple[int, int, int, int], program: Path, tmp_path: Path
) -> None:
    assert product(program, tmp_path, shape, Gpu(processors)) == [f"float8_product ({blocks}, 1, 1) (384, 1, 1) 1"]


@pytest.mark.parametrize("bfloat16", [False, True])
def test_tiles_in_turns_are_the_product_of_its_definition(
    bfloat16: bool, faulty: Callable[[str, str, str], Path], tmp_path: Path
) -> None:
    """By a library that chooses them: which is quicker is measured."""
    program = faulty("float8_tiles.c", "2 * FLOAT8_IN_TURNS", "2")
    ending = "_bfloat16" if bfloat16 else ""
    for blocks, shape in ((2, (1, 300, 272, 208)), (1, (1, 5, 16, 16))):  # three tiles for each block; one without
        launches = product(program, tmp_path, shape, Gpu(blocks), bfloat16=bfloat16)
        assert launches == [f"float8_product_in_turns{ending} ({blocks}, 1, 1) (384, 1, 1) 1"]


def gated(program: Path, folder: Path, shape: tuple[int, int, int, int], gpu: Gpu) -> str:
    """Runs and checks it. Returns what was launched."""
    feeds = gated_feeds(shape)
    (launch,), (content,) = run(program, folder, gpu, "Float8GatedProduct", [*feeds.values()], 1)
    found = np.frombuffer(content, np.float16).reshape(*shape[:2], shape[3] // 2)
    assert relative_l2(found, gated_expected(feeds)) < 5e-4
    return launch


@pytest.mark.parametrize(
    ("blocks", "processors", "shape"),
    [
        (1, 2, (1, 5, 16, 16)),
        (2, 2, (2, 100, 144, 368)),  # three tiles for each block, the last one not full
        (4, 4, (1, 300, 912, 208)),  # more steps than places, and some warpgroups without a tile
    ],
    ids=str,
)
def test_a_gated_product_is_that_of_its_definition(
    blocks: int, processors: int, shape: tuple[int, int, int, int], program: Path, tmp_path: Path
) -> None:
    launch = gated(program, tmp_path, shape, Gpu(processors))
    assert launch == f"float8_gated_product ({blocks}, 1, 1) (384, 1, 1) 1"


def scaled(rows: int, columns: int) -> list[np.ndarray | None]:
    """What a product of two rows and sixteen columns reads, with so many scales."""
    return [
        np.zeros((2, 16), np.uint8),
        np.ones(rows, np.float32),
        np.zeros((16, 16), np.uint8),
        np.ones(columns, np.float32),
    ]


HALVES = np.zeros(16, np.float16)


@pytest.mark.parametrize(
    ("message", "gpu", "operator", "inputs"),
    [
        ("float8 needs a GPU of compute capability 8.9", Gpu(108, 80), "Float8Rows", [np.zeros((2, 16), np.float16)]),
        ("not for this number of channels", FLAT, "Float8Rows", [np.zeros((2, 12), np.float16)]),
        ("not for this number of channels", FLAT, "Float8Rows", [np.zeros((1, 20488), np.float16)]),
        (
            "inputs of other sizes than x",
            FLAT,
            "Float8SplitGelu",
            [np.zeros((2, 32), np.float16), np.zeros(16, np.float16)],
        ),
        (
            "not for matrices of these sizes",
            FLAT,
            "Float8Product",
            [
                np.zeros((2, 24), np.uint8),
                np.zeros(2, np.float32),
                np.zeros((16, 24), np.uint8),
                np.zeros(16, np.float32),
            ],
        ),
        ("not a scale for each row", FLAT, "Float8Product", scaled(rows=1, columns=16)),
        ("not a scale for each row", FLAT, "Float8Product", scaled(rows=2, columns=1)),
        ("not a scale for each row", FLAT, "Float8GatedProduct", [*scaled(rows=1, columns=16), HALVES]),
        ("not a scale for each row", FLAT, "Float8GatedProduct", [*scaled(rows=2, columns=1), HALVES]),
    ],
)
def test_what_float8_cannot_do_is_refused(
    message: str, gpu: Gpu, operator: str, inputs: list[np.ndarray | None], program: Path, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=message):
        run(program, tmp_path, gpu, operator, inputs, 2, {"tokens": 0, "first": 0})


def test_rows_that_an_image_does_not_have_are_refused(program: Path, tmp_path: Path) -> None:
    x = np.zeros((1, 4, 16), np.float16)
    with pytest.raises(AssertionError, match="not for these rows of each image"):
        run(program, tmp_path, FLAT, "Float8Rows", [x], 2, {"tokens": 3, "first": 2})


FAULTS = {
    "products of what is not there": (
        "float8_product.cu",
        "wait_for_phase(places.full + 8 * stage, phase);",
        "",
        "not there, or goes too early",
    ),
    "a place given back too early": (
        "float8_product.cu",
        "            wait_for_products<1>();\n",
        "",
        "not there, or goes too early",
    ),
    "no turns": (
        "float8_product.cu",
        "wait_for_phase(places.turns + 8 * group, turn);",
        "",
        "not there, or goes too early",
    ),
    "a row too many of y": (
        "float8_product.cu",
        "at < size.rows ? size.columns",
        "at <= size.rows ? size.columns",
        "overflow",
    ),
    "a row too many": ("float8_rows.cu", "held.row < all.rows", "held.row <= all.rows", "heap-buffer-overflow"),
    "no wait for the largest": (
        "float8_rows.cu",
        "    __syncthreads();\n    for",
        "    for",
        "the result depends on which thread comes first",
    ),
    "part of a row": ("float8_rows.c", "all.warps *= 2;", "break;", "Mismatched elements"),
    "scales changed over": (
        "float8_product.c",
        "A_SCALE_POINTER, &weight_scales",
        "A_SCALE_POINTER, &row_scales",
        "heap-buffer-overflow",
    ),
    "not transposed": (
        "float8_product.c",
        "transposed = 1,",
        "transposed = 0,",
        "no product of float8 rows with scales .status 15.",
    ),
}
"""What -> source, right, wrong, what shows it."""


@pytest.mark.parametrize("fault", sampled(FAULTS, lambda fault: FAULTS[fault][0], lambda fault: FAULTS[fault][-1]))
def test_a_planted_fault_is_found(fault: str, faulty: Callable[[str, str, str], Path], tmp_path: Path) -> None:
    source, right, wrong, message = FAULTS[fault]
    program = faulty(source, right, wrong)
    with pytest.raises(AssertionError, match=message):
        if source == "float8_product.c":
            product(program, tmp_path, (1, 9, 32, 16))
        elif source == "float8_product.cu":
            gated(program, tmp_path, (1, 300, 1040, 208), Gpu(1))
        else:
            rows(program, tmp_path, RowsCase("Float8LayerNorm", (5, 2560)))
