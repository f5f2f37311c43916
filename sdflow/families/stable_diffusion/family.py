"""Stable Diffusion 1.x and 2.x: one text encoder, a UNet, a VAE, and in most 1.x models a safety checker.

2.x has the same classes with OpenCLIP's text encoder. Its 768-pixel checkpoints predict the velocity, which the
scheduler handles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from sdflow.families.shared.architecture import Architecture
from sdflow.families.shared.colors import STABLE_DIFFUSION, LatentColors
from sdflow.families.shared.defaults import Defaults, Task
from sdflow.families.shared.image_prompts import with_projections
from sdflow.families.shared.one_clip import OneClip
from sdflow.families.shared.unet_and_vae import CONTROLNET, IMAGE_ENCODER


class StableDiffusion(OneClip):
    name = "stable_diffusion"
    title = "Stable Diffusion 1.x and 2.x"
    classes = (
        *("StableDiffusionPipeline", "StableDiffusionImg2ImgPipeline", "StableDiffusionInpaintPipeline"),
        *("StableDiffusionControlNetPipeline", "StableDiffusionControlNetImg2ImgPipeline"),
        "StableDiffusionControlNetInpaintPipeline",
    )
    net = CONTROLNET
    prompter = IMAGE_ENCODER
    scheduler_config: ClassVar[Mapping[str, Any]] = {"clip_sample": False, "steps_offset": 1}
    defaults: ClassVar[Mapping[Task, Defaults]] = {
        "text": Defaults(steps=50, guidance_scale=7.5),
        "image": Defaults(steps=50, guidance_scale=7.5, strength=0.8),
        "inpaint": Defaults(steps=50, guidance_scale=7.5, strength=1.0),
    }
    colors: ClassVar[LatentColors] = STABLE_DIFFUSION
    quantizing: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "QuantizeFp8": {"limit": 0.1, "keep": ["*/to_out.0/*", "*/attn2/to_q/*"]},
        "QuantizeInt8": {
            "limit": 0.02,
            "keep": ["/time_embedding/*", "*/time_emb_proj/*", "*/attn2/to_k/*", "*/attn2/to_v/*"],
        },
    }
    assembled_as: ClassVar[Mapping[Task, str]] = {
        "text": "OnnxStableDiffusionPipeline",
        "inpaint": "OnnxStableDiffusionInpaintPipeline",
    }
    architectures: ClassVar[Mapping[str, Architecture]] = {
        "sd15": Architecture(),
        "sd15-tiny": Architecture(borrowed={"tokenizer": "sd15/tokenizer"}),
        "sd21": Architecture(),
        "sd21-base": Architecture(borrowed={"tokenizer": "sd21/tokenizer"}),
        "sd21-tiny": Architecture(borrowed={"tokenizer": "sd21/tokenizer"}),
        "sd-turbo": Architecture(like="sd21-base"),
        "sd-turbo-tiny": Architecture(like="sd21-tiny"),
        "sd15-inpainting": Architecture(like="sd15"),
        "sd15-inpainting-tiny": Architecture(like="sd15-tiny"),
        "sd2-inpainting": Architecture(like="sd21-base"),
        "sd2-inpainting-tiny": Architecture(like="sd21-tiny"),
    }

    def torch_pipeline(
        self, modules: Mapping[str, Any], companions: Mapping[str, Any], options: Mapping[str, Any]
    ) -> Any:
        import diffusers

        nets = [modules[name] for name in self.nets(modules).values()]
        make = diffusers.StableDiffusionControlNetPipeline if nets else diffusers.StableDiffusionPipeline
        if "unet" in modules and self.task({"unet": modules["unet"].config}) == "inpaint":
            make = diffusers.StableDiffusionInpaintPipeline
        more = {"image_encoder": modules.get("image_encoder"), **({"controlnet": nets} if nets else {})}
        return with_projections(self.built(make, modules, companions, **more))


FAMILY = StableDiffusion()
