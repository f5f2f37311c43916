"""Every family from every source, every addition in every family, every addition from every source: built, verified and drawn as
diffusers draws it. Which rows these are, the families' table says (`tests/support/walk.py`). By
default each source and addition is seen once, and each family, but for what `SHOWN_ELSEWHERE` names; with `-m slow` in every
pair."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from walk import Row, Written, every_row, few_rows, fewest_rows, pairs_of, walk, written_in

from sdflow.store import Cache

pytestmark = pytest.mark.usefixtures("forked_workers")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Written]:
    with written_in(tmp_path_factory.mktemp("written")) as written:
        yield written


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return Cache(tmp_path_factory.mktemp("store") / "cache")


def test_the_rows_show_every_pair() -> None:
    assert pairs_of(few_rows()) == pairs_of(every_row())
    assert len(few_rows()) < len(set(every_row())) / 2


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=() if row in fewest_rows() else pytest.mark.slow) for row in few_rows()],
    ids=str,
)
def test_it_is_built_verified_and_drawn_as_diffusers_draws_it(
    row: Row, written: Written, store: Cache, tmp_path: Path
) -> None:
    walk(row, written, tmp_path, store)
