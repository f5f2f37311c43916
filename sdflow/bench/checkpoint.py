"""Load the PyTorch modules of a built pipeline, by its manifest: those that it is verified against."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sdflow.disk.file_stamp import Stamp
from sdflow.manifest import REFINER
from sdflow.runtime.files.folder import every_artifact
from sdflow.sources import PlainDigests
from sdflow.verify.requests import torch_module
from sdflow.verify.subject import Subject, subject_with

if TYPE_CHECKING:
    import torch


def torch_modules(folder: Path, read: list[Stamp] | None = None) -> dict[str, torch.nn.Module]:
    """Component -> its module in float32 on the CPU, with the pipeline's LoRAs merged; the refiner's, if any, as
    `refiner/COMPONENT`. Equal components share a module.

    read: receives stamps of the files, whose weights may be mapped as long as the modules are in use.
    Raises UsageError if the manifest does not describe the build's inputs, or they have changed; CheckpointError if
    they cannot be read.
    """
    subject = subject_with(folder, PlainDigests())
    stamps, modules = subject.stamps, _modules_of(subject)
    if (refiner := subject.refiner) is not None:
        artifacts, family, found = every_artifact(folder), refiner.checkpoint.family, _modules_of(refiner)
        for name in family.drawing:
            component = family.part(name).component
            if component in modules and artifacts[f"{REFINER}/{name}"] == artifacts.get(name):
                found[component] = modules[component]
        modules |= {f"{REFINER}/{component}": module for component, module in found.items()}
        stamps += refiner.stamps
    if read is not None:
        read += stamps
    return modules


def _modules_of(subject: Subject) -> dict[str, torch.nn.Module]:
    checkpoint = subject.checkpoint
    family = checkpoint.family
    wanted = (*family.drawing_of(checkpoint.submodels), *family.prompters(checkpoint.submodels))
    return {family.part(name).component: torch_module(subject, name).network().module for name in wanted}
