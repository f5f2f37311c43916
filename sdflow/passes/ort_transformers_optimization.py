"""OrtTransformersOptimization: fuse operators with `onnxruntime.transformers`, through Olive's pass of the same name.

Differences from Olive's pass:

- Unknown model types and options, and fusions that fuse nothing, are errors. Olive returns its input for a model type
  that it does not know, and accepts any option.
- Attentions of a VAE keep their biases. `FusionAttentionVae` writes zeros in place of the biases of q, k and v
  (onnxruntime 1.31, fusion_attention_vae.py, "No bias, use zeros").
- IP-Adapter attentions are fused too (`sdflow.passes.image_prompt_fusion`).
- Disabling shape inference is an error, since most UNet fusions then silently do nothing; so is BiasAdd without the two
  fusions it depends on.
- For CLIP, the number of heads and the hidden size come from config.json.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from sdflow.artifact import MODEL_FILE, Facts
from sdflow.errors import PassError
from sdflow.models.ports import EXACT
from sdflow.onnx_model.facts import graph_facts
from sdflow.passes.base import EDITS_GRAPH, Pass, PassConfig, PassInputs
from sdflow.passes.float16 import KeepFloat32, convert_to_float16, float16_facts
from sdflow.passes.image_prompt_fusion import image_prompt_attention
from sdflow.passes.masked_attention_fusion import masked_attention
from sdflow.passes.olive import read_config, run_olive_pass
from sdflow.processes.patched import patched

FUSED = (
    "Attention",
    "BiasAdd",
    "BiasGelu",
    "BiasSplitGelu",
    "EmbedLayerNormalization",
    "FastGelu",
    "Gelu",
    "GroupNorm",
    "LayerNormalization",
    "MultiHeadAttention",
    "NhwcConv",
    "QuickGelu",
    "SkipGroupNorm",
    "SimplifiedLayerNormalization",
    "SkipLayerNormalization",
    "SkipSimplifiedLayerNormalization",
)
"""Operators that fusions create. LayerNormalization and Gelu are standard operators and may exist before."""

CERTAIN = {
    "clip": ("enable_gelu", "enable_layer_norm", "enable_skip_layer_norm"),
    "mmdit": ("enable_attention", "enable_gelu", "enable_layer_norm"),
    "t5": ("enable_gelu", "enable_layer_norm"),
    "unet": ("enable_attention", "enable_group_norm", "enable_nhwc_conv", "enable_skip_layer_norm"),
    "vae": ("enable_group_norm", "enable_nhwc_conv"),
}
"""Fusions that match in every model of the type. A VAE's attention only matches in one form of export."""


class FusionSwitches(PassConfig):
    """Switches of `onnxruntime.transformers.fusion_options.FusionOptions`."""

    enable_gelu: bool = Field(default=True, description="Gelu and QuickGelu")
    enable_layer_norm: bool = Field(default=True, description="LayerNormalization")
    enable_attention: bool = Field(default=True, description="Attention or MultiHeadAttention")
    enable_rotary_embeddings: bool = Field(default=True, description="RotaryEmbedding (not used by Stable Diffusion)")
    enable_skip_layer_norm: bool = Field(
        default=True, description="Add and LayerNormalization in one; BiasAdd needs it"
    )
    enable_embed_layer_norm: bool = Field(
        default=False, description="EmbedLayerNormalization (not used by Stable Diffusion)"
    )
    enable_bias_skip_layer_norm: bool = Field(
        default=True, description="fold a preceding bias into SkipLayerNormalization"
    )
    enable_bias_gelu: bool = Field(default=True, description="BiasGelu")
    enable_gelu_approximation: bool = Field(
        default=False, description="FastGelu in place of Gelu; changes the results slightly"
    )
    enable_qordered_matmul: bool = Field(default=True, description="QOrderedMatMul, for quantized models")
    enable_gemm_fast_gelu: bool = Field(default=False, description="GemmFastGelu")
    enable_shape_inference: bool = Field(default=True, description="must be on: most fusions need the shapes")
    enable_nhwc_conv: bool = Field(default=True, description="NhwcConv, weights transposed ahead of time")
    enable_group_norm: bool = Field(default=True, description="GroupNorm with its SiLU")
    enable_skip_group_norm: bool = Field(default=True, description="SkipGroupNorm: Add and GroupNorm in one")
    enable_bias_splitgelu: bool = Field(
        default=True, description="BiasSplitGelu, the UNet's gated GELU; BiasAdd needs it"
    )
    enable_packed_qkv: bool = Field(default=True, description="one matrix for q, k and v of self-attention")
    enable_packed_kv: bool = Field(default=True, description="one matrix for k and v of cross-attention")
    enable_bias_add: bool = Field(default=True, description="BiasAdd: bias and residual in one")
    group_norm_channels_last: bool = Field(default=True, description="GroupNorm in NHWC; false for DirectML")
    use_multi_head_attention: bool = Field(
        default=False, description="MultiHeadAttention even where Attention suffices"
    )
    disable_multi_head_attention_bias: bool = Field(
        default=False, description="leave the bias out of MultiHeadAttention"
    )
    attention_mask_format: Literal[0, 1, 2, 3] = Field(default=2, description="0-1: index, 2: raw mask, 3: no mask")
    attention_op_type: Literal["Attention", "MultiHeadAttention", "GroupQueryAttention", "PagedAttention"] | None = (
        Field(default=None, description="attention operator to create; default depends on the model type")
    )

    @model_validator(mode="after")
    def _switches_that_need_others(self) -> FusionSwitches:
        if not self.enable_shape_inference:
            raise ValueError(
                "enable_shape_inference: false silently disables MultiHeadAttention, SkipLayerNormalization, "
                "SkipGroupNorm and BiasAdd; leave it on"
            )
        return self

    def must_fuse(self, model_type: str) -> bool:
        """Whether a fusion is enabled that matches in every model of this type."""
        return any(getattr(self, name) for name in CERTAIN[model_type])


class OrtTransformersOptimizationConfig(PassConfig):
    """Olive's options, with types."""

    model_type: Literal["clip", "mmdit", "t5", "unet", "vae"] = Field(description="which set of fusions")
    num_heads: int = Field(
        default=0, ge=0, description="attention heads; 0: from the graph, or from config.json for clip"
    )
    hidden_size: int = Field(default=0, ge=0, description="hidden size; 0: as num_heads")
    num_key_value_heads: int = Field(default=0, ge=0, description="heads of key and value; 0: as num_heads")
    optimization_options: FusionSwitches = Field(default=FusionSwitches(), description="fusions to turn on or off")
    opt_level: Literal[0, 1, 2, 99] = Field(
        default=0, description="ONNX Runtime's own graph optimizations before the fusions"
    )
    use_gpu: bool = Field(default=False, description="optimize for a GPU; matters only with opt_level above 0")
    only_onnxruntime: bool = Field(default=False, description="no fusions, only opt_level")
    float16: bool = Field(default=False, description="convert to float16 after fusing, as OnnxFloatToFloat16 does")
    keep_io_types: KeepFloat32 = Field(default=EXACT, description="float16: inputs and outputs that stay float32")
    force_fp32_ops: tuple[str, ...] | None = Field(
        default=None, description="float16: operator types that stay float32"
    )
    force_fp32_nodes: tuple[str, ...] | None = Field(
        default=None, description="float16: names of nodes that stay float32"
    )
    force_fp16_inputs: Mapping[str, tuple[int, ...]] | None = Field(
        default=None,
        description="float16: operator type -> inputs (indices) to convert although ONNX Runtime keeps them float32",
    )
    input_int32: bool = Field(default=False, description="convert integer inputs to int32")

    @model_validator(mode="after")
    def _options_that_need_others(self) -> OrtTransformersOptimizationConfig:
        switches = self.optimization_options
        if self.only_onnxruntime and self.opt_level == 0:
            raise ValueError("only_onnxruntime needs opt_level 1, 2 or 99")
        if (self.num_heads == 0) != (self.hidden_size == 0) or (self.num_heads and self.hidden_size % self.num_heads):
            raise ValueError("hidden_size must be a multiple of num_heads; give both or neither")
        if self.model_type == "unet" and switches.enable_bias_add:
            missing = [
                name for name in ("enable_bias_splitgelu", "enable_skip_layer_norm") if not getattr(switches, name)
            ]
            if missing:
                raise ValueError(f"enable_bias_add matches nothing without {' and '.join(missing)}: set it to false")
        forced = (self.force_fp32_ops, self.force_fp32_nodes, self.force_fp16_inputs)
        if not self.float16 and any(value is not None for value in forced):
            raise ValueError("force_fp32_ops, force_fp32_nodes and force_fp16_inputs need float16: true")
        return self


class OrtTransformersOptimization(Pass[OrtTransformersOptimizationConfig]):
    """Fuses attention, normalization, activations and convolutions into ONNX Runtime's operators."""

    name: ClassVar[str] = "OrtTransformersOptimization"
    version: ClassVar[int] = 1
    uses: ClassVar[tuple[str, ...]] = ("olive-ai", "onnxruntime", "onnx", "numpy", "sympy")
    imports = EDITS_GRAPH
    moves_weights: ClassVar[bool] = True
    weights_read_by: ClassVar[Mapping[str, str]] = {"opt_level": "lets ONNX Runtime fold weights"}
    Config: ClassVar[type[PassConfig]] = OrtTransformersOptimizationConfig

    def run(self, inputs: PassInputs, out: Path, config: OrtTransformersOptimizationConfig) -> Facts:
        source = self.source(inputs)
        before = graph_facts(source / MODEL_FILE)
        inputs.progress("fusing")
        fused_dir = out / ".fused" if config.float16 else out
        fused_dir.mkdir(exist_ok=True)
        with true_vae_biases(), image_prompt_attention(), masked_attention():
            options = self.olive_options(config, source)
            run_olive_pass(self.name, options, source, fused_dir, keep_weights_on_disk=config.opt_level == 0)
        after = graph_facts(fused_dir / MODEL_FILE)
        fused = fused_operators(before, after)
        if config.optimization_options.must_fuse(config.model_type) and not config.only_onnxruntime and not fused:
            raise PassError(
                f"nothing was fused: the graph does not match model_type {config.model_type}",
                where=self.name,
                remedy="Export with OnnxConversion (not the dynamo exporter), check model_type, or leave the pass out.",
            )
        if not config.float16:
            return {**after, "fused": fused}
        inputs.progress("converting to float16")
        convert_to_float16(
            fused_dir,
            out,
            keep_io_types=config.keep_io_types,
            op_block_list=config.force_fp32_ops,
            node_block_list=config.force_fp32_nodes,
            force_fp16_inputs=config.force_fp16_inputs,
        )
        shutil.rmtree(fused_dir)
        return {**graph_facts(out / MODEL_FILE), **float16_facts(out), "fused": fused}

    def olive_options(self, config: OrtTransformersOptimizationConfig, model: Path) -> dict[str, Any]:
        """Return the options in the form that Olive's pass takes, for the artifact `model`."""
        options = config.model_dump(
            exclude={"float16", "keep_io_types", "force_fp32_ops", "force_fp32_nodes", "force_fp16_inputs"}
        )
        options["optimization_options"] = config.optimization_options.model_dump(exclude_none=True)
        if config.model_type == "clip" and not config.num_heads:
            options["num_heads"], options["hidden_size"] = _clip_heads(read_config(model))
        return options


def fused_operators(before: Facts, after: Facts) -> dict[str, int]:
    """Return how many more fused operators `after` has than `before`, by operator."""
    counts = {name: after["operators"].get(name, 0) - before["operators"].get(name, 0) for name in FUSED}
    return {name: count for name, count in counts.items() if count > 0}


def _clip_heads(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return heads and hidden size of a CLIP text model or a safety checker's vision model; (0, 0) if unknown."""
    known = config.get("vision_config", config)
    return int(known.get("num_attention_heads", 0)), int(known.get("hidden_size", 0))


@contextlib.contextmanager
def true_vae_biases() -> Iterator[None]:
    """While active, fused VAE Attention nodes get the biases of q, k and v instead of zeros."""
    from onnxruntime.transformers import optimizer  # noqa: F401  adds the folder of the fusions to sys.path

    fusion = __import__("fusion_attention_vae").FusionAttentionVae
    original = fusion.create_attention_node

    def mended(self: Any, q_matmul: Any, q_add: Any, k_matmul: Any, k_add: Any, *rest: Any) -> Any:
        v_add = rest[1]
        node = original(self, q_matmul, q_add, k_matmul, k_add, *rest)
        if node is not None:
            _write_biases(self.model, node.input[2], (q_add, k_add, v_add))
        return node

    with patched(fusion, create_attention_node=mended):
        yield


def _write_biases(model: Any, name: str, additions: tuple[Any, ...]) -> None:
    """Concatenate the constants that the nodes `additions` add into the initializer `name`."""
    import numpy as np
    import onnx

    biases = [
        onnx.numpy_helper.to_array(model.get_initializer(node.input[1]) or model.get_initializer(node.input[0]))
        for node in additions
    ]
    packed = model.get_initializer(name)
    if packed is None or list(packed.dims) != [sum(bias.size for bias in biases)]:
        raise PassError(f"the packed bias {name!r} of a VAE's attention has another shape than its q, k and v")
    packed.CopyFrom(onnx.numpy_helper.from_array(np.concatenate(biases), name))
