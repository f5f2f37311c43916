"""Step diffusers' own scheduler on unit vectors in place of latents, noises and UNet outputs.

Schedulers are linear in all of these (https://arxiv.org/abs/2010.02502 and successors). A vector has one entry per
term, and only vectors that the scheduler remembers exist: a walk of 10,000 steps takes megabytes.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from sdflow.errors import UsageError
from sdflow.families.shared.noising import Clean, Noising
from sdflow.families.shared.schedulers import from_config

if TYPE_CHECKING:
    import torch

Span = tuple[float | None, float | None]
NOISE, IMAGE, FIRST_DRAWN = 0, 1, 2
"""Order of the terms: first noise, image latents, noises that the scheduler draws, outputs."""

MOST_DRAWS = 2
"""Maximum number of noises that a scheduler may draw per step."""


class Row(NamedTuple):
    """State before a run, or after the last. given: the UNet's input, or the result, float64 (terms). known: the same
    for the area that an inpainting mask keeps. scale: the scheduler's input scaling. clean: of the run; None after the
    last."""

    given: torch.Tensor
    known: torch.Tensor
    scale: float
    clean: Clean | None


class Walk:
    """A walk through a schedule, on a fresh copy of a scheduler (`fresh`).

    For arguments see `sdflow.runtime.denoiser.schedule.trace`. unit: length of the vectors. timesteps: of the runs.
    draws: number of noises drawn so far. first_output: index of the first output among the terms, after the maximum
    number of noises. Raises UsageError if no steps are left.
    """

    def __init__(
        self,
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
    ) -> None:
        if not 0 < strength <= 1:
            raise UsageError(f"strength is {strength}", remedy="It must be above 0 and at most 1.")
        self._scheduler = scheduler = copy.deepcopy(scheduler)
        self._noising = noising
        noising.set_timesteps(scheduler, steps, tokens, strength if spread else None)
        left = steps - (0 if spread else noising.skipped(steps, strength))
        if left == 0:
            raise UsageError(f"no steps remain of {steps} at strength {strength}", remedy="Use more steps.")
        skipped = (steps - left) * scheduler.order
        begin, end = span
        if begin is not None:
            skipped = len(scheduler.timesteps) - _behind(scheduler, begin)
        self.timesteps = scheduler.timesteps[skipped:]
        if end is not None:
            self.timesteps = self.timesteps[: int((self.timesteps >= _cutoff(scheduler, end)).sum())]
        runs = len(self.timesteps)
        if runs == 0:
            raise UsageError(
                f"no steps remain of {steps} between {begin or 0:g} and {1 if end is None else end:g} of the denoising",
                remedy="Use more steps.",
            )
        if hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(skipped)
        self._begins_with_image, self._from_image, self._inpaint = begin is not None, from_image, inpaint
        self._eta, self._unit = eta, unit
        self.draws, self.first_output = 0, FIRST_DRAWN + MOST_DRAWS * runs
        self._terms = self.first_output + runs

    def runs(self) -> Iterator[Row]:
        """Yield a row for each run, in order, and one for the result."""
        scheduler, timesteps, inpaint = self._scheduler, self.timesteps, self._inpaint
        noise, image = self._vector(NOISE), self._vector(IMAGE)
        accepted = inspect.signature(scheduler.step).parameters
        options = {"eta": self._eta} if "eta" in accepted else {}
        noising = self._noising
        if self._from_image:  # noqa: SIM108
            latents = noising.noised(scheduler, image, noise, timesteps[:1])
        else:
            latents = noising.first(scheduler, noise)
        if self._begins_with_image:
            latents = image
        # The mode makes each of a step's operations several times slower. Schedulers that draw noise take a generator.
        draw: Any = self._drawing() if "generator" in accepted else nullcontext()
        known = latents
        for index, timestep in enumerate(timesteps):
            given = noising.scaled(scheduler, latents, timestep)
            scale = given.norm() / latents.norm()
            clean = noising.clean(scheduler, timestep)
            yield Row(given.reshape(-1), (known * scale).reshape(-1), float(scale), clean)
            output = self._vector(self.first_output + index)
            with draw:
                latents = scheduler.step(output, timestep, latents, **options).prev_sample
            if inpaint:
                last = index + 1 == len(timesteps)
                known = image if last else noising.noised(scheduler, image, noise, timesteps[index + 1 : index + 2])
        yield Row(latents.reshape(-1), known.reshape(-1), 1.0, None)

    def _vector(self, place: int) -> torch.Tensor:
        """Return a unit vector as (1 image, terms, 1, 1): schedulers expect four axes."""
        import torch

        made = torch.zeros(1, self._terms, 1, 1, dtype=torch.float64)
        made[0, place] = self._unit
        return made

    def _drawing(self) -> Any:
        """Return a context in which the scheduler's `torch.randn` returns the next unit vector."""
        import torch
        from torch.overrides import TorchFunctionMode

        walk = self

        class Draw(TorchFunctionMode):  # type: ignore[misc]
            def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if function is not torch.randn:
                    return function(*args, **(kwargs or {}))
                if FIRST_DRAWN + walk.draws == walk.first_output:
                    raise UsageError(
                        f"{type(walk._scheduler).__name__} draws more than {MOST_DRAWS} noises a step",
                        remedy="Use another scheduler.",
                    )
                walk.draws += 1
                return walk._vector(FIRST_DRAWN + walk.draws - 1)

        return Draw()


def _cutoff(scheduler: Any, place: float) -> int:
    """Return the timestep at a fraction of the way, rounded as in diffusers' pipelines."""
    steps: int = scheduler.config.num_train_timesteps
    return round(steps - place * steps)


def _behind(scheduler: Any, place: float) -> int:
    """Return how many timesteps lie after it. Second-order schedulers have two per step (one for the first), never
    separated."""
    count = int((scheduler.timesteps < _cutoff(scheduler, place)).sum())
    return count + 1 if scheduler.order == 2 and count % 2 == 0 else count


def fresh(scheduler: Any, fixed: Mapping[str, Any]) -> Any:
    """Return a fresh copy of the scheduler, with the family's config overrides as in diffusers' pipelines."""
    config = {**scheduler.config}
    # Entries that the config lacked: from_config would ignore overrides of them.
    config.pop("_use_default_values", None)
    config.update((name, value) for name, value in fixed.items() if name in config)
    return from_config(type(scheduler), config)
