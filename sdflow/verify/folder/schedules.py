"""The schedule of every scheduler that a pipeline may be given: the folder's, as the runtime draws with it, and what diffusers'
own pipeline of the checkpoint does with the same noise and the same outputs of the denoiser."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdflow.distance import relative_l2
from sdflow.errors import UsageError
from sdflow.families import FAMILIES
from sdflow.families.base import Family
from sdflow.families.schedulers import SCHEDULERS
from sdflow.runtime.folder import SCHEDULER
from sdflow.runtime.schedule import named_scheduler, trace
from sdflow.sources.load import load_companion
from sdflow.verify.finding import Finding
from sdflow.verify.folder.compare import CHECK, REBUILD
from sdflow.verify.folder.source import Source

if TYPE_CHECKING:
    import torch

STEPS = (4, 21)
SHAPE = (1, 4, 4, 4)
LARGEST = 1e-5
"""Distance (relative L2) of what is fed to the denoiser. The factors are kept in float32."""
OWN = "its own scheduler"


def compare_schedules(folder: Path, source: Source) -> list[Finding]:
    """Which schedulers give other timesteps or other latents. Raises CheckpointError for one that cannot be loaded."""
    family = FAMILIES[source.family]
    companion = family.companions[SCHEDULER]
    ours = load_companion(companion, folder / SCHEDULER, str(folder / SCHEDULER))
    theirs = _published(family, source)
    tried = [OWN, *SCHEDULERS]
    apart: dict[str, str] = {}
    for name in tried:
        loaded = ours if name == OWN else named_scheduler(name, ours.config)
        wanted = theirs if name == OWN else _named(name, theirs)
        for steps in STEPS:
            if why := _apart(loaded, wanted, steps, family.scheduler_config):
                apart.setdefault(name, f"with {name} at {steps} steps {why}")
    if not apart:
        return []
    what = f"{len(apart)} of {len(tried)} schedulers give another schedule than the checkpoint's: {next(iter(apart.values()))}"
    return [Finding("", CHECK, "error", f"{SCHEDULER}/{companion.file}", what, REBUILD, len(apart))]


def _published(family: Family, source: Source) -> Any:
    """The scheduler of diffusers' own pipeline of the checkpoint, which sets some entries of its config."""
    companions = {
        name: load_companion(family.companions[name], Path(place), place) for name, place in source.companions.items()
    }
    options = {name: source.index.get(name, default) for name, default in family.options.items()}
    scheduler = family.torch_pipeline({}, companions, options).scheduler
    return scheduler if source.scheduler is None else _named(source.scheduler, scheduler)


def _named(name: str, scheduler: Any) -> Any:
    """As diffusers' documentation exchanges a scheduler."""
    import diffusers

    cls, options = SCHEDULERS[name]
    return getattr(diffusers, cls).from_config(scheduler.config, **options)


def _apart(ours: Any, theirs: Any, steps: int, fixed: Mapping[str, Any]) -> str | None:
    """What is otherwise, in words. A schedule that both refuse is the same."""
    import torch

    try:
        theirs.set_timesteps(steps)
    except ValueError:
        wanted = None
    else:
        wanted = theirs.timesteps
    try:
        schedule = trace(ours, steps, fixed)
    except UsageError as error:
        return None if wanted is None else f"there is none: {error.what}"
    if wanted is None:
        return "there is one, and the checkpoint's refuses"
    timesteps = schedule.timesteps[:, 0].to(torch.float64)
    wanted = wanted.to(torch.float64)
    if timesteps.shape != wanted.shape:
        return f"there are {len(timesteps)} timesteps, where {len(wanted)} belong"
    for index, (have, want) in enumerate(zip(timesteps.tolist(), wanted.tolist(), strict=True)):
        if abs(have - want) > 1e-3:
            return f"timestep {index + 1} is {have:g}, where {want:g} belongs"
    fed = list(_by_diffusers(theirs))
    drawn = torch.Generator().manual_seed(0)
    values = [_draw(drawn)]
    outputs = [_draw(drawn) for _ in range(schedule.runs)]
    noises = [_draw(drawn) for _ in range(schedule.draws)]
    terms = torch.stack([values[0], torch.zeros(SHAPE, dtype=torch.float64), *noises, *outputs])
    rows = schedule.inputs.to(torch.float64)
    if rows.shape[1] != len(terms):
        return "it draws another number of noises"
    mixed = torch.einsum("rt,t...->r...", rows, terms)
    for index, (have, want) in enumerate(zip(mixed, fed, strict=True)):
        if (distance := relative_l2(have.numpy(), want.numpy())) > LARGEST:
            what = "the result" if index == schedule.runs else f"what the denoiser is fed in run {index + 1}"
            return f"{what} is {distance:.2g} away (relative L2)"
    return None


def _by_diffusers(scheduler: Any) -> Iterator[torch.Tensor]:
    """What the denoiser is fed in each run, and the result; with noise and outputs from a seed."""
    import torch

    drawn = torch.Generator().manual_seed(0)
    noise = _draw(drawn)
    outputs = [_draw(drawn) for _ in scheduler.timesteps]
    known = {"generator": drawn, "eta": 0.0}
    accepted = inspect.signature(scheduler.step).parameters
    options = {name: value for name, value in known.items() if name in accepted}
    latents = noise * scheduler.init_noise_sigma
    for timestep, output in zip(scheduler.timesteps, outputs, strict=True):
        yield scheduler.scale_model_input(latents, timestep)
        latents = scheduler.step(output, timestep, latents, **options).prev_sample
    yield torch.as_tensor(latents)


def _draw(generator: torch.Generator) -> torch.Tensor:
    import torch

    return torch.randn(SHAPE, generator=generator, dtype=torch.float64)
