"""Geglu's kernel and the planning of its launch, run on the CPU as test_kernels_on_cpu.py has it.

cuda_on_cpu/hopper.cpp stands for what only Hopper has. It does loads as early as they may come, products, copies and stores as
late. It does not find wrong PTX in hopper.cuh, nor which descriptors the tensor cores take: those were found on a GPU.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cuda_on_cpu import Gpu, run
from sampled import sampled

from sdflow.distance import relative_l2
from sdflow.runtime.kernels.definitions import geglu_expected, geglu_feeds
from sdflow.runtime.kernels.parts import FOLDER
from sdflow.tolerances import KERNEL_LIMIT


def geglu(program: Path, folder: Path, processors: int, shape: tuple[int, ...]) -> str:
    """Runs and checks it. Returns the kernel and how many blocks it has."""
    feeds = geglu_feeds(shape)
    (launch,), (content,) = run(program, folder, Gpu(processors), "Geglu", list(feeds.values()), 1)
    found, expected = np.frombuffer(content, np.float16).reshape(*shape[:-2], shape[-1]), geglu_expected(feeds)
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=0.01, atol=0.02)
    assert relative_l2(found, expected) <= KERNEL_LIMIT
    kernel, rest = launch.removeprefix("geglu_").split(maxsplit=1)
    return f"{kernel} {rest.split(',')[0].removeprefix('(')}"


@pytest.mark.parametrize(
    ("plan", "processors", "shape"),
    [
        ("in_turns 2", 132, (128, 64, 128)),
        ("in_turns 8", 132, (2, 5, 13, 8, 256)),
        ("in_turns 1", 132, (1, 1, 1, 2, 8, 64)),  # five axes
        ("in_turns 9", 132, (3, 100, 136, 192)),
        ("in_turns 4", 4, (130, 328, 384)),  # three tiles for a block
        ("in_turns 1", 1, (520, 72, 128)),
        ("in_turns 3", 3, (4, 560, 8, 64)),  # 18 tiles down, in bands of four
        ("in_turns 4", 4, (129, 1032, 128)),  # deep, and too few tiles to be wide
        ("wide 1", 1, (130, 1032, 256)),
        ("wide 1", 1, (400, 1032, 128)),
    ],
    ids=str,
)
def test_geglu_is_right_however_it_is_planned(
    plan: str, processors: int, shape: tuple[int, ...], program: Path, tmp_path: Path
) -> None:
    assert geglu(program, tmp_path, processors, shape) == plan


def test_the_gelu_is_off_by_less_than_half_of_rounding() -> None:
    """Its polynomial, as the source has it, in float32; and what float16 makes of the gate and of the result."""
    source = (FOLDER / "quick_gelu.cuh").read_text(encoding="utf-8")
    (line,) = (line for line in source.splitlines() if "const float q =" in line)
    coefficients = [np.float32(found) for found in re.findall(r"-?\d[\d.e-]*(?=f)", line)]
    assert len(coefficients) == 5
    gate = np.linspace(-12, 12, 48001, dtype=np.float32)
    square, q = gate * gate, np.zeros_like(gate)
    for coefficient in reversed(coefficients):
        q = q * square + coefficient
    with np.errstate(over="ignore"):
        found = gate / (1 + np.exp2(gate * q))
    exact = gate.astype(np.float64)
    below = np.vectorize(math.erfc)(-exact / math.sqrt(2)) / 2
    slope = below + exact * np.exp(-exact * exact / 2) / math.sqrt(2 * math.pi)
    rounding = _half_a_step(exact * below) + np.abs(slope) * _half_a_step(exact)
    off = np.abs(found - exact * below)
    assert off.max() < 4.4e-5
    assert (off / rounding).max() < 0.5


def _half_a_step(values: np.ndarray) -> np.ndarray:
    """Of float16, where these values are."""
    result: np.ndarray = np.spacing(np.abs(values).astype(np.float16)).astype(np.float64) / 2
    return result


@pytest.mark.parametrize(
    ("message", "x", "weight", "bias"),
    [
        ("not for this number of channels", (2, 64), (64, 192), (192,)),
        ("not for this number of channels", (2, 68), (68, 256), (256,)),
        ("weight and bias are not of x's size", (2, 64), (128, 256), (256,)),
        ("weight and bias are not of x's size", (2, 64), (64, 256), (128,)),
        ("weight and bias are not of x's size", (2, 64), (1, 64, 256), (256,)),
        ("it is for GPUs of compute capability 9.0", (2, 64), (64, 256), (256,)),
    ],
)
def test_geglu_refuses_what_it_cannot_do(
    message: str, x: tuple[int, ...], weight: tuple[int, ...], bias: tuple[int, ...], program: Path, tmp_path: Path
) -> None:
    inputs: list[np.ndarray | None] = [np.ones(shape, np.float16) for shape in (x, weight, bias)]
    with pytest.raises(AssertionError, match=message):
        run(program, tmp_path, Gpu(4, 89 if "9.0" in message else 90), "Geglu", inputs, 1)


WRONG = "Mismatched elements"
NOT_THERE = "what is multiplied was not there"
STUCK = "threads wait for others that never come"
BEGUN = "a thread ends before what it has begun"
IN_TURNS, WIDE = (2, (520, 328, 128)), (1, (130, 1032, 256))
FAULTS = {
    "the gates of other columns": ("i / (PANELS / 2) * size.width;", "0;", IN_TURNS, WRONG),
    "a slice that may still be read": ("arrive(empty + 8 * last);", "arrive(empty + 8 * stage);", WIDE, STUCK),
    "sums of products under way": ("wait_for_products<0>();", "wait_for_products<1>();", IN_TURNS, NOT_THERE),
    "a result that is not yet stored": ("if (thread == 0) wait_for_reads();", "", IN_TURNS, WRONG),
    "gone before it is stored": ("if (thread == 0) wait_for_stores();", "", IN_TURNS, BEGUN),
    "not shown": ("show_to_stores();", "", WIDE, "what is stored was not shown"),
    "biases on their way": ("wait_for_words();", "", IN_TURNS, BEGUN),
    "not swizzled": (" ^ (lane % 8))", ")", IN_TURNS, WRONG),
    "no wait for a slice": ("wait_for_phase(full + 8 * stage, phase);", "", WIDE, NOT_THERE),
    "half of what comes": ("arrive_and_expect(ready, STAGE)", "arrive_and_expect(ready, STAGE / 2)", WIDE, STUCK),
    "out of turn": ("if (!WIDE) meet(turn, 2 * WARPGROUP);", "", IN_TURNS, NOT_THERE),
    "nobody's turn": ("if (!WIDE && index + next < tiles) signal", "if (false) signal", IN_TURNS, STUCK),
    "another's slices": ("if (!WIDE) pass_tile();", "", IN_TURNS, STUCK),
    "half of the rows": ("(WIDE ? group : i) * 64, out", "i * 64, out", WIDE, "depends on which thread comes first"),
}
"""What -> right, wrong, what shows it, how."""


@pytest.mark.parametrize("fault", sampled(FAULTS, lambda fault: FAULTS[fault][-1]))
def test_a_planted_fault_is_found(fault: str, faulty: Callable[[str, str, str], Path], tmp_path: Path) -> None:
    right, wrong, (processors, shape), message = FAULTS[fault]
    program = faulty("geglu.cu", right, wrong)
    with pytest.raises(AssertionError, match=message):
        geglu(program, tmp_path, processors, shape)
