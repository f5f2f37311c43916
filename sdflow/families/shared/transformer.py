"""Common code of families whose denoiser is a transformer: base class, part of the pipeline, and loading of LoRAs in
diffusers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from sdflow.families.shared.base import Family
from sdflow.families.shared.latents import Latents
from sdflow.families.shared.part import Layout, Part
from sdflow.models.base import Config, Model, Original, halved
from sdflow.models.ports import Port, Role

if TYPE_CHECKING:
    import numpy as np
    import torch

LAYOUT = Layout("model.diffusion_model.")
"""Location in files of the original layout."""
_LORA = ("transformer.", "lora_transformer_", "lora_unet_", "diffusion_model.", "base_model.model.", "")


def denoiser_part(model: Model, **more: Any) -> Part:
    """Return the transformer part of a family."""
    about = "The denoiser, run once per step."
    return Part("transformer", model, "transformer", about, layouts=(LAYOUT,), lora=_LORA, **more)


class Transformer(Model):
    """A transformer that predicts the velocity of latents, from image to noise.

    tokens: axis of the text tokens. own_module: matches module names in LoRA files (underscores for dots) that no other
    denoiser has. unnumbered: whether LoRA files also name `to_out.0` `to_out`.
    """

    weights_stem: ClassVar[str] = "diffusion_pytorch_model"
    tokens: ClassVar[str]
    own_module: ClassVar[re.Pattern[str]]
    unnumbered: ClassVar[bool] = True

    def empty(self, config: Config) -> torch.nn.Module:
        module: torch.nn.Module = self.library_class().from_config(dict(config))
        return module

    def width(self, config: Config) -> int:
        return int(config["num_attention_heads"] * config["attention_head_dim"])

    def more_axes(self, config: Config) -> Mapping[str, int]:
        return {self.tokens: 13}

    def values(self, port: Port, shape: list[int], config: Config, random: np.random.Generator) -> np.ndarray:
        if port.role is Role.TIMESTEP:
            return random.uniform(0, 1000, shape).astype(port.dtype)
        return super().values(port, shape, config, random)

    def lora_spellings(self, modules: Iterable[str]) -> Mapping[str, tuple[str | Original, ...]]:
        """In the original layout, q, k and v are row ranges of one module."""
        modules = list(modules)
        original = self.original_names(f"{module}.weight" for module in modules)
        found: dict[str, tuple[str | Original, ...]] = {}
        for module in modules:
            names: list[str | Original] = [module]
            if self.unnumbered and module.endswith(".to_out.0"):
                names.append(module.removesuffix(".0"))
            there = original.get(f"{module}.weight")
            if there is not None and (name := there.name.removesuffix(".weight")) != module:
                names.append(replace(there, name=name))
            found[module] = tuple(names)
        return found

    def has_lora_module(self, module: str) -> bool:
        return self.own_module.match(module) is not None


def load_into_transformer(
    self: Family, tensors: Mapping[str, torch.Tensor], module: Any, adapter: str, **options: Any
) -> None:
    """See `Family.load_lora`."""
    self.lora_loader().load_lora_into_transformer(dict(tensors), module, adapter, **options)


def sized_by_vae(denoiser: Config, vae: Config, side: int, patch: int) -> Latents:
    """Return the latents of a transformer without a native size, sized for the VAE, as in the published pipelines.
    side: default in pixels if the VAE's config has none."""
    sized = {**denoiser, "sample_size": int(vae.get("sample_size") or side) // halved(vae)}
    return Latents.of(sized, vae, multiple=patch, patch=patch, where="transformer")
