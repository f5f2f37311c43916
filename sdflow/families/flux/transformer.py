"""diffusers' FluxTransformer2DModel: the denoiser of FLUX.1.

The graph takes plain latents, unlike the class, which takes packed patches and their positions. `timestep` is float32
of shape [1], 0 to 1000, shared by the whole batch. Models with `guidance_embeds` (-dev) take the guidance scale as
`guidance`, float32 of shape [batch].
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from sdflow.families.flux.original_names import flux_names
from sdflow.families.flux.packing import PATCH, packed, positions, size_of, unpacked
from sdflow.families.flux.traced import prepare
from sdflow.families.shared.transformer import Transformer
from sdflow.models.base import Config, Original, Shapes
from sdflow.models.parameters import MOST_BLOCKS, Found, linear_layer
from sdflow.models.ports import Port, Ports, Role, Sizes, timestep_port
from sdflow.models.t5_text import TOKENS

if TYPE_CHECKING:
    import numpy as np
    import torch

GUIDANCE = "guidance"
"""Name of the guidance scale input."""

USUAL_TOKENS = 512
"""Usual maximum number of text tokens."""

_BLOCK = re.compile(r"(?:^|_)(single_)?(?:transformer|double|single)_blocks_(\d+)_")
_OWN_MODULE = re.compile(
    r"(single_)?transformer_blocks_\d+_(attn|norm|ff|proj)"
    r"|(double|single)_blocks_|(time|guidance|vector)_in_|(img|txt)_in$|time_text_embed_"
    r"|final_layer_|norm_out_linear$|(x|context)_embedder$|proj_out$"
)
_READS_TEXT = re.compile(r"^(context_embedder|txt_in)$")
_READS_PATCHES = re.compile(r"^(x_embedder|img_in)$")


class FluxTransformer(Transformer):
    """diffusers' FluxTransformer2DModel. Predicts the velocity of latents, from image to noise."""

    class_name: ClassVar[str] = "FluxTransformer2DModel"
    library_module: ClassVar[str | None] = "diffusers.models.transformers.transformer_flux"
    tokens: ClassVar[str] = TOKENS
    own_module: ClassVar[re.Pattern[str]] = _OWN_MODULE

    def parameters(self, config: Config) -> Shapes | None:
        return flux_parameters(config)

    def ports(self, config: Config) -> Ports:
        axes = ("batch", int(config["in_channels"]) // PATCH**2, "latent_height", "latent_width")
        why = "half types round the sinusoids of a thousand times the scale; see keep_io_types"
        guidance = (Port(GUIDANCE, "float32", ("batch",), why_exact=why),) if config.get("guidance_embeds") else ()
        return Ports(
            inputs=(
                Port("sample", "float32", axes, Role.LATENTS),
                timestep_port(),
                Port("encoder_hidden_states", "float32", ("batch", TOKENS, config["joint_attention_dim"])),
                Port("pooled_projections", "float32", ("batch", config["pooled_projection_dim"])),
                *guidance,
            ),
            outputs=(Port("out_sample", "float32", axes, Role.PREDICTION),),
        )

    def smallest(self, config: Config) -> Sizes:
        return Sizes(batch=2, height=4 * PATCH, width=6 * PATCH, vae_scale=1)

    def working_values(self, config: Config, rows: int, columns: int, *, scores: bool) -> int:
        """A single block holds the outputs of attention and of the first feed-forward layer, and both joined: ten times
        the width; or q, k and v with the attention's scores."""
        tokens = (rows // PATCH) * (columns // PATCH) + USUAL_TOKENS
        width, heads = self.width(config), config["num_attention_heads"]
        return int(tokens * max(12 * width, 7 * width + (heads * tokens if scores else 0)))

    def distinguishing_shapes(self, config: Config) -> Shapes:
        width, double, single = self.width(config), config["num_layers"] - 1, config["num_single_layers"] - 1
        found = {
            "x_embedder.weight": (width, config["in_channels"]),
            "context_embedder.weight": (width, config["joint_attention_dim"]),
            f"transformer_blocks.{double}.attn.add_q_proj.weight": (width, width),
            f"single_transformer_blocks.{single}.proj_out.weight": (width, 5 * width),
        }
        if config.get("guidance_embeds"):
            found["time_text_embed.guidance_embedder.linear_2.weight"] = (width, width)
        return found

    def values(self, port: Port, shape: list[int], config: Config, random: np.random.Generator) -> np.ndarray:
        if port.name == GUIDANCE:
            return random.uniform(1, 8, shape).astype(port.dtype)
        return super().values(port, shape, config, random)

    def traced(self, module: Any) -> None:
        prepare(module)
        original = module.forward

        def forward(sample: Any, timestep: Any, encoder_hidden_states: Any, pooled: Any, guidance: Any = None) -> Any:
            return _run(original, sample, timestep, encoder_hidden_states, pooled, guidance)

        module.forward = forward

    def reference(self, module: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The class rounds timestep and guidance to its own type, by up to 8 in 16 bits; exact values are restored
        here, so the reference for 16-bit graphs only has rounded weights and activations."""
        exact = tuple(1000 * inputs[name].float() for name in (GUIDANCE,) if name in inputs)
        times = inputs["timestep"].float().expand(len(inputs["sample"])), *exact

        def put_back(part: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (*times, *args[len(times) :])

        hook = module.time_text_embed.register_forward_pre_hook(put_back)
        try:
            return {"out_sample": _run(module, *(inputs[port.name] for port in self.ports(module.config).inputs))}
        finally:
            hook.remove()

    def recorded_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Unpack latents to (batch, channels, rows, columns). diffusers' pipelines repeat timestep and guidance for every
        row, and divide the timestep by 1000."""
        guidance = kwargs.get(GUIDANCE)
        return {
            "sample": unpacked(kwargs["hidden_states"], *size_of(kwargs["img_ids"])),
            "timestep": 1000 * kwargs["timestep"][:1].float(),
            "encoder_hidden_states": kwargs["encoder_hidden_states"],
            "pooled_projections": kwargs["pooled_projections"],
            **({} if guidance is None else {GUIDANCE: guidance}),
        }

    def recorded_outputs(
        self, ports: Ports, kwargs: Mapping[str, Any], outputs: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        return {"out_sample": unpacked(outputs[0], *size_of(kwargs["img_ids"]))}

    def original_names(self, keys: Iterable[str]) -> dict[str, Original]:
        return flux_names(keys)

    def lora_misfit(self, config: Config, module: str, width: int) -> str | None:
        if block := _BLOCK.search(module):
            single = bool(block[1]) or block[0].lstrip("_").startswith("single")
            layers = config.get("num_single_layers" if single else "num_layers")
            if layers is not None and int(block[2]) >= layers:
                return f"this transformer has {layers} {'single' if single else 'double'} blocks"
        for pattern, entry, what in (
            (_READS_TEXT, "joint_attention_dim", "text embeddings"),
            (_READS_PATCHES, "in_channels", "patches"),
        ):
            if pattern.search(module) and width != config.get(entry, width):
                return f"for {what} {width} wide, not {config[entry]}"
        return None


def _run(forward: Any, latents: Any, timestep: Any, text: Any, pooled: Any, guidance: Any = None) -> Any:
    import torch

    batch, _, rows, columns = latents.shape
    found = forward(
        hidden_states=packed(latents),
        timestep=(timestep / 1000).expand(batch).to(latents.dtype),
        encoder_hidden_states=text,
        pooled_projections=pooled,
        txt_ids=torch.zeros(text.shape[1], 3, dtype=torch.int64, device=text.device),
        img_ids=positions(rows, columns).to(text.device),
        return_dict=False,
        **({} if guidance is None else {GUIDANCE: guidance}),
    )[0]
    return unpacked(found, rows, columns)


_TIME = 256
"""Width of the sinusoidal embedding of timestep and guidance."""


def flux_parameters(config: Config) -> Found | None:
    """Return the parameters, or None if the config exceeds the block limit."""
    head, double, single = config["attention_head_dim"], config["num_layers"], config["num_single_layers"]
    width = head * config["num_attention_heads"]
    if max(double, single) > MOST_BLOCKS:
        return None
    embedders = {"timestep_embedder": _TIME, "text_embedder": config["pooled_projection_dim"]}
    if config.get("guidance_embeds"):
        embedders["guidance_embedder"] = _TIME
    found: Found = {}
    for name, into in embedders.items():
        found |= linear_layer(f"time_text_embed.{name}.linear_1", width, into)
        found |= linear_layer(f"time_text_embed.{name}.linear_2", width, width)
    found |= linear_layer("context_embedder", width, config["joint_attention_dim"])
    found |= linear_layer("x_embedder", width, config["in_channels"])
    for layer in range(double):
        block = f"transformer_blocks.{layer}"
        for name in ("norm1.linear", "norm1_context.linear"):
            found |= linear_layer(f"{block}.{name}", 6 * width, width)
        for name in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"):
            found |= linear_layer(f"{block}.attn.{name}", width, width)
        for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
            found[f"{block}.attn.{name}.weight"] = (head,)
        for name in ("ff", "ff_context"):
            found |= linear_layer(f"{block}.{name}.net.0.proj", 4 * width, width)
            found |= linear_layer(f"{block}.{name}.net.2", width, 4 * width)
    for layer in range(single):
        block = f"single_transformer_blocks.{layer}"
        found |= linear_layer(f"{block}.norm.linear", 3 * width, width)
        found |= linear_layer(f"{block}.proj_mlp", 4 * width, width)
        found |= linear_layer(f"{block}.proj_out", width, 5 * width)
        for name in ("to_q", "to_k", "to_v"):
            found |= linear_layer(f"{block}.attn.{name}", width, width)
        for name in ("norm_q", "norm_k"):
            found[f"{block}.attn.{name}.weight"] = (head,)
    found |= linear_layer("norm_out.linear", 2 * width, width)
    out = config["patch_size"] ** 2 * (config.get("out_channels") or config["in_channels"])
    return found | linear_layer("proj_out", out, width)
