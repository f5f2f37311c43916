"""Decide whether a pipeline's weights fit on its device together or take turns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from sdflow.artifact import WEIGHTS_FILE
from sdflow.errors import UsageError
from sdflow.runtime.files.folder import folder_configs, folder_family
from sdflow.runtime.memory_limit import drawing_bytes
from sdflow.runtime.sessions.residency import HEADROOM, Keep, Residency, residency
from sdflow.targets import Target
from sdflow.units import spell_bytes


def weight_bytes(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """Return the size of each submodel's data file, if it has one."""
    files = {name: folder / name / WEIGHTS_FILE for name in names}
    return {name: file.stat().st_size for name, file in files.items() if file.exists()}


def moving_weights(
    folder: Path,
    names: Sequence[str],
    target: Target,
    keep: Keep,
    device_memory: int | None,
    beside: int = 0,
    device: str = "cuda",
) -> Residency | None:
    """Return the Residency in which these submodels' weights take turns, or None if all stay: on the CPU, with keep
    "all", or if they fit together with the working memory of one image of the model's own size with guidance.

    device_memory: limit in bytes for this process, without CUDA's context; None: all free memory. beside: bytes of
    further weights on the device. device: a GPU, in torch's notation. Raises UsageError if a single submodel's weights
    exceed the limit.
    """
    if target.name != "cuda" or keep == "all":
        return None
    configs, family = folder_configs(folder), folder_family(folder)
    sizes = weight_bytes(folder, names)
    working = drawing_bytes(family, configs, family.latents(configs).size, device="cuda")
    places = residency(device, device_memory)
    room = places.room()
    fits = not sizes or sum(sizes.values()) + beside + working + HEADROOM <= room
    if fits:
        return None if device_memory is None else places
    largest = max(sizes, key=sizes.__getitem__)
    if sizes[largest] + HEADROOM > room:
        raise UsageError(
            f"its {largest.replace('_', ' ')} has {spell_bytes(sizes[largest])} of weights, but only {spell_bytes(room)} "
            f"of the device {device} are available, including {spell_bytes(HEADROOM)} of working memory",
            where=str(folder),
            remedy="Quantize it (QuantizeFp8), or use the CPU: --target cpu.",
        )
    return places
