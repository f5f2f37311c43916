"""The forward of diffusers' ZImageTransformer2DModel in an exportable form: whole batches instead of lists, and rotary
embeddings in real arithmetic.

diffusers takes lists of images and texts, pads each to a multiple of 32 tokens with learned tokens, and rotates queries
and keys as complex numbers. Here, a batch's texts are padded to one multiple of 32, with a mask; padding beyond a row's
own multiple is hidden from attention, as diffusers hides it for rows of different lengths.
"""

from __future__ import annotations

from functools import partial
from typing import Any

PATCH = 2
"""Rows and columns of latents per patch. The class supports several sizes; its pipelines use this one."""
MULTIPLE = 32
"""Image and text are padded to multiples of this many tokens (`SEQ_MULTI_OF` in diffusers)."""
HIDDEN = -30000.0
"""Added to the attention scores of hidden tokens: makes their weight 0, and fits float16."""


def rewrite(module: Any) -> None:
    """Replace `forward` of the transformer and of its attention layers."""
    from diffusers.models.attention_processor import Attention

    for part in module.modules():
        if isinstance(part, Attention):
            part.forward = partial(_attended, part)
    module.forward = partial(_forward, module)


def _forward(module: Any, sample: Any, timestep: Any, encoder_hidden_states: Any, encoder_attention_mask: Any) -> Any:
    import torch

    batch, channels, rows, columns = sample.shape
    down, across = rows // PATCH, columns // PATCH
    tokens = down * across
    padded = (tokens + MULTIPLE - 1) // MULTIPLE * MULTIPLE
    time = module.t_embedder((1000 - timestep) / 1000 * module.t_scale)

    lengths = encoder_attention_mask.long().sum(1)
    of_text = (lengths + MULTIPLE - 1) // MULTIPLE * MULTIPLE
    places = torch.arange(encoder_hidden_states.shape[1])[None]
    tables = _Tables(module.rope_embedder)

    patches = sample.reshape(batch, channels, down, PATCH, across, PATCH).permute(0, 2, 4, 3, 5, 1)
    image = module.all_x_embedder[f"{PATCH}-1"](patches.reshape(batch, tokens, PATCH * PATCH * channels))
    image = _filled(image, module.x_pad_token[None].expand(batch, MULTIPLE - 1, -1), padded)
    of_image = tables.of_image(of_text + 1, down, across, padded)
    for block in module.noise_refiner:
        image = block(image, None, of_image, time)

    text = torch.where(
        (places < lengths[:, None])[..., None], module.cap_embedder(encoder_hidden_states), module.cap_pad_token
    )
    hidden = torch.where(places < of_text[:, None], 0.0, HIDDEN)
    of_places = tables.of_text(places + 1)
    bias = _bias(hidden)
    for block in module.context_refiner:
        text = block(text, bias, of_places)

    both = torch.cat([image, text], dim=1)
    nothing = _nothing(of_text)
    angles = [torch.cat([one, other + nothing], dim=1) for one, other in zip(of_image, of_places, strict=True)]
    bias = _bias(torch.nn.functional.pad(hidden, (padded, 0)))
    for block in module.layers:
        both = block(both, bias, angles, time)

    made = module.all_final_layer[f"{PATCH}-1"](both[:, :tokens], c=time)
    made = made.reshape(batch, down, across, PATCH, PATCH, channels).permute(0, 5, 1, 3, 2, 4)
    return -made.reshape(batch, channels, rows, columns)


def _filled(values: Any, filling: Any, length: Any) -> Any:
    """Pad values (batch, tokens, width) to a length with tokens (batch, 31, width)."""
    import torch

    return torch.cat([values, filling], dim=1)[:, :length]


def _bias(hidden: Any) -> Any:
    """Return the bias for MultiHeadAttention's scores, (batch, 1, tokens, tokens), the same for every query."""
    return hidden[:, None, None].expand(-1, 1, hidden.shape[1], -1)


def _nothing(rows: Any) -> Any:
    """Return zeros (batch, 1, 1). Adding them to a constant broadcasts it to the batch; an expanded constant would
    differ for each batch size."""
    return (rows * 0).float()[:, None, None]


class _Tables:
    """Cosines and sines for each position on the three axes, (positions, width), each repeated twice; computed in
    float64 like the library's, but without complex numbers."""

    def __init__(self, embedder: Any) -> None:
        import torch

        self._tables: list[list[Any]] = [[], []]
        for width, places in zip(embedder.axes_dims, embedder.axes_lens, strict=True):
            rates = 1.0 / (embedder.theta ** (torch.arange(0, width, 2, dtype=torch.float64) / width))
            angles = torch.outer(torch.arange(places, dtype=torch.float64), rates).float().repeat_interleave(2, dim=1)
            for tables, each in zip(self._tables, (angles.cos(), angles.sin()), strict=True):
                tables.append(each)

    def of_text(self, places: Any) -> list[Any]:
        """Return cosines and sines (1, positions, width): text lies along the first axis, at 0 on the others. places:
        (1, positions)."""
        import torch

        return [
            torch.cat([table[at] for table, at in zip(tables, (places, places * 0, places * 0), strict=True)], dim=-1)
            for tables in self._tables
        ]

    def of_image(self, first: Any, rows: Any, columns: Any, length: Any) -> list[Any]:
        """Return cosines and sines (batch, length, width). first: the image's position on the first axis, after the
        text, per row. Padding is at 0 on all axes."""
        import torch

        down = torch.arange(rows)[:, None].expand(rows, columns).reshape(1, rows * columns)
        across = torch.arange(columns)[None].expand(rows, columns).reshape(1, rows * columns)
        nothing, found = _nothing(first), []
        for (of_first, *others), padding in zip(self._tables, (1.0, 0.0), strict=True):
            fixed = torch.cat([table[at] for table, at in zip(others, (down, across), strict=True)], dim=-1)
            behind = of_first[first][:, None].expand(-1, rows * columns, -1)
            values = torch.cat([behind, fixed + nothing], dim=-1)
            filling = torch.full((1, MULTIPLE - 1, 1), padding).expand(-1, -1, values.shape[-1]) + nothing
            found.append(_filled(values, filling, length))
        return found


def _attended(part: Any, hidden_states: Any, attention_mask: Any = None, freqs_cis: Any = None, **_: Any) -> Any:
    """As in diffusers' ZSingleStreamAttnProcessor. attention_mask: added to the scores. freqs_cis: cosines and sines,
    (batch, tokens, head width) each."""
    import torch

    cosine, sine = (each[:, None] for each in freqs_cis)

    def heads(values: Any) -> Any:
        return values.reshape(*values.shape[:2], part.heads, -1).transpose(1, 2)

    def rotated(values: Any) -> Any:
        turned = torch.stack([-values[..., 1::2], values[..., 0::2]], dim=-1).flatten(-2)
        return values * cosine + turned * sine

    queries, keys = heads(part.to_q(hidden_states)), heads(part.to_k(hidden_states))
    if part.norm_q is not None:
        queries, keys = part.norm_q(queries), part.norm_k(keys)
    values = heads(part.to_v(hidden_states))
    found = torch.nn.functional.scaled_dot_product_attention(
        rotated(queries), rotated(keys), values, attn_mask=attention_mask
    )
    return part.to_out[0](found.transpose(1, 2).flatten(2))
