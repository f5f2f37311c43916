"""Stable Diffusion over ONNX Runtime with the interface of a diffusers pipeline: text to image, image to image, inpainting.

It computes what `StableDiffusionPipeline`, `StableDiffusionImg2ImgPipeline` and `StableDiffusionInpaintPipeline` of
diffusers (0.42) compute, on the device from the tokens to the pixels, with one exception: an image to start from is
encoded to the mean of the encoder's distribution, not to a sample of it (the exported encoder gives the mean).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sdflow.artifact import IMAGE_SUBMODELS, SUBMODELS
from sdflow.errors import PassError, SlowerWarning, UsageError
from sdflow.machine.providers import onnxruntime_for
from sdflow.picture_sizes import vae_scale
from sdflow.runtime.denoise import Start, denoise
from sdflow.runtime.folder import TAKEN_APART, load_companions, load_submodel, onnx_submodels
from sdflow.runtime.inputs import (
    draw_noises,
    granularity,
    make_start,
    per_picture,
    read_image,
    read_mask,
    require_size,
)
from sdflow.runtime.pictures import to_pil
from sdflow.runtime.schedule import Schedule, named_scheduler, trace
from sdflow.runtime.sessions import LoadOptions
from sdflow.runtime.submodel import Bound, Submodel
from sdflow.runtime.tuning import UNTUNED, Tuning
from sdflow.runtime.unet import SplitUNet, UNet, WholeUNet
from sdflow.runtime.vae import decode, encode
from sdflow.targets import TARGETS, Target

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL.Image import Image

SCHEDULES_KEPT = 16
UNETS_KEPT = 2
"""For how many sizes and numbers of pictures a UNet in parts is kept: each has its scratch in memory, on the CPU weights too."""


@dataclass(frozen=True)
class Images:
    """What a pipeline draws. images: PIL images, or float32 NHWC in [0, 1]; nsfw_content_detected: one per image."""

    images: list[Image] | np.ndarray
    nsfw_content_detected: list[bool] | None


class Pipeline:
    """Draws pictures from a pipeline folder: `Pipeline.load(folder, "cpu")("a horse").images[0]`.

    low_memory: a submodel's session is loaded when its turn comes and let go after it, and the VAE works in tiles.
    split: take the UNet apart, so that nothing is computed twice (`sdflow.runtime.split`).
    """

    def __init__(
        self,
        submodels: Mapping[str, Submodel],
        tokenizer: Any,
        scheduler: Any,
        feature_extractor: Any = None,
        *,
        low_memory: bool = False,
        split: bool = True,
    ) -> None:
        if missing := [name for name in IMAGE_SUBMODELS if name not in submodels]:
            raise UsageError(f"the pipeline has no {', '.join(missing)}")
        self.submodels = submodels
        self.tokenizer = tokenizer
        self.scheduler = scheduler
        self.feature_extractor = feature_extractor
        self.low_memory = low_memory
        self.split = split
        self.place = submodels["unet"].place
        vae, unet = submodels["vae_decoder"].config, submodels["unet"].config
        self.vae_scale = vae_scale(vae)
        self.channels = int(vae["latent_channels"])
        self.granularity = granularity(unet, vae)
        self._schedules: dict[tuple[Any, ...], Schedule] = {}
        self._unets: dict[tuple[Any, ...], UNet] = {}

    @classmethod
    def load(
        cls,
        folder: Path | str,
        target: str | Target,
        *,
        scheduler: str | None = None,
        safety_checker: bool = True,
        low_memory: bool = False,
        cuda_graphs: Container[str] = SUBMODELS,
        engine_cache: Path | None = None,
        threads: int | None = None,
        tuning: Tuning = UNTUNED,
    ) -> Pipeline:
        """Load an assembled pipeline, its sessions side by side.

        scheduler: one of `schedule.SCHEDULERS` instead of the folder's. cuda_graphs: the submodels that may be captured.
        tuning: what `sdflow tune` chose for this machine: `tuned.recorded_tuning(folder, target).tuning`.
        Raises UsageError when the folder is no pipeline, TargetUnavailableError when the provider is not there.
        """
        target = TARGETS[target] if isinstance(target, str) else target
        onnxruntime_for(target)
        folder = Path(folder)
        names = [name for name in onnx_submodels(folder) if safety_checker or name != "safety_checker"]

        def load(name: str) -> Submodel:
            # The encoder is for images to start from: loaded when the first one comes. The UNet is taken apart then.
            late = ("vae_encoder", "unet") if target.name in TAKEN_APART else ("vae_encoder",)
            lazy = low_memory or target.session.static_shapes or name in late
            graphs = () if low_memory else cuda_graphs
            options = LoadOptions(engine_cache, threads, tuning)
            return load_submodel(folder, name, target, cuda_graphs=graphs, lazy=lazy, options=options)

        with ThreadPoolExecutor(max_workers=len(SUBMODELS)) as pool:
            submodels = dict(zip(names, pool.map(load, names), strict=True))
        pipeline = cls(submodels, **load_companions(folder), low_memory=low_memory)
        if scheduler is not None:
            pipeline.scheduler = named_scheduler(scheduler, pipeline.scheduler.config)
        return pipeline

    def __call__(
        self,
        prompt: str | Sequence[str],
        image: Any = None,
        mask_image: Any = None,
        *,
        negative_prompt: str | Sequence[str] = "",
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int = 50,
        guidance_scale: float = 7.5,
        strength: float | None = None,
        num_images_per_prompt: int = 1,
        eta: float = 0.0,
        generator: torch.Generator | list[torch.Generator] | None = None,
        latents: np.ndarray | torch.Tensor | None = None,
        output_type: Literal["pil", "np", "latent"] = "pil",
        callback_on_step_end: Callable[[int, int, int], None] | None = None,
    ) -> Images:
        """Draw pictures: from text alone, from an image too, or, with a mask, in the white part of the mask.

        image: what diffusers takes (PIL, arrays, a list of them), or its latents; it is resized to height and width.
        height, width: pixels, multiples of 64 for Stable Diffusion; None for the image's, or the model's own size.
        guidance_scale: above 1, each UNet run has batch 2 per picture. strength: the part of the steps that an image
        goes through, by default 0.8, and 1 with a mask. latents: (pictures, channels, height / 8, width / 8), standard
        normal; the generator draws them when None. callback_on_step_end: called with index and timestep of a run
        of the UNet and how many there are.
        Raises UsageError for sizes and images that the model cannot take.
        """
        import torch

        with self.place.current(), torch.no_grad():
            prompts, negatives = per_picture(prompt, negative_prompt, num_images_per_prompt)
            if mask_image is not None and image is None:
                raise UsageError("a mask needs the image that it belongs to", where="mask_image")
            if image is not None and "vae_encoder" not in self.submodels:
                raise UsageError("the pipeline has no vae_encoder, so it cannot start from an image", where="image")
            if strength is None:
                strength = 0.8 if image is not None and mask_image is None else 1.0
            guided = guidance_scale > 1
            if image is not None:
                image = read_image(image, height, width, self.granularity)
                scale = self.vae_scale if image.shape[1] == self.channels else 1
                height, width = (int(size) * scale for size in image.shape[2:])
            shape = self.latents_shape(len(prompts), height, width)
            mask = None if mask_image is None else read_mask(mask_image, *(size * self.vae_scale for size in shape[2:]))
            schedule = self._schedule(
                num_inference_steps,
                strength=strength if image is not None else 1.0,
                # With a mask, diffusers begins with noise alone at full strength, and where the caller gives it.
                from_image=image is not None and (mask is None or (strength < 1 and latents is None)),
                inpaint=mask is not None,
                eta=eta,
                guidance_scale=guidance_scale if guided else None,
            )
            noises = [each.to(self.place.device) for each in draw_noises(shape, schedule.draws, latents, generator)]
            unet_channels = int(self.submodels["unet"].config["in_channels"])
            start = make_start(noises, image, mask, self._encoded, unet_channels)
            texts = [*negatives, *prompts] if guided else prompts
            unet = self._loaded(start, len(texts))
            embeddings = self.encode(texts)
            result = denoise(unet, schedule, start, embeddings, callback_on_step_end)
            if self.low_memory:
                self._unets.clear()
                self.submodels["unet"].unload()
            if output_type == "latent":
                return Images(result.cpu().numpy(), None)
            drawn, flagged = self.check_safety(self.decode(result))
            return Images(drawn.cpu().numpy() if output_type == "np" else to_pil(drawn), flagged)

    def encode(self, prompts: Sequence[str]) -> torch.Tensor:
        """Text embeddings (prompts, 77, width). A prompt beyond the model's length is cut, as in diffusers."""
        import torch

        once = list(dict.fromkeys(prompts))
        tokens = self.tokenizer(
            once,
            padding="max_length",
            max_length=self.tokenizer.model_max_length,
            truncation=True,
            return_tensors="pt",
        ).input_ids
        with self.place.current(), self._using("text_encoder") as encoder:
            # Two at a time, as with guidance: one shape for any number.
            bound = encoder.bound(input_ids=(2, tokens.shape[1]))
            encoded = []
            for pair in tokens.split(2):
                bound.inputs["input_ids"].copy_(pair)  # a single one goes to both places
                encoded.extend(bound.run()["last_hidden_state"].clone())
            return torch.stack([encoded[once.index(prompt)] for prompt in prompts])

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Pictures, float32 NHWC in [0, 1], from latents."""
        import torch

        with self.place.current(), self._using("vae_decoder") as decoder:
            images = [
                (image.float() / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1)
                for image in decode(decoder, latents, tiles=self.low_memory)
            ]
            return torch.cat(images)

    def check_safety(self, images: torch.Tensor) -> tuple[torch.Tensor, list[bool] | None]:
        """The pictures with the flagged ones blackened, and the flags; unchanged and None without a safety checker."""
        import torch

        if "safety_checker" not in self.submodels:
            return images, None
        clip_inputs = self.feature_extractor(to_pil(images), return_tensors="pt").pixel_values
        checked, flags = [], []
        with self._using("safety_checker") as checker:
            for clip_input, image in zip(clip_inputs.split(1), images.split(1), strict=True):
                bound = checker.bound(clip_input=tuple(clip_input.shape), images=tuple(image.shape))
                bound.inputs["clip_input"].copy_(clip_input)
                bound.inputs["images"].copy_(image)
                result = bound.run()
                flags.append(bool(result["has_nsfw_concepts"].any()))
                checked.append(result["out_images"].to(torch.float32, copy=True))
        return torch.cat(checked), flags

    def latents_shape(self, pictures: int, height: int | None, width: int | None) -> tuple[int, int, int, int]:
        """(pictures, channels, rows, columns) of the latents for a picture size in pixels."""
        own = self.submodels["unet"].config["sample_size"]
        require_size(self.granularity, height, width)
        rows = own if height is None else height // self.vae_scale
        columns = own if width is None else width // self.vae_scale
        return pictures, self.channels, int(rows), int(columns)

    # Steps of a call

    @contextmanager
    def _using(self, name: str) -> Iterator[Submodel]:
        submodel = self.submodels[name]
        yield submodel
        if self.low_memory:
            submodel.unload()

    def _loaded(self, start: Start, rows: int) -> UNet:
        """The UNet for these sizes; with it, side by side, what else this picture needs and is not there."""
        unet, (pictures, channels, *size) = self.submodels["unet"], start.noise.shape
        shape = (pictures, channels + (0 if start.context is None else start.context.shape[1]), *size)
        text = (rows, int(self.tokenizer.model_max_length), int(unet.config["cross_attention_dim"]))
        if unet.path is None or not self.split:
            return WholeUNet(unet, shape, text)
        key = (shape, text)
        if key not in self._unets:
            while len(self._unets) >= UNETS_KEPT:
                self._unets.pop(next(iter(self._unets)))
            with ThreadPoolExecutor(max_workers=3) as pool:
                split = pool.submit(_split_or_whole, unet, shape, text)
                others: list[Future[Bound]] = []
                if not self.low_memory:
                    encoder, decoder = self.submodels["text_encoder"], self.submodels["vae_decoder"]
                    others.append(pool.submit(encoder.bound, input_ids=(2, text[1])))
                    others.append(pool.submit(decoder.bound, latent_sample=(1, channels, *size)))
                self._unets[key] = split.result()
                for each in others:
                    each.result()
        return self._unets[key]

    def _schedule(self, steps: int, *, guidance_scale: float | None, **options: Any) -> Schedule:
        key = (type(self.scheduler), repr(self.scheduler.config), steps, guidance_scale, *options.items())
        if key not in self._schedules:
            schedule = trace(self.scheduler, steps, **options)
            guided = schedule if guidance_scale is None else schedule.guided(guidance_scale)
            while len(self._schedules) >= SCHEDULES_KEPT:
                self._schedules.pop(next(iter(self._schedules)))
            self._schedules[key] = guided.to(self.place.device)
        return self._schedules[key]

    def _encoded(self, images: torch.Tensor) -> torch.Tensor:
        with self._using("vae_encoder") as encoder:
            return encode(encoder, images, tiles=self.low_memory)


def _split_or_whole(unet: Submodel, shape: tuple[int, ...], text: tuple[int, ...]) -> UNet:
    try:
        return SplitUNet(unet, shape, text)
    except PassError as error:
        warnings.warn(f"the UNet runs as a whole: {error}", SlowerWarning, stacklevel=2)
        return WholeUNet(unet, shape, text)
