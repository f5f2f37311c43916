"""Prepare FLUX.1's transformer for export in the form that ONNX Runtime's fusions match.

`FusionMultiHeadAttentionMMDit` (onnxruntime.transformers) matches an earlier diffusers' graph, with heads before
tokens: q, k and v are transposed before the norms, text and image are joined along the tokens, then rotated. Current
diffusers has tokens first, and torch's RMSNorm, which the exporter does not support.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def prepare(module: Any) -> None:
    """Replace, in place, the parts of a FluxTransformer2DModel that do not export well."""
    from diffusers.models.transformers.transformer_flux import FluxAttention
    from torch.nn import RMSNorm

    for part in module.modules():
        if isinstance(part, RMSNorm):
            part.forward = partial(_normed, part)
        elif isinstance(part, FluxAttention):
            part.forward = partial(_attended, part)
    module.pos_embed.forward = partial(_rotations, module.pos_embed.theta, tuple(module.pos_embed.axes_dim))


def _normed(part: Any, values: torch.Tensor) -> torch.Tensor:
    import torch

    return values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + part.eps) * part.weight


def _rotations(theta: float, widths: tuple[int, ...], ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of the rotary embedding, (tokens, head) each, with negated sines of even channels, as
    `rotated` expects. diffusers computes angles in float64, which some providers lack; float32 is off by at most 8e-6
    for images of 2048 pixels."""
    import torch

    angles = []
    for axis, width in enumerate(widths):
        frequencies = [theta ** (-channel / width) for channel in range(0, width, 2) for _ in range(2)]
        angles.append(ids[:, axis : axis + 1].float() * torch.tensor(frequencies))
    joined = torch.cat(angles, dim=-1)
    return joined.cos(), joined.sin() * torch.tensor([-1.0, 1.0] * (sum(widths) // 2))


def _attended(
    part: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor | None = None,
    image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Any:
    """Compute attention. Text tokens come first."""
    import torch

    assert image_rotary_emb is not None
    cosine, sine = (each[None, None] for each in image_rotary_emb)
    neighbours = torch.tensor([channel ^ 1 for channel in range(part.head_dim)])

    def heads(values: torch.Tensor) -> torch.Tensor:
        return values.view(values.shape[0], -1, part.heads, part.head_dim).transpose(1, 2)

    def rotated(values: torch.Tensor) -> torch.Tensor:
        """Rotate pairs of channels; one Gather replaces slices and a Concat."""
        return values * cosine + values.index_select(-1, neighbours) * sine

    queries = part.norm_q(heads(part.to_q(hidden_states)))
    keys = part.norm_k(heads(part.to_k(hidden_states)))
    values = heads(part.to_v(hidden_states))
    text = encoder_hidden_states
    if text is not None:
        queries = torch.cat([part.norm_added_q(heads(part.add_q_proj(text))), queries], dim=2)
        keys = torch.cat([part.norm_added_k(heads(part.add_k_proj(text))), keys], dim=2)
        values = torch.cat([heads(part.add_v_proj(text)), values], dim=2)
    found = torch.nn.functional.scaled_dot_product_attention(rotated(queries), rotated(keys), values)
    found = found.transpose(1, 2).reshape(hidden_states.shape[0], -1, part.heads * part.head_dim)
    if text is None:
        return found
    of_text, of_image = found[:, : text.shape[1]], found[:, text.shape[1] :]
    return part.to_out[1](part.to_out[0](of_image)), part.to_add_out(of_text)
