"""Run a pipeline's submodels: prompts to conditions, latents to images, including the safety checker.

`sdflow.runtime.pipeline` combines them into a drawing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from sdflow.families.shared.approximation import EXACT, Approximation
from sdflow.families.shared.guidance_limits import UNLIMITED, GuidanceLimits
from sdflow.families.shared.image_prompts import ImagePrompt, image_conditions
from sdflow.families.shared.request import Conditions, Request, Tensors
from sdflow.families.shared.skipped_layers import SkippedLayers
from sdflow.models.ports import Role
from sdflow.runtime.denoiser.schedule import Schedule, trace
from sdflow.runtime.drawing.kept import Kept
from sdflow.runtime.drawing.loaded import LoadedPipeline
from sdflow.runtime.drawing.text import run_rows
from sdflow.runtime.drawing.waits import Compute, Fetch, Waits
from sdflow.runtime.files.images import pil_of, require_finite, rounded, unfinite
from sdflow.runtime.vae import Tiling, decode, encode

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL.Image import Image

SCHEDULES_KEPT = 16


@dataclass(frozen=True)
class Images:
    """Result of a call. images: PIL images, or float32 NHWC in [0, 1]. nsfw_content_detected: one per image. vae_tiles:
    rows of the VAE's bands in pixels, or side of its tiles, if it ran in such."""

    images: list[Image] | np.ndarray
    nsfw_content_detected: list[bool] | None
    vae_tiles: int | None = None


class PipelineParts(LoadedPipeline):
    """A loaded pipeline with the operations of its submodels."""

    def condition(self, request: Request, clip_skip: int = 0) -> Conditions:
        """Return the denoiser's conditions for these prompts, on the device.

        clip_skip: number of the text encoders' last layers to skip, for the prompts only: diffusers' `encode_prompt`
        encodes negative prompts with all layers (0.42, Stable Diffusion and XL).
        """
        skipped = self._conditioned(request, clip_skip)
        if not clip_skip or skipped.halves == 1:
            return skipped
        return skipped.with_negatives_of(self._conditioned(request, 0))

    def _conditioned(self, request: Request, clip_skip: int) -> Conditions:
        """Encode all prompts with the same clip_skip."""

        def run(name: str, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            with self._using(name, 0 if self.family.part(name).whole else clip_skip) as submodel:
                return run_rows(submodel, inputs, self.text_rows)

        with self.place.current():
            return self.family.condition(run, self.companions, self.options, request)

    def _image_conditions(self, shown: Sequence[ImagePrompt], rows: int, guided: bool) -> Tensors:
        """Return the denoiser's inputs for image prompts, on the device; empty without IP-Adapters."""
        if not shown:
            return {}

        def run(name: str, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            with self._using(name) as submodel:
                return run_rows(submodel, inputs)

        assert self.family.prompter is not None, "a family with IP-Adapters"
        config, processor = self.configs[self.family.denoiser], self.companions["feature_extractor"]
        return image_conditions(run, self.family.prompter.name, processor, config, shown, rows, guided=guided)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Decode latents to images, float32 NHWC in [0, 1]."""
        return self._decoded(latents)[0]

    def _decoded(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Tiling | None]:
        """Return the images; counts of non-finite values: of the latents, then of each image; and how images were divided.
        Does not synchronize."""
        import torch

        images = []
        with self.place.current(), self._using(self.family.decoder) as decoder:
            counts = [unfinite(latents)]
            tiled, decoded = decode(decoder, latents, self.latents, tiles=self.vae_tiles)
            for image in decoded:
                counts.append(unfinite(image))
                images.append((image.float() / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1))
            return torch.cat(images), torch.stack(counts), tiled

    def finishing(
        self,
        latents: torch.Tensor,
        output_type: Literal["pil", "np"] = "pil",
        *,
        finite: bool = False,
        kept: Kept | None = None,
    ) -> Waits[Images]:
        """Return the images of latents after the safety checker, if any. finite: raise VerificationError for non-finite
        values.
        kept: blended over the decoded images, before the checker sees them."""
        floats, checked = output_type == "np", self.family.checker in self.submodels
        with self.place.current():
            drawn, counts, tiled = self._decoded(latents)
            drawn = drawn if kept is None else kept.over(drawn)
            shown = drawn if floats and not checked else rounded(drawn)
        pixels, counts = yield Fetch(self.place, [shown, counts])
        if finite:
            (first, *others), each = counts.tolist(), drawn[0].numel()
            require_finite(first, latents.numel(), self.family.denoiser)
            for count in others:
                require_finite(count, each, self.family.decoder)
        flags = None
        if checked:
            seen = yield Compute(partial(self._seen_by_checker, pixels))
            with self.place.current():
                drawn, found = self._checked(drawn, seen)
                shown = drawn if floats else rounded(drawn)
            pixels, found = yield Fetch(self.place, [shown, found])
            flags = found.tolist()
        return Images(pixels.numpy() if floats else pil_of(pixels), flags, None if tiled is None else tiled.pixels)

    def preview(self, latents: torch.Tensor) -> torch.Tensor:
        """Return preview images, float32 NHWC in [0, 1]: from a tiny VAE at full size, or one pixel per latent
        pixel."""
        with self.place.current():
            return self.draw_preview(latents)

    def _seen_by_checker(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the safety checker's input for images."""
        seen: torch.Tensor = self.companions["feature_extractor"](pil_of(pixels), return_tensors="pt").pixel_values
        return seen

    def _checked(self, images: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the images with flagged ones blacked out, and the flags, on the device. Does not synchronize."""
        import torch

        assert self.family.checker is not None, "only a family that has one"
        checked, flags = [], []
        with self.place.current(), self._using(self.family.checker) as checker:
            read, pixels = checker.port(Role.SEEN), checker.port(Role.PIXELS)
            for crop, image in zip(seen.split(1), images.split(1), strict=True):
                bound = checker.bound(**{read: tuple(crop.shape), pixels: tuple(image.shape)})
                self.place.put(bound.inputs[read], crop)
                bound.inputs[pixels].copy_(image)
                result = bound.run()
                flags.append(result[checker.port(Role.FLAGS)].any())
                checked.append(result[checker.port(Role.CHECKED)].to(torch.float32, copy=True))
            return torch.cat(checked), torch.stack(flags)

    def schedule(
        self,
        steps: int,
        shape: Sequence[int],
        *,
        guidance_scale: float | None,
        fewer: Approximation = EXACT,
        skipped: SkippedLayers | None = None,
        limits: GuidanceLimits = UNLIMITED,
        **options: Any,
    ) -> Schedule:
        """Return the scheduler's factors for these steps, on the device, cached. shape: of the latents. guidance_scale:
        None without guidance. fewer: approximation. skipped: skip-layer guidance. limits: of guidance. options: see
        `schedule.trace`."""
        noising, tokens = self.family.noising, self.latents.tokens(*shape[-2:])
        own = (type(self.scheduler), repr(self.scheduler.config), noising.key(self.scheduler, tokens))
        key = (*own, steps, guidance_scale, fewer, skipped, limits, *options.items())
        if key not in self.schedules:
            schedule = trace(
                self.scheduler,
                steps,
                self.family.scheduler_config,
                spread=self.family.strength_spreads,
                noising=noising,
                tokens=tokens,
                **options,
            )
            guided = schedule
            if guidance_scale is not None:
                guided = schedule.guided(guidance_scale, fewer.guidance, skipped, limits)
            guided = guided if fewer.reuse is None else guided.reusing(fewer.reuse)
            while len(self.schedules) >= SCHEDULES_KEPT:
                self.schedules.pop(next(iter(self.schedules)))
            self.schedules[key] = guided.to(self.place.device)
        self.schedules[key] = self.schedules.pop(key)  # mark as most recently used
        return self.schedules[key]

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        """Encode images (images, 3, rows, columns) in [-1, 1] to latents on the device: the mean of the
        distribution."""
        with self.place.current(), self._using(self.family.encoder) as encoder:
            return encode(encoder, images, self.latents, tiles=self.vae_tiles)
