"""Our CUDA kernels, and the operators around them, compiled for the CPU with sanitizers and run.

cuda.h                   what the kernels use of CUDA C++
kernels.cpp              the kernels
threads.h, .cpp          a launch's blocks and threads
hopper.h, .cpp           what hopper.cuh has on a GPU
operators.cpp            what the operators use of ONNX Runtime and of CUDA's driver; runs one
cublaslt.h, .cpp         what they use of cuBLASLt
memory_driver.c          the driver's calls for virtual memory (tests/machine/test_cuda_memory.py)
"""

from __future__ import annotations

import functools
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from sdflow.runtime.kernels import compilation
from sdflow.runtime.kernels.parts import FOLDER, PARTS

CPU = Path(__file__).parent
PTX = ("overlap.cuh", "float16.cuh", "float8.cuh", "cluster.cuh", "mma.cuh", "int8.cuh", "hopper.cuh", "bfloat16.cuh")
"""What cuda.h has instead."""
ATTENTION = ("few_keys_attention.h", "few_keys_attention.cu")
TRANSFORMERS = ("residual_norm.cu", "gated_activation.cu", "rotary_qkv.cu")
INT8 = ("int8_rows.cu", "int8_product.cu")
"""What the objects `attention`, `transformers` and `int8` are made of alone, so that little is compiled for a change."""
SHARED = ("halves.cuh", "sixteen_bits.cuh", "float8_row.cuh")
"""What each of them has, and `kernels` too."""
EMULATION = ("threads.cpp", "hopper.cpp", "operators.cpp", "cublaslt.cpp")

SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
PATTERN = "-ftrivial-auto-var-init=pattern"
"""Variables begin as NaN in float16 and 1e38 in float32, so that what is not assigned shows."""

SOURCES = tuple(dict.fromkeys(FOLDER / name for part in PARTS.values() for name in part.sources))
DEFINES = [f"-D{name}={value}" for name, value in compilation.DEFINES.items()]
CPP = ["g++", "-std=c++20", "-mf16c", "-Wno-psabi"]
C = ["gcc", "-Ddlopen=emulated_dlopen", "-Ddlsym=emulated_dlsym"]


@functools.cache
def unavailable() -> str | None:
    """Why nothing here can run."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "for Linux on x86-64"
    if not shutil.which("g++") or not shutil.which("gcc"):
        return "there is no g++"
    command = [*CPP, *SANITIZERS, PATTERN, "-x", "c++", "-", "-o", "/dev/null"]
    finished = subprocess.run(command, input="int main() {}", capture_output=True, text=True, check=False)
    return f"g++ cannot do this: {finished.stderr[-300:]}" if finished.returncode else None


def kernel_texts() -> dict[str, str]:
    """File -> text of the kernels' sources, without what is PTX."""
    return {path.name: path.read_text(encoding="utf-8") for path in SOURCES if path.name not in PTX}


def object_of(source: str) -> str:
    """Which of `compile_objects` has a source of kernels in it."""
    alone = {"attention": ATTENTION, "transformers": TRANSFORMERS, "int8": INT8}
    return next((name for name, sources in alone.items() if source in sources), "kernels")


def compile_kernels(folder: Path, made: str, texts: dict[str, str], optimization: str = "-O1") -> Path:
    """The object `made`, of sources with these texts."""
    source = folder / f"{made}.cu"
    parts = [f'#line 1 "{name}"\n{text}' for name, text in texts.items() if name in SHARED or object_of(name) == made]
    source.write_text("\n".join(parts), encoding="utf-8")
    command = [
        *CPP,
        optimization,
        "-fdata-sections",
        f"-DOBJECT_{made}",
        f'-DKERNELS="{source}"',
        str(CPU / "kernels.cpp"),
    ]
    return _compile(command, folder / f"{made}.o")


def compile_operator(source: Path, folder: Path) -> Path:
    """The object, of one of compilation.OPERATORS or a changed one."""
    return _compile([*C, "-O1", str(source)], folder / f"{source.name}.o")


def compile_objects(folder: Path) -> None:
    """`kernels`, `attention`, `transformers` and `int8`, those of the operators, threads.cpp, hopper.cpp, operators.cpp and
    cublaslt.cpp, for `objects_in`."""
    with ThreadPoolExecutor(2) as pool:
        made = [
            pool.submit(compile_kernels, folder, name, kernel_texts(), optimization)
            for name, optimization in (
                ("kernels", "-O1"),
                ("int8", "-O1"),
                ("transformers", "-O0"),
                ("attention", "-O0"),
            )
        ]
        made += [pool.submit(_compile, [*CPP, "-O1", str(CPU / name)], folder / f"{name}.o") for name in EMULATION]
        made += [pool.submit(compile_operator, path, folder) for path in compilation.OPERATORS]
        for each in made:
            each.result()


def objects_in(folder: Path) -> dict[str, Path]:
    """Source -> object."""
    return {path.stem: path for path in folder.glob("*.o")}


def _compile(command: list[str], made: Path) -> Path:
    flags = ["-g1", *SANITIZERS, PATTERN, *DEFINES, f"-I{FOLDER}"]
    subprocess.run([*command, *flags, "-c", "-o", str(made)], check=True)
    return made


def link(objects: Iterable[Path], made: Path) -> Path:
    """The program that operators.cpp describes."""
    script = f"-Wl,-T,{CPU / 'shared_memory.ld'}"
    subprocess.run([*CPP, *SANITIZERS, *map(str, objects), script, "-o", str(made)], check=True)
    return made


@dataclass(frozen=True)
class Gpu:
    """processors: multiprocessors, on which plans depend. capability: below 90 there are no clusters of blocks."""

    processors: int
    capability: int = 90


def run(
    program: Path,
    folder: Path,
    gpu: Gpu,
    operator: str,
    inputs: list[np.ndarray | None],
    outputs: int,
    attributes: dict[str, float] | None = None,
) -> tuple[list[str], list[bytes]]:
    """What was launched, and the outputs. Raises AssertionError with what the program said when it fails in one of the
    directions, or when the directions give different bits.
    """
    types = {np.dtype(np.float32): 1, np.dtype(np.uint8): 2, np.dtype(np.int8): 3, np.dtype(np.float16): 10}
    types[np.dtype(ml_dtypes.bfloat16)] = 16
    tensors = []
    for i, value in enumerate(inputs):
        if value is not None:
            value.tofile(folder / f"input{i}")
        tensors.append("none" if value is None else f"{types[value.dtype]}:{','.join(map(str, value.shape))}")
    given = [f"{name}={value}" for name, value in (attributes or {}).items()]
    results = []
    for direction in ("forwards", "backwards"):
        numbers = map(str, (gpu.capability, gpu.processors, outputs))
        command = [str(program), str(folder), operator, direction, *numbers, *given, "--", *tensors]
        finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        assert finished.returncode == 0, finished.stderr[-3000:]
        results.append((finished.stdout.splitlines(), [(folder / f"output{i}").read_bytes() for i in range(outputs)]))
    same = results[0] == results[1]  # pytest would write out all the bytes that differ
    assert same, "the result depends on which thread comes first"
    return results[0]
