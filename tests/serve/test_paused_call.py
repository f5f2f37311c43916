"""A function that stops where it asks, and goes on when it is answered."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sdflow.serve.engine.paused_call import CallEnded, PausedCall


def summing(ask: Callable[[str], int]) -> int:
    return ask("first") + ask("second")


def test_it_stops_where_it_asks_and_goes_on_with_the_answer() -> None:
    call = PausedCall(summing)
    call.begin()
    assert call.asked == "first"
    call.answer(40)
    assert call.asked == "second"
    call.answer(2)
    assert call.asked is None
    assert call.result() == 42


def test_several_stand_at_different_places() -> None:
    calls = [PausedCall(summing) for _ in range(3)]
    for call in calls:
        call.begin()
    calls[1].answer(1)
    assert [call.asked for call in calls] == ["first", "second", "first"]
    for call in (calls[1], calls[0], calls[0], calls[2], calls[2]):
        call.answer(5)
    assert [call.result() for call in calls] == [10, 6, 10]


def test_what_it_raises_comes_with_the_result() -> None:
    def failing(ask: Callable[[str], int]) -> int:
        raise ValueError(f"no {ask('what')}")

    call = PausedCall(failing)
    call.begin()
    call.answer(7)
    assert call.asked is None
    with pytest.raises(ValueError, match="no 7"):
        call.result()


def test_one_that_is_given_up_cleans_up_and_does_nothing_else() -> None:
    done = []

    def cleaning(ask: Callable[[str], int]) -> int:
        try:
            ask("anything")
            done.append("went on")
        except Exception:  # noqa: BLE001  (what code between here and there may do)
            done.append("caught")
        finally:
            done.append("cleaned up")
        return 0

    call = PausedCall(cleaning)
    call.begin()
    call.end()
    assert done == ["cleaned up"]
    assert call.asked is None
    with pytest.raises(CallEnded):
        call.result()
    call.end()  # nothing is left to end
