"""NVRTC, NVIDIA's run-time compiler for CUDA C++, from torch or ONNX Runtime's CUDA packages."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from sdflow.errors import TargetUnavailableError


class Nvrtc:
    """NVRTC: https://docs.nvidia.com/cuda/nvrtc/

    Raises TargetUnavailableError if it is not installed.
    """

    def __init__(self) -> None:
        self._library = _load_nvrtc()
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version = f"{major.value}.{minor.value}"

    def compile(self, source: str, options: list[str]) -> bytes:
        """Compile to machine code (cubin) for the architecture in `options`.

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
    """Load NVRTC from NVIDIA's Python packages or the system. Prefers the newest, which supports the newest GPUs; skips
    versions without cubin support."""
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
