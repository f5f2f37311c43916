"""Import diffusers without what takes longer to import than diffusers itself: PyTorch's compiler, and the names of all
installed files; and modules of transformers without its list of all modules."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
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


def import_module_alone(library: str, module: str) -> None:
    """Import a module of a library without the code of the packages around it, unless the library was imported.

    transformers reads its 1,600 source files to know its modules, twice. Afterwards this module is there, and the library
    is still to be imported by whoever needs more of it; it then has the same module and classes. Call this like
    `import_diffusers_alone`. A library that does not allow it is left to be imported as usual.
    """
    name = f"{library}.{module}"
    spec = None if library in sys.modules or name in sys.modules else find_spec(library)
    if spec is None or spec.submodule_search_locations is None:
        return
    before, packages = set(sys.modules), name.split(".")[:-2]  # not the module's own package, which is small
    stand_ins = [ModuleType(".".join(packages[: depth + 1])) for depth in range(len(packages))]
    for depth, package in enumerate(stand_ins):
        package.__path__ = [str(Path(folder, *packages[1 : depth + 1])) for folder in spec.submodule_search_locations]
        vars(package)["__getattr__"] = partial(_defined_within, package.__name__)
        sys.modules[package.__name__] = package
    try:
        vars(stand_ins[0])["__version__"] = importlib.metadata.version(library)
        import_module(name)
    except Exception:  # noqa: BLE001  (importing it as usual succeeds, or tells why it fails)
        for each in [each for each in sys.modules.keys() - before if each.partition(".")[0] == library]:
            del sys.modules[each]
    finally:
        for package in stand_ins:
            sys.modules.pop(package.__name__, None)


def _defined_within(package: str, name: str) -> Any:
    """Return what a module imports from the package around it, as those of transformers 5.17 do: what all modules of the
    package that were imported before call by this name. Raises AttributeError if there is none or several things, or if it
    is a module's name, which Python then imports."""
    # None stands for a module that cannot be imported.
    within = [vars(module) for each, module in list(sys.modules.items()) if module and each.startswith(f"{package}.")]
    found = [defined[name] for defined in within if name in defined]
    if not found or any(each is not found[0] for each in found) or find_spec(f"{package}.{name}") is not None:
        raise AttributeError(name)
    return found[0]


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
