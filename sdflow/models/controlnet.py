"""diffusers' ControlNetModel: residuals for a UNet, computed from a control image.

https://arxiv.org/abs/2302.05543. It is the first half of a UNet, with the same inputs and the control image in [0, 1].
The graph does not scale its outputs: the caller multiplies them before passing them to the UNet.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from sdflow.errors import PassError
from sdflow.models.base import Config, Model, Original, Shapes, halved
from sdflow.models.ldm_names import ldm_unet_names
from sdflow.models.more_parameters import controlnet_parameters
from sdflow.models.ports import Port, Ports, Role, Sizes
from sdflow.models.residuals import by_name, residual_ports
from sdflow.models.unet import made_up, main_ports
from sdflow.models.working_memory import unet_values

if TYPE_CHECKING:
    import numpy as np
    import torch

_HINT_CHANNELS = (16, 32, 96, 256)
"""diffusers' defaults for ControlNetModel; each one after the first halves the image's size."""

_OF_UNET = (
    "act_fn", "addition_embed_type", "addition_time_embed_dim", "attention_head_dim", "block_out_channels",
    "class_embed_type", "cross_attention_dim", "down_block_types", "downsample_padding", "encoder_hid_dim",
    "encoder_hid_dim_type", "flip_sin_to_cos", "freq_shift", "layers_per_block", "mid_block_scale_factor",
    "mid_block_type", "norm_eps", "norm_num_groups", "num_attention_heads", "num_class_embeds", "only_cross_attention",
    "projection_class_embeddings_input_dim", "resnet_time_scale_shift", "transformer_layers_per_block",
    "upcast_attention", "use_linear_projection",
)  # fmt: skip
"""Config entries that `ControlNetModel.from_unet` copies, as far as Stable Diffusion checkpoints set them."""

# https://github.com/lllyasviel/ControlNet, cldm/cldm.py
_ORIGINAL: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"controlnet_cond_embedding\.conv_in\."), lambda found: "input_hint_block.0."),
    (
        re.compile(r"controlnet_cond_embedding\.blocks\.(\d+)\."),
        lambda found: f"input_hint_block.{2 * int(found[1]) + 2}.",
    ),
    (re.compile(r"controlnet_down_blocks\.(\d+)\."), lambda found: f"zero_convs.{found[1]}.0."),
    (re.compile(r"controlnet_mid_block\."), lambda found: "middle_block_out.0."),
)
_LAST_HINT = "controlnet_cond_embedding.conv_out."


class ControlNet(Model):
    """diffusers' ControlNetModel. Outputs one tensor per skip connection of the UNet, and one for its middle block."""

    class_name: ClassVar[str] = "ControlNetModel"
    weights_stem: ClassVar[str] = "diffusion_pytorch_model"
    library_module: ClassVar[str | None] = "diffusers.models.controlnets.controlnet"
    device_factor: ClassVar[float] = 0.62

    def empty(self, config: Config) -> torch.nn.Module:
        from diffusers import ControlNetModel

        module: torch.nn.Module = ControlNetModel.from_config(dict(config))
        return module

    def graph_parameters(self, config: Config) -> Shapes | None:
        return controlnet_parameters(config, _hint_channels(config))

    def config_for(self, unet: Config) -> Config:
        """Return the ControlNet config for this UNet, for files with tensors only."""
        own = {name: unet[name] for name in _OF_UNET if name in unet}
        return {
            "_class_name": self.class_name,
            **own,
            "in_channels": unet["out_channels"],
            "conditioning_channels": 3,
            "conditioning_embedding_out_channels": list(_HINT_CHANNELS),
            "controlnet_conditioning_channel_order": "rgb",
            "global_pool_conditions": False,
        }

    def distinguishing_shapes(self, config: Config) -> Shapes:
        """Return tensor shapes that distinguish ControlNets by their UNet, and from other models."""
        widths, hint = config["block_out_channels"], _hint_channels(config)
        return {
            "conv_in.weight": (widths[0], config["in_channels"], 3, 3),
            "controlnet_cond_embedding.conv_in.weight": (hint[0], config.get("conditioning_channels", 3), 3, 3),
            "mid_block.attentions.0.transformer_blocks.0.attn2.to_k.weight": (
                widths[-1],
                config["cross_attention_dim"],
            ),
        }

    def ports(self, config: Config) -> Ports:
        if config.get("global_pool_conditions"):
            raise PassError(
                "global_pool_conditions: this ControlNet pools its outputs over the image, which is not supported",
                where="ControlNet",
                remedy="Use a spatial ControlNet (canny, depth, openpose and so on), or none.",
            )
        channels = config.get("conditioning_channels", 3)
        image = Port("controlnet_cond", "float32", ("batch", channels, "height", "width"), Role.HINT)
        sample, timestep, text, *more = main_ports(config, "ControlNet")
        return Ports(inputs=(sample, timestep, text, image, *more), outputs=residual_ports(config))

    def scale(self, config: Config) -> int:
        return int(2 ** (len(_hint_channels(config)) - 1))

    def working_values(self, config: Config, rows: int, columns: int, *, scores: bool) -> int:
        return unet_values(config, rows, columns, scores=scores)

    def smallest(self, config: Config) -> Sizes:
        pixels = 2 * halved(config) * self.scale(config)
        return Sizes(batch=2, height=pixels, width=pixels)

    def values(self, port: Port, shape: list[int], config: Config, random: np.random.Generator) -> np.ndarray:
        import numpy as np

        if port.role is Role.HINT:
            return random.random(shape, np.float32)
        return made_up(port, shape, random)

    def traced(self, module: Any) -> None:
        """Keep diffusers' default scaled_dot_product_attention, which the MultiHeadAttention fusion matches."""
        original, unscaled = module.forward, {"conditioning_scale": _Unscaled(), "return_dict": False}

        def forward(sample: Any, timestep: Any, encoder_hidden_states: Any, controlnet_cond: Any) -> Any:
            skips, middle = original(sample, timestep, encoder_hidden_states, controlnet_cond, **unscaled)
            return *skips, middle

        def forward_xl(
            sample: Any,
            timestep: Any,
            encoder_hidden_states: Any,
            controlnet_cond: Any,
            text_embeds: Any,
            time_ids: Any,
        ) -> Any:
            added = {"text_embeds": text_embeds, "time_ids": time_ids}
            skips, middle = original(
                sample, timestep, encoder_hidden_states, controlnet_cond, added_cond_kwargs=added, **unscaled
            )
            return *skips, middle

        module.forward = forward if module.config.addition_embed_type is None else forward_xl

    def reference(self, module: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        main = ("sample", "timestep", "encoder_hidden_states", "controlnet_cond")
        added = {name: value for name, value in inputs.items() if name not in main}
        found = module(**{name: inputs[name] for name in main}, **({"added_cond_kwargs": added} if added else {}))
        return by_name(found.down_block_res_samples, found.mid_block_res_sample)

    def recorded_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        given = {**dict(zip(("sample", "timestep"), args, strict=False)), **kwargs}
        return {
            "sample": given["sample"],
            "timestep": given["timestep"].reshape(1).float(),
            "encoder_hidden_states": given["encoder_hidden_states"],
            "controlnet_cond": given["controlnet_cond"],
            **(given.get("added_cond_kwargs") or {}),
        }

    def original_names(self, keys: Iterable[str]) -> dict[str, Original]:
        keys = list(keys)
        blocks = {found[1] for key in keys if (found := re.match(r"controlnet_cond_embedding\.blocks\.(\d+)\.", key))}
        names = ldm_unet_names(keys)
        for key in keys:
            for pattern, replaced in _ORIGINAL:
                if found := pattern.match(key):
                    names[key] = replaced(found) + key[found.end() :]
            if key.startswith(_LAST_HINT):
                names[key] = f"input_hint_block.{2 * len(blocks) + 2}.{key.removeprefix(_LAST_HINT)}"
        return {key: Original(name) for key, name in names.items()}


class _Unscaled:
    """A factor that leaves no node in the graph: diffusers multiplies each output by the net's scale."""

    def __rmul__(self, value: Any) -> Any:
        return value


def _hint_channels(config: Config) -> Sequence[int]:
    return config.get("conditioning_embedding_out_channels") or _HINT_CHANNELS
