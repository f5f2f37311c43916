"""Public functions and methods of models, families and the runtime are documented where they are defined or declared."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

PACKAGE = Path(__file__).parents[1] / "sdflow"
FOLDERS = ("families", "models", "runtime")


def module_names() -> list[str]:
    files = (file for folder in FOLDERS for file in sorted((PACKAGE / folder).rglob("*.py")))
    names = (".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts) for file in files)
    return [name.removesuffix(".__init__") for name in names]


def public(module: ModuleType) -> Iterator[tuple[str, object]]:
    """Functions, classes and methods that a module defines, by name. Overrides inherit documentation (`inspect.getdoc`)."""
    for name, each in vars(module).items():
        if name.startswith("_") or getattr(each, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(each):
            yield name, each
        elif inspect.isclass(each):
            yield name, each
            for member in vars(each):
                if (
                    not member.startswith("_")
                    and member not in vars(each).get("__annotations__", {})
                    and (
                        inspect.isroutine(found := inspect.getattr_static(each, member)) or isinstance(found, property)
                    )
                ):
                    yield f"{name}.{member}", getattr(each, member)


def undocumented(module: ModuleType) -> list[str]:
    return [name for name, each in public(module) if not inspect.getdoc(each)]


@pytest.mark.parametrize("name", module_names())
def test_what_is_public_is_documented(name: str) -> None:
    assert undocumented(import_module(name)) == []


PLANTED = """
class Base:
    'A base.'
    def declared(self):
        'Declared.'

class Implementation(Base):
    'An implementation.'
    def declared(self): ...
    def undeclared(self): ...
"""


def test_a_method_without_documentation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("planted")
    monkeypatch.setitem(sys.modules, "planted", module)
    exec(PLANTED, vars(module))
    assert undocumented(module) == ["Implementation.undeclared"]
