"""Compile the operator library with a C compiler, and kernels with NVRTC; needs no GPU."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdflow.errors import TargetUnavailableError
from sdflow.runtime.kernels.hopper import HOPPER
from sdflow.runtime.kernels.nvrtc import Nvrtc
from sdflow.runtime.kernels.parts import FOLDER, PARTS

OPERATORS = tuple(
    FOLDER / name
    for name in (
        "custom_ops.c",
        "group_norm.c",
        "bias_split_gelu.c",
        "interleave.c",
        "float8_rows.c",
        "float8_product.c",
        "float8_tiles.c",
        "geglu.c",
        "few_keys_attention.c",
        "rotary_qkv.c",
        "residual_norm.c",
        "gated_activation.c",
        "int8_rows.c",
        "int8_product.c",
        "stream_weights.c",
    )
)

HEADERS = (FOLDER / "ort.h", FOLDER / "few_keys_attention.h")

DEFINES = {
    "THREADS": 1024,
    "SUMS_PER_PROCESSOR": 1,
    "APPLY_PER_PROCESSOR": 1,
    "GELU_THREADS": 640,
    "GELU_PER_PROCESSOR": 2,
    "INTERLEAVE_THREADS": 256,
    "OVERLAPS": 1,
    "FLOAT8_WARPS": 8,
    "FLOAT8_HELD": 5,
    "FLOAT8_STAGES": 6,
    "FLOAT8_MOST_DEPTH": 6144,
    "FLOAT8_LEAST_FILLED": 8,
    "FLOAT8_IN_TURNS": 0,
    "ROTARY_THREADS": 384,
    "ROTARY_PER_PROCESSOR": 3,
    "RESIDUAL_THREADS": 512,
    "RESIDUAL_HELD": 3,
    "ACTIVATION_THREADS": 256,
    "ACTIVATION_PER_PROCESSOR": 5,
    "ACTIVATION_ROW_THREADS": 512,
    "ACTIVATION_HELD": 4,
    "INT8_WARPS": 8,
    "INT8_HELD": 5,
    "INT8_WIDE_STAGES": 4,
    "INT8_NARROW_STAGES": 3,
}
"""Threads per block (maximum) and blocks per multiprocessor of each kernel, as measured on an H200.
FLOAT8_STAGES: tiles along K that a block of float8_product.cu keeps in shared memory. FLOAT8_MOST_DEPTH: limit of K
times the tiles of y per multiprocessor, above which cuBLASLt multiplies; FLOAT8_LEAST_FILLED: tenths of the
multiprocessors, below which it does. FLOAT8_IN_TURNS: 1: its warpgroups also alternate without gates. OVERLAPS: 0: a
kernel starts only after the previous one has finished (overlap.cuh)."""

LIBRARY = "libsdflow_kernels.so"

SLOWEST = 300
"""Timeout of the C compiler in seconds; it takes about one."""


def operator_inputs() -> dict[str, Any]:
    """Return what the compiled operators depend on, as JSON."""
    texts = [path.read_text(encoding="utf-8") for path in (*OPERATORS, *HEADERS)]
    return {"sources": texts, "defines": DEFINES, "machine": platform.machine()}


def compile_operators(folder: Path, compiler: str | None = None, flags: Sequence[str] = ()) -> bytes:
    """Compile the library in the caller's folder and return its content. compiler: C compiler, default: the system's.

    Raises TargetUnavailableError with the compiler's messages, or if there is no compiler.
    """
    compiler = compiler or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise TargetUnavailableError("there is no C compiler", remedy="Install gcc or clang.")
    made = folder / LIBRARY
    shared = ["-O2", "-shared", "-fPIC", "-fvisibility=hidden", *_defines(), *flags]
    command = [compiler, *shared, "-o", str(made), *map(str, OPERATORS), "-ldl", "-lpthread"]
    try:
        finished = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, timeout=SLOWEST
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TargetUnavailableError(f"{compiler} cannot compile the operators: {error}") from error
    if finished.returncode:
        raise TargetUnavailableError(f"{compiler} cannot compile the operators: {finished.stderr.strip()[-400:]}")
    return made.read_bytes()


def compile_part(name: str, nvrtc: Nvrtc, of: str) -> bytes:
    """Compile a part to machine code; needs no GPU. Raises TargetUnavailableError with the compiler's messages."""
    source = "\n".join(f'#line 1 "{file}"\n{text}' for file, text in PARTS[name].texts())
    return nvrtc.compile(source, kernel_options(of))


def kernel_options(of: str) -> list[str]:
    """Return NVRTC's options for an architecture."""
    return [f"--gpu-architecture={of}", "--std=c++17", *_defines()]


def architecture(capability: str) -> str:
    """Return NVRTC's name of a compute capability, such as sm_90a for "90"."""
    return f"sm_{capability}a" if capability == HOPPER else f"sm_{capability}"


def _defines() -> list[str]:
    return [f"-D{name}={value}" for name, value in DEFINES.items()]
