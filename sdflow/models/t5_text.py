"""T5's encoder: token ids to embeddings, for Stable Diffusion 3 and FLUX.1.

diffusers' pipelines pass no attention mask: padding is attended to, so results depend on the padded length. Ids are
int32, as for CLIP's text model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from sdflow.models.base import Config, Model, Shapes
from sdflow.models.ports import Port, Ports, Sizes
from sdflow.models.transformer_parameters import t5_parameters

if TYPE_CHECKING:
    import numpy as np
    import torch

TOKENS = "long_sequence"
"""Axis of T5's tokens, distinct from CLIP's `sequence`."""

_TIED = ("encoder.embed_tokens.weight", "shared.weight")
"""Two names of one parameter; files have either or both."""

_GGUF_BLOCK = re.compile(r"enc\.blk\.(\d+)\.(\w+)\.weight")
_GGUF_LAYERS = {
    "attn_q": "layer.0.SelfAttention.q",
    "attn_k": "layer.0.SelfAttention.k",
    "attn_v": "layer.0.SelfAttention.v",
    "attn_o": "layer.0.SelfAttention.o",
    "attn_rel_b": "layer.0.SelfAttention.relative_attention_bias",
    "attn_norm": "layer.0.layer_norm",
    "ffn_gate": "layer.1.DenseReluDense.wi_0",
    "ffn_up": "layer.1.DenseReluDense.wi_1",
    "ffn_down": "layer.1.DenseReluDense.wo",
    "ffn_norm": "layer.1.layer_norm",
}
"""llama.cpp's layer names in GGUF files of the architecture t5encoder."""
_GGUF_OTHERS = {"token_embd.weight": "shared.weight", "enc.output_norm.weight": "encoder.final_layer_norm.weight"}


class T5Text(Model):
    """transformers' T5EncoderModel. Outputs the last hidden state."""

    class_name: ClassVar[str] = "T5EncoderModel"
    weights_stem: ClassVar[str] = "model"
    library_module: ClassVar[str | None] = "transformers.models.t5.modeling_t5"
    random_version: ClassVar[int] = 2

    def empty(self, config: Config) -> torch.nn.Module:
        from transformers import T5Config, T5EncoderModel

        return T5EncoderModel(T5Config.from_dict(dict(config)))

    def parameters(self, config: Config) -> Shapes | None:
        return t5_parameters(config)

    def graph_parameters(self, config: Config) -> Shapes | None:
        found = self.parameters(config)
        return None if found is None else {name: shape for name, shape in found.items() if name != _TIED[0]}

    def ports(self, config: Config) -> Ports:
        return Ports(
            inputs=(Port("input_ids", "int32", ("batch", TOKENS)),),
            outputs=(Port("last_hidden_state", "float32", ("batch", TOKENS, config["d_model"])),),
        )

    def smallest(self, config: Config) -> Sizes:
        return Sizes(batch=2)

    def more_axes(self, config: Config) -> Mapping[str, int]:
        return {TOKENS: 11}

    def distinguishing_shapes(self, config: Config) -> Shapes:
        return {
            "shared.weight": (config["vocab_size"], config["d_model"]),
            f"encoder.block.{config['num_layers'] - 1}.layer.1.DenseReluDense.wo.weight": (
                config["d_model"],
                config["d_ff"],
            ),
        }

    def values(self, port: Port, shape: list[int], config: Config, random: np.random.Generator) -> np.ndarray:
        ids: np.ndarray = random.integers(0, config["vocab_size"], shape, dtype=port.dtype)
        return ids

    def traced(self, module: Any) -> None:
        """Pass a mask that depends only on the ids' length, so the position bias stays an expression of the graph's
        inputs."""
        module.set_attn_implementation("eager")
        original = module.forward

        def forward(input_ids: Any) -> Any:
            return original(input_ids=input_ids, attention_mask=_sees_all(input_ids)).last_hidden_state

        module.forward = forward

    def reference(self, module: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"last_hidden_state": module(input_ids=inputs["input_ids"].long()).last_hidden_state}

    def recorded_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        return {"input_ids": args[0] if args else kwargs["input_ids"]}

    def random_gain(self, name: str) -> float:
        """T5 does not divide attention scores by the root of the head size (64 in all published models); transformers
        initializes q smaller instead. Larger scores would make each softmax amplify rounding."""
        return 1 / 8 if name.endswith("SelfAttention.q.weight") else 1.0

    def current_name(self, name: str) -> str:
        """Unify the two names of the embedding, and translate llama.cpp's names."""
        if (found := _GGUF_BLOCK.fullmatch(name)) is not None and found[2] in _GGUF_LAYERS:
            return f"encoder.block.{found[1]}.{_GGUF_LAYERS[found[2]]}.weight"
        return _TIED[1] if name == _TIED[0] else _GGUF_OTHERS.get(name, name)

    def unused(self, name: str, keys: Iterable[str]) -> bool:
        """Ignore the second name in files with both."""
        return name in _TIED

    def to_half(self, module: Any, dtype: torch.dtype) -> None:
        """Keep the second product of each feed-forward layer in float32 in float16 models, like transformers
        (`_keep_in_fp32_modules`): its sums exceed 65,504."""
        import torch

        module.to(dtype)
        for name, part in module.named_modules():
            if name.endswith(".wo") and dtype == torch.float16:
                part.float()


def _sees_all(input_ids: Any) -> Any:
    """Return a 4-D mask that hides nothing: transformers uses it as it is, instead of creating its own."""
    import torch

    batch, length = input_ids.shape
    return torch.zeros((1, 1, 1, 1)).expand(batch, 1, length, length)
