"""Images are put into the batches that take least time, of sizes that a measurement found worth it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as some

from sdflow.serve.batch_plan import plan_batches, worthwhile_sizes


@pytest.mark.parametrize(
    ("images", "seconds", "sizes"),
    [
        (1, {1: 1.0, 2: 1.2, 4: 2.0}, (1,)),
        (3, {1: 1.0, 2: 1.2, 4: 2.0}, (4,)),  # a place is left over
        (3, {1: 1.0, 2: 1.2, 4: 2.5}, (2, 1)),
        (5, {1: 1.0, 2: 1.2, 4: 2.0}, (4, 1)),
        (3, {1: 1.0}, (1, 1, 1)),
        (2, {1: 1.0, 2: 2.5}, (1, 1)),
        (0, {1: 1.0}, ()),
    ],
)
def test_the_batches_that_take_least(images: int, seconds: dict[int, float], sizes: tuple[int, ...]) -> None:
    assert plan_batches(images, seconds) == sizes


@given(some.integers(1, 9), some.dictionaries(some.sampled_from([2, 3, 4]), some.floats(0.1, 9.0), max_size=3))
def test_no_other_batches_take_less(images: int, more: dict[int, float]) -> None:
    seconds = {1: 1.0, **more}
    planned = plan_batches(images, seconds)
    assert sum(planned) >= images
    least = min(
        sum(seconds[size] for size in way)
        for count in range(1, images + 1)
        for way in itertools.combinations_with_replacement(seconds, count)
        if sum(way) >= images
    )
    assert sum(seconds[size] for size in planned) == pytest.approx(least)


def test_a_size_is_kept_while_it_saves_time_for_an_image() -> None:
    asked = []

    def measure(size: int) -> float:
        asked.append(size)
        return {1: 1.0, 2: 1.5, 4: 2.95, 8: 1.0}[size]

    assert worthwhile_sizes(measure) == {1: 1.0, 2: 1.5}
    assert asked == [1, 2, 4], "behind one that does not pay, none is tried"


def test_a_size_without_room_ends_it() -> None:
    assert worthwhile_sizes(lambda size: None if size > 2 else float(size**0.5)) == {1: 1.0, 2: 2**0.5}
