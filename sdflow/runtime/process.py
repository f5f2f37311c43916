"""How a Python process of sdflow's own is started: which environment it sees, and that it dies with its parent."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import sdflow

# fmt: off
_KEPT = frozenset((
    "PATH", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "LANGUAGE", "TZ", "TMPDIR",
    "TEMP", "TMP", "SYSTEMROOT", "WINDIR", "SYSTEMDRIVE", "COMSPEC", "PATHEXT", "NUMBER_OF_PROCESSORS",
    "PROCESSOR_ARCHITECTURE", "PROCESSOR_IDENTIFIER",
))
# fmt: on
_KEPT_PREFIXES = ("LC_", "CUDA_", "NVIDIA_", "NCCL_", "HIP_", "ROCR_", "HSA_", "MIGRAPHX_", "ORT_", "OMP_", "MKL_")

_QUIET = {
    "CI": "1",  # the one switch that stops all of olive's telemetry
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "OLIVE_DISABLE_TELEMETRY": "1",
    "ORT_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_OFFLINE": "1",
}


def clean_environment(home: Path, source: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Of `source` only what finding programs, libraries and devices needs; no network; `home` to write to."""

    def is_kept(name: str) -> bool:
        return name.upper() in _KEPT or name.upper().startswith(_KEPT_PREFIXES)

    kept = {name: value for name, value in source.items() if is_kept(name)}
    here = str(Path(sdflow.__file__).parents[1])
    if "site-packages" not in Path(here).parts:  # a checkout: the new process must find it too
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, [here, kept.get("PYTHONPATH")]))
    folders = dict.fromkeys(("HOME", "USERPROFILE", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HF_HOME"), str(home))
    return kept | _QUIET | folders


def python_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of sdflow; nothing is imported from the current directory (-P)."""
    return [sys.executable, "-P", "-m", module, *arguments]


def end_with_parent(descriptor: int) -> None:
    """End this process at once when the other end of a pipe is closed, as it is when the parent dies."""

    def wait() -> None:
        while os.read(descriptor, 4096):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="end-with-parent").start()
