"""Every row of the walk (`tests/support/walk.py`): the product of families, additions and sources."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from walk import Row, Written, every_row, few_rows, walk, written_in

from sdflow.store import Cache

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_workers")]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Written]:
    with written_in(tmp_path_factory.mktemp("written")) as written:
        yield written


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return Cache(tmp_path_factory.mktemp("store") / "cache")


@pytest.mark.parametrize("row", sorted({*every_row()} - {*few_rows()}, key=str), ids=str)
def test_the_rest_of_the_product_is_built_verified_and_drawn_as_diffusers_draws_it(
    row: Row, written: Written, store: Cache, tmp_path: Path
) -> None:
    walk(row, written, tmp_path, store)
