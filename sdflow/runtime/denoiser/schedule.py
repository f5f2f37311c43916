"""What a scheduler does with the latents, as one matrix: a step on the device is one product, and nothing waits for it.

diffusers' schedulers are linear. The latents before any step are a sum of the first noise, the latents of the image to
start from, what the UNet gave so far and the noise that the scheduler draws on the way (the terms); the factors depend
on the schedule alone. `trace` runs diffusers' own scheduler on unit vectors, once, and keeps the factors, so that its
arithmetic, index searches and copies between host and device are out of the loop. A unit vector lives as long as the scheduler
remembers it; what is kept of a row ends with the last term that is there.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sdflow.errors import UsageError
from sdflow.families.shared.approximation import Interval, Reuse
from sdflow.families.shared.guidance_limits import UNLIMITED, GuidanceLimits
from sdflow.families.shared.noising import DIFFUSION, Noising
from sdflow.families.shared.sampler_names import known_scheduler
from sdflow.families.shared.schedulers import make_scheduler
from sdflow.families.shared.skipped_layers import SkippedLayers
from sdflow.machine.memory import available_bytes
from sdflow.runtime.denoiser.scheduler_walk import FIRST_DRAWN, Span, Walk, fresh
from sdflow.units import spell_bytes

if TYPE_CHECKING:
    import torch

WHOLE: Span = (None, None)


TENSORS = ("timesteps", "inputs", "kept", "clean", "weights")
"""Of a schedule."""


@dataclass(frozen=True)
class Schedule:
    """The factors of the latents, one row per run of the UNet (R of them) and a last one for the result.

    numbers: the timesteps. timesteps: the same for the UNet, float32 (R, 1). inputs: what it is given, already scaled
    (`scale_model_input`), and the result, float32 (R + 1, terms). kept: the same for what an inpainting mask keeps, which is
    noise and image alone, float32 (R + 1, FIRST_DRAWN). clean: what `clean_row` is made of, float32 (R, 3): factors of a run's
    row of inputs, of its output, and of the next row. weights: how much each column of an output counts, float32 (R, halves).
    draws: how many noises the scheduler draws. halves: columns per output, two with guidance, three with skip-layer guidance.
    made: how many of them each run gives, the last ones; empty: all. reused: which runs take the deep features of one before;
    empty: none. norms: how large the norm of a run's guided output may be, as a multiple of the conditional half's; 0 or
    empty: any.
    """

    numbers: tuple[int, ...]
    timesteps: torch.Tensor
    inputs: torch.Tensor
    kept: torch.Tensor
    clean: torch.Tensor
    weights: torch.Tensor
    draws: int
    halves: int = 1
    made: tuple[int, ...] = ()
    reused: tuple[bool, ...] = ()
    norms: tuple[float, ...] = ()

    @property
    def runs(self) -> int:
        """How often the UNet runs."""
        return len(self.numbers)

    def known(self, index: int) -> int:
        """How many terms are there before run `index`."""
        return FIRST_DRAWN + self.draws + self.halves * index

    def guided(
        self,
        scale: float,
        interval: Interval | None = None,
        skipped: SkippedLayers | None = None,
        limits: GuidanceLimits = UNLIMITED,
    ) -> Schedule:
        """With classifier-free guidance folded in: two columns per output, the unconditional half's first.

        unconditional + scale * (conditional - unconditional): https://arxiv.org/abs/2207.12598. interval: the runs that have
        it, None: all; of the others the conditional half alone is made, and counts in full. skipped: skip-layer guidance, with
        a third column, the first, for what is made without the layers. limits: runs without guidance then make both halves, of
        which the conditional one counts in full.
        """
        import torch

        made = [2 if interval is None or interval.holds(run, self.runs) else 1 for run in range(self.runs)]
        if skipped is not None:
            made = [3 if count == 2 and skipped.holds(run, self.runs) else count for run, count in enumerate(made)]
        more = 0.0 if skipped is None else skipped.scale
        rows = {1: [0.0, 0.0, 1.0], 2: [0.0, 1 - scale, scale], 3: [-more, 1 - scale, scale + more]}
        halves = 2 if skipped is None else 3
        weighed = limits.guided(self.timesteps)
        weights = torch.tensor([rows[n if on else 1][-halves:] for n, on in zip(made, weighed, strict=True)])
        norms = [limits.normalization if n > 1 and on else 0.0 for n, on in zip(made, weighed, strict=True)]

        def split(rows: torch.Tensor) -> torch.Tensor:
            outputs = rows[:, self.known(0) :, None] * weights
            return torch.cat([rows[:, : self.known(0)], outputs.flatten(1)], dim=1)

        return replace(
            self,
            inputs=split(self.inputs),
            weights=weights,
            halves=halves,
            made=() if interval is None and skipped is None else tuple(made),
            norms=tuple(norms) if limits.normalization else (),
        )

    def clean_row(self, index: int) -> torch.Tensor:
        """The factors of the latents behind a run without the noise that the UNet says is in them, of the terms that are known
        then; where the scheduler does not say what the output means, those of the latents before the next run."""
        known, there = self.known(index), self.known(index + 1)
        given, output, after = self.clean[index]
        row = given * self.inputs[index, :there] + after * self.inputs[index + 1, :there]
        row[known:] += output * self.weights[index]
        return row

    def reusing(self, reuse: Reuse) -> Schedule:
        """With runs that take the deep features of one before."""
        return replace(self, reused=reuse.reused(self.made or (self.halves,) * self.runs))

    def to(self, device: str) -> Schedule:
        """With its tensors on the device."""
        tensors = {name: getattr(self, name).to(device) for name in TENSORS}
        return replace(self, **tensors)


def named_scheduler(name: str, config: Mapping[str, Any], noising: Noising) -> Any:
    """The scheduler of this name, as any program spells it, with the noise schedule of another one's config.

    Raises UsageError with the nearest known names for one that the family's noising does not have, and where a package is
    missing that it needs.
    """
    return make_scheduler(known_scheduler(name, schedulers=noising.schedulers), config)


def table_bytes(steps: int, order: int = 1) -> int:
    """What the factors of so many steps take, at most, while they are made: with a noise for each run of the denoiser, and with
    guidance. order: runs a step."""
    columns = FIRST_DRAWN + 3 * steps * order
    return 3 * 4 * (steps * order + 1) * columns  # as rows, as a table, with the columns of guidance


def require_steps(steps: int, order: int = 1) -> None:
    """Raises UsageError for a number of steps that is none, or whose factors do not fit in the memory that is free. order: runs
    of the denoiser a step."""
    if steps <= 0:
        raise UsageError(f"an image of {steps:,} steps", remedy="Take 1 or more.")
    needed, free = table_bytes(steps, order), available_bytes()
    if needed > free:
        raise UsageError(
            f"an image of {steps:,} steps: their table would take {spell_bytes(needed)}, and {spell_bytes(free)} are free",
            remedy=f"Take fewer; models are trained with 1,000, which take {spell_bytes(table_bytes(1000, order))}.",
        )


def trace(
    scheduler: Any,
    steps: int,
    fixed: Mapping[str, Any] = MappingProxyType({}),
    *,
    strength: float = 1.0,
    from_image: bool = False,
    inpaint: bool = False,
    eta: float = 0.0,
    spread: bool = False,
    span: Span = WHOLE,
    noising: Noising = DIFFUSION,
    tokens: int = 0,
) -> Schedule:
    """The factors of a diffusers scheduler; the scheduler itself is left as it is.

    fixed: what the pipeline sets in the scheduler's config. strength: the part of the steps that is taken, the last one.
    from_image: begin with the image's latents plus noise, not with noise alone. inpaint: compute `kept`. eta: DDIM's.
    spread: all steps are taken, in that part, where the scheduler can. span: from where to where of the way from noise to
    image, each a part of 1, as in diffusers' `denoising_start` and `denoising_end`; None: to the end. From a place on the way,
    the latents begin with those given as the image's, and there is no strength. noising: the family's. tokens: of the
    image, where the schedule depends on its size.
    Raises UsageError for settings that the scheduler refuses, and for one that is not linear.
    """

    require_steps(steps, scheduler.order)
    scheduler = fresh(scheduler, fixed)
    spread = spread and "strength" in inspect.signature(scheduler.set_timesteps).parameters
    options = (steps, strength, from_image, inpaint, eta, spread, span, noising, tokens)
    with _refusals(scheduler, steps):
        return _traced(scheduler, steps, Walk(scheduler, *options, unit=1.0), Walk(scheduler, *options, unit=2.0))


@contextmanager
def _refusals(scheduler: Any, steps: int) -> Iterator[None]:
    """diffusers raises what comes for entries of a config that it did not look at when it read them."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RuntimeError, ArithmeticError) as error:
        raise UsageError(
            f"{type(scheduler).__name__} cannot make {steps} steps: {error}",
            remedy="Take another number of steps, correct the scheduler's config, or take another one: --scheduler.",
        ) from error


def _traced(scheduler: Any, steps: int, walk: Walk, doubled: Walk) -> Schedule:
    """doubled: the same with unit vectors of length 2, to see whether the scheduler acts linearly."""
    import torch

    rows: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    kept, clean, scales = [], [], []
    for one, two in zip(walk.runs(), doubled.runs(), strict=True):
        if not torch.allclose(two.given, 2 * one.given, rtol=1e-4, atol=1e-6):
            raise UsageError(
                f"{type(scheduler).__name__} with these settings does not act linearly on the latents",
                remedy="Switch off what clips or thresholds in its config, or take another with --scheduler.",
            )
        drawn, outputs = one.given[FIRST_DRAWN : walk.first_output], one.given[walk.first_output :]
        rows.append((one.given[:FIRST_DRAWN].float(), drawn[: walk.draws].float(), outputs[: len(rows)].float()))
        kept.append(one.known[:FIRST_DRAWN].float())
        clean.append(one.clean)
        scales.append(one.scale)
    inputs = torch.zeros(len(rows), FIRST_DRAWN + walk.draws + len(rows) - 1)
    for row, (begin, drawn, outputs) in zip(inputs, rows, strict=True):
        row[:FIRST_DRAWN] = begin
        row[FIRST_DRAWN : FIRST_DRAWN + len(drawn)] = drawn
        row[FIRST_DRAWN + walk.draws :][: len(outputs)] = outputs
    numbers = tuple(int(timestep) for timestep in walk.timesteps)
    factors = [
        (each.given, each.output, each.after / scale)
        for each, scale in zip(clean, scales[1:], strict=False)
        if each is not None
    ]
    return Schedule(
        numbers,
        walk.timesteps.to(torch.float32)[:, None],
        inputs,
        torch.stack(kept),
        torch.tensor(factors),
        torch.ones(len(numbers), 1),
        walk.draws,
    )
