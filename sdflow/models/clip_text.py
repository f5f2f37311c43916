"""CLIP's text model: token ids to embeddings, for Stable Diffusion.

Ids are int32, as diffusers' ONNX pipelines pass them. With `output_hidden_states` in its config, as in optimum's
exports for SDXL, the input of each layer is also an output.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from sdflow.models.base import Config, Model, Shapes
from sdflow.models.parameters import clip_text_parameters
from sdflow.models.ports import Port, Ports, Sizes

if TYPE_CHECKING:
    import numpy as np
    import torch

_OLD_ATTENTION = {"q_proj": "to_q", "k_proj": "to_k", "v_proj": "to_v", "out_proj": "to_out"}
"""Attention layer names in diffusers' first LoRAs, the same in all models."""

_READS_HIDDEN = re.compile(r"(self_attn_([qkv]_proj|to_[qkv])|mlp_fc1)$")
_LAYER = re.compile(r"encoder_layers_(\d+)_")

MOST_VECTORS = 75
"""Maximum tokens per chunk of text, without the begin and end tokens."""
WIDTHS = "768 are Stable Diffusion 1.x, 1024 2.x, 768 and 1280 together XL"
"""Embedding widths by Stable Diffusion version, for messages."""

UNUSED = ("embeddings.position_ids", "text_projection.weight", "logit_scale")
"""Tensors to ignore: a buffer 0, 1, 2, ... that older releases saved, and CLIP's contrastive head."""


class ClipText(Model):
    """transformers' CLIPTextModel. Outputs the last hidden state and that of the end token."""

    class_name: ClassVar[str] = "CLIPTextModel"
    weights_stem: ClassVar[str] = "model"
    library_module: ClassVar[str | None] = "transformers.models.clip.modeling_clip"
    pooled: ClassVar[tuple[str, str]] = ("pooler_output", "hidden_size")
    """Name of the pooled output, and the config entry of its width."""

    def empty(self, config: Config) -> torch.nn.Module:
        from transformers import CLIPTextConfig, CLIPTextModel

        return CLIPTextModel(CLIPTextConfig.from_dict(dict(config)))

    def parameters(self, config: Config) -> Shapes | None:
        return clip_text_parameters(config, "")

    def ports(self, config: Config) -> Ports:
        hidden = Port("last_hidden_state", "float32", ("batch", "sequence", config["hidden_size"]))
        name, width = self.pooled
        pooled = Port(name, "float32", ("batch", config[width]))
        layers = config["num_hidden_layers"] if config.get("output_hidden_states") else 0
        states = (Port(f"hidden_states.{index}", hidden.dtype, hidden.axes) for index in range(layers))
        return Ports(
            inputs=(Port("input_ids", "int32", ("batch", "sequence")),), outputs=(*self._first(hidden, pooled), *states)
        )

    def _first(self, hidden: Port, pooled: Port) -> tuple[Port, Port]:
        return hidden, pooled

    def smallest(self, config: Config) -> Sizes:
        return Sizes(batch=2, sequence=config["max_position_embeddings"])

    def distinguishing_shapes(self, config: Config) -> Shapes:
        return {
            "embeddings.token_embedding.weight": (config["vocab_size"], config["hidden_size"]),
            "embeddings.position_embedding.weight": (config["max_position_embeddings"], config["hidden_size"]),
        }

    def values(self, port: Port, shape: list[int], config: Config, random: np.random.Generator) -> np.ndarray:
        ids: np.ndarray = random.integers(0, config["vocab_size"], shape, dtype=port.dtype)
        ids[:, -1] = min(config["eos_token_id"], config["vocab_size"] - 1)
        return ids

    def traced(self, module: Any) -> None:
        """Use eager attention with the causal mask of transformers 4.2x, the only one that ORT's fusion matches."""
        module.set_attn_implementation("eager")
        original = module.forward
        names = [port.name for port in self.ports(module.config.to_dict()).outputs]

        def forward(input_ids: Any) -> tuple[Any, ...]:
            # transformers uses a 4-D mask as it is, instead of creating its own.
            output = original(input_ids=input_ids, attention_mask=_causal_mask(input_ids))
            return tuple(self._outputs(output, names).values())

        module.forward = forward

    def reference(self, module: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        names = [port.name for port in self.ports(module.config.to_dict()).outputs]
        return self._outputs(module(input_ids=inputs["input_ids"].long()), names)

    def to_half(self, module: Any, dtype: torch.dtype) -> None:
        """Compute attention operator by operator ("eager"), like the unfused exported graph."""
        module.set_attn_implementation("eager")
        super().to_half(module, dtype)

    @staticmethod
    def _outputs(output: Any, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return transformers' outputs by port name."""
        found = {}
        for name in names:
            stem, dot, index = name.partition(".")
            found[name] = getattr(output, stem)[int(index)] if dot else getattr(output, name)
        return found

    def recorded_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        return {"input_ids": args[0] if args else kwargs["input_ids"]}

    def unused(self, name: str, keys: Iterable[str]) -> bool:
        return name.endswith(UNUSED)

    def current_name(self, name: str) -> str:
        """Strip the prefix `text_model.`, which releases before transformers 5 wrote."""
        return name.removeprefix("text_model.")

    def lora_spellings(self, modules: Iterable[str]) -> dict[str, tuple[str, ...]]:
        spellings = {}
        for module in modules:
            bare = self.current_name(module)
            parent, _, last = bare.rpartition(".")
            names = [bare, f"{parent}.{_OLD_ATTENTION[last]}"] if last in _OLD_ATTENTION else [bare]
            spellings[module] = (*names, *(f"text_model.{name}" for name in names))
        return spellings

    def lora_misfit(self, config: Config, module: str, width: int) -> str | None:
        layers, hidden = config.get("num_hidden_layers", math.inf), config.get("hidden_size", width)
        if (layer := _LAYER.search(module)) and int(layer[1]) >= layers:
            return f"this text encoder has {layers} layers"
        if _READS_HIDDEN.search(module) and width != hidden:
            return f"for a text encoder {width} wide, not {hidden}"
        return None


class ClipTextWithProjection(ClipText):
    """transformers' CLIPTextModelWithProjection. The projected pooled embedding is the first output."""

    class_name: ClassVar[str] = "CLIPTextModelWithProjection"
    pooled: ClassVar[tuple[str, str]] = ("text_embeds", "projection_dim")

    def empty(self, config: Config) -> torch.nn.Module:
        from transformers import CLIPTextConfig, CLIPTextModelWithProjection

        return CLIPTextModelWithProjection(CLIPTextConfig.from_dict(dict(config)))

    def parameters(self, config: Config) -> Shapes | None:
        projection = {"text_projection.weight": (config["projection_dim"], config["hidden_size"])}
        return {**clip_text_parameters(config, "text_model."), **projection}

    def _first(self, hidden: Port, pooled: Port) -> tuple[Port, Port]:
        return pooled, hidden

    def traced(self, module: Any) -> None:
        """As in `ClipText`, but find the end token with operators that have GPU kernels: transformers' integer ArgMax
        has no CUDA kernel."""
        super().traced(module)
        inner = module.forward
        end = module.config.eos_token_id

        def forward(input_ids: Any) -> tuple[Any, ...]:
            _, hidden, *states = inner(input_ids)
            return (module.text_projection(_at_end(hidden, input_ids, end)), hidden, *states)

        module.forward = forward


class PooledClipText(ClipText):
    """`ClipText` for pipelines that read its pooled embedding, computed by operators with GPU kernels."""

    traced_as: ClassVar[str | None] = "pooled"

    def traced(self, module: Any) -> None:
        super().traced(module)
        inner = module.forward
        end = module.config.eos_token_id

        def forward(input_ids: Any) -> tuple[Any, ...]:
            hidden, _, *states = inner(input_ids)
            return (hidden, _at_end(hidden, input_ids, end), *states)

        module.forward = forward


def _at_end(hidden: Any, input_ids: Any, end: int) -> Any:
    """Return the hidden states of each text's end token."""
    # Old configs have eos_token_id 2; their end token is the one with the largest id. Convert the marks to float, not
    # the ids: a pass may change float32 to float16, which cannot distinguish 49406 (begin) from 49407 (end).
    marks = input_ids == (input_ids.amax(dim=-1, keepdim=True) if end == 2 else end)
    place = marks.float().argmax(dim=-1)[:, None, None].expand(-1, 1, hidden.shape[-1])
    return hidden.gather(1, place)[:, 0]


def _causal_mask(input_ids: Any) -> Any:
    """Return a mask [batch, 1, sequence, sequence]: 0 on and below the diagonal, the lowest float32 above it.

    As in transformers 4.2x (`_make_causal_mask`). It is traced as Where(Less)-Unsqueeze-Unsqueeze-Expand, which
    onnxruntime/transformers/fusion_attention_clip.py matches.
    """
    import torch

    batch, sequence = input_ids.shape
    mask = torch.full((sequence, sequence), torch.finfo(torch.float32).min)
    positions = torch.arange(sequence)
    mask.masked_fill_(positions < (positions + 1).view(sequence, 1), 0)
    return mask[None, None, :, :].expand(batch, 1, sequence, sequence)
