"""The package is built in floors: an import goes to the same floor or down, never up."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "sdflow"
FLOORS = {
    "errors": 0, "digest": 0, "units": 0, "picture_sizes": 0,
    "config": 1, "artifact": 1, "targets": 1, "workers": 1, "worker_group": 1, "samples": 1, "replace_folder": 1,
    "user_folder": 1,
    "store": 2, "passes": 2, "sources": 2, "weights": 2,
    "step": 3, "plan": 3,
    "execute": 4, "assemble": 4,
    "runtime": 5, "evaluate": 5, "bench": 5, "verify": 5, "run": 5, "disk_space": 5, "bake": 5, "doctor": 5, "report": 5,
    "cli": 6, "__main__": 6,
}  # fmt: skip
HEAVY = ("torch", "onnx", "onnxruntime", "olive", "diffusers", "transformers", "onnx_ir", "onnxscript")


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def top_name(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> list[str]:
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names += [node.module] if node.module != "sdflow" else [f"sdflow.{alias.name}" for alias in node.names]
    return names


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down_only(path: Path) -> None:
    if path == PACKAGE / "__init__.py":
        return
    floor = FLOORS[top_name(path)]
    for name in imports(ast.parse(path.read_text())):
        if name.startswith("sdflow.") and name != "sdflow.__version__":
            imported = name.split(".")[1]
            assert FLOORS[imported] <= floor, f"{path.name} (floor {floor}) imports {name} (floor {FLOORS[imported]})"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_heavy_packages_are_imported_only_inside_functions(path: Path) -> None:
    for node in ast.parse(path.read_text()).body:
        for name in imports(node) if isinstance(node, ast.Import | ast.ImportFrom) else []:
            assert name.split(".")[0] not in HEAVY, f"{path} imports {name} when it is imported"


def test_the_plan_imports_no_heavy_package() -> None:
    code = "import sys, sdflow.plan, sdflow.report; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not set(HEAVY) & set(loaded)
