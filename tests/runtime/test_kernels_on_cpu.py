"""Our CUDA kernels and the planning of their launches, run on the CPU: the same sources, compiled by g++ with sanitizers.

cuda_on_cpu/ has what they take of CUDA, of its driver and of ONNX Runtime. It finds what is computed wrongly, accesses out
of bounds, what is used before it is written, and threads that do not wait for each other: all accesses of two threads
between barriers come in both orders (threads.h). It does not find what depends on the GPU: its PTX (float16.cuh,
cluster.cuh), its arithmetic's last bits, and races between blocks that no cluster joins.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cuda_on_cpu import Gpu, run
from sampled import sampled

from sdflow.distance import relative_l2
from sdflow.runtime.kernels.definitions import (
    EPSILON,
    INPUTS,
    GroupNormCase,
    gelu_expected,
    gelu_feeds,
    group_norm_expected,
    group_norm_feeds,
    interleave_expected,
    phases,
)
from sdflow.tolerances import KERNEL_LIMIT


def group_norm(program: Path, folder: Path, gpu: Gpu, case: GroupNormCase) -> str:
    """Runs and checks it. Returns the plan: the kernel, and the cluster or the blocks for an image."""
    feeds = group_norm_feeds(case)
    inputs = [feeds.get(name) for name in INPUTS]
    while inputs[-1] is None:
        inputs.pop()
    attributes = {"groups": case.groups, "epsilon": EPSILON, "activation": int(case.silu)}
    launches, outputs = run(program, folder, gpu, case.operator, inputs, 3 if case.kept else 2, attributes)
    found = {"y": outputs[0]} | ({"sum": outputs[2]} if case.kept else {})
    expected = group_norm_expected(feeds, case) if feeds["x"].size else {"y": feeds["x"], "sum": feeds["x"]}
    for output, content in found.items():
        check(np.frombuffer(content, feeds["x"].dtype).reshape(case.shape), expected[output])
    kernels = [line.split()[0].removeprefix("group_norm_") for line in launches]
    if len(launches) == 1:
        assert not outputs[1], "scratch that nobody uses"
        return f"{kernels[0]}, clusters of {launches[0].split()[-1]}"
    return ", ".join(
        f"{kernel} {line.split('(')[1].split(',')[0]}" for kernel, line in zip(kernels, launches, strict=True)
    )


def check(found: np.ndarray, expected: np.ndarray) -> None:
    """In L2 as on the GPU, and no element far off: NaN where nothing was written."""
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=0.01, atol=0.02)
    assert not found.size or relative_l2(found, expected) <= KERNEL_LIMIT


WHOLE_ROWS = GroupNormCase((1, 1, 1636, 80), groups=8)
"""1636 rows of five vectors: 1020 threads with eight each hold 1632."""

GROUP_NORMS = [
    ("held_4, clusters of 1", Gpu(4), GroupNormCase((1, 5, 7, 320), silu=False)),  # groups of 10, across vectors
    ("held_4, clusters of 8", Gpu(132), GroupNormCase((2, 8, 9, 320), silu=False)),
    (
        "held_4, clusters of 1",
        Gpu(4),
        GroupNormCase((1, 9, 5, 128), skip="full", bias=True, kept=True),
    ),  # of 4, two in a vector
    ("held_4, clusters of 4", Gpu(132), GroupNormCase((2, 9, 5, 128), skip="row")),
    ("held_4, clusters of 4", Gpu(40), GroupNormCase((1, 6, 7, 256), bias=True, kept=True)),  # of 8
    ("held_4, clusters of 8", Gpu(132), GroupNormCase((1, 4, 5, 640), skip="row", bias=True, kept=True)),  # of 20
    ("held_4, clusters of 1", Gpu(30), GroupNormCase((2, 3, 3, 640), skip="full", silu=False)),
    (
        "held_4, clusters of 4",
        Gpu(132),
        GroupNormCase((1, 1, 7, 960), skip="full", bias=True),
    ),  # of 30; eight have no row each
    ("held_4, clusters of 1", Gpu(4), GroupNormCase((1, 1, 1, 960), skip="row")),
    ("held_4, clusters of 1", Gpu(132), GroupNormCase((3, 5, 3, 1280), skip="full", bias=True, kept=True)),  # of 40
    ("held_4, clusters of 4", Gpu(60), GroupNormCase((1, 5, 3, 1920), skip="row")),  # of 60
    ("held_4, clusters of 2", Gpu(132), GroupNormCase((2, 3, 3, 2560), skip="full", kept=True)),  # of 80
    ("held_8, clusters of 1", Gpu(4), GroupNormCase((1, 33, 32, 256), skip="full", bias=True, kept=True)),
    ("held_8, clusters of 1", Gpu(4), GroupNormCase((1, 31, 40, 128), skip="row", silu=False)),
    ("held_8, clusters of 2", Gpu(4), GroupNormCase((2, 1, 2050, 64), groups=8)),
    ("held_8, clusters of 4", Gpu(4), GroupNormCase((1, 1, 4100, 32), groups=4, bias=True)),
    ("held_8, clusters of 8", Gpu(4), GroupNormCase((1, 89, 97, 32), groups=4, skip="full", kept=True)),
    ("held_8, clusters of 8", Gpu(4), GroupNormCase((1, 128, 128, 32), groups=4)),  # just held
    ("sums 4, apply 4", Gpu(4), GroupNormCase((1, 113, 145, 32), groups=4)),  # a position more
    ("held_8, clusters of 2", Gpu(1), WHOLE_ROWS),
    ("held_4, clusters of 4", Gpu(132), GroupNormCase((1, 2, 7, 288))),  # of 9: slices of eight groups
    ("held_4, clusters of 8", Gpu(132), GroupNormCase((1, 2, 7, 384), skip="full")),  # of 12
    (
        "sums 3, apply 3",
        Gpu(132),
        GroupNormCase((1, 3, 3, 2240), groups=8),
    ),  # of 35 vectors: no whole warps of whole rows
    ("sums 2, apply 2", Gpu(4, 80), GroupNormCase((1, 5, 7, 320), silu=False)),
    ("sums 13, apply 13", Gpu(132, 80), GroupNormCase((2, 17, 19, 320), skip="row", bias=True)),
    ("sums 1, apply 1", Gpu(2, 80), GroupNormCase((3, 21, 20, 128), skip="full", bias=True, kept=True)),
    ("sums 30, apply 30", Gpu(132, 80), GroupNormCase((1, 31, 30, 256), skip="full", silu=False)),
    ("sums 1, apply 1", Gpu(1, 80), GroupNormCase((2, 7, 9, 640), bias=True, kept=True)),
    ("sums 4, apply 4", Gpu(4, 80), GroupNormCase((1, 7, 11, 960), skip="row", kept=True)),
    ("sums 4, apply 4", Gpu(7, 80), GroupNormCase((2, 5, 7, 1280), skip="full", bias=True, silu=False)),
    ("sums 6, apply 6", Gpu(132, 80), GroupNormCase((1, 7, 3, 1920), skip="row")),
    ("sums 1, apply 1", Gpu(1, 80), GroupNormCase((1, 5, 5, 2560), skip="full", kept=True)),
    ("sums 1, apply 1", Gpu(132, 80), GroupNormCase((1, 1, 1, 4096), bias=True)),
    ("sums 3, apply 3", Gpu(132, 80), GroupNormCase((1, 3, 1, 8192), skip="full", bias=True)),  # a row for a block
    ("sums 40, apply 40", Gpu(132, 80), GroupNormCase((1, 10, 12, 2560))),  # more parts than threads for a group
    ("sums 5, apply 5", Gpu(132, 80), GroupNormCase((1, 9, 9, 480), groups=12, skip="full")),
    ("sums 1, apply 1", Gpu(132, 80), GroupNormCase((2, 9, 9, 48), groups=1)),
    ("sums_single 4, apply_single 4", Gpu(4), GroupNormCase((1, 5, 7, 960), skip="row", kept=True, single=True)),
    ("sums_single 30, apply_single 30", Gpu(132), GroupNormCase((1, 31, 30, 256), skip="full", bias=True, single=True)),
    ("sums_single 2, apply_single 2", Gpu(4), GroupNormCase((2, 5, 7, 320), silu=False, bias=True, single=True)),
    ("", Gpu(132), GroupNormCase((0, 4, 4, 320))),
    ("", Gpu(132), GroupNormCase((2, 0, 4, 320), kept=True)),
]
"""Plan: what is to be launched, and on clusters of how many blocks or on how many blocks for an image."""


def name(value: object) -> str | None:
    if isinstance(value, GroupNormCase):
        parts = [value.skip, *(word for word in ("bias", "kept", "silu") if getattr(value, word)), f"{value.groups}g"]
        return "-".join(["x".join(map(str, value.shape)), *parts])
    return f"{value.processors}mp-sm{value.capability}" if isinstance(value, Gpu) else None


@pytest.mark.parametrize(("plan", "gpu", "case"), GROUP_NORMS, ids=name)
def test_group_norm_is_right_however_it_is_planned(
    plan: str, gpu: Gpu, case: GroupNormCase, program: Path, tmp_path: Path
) -> None:
    assert group_norm(program, tmp_path, gpu, case) == plan


def gelu(program: Path, folder: Path, gpu: Gpu, shape: tuple[int, ...]) -> str:
    """Runs and checks it. Returns the grid and the block."""
    feeds = gelu_feeds(shape)
    (launch,), (content,) = run(program, folder, gpu, "BiasSplitGelu", list(feeds.values()), 1)
    check(np.frombuffer(content, np.float16).reshape(*shape[:-1], -1), gelu_expected(feeds))
    kernel, rest = launch.split(maxsplit=1)
    assert kernel == "bias_split_gelu"
    return rest.removesuffix(" 1")


@pytest.mark.parametrize(
    ("plan", "processors", "shape"),
    [
        ("(1, 2, 1) (20, 32, 1)", 1, (2, 77, 320)),
        ("(1, 15, 1) (20, 32, 1)", 132, (3, 4, 40, 320)),
        ("(1, 5, 1) (640, 1, 1)", 132, (1, 5, 10240)),
        ("(2, 3, 1) (640, 1, 1)", 3, (1, 7, 12288)),  # the second column of blocks is not full
        ("(1, 1, 1) (3, 213, 1)", 132, (3, 2, 48)),
        ("(1, 2, 1) (3, 213, 1)", 1, (1000, 48)),
        ("(1, 1, 1) (1, 640, 1)", 132, (16,)),
    ],
    ids=str,
)
def test_bias_split_gelu_is_right_however_it_is_planned(
    plan: str, processors: int, shape: tuple[int, ...], program: Path, tmp_path: Path
) -> None:
    assert gelu(program, tmp_path, Gpu(processors), shape) == plan


def interleave(program: Path, folder: Path, gpu: Gpu, shape: tuple[int, int, int, int], single: bool = False) -> str:
    """Runs and checks it. Returns the grid."""
    x = phases(shape, single)
    (launch,), (content,) = run(program, folder, gpu, f"InterleavePhases{'Single' * single}", [x], 1)
    expected = interleave_expected(x)
    np.testing.assert_array_equal(np.frombuffer(content, x.dtype).reshape(expected.shape), expected)
    kernel, grid, _ = launch.replace(" (", "|(").split("|")
    assert kernel == "interleave"
    return grid


@pytest.mark.parametrize(
    ("grid", "shape", "single"),
    [
        ("(1, 4, 2)", (2, 5, 8, 32), False),
        ("(3, 2, 1)", (1, 3, 70, 160), True),
        ("(6, 1, 3)", (3, 2, 18, 2560), False),  # the last block is not full
        ("(1, 1, 1)", (1, 2, 2, 16), True),
    ],
)
def test_phases_are_put_between_one_another(
    grid: str, shape: tuple[int, int, int, int], single: bool, program: Path, tmp_path: Path
) -> None:
    assert interleave(program, tmp_path, Gpu(132), shape, single) == grid


@pytest.mark.parametrize(
    ("message", "shape"),
    [
        ("not for this shape", (1, 4, 4, 16)),
        ("not for this shape", (1, 1, 4, 32)),
        ("not for this shape", (4, 4, 32)),
        ("not for this shape", (1, 1, 4, 4, 32)),
        ("x is too large", (65536, 2, 2, 32)),
    ],
)
def test_interleave_refuses_what_it_cannot_do(
    message: str, shape: tuple[int, ...], program: Path, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=message):
        run(program, tmp_path, Gpu(4), "InterleavePhases", [np.zeros(shape, np.float16)], 1)


@pytest.mark.parametrize(
    ("message", "shape", "skip", "groups"),
    [
        ("not for this number of channels", (2, 4, 4, 160), (2, 160), 32),  # groups of five
        ("not for this number of channels", (2, 4, 4, 64), (2, 64), 32),
        ("not for this number of channels", (2, 4, 4, 324), (2, 324), 27),
        ("not for this number of channels", (2, 4, 4, 8200), (2, 8200), 1),
        ("1 to 32 groups", (2, 4, 4, 512), (2, 512), 64),
        ("skip has another shape than x", (2, 4, 4, 320), (2, 1, 4, 320), 32),
        ("x is too large", (65536, 1, 1, 8), (65536, 8), 1),
        ("x is too large", (1, 1, 32769, 8), (1, 8), 1),
    ],
)
def test_group_norm_refuses_what_it_cannot_do(
    message: str, shape: tuple[int, int, int, int], skip: tuple[int, ...], groups: int, program: Path, tmp_path: Path
) -> None:
    feeds = group_norm_feeds(GroupNormCase(shape))
    attributes = {"groups": groups, "epsilon": EPSILON, "activation": 0}
    with pytest.raises(AssertionError, match=message):
        run(program, tmp_path, Gpu(4), "GroupNorm", [*feeds.values(), np.zeros(skip, np.float16)], 2, attributes)


HELD = Gpu(132), GroupNormCase((1, 4, 5, 640), skip="row", bias=True, kept=True)
HELD_8 = Gpu(4), GroupNormCase((1, 33, 32, 256), skip="full", bias=True, kept=True)
UNBIASED = Gpu(132), GroupNormCase((2, 3, 3, 2560), skip="full", kept=True)
TWICE = Gpu(2, 80), GroupNormCase((3, 21, 20, 128), skip="full", bias=True, kept=True)
ACROSS = Gpu(4, 80), GroupNormCase((1, 5, 7, 320), silu=False)
OUT_OF_BOUNDS = "AddressSanitizer: (heap|global)-buffer-overflow"
NOT_WRITTEN = "nan location mismatch"
WRONG = "Mismatched elements"
TOO_EARLY = "the result depends on which thread comes first"
NOT_RUNNING = "shared memory is read of a block that does not run"
FAULTS = {
    "a row too many": ("group_norm_held.cu", "slice.rows);", "slice.rows + 1);", HELD, OUT_OF_BOUNDS),
    "rows in flight": ("group_norm_twice.cu", "if (at >= end) break;", "", TWICE, OUT_OF_BOUNDS),
    "a lane too many": ("group_norm.cuh", "/ VECTOR - first + 1;", "/ VECTOR - first + 2;", HELD_8, OUT_OF_BOUNDS),
    "another's channel": ("group_norm.cuh", "if (j < split)", "if (j <= split)", ACROSS, WRONG),
    "another cluster's block": ("group_norm_held.cu", "% cluster);", "% 32);", HELD, "the cluster has no such block"),
    "no wait for sums": (
        "group_norm_held.cu",
        "    __syncthreads();\n    const int width",
        "const int width",
        HELD,
        TOO_EARLY,
    ),
    "no wait for the kernel before": (
        "bias_split_gelu.cu",
        "    wait_for_earlier_kernels();\n",
        "",
        (Gpu(3), (1, 7, 320)),
        "use-after-poison",
    ),
    "no wait for parts": ("group_norm_twice.cu", "= total;\n        __syncthreads();", "= total;", ACROSS, TOO_EARLY),
    "no wait for the cluster's sums": (
        "group_norm_held.cu",
        "    wait_for_cluster();\n    if",
        "    if",
        HELD,
        NOT_RUNNING,
    ),
    "gone before it is read": ("group_norm_held.cu", "    wait_for_arrivals();  //", "    //", HELD, NOT_RUNNING),
    "no arrival": ("group_norm_held.cu", "    arrive_in_cluster();", "", HELD, "waits for arrivals without its own"),
    "an arrival before it is read": (
        "group_norm_held.cu",
        "    wait_for_cluster();\n",
        "    wait_for_cluster();\n    arrive_in_cluster();\n#define arrive_in_cluster()\n",
        HELD,
        "this thread has arrived before",
    ),
    "arrived twice": ("group_norm_held.cu", "    wait_for_arrivals(", "wait_for_cluster(", HELD, "arrives again"),
    "not assigned": ("group_norm_held.cu", "constant = {};", "constant;", UNBIASED, NOT_WRITTEN),
    "scratch too small": (
        "group_norm.c",
        "images, parts, groups, 2}",
        "images, parts - 1, groups, 2}",
        ACROSS,
        OUT_OF_BOUNDS,
    ),
    "part of a row": ("group_norm.c", "while (unit % lanes) unit += 32;", "", (Gpu(1), WHOLE_ROWS), NOT_WRITTEN),
    "more than is held": ("group_norm.c", "_per_block <= 4 *", "_per_block <= 8 *", HELD_8, NOT_WRITTEN),
    "the first image alone": ("group_norm.c", "work->images}, {threads", "1}, {threads", UNBIASED, NOT_WRITTEN),
    "float32 as float16": (
        "group_norm.c",
        "work->kernel->single ? gpu.apply[1] : gpu.apply[0]",
        "gpu.apply[0]",
        (Gpu(4), GroupNormCase((1, 5, 7, 320), single=True)),
        NOT_WRITTEN,
    ),
    "the last columns": (
        "bias_split_gelu.c",
        "ceil_div(lanes, wide)",
        "lanes / wide",
        (Gpu(3), (1, 7, 12288)),
        NOT_WRITTEN,
    ),
    "a block too large": (
        "bias_split_gelu.c",
        "GELU_THREADS / wide;",
        "999 / wide;",
        (Gpu(1), (2, 77, 320)),
        "cannot be launched: CUDA_ERROR_INVALID_VALUE",
    ),
    "a pixel too many": (
        "interleave.cu",
        "at >= columns * lanes",
        "at >= (columns + 1) * lanes",
        (Gpu(4), (1, 2, 3, 64)),
        OUT_OF_BOUNDS,
    ),
    "another phase": ("interleave.cu", "down + 2 * lanes", "down + lanes", (Gpu(4), (1, 3, 3, 32)), WRONG),
    "the last pixels": (
        "interleave.c",
        "ceil_div(columns * lanes, INTERLEAVE_THREADS)",
        "1",
        (Gpu(4), (1, 2, 70, 160)),
        "Mismatched|nan",
    ),
}
"""What -> source, right, wrong, what shows it, how."""


@pytest.mark.parametrize("fault", sampled(FAULTS, lambda fault: FAULTS[fault][0], lambda fault: FAULTS[fault][-1]))
def test_a_planted_fault_is_found(fault: str, faulty: Callable[[str, str, str], Path], tmp_path: Path) -> None:
    source, right, wrong, (gpu, case), message = FAULTS[fault]
    program = faulty(source, right, wrong)
    runs = {"group_norm": group_norm, "bias_split": gelu, "interleave": interleave}
    with pytest.raises(AssertionError, match=message):
        runs[next(name for name in runs if source.startswith(name))](program, tmp_path, gpu, case)
