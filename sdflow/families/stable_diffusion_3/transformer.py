"""diffusers' SD3Transformer2DModel: the denoiser of Stable Diffusion 3 and 3.5.

It patches plain latents itself. Text is one row of CLIP's and T5's tokens, plus the pooled embedding of both CLIPs
(https://arxiv.org/abs/2403.03206, figure 2). `timestep` is float32 of shape [1], 0 to 1000, shared by the whole batch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from sdflow.families.shared.transformer import Transformer
from sdflow.families.stable_diffusion_3.original_names import sd3_names
from sdflow.models.base import Config, Original, Shapes
from sdflow.models.ports import Port, Ports, Role, Sizes, timestep_port
from sdflow.models.transformer_parameters import sd3_parameters

if TYPE_CHECKING:
    import torch

TOKENS = "joint_sequence"
"""Axis of the text tokens: CLIP's and T5's together."""

USUAL_TOKENS = 333
"""Usual number of text tokens: 77 of CLIP and 256 of T5."""

_BLOCK = re.compile(r"(?:transformer|joint)_blocks_(\d+)_")
_OWN_MODULE = re.compile(
    r"(transformer_blocks|joint_blocks|pos_embed|time_text_embed|[xyt]_embedder|final_layer|norm_out)_|(context_embedder|proj_out)$"
)
_READS_TEXT = re.compile(r"^context_embedder$")


class SD3Transformer(Transformer):
    """diffusers' SD3Transformer2DModel. Predicts the velocity of latents, from image to noise."""

    class_name: ClassVar[str] = "SD3Transformer2DModel"
    library_module: ClassVar[str | None] = "diffusers.models.transformers.transformer_sd3"
    tokens: ClassVar[str] = TOKENS
    own_module: ClassVar[re.Pattern[str]] = _OWN_MODULE
    blocks: ClassVar[str | None] = "transformer_blocks"

    def empty(self, config: Config) -> torch.nn.Module:
        """Build the position table on the meta device too: checkpoints contain it, and computing 3.5-medium's in
        float64, as diffusers does first, takes 4 GB."""
        import torch

        with torch.device("meta"):
            return super().empty(config)

    def parameters(self, config: Config) -> Shapes | None:
        return sd3_parameters(config)

    def ports(self, config: Config) -> Ports:
        size = ("latent_height", "latent_width")
        return Ports(
            inputs=(
                Port("sample", "float32", ("batch", config["in_channels"], *size), Role.LATENTS),
                timestep_port(),
                Port("encoder_hidden_states", "float32", ("batch", TOKENS, config["joint_attention_dim"])),
                Port("pooled_projections", "float32", ("batch", config["pooled_projection_dim"])),
            ),
            outputs=(Port("out_sample", "float32", ("batch", config["out_channels"], *size), Role.PREDICTION),),
        )

    def smallest(self, config: Config) -> Sizes:
        patch = int(config["patch_size"])
        return Sizes(batch=2, height=4 * patch, width=6 * patch, vae_scale=1)

    def working_values(self, config: Config, rows: int, columns: int, *, scores: bool) -> int:
        """A feed-forward layer has four times as many values as other layers, besides the residual, its norm and the
        text's. Attention holds q, k and v besides its scores."""
        tokens = (rows // config["patch_size"]) * (columns // config["patch_size"]) + USUAL_TOKENS
        width, heads = self.width(config), config["num_attention_heads"]
        return int(tokens * max(8 * width, 6 * width + (heads * tokens if scores else 0)))

    def distinguishing_shapes(self, config: Config) -> Shapes:
        width = config["num_attention_heads"] * config["attention_head_dim"]
        last = config["num_layers"] - 1
        found = {
            "pos_embed.proj.weight": (width, config["in_channels"], config["patch_size"], config["patch_size"]),
            "context_embedder.weight": (config["caption_projection_dim"], config["joint_attention_dim"]),
            f"transformer_blocks.{last}.attn.to_q.weight": (width, width),
        }
        if config.get("qk_norm"):
            found["transformer_blocks.0.attn.norm_q.weight"] = (config["attention_head_dim"],)
        if dual := config.get("dual_attention_layers"):
            found[f"transformer_blocks.{max(dual)}.attn2.to_q.weight"] = (width, width)
        return found

    def traced(self, module: Any) -> None:
        original = module.forward

        def forward(sample: Any, timestep: Any, encoder_hidden_states: Any, pooled_projections: Any) -> Any:
            return original(
                hidden_states=sample,
                timestep=timestep.expand(sample.shape[0]),
                encoder_hidden_states=encoder_hidden_states,
                pooled_projections=pooled_projections,
                return_dict=False,
            )[0]

        module.forward = forward

    def reference(self, module: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        sample = inputs["sample"]
        found = module(
            hidden_states=sample,
            timestep=inputs["timestep"].expand(len(sample)),
            encoder_hidden_states=inputs["encoder_hidden_states"],
            pooled_projections=inputs["pooled_projections"],
        )
        return {"out_sample": found.sample}

    def recorded_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """diffusers' pipeline repeats the timestep, 0 to 1000, for every row."""
        return {
            "sample": kwargs["hidden_states"],
            "timestep": kwargs["timestep"][:1].float(),
            "encoder_hidden_states": kwargs["encoder_hidden_states"],
            "pooled_projections": kwargs["pooled_projections"],
        }

    def original_names(self, keys: Iterable[str]) -> dict[str, Original]:
        return sd3_names(keys)

    def lora_misfit(self, config: Config, module: str, width: int) -> str | None:
        layers = config.get("num_layers")
        if layers is not None and (block := _BLOCK.search(module)) and int(block[1]) >= layers:
            return f"this transformer has {layers} blocks"
        text = config.get("joint_attention_dim", width)
        if _READS_TEXT.search(module) and width != text:
            return f"for text embeddings {width} wide, not {text}"
        return None
