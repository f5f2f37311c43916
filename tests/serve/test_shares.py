"""Which group of images the device steps next, and which sizes of batches are used: by numbers alone, nothing is drawn."""

from __future__ import annotations

from sdflow.serve.engine.pace import RECENT, Pace
from sdflow.serve.engine.shares import Shares


def served(shares: Shares, seconds: dict[str, float], steps: int) -> list[str]:
    """The groups in the order in which they are stepped."""
    order = []
    for _ in range(steps):
        group = str(shares.next(seconds.keys()))
        shares.ran(group, seconds[group])
        order.append(group)
    return order


def test_groups_share_time_and_not_steps() -> None:
    order = served(Shares(), {"large": 2.0, "small": 0.1}, 220)
    assert 9 <= order.count("large") <= 12, "half of the time each"


def test_one_that_comes_waits_for_no_further_step_of_a_large_one() -> None:
    shares = Shares()
    served(shares, {"large": 2.0}, 10)
    assert served(shares, {"large": 2.0, "small": 0.1}, 10) == ["small"] * 10


def test_who_comes_again_gets_no_more_than_its_share() -> None:
    """One with long steps leaves after the first and comes back."""
    shares = Shares()
    assert served(shares, {"short": 1.0, "long": 5.0}, 2) == ["short", "long"]
    assert served(shares, {"short": 1.0}, 2) == ["short"] * 2
    assert served(shares, {"short": 1.0, "long": 5.0}, 4) == ["short", "short", "short", "long"]


def test_how_long_a_step_takes_is_known_while_there_are_images_of_its_kind() -> None:
    shares = Shares()
    served(shares, {"large": 2.0}, 3)
    assert shares.step("large") == 2.0
    shares.next(["small"])
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


def test_sizes_that_did_not_pay_in_a_busy_moment_are_used_once_they_are_measured_again() -> None:
    """Never larger ones than were measured, and measured again only where images had to wait."""
    pace = Pace({1: 1.0}, again=True)
    assert set(runs(pace, FAST, 500, images=1)) == {1} and not pace.due
    assert set(runs(pace, FAST, 500)) == {1} and pace.due
    pace.measured(FAST)
    assert (dict(pace.seconds), pace.due, pace.size(12)) == (FAST, False, 8)


def test_what_never_pays_is_measured_more_and_more_rarely() -> None:
    pace, measured = Pace({1: 1.0}, again=True), []
    for run in range(4000):
        runs(pace, FAST, 1)
        if pace.due:
            measured.append(run)
            pace.measured({1: 1.0})
    assert len(measured) == 5


def test_what_is_measured_while_serving_replaces_what_was_at_the_start() -> None:
    """A size that paid at the start, and costs more than it saves since."""
    pace = Pace({1: 1.0, 2: 1.2}, again=True)
    runs(pace, {1: 1.0, 2: 2.5}, 4 * RECENT, images=2)
    assert 2 not in pace.seconds
    assert pace.size(2) == 1


def test_sizes_that_an_operator_named_stay() -> None:
    pace = Pace({1: 1.0, 2: 5.0})
    assert set(runs(pace, {1: 1.0, 2: 5.0, 4: 1.0}, 500, images=2)) == {1} and set(pace.seconds) == {1, 2}


def test_a_size_for_which_there_is_no_memory_is_not_used() -> None:
    pace = Pace(FAST, again=True)
    pace.failed(8)
    assert (dict(pace.seconds), pace.size(12)) == ({1: 1.0, 2: 1.1, 4: 1.3}, 4)
