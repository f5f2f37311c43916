"""A scheduler as one matrix: each step is one product on the device, without synchronization.

diffusers' schedulers are linear. The latents before any step are a linear combination of the first noise, the start
image's latents, the UNet's outputs so far and the noises that the scheduler draws (the terms); the factors depend only
on the schedule. `trace` runs diffusers' own scheduler once on unit vectors and records the factors, which keeps its
arithmetic, index searches and host-device copies out of the loop. Unit vectors live only as long as the scheduler
remembers them; each row is stored up to its last existing term.
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
"""Tensor fields of a schedule."""


@dataclass(frozen=True)
class Schedule:
    """Factors of the latents: one row per run of the UNet (R runs), and a last one for the result.

    numbers: timesteps. timesteps: the same as UNet input, float32 (R, 1). inputs: factors of the UNet's scaled input
    (`scale_model_input`), and of the result, float32 (R + 1, terms). kept: factors of the area that an inpainting mask
    keeps, which consists of noise and image only, float32 (R + 1, FIRST_DRAWN). clean: coefficients for `clean_row`,
    float32 (R, 3): of a run's row of inputs, of its output, and of the next row. weights: factor of each column of an
    output, float32 (R, halves). draws: number of noises that the scheduler draws. halves: columns per output: two with
    guidance, three with skip-layer guidance. made: number of columns that each run computes, the last ones; empty: all.
    reused: runs that reuse earlier deep features; empty: none. norms: limit of the norm of a run's guided output, as a
    multiple of the conditional half's; 0 or empty: none.
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
        """Number of UNet runs."""
        return len(self.numbers)

    def known(self, index: int) -> int:
        """Return the number of terms that exist before run `index`."""
        return FIRST_DRAWN + self.draws + self.halves * index

    def guided(
        self,
        scale: float,
        interval: Interval | None = None,
        skipped: SkippedLayers | None = None,
        limits: GuidanceLimits = UNLIMITED,
    ) -> Schedule:
        """Fold in classifier-free guidance: two columns per output, the unconditional half first.

        unconditional + scale * (conditional - unconditional): https://arxiv.org/abs/2207.12598. interval: runs with
        guidance (None: all); other runs compute only the conditional half, with factor 1. skipped: skip-layer guidance,
        which adds a first column for the output with skipped layers. limits: runs without guidance by these limits
        compute both halves, of which the conditional one has factor 1.
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
        """Return factors (over the terms known after the run) of the latents without the noise that the UNet predicts
        in them; if the scheduler does not define what the output means, of the latents before the next run."""
        known, there = self.known(index), self.known(index + 1)
        given, output, after = self.clean[index]
        row = given * self.inputs[index, :there] + after * self.inputs[index + 1, :there]
        row[known:] += output * self.weights[index]
        return row

    def reusing(self, reuse: Reuse) -> Schedule:
        """Return a copy in which some runs reuse earlier deep features."""
        return replace(self, reused=reuse.reused(self.made or (self.halves,) * self.runs))

    def to(self, device: str) -> Schedule:
        """Return a copy with its tensors on the device."""
        tensors = {name: getattr(self, name).to(device) for name in TENSORS}
        return replace(self, **tensors)


def named_scheduler(name: str, config: Mapping[str, Any], noising: Noising) -> Any:
    """Create the scheduler with this name, in any program's spelling, with the noise schedule of another one's config.

    Raises UsageError if the family's noising does not support it (with the closest names) or a required package is
    missing.
    """
    return make_scheduler(known_scheduler(name, schedulers=noising.schedulers), config)


def table_bytes(steps: int, order: int = 1) -> int:
    """Return the peak memory of a schedule's factors while they are computed, with one noise per denoiser run and
    guidance.
    order: runs per step."""
    columns = FIRST_DRAWN + 3 * steps * order
    return 3 * 4 * (steps * order + 1) * columns  # rows, table, and table with guidance columns


def require_steps(steps: int, order: int = 1) -> None:
    """Raise UsageError if the number of steps is not positive, or its factors do not fit in free memory. order:
    denoiser runs per step."""
    if steps <= 0:
        raise UsageError(f"{steps:,} steps were requested", remedy="Use 1 or more.")
    needed, free = table_bytes(steps, order), available_bytes()
    if needed > free:
        raise UsageError(
            f"{steps:,} steps need a table of {spell_bytes(needed)}, but only {spell_bytes(free)} are free",
            remedy=f"Use fewer; models are trained with 1,000, which take {spell_bytes(table_bytes(1000, order))}.",
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
    """Return the factors of a diffusers scheduler, which is not modified.

    fixed: overrides of the scheduler's config by the pipeline. strength: fraction of the steps to run, the last ones.
    from_image: start from the image's latents plus noise instead of noise alone. inpaint: compute `kept`. eta: for
        DDIM.
    spread: spread all steps over that fraction, if the scheduler supports it. span: start and end on the way from noise
    to image as fractions, like diffusers' `denoising_start` and `denoising_end`; with a start, the latents start as the
    given image's, and strength is ignored. noising: the family's. tokens: of the image, if the schedule depends on its
    size. Raises UsageError for settings that the scheduler rejects, and for nonlinear schedulers.
    """

    require_steps(steps, scheduler.order)
    scheduler = fresh(scheduler, fixed)
    spread = spread and "strength" in inspect.signature(scheduler.set_timesteps).parameters
    options = (steps, strength, from_image, inpaint, eta, spread, span, noising, tokens)
    with _refusals(scheduler, steps):
        return _traced(scheduler, steps, Walk(scheduler, *options, unit=1.0), Walk(scheduler, *options, unit=2.0))


@contextmanager
def _refusals(scheduler: Any, steps: int) -> Iterator[None]:
    """Convert exceptions of diffusers, which validates some config entries only when they are used, to UsageError."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RuntimeError, ArithmeticError) as error:
        raise UsageError(
            f"{type(scheduler).__name__} cannot run {steps} steps: {error}",
            remedy="Change the number of steps or the scheduler's config, or use another --scheduler.",
        ) from error


def _traced(scheduler: Any, steps: int, walk: Walk, doubled: Walk) -> Schedule:
    """Record the factors of a walk. doubled: the same walk with unit vectors of length 2, to check linearity."""
    import torch

    rows: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    kept, clean, scales = [], [], []
    for one, two in zip(walk.runs(), doubled.runs(), strict=True):
        if not torch.allclose(two.given, 2 * one.given, rtol=1e-4, atol=1e-6):
            raise UsageError(
                f"{type(scheduler).__name__} is not linear in the latents with these settings",
                remedy="Disable clipping and thresholding in its config, or use another --scheduler.",
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
