"""A built pipeline on ONNX Runtime with the interface of diffusers': text to image, image to image, inpainting.

It computes what the pipelines of its family in diffusers (0.42) compute, on the device from the tokens to the pixels,
with one exception: an image to start from is encoded to the mean of the encoder's distribution, not to a sample of it (the
exported encoder gives the mean).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from sdflow.errors import UsageError
from sdflow.families.base import Conditions, Family, Request, Tensors
from sdflow.families.defaults import Defaults, Task
from sdflow.families.image_prompts import ImagePrompt, adapter_count, image_conditions, token_axes
from sdflow.machine.providers import onnxruntime_for
from sdflow.prompts.reading import Reading
from sdflow.runtime.control import Control, controls_of, read_controls, require_controls
from sdflow.runtime.denoise import Start, denoise
from sdflow.runtime.denoiser import Denoiser
from sdflow.runtime.denoisers import Denoisers
from sdflow.runtime.folder import (
    SCHEDULER,
    TAKEN_APART,
    folder_defaults,
    folder_family,
    load_companions,
    load_submodel,
    onnx_submodels,
    read_options,
)
from sdflow.runtime.image_prompts import image_prompts
from sdflow.runtime.images import require_finite, to_pil
from sdflow.runtime.preview import Preview, previewer, previewer_of
from sdflow.runtime.schedule import Schedule, named_scheduler, trace
from sdflow.runtime.sessions import LoadOptions
from sdflow.runtime.start import (
    draw_noises,
    make_start,
    per_image,
    prompts_per_image,
    read_image,
    read_mask,
    require_size,
    require_span,
    require_start,
)
from sdflow.runtime.submodel import Submodel
from sdflow.runtime.text import run_rows, with_words, without_last_layers
from sdflow.runtime.tuning import UNTUNED, Tuning
from sdflow.runtime.vae import decode, encode
from sdflow.sources.embedding import Embedding, read_embedding, require_different, split_word
from sdflow.targets import TARGETS, Target

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL.Image import Image

SCHEDULES_KEPT = 16


@dataclass(frozen=True)
class Images:
    """What a pipeline draws. images: PIL images, or float32 NHWC in [0, 1]; nsfw_content_detected: one per image."""

    images: list[Image] | np.ndarray
    nsfw_content_detected: list[bool] | None


class Pipeline:
    """Draws images from a pipeline folder: `Pipeline.load(folder, "cpu")("a horse").images[0]`.

    low_memory: a submodel's session is loaded when its turn comes and let go after it, and the VAE works in tiles.
    options: of model_index.json, as the family reads them. defaults: of a call, for each task; None: what the configs say.
    split: take the denoiser apart, so that nothing is computed twice (`sdflow.runtime.split`).
    words: that stand in prompts for learned vectors.
    """

    def __init__(
        self,
        family: Family,
        submodels: Mapping[str, Submodel],
        companions: Mapping[str, Any],
        options: Mapping[str, Any] | None = None,
        *,
        defaults: Mapping[Task, Defaults] | None = None,
        low_memory: bool = False,
        split: bool = True,
        words: Sequence[Embedding] = (),
    ) -> None:
        configs = {name: submodel.config for name, submodel in submodels.items()}
        if missing := [name for name in family.needed(configs) if name not in submodels]:
            raise UsageError(f"the pipeline has no {', '.join(missing)}")
        require_different(words)
        self.family = family
        texts = {name: with_words(submodels[name], family, words) for name in family.text}
        self.submodels = {**submodels, **texts}
        self.words = {word.word: word.count for word in words}
        self._shortened: dict[str, tuple[int, Submodel]] = {}
        self.companions = companions
        self.scheduler = companions[SCHEDULER]
        self.options = {**family.options, **(options or {})}
        self.low_memory = low_memory
        self.nets = {name: submodels[part] for name, part in family.nets(submodels).items()}
        self.place = submodels[family.denoiser].place
        self.configs = configs
        self.latents, self.task = family.latents(configs), family.task(configs)
        family.require_nets_fit(configs)
        told = {**self.scheduler.config, "_class_name": type(self.scheduler).__name__}
        self.defaults = family.defaults_of(self.configs, told, {}) if defaults is None else defaults
        self.draw_preview = previewer(family, submodels[family.decoder], self.latents)
        self._schedules: dict[tuple[Any, ...], Schedule] = {}
        self.denoisers = Denoisers(
            submodels[family.denoiser],
            self.nets,
            [self.submodels[name] for name in family.text],
            submodels[family.decoder],
            self.latents.scale,
            split=split,
            low_memory=low_memory,
        )

    @classmethod
    def load(
        cls,
        folder: Path | str,
        target: str | Target,
        *,
        scheduler: str | None = None,
        checker: bool = True,
        low_memory: bool = False,
        cuda_graphs: Container[str] | None = None,
        engine_cache: Path | None = None,
        threads: int | None = None,
        tuning: Tuning = UNTUNED,
        embeddings: Sequence[Path | str | Embedding] = (),
        shared: Mapping[str, Submodel] = MappingProxyType({}),
        previews: Path | str | None = None,
    ) -> Pipeline:
        """Load an assembled pipeline, its sessions side by side.

        scheduler: one of `families.schedulers.SCHEDULERS` instead of the folder's. checker: whether the family's checker, if
        it is there, sees the images. cuda_graphs: the submodels that may be captured, None: all. tuning: what `sdflow tune`
        chose for this machine: `recorded_tuning(folder, target).tuning`. embeddings: files of textual inversion, FILE or
        FILE:WORD; their words may stand in prompts. shared: submodels that another pipeline has loaded of the same artifacts.
        previews: a pipeline folder whose tiny VAE decodes previews; None: the pipeline's own, if it is one.
        Raises UsageError when the folder is no pipeline, TargetUnavailableError when the provider is not there.
        """
        target = TARGETS[target] if isinstance(target, str) else target
        onnxruntime_for(target)
        folder = Path(folder)
        family = folder_family(folder)
        names = [name for name in onnx_submodels(folder) if checker or name != family.checker]
        words = [each if isinstance(each, Embedding) else read_embedding(*split_word(str(each))) for each in embeddings]

        def load(name: str) -> Submodel:
            if name in shared:
                return shared[name]
            # The encoder and the nets are for images: loaded when the first one comes. The denoiser is taken apart then.
            late = (family.encoder, *family.beside(names))
            late = (*late, family.denoiser) if target.name in TAKEN_APART else late
            lazy = low_memory or target.session.static_shapes or name in late or bool(words and name in family.text)
            graphs = () if low_memory else cuda_graphs
            options = LoadOptions(engine_cache, threads, tuning)
            return load_submodel(folder, name, target, cuda_graphs=graphs, lazy=lazy, options=options)

        with ThreadPoolExecutor(max_workers=len(names)) as pool:
            submodels = dict(zip(names, pool.map(load, names), strict=True))
        pipeline = cls(
            family,
            submodels,
            load_companions(folder),
            read_options(folder),
            defaults=folder_defaults(folder),
            low_memory=low_memory,
            words=words,
        )
        if scheduler is not None:
            pipeline.scheduler = named_scheduler(scheduler, pipeline.scheduler.config)
        if previews is not None:
            pipeline.draw_preview = previewer_of(Path(previews), family, pipeline.latents, target)
        return pipeline

    def __call__(
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
        denoising_start: float | None = None,
        denoising_end: float | None = None,
        output_type: Literal["pil", "np", "latent"] = "pil",
        prompt_syntax: str = "plain",
        clip_skip: int | None = None,
        callback_on_text_end: Callable[[], None] | None = None,
        callback_on_step_end: Callable[[int, int, int], None] | None = None,
        callback_on_preview: Callable[[Preview], None] | None = None,
        **more: Any,
    ) -> Images:
        """Draw images: from text alone, from another image too, or, with a mask, in the white part of the mask.

        image: what diffusers takes (PIL, arrays, a list of them), or its latents; it is resized to height and width.
        height, width: pixels, multiples of `latents.granularity`; None for the image's, or the model's own size.
        guidance_scale: above 1, each run of the denoiser has batch 2 per image. strength: the part of the steps that an
        image goes through. Steps, guidance, strength and eta: None for the model's (`defaults`). latents: (images, channels,
        height / 8, width / 8), standard normal; the generator draws them when None. control: the images for ControlNets by
        their names in `nets`; those that are not named do nothing. control_scale, control_guidance_start,
        control_guidance_end: of all nets, or of each by name. guess_mode: as in diffusers. ip_adapter_image: an image
        prompt for each IP-Adapter, or a list of several; without any the image is drawn as without adapters. ip_adapter_scale:
        how much they count, all or each. denoising_start, denoising_end: the
        part of the way from noise to image that is gone, between 0 and 1; from a place on it, image is the latents that another
        pipeline left there. prompt_syntax: how prompts are read
        (`sdflow.prompts.reading.SYNTAXES`). clip_skip: how many of the text encoders' last layers are left out.
        callback_on_text_end: called when the prompts are encoded. callback_on_step_end: called with index and timestep of
        a run of the denoiser and how many there are. callback_on_preview: called behind it with what the image is becoming
        (`sdflow.runtime.preview`). more: what the family's pipeline takes besides (`Family.arguments`).
        Raises UsageError for sizes and images that the model cannot take, VerificationError when what is to be a PIL image
        has values that are NaN or infinite.
        """
        import torch

        with self.place.current(), torch.no_grad():
            self.family.require_arguments(more, 1 if isinstance(prompt, str) else len(prompt))
            controls = controls_of(control, control_scale, control_guidance_start, control_guidance_end)
            require_controls(controls, list(self.nets))
            denoised = self.configs[self.family.denoiser]
            shown = image_prompts(ip_adapter_image, ip_adapter_scale, adapter_count(denoised))
            prompts, negatives = prompts_per_image(prompt, negative_prompt, num_images_per_prompt)
            require_start(self.task, image, mask_image)
            require_span(denoising_start, denoising_end, image, mask_image)
            if image is not None and self.family.encoder not in self.submodels:
                raise UsageError(
                    f"the pipeline has no {self.family.encoder}, so it cannot start from an image", where="image"
                )
            own = self.defaults["text" if image is None else "image" if mask_image is None else "inpaint"]
            strength = own.strength if strength is None else strength
            steps = own.steps_at(strength) if num_inference_steps is None else num_inference_steps
            guidance_scale = own.guidance_scale if guidance_scale is None else guidance_scale
            guided = self.family.guided(self.configs, guidance_scale)
            if image is not None:
                image = read_image(image, height, width, self.latents.granularity)
                scale = self.latents.scale if image.shape[1] == self.latents.channels else 1
                height, width = (int(size) * scale for size in image.shape[2:])
            controls = read_controls(controls, len(prompts), height, width, self.latents.granularity)
            for each in controls.values():
                height, width = each.image.shape[2:]
            shape = self.latents_shape(len(prompts), height, width)
            mask = (
                None
                if mask_image is None
                else read_mask(mask_image, *(size * self.latents.scale for size in shape[2:]))
            )
            # With a mask, diffusers begins with noise alone at full strength, and where the caller gives it.
            from_image = image is not None and (mask is None or (strength < 1 and latents is None))
            schedule = self.schedule(
                steps,
                strength=strength if image is not None and denoising_start is None else 1.0,
                from_image=from_image,
                inpaint=mask is not None,
                eta=own.eta if eta is None else eta,
                guidance_scale=guidance_scale if guided else None,
                span=(denoising_start, denoising_end),
            )
            first = latents if denoising_start is None else torch.zeros(shape)  # no noise is added on the way
            noises = [each.to(self.place.device) for each in draw_noises(shape, schedule.draws, first, generator)]
            beside = self.task == "inpaint"
            start = make_start(noises, image, mask, self._encoded, beside=beside, from_image=from_image)
            request = Request(
                prompts,
                negatives,
                guidance_scale,
                shape[2] * self.latents.scale,
                shape[3] * self.latents.scale,
                self.family.guidance_width(self.configs),
                {name: per_image(value, num_images_per_prompt) for name, value in more.items()},
                Reading(prompt_syntax, self.words),
            )
            rows = len(prompts) * (2 if guided else 1)
            axes = token_axes(denoised, shown)
            if request.reading.plain and not clip_skip:
                denoiser = self.denoiser(start, rows, controls=controls, guess=guess_mode, axes=axes)
                conditions = self.condition(request)
            else:  # how long the texts are, their encoding tells
                conditions = self.condition(request, clip_skip or 0)
                denoiser = self.denoiser(start, rows, conditions, controls=controls, guess=guess_mode, axes=axes)
            inputs = {**conditions.inputs, **self._image_conditions(shown, rows, guided)}
            if callback_on_text_end is not None:
                callback_on_text_end()

            def show(index: int, clean: torch.Tensor) -> None:
                if callback_on_preview is not None:
                    callback_on_preview(Preview(index, schedule.runs, clean, self.preview))

            seen = None if callback_on_preview is None else show
            result = denoise(denoiser, schedule, start, inputs, callback_on_step_end, seen)
            if self.low_memory:
                self.denoisers.unload()
            if output_type == "latent":
                return Images(result.cpu().numpy(), None)
            drawn, flagged = self.check_safety(self.decode(result, finite=output_type == "pil"))
            return Images(drawn.cpu().numpy() if output_type == "np" else to_pil(drawn), flagged)

    def condition(self, request: Request, clip_skip: int = 0) -> Conditions:
        """What the denoiser reads for these prompts, on the device."""

        def run(name: str, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            with self._using(name, clip_skip) as submodel:
                return run_rows(submodel, inputs)

        with self.place.current():
            return self.family.condition(run, self.companions, self.options, request)

    def _image_conditions(self, shown: Sequence[ImagePrompt], rows: int, guided: bool) -> Tensors:
        """What the denoiser reads for image prompts, on the device; nothing without IP-Adapters."""
        if not shown:
            return {}

        def run(name: str, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            with self._using(name) as submodel:
                return run_rows(submodel, inputs)

        assert self.family.prompter is not None, "a family with IP-Adapters"
        config, processor = self.configs[self.family.denoiser], self.companions["feature_extractor"]
        return image_conditions(run, self.family.prompter.name, processor, config, shown, rows, guided=guided)

    def decode(self, latents: torch.Tensor, *, finite: bool = False) -> torch.Tensor:
        """Images, float32 NHWC in [0, 1], from latents. finite: raise VerificationError for what is no image."""
        import torch

        images = []
        with self.place.current(), self._using(self.family.decoder) as decoder:
            if finite:
                require_finite(latents, self.family.denoiser)
            for image in decode(decoder, latents, self.latents, tiles=self.low_memory):
                if finite:
                    require_finite(image, self.family.decoder)
                images.append((image.float() / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1))
            return torch.cat(images)

    def preview(self, latents: torch.Tensor) -> torch.Tensor:
        """Images, float32 NHWC in [0, 1], from latents, at once: by the tiny VAE at full size, else a pixel for each."""
        with self.place.current():
            return self.draw_preview(latents)

    def check_safety(self, images: torch.Tensor) -> tuple[torch.Tensor, list[bool] | None]:
        """The images with the flagged ones blackened, and the flags; unchanged and None without a safety checker."""
        import torch

        checks = self.family.checker
        if checks is None or checks not in self.submodels:
            return images, None
        clip_inputs = self.companions["feature_extractor"](to_pil(images), return_tensors="pt").pixel_values
        checked, flags = [], []
        with self._using(checks) as checker:
            for clip_input, image in zip(clip_inputs.split(1), images.split(1), strict=True):
                bound = checker.bound(clip_input=tuple(clip_input.shape), images=tuple(image.shape))
                bound.inputs["clip_input"].copy_(clip_input)
                bound.inputs["images"].copy_(image)
                result = bound.run()
                flags.append(bool(result["has_nsfw_concepts"].any()))
                checked.append(result["out_images"].to(torch.float32, copy=True))
        return torch.cat(checked), flags

    def latents_shape(self, images: int, height: int | None, width: int | None) -> tuple[int, int, int, int]:
        """(images, channels, rows, columns) of the latents for an image size in pixels."""
        what = self.latents
        require_size(what.granularity, height, width)
        rows = what.size if height is None else height // what.scale
        columns = what.size if width is None else width // what.scale
        return images, what.channels, rows, columns

    # Steps of a call

    @contextmanager
    def _using(self, name: str, clip_skip: int = 0) -> Iterator[Submodel]:
        submodel = self._shorter(name, clip_skip) if clip_skip else self.submodels[name]
        yield submodel
        if self.low_memory:
            submodel.unload()

    def _shorter(self, name: str, clip_skip: int) -> Submodel:
        """A text encoder without its last layers; one of each is kept."""
        count, submodel = self._shortened.get(name, (0, None))
        if submodel is None or count != clip_skip:
            self._shortened[name] = clip_skip, without_last_layers(self.submodels[name], clip_skip)
        return self._shortened[name][1]

    def denoiser(
        self,
        start: Start,
        rows: int,
        conditions: Conditions | None = None,
        *,
        controls: Mapping[str, Control] | None = None,
        guess: bool = False,
        axes: Mapping[str, int] | None = None,
    ) -> Denoiser:
        """The denoiser for these sizes; with it, side by side, what else this image needs and is not there. conditions:
        where they are known already; without them, the texts are as long as the model reads at once. controls: for the nets.
        axes: the sizes of the axes of image tokens, None: without images."""
        denoised = self.configs[self.family.denoiser]
        if axes is None:
            axes = token_axes(denoised, [ImagePrompt()] * adapter_count(denoised))
        return self.denoisers.get(start, rows, conditions, controls or {}, axes, guess=guess)

    def schedule(self, steps: int, *, guidance_scale: float | None, **options: Any) -> Schedule:
        """The factors of the scheduler for so many steps, on the device. guidance_scale: None without guidance. options: as
        of `schedule.trace`."""
        key = (type(self.scheduler), repr(self.scheduler.config), steps, guidance_scale, *options.items())
        if key not in self._schedules:
            schedule = trace(
                self.scheduler, steps, self.family.scheduler_config, spread=self.family.strength_spreads, **options
            )
            guided = schedule if guidance_scale is None else schedule.guided(guidance_scale)
            while len(self._schedules) >= SCHEDULES_KEPT:
                self._schedules.pop(next(iter(self._schedules)))
            self._schedules[key] = guided.to(self.place.device)
        return self._schedules[key]

    def _encoded(self, images: torch.Tensor) -> torch.Tensor:
        with self._using(self.family.encoder) as encoder:
            return encode(encoder, images, self.latents, tiles=self.low_memory)
