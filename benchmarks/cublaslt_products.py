"""The products of a step of SDXL's UNet by cuBLASLt alone: its heuristics' choice, the fastest of its choices, float8.

    python benchmarks/cublaslt_products.py [SECONDS]

Each product runs often in one CUDA graph with other weights each time, so that they come from memory. Row-major float16; NN has
the weights as (K, N), TN as (N, K). "+bias+C" adds bias and residual in the product's epilogue. float8 is E4M3 with float16
results, a scale for each tensor, or for each row and column; "exact" without fast accumulation; quantizing is not counted
(benchmarks/float8_rows.py). At the end the sum of a step's products.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from ctypes import byref, c_float, c_int, c_int8, c_int64, c_size_t, c_uint64, c_void_p, sizeof
from typing import Any

import torch

WORKSPACE = 32 << 20
SECONDS = 60
HALF, FLOAT, COMPUTE_FLOAT = 2, 0, 68  # cudaDataType_t, cublasComputeType_t
EIGHT = 28  # CUDA_R_8F_E4M3
TRANSPOSE_A, TRANSPOSE_B, EPILOGUE, BIAS_POINTER, EPILOGUE_BIAS = 3, 4, 7, 8, 4
A_SCALE_POINTER, B_SCALE_POINTER, FAST_ACCUMULATION, A_SCALE_MODE, B_SCALE_MODE = 17, 18, 25, 31, 32
OF_TENSOR, OF_ROWS_AND_COLUMNS = 0, 3  # cublasLtMatmulMatrixScale_t

SHAPES = (  # rows, N, K, how often in a step at batch 2 and 1024x1024
    (2048, 3840, 1280, 60), (2048, 1280, 1280, 192), (2048, 10240, 1280, 60), (2048, 1280, 5120, 60),
    (8192, 640, 640, 74), (8192, 5120, 640, 10), (8192, 640, 2560, 10), (8192, 1920, 640, 10),
)  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "NN": {},
    "TN": {"transposed": True},
    "NN+bias+C": {"added": True},
    "TN+bias+C": {"added": True, "transposed": True},
    "float8, tensors": {"scales": OF_TENSOR},
    "float8, tensors, exact": {"scales": OF_TENSOR, "fast": False},
    "float8, rows and columns": {"scales": OF_ROWS_AND_COLUMNS},
    "float8, rows and columns, exact": {"scales": OF_ROWS_AND_COLUMNS, "fast": False},
}


class Choice(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algo", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


def ok(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"cublasLt {what}: status {status}")


class Library:
    """cuBLASLt with its workspace."""

    def __init__(self) -> None:
        self.lt = ctypes.CDLL("libcublasLt.so.13")
        self.lt.cublasLtGetVersion.restype = c_size_t
        self.handle = c_void_p()
        ok(self.lt.cublasLtCreate(byref(self.handle)), "handle")
        self.workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda")

    def layout(self, rows: int, columns: int, leading: int, kind: int = HALF) -> c_void_p:
        made = c_void_p()
        status = self.lt.cublasLtMatrixLayoutCreate(
            byref(made), kind, c_uint64(rows), c_uint64(columns), c_int64(leading)
        )
        ok(status, "layout")
        return made


class Product:
    """D (M, N) = A (M, K) W [+ bias + C]. scales: of A and W, which are float8 then, W as (N, K)."""

    def __init__(
        self,
        library: Library,
        shape: tuple[int, int, int],
        bias: torch.Tensor,
        *,
        transposed: bool = False,
        added: bool = False,
        scales: int | None = None,
        fast: bool = True,
    ) -> None:
        rows, n, k = shape
        transposed, kind = transposed or scales is not None, HALF if scales is None else EIGHT
        self.library, lt = library, library.lt
        self.kind = c_void_p()
        ok(lt.cublasLtMatmulDescCreate(byref(self.kind), COMPUTE_FLOAT, FLOAT), "description")
        self._set(TRANSPOSE_A, c_int(int(transposed)))
        self._set(TRANSPOSE_B, c_int(0))
        if added:
            self._set(EPILOGUE, c_int(EPILOGUE_BIAS))
            self._set(BIAS_POINTER, c_void_p(bias.data_ptr()))
        if scales is not None:
            self.scales = torch.rand(n, device="cuda") + 0.5, torch.rand(rows, device="cuda") + 0.5
            for mode, pointer, values in zip(
                (A_SCALE_MODE, B_SCALE_MODE), (A_SCALE_POINTER, B_SCALE_POINTER), self.scales, strict=True
            ):
                self._set(mode, c_int(scales))
                self._set(pointer, c_void_p(values.data_ptr()))
            self._set(FAST_ACCUMULATION, c_int8(int(fast)))
        self.weights = library.layout(k, n, k, kind) if transposed else library.layout(n, k, n)
        self.a, self.d = library.layout(k, rows, k, kind), library.layout(n, rows, n)
        self.alpha, self.beta = c_float(1.0), c_float(float(added))
        preference, most, count = c_void_p(), c_size_t(WORKSPACE), c_int()
        ok(lt.cublasLtMatmulPreferenceCreate(byref(preference)), "preference")
        ok(lt.cublasLtMatmulPreferenceSetAttribute(preference, 1, byref(most), c_size_t(8)), "workspace")
        found = (Choice * 64)()
        layouts = self.weights, self.a, self.d, self.d
        ok(
            lt.cublasLtMatmulAlgoGetHeuristic(library.handle, self.kind, *layouts, preference, 64, found, byref(count)),
            "heuristics",
        )
        self.choices = [found[index] for index in range(count.value) if found[index].state == 0]

    def run(self, index: int, a: torch.Tensor, weights: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> None:
        library = self.library
        a_, w_, c_, d_, workspace = (c_void_p(each.data_ptr()) for each in (a, weights, c, d, library.workspace))
        status = library.lt.cublasLtMatmul(
            library.handle, self.kind, byref(self.alpha), w_, self.weights, a_, self.a, byref(self.beta), c_, self.d, d_, self.d,
            byref(self.choices[index].algo), workspace, c_size_t(WORKSPACE), c_void_p(torch.cuda.current_stream().cuda_stream),
        )  # fmt: skip
        ok(status, "product")

    def _set(self, name: int, value: Any) -> None:
        status = self.library.lt.cublasLtMatmulDescSetAttribute(self.kind, name, byref(value), c_size_t(sizeof(value)))
        ok(status, f"attribute {name}")


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


def measure(library: Library, shape: tuple[int, int, int]) -> dict[str, float]:
    """Microseconds by way; of cuBLASLt's, the fastest of its choices and, as `WAY first`, the first."""
    rows, n, k = shape
    copies = max(8, min(48, (160 << 20) // (n * k * 2)))
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.float16}
    weights = [torch.randn(k, n, **options) / k**0.5 for _ in range(copies)]
    turned = [each.t().contiguous() for each in weights]
    a = [torch.randn(rows, k, **options) for _ in range(2)]
    c, d, bias = torch.randn(rows, n, **options), torch.empty(rows, n, **options), torch.randn(n, **options)
    found = {"torch": microseconds(lambda i: torch.mm(a[i % 2], weights[i], out=d), copies)}
    eight = torch.float8_e4m3fn
    a8, turned8 = [each.to(eight) for each in a], [each.to(eight) for each in turned]
    for way, how in WAYS.items():
        try:
            product = Product(library, shape, bias, **how)
        except RuntimeError as error:
            print(f"    {way}: {error}", flush=True)
            continue
        given, given_a = (turned8, a8) if "scales" in how else (turned if "transposed" in how else weights, a)

        def one(
            choice: int, product: Product = product, given: list[Any] = given, given_a: list[Any] = given_a
        ) -> Callable[[int], object]:
            return lambda i: product.run(choice, given_a[i % 2], given[i], c, d)

        times = [microseconds(one(choice), copies, 2) for choice in range(len(product.choices))]
        if not times:
            print(f"    {way}: cuBLASLt has no such product", flush=True)
            continue
        best = times.index(min(times))
        one(best)(0)
        torch.cuda.synchronize()
        expected = given_a[0].float() @ (given[0].float().t() if "scales" in how else weights[0].float())
        if "scales" in how:
            of_n, of_rows = product.scales
            each = how["scales"] == OF_ROWS_AND_COLUMNS
            expected *= of_n * of_rows[:, None] if each else of_n[0] * of_rows[0]
        expected += bias.float() + c.float() if "added" in how else 0
        error = float((d.float() - expected).norm() / expected.norm())
        found |= {way: times[best], f"{way} first": times[0]}
        print(
            f"    {way}: first {times[0]:.1f}, best {times[best]:.1f} us of {len(times)} "
            f"(workspace {product.choices[0].workspace}); error {error:.1e}",
            flush=True,
        )
    return found


def main() -> None:
    limit, begun = float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS, time.monotonic()
    library = Library()
    print("cuBLASLt", library.lt.cublasLtGetVersion(), torch.cuda.get_device_name(), flush=True)
    total: dict[str, float] = {}
    for *shape, count in SHAPES:
        if time.monotonic() - begun > limit:
            print("time is up: the sums lack what follows")
            break
        print(f"{'x'.join(map(str, shape))}, {count} in a step", flush=True)
        for way, took in measure(library, (shape[0], shape[1], shape[2])).items():
            total[way] = total.get(way, 0.0) + took * count / 1e3
    for way, took in total.items():
        print(f"a step, {way}: {took:.2f} ms")


if __name__ == "__main__":
    main()
