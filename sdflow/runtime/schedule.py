"""What a scheduler does with the latents, as one matrix: a step on the device is one product, and nothing waits for it.

diffusers' schedulers are linear. The latents before any step are a sum of the first noise, the latents of the image to
start from, what the UNet gave so far and the noise that the scheduler draws on the way (the terms); the factors depend
on the schedule alone. `trace` runs diffusers' own scheduler on unit vectors, once, and keeps the factors, so that its
arithmetic, index searches and copies between host and device are out of the loop.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sdflow.errors import UsageError
from sdflow.families.approximation import Interval, Reuse
from sdflow.families.noising import DIFFUSION, Noising
from sdflow.families.schedulers import require_known

if TYPE_CHECKING:
    import torch

Span = tuple[float | None, float | None]
WHOLE: Span = (None, None)
NOISE, IMAGE, FIRST_DRAWN = 0, 1, 2
"""The order of the terms: the first noise, the image's latents, the noises that the scheduler draws, the outputs."""


@dataclass(frozen=True)
class Schedule:
    """The factors of the latents, one row per run of the UNet (R of them) and a last one for the result.

    numbers: the timesteps. timesteps: the same for the UNet, float32 (R, 1). inputs: what it is given, already scaled
    (`scale_model_input`), and the result, float32 (R + 1, terms). kept: the same for what an inpainting mask keeps. clean: after
    each run, the latents without the noise that the UNet says is in them, float32 (R, terms); where the scheduler does not say
    what the output means, the latents before the next run.
    draws: how many noises the scheduler draws. halves: columns per output, two with guidance. made: how many of them each run
    gives, the last ones; empty: all. reused: which runs take the deep features of one before; empty: none.
    """

    numbers: tuple[int, ...]
    timesteps: torch.Tensor
    inputs: torch.Tensor
    kept: torch.Tensor
    clean: torch.Tensor
    draws: int
    halves: int = 1
    made: tuple[int, ...] = ()
    reused: tuple[bool, ...] = ()

    @property
    def runs(self) -> int:
        """How often the UNet runs."""
        return len(self.numbers)

    def known(self, index: int) -> int:
        """How many terms are there before run `index`."""
        return FIRST_DRAWN + self.draws + self.halves * index

    def guided(self, scale: float, interval: Interval | None = None) -> Schedule:
        """With classifier-free guidance folded in: two columns per output, the unconditional half's first.

        unconditional + scale * (conditional - unconditional): https://arxiv.org/abs/2207.12598. interval: the runs that have
        it, None: all; of the others the conditional half alone is made, and counts in full.
        """
        import torch

        made = tuple(2 if interval is None or interval.holds(run, self.runs) else 1 for run in range(self.runs))
        weights = torch.tensor([[1 - scale, scale] if halves == 2 else [0.0, 1.0] for halves in made])

        def split(rows: torch.Tensor) -> torch.Tensor:
            outputs = rows[:, self.known(0) :, None] * weights
            return torch.cat([rows[:, : self.known(0)], outputs.flatten(1)], dim=1)

        tensors = {name: split(getattr(self, name)) for name in ("inputs", "kept", "clean")}
        return replace(self, **tensors, halves=2, made=() if interval is None else made)

    def reusing(self, reuse: Reuse) -> Schedule:
        """With runs that take the deep features of one before."""
        return replace(self, reused=reuse.reused(self.made or (self.halves,) * self.runs))

    def to(self, device: str) -> Schedule:
        """With its tensors on the device."""
        tensors = {name: getattr(self, name).to(device) for name in ("timesteps", "inputs", "kept", "clean")}
        return replace(self, **tensors)


def named_scheduler(name: str, config: Mapping[str, Any], noising: Noising) -> Any:
    """The scheduler of this name with the noise schedule of another one's config.

    Raises UsageError with the nearest known name for one that the family's noising does not have.
    """
    import diffusers

    require_known(name, schedulers=noising.schedulers)
    cls, options = noising.schedulers[name]
    return getattr(diffusers, cls).from_config(dict(config), **options)


MOST_STEPS = 10_000
"""Of an image. Models are trained with 1,000; the tables of more fill the memory."""


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
    import torch

    if not 0 < steps <= MOST_STEPS:
        raise UsageError(f"an image of {steps:,} steps", remedy=f"At most {MOST_STEPS:,} are drawn.")
    scheduler = _fresh(scheduler, fixed)
    spread = spread and "strength" in inspect.signature(scheduler.set_timesteps).parameters
    options = (steps, strength, from_image, inpaint, eta, spread, span, noising, tokens)
    with _refusals(scheduler, steps):
        schedule, doubled = _trace(scheduler, *options, unit=1.0), _trace(scheduler, *options, unit=2.0)
    if not torch.allclose(doubled.inputs, 2 * schedule.inputs, rtol=1e-4, atol=1e-6):
        raise UsageError(
            f"{type(scheduler).__name__} with these settings does not act linearly on the latents",
            remedy="Switch off what clips or thresholds in its config, or take another with --scheduler.",
        )
    return schedule


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


def _trace(
    scheduler: Any,
    steps: int,
    strength: float,
    from_image: bool,
    inpaint: bool,
    eta: float,
    spread: bool,
    span: Span,
    noising: Noising,
    tokens: int,
    unit: float,
) -> Schedule:
    import torch
    from torch.overrides import TorchFunctionMode

    if not 0 < strength <= 1:
        raise UsageError(f"strength is {strength}", remedy="It must be above 0 and at most 1.")
    scheduler = _fresh(scheduler, {})
    noising.set_timesteps(scheduler, steps, tokens, strength if spread else None)
    left = steps - (0 if spread else noising.skipped(steps, strength))
    if left == 0:
        raise UsageError(f"no step is left of {steps} at strength {strength}", remedy="Take more steps.")
    skipped = (steps - left) * scheduler.order
    begin, end = span
    if begin is not None:
        skipped = len(scheduler.timesteps) - _behind(scheduler, begin)
    timesteps = scheduler.timesteps[skipped:]
    if end is not None:
        timesteps = timesteps[: int((timesteps >= _cutoff(scheduler, end)).sum())]
    runs = len(timesteps)
    if runs == 0:
        raise UsageError(
            f"no step is left of {steps} between {begin or 0:g} and {1 if end is None else end:g} of the way",
            remedy="Take more steps.",
        )
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(skipped)

    most_draws = 2 * runs
    terms = FIRST_DRAWN + most_draws + runs
    # (term, 1 image, values, 1, 1): schedulers mind the number of axes.
    units = (torch.eye(terms, dtype=torch.float64) * unit).reshape(terms, 1, terms, 1, 1)
    noise, image, drawn, outputs = units[NOISE], units[IMAGE], iter(units[FIRST_DRAWN:]), units[-runs:]
    draws = 0

    class Draw(TorchFunctionMode):  # type: ignore[misc]
        """A scheduler's `torch.randn` gives the next unit vector."""

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal draws
            if function is not torch.randn:
                return function(*args, **(kwargs or {}))
            draws += 1
            return next(drawn)

    accepted = inspect.signature(scheduler.step).parameters
    step_options = {"eta": eta} if "eta" in accepted else {}
    latents = noising.noised(scheduler, image, noise, timesteps[:1]) if from_image else noising.first(scheduler, noise)
    if begin is not None:
        latents = image
    inputs, kept, clean = [], [], []
    known = latents
    with Draw():
        for index, timestep in enumerate(timesteps):
            inputs.append(noising.scaled(scheduler, latents, timestep))
            scale = inputs[-1].norm() / latents.norm()
            kept.append(known * scale)
            latents = scheduler.step(outputs[index], timestep, latents, **step_options).prev_sample
            clean.append(noising.clean(scheduler, timestep, inputs[-1], outputs[index], latents))
            if inpaint:
                known = (
                    image
                    if index + 1 == runs
                    else noising.noised(scheduler, image, noise, timesteps[index + 1 : index + 2])
                )
    if draws > most_draws:
        raise UsageError(f"{type(scheduler).__name__} draws more than two noises a step", remedy="Take another one.")

    def rows(vectors: list[torch.Tensor]) -> torch.Tensor:
        factors = torch.stack(vectors).reshape(len(vectors), terms)
        return torch.cat([factors[:, : FIRST_DRAWN + draws], factors[:, -runs:]], dim=1).to(torch.float32)

    numbers = tuple(int(timestep) for timestep in timesteps)
    return Schedule(
        numbers,
        timesteps.to(torch.float32)[:, None],
        rows([*inputs, latents]),
        rows([*kept, known]),
        rows(clean),
        draws,
    )


def _cutoff(scheduler: Any, place: float) -> int:
    """The timestep of a place on the way, as diffusers' pipelines round it."""
    steps: int = scheduler.config.num_train_timesteps
    return round(steps - place * steps)


def _behind(scheduler: Any, place: float) -> int:
    """How many timesteps lie behind it. A scheduler of second order has two a step, the first one: it is not cut in between."""
    count = int((scheduler.timesteps < _cutoff(scheduler, place)).sum())
    return count + 1 if scheduler.order == 2 and count % 2 == 0 else count


def _fresh(scheduler: Any, fixed: Mapping[str, Any]) -> Any:
    """A copy at its beginning, with what diffusers' pipelines of the family set in its config."""
    config = {**scheduler.config}
    # diffusers notes here which entries the config lacked, and from_config would ignore what is set for them below.
    config.pop("_use_default_values", None)
    config.update((name, value) for name, value in fixed.items() if name in config)
    return type(scheduler).from_config(config)
