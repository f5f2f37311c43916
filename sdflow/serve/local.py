"""A pipeline folder in this process, with LoRAs per call and latents as input and output, for ComfyUI's nodes.

Images of one call share denoiser runs as on the server. Latents are the VAE's own, unscaled, as ComfyUI passes them.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdflow.digest import digest_file
from sdflow.errors import UsageError
from sdflow.families.shared.sampler_names import available
from sdflow.runtime.drawing.drawing import Drawing
from sdflow.runtime.pipeline import Pipeline
from sdflow.serve.engine.served_pipeline import ServedPipeline, shared_steps
from sdflow.serve.jobs import Job, LoraFile
from sdflow.serve.loras.lora_pipelines import LoraPipelines
from sdflow.store.default import default_cache

if TYPE_CHECKING:
    import torch

LORA_MEMORY = 8 << 30
"""Bytes of weights with LoRAs to keep."""


@dataclass(frozen=True)
class LocalPipeline:
    """A loaded pipeline and its selected LoRAs. base: without LoRAs. pipelines: with any LoRAs."""

    base: Pipeline
    pipelines: LoraPipelines
    loras: tuple[LoraFile, ...] = ()

    @classmethod
    def load(cls, folder: Path | str, cache: Path | None = None, threads: int | None = None) -> LocalPipeline:
        """Load a pipeline folder for the target that it was built for. cache: the cache that it was built with, needed
        for LoRAs; None: the user's default. Raises like `Pipeline.load`."""
        folder = Path(folder).absolute()
        served = ServedPipeline.load(folder, threads, loras=True)
        return cls(served.base, LoraPipelines(folder, served, cache or default_cache(), LORA_MEMORY))

    def with_lora(self, file: Path | str, scale: float) -> LocalPipeline:
        """Return this pipeline with one more LoRA, loaded on first use. Raises UsageError for a missing file."""
        path = Path(file)
        if not path.is_file():
            raise UsageError("no such file", where=str(path), remedy="Check the path of the LoRA.")
        added = LoraFile(path.stem, str(path), digest_file(path), scale)
        return replace(self, loras=(*self.loras, added))

    @property
    def latents(self) -> Any:
        """Channels, scale and sizes of the latents (`sdflow.families.shared.latents`)."""
        return self.base.latents

    @property
    def schedulers(self) -> tuple[str, ...]:
        return available(self.base.family.noising.schedulers)

    def sample(
        self,
        prompt: str,
        negative_prompt: str | None,
        size: tuple[int, int],
        seeds: Sequence[int],
        *,
        scheduler: str | None = None,
        start: torch.Tensor | None = None,
        noise: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        on_step: Callable[[int, int], None] = lambda done, total: None,
        **arguments: Any,
    ) -> torch.Tensor:
        """Return one latent per seed, (images, channels, rows, columns) float32.

        size: height and width in pixels. start, noise: latents to start from and standard normal noise, one per image.
        mask: (1 or images, 1, height, width), 1 where to inpaint. on_step: called with finished and total steps.
        arguments: those of `Pipeline.drawing`. Raises like it, and like `sdflow bake` for LoRAs that do not fit.
        """
        import torch

        served = self.pipelines.served(self.loras)
        request = uuid.uuid4().hex
        height, width = size
        given: dict[str, Any] = {"height": height, "width": width, **arguments}
        works = []
        for index, seed in enumerate(seeds):
            job = Job(request, index, "", prompt, seed, negative_prompt, given, scheduler=scheduler, loras=self.loras)
            works.append(served.drawings(job, **self._of_image(index, start=start, noise=noise, mask=mask)))
        found: tuple[Drawing, ...] = ()
        for found in zip(*works, strict=True):  # the pipeline's drawings, then its refiner's
            _run(served, found, on_step)
        with torch.no_grad():
            return torch.cat([self.latents.to_vae(each.latents().float().cpu()) for each in found])

    def _of_image(self, index: int, **given: torch.Tensor | None) -> dict[str, Any]:
        names = {"start": "image", "noise": "latents", "mask": "mask_image"}
        one = {
            names[name]: value[index % len(value)][None].clone().float()
            for name, value in given.items()
            if value is not None
        }
        return one if "image" not in one else {**one, "image": self.latents.from_vae(one["image"])}

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Decode latents to images, (images, height, width, 3) in [0, 1]."""
        import torch

        pipeline = self.base
        with torch.no_grad():
            images = [
                pipeline.decode(self.latents.from_vae(each.float()).to(pipeline.place.device)).float().cpu()
                for each in latents.split(1)
            ]
            return torch.cat(images)

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        """Encode images, (images, height, width, 3) in [0, 1], sides divisible by `latents.granularity`. Raises
        UsageError."""
        import torch

        pipeline = self.base
        if pipeline.family.encoder not in pipeline.submodels:
            raise UsageError(f"the pipeline has no {pipeline.family.encoder}, so it cannot encode images")
        with torch.no_grad():
            pixels = images[..., :3].permute(0, 3, 1, 2).float() * 2 - 1
            encoded = [
                pipeline.encode(each.contiguous().to(pipeline.place.device)).float().cpu() for each in pixels.split(1)
            ]
            return torch.cat([self.latents.to_vae(each) for each in encoded])


def _run(served: ServedPipeline, drawings: Sequence[Drawing], on_step: Callable[[int, int], None]) -> None:
    """Run the drawings to the end, sharing denoiser runs where possible."""
    shared = shared_steps(drawings[0])
    alike = shared is not None and all(shared_steps(each) is shared for each in drawings)
    groups = [list(drawings)] if alike else [[each] for each in drawings]
    total, done = sum(group[0].runs for group in groups), 0
    for group in groups:
        while not group[0].done:
            served.step(group, len(group))
            done += 1
            on_step(done, total)
