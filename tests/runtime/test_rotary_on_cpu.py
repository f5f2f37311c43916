"""RotaryQkv's kernel and how it is launched, on the CPU as test_kernels_on_cpu.py has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cuda_on_cpu import Gpu, run
from sampled import sampled

from sdflow.distance import relative_l2
from sdflow.runtime.kernels.rotary_definitions import (
    INPUTS,
    QkvCase,
    qkv_expected,
    qkv_feeds,
    rounded,
)
from sdflow.runtime.kernels.rotary_proof import rounding_limit


def check(content: bytes, expected: np.ndarray, bfloat16: bool) -> None:
    kind = rounded(0, bfloat16).dtype
    found = np.frombuffer(content, kind).astype(np.float64).reshape(expected.shape)
    np.testing.assert_allclose(found, expected, rtol=0.01 if bfloat16 else 0.002, atol=0.01)
    assert not found.size or relative_l2(found, expected) <= rounding_limit(bfloat16)


def qkv(program: Path, folder: Path, gpu: Gpu, case: QkvCase) -> str:
    """Runs and checks it. Returns the grid and the block."""
    feeds = qkv_feeds(case)
    expected = qkv_expected(feeds, case.attributes)
    inputs = [feeds.get(name) for name in INPUTS]
    while inputs[-1] is None:
        inputs.pop()
    launches, outputs = run(program, folder, gpu, case.operator, inputs, len(expected), case.attributes)
    for content, each in zip(outputs, expected, strict=True):
        check(content, each, case.bfloat16)
    kind = "bfloat16" if case.bfloat16 else "float16"
    return ", ".join(line.removeprefix(f"rotary_qkv_{kind} ").removesuffix(" 1") for line in launches)


@pytest.mark.parametrize(
    ("plan", "gpu", "case"),
    [
        ("(1, 7, 3) (384, 1, 1)", Gpu(8), QkvCase(2, (37, 11), 3, 64, turned=False)),
        ("(1, 7, 3) (384, 1, 1)", Gpu(132, 80), QkvCase(1, (2, 5), 24, 128, bias=False, bfloat16=True)),
        ("(1, 3, 3) (384, 1, 1)", Gpu(4), QkvCase(1, (9,), 24, 128, bias=False, packed=9400)),
        ("(2, 4, 2) (256, 1, 1)", Gpu(4), QkvCase(2, (5,), 30, 128, tables=2, value=False, bfloat16=True)),
        ("(1, 2, 3) (384, 1, 1)", Gpu(1), QkvCase(3, (5, 70), 5, 32, norm=False)),
        ("(1, 4, 3) (384, 1, 1)", Gpu(132), QkvCase(2, (7, 9), 1, 256, tables=2)),
        ("(1, 1, 3) (384, 1, 1)", Gpu(132), QkvCase(1, (203,), 1, 8, turned=False, norm=False, bfloat16=True)),
        ("(1, 2, 3) (352, 1, 1)", Gpu(132), QkvCase(1, (3,), 11, 128, packed=4232, bfloat16=True)),
        ("", Gpu(132), QkvCase(0, (4,), 2, 64)),
    ],
    ids=str,
)
def test_qkv_is_right_however_it_is_planned(plan: str, gpu: Gpu, case: QkvCase, program: Path, tmp_path: Path) -> None:
    assert qkv(program, tmp_path, gpu, case) == plan


PLAIN = QkvCase(1, (4, 5), 3, 64)


@pytest.mark.parametrize(
    ("message", "case", "changed"),
    [
        ("not for heads of this size", replace(PLAIN, size=48), {}),
        ("not for heads of this size", replace(PLAIN, size=512), {}),
        ("a bias or a weight is of another size", PLAIN, {"key_bias1": (64,)}),
        ("a bias or a weight is of another size", PLAIN, {"query_weight0": (128,)}),
        ("a product or a weight is missing", PLAIN, {"query_weight0": None}),
        ("a product or a weight is missing", PLAIN, {"value1": None}),
        ("the products do not fit together", PLAIN, {"key0": (1, 5, 192)}),
        ("the products do not fit together", PLAIN, {"value1": (1, 5, 184)}),
        ("the products do not fit together", PLAIN, {"query1": (2, 5, 192)}),
        ("the products do not fit together", PLAIN, {"query1": (5, 192)}),
        ("cosines and sines are not those of the tokens", PLAIN, {"sine": (1, 8, 64)}),
        ("cosines and sines are not those of the tokens", PLAIN, {"cosine": None}),
    ],
    ids=str,
)
def test_qkv_refuses_what_it_cannot_do(
    message: str, case: QkvCase, changed: dict[str, tuple[int, ...] | None], program: Path, tmp_path: Path
) -> None:
    feeds: dict[str, np.ndarray | None] = {**qkv_feeds(case)}
    feeds |= {name: None if shape is None else np.ones(shape, np.float16) for name, shape in changed.items()}
    with pytest.raises(AssertionError, match=message):
        run(program, tmp_path, Gpu(4), "RotaryQkv", [feeds.get(name) for name in INPUTS], 3, case.attributes)


JOINED = Gpu(2), QkvCase(2, (9, 5), 3, 64, tables=2)
PACKED = Gpu(4), QkvCase(1, (7,), 11, 128, bias=False, packed=4232, bfloat16=True)
TOO_WIDE = Gpu(4), QkvCase(1, (3,), 49, 64, turned=False)
OUT_OF_BOUNDS = "AddressSanitizer: heap-buffer-overflow"
WRONG = "Mismatched elements"
CU, C = "rotary_qkv.cu", "rotary_qkv.c"
FAULTS = {
    "a row too many": (CU, "row + deep < end)", "row + deep <= end)", JOINED, "Mismatched|overflow"),
    "columns that are not there": (CU, " && lane < all.lanes", "", TOO_WIDE, "Mismatched|overflow"),
    "another head's weight": (CU, "weights[lane % all.head]", "weights[lane]", JOINED, OUT_OF_BOUNDS),
    "turned the other way": (CU, "x * cosine.at[j] - y", "x * cosine.at[j] + y", JOINED, WRONG),
    "the tables of the first image": (CU, "(size_t)image * all.tables", "(size_t)0", JOINED, WRONG),
    "half a head": (CU, "distance < threads", "2 * distance < threads", JOINED, WRONG),
    "no wait for the kernel before": (CU, "    wait_for_earlier_kernels();\n", "", JOINED, "use-after-poison"),
    "one stream over the other": (
        C,
        ".first = all.streams[0].tokens",
        ".first = 0",
        JOINED,
        "which thread comes first",
    ),
    "the first columns": (C, "+ column * WIDTH", "", PACKED, WRONG),
    "one block less": (C, "i].blocks = ceil_div(", "i].blocks = -1 + ceil_div(", JOINED, "nan|Mismatched|cannot be"),
}
"""What -> source, right, wrong, what shows it, how."""


@pytest.mark.parametrize("fault", sampled(FAULTS, lambda fault: FAULTS[fault][0], lambda fault: FAULTS[fault][-1]))
def test_a_planted_fault_is_found(fault: str, faulty: Callable[[str, str, str], Path], tmp_path: Path) -> None:
    source, right, wrong, (gpu, case), message = FAULTS[fault]
    program = faulty(source, right, wrong)
    with pytest.raises(AssertionError, match=message):
        qkv(program, tmp_path, gpu, case)
