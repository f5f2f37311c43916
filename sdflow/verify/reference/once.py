"""The reference of a submodel read from its files piece by piece: each piece is read once for several runs.

In float32 and in 16 bits, the image and the other cases are runs that take turns (`turns`), with modules that share the
weights read. The results equal those of the stages in `reference`, which run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from sdflow.errors import VerificationError
from sdflow.verify.reference.cases import Case, Cases
from sdflow.verify.reference.forwards import Call, Network, batches, run_batch, trajectory
from sdflow.verify.reference.half import quick_halves
from sdflow.verify.reference.streamed import RowsOnce
from sdflow.verify.reference.turns import Turns

if TYPE_CHECKING:
    import numpy as np


@contextmanager
def sharing(turns: Turns, *networks: Network) -> Iterator[None]:
    """Make these modules of one submodel share the weights that they read."""
    streamed = [network.weights for network in networks if network.weights is not None]
    own = [weights.reading for weights in streamed]
    for weights in streamed:
        weights.take_turns(turns, own[0])
    try:
        yield
    finally:
        for weights, each in zip(streamed, own, strict=True):
            weights.alone()
            weights.reading = each


def rows_once(exact: Network, rounded: Network) -> RowsOnce:
    """Make a text encoder compute each row of tokens once, in float32 and, with its second module, in 16 bits."""
    assert rounded.weights is not None
    forward, known = rounded.module.forward, rounded.weights.wide

    def in_half(*args: Any, **kwargs: Any) -> Any:
        with quick_halves(known=known):
            return forward(*args, **kwargs)

    def side_by_side(*works: Callable[[], None]) -> None:
        turns = Turns()
        with sharing(turns, exact, rounded):
            for work in works:
                turns.start(work)
            turns.finish()

    return RowsOnce(exact.module, in_half, side_by_side)


def denoise_once(
    submodel: str,
    networks: tuple[Network, Network, Network],
    half: str,
    draw: Mapping[str, Callable[[], np.ndarray]],
    calls: Sequence[Call],
    expected: Callable[[Call], int | None],
    further: Callable[[Cases], None],
) -> tuple[Cases, Mapping[str, np.ndarray]]:
    """The cases of a denoiser, and the images, by precision.

    networks: for the float32 image; for the other float32 cases; for both in 16 bits, of the type half. draw: precision
    -> a function that generates the image. calls: grows with the first network's inputs while it runs. expected: the
    number of calls, from the first one; None if unknown. further: adds the cases outside the image.
    """
    drawing, exact, rounded = networks
    assert rounded.weights is not None
    known_wide = rounded.weights.wide
    turns, steps, cases = Turns(), Cases(), Cases()
    images: dict[str, np.ndarray] = {}
    steps_known: list[int] = []

    def exact_image() -> None:
        images["float32"] = draw["float32"]()

    def half_image() -> None:
        with quick_halves(known=known_wide):
            images["float16"] = draw["float16"]()

    def fed(index: int) -> bool:
        return len(calls) > index or first.ended

    def half_steps() -> None:
        """Run each step's inputs in 16 bits, as soon as they are known."""
        with quick_halves(known=known_wide):
            while True:
                index = len(steps.cases)
                turns.wait(partial(fed, index))
                if len(calls) <= index:
                    return
                steps.add(Case("", "trajectory"), calls[index][1])
                run_batch(steps, [index], "float16", rounded, half)

    def others() -> None:
        """Run all other cases with the last step."""
        turns.wait(lambda: first.ended or (bool(calls) and len(calls) == expected(calls[0])))
        known = trajectory(calls, submodel, drawing)
        cases.cases, cases.arrays = list(known.cases), dict(known.arrays)
        further(cases)
        count = len(known.cases)
        steps_known.append(count)
        for chosen in batches(cases, "float32", exact):
            if chosen := [index for index in chosen if index >= count]:
                turns.start(partial(run_batch, cases, chosen, "float32", exact))
        for chosen in batches(cases, "float16", rounded):
            if chosen := [index for index in chosen if index >= count]:
                turns.start(partial(in_half, chosen))

    def in_half(chosen: Sequence[int]) -> None:
        with quick_halves(known=known_wide):
            run_batch(cases, chosen, "float16", rounded, half)

    with sharing(turns, *networks):
        first = turns.start(exact_image)
        for work in (half_image, half_steps, others):
            turns.start(work)
        turns.finish()
    drawn = trajectory(calls, submodel, drawing)
    if [len(drawn.cases)] != steps_known:
        raise VerificationError(
            f"{len(drawn.cases)} calls of {submodel} generated the image, expected {steps_known[0]}",
            remedy="Please report this. With more memory, the submodel is verified as a whole.",
        )
    for index, _ in drawn:
        cases.put(index, "float32", drawn.get(index, "float32"))
        cases.put(index, "float16", steps.get(index, "float16"))
    return cases, images
