"""A small catalog for the tests of workflows: real option models, passes by name and by path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from sdflow.config.catalog import PassInfo, PassNotFound


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Conversion(Options):
    """Export."""

    target_opset: int = Field(default=17, ge=14, le=20)
    device: Literal["cpu", "cuda"] = "cpu"


class Merge(Options):
    """Merge LoRAs."""


class Fusions(Options):
    """What to fuse."""

    enable_gelu: bool = True
    enable_packed_qkv: bool = True
    enable_packed_kv: bool = True
    enable_nhwc_conv: bool = True
    enable_group_norm: bool = True
    enable_skip_group_norm: bool = True
    enable_bias_splitgelu: bool = True
    enable_bias_add: bool = True
    enable_skip_layer_norm: bool = True
    enable_bias_skip_layer_norm: bool = True
    enable_qordered_matmul: bool = True
    group_norm_channels_last: bool = True


class Optimization(Options):
    """Fuse."""

    model_type: Literal["clip", "unet", "vae", "mmdit", "t5"]
    opt_level: int = 0
    float16: bool = False
    num_heads: int = 0
    hidden_size: int = 0
    optimization_options: Fusions | None = None


class ConvBias(Options):
    """Fold biases."""


class Subpixel(Options):
    """Convolve before upsampling."""


class Resize(Options):
    """Upsample."""


class Separate(Options):
    """Take packed attentions apart."""

    widest: int = Field(default=640, gt=0, description="channels of the widest attention that is taken apart")


class Scaling(Options):
    """Divide by a power of two."""

    power: int = 6


class Half(Options):
    """To fp16."""

    keep_io_types: bool | list[str] = False
    min_positive_val: float = 1e-7
    op_block_list: tuple[str, ...] | None = None
    node_block_list: tuple[str, ...] | None = None
    op_include_list: tuple[str, ...] | None = None
    force_fp16_inputs: Mapping[str, tuple[int, ...]] | None = None

    @model_validator(mode="before")
    @classmethod
    def one_list(cls, options: Any) -> Any:
        if isinstance(options, dict) and options.get("op_block_list") and options.get("op_include_list"):
            raise ValueError("op_include_list cannot stand beside op_block_list")
        return options


class Integers(Options):
    """To int8."""

    limit: float | None = None
    keep: tuple[str, ...] = ()


class Rows(Integers):
    """To int8, activations by tensor or by row."""

    smallest: int = 0
    activations: Literal["tensor", "row"] = "tensor"


class Floats(Integers):
    """To float8."""

    smallest: int = 1 << 20


class Blocks(Floats):
    """To 4 or 8 bits, by blocks."""

    bits: Literal[4, 8] = 4
    block_size: int = 32
    is_symmetric: bool = False
    algorithm: Literal["mse", "rtn"] = "mse"
    accuracy_level: int = 0


class OwnPass(Options):
    """A pass of the user's."""

    strength: float = 1.0


PASSES = {
    info.name: info
    for info in (
        PassInfo("OnnxConversion", "checkpoint", False, Conversion),
        PassInfo("ActivationScaling", "onnx", False, Scaling),
        PassInfo("LoraMerge", "onnx", True, Merge),
        PassInfo("OrtTransformersOptimization", "onnx", False, Optimization),
        PassInfo("ConvBiasFusion", "onnx", False, ConvBias),
        PassInfo("NhwcResize", "onnx", False, Resize),
        PassInfo("SeparateQkv", "onnx", False, Separate),
        PassInfo("SubpixelConv", "onnx", False, Subpixel),
        PassInfo("OnnxFloatToFloat16", "onnx", False, Half),
        PassInfo("QuantizeInt8", "onnx", False, Rows, lambda options: "int8"),
        PassInfo("QuantizeInt4", "onnx", False, Blocks, lambda options: f"int{options.get('bits', 4)}"),
        PassInfo("QuantizeFp8", "onnx", False, Floats, "float8_e4m3"),
    )
}


class SmallCatalog:
    """Passes by name, and any class of a Python file that exists at a path from `base`."""

    def names(self) -> Sequence[str]:
        return tuple(PASSES)

    def find(self, name: str, base: Path) -> PassInfo:
        if name in PASSES:
            return PASSES[name]
        path, separator, _ = name.rpartition(":")
        if not separator:
            raise PassNotFound(f"unknown pass {name!r}")
        if (base / path).is_file():
            return PassInfo(name, "onnx", False, OwnPass)
        raise PassNotFound(f"no file {path!r} for the pass {name!r}")
