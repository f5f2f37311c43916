"""Quantizing passes as data: which weights they quantize, the resulting sizes, and where `init --fits` may choose them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import prod
from typing import Any, Literal

from sdflow.onnx_model.float8 import UNIT
from sdflow.onnx_model.float8 import WIDEST as WIDEST_FP8
from sdflow.onnx_model.int8 import UNIT_IN, UNIT_OUT, WIDEST
from sdflow.passes.registry import OWN

EMBEDDED = re.compile(
    r"embed_tokens|token_embedding|shared\.|position|pos_embed|class_embedding|relative_attention_bias"
)
"""Names of lookup tables, which no pass quantizes."""
OF_IMAGE = re.compile(
    r"modulation|time|(?:^|\.)t_embedder|norm\w*\.linear\.|add_embedding|guidance_in|vector_in|text_embedder"
)
"""Names of products with one row per image, of timesteps and pooled embeddings."""
_BLOCK = 32
_INDEX = re.compile(r"\.(?=\d+(?:\.|$))")

Options = Mapping[str, Any]
Shape = Sequence[int]


def node_path(parameter: str) -> str:
    """Prefix of the graph nodes of a parameter's layer: `/up_blocks.0/resnets.1/conv1` for
    `up_blocks.0.resnets.1.conv1.weight`."""
    module = parameter.rpartition(".")[0]
    return "/" + _INDEX.sub("\0", module).replace(".", "/").replace("\0", ".")


def is_named(parameter: str, patterns: Sequence[str]) -> bool:
    """Whether a node pattern matches a node that reads this parameter."""
    path = node_path(parameter)
    return any(
        fnmatchcase(f"{path}/{operator}", pattern) for operator in ("MatMul", "Gemm", "Conv") for pattern in patterns
    )


@dataclass(frozen=True)
class LowBits:
    """A pass that quantizes weights.

    takes(name, shape, options): whether it quantizes a parameter (a matrix of a product that is not kept). size(shape,
    held, options): bytes of the quantized weight with its scales; held: bytes per value before.
    """

    takes: Callable[[str, Shape, Options], bool]
    size: Callable[[Shape, int, Options], int]

    def taken(self, name: str, shape: Shape, options: Options) -> bool:
        """Whether the pass quantizes this parameter with these options."""
        matrix = len(shape) == 2 and name.endswith(".weight") and not EMBEDDED.search(name)
        return matrix and not is_named(name, options.get("keep", ())) and self.takes(name, shape, options)


def _fp8_takes(name: str, shape: Shape, options: Options) -> bool:
    large = prod(shape) >= options.get("smallest", 1 << 20)
    fits = all(side % UNIT == 0 for side in shape) and shape[1] <= WIDEST_FP8
    return large and fits and not OF_IMAGE.search(name)


def _int8_takes(name: str, shape: Shape, options: Options) -> bool:
    if prod(shape) < int(options.get("smallest", 0)):
        return False
    if options.get("activations", "tensor") == "tensor":
        return True
    fits = shape[1] % UNIT_IN == 0 and shape[1] <= WIDEST and shape[0] % UNIT_OUT == 0
    return fits and not OF_IMAGE.search(name)


def _block_size(shape: Shape, held: int, options: Options) -> int:
    out, into = shape
    bits, block = int(options.get("bits", 4)), int(options.get("block_size", _BLOCK))
    along = into // block
    zeros = 0 if options.get("is_symmetric") else out * -(-along * bits // 8)
    return out * into * bits // 8 + out * along * held + zeros


def _blocks_take(name: str, shape: Shape, options: Options) -> bool:
    whole = shape[1] % int(options.get("block_size", _BLOCK)) == 0
    return whole and prod(shape) >= int(options.get("smallest", 1 << 16))


LOW_BITS: Mapping[str, LowBits] = {
    "QuantizeFp8": LowBits(_fp8_takes, lambda shape, held, options: prod(shape) + 4 * shape[0]),
    "QuantizeInt8": LowBits(_int8_takes, lambda shape, held, options: prod(shape) + 4 * shape[0]),
    "QuantizeInt4": LowBits(_blocks_take, _block_size),
}
"""Pass name -> its arithmetic: one byte per value and a float32 scale per row; or blocks with a scale and zero point
each."""


@dataclass(frozen=True)
class Choosable:
    """A pass that `sdflow init --fits` may choose, ordered by loss.

    of: for the denoiser, only if its family was measured with the pass (`Family.quantizing`, whose options take
    precedence); or for text encoders with at least `least` parameters. targets: those with kernels for the result.
    note: for the comment.
    """

    name: str
    of: Literal["denoiser", "text"]
    targets: tuple[str, ...]
    loss: int
    note: str
    options: Options = field(default_factory=dict)
    least: int = 0

    @property
    def is_there(self) -> bool:
        """Whether this version has the pass."""
        return self.name in OWN


_LARGE = 10**9
_BY_BLOCKS = ("cpu", "cuda", "directml", "webgpu")
_BY_8, _BY_4 = "8 bits per weight", "4 bits per weight"

CHOOSABLE: tuple[Choosable, ...] = (
    Choosable("QuantizeInt4", "text", _BY_BLOCKS, 1, _BY_8, {"bits": 8, "limit": 0.05}, _LARGE),
    Choosable("QuantizeFp8", "denoiser", ("cuda",), 2, "needs compute capability 8.9 or later (Ada, Hopper)"),
    Choosable("QuantizeInt8", "denoiser", ("cpu",), 2, "int8 products on the CPU"),
    Choosable("QuantizeInt4", "denoiser", _BY_BLOCKS, 3, _BY_8, {"bits": 8}),
    Choosable("QuantizeInt4", "text", _BY_BLOCKS, 4, _BY_4, {"bits": 4, "limit": 0.25}, _LARGE),
    Choosable("QuantizeInt4", "denoiser", _BY_BLOCKS, 5, _BY_4, {"bits": 4}),
)
