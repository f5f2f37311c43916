"""Which group of images the device steps next, and which sizes of batches are used: by numbers alone, nothing is drawn."""

from __future__ import annotations

from sdflow.serve.engine.pace import FIRST_TRIAL, RECENT, TRIAL_RUNS, Pace
from sdflow.serve.engine.shares import Shares


def served(shares: Shares, seconds: dict[str, float], steps: int) -> list[str]:
    """The groups in the order in which they are stepped."""
    order = []
    for _ in range(steps):
        group = str(shares.next({each: each for each in seconds}))
        shares.ran(group, group, seconds[group])
        order.append(group)
    return order


def test_groups_share_time_and_not_steps() -> None:
    order = served(Shares(), {"large": 2.0, "small": 0.1}, 220)
    assert 9 <= order.count("large") <= 12, "half of the time each"


def test_one_that_comes_waits_for_no_further_step_of_a_large_one() -> None:
    shares = Shares()
    served(shares, {"large": 2.0}, 10)
    assert served(shares, {"large": 2.0, "small": 0.1}, 10) == ["small"] * 10


def test_who_comes_again_and_again_gets_no_more_than_its_share() -> None:
    """Small images one after the other, each gone before the next comes."""
    shares, order = Shares(), list[str]()
    for number in range(200):
        image = f"small {number}"
        for _ in range(3):
            group = str(shares.next({"large": "large", image: "small"}))
            shares.ran(group, group.split()[0], 2.0 if group == "large" else 0.1)
            order.append(group.split()[0])
    large, small = 2.0 * order.count("large"), 0.1 * order.count("small")
    assert abs(large - small) <= 4, (large, small)


def test_how_long_a_step_takes_is_known_where_each_step_is_a_group_of_its_own() -> None:
    """Of images that share a run only at the same moment of their schedules: FLUX.2's, Z-Image's."""
    shares = Shares()
    for moment in range(3):
        assert shares.step("large") == (2.0 if moment else 0.0)
        group = shares.next({("large", moment): "large"})
        shares.ran(group, "large", 2.0)
    shares.next({"small 0": "small"})
    assert shares.step("large") == 0.0, "none of it is drawn any more"


def runs(pace: Pace, seconds: dict[int, float], count: int, images: int = 12) -> list[int]:
    """The sizes of the batches, on a machine where runs take this long."""
    sizes = []
    for _ in range(count):
        size = pace.size(images)
        pace.note(size, seconds[size], images - size)
        sizes.append(size)
    return sizes


FAST = {1: 1.0, 2: 1.1, 4: 1.3, 8: 1.6}


def test_sizes_that_did_not_pay_in_a_busy_moment_are_used_once_they_do() -> None:
    pace = Pace({1: 1.0}, again=True)
    sizes = runs(pace, FAST, 5 * (FIRST_TRIAL + TRIAL_RUNS))
    assert sizes[: FIRST_TRIAL - 1] == [1] * (FIRST_TRIAL - 1)
    assert sizes[-1] == 8 and dict(pace.seconds) == FAST


def test_a_size_that_never_pays_is_tried_more_and_more_rarely_and_its_memory_given_back() -> None:
    forgotten: list[int] = []
    pace = Pace({1: 1.0}, again=True, forget=forgotten.append)
    sizes = runs(pace, {1: 1.0, 2: 2.1, 4: 4.2, 8: 8.4}, 4000)
    assert forgotten and set(forgotten) == {2} and dict(pace.seconds) == {1: 1.0}
    assert sizes.count(2) == len(forgotten) * TRIAL_RUNS <= 6 * TRIAL_RUNS


def test_what_is_measured_while_serving_replaces_what_was_at_the_start() -> None:
    """A size that paid at the start, and costs more than it saves since."""
    pace = Pace({1: 1.0, 2: 1.2}, again=True)
    runs(pace, {1: 1.0, 2: 2.5}, FIRST_TRIAL + RECENT + TRIAL_RUNS, images=2)
    assert 2 not in pace.seconds
    assert pace.size(2) == 1


def test_sizes_that_an_operator_named_stay() -> None:
    pace = Pace({1: 1.0, 2: 5.0})
    assert set(runs(pace, {1: 1.0, 2: 5.0, 4: 1.0}, 500, images=2)) == {1} and set(pace.seconds) == {1, 2}


def test_a_size_for_which_there_is_no_memory_is_not_tried_again() -> None:
    pace = Pace({1: 1.0}, again=True)
    for _ in range(500):
        size = pace.size(12)
        if size > 1:
            pace.failed(size)
        else:
            pace.note(1, 1.0, 11)
        assert size in (1, 2, 4, 8)
    assert dict(pace.seconds) == {1: 1.0}
