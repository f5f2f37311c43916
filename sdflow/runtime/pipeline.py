"""Run a built pipeline on ONNX Runtime with diffusers' interface: text to image, image to image, inpainting.

It matches the family's diffusers pipelines (0.42), on the device from tokens to pixels, with one exception: a start
image is encoded to the mean of the encoder's distribution instead of a sample, because the exported encoder returns the
mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sdflow.errors import UsageError
from sdflow.families.shared.approximation import GUIDANCE_INTERVAL, Approximation, Interval, Reuse
from sdflow.families.shared.guidance_limits import NORMALIZATION, TRUNCATION, UNLIMITED, GuidanceLimits
from sdflow.families.shared.image_prompts import adapter_count, token_axes
from sdflow.families.shared.references import token_count
from sdflow.families.shared.request import Conditions, Request
from sdflow.families.shared.skipped_layers import LAYERS, SkippedLayers
from sdflow.prompts.limits import report, require_texts, truncations
from sdflow.prompts.reading import Reading
from sdflow.runtime.denoiser.control import controls_of, read_controls, require_controls
from sdflow.runtime.denoiser.denoiser import Denoiser, DenoiserInputs
from sdflow.runtime.denoiser.denoisers import DenoiserRequest
from sdflow.runtime.denoiser.start import (
    Start,
    draw_noises,
    make_start,
    per_image,
    prompts_per_image,
    read_image,
    read_mask,
    require_room,
    require_span,
    require_start,
)
from sdflow.runtime.drawing.drawing import Drawing, OutputType
from sdflow.runtime.drawing.image_prompts import image_prompts
from sdflow.runtime.drawing.kept import Kept, require_blur
from sdflow.runtime.drawing.parts import Images, PipelineParts
from sdflow.runtime.drawing.preview import Preview
from sdflow.runtime.drawing.record import records, scheduler_settings
from sdflow.runtime.drawing.references import read_references, require_reference_room

if TYPE_CHECKING:
    import numpy as np
    import torch


class Pipeline(PipelineParts):
    """Generates images from a pipeline folder: `Pipeline.load(folder, "cpu")("a horse").images[0]`."""

    def __call__(
        self,
        prompt: str | Sequence[str],
        image: Any = None,
        mask_image: Any = None,
        *,
        output_type: OutputType = "pil",
        callback_on_text_end: Callable[[], None] | None = None,
        callback_on_step_end: Callable[[int, int, int], None] | None = None,
        callback_on_preview: Callable[[Preview], None] | None = None,
        **settings: Any,
    ) -> Images:
        """Generate images from text, from text and an image, or, with a mask, in the mask's white area.

        settings: see `drawing`. callback_on_text_end: called when the prompts are encoded. callback_on_step_end: called
        with index and timestep of a denoiser run, and the number of runs. callback_on_preview: called after it with a
        preview (`sdflow.runtime.drawing.preview`). Raises the errors of `drawing`, and VerificationError if PIL images
        are requested and contain NaN or infinite values.
        """
        with self.place.current():
            drawing = self.drawing(prompt, image, mask_image, **settings)
            report(drawing.truncated)
            if callback_on_text_end is not None:
                callback_on_text_end()
            drawing.run(callback_on_step_end, callback_on_preview)
            return drawing.finish(output_type)

    def drawing(
        self,
        prompt: str | Sequence[str],
        image: Any = None,
        mask_image: Any = None,
        *,
        negative_prompt: str | Sequence[str] | None = None,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        strength: float | None = None,
        mask_blur: float = 0.0,
        whole: bool = False,
        num_images_per_prompt: int = 1,
        eta: float | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        latents: np.ndarray | torch.Tensor | None = None,
        control: Mapping[str, Any] | None = None,
        control_scale: float | Mapping[str, float] = 1.0,
        control_guidance_start: float | Mapping[str, float] = 0.0,
        control_guidance_end: float | Mapping[str, float] = 1.0,
        guess_mode: bool = False,
        ip_adapter_image: Any = None,
        ip_adapter_scale: float | Sequence[float] = 1.0,
        references: Any = None,
        denoising_start: float | None = None,
        denoising_end: float | None = None,
        prompt_syntax: str = "plain",
        clip_skip: int | None = None,
        reuse: Reuse | Mapping[str, Any] | None = None,
        guidance_interval: Interval | Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Drawing:
        """Validate the request, encode prompts and image, and prepare the steps (`sdflow.runtime.drawing.drawing`).

        image: any form diffusers accepts (PIL, arrays, a list of them), or latents; resized to height and width.
        height, width: pixels, multiples of `latents.granularity`; default: the image's size, or the model's own.
        num_inference_steps, guidance_scale, strength, eta: default to the model's (`defaults`).
        guidance_scale: above 1, each denoiser run has batch 2 per image. strength: fraction of the steps applied to an
            image.
        mask_blur: pixels over which the generated area fades into the kept one, which is the resized image itself
        (`sdflow.runtime.drawing.kept`). whole: keep the VAE's output everywhere, as diffusers does; always so if image
        is latents. latents: (images, channels, height / 8, width / 8), standard normal; default: drawn from the
            generator.
        control: images for ControlNets, by their names in `nets`; unnamed nets do nothing. control_scale,
        control_guidance_start, control_guidance_end: for all nets, or by name. guess_mode: as in diffusers.
        ip_adapter_image: an image prompt per IP-Adapter, or a list of several; without one, the adapters have no
            effect.
        ip_adapter_scale: scale of all adapters, or of each. references: one or more PIL images that the model edits or
        combines; without height, width and image, the first sets the size. denoising_start, denoising_end: fractions (0
        to 1) of the way from noise to image where denoising starts and ends; with a start, image is another pipeline's
        latents.
        prompt_syntax: one of `sdflow.prompts.reading.SYNTAXES`. clip_skip: number of the text encoders' last layers to
        skip, for the prompt but not the negative prompt. reuse: reuse deep features over some steps, {"every": 2,
        "from": 0.1, "to": 0.9, "layers": 1}. guidance_interval: the range of steps with guidance, as fractions,
        {"from": 0.1, "to": 0.8}. Both are approximations (`sdflow.families.shared.approximation`). more: the family's own
        arguments (`Family.arguments`). Raises UsageError for sizes and images that the model does not support.
        """
        import torch

        with self.place.current(), torch.no_grad():
            self.family.require_arguments(more, 1 if isinstance(prompt, str) else len(prompt))
            controls = controls_of(control, control_scale, control_guidance_start, control_guidance_end)
            require_controls(controls, list(self.nets))
            denoised = self.configs[self.family.denoiser]
            shown = image_prompts(ip_adapter_image, ip_adapter_scale, adapter_count(denoised))
            prompts, negatives = prompts_per_image(prompt, negative_prompt, num_images_per_prompt)
            require_texts({"prompt": prompts, "negative_prompt": negatives, **more})
            require_start(self.task, image, mask_image)
            require_span(denoising_start, denoising_end, image, mask_image)
            require_blur(mask_blur, mask_image is not None, whole)
            if image is not None and self.family.encoder not in self.submodels:
                raise UsageError(
                    f"the pipeline has no {self.family.encoder}, so it cannot start from an image",
                    where="image",
                    remedy=f"Rebuild it from a workflow with passes for the {self.family.encoder}.",
                )
            own = self.defaults["text" if image is None else "image" if mask_image is None else "inpaint"]
            strength = own.strength if strength is None else strength
            steps = own.steps_at(strength) if num_inference_steps is None else num_inference_steps
            guidance_scale = own.guidance_scale if guidance_scale is None else guidance_scale
            guided = self.family.guided(self.configs, guidance_scale)
            fewer = Approximation.of(reuse, guidance_interval)
            if fewer.guidance is not None and not guided:
                raise UsageError(
                    "there is no guidance to limit to an interval",
                    where=GUIDANCE_INTERVAL,
                    remedy="Remove it, or use a guidance scale above 1 with a model that supports guidance.",
                )
            skipped = SkippedLayers.of(more)
            if skipped is not None and (image is not None or not guided):
                raise UsageError(
                    "skip-layer guidance only works for text to image, as in diffusers"
                    if image is not None
                    else "skip-layer guidance requires prompt guidance, which is off",
                    where=LAYERS,
                    remedy="Remove it." if image is not None else "Use a guidance scale above 1.",
                )
            limits = GuidanceLimits.of(more)
            if limits != UNLIMITED and not guided:
                raise UsageError(
                    "it limits prompt guidance, which is off",
                    where=next(name for name in (TRUNCATION, NORMALIZATION) if more.get(name) is not None),
                    remedy="Remove it, or use a higher guidance scale.",
                )
            if image is not None:
                image = read_image(image, height, width, self.latents.granularity)
                scale = self.latents.scale if image.shape[1] == self.latents.channels else 1
                height, width = (int(size) * scale for size in image.shape[2:])
            referenced = read_references(references, self.family, self.submodels, self.latents.granularity)
            if referenced:
                height, width = height or referenced[0].shape[2], width or referenced[0].shape[3]
            controls = read_controls(controls, len(prompts), height, width, self.latents.granularity)
            for each in controls.values():
                height, width = each.image.shape[2:]
            shape = self.latents_shape(len(prompts), height, width)
            mask = (
                None
                if mask_image is None
                else read_mask(mask_image, *(size * self.latents.scale for size in shape[2:]))
            )
            kept = None
            if mask is not None and image is not None and image.shape[1] == 3 and not whole:
                kept = Kept.of(image, mask, mask_blur, self.place.device)
            # With a mask, diffusers starts from pure noise at full strength or if the caller passes latents.
            from_image = image is not None and (mask is None or (strength < 1 and latents is None))
            schedule = self.schedule(
                steps,
                shape,
                strength=strength if image is not None and denoising_start is None else 1.0,
                from_image=from_image,
                inpaint=mask is not None,
                eta=own.eta if eta is None else eta,
                guidance_scale=self.family.guidance_weight(guidance_scale) if guided else None,
                fewer=fewer,
                skipped=skipped,
                limits=limits,
                span=(denoising_start, denoising_end),
            )
            require_room(schedule, shape, self.place.device)

            def started() -> Start:
                first = latents if denoising_start is None else torch.zeros(shape)  # no noise is added
                noises = [self.place.placed(each) for each in draw_noises(shape, schedule.draws, first, generator)]
                takes_mask = self.task == "inpaint"
                return make_start(noises, image, mask, self.encode, takes_mask=takes_mask, from_image=from_image)

            start = None if image is None else started()
            request = Request(
                prompts,
                negatives,
                self.family.guidance_weight(guidance_scale),
                shape[2] * self.latents.scale,
                shape[3] * self.latents.scale,
                self.family.guidance_width(self.configs),
                {name: per_image(value, num_images_per_prompt) for name, value in more.items()},
                Reading(prompt_syntax, self.words, self.most_chunks),
                denoised,
            )
            rows = len(prompts) * (2 if guided else 1)
            encoded = [self.encode(self.place.placed(pixels)) for pixels in referenced]
            require_reference_room(self.submodels[self.family.denoiser], shape, rows, token_count(encoded))
            wanted = DenoiserRequest(
                (
                    len(prompts),
                    shape[1] + (0 if start is None or start.context is None else start.context.shape[1]),
                    *shape[2:],
                ),
                rows,
                token_axes(denoised, shown),
                controls=controls,
                guess=guess_mode,
                fewer=fewer,
                skipped=() if skipped is None else skipped.layers,
                references=tuple((each.shape[2], each.shape[3]) for each in encoded),
            )
            with truncations() as truncated:
                denoiser, conditions = self._conditioned_denoiser(wanted, request, clip_skip or 0)
            start = start or started()  # without an image, noise is drawn while the device encodes the prompt
            given = {**conditions.inputs, **self._image_conditions(shown, rows, guided)}
            if encoded and self.family.references is not None:
                given |= self.family.references.inputs(encoded, rows)
            said = records(
                {**self.record, **scheduler_settings(self.scheduler)},
                request,
                fewer,
                generator,
                {
                    "image": image is not None,
                    "mask": mask is not None,
                    "controls": bool(controls),
                    "image_prompts": ip_adapter_image is not None,
                    "references": bool(encoded),
                },
                steps=steps,
                guidance_scale=guidance_scale,
                strength=None if image is None else strength,
                eta=own.eta if eta is None else eta,
                clip_skip=clip_skip,
                mask_blur=mask_blur,
                whole=whole,
                guess_mode=guess_mode,
            )
            return Drawing(self, denoiser, DenoiserInputs(given, schedule, start.context), start, kept, said, truncated)

    def _conditioned_denoiser(
        self, wanted: DenoiserRequest, request: Request, clip_skip: int
    ) -> tuple[Denoiser, Conditions]:
        """Return the denoiser and its conditions. For prompts of the usual length, the sessions of denoiser and text
        encoders are created concurrently; other lengths are only known after encoding."""
        usual = not self.family.texts_vary and not any(request.more.get(name) for name in self.family.length_arguments)
        if request.reading.plain and not clip_skip and usual:
            return self.denoisers.get(wanted), self.condition(request)
        conditions = self.condition(request, clip_skip)
        return self.denoisers.get(replace(wanted, conditions=conditions)), conditions
