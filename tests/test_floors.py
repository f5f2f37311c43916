"""The package is built in floors: an import goes to the same floor or down, never up, and imports form no circle."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "sdflow"
FLOORS = {
    name: floor
    for floor, names in enumerate(
        (
            "distance page printable samples stop tolerances",
            "errors",
            "disk models parameter prompts targets units",
            "digest families machine",
            "artifact manifest processes",
            "onnx_model sources",
            "inspection store weights",
            "config runtime",
            "passes",
            "build",
            "export fits verify",
            "oci",
            "bench",
            "run",
            "selftest serve",
            "report",
            "cli",
            "__main__",
        )
    )
    for name in names.split()
}
HEAVY = ("torch", "onnx", "onnxruntime", "olive", "diffusers", "transformers", "onnx_ir", "onnxscript")
KNOWN: set[tuple[str, str, str]] = set()
"""Imports that close a circle today: the folder, what imports in it, and what is imported. Whoever mends one takes it out."""

Imports = Mapping[str, Mapping[str, str]]
"""What imports -> what is imported -> where the first such import stands."""


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def top_name(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def folders() -> list[Path]:
    return sorted({path.parent for path in modules()})


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every module that is imported, also inside functions and for type checkers alone, and the line.

    What is taken `from` a package is a module of it if there is one of that name.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module and node.level == 0, f"line {node.lineno}: an import without the package's name"
            for alias in node.names:
                below = PACKAGE.parent.joinpath(*node.module.split("."), alias.name)
                is_module = below.with_suffix(".py").exists() or (below / "__init__.py").exists()
                yield (f"{node.module}.{alias.name}" if is_module else node.module), node.lineno


@cache
def own_imports(path: Path) -> tuple[tuple[Path, int], ...]:
    """The modules of the package that a module imports, and the lines."""
    found = []
    for name, line in imports(ast.parse(path.read_text(encoding="utf-8"))):
        if name.split(".")[0] == PACKAGE.name:
            at = PACKAGE.parent.joinpath(*name.split("."))
            found.append((at.with_suffix(".py") if at.with_suffix(".py").exists() else at / "__init__.py", line))
    return tuple(found)


def imports_within(folder: Path) -> Imports:
    """Which modules and folders of a folder import which others of it. A folder stands for all that is in it."""
    found: dict[str, dict[str, str]] = {}
    for path in sorted(folder.rglob("*.py")):
        importing = path.relative_to(folder).parts[0].removesuffix(".py")
        for target, line in own_imports(path):
            if target.is_relative_to(folder):
                imported = target.relative_to(folder).parts[0].removesuffix(".py")
                if imported != importing:
                    where = f"{path.relative_to(PACKAGE.parent)}:{line}"
                    found.setdefault(importing, {}).setdefault(imported, where)
    return found


def circle(graph: Imports) -> list[str] | None:
    """A shortest way from a name back to itself, the name at both ends; None when there is no way."""
    ways = [
        [name, *way] for name in sorted(graph) for start in sorted(graph[name]) if (way := path_to(graph, start, name))
    ]
    return min(ways, key=len, default=None)


def path_to(graph: Imports, start: str, end: str) -> list[str] | None:
    """A shortest way along imports."""
    ways, seen = [[start]], {start}
    for way in ways:
        if way[-1] == end:
            return way
        for following in graph.get(way[-1], ()):
            if following not in seen:
                seen.add(following)
                ways.append([*way, following])
    return None


def in_words(graph: Imports, way: Sequence[str]) -> str:
    steps = [f"{one} imports {other} ({graph[one][other]})" for one, other in pairwise(way)]
    return " -> ".join(way) + "\n" + "\n".join(steps)


def without_known(folder: Path, graph: Imports) -> Imports:
    name = str(folder.relative_to(PACKAGE.parent))
    return {
        one: {other: where for other, where in others.items() if (name, one, other) not in KNOWN}
        for one, others in graph.items()
    }


def test_the_top_holds_a_dozen_modules_at_most() -> None:
    top = [path.name for path in PACKAGE.glob("*.py") if path.name not in ("__init__.py", "__main__.py")]
    assert len(top) <= 12, f"put it into a folder: {sorted(top)}"


def test_imports_go_down_only() -> None:
    unplaced = {top_name(path) for path in modules()} - {"__init__"} - set(FLOORS)
    assert not unplaced, "give it a floor"
    up = [
        f"{where}: {one} (floor {FLOORS[one]}) imports {other} (floor {FLOORS[other]})"
        for one, others in without_known(PACKAGE, imports_within(PACKAGE)).items()
        for other, where in others.items()
        if other != "__init__" and FLOORS[other] > FLOORS[one]
    ]
    assert not up, "\n".join(up)


@pytest.mark.parametrize("folder", folders(), ids=lambda folder: str(folder.relative_to(PACKAGE.parent)))
def test_imports_form_no_circle(folder: Path) -> None:
    """Among the modules and folders of each folder: so packages form none, and the modules in them form none."""
    graph = without_known(folder, imports_within(folder))
    found = circle(graph)
    assert found is None, in_words(graph, found)


@pytest.mark.parametrize(("folder", "importing", "imported"), sorted(KNOWN))
def test_a_known_circle_is_still_there(folder: str, importing: str, imported: str) -> None:
    graph = imports_within(PACKAGE.parent / folder)
    mended = f"{folder}: {importing} and {imported} form no circle any more: take them out of KNOWN"
    assert imported in graph.get(importing, ()), mended
    assert path_to(graph, imported, importing), mended


def test_a_circle_is_found_and_told() -> None:
    graph = {"a": {"b": "a.py:1"}, "b": {"c": "b.py:2", "d": "b.py:3"}, "c": {"b": "c.py:4"}, "d": {"a": "d.py:5"}}
    found = circle(graph)
    assert found == ["b", "c", "b"]
    assert in_words(graph, found) == "b -> c -> b\nb imports c (b.py:2)\nc imports b (c.py:4)"
    assert circle({"a": {"b": "a.py:1", "c": "a.py:2"}, "b": {"c": "b.py:1"}}) is None


def test_an_import_inside_a_function_or_for_types_counts() -> None:
    code = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from sdflow.store import Cache, objects
def late():
    import sdflow.build.plan
"""
    assert list(imports(ast.parse(code))) == [
        ("typing", 2), ("sdflow.store", 4), ("sdflow.store.objects", 4), ("sdflow.build.plan", 6)
    ]  # fmt: skip


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_heavy_packages_are_imported_only_inside_functions(path: Path) -> None:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        for name, _ in imports(node) if isinstance(node, ast.Import | ast.ImportFrom) else ():
            assert name.split(".")[0] not in HEAVY, f"{path} imports {name} when it is imported"


def test_the_plan_imports_no_heavy_package() -> None:
    code = "import sys, sdflow.build.plan, sdflow.report; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not set(HEAVY) & set(loaded)
