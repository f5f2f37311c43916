"""CLIP's text model: token ids to embeddings, as text encoder of Stable Diffusion.

It takes int32 ids: that is what diffusers' ONNX pipelines feed. With `output_hidden_states` in its config, as optimum
exports the text encoders of Stable Diffusion XL, what goes into each layer is an output too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from sdflow.models.base import Config, Model, Port, Ports, Shapes, Sizes
from sdflow.models.parameters import clip_text_parameters

if TYPE_CHECKING:
    import numpy as np
    import torch

_OLD_ATTENTION = {"q_proj": "to_q", "k_proj": "to_k", "v_proj": "to_v", "out_proj": "to_out"}
"""diffusers' first LoRAs named the layers of attention alike in all models."""

_READS_HIDDEN = re.compile(r"(self_attn_([qkv]_proj|to_[qkv])|mlp_fc1)$")
_LAYER = re.compile(r"encoder_layers_(\d+)_")

MOST_VECTORS = 75
"""Tokens of a text that it reads at once, beside those of begin and end."""
WIDTHS = "768 are Stable Diffusion 1.x, 1024 2.x, 768 and 1280 together XL"
"""Whose text encoders have vectors of which width, in words."""

UNUSED = ("embeddings.position_ids", "text_projection.weight", "logit_scale")
"""Older releases saved the first, a buffer that is 0, 1, 2, ...; the others are CLIP's contrastive head."""


class ClipText(Model):
    """transformers' CLIPTextModel. Outputs: the last hidden state, and that of the end token."""

    class_name: ClassVar[str] = "CLIPTextModel"
    weights_stem: ClassVar[str] = "model"
    library_module: ClassVar[str | None] = "transformers.models.clip.modeling_clip"
    pooled: ClassVar[tuple[str, str]] = ("pooler_output", "hidden_size")
    """Name of the output for the whole text, and the entry of the config with its width."""

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
        """Eager attention under the causal mask of transformers 4.2x, the only one that ORT's fusion knows."""
        module.set_attn_implementation("eager")
        original = module.forward
        names = [port.name for port in self.ports(module.config.to_dict()).outputs]

        def forward(input_ids: Any) -> tuple[Any, ...]:
            # A mask of four dimensions is used as it is, in place of the one that transformers would make.
            output = original(input_ids=input_ids, attention_mask=_causal_mask(input_ids))
            return tuple(self._outputs(output, names).values())

        module.forward = forward

    def reference(self, module: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        names = [port.name for port in self.ports(module.config.to_dict()).outputs]
        return self._outputs(module(input_ids=inputs["input_ids"].long()), names)

    def to_half(self, module: Any, dtype: torch.dtype) -> None:
        """Attention operator by operator ("eager"), as the exported graph computes it where nothing is fused."""
        module.set_attn_implementation("eager")
        super().to_half(module, dtype)

    @staticmethod
    def _outputs(output: Any, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """transformers' output object under the names of the ports."""
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
        """transformers 5 saves without the prefix `text_model.` that every release before wrote."""
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
    """transformers' CLIPTextModelWithProjection: the text as a whole is projected, and comes first."""

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
        """As of `ClipText`; the end token is found with operators that have kernels on GPUs. transformers' own ArgMax of
        integers has none on CUDA."""
        super().traced(module)
        inner = module.forward
        end = module.config.eos_token_id

        def forward(input_ids: Any) -> tuple[Any, ...]:
            _, hidden, *states = inner(input_ids)
            return (module.text_projection(_at_end(hidden, input_ids, end)), hidden, *states)

        module.forward = forward


class PooledClipText(ClipText):
    """`ClipText` for pipelines that read its pooled embedding, which is computed by operators that have kernels on GPUs."""

    def traced(self, module: Any) -> None:
        super().traced(module)
        inner = module.forward
        end = module.config.eos_token_id

        def forward(input_ids: Any) -> tuple[Any, ...]:
            hidden, _, *states = inner(input_ids)
            return (hidden, _at_end(hidden, input_ids, end), *states)

        module.forward = forward


def _at_end(hidden: Any, input_ids: Any, end: int) -> Any:
    """The hidden states of each text's end token."""
    # 2 stands in configs of the time when the end token was the one with the largest id. Marks, not ids, are made
    # floats: a pass may make them float16, which does not tell 49406, where a text begins, from 49407, its end.
    marks = input_ids == (input_ids.amax(dim=-1, keepdim=True) if end == 2 else end)
    place = marks.float().argmax(dim=-1)[:, None, None].expand(-1, 1, hidden.shape[-1])
    return hidden.gather(1, place)[:, 0]


def _causal_mask(input_ids: Any) -> Any:
    """0 on and below the diagonal, the least float32 above it, [batch, 1, sequence, sequence].

    The form of transformers 4.2x (`_make_causal_mask`). Traced, it is Where(Less)-Unsqueeze-Unsqueeze-Expand, which
    onnxruntime/transformers/fusion_attention_clip.py looks for.
    """
    import torch

    batch, sequence = input_ids.shape
    mask = torch.full((sequence, sequence), torch.finfo(torch.float32).min)
    positions = torch.arange(sequence)
    mask.masked_fill_(positions < (positions + 1).view(sequence, 1), 0)
    return mask[None, None, :, :].expand(batch, 1, sequence, sequence)
