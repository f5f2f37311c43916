"""diffusers' FluxTransformer2DModel: it reads latents as a row of packed patches, with their places for its rotary embedding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from sdflow.models.base import Config, Model, Original, Shapes
from sdflow.models.ports import Port, Ports, Role, Sizes, timestep_port
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
        from diffusers.models.transformers.transformer_flux import FluxAttention
        from torch.nn import RMSNorm

        for part in module.modules():
            if isinstance(part, RMSNorm):
                part.forward = partial(_normed, part)  # the exporter knows no operator for it
            elif isinstance(part, FluxAttention):
                part.forward = partial(_attended, part)
        original = module.forward

        def forward(latents: Any, timestep: Any, encoder_hidden_states: Any, pooled_projections: Any) -> Any:
            return _run(original, latents, timestep, encoder_hidden_states, pooled_projections)

        module.forward = forward

    def reference(self, module: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {"velocity": _run(module, *(inputs[port.name] for port in self.ports(module.config).inputs))}

    def recorded_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "latents": unpacked(kwargs["hidden_states"], *_size(kwargs["img_ids"])),
            "timestep": 1000 * kwargs["timestep"][:1].float(),
            "encoder_hidden_states": kwargs["encoder_hidden_states"],
            "pooled_projections": kwargs["pooled_projections"],
        }

    def recorded_outputs(self, ports: Ports, kwargs: Mapping[str, Any], outputs: Sequence[Any]) -> dict[str, Any]:
        return {"velocity": unpacked(outputs[0], *_size(kwargs["img_ids"]))}

    def lora_spellings(self, modules: Iterable[str]) -> Mapping[str, tuple[str | Original, ...]]:
        return {module: (module,) for module in modules}

    def has_lora_module(self, module: str) -> bool:
        return module.startswith(("single_transformer_blocks_", "x_embedder", "time_text_embed_"))


def _size(ids: Any) -> tuple[int, int]:
    """Rows and columns of latents, by the places of their patches."""
    rows, columns = (int(ids[:, axis].max() + 1) * PATCH for axis in (1, 2))
    return rows, columns


def _normed(part: Any, values: Any) -> Any:
    return values * (values.square().mean(-1, keepdim=True) + part.eps).rsqrt() * part.weight


def _attended(part: Any, hidden_states: Any, encoder_hidden_states: Any = None, image_rotary_emb: Any = None) -> Any:
    """As diffusers' FluxAttnProcessor, which reads sizes in a way that makes constants of them in a trace. Tokens of the text
    come first."""
    import torch

    def heads(values: Any) -> Any:
        return values.unflatten(-1, (-1, part.head_dim))

    def rotated(values: Any) -> Any:
        cosine, sine = (each[None, :, None] for each in image_rotary_emb)
        turned = torch.stack([-values[..., 1::2], values[..., 0::2]], dim=-1).flatten(-2)
        return values * cosine + turned * sine

    queries = part.norm_q(heads(part.to_q(hidden_states)))
    keys, values = part.norm_k(heads(part.to_k(hidden_states))), heads(part.to_v(hidden_states))
    text = encoder_hidden_states
    if text is not None:
        queries = torch.cat([part.norm_added_q(heads(part.add_q_proj(text))), queries], dim=1)
        keys = torch.cat([part.norm_added_k(heads(part.add_k_proj(text))), keys], dim=1)
        values = torch.cat([heads(part.add_v_proj(text)), values], dim=1)
    by_head = (each.transpose(1, 2) for each in (rotated(queries), rotated(keys), values))
    found = torch.nn.functional.scaled_dot_product_attention(*by_head).transpose(1, 2).flatten(2)
    if text is None:
        return found
    of_text, of_image = found[:, : text.shape[1]], found[:, text.shape[1] :]
    return part.to_out[1](part.to_out[0](of_image)), part.to_add_out(of_text)


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
