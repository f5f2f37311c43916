from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sdflow.store import Cache
from sdflow.store.layout import remove_tree


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """A folder on a memory disk where there is one: hundreds of builds need not wait for the disk to sync."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="sdflow-test-", dir=memory if os.access(memory, os.W_OK) else None))
    yield folder
    remove_tree(folder)
