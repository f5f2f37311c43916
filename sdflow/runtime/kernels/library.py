"""The kernels' library for the GPU at hand: compiled when first wanted, proved, and kept per user.

NVRTC, which comes with torch and with ONNX Runtime's CUDA packages, compiles the kernels; a C compiler, as Triton wants
one for torch.compile, the operator around them. It depends on the sources, the GPU's model and compute capability and
ONNX Runtime's version, and lies in $SDFLOW_KERNELS, else in $XDG_CACHE_HOME/sdflow/kernels.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

from sdflow.digest import digest_json
from sdflow.disk.atomic_write import write_whole
from sdflow.disk.user_folder import user_folder
from sdflow.errors import SdflowError, SlowerWarning, TargetUnavailableError
from sdflow.machine.onnx_runtime import import_onnxruntime

_FOLDER = Path(__file__).parent
KERNELS = tuple(
    _FOLDER / name
    for name in (
        "overlap.cuh",
        "float16.cuh",
        "halves.cuh",
        "group_norm.cuh",
        "group_norm_twice.cu",
        "cluster.cuh",
        "group_norm_held.cu",
        "bias_split_gelu.cu",
        "interleave.cu",
        "float8.cuh",
        "float8_rows.cu",
        "mma.cuh",
        "few_keys_attention.h",
        "few_keys_attention.cu",
        "hopper.cuh",
        "geglu.cu",
        "float8_product.cu",
        "bfloat16.cuh",
        "sixteen_bits.cuh",
        "rotary_qkv.cu",
        "residual_norm.cu",
        "gated_activation.cu",
    )
)
OPERATORS = tuple(
    _FOLDER / name
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
    )
)
HEADER = _FOLDER / "ort.h"
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
    "ROTARY_THREADS": 384,
    "ROTARY_PER_PROCESSOR": 3,
    "RESIDUAL_THREADS": 512,
    "RESIDUAL_HELD": 3,
    "ACTIVATION_THREADS": 256,
    "ACTIVATION_PER_PROCESSOR": 5,
}
"""Threads of a block, at most; and blocks of a kernel for each of the GPU's multiprocessors: measured on an H200.
FLOAT8_STAGES: tiles along K that a block of float8_product.cu has in shared memory. OVERLAPS: 0: a kernel is launched only
when the one before it has ended (overlap.cuh)."""
FOLDER_VARIABLE = "SDFLOW_KERNELS"
OLDEST = (8, 0)
"""The first compute capability that packs two floats into halves in one instruction, as float16.cuh does."""
HOPPER = "90"
"""Compiled with what this capability alone has (sm_90a): geglu.cu and float8_product.cu are there only."""
SLOWEST = 300
"""Seconds that the C compiler may take; it takes one."""

_asked = threading.Lock()


def kernel_library() -> Path | None:
    """The library, ready for `SessionOptions.register_custom_ops_library`; None, with a warning, where there can be none.

    The process keeps it loaded: sessions call into it as long as they live. They are made side by side, and the first
    one to ask makes it.
    """
    with _asked:
        return _kernel_library()


@functools.cache
def _kernel_library() -> Path | None:
    try:
        library = build()
        try:
            ctypes.CDLL(str(library))
        except OSError:  # damaged
            library.unlink()
            library = build()
            ctypes.CDLL(str(library))
    except (SdflowError, OSError) as error:
        warnings.warn(
            f"ONNX Runtime's own kernels run, which are slower than sdflow's: {error}", SlowerWarning, stacklevel=3
        )
        return None
    return library


def build() -> Path:
    """Compile and prove the library, which takes some seconds, unless that was done before: then no compiler is needed.

    Raises TargetUnavailableError where something is missing that it takes, or where the kernels are wrong, UsageError when
    there is no place for it.
    """
    import torch

    if not sys.platform.startswith("linux"):
        raise TargetUnavailableError("our kernels are for Linux")
    if not torch.cuda.is_available():
        raise TargetUnavailableError("torch sees no CUDA device")
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    if (device.major, device.minor) < OLDEST:
        raise TargetUnavailableError(
            f"{device.name} has compute capability {device.major}.{device.minor}, "
            f"and they need {'.'.join(map(str, OLDEST))}"
        )
    capability = f"{device.major}{device.minor}"
    content = {
        "sources": [path.read_text(encoding="utf-8") for path in (*KERNELS, *OPERATORS, HEADER)],
        "defines": DEFINES,
        "architecture": _architecture(capability),
        "device": [device.name, device.multi_processor_count],  # a part of a GPU (MIG) may launch less than the whole
        "onnxruntime": import_onnxruntime().__version__,
    }
    library = kernel_folder() / digest_json(content) / "libsdflow_kernels.so"
    if library.exists():  # whole, and maybe in a folder that others write
        return library
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise TargetUnavailableError("there is no C compiler", remedy="Install gcc or clang.")
    nvrtc = Nvrtc()
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(library.with_suffix(".lock")):
            if not library.exists():
                _make(library, nvrtc, compiler, capability)
    except OSError as error:
        raise TargetUnavailableError(f"{library.parent} cannot be written: {error}", remedy=_ELSEWHERE) from error
    return library


def on_hopper() -> bool:
    """Whether the GPU at hand is of the compute capability that the kernels of HOPPER are for."""
    import torch

    if not torch.cuda.is_available():
        return False
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{device.major}{device.minor}" == HOPPER


def kernel_folder() -> Path:
    """Where libraries are kept. Raises UsageError when there is no such place."""
    return user_folder("kernels", FOLDER_VARIABLE)


_ELSEWHERE = f"Name a folder that can be written: {FOLDER_VARIABLE}=FOLDER."


def _make(library: Path, nvrtc: Nvrtc, compiler: str, capability: str) -> None:
    from sdflow.runtime.kernels.proof import prove

    for left in library.parent.glob(f"{_UNFINISHED}*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=_UNFINISHED) as folder:
        made = compile_library(Path(folder), nvrtc, compiler, capability)
        prove(made, hopper=capability == HOPPER)
        write_whole(library, made.read_bytes(), staging=Path(folder), durable=True)


_UNFINISHED = "unfinished-"


def compile_library(folder: Path, nvrtc: Nvrtc, compiler: str, capability: str, flags: Sequence[str] = ()) -> Path:
    """The library for a compute capability ("90"), in a folder of the caller's. Needs no GPU. flags: for the C
    compiler. Raises TargetUnavailableError with what the compilers said.
    """
    defines = [f"-D{name}={value}" for name, value in DEFINES.items()]
    cubin, made = folder / "kernels.cubin", folder / "libsdflow_kernels.so"
    source = "\n".join(f'#line 1 "{path.name}"\n{path.read_text(encoding="utf-8")}' for path in KERNELS)
    cubin.write_bytes(
        nvrtc.compile(source, [f"--gpu-architecture={_architecture(capability)}", "--std=c++17", *defines])
    )
    shared = ["-O2", "-shared", "-fPIC", "-fvisibility=hidden", f'-DCUBIN="{cubin}"']
    command = [compiler, *shared, *defines, *flags, "-o", str(made), *map(str, OPERATORS), "-ldl", "-lpthread"]
    try:
        finished = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, timeout=SLOWEST
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TargetUnavailableError(f"{compiler} cannot compile the operators: {error}") from error
    if finished.returncode:
        raise TargetUnavailableError(f"{compiler} cannot compile the operators: {finished.stderr.strip()[-400:]}")
    return made


def _architecture(capability: str) -> str:
    """As NVRTC names what it compiles for."""
    return f"sm_{capability}a" if capability == HOPPER else f"sm_{capability}"


class Nvrtc:
    """NVIDIA's compiler of CUDA C++ at run time: https://docs.nvidia.com/cuda/nvrtc/

    Raises TargetUnavailableError when it is not installed.
    """

    def __init__(self) -> None:
        self._library = _load_nvrtc()
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version = f"{major.value}.{minor.value}"

    def compile(self, source: str, options: list[str]) -> bytes:
        """Machine code (cubin) for the architecture that the options name.

        Raises TargetUnavailableError with the compiler's messages.
        """
        program, none = ctypes.c_void_p(), ctypes.c_char_p()
        created = self._library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, none, none)
        self._check(created)
        try:
            given = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
            if self._library.nvrtcCompileProgram(program, len(options), given):
                log = self._read(program, "ProgramLog").decode(errors="replace").strip("\0 \n")
                raise TargetUnavailableError(f"NVRTC {self.version} cannot compile: {log[-400:]}")
            return self._read(program, "CUBIN")
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        content = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, content))
        return content.raw

    def _check(self, result: int) -> None:
        if result:
            self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise TargetUnavailableError(f"NVRTC: {self._library.nvrtcGetErrorString(result).decode()}")


def _load_nvrtc() -> Any:
    """From NVIDIA's Python packages, or the system's. The newest first: it knows the newest GPUs. One that makes no cubin
    is passed over."""
    try:
        import nvidia

        roots = [Path(root) for root in nvidia.__path__]
    except ImportError:
        roots = []
    pattern = "*/lib/libnvrtc.so.*[0-9]"
    packaged = sorted((path for root in roots for path in root.glob(pattern)), key=lambda path: path.name, reverse=True)
    names = [*map(str, packaged), *(f"libnvrtc.so.{major}" for major in (13, 12))]
    for name in names:
        try:
            found = ctypes.CDLL(name)
        except OSError:
            continue
        if hasattr(found, "nvrtcGetCUBIN"):
            return found
    raise TargetUnavailableError("NVRTC is not installed", remedy="pip install nvidia-cuda-nvrtc")
