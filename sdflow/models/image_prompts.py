"""Image prompts (IP-Adapter, https://arxiv.org/abs/2308.06721) in a UNet: each cross-attention also attends to image tokens.

A UNet has inputs for them where its config has `ip_adapter_tokens`, for each adapter the tokens that it makes of an image.
diffusers' config.json knows no such entry. The matrices beside each cross-attention come from the adapters' files, where they
are called by a number: that of diffusers' `attn_processors`, in which every other one is a self-attention.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sdflow.models.base import Config, Original, Port

if TYPE_CHECKING:
    import torch

ADAPTED = "ip_adapter_tokens"
"""The entry of a UNet's config."""
_TOKENS, _SCALE = "ip_hidden_states_", "ip_adapter_scale_"
_MATRIX = re.compile(r"(?P<attention>.+)\.processor\.(?P<name>to_[kv]_ip)\.(?P<adapter>\d+)\.weight")
_BLOCKS = ("down_blocks", "up_blocks", "mid_block")
"""The order in which diffusers' UNet has made them."""


def is_image_prompt(name: str) -> bool:
    """Whether an input of this name is of an image prompt: its tokens, or how much they count."""
    return name.startswith((_TOKENS, _SCALE))


def tokens_input(adapter: int) -> str:
    """The input for an adapter's tokens, (batch, images x tokens, cross_attention_dim)."""
    return f"{_TOKENS}{adapter}"


def scale_input(adapter: int) -> str:
    """The input for how much an adapter's tokens count, one number."""
    return f"{_SCALE}{adapter}"


def tokens_axis(adapter: int) -> str:
    """The axis of an adapter's tokens, of all its images."""
    return f"image_tokens_{adapter}"


def image_prompt_ports(config: Config) -> tuple[Port, ...]:
    """A UNet's inputs for image prompts: two for each adapter."""
    return tuple(
        port
        for adapter in range(len(config.get(ADAPTED) or ()))
        for port in (
            Port(tokens_input(adapter), "float32", ("batch", tokens_axis(adapter), config["cross_attention_dim"])),
            Port(scale_input(adapter), "float32", (1,)),
        )
    )


def token_counts(config: Config, images: int = 1) -> dict[str, int]:
    """The sizes of the axes of tokens, for so many images of each adapter."""
    return {tokens_axis(adapter): images * count for adapter, count in enumerate(config.get(ADAPTED) or ())}


def add_adapters(unet: Any, tokens: Sequence[int]) -> None:
    """Give diffusers' UNet what its `load_ip_adapter` gives it, for tokens that are projected already."""
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
    """What diffusers' `set_ip_adapter_scale` sets, for each adapter."""
    for processor in unet.attn_processors.values():
        if hasattr(processor, "to_k_ip"):
            processor.scale = list(scales)


def get_scales(unet: Any) -> list[Any]:
    """How much each adapter counts; none where there are no adapters."""
    return next((list(each.scale) for each in unet.attn_processors.values() if hasattr(each, "to_k_ip")), [])


class ScaleInput:
    """A scale that is an input of a graph, where diffusers has a number: a number that is 0 is looked at."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __mul__(self, attended: Any) -> Any:
        return self._value * attended

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


def split_inputs(inputs: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Of inputs by name the tokens and the scales, by adapter."""
    count = sum(name.startswith(_TOKENS) for name in inputs)
    return [inputs[tokens_input(index)] for index in range(count)], [
        inputs[scale_input(index)] for index in range(count)
    ]


def recorded_tokens(image_embeds: Sequence[torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """Tokens as diffusers hands them to the UNet, (batch, images, tokens, width) for each adapter, as inputs by name."""
    return {
        tokens_input(adapter): each.flatten(1, 2) if each.ndim == 4 else each
        for adapter, each in enumerate(image_embeds or ())
    }


def adapter_of(key: str) -> int | None:
    """Which adapter's file a parameter of a UNet comes from; None: the UNet's own."""
    found = _MATRIX.fullmatch(key)
    return int(found["adapter"]) if found else None


def matrix_names(keys: Iterable[str]) -> dict[str, Original]:
    """The parameters of one adapter -> their names in its file, without `ip_adapter.`. keys: all of its parameters."""
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
