"""Whether a pipeline's weights fit on its device together, or take turns there."""

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
    """Submodel -> the bytes of its data file, where it has one."""
    files = {name: folder / name / WEIGHTS_FILE for name in names}
    return {name: file.stat().st_size for name, file in files.items() if file.exists()}


def moving_weights(
    folder: Path, names: Sequence[str], target: Target, keep: Keep, device_memory: int | None, beside: int = 0
) -> Residency | None:
    """Where the weights of these submodels take turns; None where all stay: on the CPU, for "all", and where they fit together,
    with what drawing one image of the model's own size with guidance takes.

    device_memory: bytes that the process may take; None: all that is free. beside: bytes of weights that will lie there too.
    Raises UsageError where those of one submodel are more than that.
    """
    if target.name != "cuda" or keep == "all":
        return None
    configs, family = folder_configs(folder), folder_family(folder)
    sizes = weight_bytes(folder, names)
    working = drawing_bytes(family, configs, family.latents(configs).size, device="cuda")
    places = residency("cuda", device_memory)
    room = places.room()
    fits = not sizes or sum(sizes.values()) + beside + working + HEADROOM <= room
    if fits:
        return None if device_memory is None else places
    largest = max(sizes, key=sizes.__getitem__)
    if sizes[largest] + HEADROOM > room:
        raise UsageError(
            f"the weights of its {largest.replace('_', ' ')} are {spell_bytes(sizes[largest])}, and {spell_bytes(room)} of the "
            f"device can be taken, of which {spell_bytes(HEADROOM)} are to work in",
            where=str(folder),
            remedy="Quantize it when it is built (QuantizeFp8), or draw on the CPU: --target cpu.",
        )
    return places
