"""The operator library and kernels for this GPU: compiled and tested on first use, then stored.

NVRTC compiles the kernels, each part when a graph first needs it; a C compiler, as Triton also requires for
torch.compile, compiles the operators. Results are stored in $SDFLOW_KERNELS, else in $XDG_CACHE_HOME/sdflow/kernels,
under the digest of their inputs, with their own digest and a record that they passed the tests on this GPU with this
driver and ONNX Runtime. Damaged files are rebuilt.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import os
import shutil
import sys
import tempfile
import threading
import warnings
from collections.abc import Collection, Iterable
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
from sdflow.runtime.kernels.compilation import (
    LIBRARY,
    architecture,
    compile_operators,
    compile_part,
    kernel_options,
    operator_inputs,
)
from sdflow.runtime.kernels.hopper import on_hopper
from sdflow.runtime.kernels.kept import keep, read_kept
from sdflow.runtime.kernels.nvrtc import Nvrtc
from sdflow.runtime.kernels.parts import FLOAT8, PARTS

FOLDER_VARIABLE = "SDFLOW_KERNELS"
OLDEST = (8, 0)
"""First compute capability that packs two floats into halves in one instruction, as float16.cuh does."""

_building, _copying = threading.Lock(), threading.Lock()

_codes: dict[tuple[Path, str], bytes] = {}
"""(library, part) -> code, which the library reads throughout the process."""

_own_copies: dict[Path, Path] = {}
"""Library that cannot be stored in the kernel folder -> this process's copy."""


@dataclass(frozen=True)
class Ready:
    """A compiled and tested library.

    library: for `SessionOptions.register_custom_ops_library`. wrong: unusable part -> reason.
    """

    library: Path
    wrong: dict[str, str]


def kernel_library(parts: Collection[str] = (), device: int = 0) -> Ready | None:
    """Return the library with these parts compiled and tested, or None if it is unavailable. Warns once, and once per
    unusable part. device: number of the GPU, which is the current one.

    The library stays loaded because sessions call into it. Concurrent callers wait for the first one to build it.
    """
    with _building:
        kernels = _process_kernels(device)
        if kernels is None:
            return None
        wrong = kernels.require(parts)
        for name in wrong.keys() - kernels.warned:
            kernels.warned.add(name)
            warnings.warn(
                f"ONNX Runtime's own kernels run in place of {', '.join(PARTS[name].operators)}: {wrong[name]}",
                SlowerWarning,
                stacklevel=3,
            )
        return Ready(kernels.library, wrong)


@functools.cache
def _process_kernels(device: int = 0) -> Kernels | None:
    try:
        return Kernels(device)
    except (SdflowError, OSError) as error:
        warnings.warn(
            f"ONNX Runtime's own kernels run, which are slower than sdflow's: {error}", SlowerWarning, stacklevel=4
        )
        return None


def build(parts: Iterable[str] | None = None, device: int = 0) -> Path:
    """Compile and test these parts of the library unless already done, in which case no C compiler is needed. Default:
    all parts for this GPU except float8. device: number of the GPU, which is the current one.

    Raises TargetUnavailableError if a requirement is missing or kernels are wrong, and UsageError if there is no folder
    to store it.
    """
    with _building:
        usual = [part.name for part in PARTS.values() if part.name != FLOAT8 and (on_hopper() or not part.hopper)]
        wanted = usual if parts is None else [*parts]
        kernels = Kernels(device, max((PARTS[name].since or OLDEST for name in wanted), default=OLDEST))
        for name, why in kernels.require(wanted).items():
            raise TargetUnavailableError(f"{', '.join(PARTS[name].operators)}: {why}")
        return kernels.library


class Kernels:
    """The loaded library and the state of its kernels, for one process and one GPU.

    The library holds kernels of one GPU (custom_ops.c), so each further GPU of a process has a copy with another name,
    which the system loads separately.

    warned: parts that were warned about.
    """

    def __init__(self, device: int = 0, oldest: tuple[int, int] | None = None) -> None:
        """device: number of the GPU. oldest: the first compute capability that suits; default: OLDEST.

        Raises TargetUnavailableError if a requirement is missing, and UsageError if there is no folder to store it."""
        import torch

        if not sys.platform.startswith("linux"):
            raise TargetUnavailableError("sdflow's kernels require Linux")
        if not torch.cuda.is_available():
            raise TargetUnavailableError("torch sees no CUDA device")
        found = torch.cuda.get_device_properties(device)
        oldest = oldest or OLDEST
        if (found.major, found.minor) < oldest:
            raise TargetUnavailableError(
                f"{found.name} has compute capability {found.major}.{found.minor}, "
                f"but sdflow's kernels need {'.'.join(map(str, oldest))}"
            )
        self.warned: set[str] = set()
        self._architecture = architecture(f"{found.major}{found.minor}")
        # A MIG instance has fewer multiprocessors than the whole GPU.
        self._device = [found.name, found.multi_processor_count, driver_version()]
        self._folder, self._nvrtc = kernel_folder(), Nvrtc()
        self._wrong: dict[str, str | None] = {}
        self.library = operator_library(device)
        self._loaded = ctypes.CDLL(str(self.library))

    def require(self, names: Iterable[str]) -> dict[str, str]:
        """Compile and test these parts unless already done. Return unusable parts -> reason."""
        wanted = sorted(names)
        new = [name for name in wanted if name not in self._wrong]
        with ThreadPoolExecutor(max_workers=len(new) or 1) as pool:
            given = dict(zip(new, pool.map(self._give, new), strict=True))
        for name in new:  # store verdicts only; exceptions are retried
            self._wrong[name] = given[name] or self._prove(name)
        return {name: why for name in wanted if (why := self._wrong[name])}

    def _give(self, name: str) -> str | None:
        """Load a part's code into the library. Return the reason if that fails."""
        texts, options = PARTS[name].texts(), kernel_options(self._architecture)
        content = {"sources": texts, "options": options, "nvrtc": self._nvrtc.version, "driver": self._device[-1]}
        key = digest_json(content)
        path = self._folder / key / f"{name}.cubin"
        try:
            code = _kept(path, key, lambda _: compile_part(name, self._nvrtc, self._architecture))
        except SdflowError as error:
            return str(error)
        code = _codes.setdefault((self.library, name), code)
        unknown: int = self._loaded.sdflow_give_code(name.encode(), code)
        return "the library does not have this part" if unknown else None

    def _prove(self, name: str) -> str | None:
        """Test a part unless it passed before. Return the problem, if any."""
        from sdflow.runtime.kernels.proof import prove, sources

        try:
            library = self.library.read_bytes()
        except OSError as error:
            return f"the library can no longer be read: {error}"
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
        with suppress(OSError):  # then each process repeats the test
            keep(path, canonical_json(distances), key)
        return None


def operator_library(device: int = 0) -> Path:
    """Compile the operators, unless an intact library exists. Without their kernels, only those for weights run. device:
    number of the GPU; each has a copy, because a loaded library holds its kernels.

    Raises TargetUnavailableError without a C compiler or on another system than Linux, and UsageError if there is no folder
    to store it.
    """
    if not sys.platform.startswith("linux"):
        raise TargetUnavailableError("sdflow's operators require Linux")
    key = digest_json(operator_inputs())
    first = kernel_folder() / key / LIBRARY
    library = first.with_name(f"libsdflow_kernels-{device}.so") if device else first
    try:
        return _opened(first, library, key)
    except OSError:  # built on another system that shares this folder
        if library in _own_copies:
            raise
        for path in {first, library}:
            path.unlink(missing_ok=True)
        return _opened(first, library, key)


def _opened(first: Path, library: Path, key: str) -> Path:
    """Load a copy of the first GPU's library, both built unless already done, and return its path."""
    built = _kept(first, key, compile_operators)
    with _copying:
        if library not in _own_copies:
            try:
                _kept(library, key, lambda _: built)
            except TargetUnavailableError as error:  # a folder of prebuilt kernels that is read-only
                _own_copies[library] = _own_copy(library.name, built, error)
        loaded = _own_copies.get(library, library)
    ctypes.CDLL(str(loaded))
    return loaded


def _own_copy(name: str, built: bytes, unkept: TargetUnavailableError) -> Path:
    """Write the library to a temporary folder of this process. Raises `unkept` if there is none."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="sdflow-kernels-"))
        atexit.register(_remove, folder, os.getpid())
        (folder / name).write_bytes(built)
    except OSError:
        raise unkept from None
    return folder / name


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked process
        shutil.rmtree(folder, ignore_errors=True)


def _kept(path: Path, key: str, make: Any) -> bytes:
    """Return the content of a file, built unless an intact one exists. make: builds it, given a folder to write
    in."""
    kept = read_kept(path, key)  # without a lock: the folder may be read-only
    if kept is not None:
        return kept
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            if (kept := read_kept(path, key)) is not None:
                return kept
            for left in path.parent.glob(f"{_UNFINISHED}*"):  # left by a killed process
                shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=_UNFINISHED) as folder:
                made: bytes = make(Path(folder))
                keep(path, made, key)
                return made
    except OSError as error:
        raise TargetUnavailableError(f"{path.parent} cannot be written: {error}", remedy=_ELSEWHERE) from error


def kernel_folder() -> Path:
    """Return the folder for libraries and kernels. Raises UsageError if there is none."""
    return user_folder("kernels", FOLDER_VARIABLE)


_ELSEWHERE = f"Set a writable folder: {FOLDER_VARIABLE}=FOLDER."
_UNFINISHED = "unfinished-"
