"""transformers' CLIPVisionModelWithProjection with the projections of IP-Adapters: image to tokens for a UNet.

The first adapters project the embedding of the whole image; "plus" adapters resample the hidden states of the second to
last layer. Without an image, diffusers projects zeros for the former and encodes a zero image for the latter. Rows with
`shown` = 0 reproduce this.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from sdflow.errors import CheckpointError
from sdflow.models.base import Config, Model, Original, Shapes
from sdflow.models.clip_text import UNUSED
from sdflow.models.image_prompts import tokens_input
from sdflow.models.more_parameters import clip_vision_parameters
from sdflow.models.ports import Port, Ports, Sizes

if TYPE_CHECKING:
    import numpy as np
    import torch

PROJECTIONS = "image_projections"
"""Config entry that lists, for each adapter, diffusers' projection class and its arguments."""
_PLAIN, _PLUS = "ImageProjection", "IPAdapterPlusImageProjection"
_HEAD = 64
"""Head width of the resampler. Files do not state it; diffusers assumes it."""
PIXELS, SHOWN = "pixel_values", "shown"

# https://github.com/tencent-ailab/IP-Adapter, ip_adapter/resampler.py
_RESAMPLER: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\.ln0\."), ".0.norm1."),
    (re.compile(r"\.ln1\."), ".0.norm2."),
    (re.compile(r"\.attn\.to_q\."), ".0.to_q."),
    (re.compile(r"\.attn\.to_[kv]\."), ".0.to_kv."),
    (re.compile(r"\.attn\.to_out\.0\."), ".0.to_out."),
    (re.compile(r"\.ff\.0\."), ".1.0."),
    (re.compile(r"\.ff\.1\.net\.0\.proj\."), ".1.1."),
    (re.compile(r"\.ff\.1\.net\.2\."), ".1.3."),
)
_PROJECTION = re.compile(r"image_proj\.(?P<adapter>\d+)\.(?P<name>.+)")
_OTHERS = {
    "perceiver_resampler.proj_in.weight": "an IP-Adapter FaceID Plus",
    "proj.3.weight": "an IP-Adapter of the kind full-face",
    "proj.0.weight": "an IP-Adapter FaceID",
    "norm.weight": None,
}
"""Tensor of a projection -> name of the unsupported adapter that has it; None for supported ones."""


class ImageEncoder(Model):
    """CLIP's vision model with projections. Outputs the tokens of an image for each adapter."""

    class_name: ClassVar[str] = "CLIPVisionModelWithProjection"
    weights_stem: ClassVar[str] = "model"
    library_module: ClassVar[str | None] = "transformers.models.clip.modeling_clip"

    def empty(self, config: Config) -> torch.nn.Module:
        import torch
        from diffusers.models import embeddings
        from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

        own = {name: value for name, value in config.items() if name != PROJECTIONS}
        module = CLIPVisionModelWithProjection(CLIPVisionConfig.from_dict(own))
        projections = []
        for each in config[PROJECTIONS]:
            arguments = {name: value for name, value in each.items() if name != "_class_name"}
            projections.append(getattr(embeddings, _known(each))(**arguments))
        module.image_proj = torch.nn.ModuleList(projections)
        made: torch.nn.Module = module
        return made

    def graph_parameters(self, config: Config) -> Shapes | None:
        """Omits the projections, which are a few million parameters."""
        return clip_vision_parameters(config, config["projection_dim"])

    def ports(self, config: Config) -> Ports:
        size = config["image_size"]
        return Ports(
            inputs=(
                Port(PIXELS, "float32", ("batch", config.get("num_channels", 3), size, size)),
                Port(SHOWN, "float32", ("batch",)),
            ),
            outputs=tuple(
                Port(tokens_input(index), "float32", ("batch", token_count(each), _width(each)))
                for index, each in enumerate(config[PROJECTIONS])
            ),
        )

    def smallest(self, config: Config) -> Sizes:
        return Sizes(batch=2)

    def values(self, port: Port, shape: list[int], config: Config, random: np.random.Generator) -> np.ndarray:
        import numpy as np

        return np.ones(shape, np.float32) if port.name == SHOWN else super().values(port, shape, config, random)

    def traced(self, module: Any) -> None:
        """Zeros come from multiplication: Where lacks a float16 kernel on some providers."""
        original, plus = module.forward, [_is_plus(each) for each in module.image_proj]

        def forward(pixel_values: Any, shown: Any) -> tuple[Any, ...]:
            output = original(pixel_values * shown[:, None, None, None], output_hidden_states=any(plus))
            return tuple(
                projection(output.hidden_states[-2] if deep else output.image_embeds * shown[:, None])
                for projection, deep in zip(module.image_proj, plus, strict=True)
            )

        module.forward = forward

    def reference(self, module: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return (batch, tokens, width) per projection, as `encode_image` of diffusers' pipelines and the UNet's
        `encoder_hid_proj` do."""
        import torch

        shown = inputs[SHOWN] > 0
        pixels = torch.where(shown[:, None, None, None], inputs[PIXELS], torch.zeros_like(inputs[PIXELS]))
        output = module(pixels, output_hidden_states=True)
        embeds = torch.where(shown[:, None], output.image_embeds, torch.zeros_like(output.image_embeds))
        return {
            tokens_input(index): projection(output.hidden_states[-2] if _is_plus(projection) else embeds)
            for index, projection in enumerate(module.image_proj)
        }

    def recorded_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        import torch

        pixels = args[0] if args else kwargs[PIXELS]
        return {PIXELS: pixels, SHOWN: torch.ones(len(pixels))}

    def unused(self, name: str, keys: Iterable[str]) -> bool:
        return name.endswith(UNUSED)

    def distinguishing_shapes(self, config: Config) -> Shapes:
        return {"vision_model.embeddings.class_embedding": (config["hidden_size"],)}


def token_count(projection: Config) -> int:
    """Return the number of tokens per image."""
    return int(projection["num_image_text_embeds" if _known(projection) == _PLAIN else "num_queries"])


def _width(projection: Config) -> int:
    return int(projection["cross_attention_dim" if _known(projection) == _PLAIN else "output_dims"])


def read_width(projection: Config) -> int:
    """Return the width of a projection's input: the encoder's `projection_dim`, or its `hidden_size` for "plus"."""
    return int(projection["image_embed_dim" if _known(projection) == _PLAIN else "embed_dims"])


def fits_encoder(projection: Config, encoder: Config) -> bool:
    """Whether the projection reads the output of an encoder with this config."""
    return read_width(projection) == int(encoder["projection_dim" if _known(projection) == _PLAIN else "hidden_size"])


def projection_for(projection: Config, encoder: Config, width: int) -> dict[str, Any]:
    """Return a projection of the same kind for this encoder. width: of the tokens that the denoiser reads."""
    if _known(projection) == _PLAIN:
        return {**projection, "image_embed_dim": encoder["projection_dim"], "cross_attention_dim": width}
    return {**projection, "embed_dims": encoder["hidden_size"], "output_dims": width}


def projection_of(shapes: Shapes, where: str) -> dict[str, Any]:
    """Return the projection in an adapter's file. shapes: its `image_proj.` tensors, without this prefix.

    Raises CheckpointError naming the kind if it is unsupported.
    """
    if "proj.weight" in shapes and "norm.weight" in shapes:
        (width,), (rows, read) = shapes["norm.weight"], shapes["proj.weight"]
        return {
            "_class_name": _PLAIN,
            "cross_attention_dim": width,
            "image_embed_dim": read,
            "num_image_text_embeds": rows // width,
        }
    if other := next((kind for name, kind in _OTHERS.items() if name in shapes and kind), None):
        raise CheckpointError(
            f"is {other}, which is not supported: it needs face embeddings or a different projection",
            where=where,
            remedy="Use a plain, light, plus or plus-face IP-Adapter.",
        )
    needed = ("latents", "proj_in.weight", "proj_out.weight", "layers.0.0.to_q.weight", "layers.0.1.1.weight")
    if missing := [name for name in needed if name not in shapes]:
        raise CheckpointError(
            f"has no tensor image_proj.{missing[0]}: not a known IP-Adapter",
            where=where,
            remedy="Name an IP-Adapter's file, such as ip-adapter_sd15.safetensors or ip-adapter-plus_sd15.safetensors.",
        )
    _, queries, hidden = shapes["latents"]
    return {
        "_class_name": _PLUS,
        "embed_dims": shapes["proj_in.weight"][1],
        "output_dims": shapes["proj_out.weight"][0],
        "hidden_dims": hidden,
        "depth": len({name.split(".")[1] for name in shapes if name.startswith("layers.")}),
        "dim_head": _HEAD,
        "heads": shapes["layers.0.0.to_q.weight"][0] // _HEAD,
        "num_queries": queries,
        "ffn_ratio": shapes["layers.0.1.1.weight"][0] // hidden,
    }


def projection_adapter(key: str) -> int | None:
    """Return the index of the adapter that a parameter belongs to, or None if it is the encoder's."""
    found = _PROJECTION.fullmatch(key)
    return int(found["adapter"]) if found else None


def projection_names(keys: Iterable[str]) -> dict[str, Original]:
    """Map an adapter's projection parameters to their location in its file, without `image_proj.`."""
    names = {}
    for key in keys:
        found = _PROJECTION.fullmatch(key)
        assert found is not None, "a projection's parameter"
        name = found["name"]
        if name.startswith("image_embeds."):
            names[key] = Original(name.replace("image_embeds.", "proj."))
            continue
        parts, part = (2, int(".to_v." in name)) if re.search(r"\.attn\.to_[kv]\.", name) else (1, 0)
        for pattern, original in _RESAMPLER:
            name = pattern.sub(original, name)
        names[key] = Original(name, part, parts)
    return names


def _known(projection: Config) -> str:
    name = str(projection.get("_class_name"))
    if name not in (_PLAIN, _PLUS):
        raise CheckpointError(f"{name} is not a known image projection", where=PROJECTIONS)
    return name


def _is_plus(projection: Any) -> bool:
    name: str = type(projection).__name__
    return name == _PLUS
