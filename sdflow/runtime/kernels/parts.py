"""Parts of the kernel library, each compiled and tested when a graph first needs it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdflow.onnx_model.float8 import DOMAIN
from sdflow.onnx_model.phases import INTERLEAVE

FOLDER = Path(__file__).parent
HALVES = ("overlap.cuh", "float16.cuh", "halves.cuh")
SIXTEEN = (*HALVES, "bfloat16.cuh", "sixteen_bits.cuh")
FLOAT8 = "float8"
INT8 = "int8"


@dataclass(frozen=True)
class Part:
    """A part of the kernel library.

    sources: in compilation order. operators: ONNX operators that its kernels implement. hopper: only for Hopper
    GPUs. since: first compute capability, if older than that of the other parts.
    """

    name: str
    sources: tuple[str, ...]
    operators: tuple[str, ...]
    hopper: bool = False
    since: tuple[int, int] | None = None

    def texts(self) -> list[tuple[str, str]]:
        """Return name and content of each source."""
        return [(name, (FOLDER / name).read_text(encoding="utf-8")) for name in self.sources]


def _of_both(*operators: str) -> tuple[str, ...]:
    return tuple(f"{operator}{kind}" for operator in operators for kind in ("", "Bfloat16"))


PARTS = {
    part.name: part
    for part in (
        Part(
            "group_norm",
            (*HALVES, "group_norm.cuh", "group_norm_twice.cu", "cluster.cuh", "group_norm_held.cu"),
            ("GroupNorm", "GroupNormSingle"),
        ),
        Part("bias_split_gelu", (*HALVES, "gelu.cuh", "bias_split_gelu.cu"), ("BiasSplitGelu",)),
        Part("interleave", ("overlap.cuh", "interleave.cu"), (INTERLEAVE, f"{INTERLEAVE}Single")),
        Part(
            FLOAT8,
            (
                *(*SIXTEEN, "gelu.cuh", "float8.cuh", "float8_row.cuh", "float8_rows.cu"),
                *("mma.cuh", "hopper.cuh", "quick_gelu.cuh", "float8_product.cu"),
            ),
            (*_of_both("Float8Rows", "Float8Product"), *("Float8SplitGelu", "Float8LayerNorm", "Float8GatedProduct")),
        ),
        Part(
            "few_keys_attention",
            (*HALVES, "mma.cuh", "few_keys_attention.h", "few_keys_attention.cu"),
            ("FewKeysAttention",),
        ),
        Part("geglu", (*HALVES, "mma.cuh", "hopper.cuh", "quick_gelu.cuh", "geglu.cu"), ("Geglu",), hopper=True),
        Part("rotary_qkv", (*SIXTEEN, "rotary_qkv.cu"), _of_both("RotaryQkv")),
        Part(
            "residual_norm",
            (*SIXTEEN, "float8.cuh", "float8_row.cuh", "residual_norm.cu"),
            _of_both(
                *("GatedResidual", "ModulatedNorm", "GatedResidualNorm"),
                *("Float8ModulatedNorm", "Float8GatedResidualNorm"),
            ),
        ),
        Part(
            "gated_activation",
            (*SIXTEEN, "float8.cuh", "float8_row.cuh", "gated_activation.cu"),
            _of_both("TanhGelu", "SiluGated", "Float8TanhGelu", "Float8SiluGated"),
        ),
        Part(
            INT8,
            (*SIXTEEN, "mma.cuh", "int8.cuh", "int8_rows.cu", "int8_product.cu"),
            _of_both("Int8Rows", "Int8Product"),
            since=(7, 5),
        ),
    )
}
"""Parts by name, as in ort.h."""

PART_OF = {operator: part.name for part in PARTS.values() for operator in part.operators}


def parts_in(nodes: Iterable[Any]) -> frozenset[str]:
    """Return the names of the parts that implement nodes of a graph."""
    return frozenset(PART_OF[node.op_type] for node in nodes if node.domain == DOMAIN and node.op_type in PART_OF)
