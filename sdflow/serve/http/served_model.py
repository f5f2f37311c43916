"""Metadata of a pipeline folder, read without loading the pipeline: for `/v1/models` and to check requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sdflow.errors import UsageError
from sdflow.families.shared.approximation import Approximation
from sdflow.families.shared.defaults import Defaults, Task
from sdflow.families.shared.image_prompts import adapter_count
from sdflow.families.shared.latents import Latents
from sdflow.families.shared.sampler_names import available
from sdflow.families.shared.schedulers import SchedulerRow
from sdflow.manifest import NOT_SAID, Manifest, read_manifest
from sdflow.runtime.drawing.references import most_references
from sdflow.runtime.files.folder import (
    folder_defaults,
    folder_family,
    folder_latents,
    folder_task,
    onnx_submodels,
    refiner_of,
    submodel_config,
)
from sdflow.runtime.files.soundness import require_sound_pipeline


@dataclass(frozen=True)
class ServedModel:
    """A served pipeline."""

    name: str
    folder: Path
    manifest: Manifest
    latents: Latents
    defaults: Mapping[Task, Defaults]
    task: Task
    title: str
    arguments: tuple[str, ...]  # beyond the common settings, of its family and its refiner's
    from_images: bool
    checker: bool  # whether it has a safety checker
    created: int  # build time in seconds since 1970
    nets: tuple[str, ...] = ()  # ControlNets by name
    adapters: int = 0  # number of IP-Adapters
    schedulers: Mapping[str, SchedulerRow] = field(default_factory=dict)
    references: int = 0  # maximum number of reference images

    @property
    def verified(self) -> str | None:
        """The level at which it was verified when it was built; None if it was not or this is unknown."""
        said = self.manifest.origin.verified
        return None if said == NOT_SAID else said

    @property
    def left_aside(self) -> Approximation:
        """Approximations set by the workflow, which the server ignores: shared runs execute the whole model."""
        return Approximation.chosen(self.manifest.origin.said, None, None)

    @property
    def verdict(self) -> str:
        """Verification status as text, with the measure used."""
        if not self.verified:
            return "not verified"
        types = ", ".join(dict.fromkeys(self.manifest.origin.quantized.values()))
        low_bits = "; weights dequantized from low-bit files" if self.manifest.origin.low_bits else ""
        limits = f"; {types} within its workflow's limits" if types else ""
        return f"verified, {self.verified}{limits}{low_bits}"

    def to_json(self, most_pixels: int | None = None) -> dict[str, Any]:
        """Return the pipeline as an OpenAI model, with details under `sdflow`. most_pixels: None: not measured yet."""
        origin, latents = self.manifest.origin, self.latents
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "sdflow",
            "sdflow": {
                "family": self.title,
                "target": origin.target,
                "verified": self.verified,
                "verdict": self.verdict,
                "quantized": origin.quantized,
                "dequantized_from": origin.low_bits,
                "task": self.task,
                "from_images": self.from_images,
                "checker": self.checker,
                "control": list(self.nets),
                "image_prompts": self.adapters,
                "references": self.references,
                "size": f"{latents.image_size}x{latents.image_size}",
                "multiple": latents.granularity,
                "max_pixels": most_pixels,
                "defaults": {task: asdict(each) for task, each in self.defaults.items()},
                "schedulers": list(available(self.schedulers)),
                "loras": [{"name": lora.reference, "scale": lora.scale} for lora in origin.loras],
                "artifacts": self.manifest.artifacts,
                "exact": True,
                "left_aside": self.left_aside.settings(),
            },
        }


def read_served(folder: Path, *, require_verified: bool = False, check: bool = True) -> ServedModel:
    """Read a pipeline folder. check: verify its files against the recorded digests.

    Raises UsageError if the folder is not a pipeline or not verified as required, VerificationError if its files changed.
    """
    manifest, family, refiner = read_manifest(folder), folder_family(folder), refiner_of(folder)
    arguments = {**family.arguments, **({} if refiner is None else folder_family(refiner).arguments)}
    if check:
        require_sound_pipeline(folder)
    submodels = onnx_submodels(folder)
    model = ServedModel(
        folder.resolve().name,
        folder.absolute(),
        manifest,
        folder_latents(folder),
        folder_defaults(folder),
        folder_task(folder),
        family.title,
        tuple(arguments),
        family.encoder in submodels,
        family.checker in submodels,
        int((folder / "sdflow.json").stat().st_mtime),
        tuple(family.nets(submodels)),
        adapter_count(submodel_config(folder, family.denoiser)),
        family.noising.schedulers,
        most_references(family, submodels),
    )
    if require_verified and model.verified is None:
        remedy = "Run its workflow with --verify, or serve it without --require-verified."
        raise UsageError("it was not verified when built", where=str(folder), remedy=remedy)
    return model


def read_all_served(
    folders: Sequence[Path], *, require_verified: bool = False, check: bool = True
) -> dict[str, ServedModel]:
    """Return the pipelines by name. Raises UsageError like `read_served`, and for duplicate names."""
    found: dict[str, ServedModel] = {}
    for folder in folders:
        model = read_served(folder, require_verified=require_verified, check=check)
        if model.name in found:
            words = f"another pipeline has the name {model.name}: {found[model.name].folder}"
            remedy = "Requests select a pipeline by its folder's name; rename one."
            raise UsageError(words, where=str(folder), remedy=remedy)
        found[model.name] = model
    return found
