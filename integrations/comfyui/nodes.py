"""Nodes over a pipeline folder that sdflow built: load, add LoRAs, sample, decode, encode.

LATENT is ComfyUI's own: the VAE's latents, unscaled, (images, channels, rows, columns). IMAGE is (images, height, width, 3) in
[0, 1]. A pipeline folder lies under `models/sdflow`, or where `sdflow:` in extra_model_paths.yaml says.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import folder_paths
import torch

from sdflow.families.settings import PromptSyntax
from sdflow.families.shared.schedulers import SCHEDULERS
from sdflow.serve.local import LocalPipeline

FOLDERS = "sdflow"
OWN_SCHEDULER = "the pipeline's own"
SYNTAXES = [*PromptSyntax.__args__]
EMPTY_RATIO = "downscale_ratio_spacial"
"""In an empty LATENT, pixels per latent: its size is fitted to the model's."""
PIPELINE = "SDFLOW_PIPELINE"
CATEGORY = "sdflow"

folder_paths.add_model_folder_path(FOLDERS, os.path.join(folder_paths.models_dir, FOLDERS))  # noqa: PTH118


def pipeline_folders() -> dict[str, Path]:
    """The pipeline folders by the name that the node shows; links are followed, the first of equal names counts."""
    found: dict[str, Path] = {}
    for root in map(Path, folder_paths.get_folder_paths(FOLDERS)):
        for place, folders, files in os.walk(root, followlinks=True):
            if "sdflow.json" in files:
                folders.clear()
                found.setdefault(Path(place).relative_to(root).as_posix(), Path(place))
    return found


class SdflowLoad:
    """Loads a pipeline on the target that it was built for."""

    RETURN_TYPES = (PIPELINE,)
    RETURN_NAMES = ("pipeline",)
    FUNCTION = "load"
    CATEGORY = CATEGORY
    DESCRIPTION = "Loads a pipeline folder that `sdflow run` built, from models/sdflow."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"pipeline": (sorted(pipeline_folders()), {"tooltip": "A folder in models/sdflow."})}}

    @classmethod
    def IS_CHANGED(cls, pipeline: str) -> str:
        """Loads again what was built again."""
        return str((pipeline_folders()[pipeline] / "sdflow.json").stat().st_mtime_ns)

    def load(self, pipeline: str) -> tuple[LocalPipeline]:
        return (LocalPipeline.load(pipeline_folders()[pipeline]),)


class SdflowLora:
    """Adds a LoRA. Its weights are put in when something is sampled; changing the scale builds and loads nothing."""

    RETURN_TYPES = (PIPELINE,)
    RETURN_NAMES = ("pipeline",)
    FUNCTION = "add"
    CATEGORY = CATEGORY
    DESCRIPTION = (
        "Adds a LoRA, in the denoiser and the text encoders. Needs the cache that the pipeline was built with."
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "pipeline": (PIPELINE,),
                "lora_name": (folder_paths.get_filename_list("loras"),),
                "strength": ("FLOAT", {"default": 1.0, "min": -10.0, "max": 10.0, "step": 0.01}),
            }
        }

    def add(self, pipeline: LocalPipeline, lora_name: str, strength: float) -> tuple[LocalPipeline]:
        if not strength:
            return (pipeline,)
        return (pipeline.with_lora(folder_paths.get_full_path_or_raise("loras", lora_name), strength),)


class SdflowSample:
    """Samples latents of the size and number of `latent_image`, from it where denoise is below 1 or it has a mask."""

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "sample"
    CATEGORY = CATEGORY
    DESCRIPTION = (
        "Encodes the prompts and samples. Its steps and denoise are those of KSampler, its schedulers diffusers'."
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        text = {"multiline": True, "dynamicPrompts": True}
        return {
            "required": {
                "pipeline": (PIPELINE,),
                "positive": ("STRING", {**text, "default": ""}),
                "negative": ("STRING", {**text, "default": ""}),
                "latent_image": ("LATENT",),
                "seed": ("INT", {"default": 0, "min": 0, "max": 2**63 - 1, "control_after_generate": True}),
                "steps": ("INT", {"default": 20, "min": 1, "max": 10000}),
                "cfg": ("FLOAT", {"default": 7.5, "min": 0.0, "max": 100.0, "step": 0.1, "round": 0.01}),
                "scheduler": ([OWN_SCHEDULER, *SCHEDULERS],),
                "denoise": ("FLOAT", {"default": 1.0, "min": 0.01, "max": 1.0, "step": 0.01}),
                "prompt_syntax": (SYNTAXES, {"default": "a1111"}),
            }
        }

    def sample(
        self,
        pipeline: LocalPipeline,
        positive: str,
        negative: str,
        latent_image: dict[str, Any],
        seed: int,
        steps: int,
        cfg: float,
        scheduler: str,
        denoise: float,
        prompt_syntax: str,
    ) -> tuple[dict[str, Any]]:
        given, mask = latent_image["samples"], latent_image.get("noise_mask")
        scale, channels = pipeline.latents.scale, pipeline.latents.channels
        images, rows, columns = len(given), given.shape[-2], given.shape[-1]
        if EMPTY_RATIO in latent_image:
            ratio = latent_image[EMPTY_RATIO] / scale
            rows, columns = round(rows * ratio), round(columns * ratio)
        starts = denoise < 1 or mask is not None
        if starts and given.shape[1] != channels:
            raise ValueError(
                f"latent_image has {given.shape[1]} channels, and the pipeline {channels}: encode it with its VAE"
            )
        size = rows * scale, columns * scale
        more: dict[str, Any] = {}
        if starts:  # as KSampler: so many steps are run, whatever denoise is
            more = {"start": given, "strength": denoise}
        if mask is not None:
            pixels = mask.reshape(-1, 1, *mask.shape[-2:])
            more["mask"] = torch.nn.functional.interpolate(pixels, size=size, mode="bilinear")
        else:  # the first noise is that of KSampler
            generator = torch.Generator().manual_seed(seed)
            more["noise"] = torch.randn(images, channels, rows, columns, generator=generator)
        samples = pipeline.sample(
            positive,
            negative or None,
            size,
            [(seed + index) % 2**63 for index in range(images)],
            scheduler=None if scheduler == OWN_SCHEDULER else scheduler,
            on_step=progress(),
            num_inference_steps=max(1, int(steps / denoise)) if starts else steps,
            guidance_scale=cfg,
            prompt_syntax=prompt_syntax,
            **more,
        )
        kept = {name: value for name, value in latent_image.items() if name != EMPTY_RATIO}
        return ({**kept, "samples": samples},)


class SdflowDecode:
    """Decodes latents with the pipeline's VAE."""

    RETURN_TYPES = ("IMAGE",)
    FUNCTION = "decode"
    CATEGORY = CATEGORY
    DESCRIPTION = "Decodes latents, sdflow's or ComfyUI's, with the pipeline's VAE."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"pipeline": (PIPELINE,), "samples": ("LATENT",)}}

    def decode(self, pipeline: LocalPipeline, samples: dict[str, Any]) -> tuple[torch.Tensor]:
        return (pipeline.decode(samples["samples"]),)


class SdflowEncode:
    """Encodes images with the pipeline's VAE. Their sides are cut to what the model takes."""

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "encode"
    CATEGORY = CATEGORY
    DESCRIPTION = "Encodes images with the pipeline's VAE, for SdflowSample or ComfyUI's own nodes."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"pipeline": (PIPELINE,), "pixels": ("IMAGE",)}}

    def encode(self, pipeline: LocalPipeline, pixels: torch.Tensor) -> tuple[dict[str, Any]]:
        step = pipeline.latents.granularity
        height, width = (side - side % step for side in pixels.shape[1:3])
        top, left = (pixels.shape[1] - height) // 2, (pixels.shape[2] - width) // 2
        return ({"samples": pipeline.encode(pixels[:, top : top + height, left : left + width])},)


def progress() -> Callable[[int, int], None]:
    """Shows steps in ComfyUI, and ends the run where the user does."""
    import comfy.model_management
    import comfy.utils

    bars: list[Any] = []

    def step(done: int, total: int) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()
        if not bars:
            bars.append(comfy.utils.ProgressBar(total))
        bars[0].update_absolute(done, total)

    return step


NODES: Sequence[tuple[type, str]] = (
    (SdflowLoad, "sdflow: load pipeline"),
    (SdflowLora, "sdflow: add LoRA"),
    (SdflowSample, "sdflow: sample"),
    (SdflowDecode, "sdflow: decode"),
    (SdflowEncode, "sdflow: encode"),
)
NODE_CLASS_MAPPINGS: dict[str, type] = {node.__name__: node for node, _ in NODES}
NODE_DISPLAY_NAME_MAPPINGS: dict[str, str] = {node.__name__: title for node, title in NODES}
