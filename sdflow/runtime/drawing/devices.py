"""Requirements for computing classifier-free guidance on two devices (`sdflow.runtime.denoiser.halves`)."""

from __future__ import annotations

from pathlib import Path

from sdflow.errors import UsageError
from sdflow.runtime.files.folder import TAKEN_APART, folder_configs, folder_family
from sdflow.targets import Target

MOST = 2
"""Maximum number of devices: guidance has two halves, with the prompts and with the negative prompts."""

_ANY_SCALE = 1e3
"""A guidance scale at which every model that supports guidance applies it."""


def require_devices(count: int, folder: Path, target: Target, *, low_memory: bool, where: str = "devices") -> None:
    """Raise UsageError if a pipeline cannot run on this many devices. where: the setting's name, for messages."""
    if count == 1:
        return
    if count != MOST:
        raise UsageError(
            f"{count} devices were requested, but a pipeline runs on at most {MOST}", where=where, remedy="Use 1 or 2."
        )
    if target.name not in TAKEN_APART:
        raise UsageError(
            f"the target {target.name} supports only one device",
            where=where,
            remedy="Use the target cuda, or one device.",
        )
    if low_memory:
        raise UsageError(
            "low_memory loads one submodel at a time, on one device",
            where=where,
            remedy="Remove low_memory: both devices hold the denoiser's weights. To save memory, use `keep` fit.",
        )
    family, configs = folder_family(folder), folder_configs(folder)
    if not family.guided(configs, _ANY_SCALE):
        raise UsageError(
            "this model takes no negative prompt, so there is nothing to compute on a second device",
            where=where,
            remedy="Use one device.",
        )
    if family.nets(configs):
        raise UsageError(
            "the pipeline has ControlNets, which are not supported on two devices",
            where=where,
            remedy="Use one device, or a pipeline without ControlNets.",
        )


def require_guidance(folder: Path, scale: float, where: str) -> None:
    """Raise UsageError if guidance is off at this scale. where: the setting's name, for messages."""
    if not folder_family(folder).guided(folder_configs(folder), scale):
        raise UsageError(
            "guidance is off, so there is nothing to compute on a second device",
            where=where,
            remedy="Use a guidance scale above 1, or one device.",
        )
