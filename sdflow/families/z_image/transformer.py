"""diffusers' ZImageTransformer2DModel: the denoiser of Z-Image.

The class takes a timestep from 0 (noise) to 1 (image) and predicts the image minus the noise. The graph takes 1,000 to
0 and predicts noise minus image, like other transformers (https://arxiv.org/abs/2511.22699).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from sdflow.families.shared.transformer import Transformer
from sdflow.families.z_image.original_names import z_image_names
from sdflow.families.z_image.traced import MULTIPLE, PATCH, rewrite
from sdflow.models.base import Config, Original, Shapes
from sdflow.models.parameters import MOST_BLOCKS, Found, linear_layer
from sdflow.models.ports import Port, Ports, Role, Sizes, timestep_port

if TYPE_CHECKING:
    import numpy as np
    import torch

TOKENS = "caption_sequence"
"""Axis of the text tokens, a multiple of 32."""
USUAL_TOKENS = 64
"""Usual number of prompt tokens: two or three sentences in the chat template."""

_BLOCK = re.compile(r"^(layers|noise_refiner|context_refiner)_(\d+)_(?:attention|feed_forward|adaLN_modulation)_")
_OUTER = re.compile(r"^(?:all_x_embedder|all_final_layer|cap_embedder)_")


class ZImageTransformer(Transformer):
    """diffusers' ZImageTransformer2DModel. Predicts the velocity of latents, from image to noise."""

    class_name: ClassVar[str] = "ZImageTransformer2DModel"
    library_module: ClassVar[str | None] = "diffusers.models.transformers.transformer_z_image"

    def parameters(self, config: Config) -> Shapes | None:
        return z_image_parameters(config)

    def ports(self, config: Config) -> Ports:
        axes = ("batch", config["in_channels"], "latent_height", "latent_width")
        return Ports(
            inputs=(
                Port("sample", "float32", axes, Role.LATENTS),
                timestep_port(),
                Port("encoder_hidden_states", "float32", ("batch", TOKENS, config["cap_feat_dim"])),
                Port("encoder_attention_mask", "int32", ("batch", TOKENS)),
            ),
            outputs=(Port("out_sample", "float32", axes, Role.PREDICTION),),
        )

    def smallest(self, config: Config) -> Sizes:
        return Sizes(batch=2, height=4 * PATCH, width=6 * PATCH, vae_scale=1)

    def width(self, config: Config) -> int:
        return int(config["dim"])

    def working_values(self, config: Config, rows: int, columns: int, *, scores: bool) -> int:
        """A feed-forward layer holds both products, 8/3 as wide as the residual, besides the residual. Attention holds
        q, k and v besides its scores."""
        tokens = (rows // PATCH) * (columns // PATCH) + USUAL_TOKENS
        width, heads = self.width(config), config["n_heads"]
        return int(tokens * max(8 * width, 6 * width + (heads * tokens if scores else 0)))

    def more_axes(self, config: Config) -> Mapping[str, int]:
        return {TOKENS: 2 * MULTIPLE}

    def distinguishing_shapes(self, config: Config) -> Shapes:
        width = self.width(config)
        return {
            "all_x_embedder.2-1.weight": (width, PATCH * PATCH * config["in_channels"]),
            "cap_embedder.1.weight": (width, config["cap_feat_dim"]),
            f"layers.{config['n_layers'] - 1}.attention.to_q.weight": (width, width),
        }

    def values(self, port: Port, shape: list[int], config: Config, random: np.random.Generator) -> np.ndarray:
        """Return a mask (batch, tokens) of texts of different lengths, each at least one token long."""
        import numpy as np

        if port.name == "encoder_attention_mask":
            lengths = random.integers(1, shape[1] + 1, shape[:1])
            return (np.arange(shape[1]) < lengths[:, None]).astype(port.dtype)
        return super().values(port, shape, config, random)

    def traced(self, module: Any) -> None:
        rewrite(module)

    def reference(self, module: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        import torch

        sample, masks = inputs["sample"], inputs["encoder_attention_mask"].bool()
        found = module(
            list(sample[:, :, None]),
            ((1000 - inputs["timestep"]) / 1000).expand(len(sample)),
            [text[mask] for text, mask in zip(inputs["encoder_hidden_states"], masks, strict=True)],
            return_dict=False,
        )[0]
        return {"out_sample": -torch.stack(found)[:, :, 0]}

    def recorded_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        import torch

        images, times, texts = args[:3]
        return {
            "sample": torch.stack(images)[:, :, 0],
            "timestep": 1000 - 1000 * times[:1].float(),
            **padded_texts(texts),
        }

    def recorded_outputs(
        self, ports: Ports, kwargs: Mapping[str, Any], outputs: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Join the module's tensors, (channels, 1, rows, columns) per image, and negate them."""
        import torch

        return {"out_sample": -torch.stack(list(outputs))[:, :, 0]}

    def original_names(self, keys: Iterable[str]) -> dict[str, Original]:
        return z_image_names(keys)

    def unused(self, name: str, keys: Iterable[str]) -> bool:
        """Ignore a norm in original checkpoints that no code reads."""
        return name == "norm_final.weight"

    def has_lora_module(self, module: str) -> bool:
        return _BLOCK.match(module) is not None or _OUTER.match(module) is not None

    def lora_misfit(self, config: Config, module: str, width: int) -> str | None:
        if (block := _BLOCK.match(module)) is None:
            return None
        layers = config.get("n_layers" if block[1] == "layers" else "n_refiner_layers")
        if layers is not None and int(block[2]) >= layers:
            return f"this transformer has {layers} {block[1]} blocks"
        dim = config.get("dim", width)
        if module.endswith(("_to_q", "_to_k", "_to_v", "_qkv", "_w1", "_w3")) and width != dim:
            return f"for a transformer {width} wide, not {dim}"
        return None


def padded_texts(texts: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return inputs for embedded texts (tokens, width) of any lengths: padded to one multiple of 32, with a mask."""
    import torch

    longest = max(len(text) for text in texts)
    length = -(-longest // MULTIPLE) * MULTIPLE
    states = [torch.nn.functional.pad(text, (0, 0, 0, length - len(text))) for text in texts]
    masks = [torch.arange(length, device=text.device) < len(text) for text in texts]
    return {"encoder_hidden_states": torch.stack(states), "encoder_attention_mask": torch.stack(masks).int()}


TIME = 256
"""Maximum width of the timestep embedding (`ADALN_EMBED_DIM` in diffusers)."""
_SINES, _INNER_TIME = 256, 1024


def z_image_parameters(config: Config) -> Found | None:
    """Return the parameters, or None for omni models, which read additional images."""
    width, text, patch = config["dim"], config["cap_feat_dim"], config["all_patch_size"]
    layers, refiners, time = config["n_layers"], config["n_refiner_layers"], min(config["dim"], TIME)
    if list(patch) != [2] or config.get("siglip_feat_dim") is not None or layers + refiners > MOST_BLOCKS:
        return None
    packed = 4 * config["in_channels"]
    found: Found = {"x_pad_token": (1, width), "cap_pad_token": (1, width), "cap_embedder.0.weight": (text,)}
    found |= linear_layer("all_x_embedder.2-1", width, packed)
    found |= linear_layer("all_final_layer.2-1.linear", packed, width)
    found |= linear_layer("all_final_layer.2-1.adaLN_modulation.1", width, time)
    found |= linear_layer("cap_embedder.1", width, text)
    found |= linear_layer("t_embedder.mlp.0", _INNER_TIME, _SINES)
    found |= linear_layer("t_embedder.mlp.2", time, _INNER_TIME)
    head, inner = width // config["n_heads"], int(width / 3 * 8)
    for kind, count in (("noise_refiner", refiners), ("context_refiner", refiners), ("layers", layers)):
        for index in range(count):
            block = f"{kind}.{index}"
            for name in ("to_q", "to_k", "to_v", "to_out.0"):
                found[f"{block}.attention.{name}.weight"] = (width, width)
            for name in ("norm_q", "norm_k") if config["qk_norm"] else ():
                found[f"{block}.attention.{name}.weight"] = (head,)
            found |= {f"{block}.feed_forward.{name}.weight": (inner, width) for name in ("w1", "w3")}
            found[f"{block}.feed_forward.w2.weight"] = (width, inner)
            for name in ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2"):
                found[f"{block}.{name}.weight"] = (width,)
            if kind != "context_refiner":
                found |= linear_layer(f"{block}.adaLN_modulation.0", 4 * width, time)
    return found
