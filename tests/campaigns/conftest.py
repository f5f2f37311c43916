"""Campaigns are slow by definition: every test in this folder gets the mark, so the default run leaves all of them out."""

from __future__ import annotations

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.slow)
