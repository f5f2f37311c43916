"""Compare the folder's schedule, as the runtime uses it, with diffusers' own pipeline of the checkpoint, given the same
noise and denoiser outputs. Each sampler and step spacing of the other supported schedulers is tried, too; since nobody
chose them, their problems are notes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdflow.distance import relative_l2
from sdflow.errors import UsageError
from sdflow.families import FAMILIES
from sdflow.families.shared.base import Family
from sdflow.families.shared.noising import Noising
from sdflow.families.shared.sampler_names import of_each_kind
from sdflow.families.shared.schedulers import make_scheduler
from sdflow.runtime.denoiser.schedule import named_scheduler, trace
from sdflow.runtime.files.folder import SCHEDULER
from sdflow.sources.load import load_companion
from sdflow.verify.finding import Finding
from sdflow.verify.folder.compare import CHECK, REBUILD
from sdflow.verify.folder.source import Source

if TYPE_CHECKING:
    import torch

STEPS = (4, 21)
SHAPE = (1, 2, 3, 5)
TOKENS = 1024
LARGEST = 1e-5
"""Limit for the distance (relative L2) of the denoiser's inputs. The factors are kept in float32."""


def compare_schedules(folder: Path, source: Source) -> list[Finding]:
    """An error if the folder's scheduler gives other timesteps or latents; a note about other schedulers that do, or
    that fail when selected. Raises CheckpointError if one cannot be loaded."""
    family = FAMILIES[source.family]
    companion = family.companions[SCHEDULER]
    ours = load_companion(companion, folder / SCHEDULER, str(folder / SCHEDULER))
    theirs = {
        name: load_companion(family.companions[name], Path(place), place) for name, place in source.companions.items()
    }

    def apart(name: str | None) -> str | None:
        try:
            loaded = ours if name is None else named_scheduler(name, ours.config, family.noising)
            wanted = _of_diffusers([each for each in (source.scheduler, name) if each], family, source, theirs)
        except UsageError as error:
            return error.what if name is None else None  # another scheduler that both reject is equal
        return next((why for steps in STEPS if (why := _apart(loaded, wanted, steps, family))), None)

    if why := apart(None):
        what = f"the schedule is not the checkpoint's: {why}"
        return [Finding("", CHECK, "error", f"{SCHEDULER}/{companion.file}", what, REBUILD)]
    others = {name: why for name in of_each_kind(family.noising.schedulers) if (why := apart(name))}
    if not others:
        return []
    what = f"{', '.join(others)} differ from diffusers with this checkpoint: {next(iter(others.values()))}"
    remedy = "It matters only if you select such a scheduler (--scheduler)."
    return [Finding("", CHECK, "note", f"{SCHEDULER}/{companion.file}", what, remedy, len(others))]


def _of_diffusers(names: Sequence[str], family: Family, source: Source, companions: Mapping[str, Any]) -> Any:
    """The scheduler of diffusers' own pipeline of the checkpoint, which sets some entries of its config. names:
    schedulers that replace the checkpoint's, one after another; the last is the argument of `from_pretrained(...,
    scheduler=...)`."""
    own = companions[SCHEDULER]
    for name in names:
        own = make_scheduler(name, own.config)
    options = {name: source.index.get(name, default) for name, default in family.options.items()}
    return family.torch_pipeline({}, {**companions, SCHEDULER: own}, options).scheduler


def _apart(ours: Any, theirs: Any, steps: int, family: Family) -> str | None:
    """The difference at this number of steps, in words. A schedule that both reject is equal."""
    import torch

    try:
        family.noising.as_diffusers(theirs, steps, TOKENS)
    except ValueError:
        wanted = None
    else:
        wanted = theirs.timesteps
    try:
        schedule = trace(ours, steps, family.scheduler_config, noising=family.noising, tokens=TOKENS)
    except UsageError as error:
        return None if wanted is None else error.what
    if wanted is None:
        return f"at {steps} steps it has a schedule, but the checkpoint's rejects them"
    timesteps = schedule.timesteps[:, 0].to(torch.float64)
    wanted = wanted.to(torch.float64)
    if timesteps.shape != wanted.shape:
        return f"there are {len(timesteps)} timesteps of {steps} steps, expected {len(wanted)}"
    for index, (have, want) in enumerate(zip(timesteps.tolist(), wanted.tolist(), strict=True)):
        if abs(have - want) > 1e-3:
            return f"timestep {index + 1} of {steps} steps is {have:g}, expected {want:g}"
    noise, outputs = _draw(0), [_draw(1 + index) for index in range(schedule.runs)]
    expected, noises = _by_diffusers(theirs, family.noising, noise, outputs)
    if len(noises) != schedule.draws:
        return f"at {steps} steps it draws {schedule.draws} noises, expected {len(noises)}"
    terms = torch.stack([noise, torch.zeros(SHAPE, dtype=torch.float64), *noises, *outputs])
    rows = schedule.inputs.to(torch.float64)
    mixed = torch.einsum("rt,t...->r...", rows, terms)
    for index, (have, want) in enumerate(zip(mixed, expected, strict=True)):
        if (distance := relative_l2(have.numpy(), want.numpy())) > LARGEST:
            what = "the result" if index == schedule.runs else f"the denoiser's input in run {index + 1}"
            return f"at {steps} steps {what} is {distance:.2g} away (relative L2)"
    return None


def _by_diffusers(
    scheduler: Any, noising: Noising, noise: torch.Tensor, outputs: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The denoiser's input in each run, then the result; and the noises that the scheduler drew."""
    import torch
    from torch.overrides import TorchFunctionMode

    drawn: list[torch.Tensor] = []

    class Recorded(TorchFunctionMode):  # type: ignore[misc]
        """Records noise: some schedulers draw in float32 whatever their input, so drawing again would differ."""

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            value = function(*args, **(kwargs or {}))
            if function is torch.randn:
                drawn.append(value.to(torch.float64))
            return value

    known = {"generator": torch.Generator().manual_seed(0), "eta": 0.0}
    accepted = inspect.signature(scheduler.step).parameters
    options = {name: value for name, value in known.items() if name in accepted}
    inputs, latents = [], noising.first(scheduler, noise)
    recorded: Any = Recorded() if "generator" in accepted else nullcontext()  # no other scheduler draws noise
    with recorded:
        for timestep, output in zip(scheduler.timesteps, outputs, strict=True):
            inputs.append(noising.scaled(scheduler, latents, timestep))
            latents = scheduler.step(output, timestep, latents, **options).prev_sample
    return [*inputs, torch.as_tensor(latents)], drawn


def _draw(seed: int) -> torch.Tensor:
    import torch

    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
