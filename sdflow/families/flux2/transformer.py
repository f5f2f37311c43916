"""diffusers' Flux2Transformer2DModel: the denoiser of FLUX.2.

It reads a row of tokens: text, then one token per latent pixel, with four-axis positions for the rotary embedding. All
blocks of a kind share their modulation, which depends only on the timestep. `timestep` is float32 of shape [1], 0 to
1000, shared by the whole batch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from sdflow.errors import PassError
from sdflow.families.flux2.names import flux2_names
from sdflow.families.flux2.parameters import flux2_parameters
from sdflow.families.flux2.references import EXTENDED, reference_ports
from sdflow.families.shared.transformer import Transformer
from sdflow.models.base import Config, Original, Shapes
from sdflow.models.ports import Port, Ports, Role, Sizes, timestep_port
from sdflow.models.qwen3_text import TOKENS

if TYPE_CHECKING:
    import torch

DISTILLED = "is_distilled"
"""model_index.json entry for guidance distilled into the weights; sdflow keeps it in this config."""
USUAL_TOKENS = 512
"""Usual number of text tokens."""
PLACES = 2048
"""Number of positions per axis in the graph's tables, for rows and columns of latents and for text tokens."""

_BLOCK = re.compile(r"(single_)?(?:transformer_)?(?:double_)?blocks_(\d+)_")
_OWN_MODULE = re.compile(
    r"(double_blocks|single_blocks|single_transformer_blocks|transformer_blocks|double_stream_modulation_(img|txt)"
    r"|single_stream_modulation|time_guidance_embed|norm_out|final_layer|time_in)_|(x_embedder|context_embedder|proj_out"
    r"|img_in|txt_in)$"
)
_READS_TEXT = re.compile(r"^(context_embedder|txt_in)$")
_READS_HIDDEN = re.compile(r"(_to_[qkv]|_add_[qkv]_proj|_to_qkv_mlp_proj|_qkv|_linear1|_linear_in|_mlp_0)$")


class Flux2Transformer(Transformer):
    """diffusers' Flux2Transformer2DModel. Predicts the velocity of latents, from image to noise."""

    class_name: ClassVar[str] = "Flux2Transformer2DModel"
    library_module: ClassVar[str | None] = "diffusers.models.transformers.transformer_flux2"
    tokens: ClassVar[str] = TOKENS
    own_module: ClassVar[re.Pattern[str]] = _OWN_MODULE
    unnumbered: ClassVar[bool] = False

    def empty(self, config: Config) -> torch.nn.Module:
        return super().empty({name: value for name, value in config.items() if name not in (DISTILLED, EXTENDED)})

    def parameters(self, config: Config) -> Shapes | None:
        return flux2_parameters(config)

    def ports(self, config: Config) -> Ports:
        if config.get("guidance_embeds", True):
            raise PassError(
                "it takes guidance as an input, like FLUX.2-dev",
                where="transformer: guidance_embeds",
                remedy="Use FLUX.2-klein.",
            )
        axes = ("batch", config["in_channels"], "latent_height", "latent_width")
        return Ports(
            inputs=(
                Port("sample", "float32", axes, Role.LATENTS),
                timestep_port(),
                Port("encoder_hidden_states", "float32", ("batch", TOKENS, config["joint_attention_dim"])),
                *reference_ports(config),
            ),
            outputs=(Port("out_sample", "float32", axes, Role.PREDICTION),),
        )

    def smallest(self, config: Config) -> Sizes:
        return Sizes(batch=2, height=4, width=6, vae_scale=1)

    def working_values(self, config: Config, rows: int, columns: int, *, scores: bool) -> int:
        """A single block holds q, k, v and both halves of its feed-forward layer, besides the residual and its norm."""
        tokens = rows * columns + USUAL_TOKENS
        width, heads, inner = self.width(config), config["num_attention_heads"], 2 * config.get("mlp_ratio", 3.0)
        return int(tokens * ((7 + inner) * width + (heads * tokens if scores else 0)))

    def distinguishing_shapes(self, config: Config) -> Shapes:
        width = self.width(config)
        doubles, singles = config["num_layers"] - 1, config["num_single_layers"] - 1
        inner = int(width * config.get("mlp_ratio", 3.0))
        return {
            "x_embedder.weight": (width, config["in_channels"]),
            "context_embedder.weight": (width, config["joint_attention_dim"]),
            f"transformer_blocks.{doubles}.attn.to_q.weight": (width, width),
            f"single_transformer_blocks.{singles}.attn.to_out.weight": (width, width + inner),
        }

    def traced(self, module: Any) -> None:
        """Read the rotary embedding from tables, computed in float64 like the library's."""
        from diffusers.models.transformers import transformer_flux2 as library
        from torch.nn import RMSNorm

        tables = _tables(module.pos_embed)
        module.pos_embed.forward = partial(_looked_up, tables)
        module.time_guidance_embed.forward = partial(_embedded, module.time_guidance_embed)
        for part in module.modules():
            if isinstance(part, RMSNorm):
                part.forward = partial(_normed, part)  # not supported by the exporter
            elif isinstance(part, library.Flux2SwiGLU):
                part.forward = partial(_gated, part)
            elif isinstance(part, library.Flux2Attention):
                part.forward = partial(_attended, part)
            elif isinstance(part, library.Flux2ParallelSelfAttention):
                part.forward = partial(_attended_beside, part)
        original = module.forward

        def forward(sample: Any, timestep: Any, encoder_hidden_states: Any) -> Any:
            return _run(original, sample, timestep, encoder_hidden_states)

        module.forward = forward

    def reference(self, module: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Compute tokens and positions with diffusers' pipeline itself."""
        from diffusers import Flux2KleinPipeline as Library

        sample, text = inputs["sample"], inputs["encoder_hidden_states"]
        ids = Library._prepare_latent_ids(sample).to(sample.device)
        found = module(
            hidden_states=Library._pack_latents(sample),
            timestep=inputs["timestep"].expand(len(sample)).to(sample.dtype) / 1000,
            encoder_hidden_states=text,
            txt_ids=Library._prepare_text_ids(text).to(text.device),
            img_ids=ids,
        ).sample
        return {"out_sample": Library._unpack_latents_with_ids(found, ids, *sample.shape[2:])}

    def recorded_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        return {
            "sample": _in_rows(kwargs["hidden_states"], kwargs["img_ids"]),
            "timestep": 1000 * kwargs["timestep"][:1].float(),
            "encoder_hidden_states": kwargs["encoder_hidden_states"],
        }

    def recorded_outputs(
        self, ports: Ports, kwargs: Mapping[str, Any], outputs: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        return {"out_sample": _in_rows(outputs[0], kwargs["img_ids"])}

    def original_names(self, keys: Iterable[str]) -> dict[str, Original]:
        return flux2_names(keys)

    def lora_misfit(self, config: Config, module: str, width: int) -> str | None:
        if not self.has_lora_module(module):
            return f"this transformer has no {module}"
        if block := _BLOCK.match(module):
            layers = config.get("num_single_layers" if block[1] else "num_layers")
            if layers is not None and int(block[2]) >= layers:
                return f"this transformer has {layers} {'single' if block[1] else 'double'} blocks"
        text = config.get("joint_attention_dim", width)
        if _READS_TEXT.search(module) and width != text:
            return f"for text embeddings {width} wide, not {text}"
        if "num_attention_heads" in config and _READS_HIDDEN.search(module) and width != self.width(config):
            return f"for a transformer {width} wide, not {self.width(config)}"
        return None


def _in_rows(tokens: Any, ids: Any) -> Any:
    """Return tokens with positions (rows, tokens, 4) as latents."""
    rows, columns = (int(ids[..., axis].max()) + 1 for axis in (1, 2))
    batch, _, channels = tokens.shape
    return tokens.permute(0, 2, 1).reshape(batch, channels, rows, columns)


def _places(rows: Any, columns: Any) -> Any:
    """Return (rows * columns, 4): time, row, column, and text token; only row and column vary for latents."""
    import torch

    down, across = (each.flatten() for each in torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"))
    return torch.stack([0 * down, down, across, 0 * down], dim=-1)


def _text_places(tokens: Any) -> Any:
    import torch

    token = torch.arange(tokens)
    return torch.stack([0 * token, 0 * token, 0 * token, token], dim=-1)


def _run(forward: Any, sample: Any, timestep: Any, text: Any) -> Any:
    batch, channels, rows, columns = sample.shape
    found = forward(
        hidden_states=sample.flatten(2).permute(0, 2, 1),
        timestep=timestep / 1000,
        encoder_hidden_states=text,
        txt_ids=_text_places(text.shape[1]),
        img_ids=_places(rows, columns),
        return_dict=False,
    )[0]
    return found.permute(0, 2, 1).reshape(batch, channels, rows, columns)


def _tables(embedding: Any) -> list[tuple[Any, Any]]:
    """Return cosines and sines (positions, width) for each axis."""
    import torch

    whole = embedding(torch.arange(PLACES)[:, None].expand(PLACES, len(embedding.axes_dim)))
    split = (each.split(list(embedding.axes_dim), dim=-1) for each in whole)
    return list(zip(*split, strict=True))


def _looked_up(tables: Sequence[tuple[Any, Any]], ids: Any) -> tuple[Any, Any]:
    """Return cosines and sines (tokens, width) at these positions."""
    import torch

    cosines, sines = zip(
        *((cosine[ids[:, i]], sine[ids[:, i]]) for i, (cosine, sine) in enumerate(tables)), strict=True
    )
    return torch.cat(cosines, dim=-1), torch.cat(sines, dim=-1)


def _embedded(part: Any, timestep: Any, guidance: Any) -> Any:
    """Embed the timestep without the library's cast of the sines to the timestep's type: a float16 graph has its own
    cast there."""
    return part.timestep_embedder(part.time_proj(timestep))


def _normed(part: Any, values: Any) -> Any:
    variance = values.pow(2).mean(-1, keepdim=True)
    return values * (variance + part.eps).rsqrt() * part.weight


def _gated(part: Any, values: Any) -> Any:
    gate, value = values.chunk(2, dim=-1)
    return part.gate_fn(gate) * value


def _attended(part: Any, hidden_states: Any, encoder_hidden_states: Any, image_rotary_emb: Any = None) -> Any:
    """As in diffusers' Flux2AttnProcessor, with heads before tokens, as ONNX Runtime's fusion matches for FLUX.1."""
    import torch

    text = encoder_hidden_states
    both = (
        (part.norm_added_q(_heads(part, part.add_q_proj(text))), part.norm_q(_heads(part, part.to_q(hidden_states)))),
        (part.norm_added_k(_heads(part, part.add_k_proj(text))), part.norm_k(_heads(part, part.to_k(hidden_states)))),
    )
    queries, keys = (_rotated(torch.cat(pair, dim=2), image_rotary_emb) for pair in both)
    values = torch.cat([_heads(part, part.add_v_proj(text)), _heads(part, part.to_v(hidden_states))], dim=2)
    found = _attention(part, queries, keys, values)
    tokens = text.shape[1]
    return part.to_out[1](part.to_out[0](found[:, tokens:])), part.to_add_out(found[:, :tokens])


def _attended_beside(part: Any, hidden_states: Any, image_rotary_emb: Any = None) -> Any:
    """As in diffusers' Flux2ParallelSelfAttnProcessor: attention and feed-forward in parallel, with shared matrices."""
    import torch

    widths = [part.inner_dim] * 3 + [part.mlp_hidden_dim * part.mlp_mult_factor]
    queries, keys, values, inner = part.to_qkv_mlp_proj(hidden_states).split(widths, dim=-1)
    queries = _rotated(part.norm_q(_heads(part, queries)), image_rotary_emb)
    keys = _rotated(part.norm_k(_heads(part, keys)), image_rotary_emb)
    found = _attention(part, queries, keys, _heads(part, values))
    return part.to_out(torch.cat([found, part.mlp_act_fn(inner)], dim=-1))


def _heads(part: Any, values: Any) -> Any:
    """Return (batch, heads, tokens, head width)."""
    return values.view(values.shape[0], -1, part.heads, part.head_dim).transpose(1, 2)


def _rotated(values: Any, rotary: Any) -> Any:
    import torch

    cosine, sine = (each[None, None] for each in rotary)
    real, imaginary = values.reshape(*values.shape[:-1], -1, 2).unbind(-1)
    turned = torch.stack([-imaginary, real], dim=-1).flatten(3)
    return values * cosine + turned * sine


def _attention(part: Any, queries: Any, keys: Any, values: Any) -> Any:
    import torch

    found = torch.nn.functional.scaled_dot_product_attention(queries, keys, values)
    return found.transpose(1, 2).reshape(queries.shape[0], -1, part.heads * part.head_dim)
