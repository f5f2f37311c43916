"""Image prompts (IP-Adapter, https://arxiv.org/abs/2308.06721) in a UNet: each cross-attention also attends to image tokens.

A UNet has inputs for them if its config has `ip_adapter_tokens`, sdflow's own entry with each adapter's number of
tokens per image. The matrices of each cross-attention come from the adapters' files, which name them by index in
diffusers' `attn_processors`; there, every other one is a self-attention.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sdflow.models.base import Config, Original
from sdflow.models.ports import Port

if TYPE_CHECKING:
    import torch

ADAPTED = "ip_adapter_tokens"
"""Entry of the UNet's config."""
_TOKENS, _SCALE = "ip_hidden_states_", "ip_adapter_scale_"
_MATRIX = re.compile(r"(?P<attention>.+)\.processor\.(?P<name>to_[kv]_ip)\.(?P<adapter>\d+)\.weight")
_BLOCKS = ("down_blocks", "up_blocks", "mid_block")
"""Order in which diffusers' UNet creates them."""


def is_image_prompt(name: str) -> bool:
    """Whether an input belongs to an image prompt: its tokens or scale."""
    return name.startswith((_TOKENS, _SCALE))


def tokens_input(adapter: int) -> str:
    """Return the input name of an adapter's tokens, (batch, images x tokens, cross_attention_dim)."""
    return f"{_TOKENS}{adapter}"


def scale_input(adapter: int) -> str:
    """Return the input name of an adapter's scale, one number."""
    return f"{_SCALE}{adapter}"


def tokens_axis(adapter: int) -> str:
    """Return the axis name of an adapter's tokens, over all its images."""
    return f"image_tokens_{adapter}"


def image_prompt_ports(config: Config) -> tuple[Port, ...]:
    """Return a UNet's inputs for image prompts: two per adapter."""
    return tuple(
        port
        for adapter in range(len(config.get(ADAPTED) or ()))
        for port in (
            Port(tokens_input(adapter), "float32", ("batch", tokens_axis(adapter), config["cross_attention_dim"])),
            Port(scale_input(adapter), "float32", (1,)),
        )
    )


def token_counts(config: Config) -> dict[str, int]:
    """Return the sizes of the token axes for one image per adapter."""
    return {tokens_axis(adapter): count for adapter, count in enumerate(config.get(ADAPTED) or ())}


def add_adapters(unet: Any, tokens: Sequence[int]) -> None:
    """Set up diffusers' UNet like its `load_ip_adapter`, for tokens that are already projected."""
    import torch
    from diffusers.models.attention_processor import IPAdapterAttnProcessor2_0

    processors = {}
    for name, processor in unet.attn_processors.items():
        attention = unet.get_submodule(name.removesuffix(".processor"))
        processors[name] = (
            IPAdapterAttnProcessor2_0(attention.inner_dim, attention.cross_attention_dim, list(tokens), scale=0.0)
            if attention.is_cross_attention
            else processor
        )
    unet.set_attn_processor(processors)
    unet.encoder_hid_proj = torch.nn.Identity()
    unet.register_to_config(encoder_hid_dim_type="ip_image_proj", **{ADAPTED: list(tokens)})


def set_scales(unet: Any, scales: Sequence[Any]) -> None:
    """Set the scale of each adapter, like diffusers' `set_ip_adapter_scale`."""
    for processor in unet.attn_processors.values():
        if hasattr(processor, "to_k_ip"):
            processor.scale = list(scales)


def get_scales(unet: Any) -> list[Any]:
    """Return the scale of each adapter; empty without adapters."""
    return next((list(each.scale) for each in unet.attn_processors.values() if hasattr(each, "to_k_ip")), [])


class ScaleInput:
    """A scale that is a graph input in place of diffusers' number. It never equals 0, which diffusers checks for."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __mul__(self, attended: Any) -> Any:
        return self._value * attended

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


def split_inputs(inputs: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return the tokens and the scales, by adapter, from inputs by name."""
    count = sum(name.startswith(_TOKENS) for name in inputs)
    return [inputs[tokens_input(index)] for index in range(count)], [
        inputs[scale_input(index)] for index in range(count)
    ]


def recorded_tokens(image_embeds: Sequence[torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """Convert diffusers' tokens, (batch, images, tokens, width) for each adapter, to inputs by name."""
    return {
        tokens_input(adapter): each.flatten(1, 2) if each.ndim == 4 else each
        for adapter, each in enumerate(image_embeds or ())
    }


def adapter_of(key: str) -> int | None:
    """Return the index of the adapter that a UNet parameter belongs to, or None if it is the UNet's."""
    found = _MATRIX.fullmatch(key)
    return int(found["adapter"]) if found else None


def matrix_names(keys: Iterable[str]) -> dict[str, Original]:
    """Map all parameters of one adapter to their names in its file, without `ip_adapter.`."""
    found = {key: match for key in keys if (match := _MATRIX.fullmatch(key))}
    places = {
        place: index for index, place in enumerate(sorted({each["attention"] for each in found.values()}, key=_order))
    }
    return {
        key: Original(f"{2 * places[match['attention']] + 1}.{match['name']}.weight") for key, match in found.items()
    }


def _order(attention: str) -> tuple[int, tuple[int, ...]]:
    return _BLOCKS.index(attention.partition(".")[0]), tuple(
        int(part) for part in attention.split(".") if part.isdigit()
    )
