"""Import diffusers without what takes longer to import than diffusers itself: PyTorch's compiler, and the names of all
installed files."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
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
        with _distributions_on_demand():
            import diffusers  # noqa: F401
    except ImportError:  # a release that requires the compiler: who needs diffusers imports it as usual
        for name in [name for name in modules if name.partition(".")[0] == "diffusers"]:
            del modules[name]
    finally:
        del modules[COMPILER]


class _Distributions(Mapping[str, list[str]]):
    """What `importlib.metadata.packages_distributions` returns, found when first read."""

    @cached_property
    def _found(self) -> Mapping[str, list[str]]:
        return importlib.metadata.packages_distributions()

    def __getitem__(self, name: str) -> list[str]:
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


@contextmanager
def _distributions_on_demand() -> Iterator[None]:
    """Meanwhile `packages_distributions` reads nothing. diffusers calls it for the distributions of three packages that are
    rarely installed."""
    metadata: Any = importlib.metadata
    original = metadata.packages_distributions
    metadata.packages_distributions = _Distributions
    try:
        yield
    finally:
        metadata.packages_distributions = original
