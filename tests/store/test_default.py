"""Where the cache lies when nobody names a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdflow.store.default import default_cache
from sdflow.store.layout import Layout

ROOT = Path(__file__).parents[2]


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder for caches, with a project beside it as the current folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "xdg"


@pytest.mark.skipif("sys.platform != 'linux'", reason="XDG's variables are Linux's")
def test_it_is_the_users_and_making_it_is_left_to_who_writes(users: Path) -> None:
    assert default_cache() == users / "sdflow/builds"
    assert not users.exists()


def test_a_cache_in_the_current_folder_is_not_taken_for_it(users: Path) -> None:
    Layout(Path("cache")).ensure()
    assert default_cache() != Path("cache")


def test_in_a_checkout_it_is_the_checkouts(users: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert default_cache() == Path("cache")
    monkeypatch.chdir(ROOT / "docs")
    assert default_cache() == ROOT / "cache"
