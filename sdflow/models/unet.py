"""diffusers' UNet2DConditionModel: the denoiser of Stable Diffusion 1.x, 2.x and XL.

- `timestep` is float32 of shape [1], shared by the whole batch: diffusers passes `np.array([t])` in the session's input
  type, and optimum-onnx adds an axis if the input has one. An integer type would truncate Euler's and DPM's fractional
  timesteps.
- With IP-Adapters, the UNet also takes image tokens and their scales (`sdflow.models.image_prompts`).
- The UNet of a latent consistency model also takes `timestep_cond`, the embedded guidance scale.
- SDXL's UNet also takes `text_embeds`, the pooled prompt embedding, and `time_ids`: original height and width, crop top
  and left, target height and width, in pixels. The refiner's has an aesthetic score in place of the target's size.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from sdflow.errors import PassError
from sdflow.models.base import Config, Model, Original, Shapes, halved
from sdflow.models.image_prompts import (
    ADAPTED,
    ScaleInput,
    add_adapters,
    get_scales,
    image_prompt_ports,
    is_image_prompt,
    recorded_tokens,
    scale_input,
    set_scales,
    split_inputs,
    token_counts,
)
from sdflow.models.ldm_names import ldm_unet_names
from sdflow.models.parameters import unet_parameters
from sdflow.models.ports import GUIDANCE, Port, Ports, Role, Sizes, timestep_port
from sdflow.models.residuals import CONTROLLED, as_arguments, by_name, is_residual, residual_ports
from sdflow.models.working_memory import unet_values

if TYPE_CHECKING:
    import numpy as np
    import torch

_MORE_INPUTS = ("class_embed_type", "addition_embed_type", "num_class_embeds")

_MAIN = ("sample", "timestep", "encoder_hidden_states")
_IMAGES = "image_embeds"
"""diffusers' name for image prompts in `added_cond_kwargs`."""

_READS_TEXT = re.compile(r"attn2_to_[kv](_lora)?$")
_TRANSFORMER = re.compile(r"transformer_blocks_(\d+)_")
_FIRST_ATTENTION = re.compile(r"^(down_blocks_0_attentions_|input_blocks_1_1_)")
"""Attention in the level with the most pixels; SDXL has none there."""


class UNet(Model):
    """diffusers' UNet2DConditionModel. Predicts the noise or the velocity in latents."""

    class_name: ClassVar[str] = "UNet2DConditionModel"
    weights_stem: ClassVar[str] = "diffusion_pytorch_model"
    library_module: ClassVar[str | None] = "diffusers.models.unets.unet_2d_condition"
    time_ids: ClassVar[int] = 6
    device_factor: ClassVar[float] = 0.62

    def empty(self, config: Config) -> torch.nn.Module:
        from diffusers import UNet2DConditionModel

        known = {name: value for name, value in config.items() if name not in (CONTROLLED, ADAPTED)}
        module = UNet2DConditionModel.from_config(known)
        if config.get(CONTROLLED):
            module.register_to_config(**{CONTROLLED: True})  # for `traced`
        if tokens := config.get(ADAPTED):
            add_adapters(module, tokens)
        made: torch.nn.Module = module
        return made

    def parameters(self, config: Config) -> Shapes | None:
        return unet_parameters(config)

    def ports(self, config: Config) -> Ports:
        return Ports(
            inputs=(
                *main_ports(config, "unet", self.time_ids),
                *_guidance(config),
                *(residual_ports(config) if config.get(CONTROLLED) else ()),
                *image_prompt_ports(config),
            ),
            outputs=(
                Port(
                    "out_sample",
                    "float32",
                    ("batch", config["out_channels"], "latent_height", "latent_width"),
                    Role.PREDICTION,
                ),
            ),
        )

    def distinguishing_shapes(self, config: Config) -> Shapes:
        channels, kinds = config["block_out_channels"], config["down_block_types"]
        attention = "attentions.0.transformer_blocks.0.attn2.to_k.weight"
        level = next(index for index, kind in enumerate(kinds) if kind.startswith("CrossAttn"))
        return {
            "conv_in.weight": (channels[0], config["in_channels"], 3, 3),
            "conv_out.weight": (config["out_channels"], channels[0], 3, 3),
            f"down_blocks.{level}.{attention}": (channels[level], config["cross_attention_dim"]),
            f"mid_block.{attention}": (channels[-1], config["cross_attention_dim"]),
        }

    def config_from_shapes(self, config: Config, shapes: Shapes) -> Config:
        """Set whether the UNet takes the guidance embedding; its tensor has the same name in all layouts."""
        guidance = shapes.get("time_embedding.cond_proj.weight")
        width = guidance[1] if guidance is not None and len(guidance) == 2 else None
        return config if config.get("time_cond_proj_dim") == width else {**config, "time_cond_proj_dim": width}

    def smallest(self, config: Config) -> Sizes:
        deepest = 2 * halved(config)
        return Sizes(batch=2, height=deepest, width=deepest, vae_scale=1)

    def working_values(self, config: Config, rows: int, columns: int, *, scores: bool) -> int:
        return unet_values(config, rows, columns, scores=scores)

    def more_axes(self, config: Config) -> Mapping[str, int]:
        return token_counts(config)

    def values(self, port: Port, shape: list[int], config: Config, random: np.random.Generator) -> np.ndarray:
        return made_up(port, shape, random)

    def traced(self, module: Any) -> None:
        """Keep diffusers' default scaled_dot_product_attention, which the MultiHeadAttention fusion matches."""
        original = module.forward

        more = [port.name for port in self.ports(module.config).inputs[len(_MAIN) :]]

        def forward(sample: Any, timestep: Any, encoder_hidden_states: Any, *others: Any) -> Any:
            inputs = dict(zip(more, others, strict=True))
            set_scales(module, [ScaleInput(scale) for scale in split_inputs(inputs)[1]])
            given = _arguments(inputs)
            return original(sample, timestep, encoder_hidden_states, **given, return_dict=False)[0]

        module.forward = forward

    def reference(self, module: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        set_scales(module, [scale.item() for scale in split_inputs(inputs)[1]])
        given = _arguments({name: value for name, value in inputs.items() if name not in _MAIN})
        sample, timestep, text = (inputs[name] for name in _MAIN)
        return {"out_sample": module(sample, timestep, encoder_hidden_states=text, **given).sample}

    def recorded_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        sample, timestep = args
        guidance = kwargs.get(GUIDANCE)
        added = dict(kwargs.get("added_cond_kwargs") or {})
        images = recorded_tokens(added.pop(_IMAGES, None))
        return {
            "sample": sample,
            "timestep": timestep.reshape(1).float(),
            "encoder_hidden_states": kwargs["encoder_hidden_states"],
            **added,
            **({} if guidance is None else {GUIDANCE: guidance}),
            **by_name(kwargs.get("down_block_additional_residuals"), kwargs.get("mid_block_additional_residual")),
            **images,
        }

    def recorded_state(self, module: Any) -> dict[str, torch.Tensor]:
        import torch

        return {scale_input(index): torch.tensor([float(scale)]) for index, scale in enumerate(get_scales(module))}

    def fits(self, stored: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        """Accept stable-diffusion.cpp's form too: it stores the projections around attention as 1x1 convolutions."""
        return super().fits(stored, shape) or (len(shape) == 2 and stored == (*shape, 1, 1))

    def original_names(self, keys: Iterable[str]) -> dict[str, Original]:
        return {key: Original(name) for key, name in ldm_unet_names(keys).items()}

    def lora_spellings(self, modules: Iterable[str]) -> dict[str, tuple[str, ...]]:
        modules = list(modules)
        original = ldm_unet_names(modules)
        return {
            module: (
                module,
                *([module.removesuffix(".0")] if module.endswith(".to_out.0") else []),
                *([original[module]] if module in original else []),
            )
            for module in modules
        }

    def lora_misfit(self, config: Config, module: str, width: int) -> str | None:
        text = config.get("cross_attention_dim", width)
        if _READS_TEXT.search(module) and width != text:
            return f"for text embeddings {width} wide, not {text}"
        depth = config.get("transformer_layers_per_block") or 1
        deepest = depth if isinstance(depth, int) else max(depth)
        if (block := _TRANSFORMER.search(module)) and int(block[1]) >= deepest:
            return f"this UNet has transformers of at most {deepest} block{'s' if deepest > 1 else ''}"
        if _FIRST_ATTENTION.match(module) and "Attn" not in config.get("down_block_types", ["Attn"])[0]:
            return "this UNet has no attention there"
        return None


def _arguments(more: Mapping[str, Any]) -> dict[str, Any]:
    """Convert inputs by name to keyword arguments of the module's forward, except the main ones."""
    own = {name: value for name, value in more.items() if not (is_residual(name) or is_image_prompt(name))}
    tokens, _ = split_inputs(more)
    added = {name: value for name, value in own.items() if name != GUIDANCE} | ({_IMAGES: tokens} if tokens else {})
    guidance = {GUIDANCE: more[GUIDANCE]} if GUIDANCE in more else {}
    return {**({"added_cond_kwargs": added} if added else {}), **guidance, **as_arguments(more)}


def _guidance(config: Config) -> tuple[Port, ...]:
    """Return the guidance input of a latent consistency model's UNet."""
    width = config.get("time_cond_proj_dim")
    return () if width is None else (Port(GUIDANCE, "float32", ("batch", width)),)


class RefinerUNet(UNet):
    """The UNet of SDXL's refiner."""

    time_ids: ClassVar[int] = 5


def main_ports(config: Config, where: str, time_ids: int = UNet.time_ids) -> tuple[Port, ...]:
    """Return the inputs that Stable Diffusion's UNets and ControlNets share: latents, timestep, text, sizes.

    where: owner of the config, for messages. time_ids: size of SDXL's input of this name. Raises PassError if the
    config implies other inputs.
    """
    for option in _MORE_INPUTS:
        if config.get(option) is not None and (option, config[option]) != ("addition_embed_type", "text_time"):
            raise PassError(
                f"{option}={config[option]!r}: this UNet has inputs other than sample, timestep, and encoder_hidden_states",
                where=where,
                remedy="Only the architectures of Stable Diffusion 1.x, 2.x and XL are supported.",
            )
    return (
        Port("sample", "float32", ("batch", config["in_channels"], "latent_height", "latent_width"), Role.LATENTS),
        timestep_port(),
        Port("encoder_hidden_states", "float32", ("batch", "sequence", config["cross_attention_dim"])),
        *_added_conditions(config, time_ids),
    )


def made_up(port: Port, shape: list[int], random: np.random.Generator) -> np.ndarray:
    """Return random values of this shape for one of these inputs: timesteps 0 to 1000, sizes up to 1024 pixels."""
    import numpy as np

    if port.role is Role.TIMESTEP:
        return random.uniform(0, 1000, shape).astype(port.dtype)
    if port.name == "time_ids":
        return random.integers(0, 1025, shape).astype(port.dtype)
    return random.standard_normal(shape, np.float32)


def _added_conditions(config: Config, time_ids: int) -> tuple[Port, ...]:
    """Return the additional inputs of SDXL's UNet."""
    if config.get("addition_embed_type") is None:
        return ()
    sizes = ("addition_time_embed_dim", "projection_class_embeddings_input_dim")
    if missing := [name for name in sizes if config.get(name) is None]:
        raise PassError(
            f"config.json has addition_embed_type={config['addition_embed_type']!r} but no {missing[0]}", where="unet"
        )
    width, joined = (config[name] for name in sizes)
    if time_ids == UNet.time_ids and joined - RefinerUNet.time_ids * width == config["cross_attention_dim"]:
        raise PassError(
            "this is the SDXL refiner's UNet, whose time_ids differ",
            where="unet",
            remedy="Use the refiner's whole folder: its model_index.json has no text_encoder and no tokenizer.",
        )
    return (
        Port("text_embeds", "float32", ("batch", joined - time_ids * width)),
        Port(
            "time_ids",
            "float32",
            ("batch", time_ids),
            why_exact="half types round sizes above 2048 pixels; see keep_io_types",
        ),
    )
