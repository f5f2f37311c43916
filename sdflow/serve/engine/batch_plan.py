"""Which of the images that are there are drawn next, given what a run of each size of batch takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

SIZES = (1, 2, 4, 8)
"""Images of a batch that are tried. Each is a session of its own, on CUDA with a captured graph, so they are few."""

GAIN = 0.95
"""A larger batch must take at most this part of the time for an image that the best smaller one takes."""


def next_batch(images: int, seconds: Mapping[int, float]) -> int:
    """The size of the batch that the oldest of so many images are drawn in next: the one that takes least time for each. It may
    have places left over; who has none goes along when an older one is done.

    Together all would be done later, and none of them earlier: of 5 images where 4 take 17 ms and 1 takes 6, a turn of 4 and
    then one more would take 23 for each.

    seconds: of one run, by size of the batch.
    """
    return min(seconds, key=lambda size: (seconds[size] / min(size, images), size))


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
