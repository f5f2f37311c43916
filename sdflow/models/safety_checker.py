"""diffusers' StableDiffusionSafetyChecker: takes NHWC images in [0, 1] and blacks out flagged ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from sdflow.models.base import Config, Model, Shapes
from sdflow.models.clip_text import UNUSED
from sdflow.models.more_parameters import clip_vision_parameters
from sdflow.models.ports import Port, Ports, Role, Sizes

if TYPE_CHECKING:
    import numpy as np
    import torch


class SafetyChecker(Model):
    class_name: ClassVar[str] = "StableDiffusionSafetyChecker"
    weights_stem: ClassVar[str] = "model"

    def library_class(self) -> Any:
        from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker

        return StableDiffusionSafetyChecker

    def empty(self, config: Config) -> torch.nn.Module:
        from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
        from transformers import CLIPConfig

        module: torch.nn.Module = StableDiffusionSafetyChecker(CLIPConfig.from_dict(dict(config)))
        return module

    def graph_parameters(self, config: Config) -> Shapes | None:
        return clip_vision_parameters(config["vision_config"], config["projection_dim"])

    def ports(self, config: Config) -> Ports:
        size = config["vision_config"]["image_size"]
        images = ("batch", "height", "width", 3)
        return Ports(
            inputs=(
                Port("clip_input", "float32", ("batch", 3, size, size), Role.SEEN),
                Port("images", "float32", images, Role.PIXELS),
            ),
            outputs=(
                Port("out_images", "float32", images, Role.CHECKED),
                Port("has_nsfw_concepts", "bool", ("batch",), Role.FLAGS),
            ),
        )

    def smallest(self, config: Config) -> Sizes:
        return Sizes(batch=2, height=8, width=8)

    def values(self, port: Port, shape: list[int], config: Config, random: np.random.Generator) -> np.ndarray:
        import numpy as np

        return (
            random.random(shape, np.float32) if port.name == "images" else super().values(port, shape, config, random)
        )

    def traced(self, module: Any) -> None:
        """Compute the scores of diffusers' `forward_onnx`. Its `images[flagged] = 0` would be exported as a Where whose
        condition, [batch], broadcasts along the images' last axis; this uses a correct Where."""
        import torch
        from torch.nn.functional import normalize

        def cosines(embeds: Any, concepts: Any) -> Any:
            return normalize(embeds) @ normalize(concepts).t()

        def forward(clip_input: Any, images: Any) -> tuple[Any, Any]:
            embeds = module.visual_projection(module.vision_model(clip_input)[1])
            special = cosines(embeds, module.special_care_embeds) - module.special_care_embeds_weights
            adjustment = torch.any(special > 0, dim=1, keepdim=True) * 0.01
            concepts = cosines(embeds, module.concept_embeds) - module.concept_embeds_weights + adjustment
            flagged = torch.any(concepts > 0, dim=1)
            return torch.where(flagged[:, None, None, None], torch.zeros_like(images), images), flagged

        module.forward = forward

    def reference(self, module: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return images and flags of diffusers' StableDiffusionSafetyChecker.forward_onnx, and the scores behind the flags,
        (batch, concepts)."""
        import torch
        from diffusers.pipelines.stable_diffusion.safety_checker import cosine_distance

        images = inputs["images"]
        embeds = module.visual_projection(module.vision_model(inputs["clip_input"])[1])
        special = cosine_distance(embeds, module.special_care_embeds) - module.special_care_embeds_weights
        adjustment = torch.any(special > 0, dim=1, keepdim=True) * 0.01
        scores = cosine_distance(embeds, module.concept_embeds) - module.concept_embeds_weights + adjustment
        flagged = torch.any(scores > 0, dim=1)
        blackened = torch.where(flagged[:, None, None, None], torch.zeros_like(images), images)
        return {"out_images": blackened, "has_nsfw_concepts": flagged, "scores": scores}

    def recorded_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """diffusers passes `images` as a numpy array, (batch, height, width, 3), in [0, 1]."""
        import torch

        return {"clip_input": kwargs["clip_input"], "images": torch.as_tensor(kwargs["images"])}

    def unused(self, name: str, keys: Iterable[str]) -> bool:
        return name.endswith(UNUSED)

    def current_name(self, name: str) -> str:
        """Collapse a doubled `vision_model.` prefix: transformers releases differ in it."""
        return name.replace("vision_model.vision_model.", "vision_model.")
