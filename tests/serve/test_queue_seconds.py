"""`Retry-After` of a full queue: by numbers alone, nothing is drawn."""

from __future__ import annotations

from sdflow.serve.http.queue_seconds import QueueSeconds
from sdflow.serve.jobs import Drawn, Job

MEASURED = {"batch_seconds": {"1": 0.5, "2": 0.6}, "pixels": 512 * 512, "lanes": 1}


def job(side: int = 512, steps: int = 20) -> Job:
    return Job("a", 0, "it", "a", 0, steps=steps, pixels=side * side)


def drawn(steps: float) -> Drawn:
    return Drawn("a", 0, b"", (1, 1), None, {"begin": 0.1, "steps": steps, "end": 0.9})


def test_at_first_what_was_measured_counts() -> None:
    queue = QueueSeconds()
    queue.start("it", MEASURED)
    assert queue.of(job(), 1.0) == 20 * 0.3 and queue.of(job(), 0.5) == 10 * 0.3
    assert queue.of(job(1024), 1.0) == 4 * 20 * 0.3, "by its pixels"


def test_then_what_images_took_and_one_that_took_long_does_not_count_alone() -> None:
    queue = QueueSeconds()
    queue.start("it", MEASURED)
    for seconds in (200.0, 10.0, 10.0, 10.0, 10.0):
        queue.note(job(), drawn(seconds))
    assert queue.of(job(), 1.0) == 20 * 0.5 + 1.0
    queue.note(job(64), drawn(400.0))
    assert queue.of(job(), 1.0) == 20 * 0.5 + 1.0, "another size"


def test_what_shares_the_device_ends_later_and_lanes_share_the_work() -> None:
    queue = QueueSeconds()
    queue.start("it", MEASURED)
    assert queue.until(1, [10.0, 4.0], [7.0]) == 8
    assert queue.until(2, [10.0, 4.0], [7.0]) == 14
    assert queue.until(3, [10.0, 4.0], [7.0]) == 21
    queue.start("it", {**MEASURED, "lanes": 2})
    assert queue.until(3, [10.0, 4.0], [7.0]) == 11
