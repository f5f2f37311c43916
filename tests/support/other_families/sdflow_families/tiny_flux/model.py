"""diffusers' FluxTransformer2DModel: it reads latents as a row of packed patches, with their places for its rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from sdflow.models.base import Config, Model, Port, Ports, Role, Shapes, Sizes, timestep_port
from sdflow.models.t5_text import TOKENS

PATCH = 2


def packed(latents: Any) -> Any:
    """(batch, rows * columns / 4, channels * 4) of latents (batch, channels, rows, columns)."""
    batch, channels, rows, columns = latents.shape
    parts = latents.reshape(batch, channels, rows // PATCH, PATCH, columns // PATCH, PATCH).permute(0, 2, 4, 1, 3, 5)
    return parts.reshape(batch, (rows // PATCH) * (columns // PATCH), channels * PATCH * PATCH)


def unpacked(tokens: Any, rows: Any, columns: Any) -> Any:
    """The latents of these."""
    batch, _, channels = tokens.shape
    parts = tokens.reshape(batch, rows // PATCH, columns // PATCH, channels // PATCH**2, PATCH, PATCH)
    return parts.permute(0, 3, 1, 4, 2, 5).reshape(batch, channels // PATCH**2, rows, columns)


def places(rows: Any, columns: Any) -> Any:
    """(tokens, 3): 0, row and column of each patch."""
    import torch

    down, across = torch.arange(rows // PATCH), torch.arange(columns // PATCH)
    grid = torch.stack(torch.meshgrid(down, across, indexing="ij"), dim=-1).reshape(-1, 2)
    return torch.nn.functional.pad(grid, (1, 0)).float()


class FluxTransformer(Model):
    """The velocity, from image to noise, of latents that are not packed."""

    class_name: ClassVar[str] = "FluxTransformer2DModel"
    weights_stem: ClassVar[str] = "diffusion_pytorch_model"
    library_module: ClassVar[str | None] = "diffusers.models.transformers.transformer_flux"

    def empty(self, config: Config) -> Any:
        from diffusers import FluxTransformer2DModel

        return FluxTransformer2DModel.from_config(dict(config))

    def ports(self, config: Config) -> Ports:
        axes = ("batch", config["in_channels"] // PATCH**2, "latent_height", "latent_width")
        return Ports(
            inputs=(
                Port("latents", "float32", axes, Role.LATENTS),
                timestep_port(),
                Port("encoder_hidden_states", "float32", ("batch", TOKENS, config["joint_attention_dim"])),
                Port("pooled_projections", "float32", ("batch", config["pooled_projection_dim"])),
            ),
            outputs=(Port("velocity", "float32", axes, Role.PREDICTION),),
        )

    def smallest(self, config: Config) -> Sizes:
        return Sizes(batch=2, height=4 * PATCH, width=6 * PATCH, vae_scale=1)

    def width(self, config: Config) -> int:
        return int(config["num_attention_heads"] * config["attention_head_dim"])

    def more_axes(self, config: Config) -> Mapping[str, int]:
        return {TOKENS: 13}

    def distinguishing_shapes(self, config: Config) -> Shapes:
        return {"x_embedder.weight": (self.width(config), config["in_channels"])}

    def values(self, port: Port, shape: list[int], config: Config, random: Any) -> Any:
        if port.role is Role.TIMESTEP:
            return random.uniform(0, 1000, shape).astype(port.dtype)
        return super().values(port, shape, config, random)

    def traced(self, module: Any) -> None:
        from torch.nn import RMSNorm

        for part in module.modules():
            if isinstance(part, RMSNorm):
                part.forward = partial(_normed, part)  # the exporter knows no operator for it
        original = module.forward

        def forward(latents: Any, timestep: Any, encoder_hidden_states: Any, pooled_projections: Any) -> Any:
            return _run(original, latents, timestep, encoder_hidden_states, pooled_projections)

        module.forward = forward

    def reference(self, module: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {"velocity": _run(module, *(inputs[port.name] for port in self.ports(module.config).inputs))}

    def recorded_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        rows, columns = (int(kwargs["img_ids"][:, axis].max() + 1) * PATCH for axis in (1, 2))
        return {
            "latents": unpacked(kwargs["hidden_states"], rows, columns),
            "timestep": 1000 * kwargs["timestep"][:1].float(),
            "encoder_hidden_states": kwargs["encoder_hidden_states"],
            "pooled_projections": kwargs["pooled_projections"],
        }


def _normed(part: Any, values: Any) -> Any:
    return values * (values.square().mean(-1, keepdim=True) + part.eps).rsqrt() * part.weight


def _run(forward: Any, latents: Any, timestep: Any, text: Any, pooled: Any) -> Any:
    import torch

    batch, _, rows, columns = latents.shape
    found = forward(
        hidden_states=packed(latents),
        timestep=(timestep / 1000).expand(batch).to(latents.dtype),
        encoder_hidden_states=text,
        pooled_projections=pooled,
        txt_ids=torch.zeros(text.shape[1], 3),
        img_ids=places(rows, columns),
        return_dict=False,
    )[0]
    return unpacked(found, rows, columns)
