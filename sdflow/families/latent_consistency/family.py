"""Latent consistency models (LCM, https://arxiv.org/abs/2310.04378): Stable Diffusion 1.x in few steps.

The UNet takes the guidance scale as an input: runs have one row per image, and there is no negative prompt. With a
start image, all steps are spread over the range that its strength leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from sdflow.families.shared.architecture import Architecture
from sdflow.families.shared.colors import STABLE_DIFFUSION, LatentColors
from sdflow.families.shared.defaults import Defaults, Task
from sdflow.families.shared.one_clip import OneClip


class LatentConsistency(OneClip):
    name = "latent_consistency"
    title = "Latent Consistency Models"
    classes = ("LatentConsistencyModelPipeline", "LatentConsistencyModelImg2ImgPipeline")
    strength_spreads = True
    defaults: ClassVar[Mapping[Task, Defaults]] = {
        "text": Defaults(steps=4, guidance_scale=8.0),
        "image": Defaults(steps=4, guidance_scale=8.0, strength=0.8),
        "inpaint": Defaults(steps=4, guidance_scale=8.0, strength=1.0),
    }
    verified_guidance = 8.5
    colors: ClassVar[LatentColors] = STABLE_DIFFUSION
    assembled_as: ClassVar[Mapping[Task, str]] = {"text": "ORTLatentConsistencyModelPipeline"}
    architectures: ClassVar[Mapping[str, Architecture]] = {
        "lcm": Architecture(like="sd15"),
        "lcm-tiny": Architecture(like="sd15-tiny"),
    }

    def torch_pipeline(
        self, modules: Mapping[str, Any], companions: Mapping[str, Any], options: Mapping[str, Any]
    ) -> Any:
        import diffusers

        return self.built(diffusers.LatentConsistencyModelPipeline, modules, companions)


FAMILY = LatentConsistency()
