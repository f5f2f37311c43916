"""Our operators' library for the GPU at hand, and the kernels that it runs: compiled and proved when first wanted, and kept.

NVRTC compiles the kernels, each part of them when a graph has an operator of it; a C compiler, as Triton wants one for
torch.compile, the operators. What was compiled lies in $SDFLOW_KERNELS, else in $XDG_CACHE_HOME/sdflow/kernels, under the
digest of all that it depends on, with its own; beside it that its results were right on this GPU, with this driver and this
ONNX Runtime. What is damaged is made again.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from sdflow.digest import canonical_json, digest_json
from sdflow.disk.user_folder import user_folder
from sdflow.errors import SdflowError, SlowerWarning, TargetUnavailableError
from sdflow.machine.device import driver_version
from sdflow.machine.onnx_runtime import import_onnxruntime
from sdflow.runtime.kernels.hopper import HOPPER, on_hopper
from sdflow.runtime.kernels.kept import keep, read_kept
from sdflow.runtime.kernels.nvrtc import Nvrtc
from sdflow.runtime.kernels.parts import FLOAT8, FOLDER, PARTS

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
}
"""Threads of a block, at most; and blocks of a kernel for each of the GPU's multiprocessors: measured on an H200.
FLOAT8_STAGES: tiles along K that a block of float8_product.cu has in shared memory. FLOAT8_MOST_DEPTH: K times the tiles of y for
each multiprocessor, beyond which cuBLASLt multiplies; FLOAT8_LEAST_FILLED: tenths of the multiprocessors, below which it does.
FLOAT8_IN_TURNS: 1: its warpgroups take turns without gates, too. OVERLAPS: 0: a kernel is launched only when the one before it
has ended (overlap.cuh)."""
FOLDER_VARIABLE = "SDFLOW_KERNELS"
OLDEST = (8, 0)
"""The first compute capability that packs two floats into halves in one instruction, as float16.cuh does."""
SLOWEST = 300
"""Seconds that the C compiler may take; it takes one."""

_asked = threading.Lock()
_codes: dict[tuple[Path, str], bytes] = {}
"""Library, part -> its code, which the library reads as long as the process lives."""


@dataclass(frozen=True)
class Ready:
    """library: for `SessionOptions.register_custom_ops_library`. wrong: parts that cannot be used -> why."""

    library: Path
    wrong: dict[str, str]


def kernel_library(parts: Collection[str] = ()) -> Ready | None:
    """The library with these parts compiled and proved; None where there can be none. A warning says why, once, as it does for
    each part that is wrong.

    The process keeps it loaded: sessions call into it as long as they live. They are made side by side, and the first
    one to ask makes it.
    """
    with _asked:
        kernels = _process_kernels()
        if kernels is None:
            return None
        wrong = kernels.require(parts)
        for name in wrong.keys() - kernels.told:
            kernels.told.add(name)
            warnings.warn(
                f"ONNX Runtime's own kernels run in place of {', '.join(PARTS[name].operators)}: {wrong[name]}",
                SlowerWarning,
                stacklevel=3,
            )
        return Ready(kernels.library, wrong)


@functools.cache
def _process_kernels() -> Kernels | None:
    try:
        return Kernels()
    except (SdflowError, OSError) as error:
        warnings.warn(
            f"ONNX Runtime's own kernels run, which are slower than sdflow's: {error}", SlowerWarning, stacklevel=4
        )
        return None


def build(parts: Iterable[str] | None = None) -> Path:
    """Compile and prove these parts of the library, all that the GPU at hand can have by default but for float8, unless that
    was done before: then no C compiler is needed.

    Raises TargetUnavailableError where something is missing that it takes, or where kernels are wrong, UsageError when
    there is no place for it.
    """
    with _asked:
        kernels = Kernels()
        usual = (part.name for part in PARTS.values() if part.name != FLOAT8 and (on_hopper() or not part.hopper))
        for name, why in kernels.require(usual if parts is None else parts).items():
            raise TargetUnavailableError(f"{', '.join(PARTS[name].operators)}: {why}")
        return kernels.library


class Kernels:
    """The library, loaded, and what of its kernels is there; for one process and one GPU.

    told: parts that a warning was given for.
    """

    def __init__(self) -> None:
        """Raises TargetUnavailableError where something is missing that it takes, UsageError when there is no place for it."""
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
        self.told: set[str] = set()
        self._architecture = architecture(f"{device.major}{device.minor}")
        # A part of a GPU (MIG) may launch less than the whole.
        self._device = [device.name, device.multi_processor_count, driver_version()]
        self._folder, self._nvrtc = kernel_folder(), Nvrtc()
        self._wrong: dict[str, str | None] = {}
        texts = [path.read_text(encoding="utf-8") for path in (*OPERATORS, *HEADERS)]
        key = digest_json({"sources": texts, "defines": DEFINES, "machine": platform.machine()})
        self.library = self._folder / key / "libsdflow_kernels.so"
        self._kept(self.library, key, compile_operators)
        try:
            self._loaded = ctypes.CDLL(str(self.library))
        except OSError:  # made on another system with this folder
            self.library.unlink(missing_ok=True)
            self._kept(self.library, key, compile_operators)
            self._loaded = ctypes.CDLL(str(self.library))

    def require(self, names: Iterable[str]) -> dict[str, str]:
        """Compile and prove these parts unless that was done. Returns those that cannot be used, and why."""
        wanted = sorted(names)
        new = [name for name in wanted if name not in self._wrong]
        with ThreadPoolExecutor(max_workers=len(new) or 1) as pool:
            given = dict(zip(new, pool.map(self._give, new), strict=True))
        for name in new:  # a verdict is kept once it is there: what raises is tried again
            self._wrong[name] = given[name] or self._prove(name)
        return {name: why for name in wanted if (why := self._wrong[name])}

    def _give(self, name: str) -> str | None:
        """Let the library have a part's code. Returns why it cannot."""
        texts, options = PARTS[name].texts(), kernel_options(self._architecture)
        content = {"sources": texts, "options": options, "nvrtc": self._nvrtc.version, "driver": self._device[-1]}
        key = digest_json(content)
        path = self._folder / key / f"{name}.cubin"
        try:
            code = self._kept(path, key, lambda _: compile_part(name, self._nvrtc, self._architecture))
        except SdflowError as error:
            return str(error)
        code = _codes.setdefault((self.library, name), code)
        unknown: int = self._loaded.sdflow_give_code(name.encode(), code)
        return "the library has no such part" if unknown else None

    def _prove(self, name: str) -> str | None:
        """Returns what is wrong with a part, unless it was proved before."""
        from sdflow.runtime.kernels.proof import prove, sources

        try:
            library = self.library.read_bytes()
        except OSError as error:
            return f"the library cannot be read any more: {error}"
        content = {
            "library": hashlib.sha256(library).hexdigest(),
            "code": hashlib.sha256(_codes[self.library, name]).hexdigest(),
            "device": self._device,
            "onnxruntime": import_onnxruntime().__version__,
            "cases": sources(),
        }
        key = digest_json(content)
        path = self._folder / key / f"{name}.proved"
        if read_kept(path, key) is not None:
            return None
        try:
            distances = prove(self.library, name)
        except TargetUnavailableError as error:
            return str(error)
        with suppress(OSError):  # then each process proves it
            keep(path, canonical_json(distances), key)
        return None

    def _kept(self, path: Path, key: str, make: Any) -> bytes:
        """The content of a file, made unless it is there as it was made. make: from a folder for what it writes."""
        kept = read_kept(path, key)  # without a lock: maybe in a folder that others write
        if kept is not None:
            return kept
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(path.with_suffix(".lock")):
                if (kept := read_kept(path, key)) is not None:
                    return kept
                for left in path.parent.glob(f"{_UNFINISHED}*"):  # by a process that was killed
                    shutil.rmtree(left, ignore_errors=True)
                with tempfile.TemporaryDirectory(dir=path.parent, prefix=_UNFINISHED) as folder:
                    made: bytes = make(Path(folder))
                    keep(path, made, key)
                    return made
        except OSError as error:
            raise TargetUnavailableError(f"{path.parent} cannot be written: {error}", remedy=_ELSEWHERE) from error


def kernel_folder() -> Path:
    """Where libraries and kernels are kept. Raises UsageError when there is no such place."""
    return user_folder("kernels", FOLDER_VARIABLE)


_ELSEWHERE = f"Name a folder that can be written: {FOLDER_VARIABLE}=FOLDER."
_UNFINISHED = "unfinished-"


def compile_operators(folder: Path, compiler: str | None = None, flags: Sequence[str] = ()) -> bytes:
    """The library, made in a folder of the caller's. compiler: of C, by default the one of the system; flags: for it.

    Raises TargetUnavailableError with what it said, or where there is none.
    """
    compiler = compiler or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise TargetUnavailableError("there is no C compiler", remedy="Install gcc or clang.")
    made = folder / "libsdflow_kernels.so"
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
    """A part's machine code for an architecture. Needs no GPU. Raises TargetUnavailableError with what the compiler said."""
    source = "\n".join(f'#line 1 "{file}"\n{text}' for file, text in PARTS[name].texts())
    return nvrtc.compile(source, kernel_options(of))


def kernel_options(of: str) -> list[str]:
    """NVRTC's for an architecture."""
    return [f"--gpu-architecture={of}", "--std=c++17", *_defines()]


def architecture(capability: str) -> str:
    """As NVRTC names what it compiles for: sm_90a for "90"."""
    return f"sm_{capability}a" if capability == HOPPER else f"sm_{capability}"


def _defines() -> list[str]:
    return [f"-D{name}={value}" for name, value in DEFINES.items()]
