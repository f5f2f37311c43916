"""Qwen3 as text encoder of FLUX.2-klein and Z-Image: token ids and mask to the hidden states of chosen layers.

The mask covers padding on the right. Attention is causal too, so tokens before the padding do not depend on it. The
graph excludes layers above the last chosen one, the final norm and the language model head.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from sdflow.models.base import Config, Model, Shapes
from sdflow.models.parameters import MOST_BLOCKS, Found, linear_layer
from sdflow.models.ports import Port, Ports, Sizes

if TYPE_CHECKING:
    import numpy as np
    import torch

TOKENS = "text_sequence"
"""Axis of the tokens."""

LAYERS = "hidden_states_layers"
"""Config entry with the indices of the hidden states to output. 0 is the embeddings, k the output of layer k; negative
ones count from the end, where -1 is normalized. Default: the last one."""

_HEAD = "lm_head.weight"
_LAYER = re.compile(r"layers\.(\d+)\.")

_GGUF_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_GGUF_LAYERS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
"""llama.cpp's layer names in GGUF files of the architecture qwen3, whose rows it does not permute."""
_GGUF_OTHERS = {"token_embd.weight": "embed_tokens.weight", "output_norm.weight": "norm.weight", "output.weight": _HEAD}
_MASKED = -30000.0
"""Added to the scores of masked keys; within float16's range."""


class Qwen3Text(Model):
    """transformers' Qwen3ForCausalLM without its head. Outputs `hidden_states.K` for each chosen layer."""

    class_name: ClassVar[str] = "Qwen3ForCausalLM"
    weights_stem: ClassVar[str] = "model"
    library_module: ClassVar[str | None] = "transformers.models.qwen3.modeling_qwen3"

    def library_class(self) -> Any:
        """Return the class without a head; it loads files of either class."""
        from transformers import Qwen3Model

        return Qwen3Model

    def empty(self, config: Config) -> torch.nn.Module:
        from transformers import Qwen3Config, Qwen3Model

        return Qwen3Model(Qwen3Config.from_dict(dict(config)))

    def parameters(self, config: Config) -> Shapes | None:
        return qwen3_parameters(config)

    def graph_parameters(self, config: Config) -> Shapes | None:
        found, last = self.parameters(config), max(_chosen(config))
        normed = last == int(config["num_hidden_layers"])
        return None if found is None else {
            name: shape
            for name, shape in found.items()
            if name == "embed_tokens.weight"
            or (name == "norm.weight" and normed)
            or ((layer := _LAYER.match(name)) is not None and int(layer[1]) < last)
        }  # fmt: skip

    def ports(self, config: Config) -> Ports:
        axes = ("batch", TOKENS)
        return Ports(
            inputs=(Port("input_ids", "int32", axes), Port("attention_mask", "int32", axes)),
            outputs=tuple(
                Port(f"hidden_states.{layer}", "float32", (*axes, config["hidden_size"])) for layer in _chosen(config)
            ),
        )

    def smallest(self, config: Config) -> Sizes:
        return Sizes(batch=2)

    def more_axes(self, config: Config) -> Mapping[str, int]:
        return {TOKENS: 11}

    def distinguishing_shapes(self, config: Config) -> Shapes:
        last = config["num_hidden_layers"] - 1
        width, inner = config["hidden_size"], config["intermediate_size"]
        return {
            "embed_tokens.weight": (config["vocab_size"], width),
            f"layers.{last}.mlp.down_proj.weight": (width, inner),
            "layers.0.self_attn.q_norm.weight": (config["head_dim"],),
        }

    def values(self, port: Port, shape: list[int], config: Config, random: np.random.Generator) -> np.ndarray:
        """Return texts of random lengths, padded on the right: ids or their mask, (batch, tokens)."""
        import numpy as np

        if port.name == "attention_mask":
            lengths = random.integers(1, shape[1] + 1, (shape[0], 1))
            return (np.arange(shape[1])[None] < lengths).astype(port.dtype)
        ids: np.ndarray = random.integers(0, config["vocab_size"], shape, dtype=port.dtype)
        return ids

    def traced(self, module: Any) -> None:
        """Call transformers' layers one by one, with eager attention, whose mask is a tensor."""
        module.set_attn_implementation("eager")
        chosen, depth = _chosen(module.config.to_dict()), module.config.num_hidden_layers
        norm = module.norm
        module.layers = module.layers[: max(chosen)]
        if max(chosen) < depth:
            module.norm = None

        def forward(input_ids: Any, attention_mask: Any) -> tuple[Any, ...]:
            import torch

            hidden = module.embed_tokens(input_ids)
            places = torch.arange(input_ids.shape[1])
            rotary = module.rotary_emb(hidden, places[None])
            mask = _mask(places, attention_mask)
            states = [hidden]
            for layer in module.layers:
                states.append(layer(states[-1], attention_mask=mask, position_embeddings=rotary))
            return tuple(norm(states[index]) if index == depth else states[index] for index in chosen)

        module.forward = forward

    def reference(self, module: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = module(
            input_ids=inputs["input_ids"].long(),
            attention_mask=inputs["attention_mask"].long(),
            output_hidden_states=True,
            use_cache=False,
        ).hidden_states
        return {f"hidden_states.{layer}": found[layer] for layer in _chosen(module.config.to_dict())}

    def recorded_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        return {name: kwargs[name] for name in ("input_ids", "attention_mask")}

    def recorded_outputs(
        self, ports: Ports, kwargs: Mapping[str, Any], outputs: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Pick the chosen states, (batch, tokens, hidden size) each: with `output_hidden_states`, they are the last
        outputs of the call."""
        chosen = [int(port.name.partition(".")[2]) for port in ports.outputs]
        return {port.name: outputs[1 + layer] for port, layer in zip(ports.outputs, chosen, strict=True)}

    def current_name(self, name: str) -> str:
        """Strip the prefix of files of the class with a head, and translate llama.cpp's names in GGUF files."""
        if (found := _GGUF_BLOCK.fullmatch(name)) is not None and found[2] in _GGUF_LAYERS:
            return f"layers.{found[1]}.{_GGUF_LAYERS[found[2]]}.{found[3]}"
        return _GGUF_OTHERS.get(name, name.removeprefix("model."))

    def unused(self, name: str, keys: Iterable[str]) -> bool:
        return name == _HEAD


class Qwen3Bare(Qwen3Text):
    """The same network, for files whose config.json or model_index.json names the class without a head."""

    class_name: ClassVar[str] = "Qwen3Model"


def _chosen(config: Config) -> list[int]:
    """Return the indices of the hidden states to output, as non-negative numbers."""
    count = int(config["num_hidden_layers"]) + 1
    return [layer % count for layer in config.get(LAYERS) or [-1]]


def _mask(places: Any, attention_mask: Any) -> Any:
    """Return the mask to add to the scores, (batch, 1, tokens, tokens): a token attends to itself and to earlier tokens
    that are not padding."""
    import torch

    seen = (places[None, :] <= places[:, None])[None, None] & (attention_mask[:, None, None, :] > 0)
    return torch.where(seen, torch.zeros(()), torch.full((), _MASKED))


def qwen3_parameters(config: Config) -> Found | None:
    """Return the parameters of transformers' Qwen3Model."""
    width, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, layers, bias = config["num_attention_heads"], config["num_hidden_layers"], bool(config.get("attention_bias"))
    pairs = config.get("num_key_value_heads") or heads
    if layers > MOST_BLOCKS:
        return None
    found: Found = {"embed_tokens.weight": (config["vocab_size"], width)}
    for layer in range(layers):
        block = f"layers.{layer}"
        for name, out in (("q_proj", heads), ("k_proj", pairs), ("v_proj", pairs)):
            found |= linear_layer(f"{block}.self_attn.{name}", out * head, width, bias)
        found |= linear_layer(f"{block}.self_attn.o_proj", width, heads * head, bias)
        found |= {f"{block}.self_attn.{name}.weight": (head,) for name in ("q_norm", "k_norm")}
        for name in ("gate_proj", "up_proj"):
            found |= linear_layer(f"{block}.mlp.{name}", inner, width, bias=False)
        found |= linear_layer(f"{block}.mlp.down_proj", width, inner, bias=False)
        found |= {f"{block}.{name}.weight": (width,) for name in ("input_layernorm", "post_attention_layernorm")}
    return found | {"norm.weight": (width,)}
