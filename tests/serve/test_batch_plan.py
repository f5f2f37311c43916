"""Images are drawn in the batches that take least time, of sizes that a measurement found worth it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from sdflow.serve.engine.waiting import next_batch, worthwhile_sizes


@pytest.mark.parametrize(
    ("images", "seconds", "size"),
    [
        (1, {1: 1.0, 2: 1.2, 4: 2.0}, 1),
        (3, {1: 1.0, 2: 1.2, 4: 1.6}, 4),  # a place is left over
        (3, {1: 1.0, 2: 1.2, 4: 2.5}, 2),  # the newest waits
        (5, {1: 1.0, 2: 1.2, 4: 2.0}, 4),
        (7, {1: 5.6, 2: 9.6, 4: 17.0, 8: 31.5}, 4),
        (8, {1: 5.6, 2: 9.6, 4: 17.0, 8: 31.5}, 8),
        (3, {1: 1.0}, 1),
        (2, {1: 1.0, 2: 2.5}, 1),
    ],
)
def test_the_batch_that_takes_least_for_an_image(images: int, seconds: dict[int, float], size: int) -> None:
    assert next_batch(images, seconds) == size


@given(some.integers(1, 9), some.dictionaries(some.sampled_from([2, 3, 4]), some.floats(0.1, 9.0), max_size=3))
def test_no_other_batch_takes_less(images: int, more: dict[int, float]) -> None:
    seconds = {1: 1.0, **more}
    chosen = next_batch(images, seconds)
    assert all(seconds[chosen] / min(chosen, images) <= seconds[size] / min(size, images) for size in seconds)


def test_a_size_is_kept_while_it_saves_time_for_an_image() -> None:
    asked = []

    def measure(size: int) -> float:
        asked.append(size)
        return {1: 1.0, 2: 1.5, 4: 2.95, 8: 1.0}[size]

    assert worthwhile_sizes(measure) == {1: 1.0, 2: 1.5}
    assert asked == [1, 2, 4], "behind one that does not pay, none is tried"


def test_a_size_without_room_ends_it() -> None:
    assert worthwhile_sizes(lambda size: None if size > 2 else float(size**0.5)) == {1: 1.0, 2: 2**0.5}
