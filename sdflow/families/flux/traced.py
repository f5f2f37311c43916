"""FLUX.1's transformer in the form that ONNX Runtime's fusions match.

`FusionMultiHeadAttentionMMDit` (onnxruntime.transformers) was written for the graph of an earlier diffusers, whose heads
come before the tokens: q, k and v are transposed before the norms, text and image are joined along the tokens, then
rotated. Today's diffusers has tokens first, and torch's own RMSNorm, for which the exporter has no operator.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def prepare(module: Any) -> None:
    """Replace the parts of a FluxTransformer2DModel that do not export well, in place."""
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
    """Cosines and sines of the rotary embedding, (tokens, head) each; sines of even channels are negated, as `rotated` adds
    them. diffusers computes angles in float64, which not every provider has; in float32 those of an image 2048 pixels wide are
    off by 8e-6 at most."""
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
    """Text tokens come first."""
    import torch

    assert image_rotary_emb is not None
    cosine, sine = (each[None, None] for each in image_rotary_emb)
    neighbours = torch.tensor([channel ^ 1 for channel in range(part.head_dim)])

    def heads(values: torch.Tensor) -> torch.Tensor:
        return values.view(values.shape[0], -1, part.heads, part.head_dim).transpose(1, 2)

    def rotated(values: torch.Tensor) -> torch.Tensor:
        """Pairs of channels, by their angles: one Gather in place of slices and a Concat."""
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
