"""Measure quantization: the kernels that produce float8 rows for products, at the sizes of a step of SDXL's UNet.

    python benchmarks/gpu/float8_rows.py [NAME=VALUE,... ...]

Each runs many times in a CUDA graph, with different values each time. Prints microseconds of one, and milliseconds per
step. NAME=VALUE: other block sizes than in `compilation.DEFINES`, each set in turn. The baselines are sdflow's kernel that
computes a GELU with its gate, which they replace, and torch's copy of the same number of halves, the minimum for a
kernel between two products.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from ctypes import byref, c_float, c_int, c_void_p
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from sdflow.runtime.kernels.compilation import DEFINES
from sdflow.runtime.kernels.nvrtc import Nvrtc
from sdflow.runtime.kernels.parts import FOLDER, PARTS

COPIES = 40
ROWS = ((2048, 1280, 120), (8192, 640, 30), (2048, 5120, 60), (8192, 2560, 10))
"""Rows, channels, how often in a step: what comes of attention, and what does of a GELU with its gate."""
GATED = (5120, 2560)
NORMS = ((2048, 1280, 180), (8192, 640, 30))


def microseconds(run: Callable[[int], object], copies: int, rounds: int = 3) -> float:
    """Of one of `copies` runs in a CUDA graph, the fastest round."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run(0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            for index in range(copies):
                run(index)
        graph.replay()
        best = float("inf")
        for _ in range(rounds):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            best = min(best, begin.elapsed_time(end))
    return best / copies * 1e3


class Kernels:
    """The kernels, compiled with these sizes."""

    def __init__(self, defines: dict[str, int]) -> None:
        self.defines = defines
        names = dict.fromkeys((*PARTS["float8"].sources, *PARTS["bias_split_gelu"].sources))
        source = "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in names)
        major, minor = torch.cuda.get_device_capability()
        options = [f"-D{name}={value}" for name, value in defines.items()]
        cubin = Nvrtc().compile(source, [f"--gpu-architecture=sm_{major}{minor}", "--std=c++17", *options])
        self.driver, self.module = ctypes.CDLL("libcuda.so.1"), c_void_p()
        torch.cuda.synchronize()
        self.ok(self.driver.cuModuleLoadData(byref(self.module), cubin))

    def ok(self, status: int) -> None:
        if status:
            raise SystemExit(f"the driver: {status}")

    def launch(self, name: str, grid: tuple[int, int], block: tuple[int, int], *values: Any) -> None:
        function = c_void_p()
        self.ok(self.driver.cuModuleGetFunction(byref(function), self.module, name.encode()))
        held = [c_void_p(each.data_ptr()) if isinstance(each, torch.Tensor) else each for each in values]
        arguments = (c_void_p * len(held))(*[ctypes.addressof(each) for each in held])
        stream = c_void_p(torch.cuda.current_stream().cuda_stream)
        self.ok(
            self.driver.cuLaunchKernel(
                function, *map(c_int, (*grid, 1, *block, 1)), c_int(0), stream, arguments, c_void_p()
            )
        )

    def rows(self, name: str, rows: int, channels: int, *values: Any) -> None:
        """A kernel of float8_rows.cu; values end before `all`, or are split by it."""
        warps, most, held = 1, self.defines["FLOAT8_WARPS"], self.defines["FLOAT8_HELD"]
        while warps * held * 32 < channels // 8:
            warps *= 2
        if warps > most:
            raise SystemExit(f"{channels} channels are too many for {self.defines}")
        of = (c_int * 6)(rows, channels // 8, warps, rows, rows, 0)
        given = [of if each is ... else each for each in values]
        self.launch(name, (-(-rows // (most // warps)), 1), (32, most), *given)


def take_rows(kernels: Kernels, rows: int, channels: int, count: int) -> float:
    """Milliseconds of a step for what comes of attention, or of a GELU with its gate if that is as wide as this."""
    half: dict[str, Any] = {"device": "cuda", "dtype": torch.float16}
    x = [torch.randn(rows, channels, **half) for _ in range(COPIES)]
    wide = [torch.randn(rows, 2 * channels, **half) for _ in range(COPIES)]
    bias, copy = torch.randn(2 * channels, **half), torch.empty(rows, channels, **half)
    y, scales = torch.empty(rows, channels, dtype=torch.uint8, device="cuda"), torch.empty(rows, device="cuda")

    def plain(i: int) -> None:
        kernels.rows("float8_rows", rows, channels, x[i], y, scales, ...)

    def gated(i: int) -> None:
        kernels.rows("float8_split_gelu", rows, channels, wide[i], bias, y, scales, ...)

    def copied(i: int) -> None:
        copy.copy_(x[i])

    took = {each.__name__: microseconds(each, COPIES) for each in (plain, gated, copied)}
    plain(0)
    exact = x[0].float()
    off = (y.view(torch.float8_e4m3fn).float() * scales[:, None] - exact).norm() / exact.norm()
    words = ", ".join(f"{name} {each:.2f}" for name, each in took.items())
    print(f"  {rows}x{channels}: {words} us; {count} in a step; rounded by {float(off):.4f}", flush=True)
    return took["gated" if channels in GATED else "plain"] * count / 1e3


def take_norm(kernels: Kernels, rows: int, channels: int, count: int) -> float:
    """Milliseconds of a step for layer normalizations with skip and bias."""
    half: dict[str, Any] = {"device": "cuda", "dtype": torch.float16}
    x, row = (
        [torch.randn(rows, channels, **half) for _ in range(COPIES)],
        [torch.randn(channels, **half) for _ in range(3)],
    )
    y, scales = torch.empty(rows, channels, dtype=torch.uint8, device="cuda"), torch.empty(rows, device="cuda")
    sums = torch.empty(rows, channels, **half)

    def norm(i: int) -> None:
        given = (x[i], x[i - 1], *row, y, scales, sums, ..., c_float(1e-5))
        kernels.rows("float8_layer_norm", rows, channels, *given)

    took = microseconds(norm, COPIES)
    print(f"  {rows}x{channels}: layer normalization {took:.2f} us; {count} in a step", flush=True)
    return took * count / 1e3


def main() -> None:
    print(torch.cuda.get_device_name(), flush=True)
    for text in sys.argv[1:] or [""]:
        given = (each.split("=") for each in text.split(",") if each)
        kernels = Kernels(dict(DEFINES) | {name: int(value) for name, value in given})
        print(text or "as they are", flush=True)
        total = sum(take_rows(kernels, *each) for each in ROWS) + sum(take_norm(kernels, *each) for each in NORMS)
        print(f"  a step: {total:.2f} ms", flush=True)


if __name__ == "__main__":
    main()
