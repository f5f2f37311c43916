"""Which batches a number of images is drawn in, given what a run of each batch takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

SIZES = (1, 2, 4, 8)
"""Images of a batch that are tried. Each is a session of its own, on CUDA with a captured graph, so they are few."""

GAIN = 0.95
"""A larger batch must take at most this part of the time for an image that the best smaller one takes."""


def plan_batches(images: int, seconds: Mapping[int, float]) -> tuple[int, ...]:
    """The sizes of the batches that take least time together for so many images; the last may have places left over.

    seconds: of one run, by size of the batch.
    """
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for count in range(1, images + 1):
        ways = []
        for size, taken in seconds.items():
            before, sizes = best[max(0, count - size)]
            ways.append((before + taken, tuple(sorted((*sizes, size), reverse=True))))
        best.append(min(ways))
    return best[images][1]


def worthwhile_sizes(measure: Callable[[int], float | None]) -> dict[int, float]:
    """Seconds of a run for each size of a batch that is worth it: the first is 1, and each larger one saves time.

    measure: seconds of a run of this size; None where there is no room for it. It is not asked beyond the first that does
    not pay.
    """
    kept: dict[int, float] = {}
    for size in SIZES:
        seconds = measure(size)
        if seconds is None or (kept and seconds / size > GAIN * min(taken / of for of, taken in kept.items())):
            break
        kept[size] = seconds
    return kept
