"""Our attention to few keys, run on the CPU as test_kernels_on_cpu.py runs the other kernels. Tensor cores' products are those
that threads.cpp computes by their definition, and copies that go on by themselves are made at once and as late as may be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cuda_on_cpu import Gpu, run
from sampled import sampled

from sdflow.distance import relative_l2
from sdflow.runtime.kernels.definitions import AttentionCase, attention_expected, attention_feeds, attention_scale
from sdflow.tolerances import KERNEL_LIMIT


def attention(program: Path, folder: Path, gpu: Gpu, case: AttentionCase) -> str:
    """Runs and checks it. Returns which kernel, and its blocks and warps."""
    feeds = attention_feeds(case)
    attributes = {"num_heads": case.heads, "scale": attention_scale(case)}
    launches, (content,) = run(program, folder, gpu, "FewKeysAttention", [*feeds.values()], 1, attributes)
    expected = attention_expected(feeds, case) if case.images * case.queries else np.zeros(0)
    found = np.frombuffer(content, np.float16).reshape(expected.shape)
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=0.01, atol=0.005)
    assert not found.size or relative_l2(found, expected) <= KERNEL_LIMIT
    return ", ".join(line.removeprefix("few_keys_attention_").removesuffix(" 1") for line in launches)


@pytest.mark.parametrize(
    ("plan", "gpu", "case"),
    [
        ("64_16_one (1, 1, 1) (32, 4, 1)", Gpu(132), AttentionCase(1, 1, 1, 1, 64)),
        ("40_80_one (1, 3, 2) (32, 4, 1)", Gpu(132), AttentionCase(2, 65, 77, 3, 40)),
        ("64_80_one (1, 2, 2) (32, 4, 1)", Gpu(132, 80), AttentionCase(2, 17, 77, 2, 64)),
        ("80_80_one (2, 2, 1) (32, 4, 1)", Gpu(132, 80), AttentionCase(1, 130, 80, 2, 80)),
        ("160_80_one (1, 1, 2) (32, 4, 1)", Gpu(132), AttentionCase(2, 64, 77, 1, 160)),
        ("40_80_one (2, 2, 1) (32, 4, 1)", Gpu(1, 80), AttentionCase(1, 900, 77, 2, 40)),
        ("64_16_one (3, 2, 1) (32, 4, 1)", Gpu(1), AttentionCase(1, 300, 4, 2, 64)),
        ("80_80_one (1, 3, 1) (32, 4, 1)", Gpu(1), AttentionCase(1, 200, 17, 3, 80)),
        ("160_16_one (3, 1, 1) (32, 4, 1)", Gpu(1), AttentionCase(1, 700, 16, 1, 160)),
        ("40_80_more (1, 2, 1) (32, 4, 1)", Gpu(132), AttentionCase(1, 33, 81, 2, 40)),
        ("64_80_more (1, 1, 2) (32, 4, 1)", Gpu(132), AttentionCase(2, 20, 154, 1, 64)),
        ("80_80_more (1, 2, 1) (32, 4, 1)", Gpu(1), AttentionCase(1, 200, 231, 2, 80)),
        ("160_80_more (1, 1, 1) (32, 4, 1)", Gpu(132), AttentionCase(1, 40, 231, 1, 160)),
        ("160_80_more (1, 1, 1) (32, 4, 1)", Gpu(132, 89), AttentionCase(1, 40, 231, 1, 160)),
        ("160_80_more (1, 1, 2) (32, 4, 1)", Gpu(1, 86), AttentionCase(2, 150, 154, 1, 160)),
        ("64_80_one (1, 3, 2) (32, 4, 1)", Gpu(132), AttentionCase(2, 33, 77, 3, 64, parts=2)),
        ("160_80_one (1, 2, 2) (32, 4, 1)", Gpu(132), AttentionCase(2, 64, 64, 2, 160, parts=1)),
        ("40_80_more (1, 2, 1) (32, 4, 1)", Gpu(132), AttentionCase(1, 90, 90, 2, 40, parts=1)),
        ("", Gpu(132), AttentionCase(0, 4, 77, 2, 64)),
        ("", Gpu(132), AttentionCase(2, 0, 77, 2, 64)),
    ],
    ids=str,
)
def test_attention_is_right_however_it_is_planned(
    plan: str, gpu: Gpu, case: AttentionCase, program: Path, tmp_path: Path
) -> None:
    assert attention(program, tmp_path, gpu, case) == plan


@pytest.mark.parametrize(
    ("message", "shapes"),
    [
        ("not for heads of this size", [(1, 4, 96), (1, 5, 96), (1, 5, 96)]),
        ("no key", [(1, 4, 128), (1, 0, 128), (1, 0, 128)]),
        ("do not fit together", [(2, 4, 128), (1, 5, 128), (1, 5, 128)]),
        ("do not fit together", [(1, 4, 128), (1, 5, 128), (1, 6, 128)]),
        ("do not fit together", [(1, 4, 128), (1, 5, 128), (1, 5, 160)]),
        ("do not fit together", [(1, 4, 128), (1, 5, 2, 3, 64)]),
        ("do not fit together", [(1, 4, 128), (1, 5, 1, 2, 64)]),
        ("do not fit together", [(1, 4, 2, 2, 64)]),
        ("do not fit together", [(1, 4, 128)]),
        ("do not fit together", [(1, 2, 4, 64), (1, 5, 128), (1, 5, 128)]),
    ],
    ids=str,
)
def test_attention_refuses_what_it_cannot_do(
    message: str, shapes: list[tuple[int, ...]], program: Path, tmp_path: Path
) -> None:
    inputs = [np.zeros(shape, np.float16) for shape in shapes]
    with pytest.raises(AssertionError, match=message):
        run(program, tmp_path, Gpu(4), "FewKeysAttention", inputs, 1, {"num_heads": 2, "scale": 0.125})


FLAT = Gpu(132), AttentionCase(2, 17, 77, 2, 64)
PIECES = Gpu(132), AttentionCase(1, 20, 154, 1, 64)
WIDE = Gpu(132), AttentionCase(1, 3, 77, 1, 160)
ONE_BY_ONE = Gpu(132, 89), AttentionCase(1, 20, 154, 1, 160)
"""Pieces that do not fit into shared memory together."""
OUT_OF_BOUNDS = "AddressSanitizer: heap-buffer-overflow"
WRONG = "Mismatched elements"
TOO_EARLY = "the result depends on which thread comes first"
WAIT_FOR_KEYS, BARRIER = "wait_for_groups<BUFFERS>();", "\n                __syncthreads();"
CU, C = "few_keys_attention.cu", "few_keys_attention.c"
FAULTS = {
    "a row too many": (CU, "first + i < there", "first + i <= there", FLAT, OUT_OF_BOUNDS),
    "a result too many": (CU, "first + row < there", "first + row <= there", FLAT, OUT_OF_BOUNDS),
    "keys that are not there": (CU, "if (all.keys - start < PIECE)", "if (false)", FLAT, WRONG),
    "no wait for the keys": (CU, WAIT_FOR_KEYS, "", FLAT, TOO_EARLY),
    "no wait for others' keys": (CU, WAIT_FOR_KEYS + BARRIER, WAIT_FOR_KEYS, FLAT, TOO_EARLY),
    "results read too early": (CU, "    __syncwarp();\n    constexpr", "    constexpr", FLAT, TOO_EARLY),
    "the sum before": (CU, "softmax.total[t][half] *= before;", "", PIECES, WRONG),
    "a piece overwritten": (CU, "__syncthreads();  // the piece before was read", "", ONE_BY_ONE, TOO_EARLY),
    "the first head alone": (C, ".head = parts * head", ".head = 0", FLAT, WRONG),
    "too little shared memory": (C, "shared = own + 2 *", "shared = own +", FLAT, OUT_OF_BOUNDS),
    "shared memory not asked for": (
        "custom_ops.c",
        "FEW_KEYS_COUNT, gpu.shared_memory)",
        "FEW_KEYS_COUNT, 48 << 10)",
        WIDE,
        "cannot be launched: CUDA_ERROR_INVALID_VALUE",
    ),
}
"""What -> source, right, wrong, what shows it, how."""


@pytest.mark.parametrize("fault", sampled(FAULTS, lambda fault: FAULTS[fault][0], lambda fault: FAULTS[fault][-1]))
def test_a_planted_fault_is_found(fault: str, faulty: Callable[[str, str, str], Path], tmp_path: Path) -> None:
    source, right, wrong, (gpu, case), message = FAULTS[fault]
    program = faulty(source, right, wrong)
    with pytest.raises(AssertionError, match=message):
        attention(program, tmp_path, gpu, case)
