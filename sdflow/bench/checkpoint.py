"""The PyTorch modules that a built pipeline came from, by its manifest: the same checkpoint, the LoRAs merged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sdflow.disk.file_stamp import Stamp, check_stamps, file_stamp
from sdflow.errors import UsageError
from sdflow.families.shared.base import Family
from sdflow.manifest import MANIFEST_FILE, REFINER, MergedLora, read_manifest
from sdflow.runtime.files.folder import every_artifact, folder_family, refiner_of
from sdflow.sources import (
    PlainDigests,
    find_lora,
    load_module,
    lora_delta,
    lora_digest,
    lora_submodels,
    read_lora,
    reopen_checkpoint,
)

if TYPE_CHECKING:
    import torch


def every_torch_module(folder: Path, read: list[Stamp] | None = None) -> dict[str, torch.nn.Module]:
    """As `torch_modules`, and of its refiner, where it has one, `refiner/COMPONENT`; what is equal is one module."""
    modules, refiner = torch_modules(folder, read), refiner_of(folder)
    if refiner is None:
        return modules
    artifacts, family = every_artifact(folder), folder_family(refiner)
    found = torch_modules(refiner, read)
    for name in family.drawing:
        component = family.part(name).component
        if component in modules and artifacts[f"{REFINER}/{name}"] == artifacts.get(name):
            found[component] = modules[component]
    return modules | {f"{REFINER}/{component}": module for component, module in found.items()}


def torch_modules(folder: Path, read: list[Stamp] | None = None) -> dict[str, torch.nn.Module]:
    """Component -> its module in float32 on the CPU, with the LoRAs of the pipeline merged.

    read: gets the stamps of the files. Weights may be read from them as long as the modules are in use (they are mapped).
    Raises UsageError when the manifest does not say what the pipeline was built from, or when that has changed since;
    CheckpointError when it cannot be read.
    """
    origin, where = read_manifest(folder).origin, str(folder / MANIFEST_FILE)
    checkpoint = reopen_checkpoint(origin, where, digests=PlainDigests())
    family = checkpoint.family
    wanted = (*family.drawing_of(checkpoint.submodels), *family.prompters(checkpoint.submodels))
    modules = {family.part(name).component: load_module(name, checkpoint.submodels[name].load) for name in wanted}
    stamps = checkpoint.stamps(wanted)
    for lora in origin.loras:
        stamps.append(_merge(lora, family, modules, where))
    if read is not None:
        read += stamps
    return modules


def _merge(lora: MergedLora, family: Family, modules: Mapping[str, torch.nn.Module], where: str) -> Stamp:
    """W + scale x delta in float32, in place. Returns the stamp of the file that was read."""
    import torch

    path = find_lora(lora.reference, lora.weight_name, download=False)
    stamp = file_stamp(path)  # before the digest
    if lora_digest(path, PlainDigests()) != lora.sha256:
        raise UsageError(
            f"the LoRA {lora.reference} is not the one that this pipeline was built with",
            where=where,
            remedy="Put back the file that it was built with, or run its workflow again.",
        )
    for submodel in lora_submodels(path):
        state = modules[family.part(submodel).component].state_dict()
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        for key, layer in read_lora(path, {submodel: shapes}, family.name)[submodel].items():
            state[key] += torch.from_numpy(lora_delta(layer, shapes[key], lora.scale))
    check_stamps([stamp], "its digest was taken")
    return stamp
