"""Our operators compiled for the CPU, once for all tests of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from cuda_on_cpu import compile_objects, link, unavailable


@pytest.fixture(scope="session")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Source -> object; for `link`."""
    if why := unavailable():
        pytest.skip(why)
    return compile_objects(tmp_path_factory.mktemp("objects"))


@pytest.fixture(scope="session")
def program(objects: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What runs an operator, `cuda_on_cpu.run`."""
    return link(objects.values(), tmp_path_factory.mktemp("program") / "operators")
