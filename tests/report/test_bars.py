"""Bars behind a table: as long as the values are to one another, and only where there is room."""

from __future__ import annotations

import pytest

from sdflow.report.bench import LEAST, MOST, bars


@pytest.mark.parametrize("room", [LEAST, 12, 40, 400])
def test_the_largest_value_fills_the_room_and_others_are_in_proportion(room: int) -> None:
    drawn = bars([10.0, 5.0, 0.001], room)
    assert drawn is not None
    assert [len(each) for each in drawn] == [min(room, MOST), -(-min(room, MOST) // 2), 1]
    assert drawn[2] == "▏", "no value is without a bar"


def test_without_room_or_values_there_are_none() -> None:
    assert bars([1.0], LEAST - 1) is None
    assert bars([], 40) is None
    assert bars([0.0], 40) is None
