"""Repeat failing cases of a 16-bit artifact with many random roundings, to tell chance from a fault.

The loss of one float16 run is a single random draw. For most networks that is a good enough yardstick, but not near a
threshold: the small Stable Diffusion 2.1 loses 0.002 or 0.008 at one timestep, by chance, in PyTorch as in any
artifact. So cases that are too far off run again, in the artifact and in fp16 PyTorch, with DRAWS roundings of their
inputs: a number between two float16 numbers becomes either one, the nearer more likely. The lower quartile replaces the
single draw on both sides: crossing a threshold is chance, while a fault is in every draw.

Near a threshold one side may cross it in nearly every draw and the other in few. PyTorch's draws then differ widely,
and the artifact is compared with their upper quartile.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import inf
from pathlib import Path

import numpy as np

from sdflow.distance import relative_l2
from sdflow.tolerances import FLOAT16_RATIO
from sdflow.verify.artifact.judge_output import times_as_far
from sdflow.verify.reference.cases import Case, Cases, read_cases
from sdflow.verify.reference.forwards import run_cases
from sdflow.verify.reference.half import quick_halves
from sdflow.verify.reference.torch_module import TorchModule
from sdflow.verify.result import CaseDistance, OutputVerdict

FAR = 10.0
"""Multiple of the yardstick. If half of an output's cases are farther, the output is wrong under any rounding and not
repeated: a threshold affects single cases only."""

DRAWS = 16
LEAST = 4
"""Number of draws below the one that counts. If every second run crosses a threshold, the lower quartile is a draw
without a crossing in 24 of 25 cases."""

APART = 2.0
"""Ratio of PyTorch's upper to lower quartile from which a case is near a threshold. Elsewhere it is 1.1 to 1.4."""

Run = Callable[["Sequence[Mapping[str, np.ndarray]]"], "Iterable[Mapping[str, np.ndarray]]"]
"""Runs an artifact on many inputs by name."""
Distances = Mapping[tuple[int, str], Sequence[float]]
"""(case, output) -> distances of all draws, ascending."""


def too_far(found: Sequence[CaseDistance], outputs: Sequence[OutputVerdict]) -> list[str]:
    """The cases that make outputs of a float16 artifact fail, if rounding may be the cause: all values are finite, and
    no output has half of its cases beyond FAR."""
    failed = {each.name for each in outputs if not each.passed}
    of_failed = [each for each in found if each.output in failed]
    if any(each.distance == inf or each.yardstick == inf for each in of_failed):
        return []
    for name in failed:
        ratios = [times_as_far(each) for each in of_failed if each.output == name]
        if 2 * sum(ratio > FAR for ratio in ratios) >= len(ratios):
            return []
    return list(dict.fromkeys(each.case for each in of_failed if FLOAT16_RATIO < times_as_far(each) < inf))


class Roundings:
    """Random roundings of the inputs of a submodel's cases, and their losses."""

    def __init__(self, torch_module: TorchModule, reference: Path) -> None:
        self.torch_module = torch_module
        self.reference = reference
        self._yardsticks: dict[tuple[int, str], Sequence[float]] = {}

    @cached_property
    def cases(self) -> Cases:
        """The reference's cases."""
        return read_cases(self.reference, self.torch_module.submodel)

    def indices(self, names: Sequence[str]) -> list[int]:
        """The indices of the named cases that have inputs to round."""
        return [index for index, case in self.cases if case.name in names and self._real(index)]

    def inputs(self, index: int) -> list[dict[str, np.ndarray]]:
        """DRAWS roundings of a case's inputs."""
        random, real = np.random.default_rng(index), self._real(index)
        given = self.cases.get(index, "inputs")
        return [
            {
                name: _either_half(value, random, self.torch_module.half) if name in real else value
                for name, value in given.items()
            }
            for _ in range(DRAWS)
        ]

    def distances(self, indices: Sequence[int], run: Run) -> Distances:
        """The losses of `run`."""
        runs = iter(run([inputs for index in indices for inputs in self.inputs(index)]))
        return self._lost({index: itertools.islice(runs, DRAWS) for index in indices})

    def yardsticks(self, indices: Sequence[int]) -> Distances:
        """The losses of fp16 PyTorch."""

        missing = [index for index in indices if index not in {known for known, _ in self._yardsticks}]
        if missing:
            drawn, places = Cases(), {}
            for index in missing:
                places[index] = [drawn.add(Case("", "rounded"), inputs) for inputs in self.inputs(index)]
            network = self.torch_module.network()
            network.to_half(self.torch_module.half)
            with quick_halves(network.module):
                run_cases(drawn, "float16", network, self.torch_module.half)
            self._yardsticks |= self._lost(
                {index: (drawn.get(place, "float16") for place in places[index]) for index in missing}
            )
        return self._yardsticks

    def _lost(
        self, outputs: Mapping[int, Iterable[Mapping[str, np.ndarray]]]
    ) -> dict[tuple[int, str], Sequence[float]]:
        lost: dict[tuple[int, str], list[float]] = {}
        for index, draws in outputs.items():
            exact = self.cases.get(index, "float32")
            for draw in draws:
                for name in (name for name in exact if name in draw):
                    lost.setdefault((index, name), []).append(relative_l2(draw[name], exact[name]))
        return {key: sorted(each) for key, each in lost.items()}

    def _real(self, index: int) -> set[str]:
        """The inputs that a 16-bit graph may round: those with many real numbers."""
        ports = {port.name for port in self.torch_module.ports().inputs if not port.exact and port.axes != (1,)}
        return {
            name for name, value in self.cases.get(index, "inputs").items() if name in ports and value.dtype.kind == "f"
        }


def drawn_again(found: Sequence[CaseDistance], roundings: Roundings, distances: Distances) -> tuple[CaseDistance, ...]:
    """Replace cases' single draws with many, where `distances` has them; infinite if any draw is. If PyTorch overflows
    in a draw but not at first, the first draw stays: without a yardstick the case would have a looser limit."""
    yardsticks = roundings.yardsticks([*dict.fromkeys(index for index, _ in distances)])
    indices = {case.name: index for index, case in roundings.cases}
    changed = []
    for each in found:
        key = (indices[each.case], each.output)
        if key in distances and each.yardstick > 0 and yardsticks[key][-1] < inf:
            draws = distances[key]
            distance = draws[LEAST] if draws[-1] < inf else inf
            each = replace(each, distance=distance, yardstick=yardstick_of(yardsticks[key]), draws=DRAWS)
        changed.append(each)
    return tuple(changed)


def yardstick_of(draws: Sequence[float]) -> float:
    """The yardstick from many draws of PyTorch, in ascending order."""
    low, high = draws[LEAST], draws[-1 - LEAST]
    return high if high > APART * low else low


def _either_half(value: np.ndarray, random: np.random.Generator, dtype: str) -> np.ndarray:
    """Round each number randomly to one of its two neighbours in this type, unbiased; as float32."""
    import ml_dtypes  # noqa: F401 - gives numpy the name bfloat16

    near = value.astype(dtype)
    wide = near.astype(np.float32)
    beyond = np.nextafter(near, np.where(value > wide, np.inf, -np.inf).astype(dtype))
    gap = np.abs(beyond.astype(np.float32) - wide)
    share = np.divide(
        np.abs(value - wide), gap, where=np.isfinite(gap) & (gap > 0), out=np.zeros(value.shape, np.float32)
    )
    chosen: np.ndarray = np.where(random.random(value.shape) < share, beyond.astype(np.float32), wide)
    return chosen
