"""A scheduler as a small table, so that the loop needs no scheduler.

The latents before each run of the denoiser, and after the last one, are linear combinations of the initial noise, the
noises that the scheduler draws, and the denoiser's outputs so far (`sdflow.runtime.denoiser.schedule`). The table holds
the coefficients. It is computed by running diffusers' own scheduler on unit vectors; a nonlinear one is rejected.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdflow.disk.atomic_write import write_whole
from sdflow.errors import UsageError, os_errors_as
from sdflow.families.shared.base import Family
from sdflow.families.shared.sampler_names import known_scheduler
from sdflow.runtime.denoiser.schedule import named_scheduler, trace
from sdflow.runtime.denoiser.scheduler_walk import IMAGE

if TYPE_CHECKING:
    import numpy as np

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Coefficients:
    """A scheduler's steps as coefficients.

    timesteps: one per run of the denoiser, float32 (runs,). table: float32 (runs + 1, 1 + draws + runs): one row per
    run for its input, and one for the result; columns are the first noise, each noise that the scheduler draws, and
    each output of the denoiser. scheduler, steps, eta: its origin.
    """

    scheduler: str
    steps: int
    eta: float
    draws: int
    timesteps: np.ndarray
    table: np.ndarray

    def to_json(self) -> dict[str, Any]:
        """The table as JSON, with lists."""
        return {
            "scheduler": self.scheduler,
            "steps": self.steps,
            "eta": self.eta,
            "draws": self.draws,
            "timesteps": self.timesteps.tolist(),
            "coefficients": self.table.tolist(),
        }

    def write(self, path: Path) -> None:
        """Write the table as a JSON file, atomically."""
        content = {"format_version": FORMAT_VERSION, **self.to_json()}
        with os_errors_as("cannot be written", path):
            write_whole(path, (json.dumps(content) + "\n").encode())


def parse_schedule(text: str) -> tuple[str, int | None]:
    """Parse `NAME` or `NAME,STEPS`. Raises UsageError for an unknown name or invalid steps."""
    name, comma, steps = text.partition(",")
    name = known_scheduler(name, "--schedule")
    if not comma:
        return name, None
    if not steps.isascii() or not steps.isdigit() or not 0 < int(steps) <= 1000:
        raise UsageError(
            f"the steps are {steps!r:.40}", where="--schedule", remedy="Write a name and 1 to 1000 steps: ddim,50."
        )
    return name, int(steps)


def coefficients(
    family: Family,
    scheduler: Any,
    name: str | None,
    steps: int,
    eta: float,
    given: Mapping[str, Any],
    tokens: int | None = None,
) -> Coefficients:
    """The table of the pipeline's scheduler, or of the named one with its noise schedule. given: the scheduler's
    config. tokens: image tokens (`Latents.tokens`) of a fixed size; None: any size.

    Raises UsageError for a scheduler that is unknown, nonlinear, or cannot make this many steps, and without a fixed
    size for one whose steps depend on it.
    """
    import numpy as np

    if name is not None:
        scheduler = named_scheduler(name, given, family.noising)
    if tokens is None and family.noising.key(scheduler, 0) is not None:
        raise UsageError(
            f"the steps of {type(scheduler).__name__} depend on the size of the image",
            where="--one-file",
            remedy="Export for one size: --height and --width.",
        )
    found = trace(
        scheduler,
        steps,
        family.scheduler_config,
        eta=eta,
        spread=family.strength_spreads,
        noising=family.noising,
        tokens=tokens or 0,
    )
    table = np.delete(found.inputs.numpy(), IMAGE, axis=1)
    timesteps = found.timesteps.numpy().reshape(-1)
    return Coefficients(type(scheduler).__name__, steps, eta, found.draws, timesteps, table)
