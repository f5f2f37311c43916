"""The subject of a verification: a pipeline folder, with the checkpoint and LoRAs that its manifest names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from sdflow.build.step import LoraFile
from sdflow.config.workflow import ImageSpec
from sdflow.disk.file_stamp import Stamp, file_stamp
from sdflow.errors import UsageError
from sdflow.manifest import MANIFEST_FILE, read_manifest
from sdflow.runtime.files.folder import refiner_of
from sdflow.samples.prompts import SHAPES
from sdflow.sources import Checkpoint, FileDigests, find_lora, lora_digest, lora_submodels, reopen_checkpoint
from sdflow.store import Cache
from sdflow.targets import find_target


@dataclass(frozen=True)
class Subject:
    """An assembled pipeline folder, and the checkpoint and LoRAs that it must compute.

    image: its prompts, guidance and seed define the trajectory. allow_fallback: nodes may run on another provider.
    refiner: the pipeline's refiner.
    """

    name: str
    target: str
    folder: Path
    checkpoint: Checkpoint
    loras: Sequence[LoraFile] = ()
    image: ImageSpec = field(default_factory=ImageSpec)
    allow_fallback: bool = False
    refiner: Subject | None = None

    @cached_property
    def bfloat16(self) -> list[str]:
        """The submodels of the folder whose weights are bfloat16."""
        return sorted(
            name for name, chain in read_manifest(self.folder).origin.chains.items() if chain.precision == "bfloat16"
        )

    @property
    def stamps(self) -> list[Stamp]:
        """Stamps of the PyTorch model's files, taken before their digests."""
        return [*self.checkpoint.stamps(), *(lora.stamp for lora in self.loras)]


def subject_of_folder(folder: Path, cache: Cache, *, target: str | None = None) -> Subject:
    """Like `subject_with`, with a cache's digests."""
    return subject_with(folder, cache.stat, target=target)


def subject_with(folder: Path, digests: FileDigests, *, target: str | None = None) -> Subject:
    """The subject that a pipeline folder's sdflow.json names.

    Raises UsageError if the folder is not an sdflow pipeline, or the checkpoint or a LoRA has changed.
    """
    origin = read_manifest(folder).origin
    where = str(folder / MANIFEST_FILE)
    found = find_target(target, "--target") if target else find_target(origin.target, where)
    checkpoint = reopen_checkpoint(origin, where, digests=digests)
    loras = []
    for lora in origin.loras:
        path = find_lora(lora.pinned, lora.weight_name, download=False)
        stamp = file_stamp(path)  # before the digest
        if lora_digest(path, digests) != lora.sha256:
            raise UsageError(
                f"the LoRA {path} differs from the one it was built with",
                where=where,
                remedy="Restore the original file, or run its workflow again.",
            )
        loras.append(LoraFile(lora.reference, path, lora.sha256, lora.scale, lora_submodels(path), stamp))
    inside = refiner_of(folder)
    refiner = None if inside is None else subject_with(inside, digests, target=target)
    return Subject(origin.name, found.name, folder, checkpoint, loras, own_image(str(origin.model)), refiner=refiner)


def own_image(model: str) -> ImageSpec:
    """The default image; the sample knows only words of its own captions."""
    if model != SHAPES:
        return ImageSpec()
    return ImageSpec(prompt="a large red circle on a blue background", guidance_scale=7.5)
