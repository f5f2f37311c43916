"""Our operators compiled for the CPU, once for all tests of them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from cuda_on_cpu import (
    compile_kernels,
    compile_objects,
    compile_operator,
    kernel_texts,
    link,
    object_of,
    objects_in,
    unavailable,
)
from filelock import FileLock

from sdflow.runtime.kernels.parts import FOLDER


@pytest.fixture(scope="session")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Source -> object; for `link`."""
    if why := unavailable():
        pytest.skip(why)
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    with FileLock(root / "objects.lock"):  # the other worker of pytest-xdist waits
        if not (made := root / "objects").exists():
            building = Path(tempfile.mkdtemp(prefix="objects.", dir=root))
            compile_objects(building)
            building.rename(made)
    return objects_in(made)


@pytest.fixture(scope="session")
def program(objects: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What runs an operator, `cuda_on_cpu.run`."""
    return link(objects.values(), tmp_path_factory.mktemp("program") / "operators")


@pytest.fixture
def faulty(objects: dict[str, Path], tmp_path: Path) -> Callable[[str, str, str], Path]:
    """Makes such a program with a fault: in this source, what is right becomes what is wrong."""

    def make(source: str, right: str, wrong: str) -> Path:
        text = (FOLDER / source).read_text(encoding="utf-8")
        assert right in text
        text = text.replace(right, wrong, 1)
        if source.endswith(".c"):
            changed = tmp_path / source
            changed.write_text(text, encoding="utf-8")
            made = {source: compile_operator(changed, tmp_path)}
        else:
            name = object_of(source)
            made = {name: compile_kernels(tmp_path, name, kernel_texts() | {source: text}, "-O0")}
        return link((objects | made).values(), tmp_path / "operators")

    return make
