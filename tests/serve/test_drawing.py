"""The requests of a worker, as the process that answers keeps them; the worker's part is played by the test."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from sdflow.serve.api_error import ApiError, of_failure
from sdflow.serve.http.drawing import Drawing
from sdflow.serve.jobs import Begun, Cancel, Drawn, Drop, Failed, Job, Load, Loaded, Lost, Message, Ready
from sdflow.serve.limits import Limits
from sdflow.serve.metrics import Metrics

JOBS = [Job("one", index, "tiny", "a", index) for index in range(2)]
DRAWN = Drawn("one", 0, b"", (64, 64), None, {})


def asked(limits: Limits, *said: Message) -> tuple[ApiError, list[Any], Drawing]:
    """What a request for two images is answered when the worker says this, what was sent to it, and what is left."""
    sent: list[Any] = []

    def send(message: Any) -> None:
        sent.append(message)
        if len(sent) == len(JOBS):
            for each in said:
                drawing.hear(each)

    drawing = Drawing(limits, Metrics(), send)
    drawing.hear(Ready({"tiny": {}}))

    async def draw() -> None:
        async for _ in drawing.draw(JOBS):
            pass

    with pytest.raises(ApiError) as error:
        asyncio.run(draw())
    return error.value, sent, drawing


@pytest.mark.parametrize("said", [(), (DRAWN,)])
def test_what_takes_too_long_is_given_up_and_drawn_no_more(said: tuple[Message, ...]) -> None:
    error, sent, drawing = asked(Limits(seconds=0.05), *said)
    assert (error.status, error.code, error.headers) == (504, "deadline", {"Retry-After": "1"})
    assert sent == [*JOBS, Cancel("one")]
    assert drawing.images == 0 and drawing.ready


def test_who_reads_slowly_is_not_ended_by_the_deadline_where_it_stands() -> None:
    """As a stream's client that takes nothing for a while: it is told when it asks for more, and not where it waits."""
    drawing = Drawing(Limits(seconds=0.05), Metrics(), lambda message: None)
    drawing.hear(Ready({"tiny": {}}))

    async def draw() -> None:
        asyncio.get_running_loop().call_soon(drawing.hear, Begun("one", 0))
        async for _ in drawing.draw(JOBS):
            await asyncio.sleep(0.2)

    with pytest.raises(ApiError) as error:
        asyncio.run(draw())
    assert error.value.code == "deadline" and drawing.images == 0


def test_a_worker_that_ends_is_told_and_nothing_is_taken_until_another_is_there() -> None:
    error, _, drawing = asked(Limits(), DRAWN, Begun("one", 1), Lost("WorkerEnded", "killed by signal 9"))
    assert (error.status, error.code) == (503, "worker_lost")
    assert "signal 9" in error.message
    with pytest.raises(ApiError) as refused:
        drawing.require_place(1)
    assert (refused.value.status, refused.value.code) == (503, "not_ready")
    drawing.hear(Ready({"tiny": {}}))
    drawing.require_place(1)


def test_what_waited_for_a_pipeline_that_was_removed_is_not_sent_to_the_next_worker() -> None:
    error, sent, _ = asked(Limits(), Lost("WorkerEnded", "it ended"), Ready({"other": {}}))
    assert (error.status, error.param) == (400, "model") and "removed" in error.message
    assert sent == JOBS


def test_only_its_own_order_answers_a_load_and_what_was_removed_does_not_come_back() -> None:
    sent: list[Any] = []
    drawing = Drawing(Limits(), Metrics(), sent.append)
    drawing.hear(Ready({"tiny": {"lanes": 1}}))

    async def load(*said: Message) -> ApiError | None:
        loading = asyncio.ensure_future(drawing.load("tiny", Path("tiny")))
        await asyncio.sleep(0)
        assert isinstance(sent[-1], Load)
        for each in said:
            drawing.hear(each)
        await asyncio.wait([loading], timeout=0.05)
        if not loading.done():
            drawing.drop("tiny")
        (error,) = await asyncio.gather(loading, return_exceptions=True)
        assert error is None or isinstance(error, ApiError)
        return error

    removed = asyncio.run(load())
    assert removed is not None and removed.status == 409 and sent[-1] == Drop("tiny")
    late = Loaded("tiny", Path("tiny"), {"lanes": 4}, number=1)
    drawing.hear(late)
    assert drawing.found == {}
    assert asyncio.run(load(late, Loaded("tiny", Path("tiny"), {"lanes": 6}, number=2))) is None
    assert drawing.found == {"tiny": {"lanes": 6}}
    lost = asyncio.run(load(Lost("WorkerEnded", "killed by signal 9")))
    assert lost is not None and (lost.status, lost.code) == (503, "worker_lost")


def test_what_waited_when_a_worker_ended_is_drawn_by_the_next_and_given_up_with_that() -> None:
    """Only what is not finished; the next one may end for the same reason, and not one after the other."""
    lost, ready = Lost("WorkerEnded", "killed by signal 9"), Ready({"tiny": {}})
    sent: list[Any] = []
    drawing = Drawing(Limits(), Metrics(), sent.append)
    drawing.hear(ready)

    async def draw(*said: Message) -> list[Message]:
        sent.clear()
        told = drawing.draw(JOBS)
        first = asyncio.ensure_future(anext(told))
        await asyncio.sleep(0)
        for each in (Begun("one", 0), DRAWN, lost, ready, *said):
            drawing.hear(each)
        return [await first, *[message async for message in told]]

    last = Drawn("one", 1, b"", (64, 64), None, {})
    assert asyncio.run(draw(Begun("one", 1), last)) == [Begun("one", 0), DRAWN, Begun("one", 1), last]
    assert sent == [*JOBS, JOBS[1]]
    with pytest.raises(ApiError) as error:
        asyncio.run(draw(lost))
    assert (error.value.status, error.value.code) == (503, "worker_lost")
    assert sent == [*JOBS, JOBS[1], Cancel("one")] and drawing.images == 0


@pytest.mark.parametrize(
    ("kind", "what", "status", "says"),
    [
        (
            "FileNotFoundError",
            "[Errno 2] No such file or directory: '/home/me/unet/model.onnx'",
            500,
            "the server's log",
        ),
        ("VerificationError", "the folder is damaged", 500, "the folder is damaged"),
        ("RuntimeException", "Failed to allocate memory for requested buffer of size 9", 503, "request a smaller size"),
        ("RuntimeException", "std::bad_alloc", 503, "request a smaller size"),
        ("UsageError", "no steps remain", 400, "no steps remain"),
    ],
)
def test_what_fails_is_answered_without_a_path(kind: str, what: str, status: int, says: str) -> None:
    told = of_failure(Failed("one", 0, kind, what))
    assert told.status == status and says in told.message and "/home" not in told.message
