"""Import diffusers without PyTorch's compiler, which takes longer to import than diffusers itself."""

from __future__ import annotations

import sys
from typing import Any

COMPILER = "torch._dynamo"


def import_diffusers_alone() -> None:
    """Import diffusers without torch.compile's modules, if neither was imported yet.

    diffusers only needs them to mark classes for torch.compile, and omits the marks where the import fails. Call this only
    in a process that never compiles diffusers' models, before it starts threads that import.
    """
    if "diffusers" in sys.modules or COMPILER in sys.modules:
        return
    import torch  # noqa: F401  # whole, before its compiler cannot be imported

    modules: dict[str, Any] = sys.modules
    if COMPILER in modules:
        return
    modules[COMPILER] = None  # Python raises ModuleNotFoundError for it
    try:
        import diffusers  # noqa: F401
    except ImportError:  # a release that requires the compiler: who needs diffusers imports it as usual
        for name in [name for name in modules if name.partition(".")[0] == "diffusers"]:
            del modules[name]
    finally:
        del modules[COMPILER]
