"""Transformers and their text encoders in int8 and int4: without quantization they are PyTorch's, and with it they are near."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.verify.quantized_chain import build

CONVERTED = {"OnnxConversion": {"target_opset": 17}}
FUSED = {**CONVERTED, "OrtTransformersOptimization": {"model_type": "mmdit", "opt_level": 0, "float16": False}}
INT4 = {"QuantizeInt4": {"smallest": 64, "block_size": 16}}
INT8 = {"QuantizeInt8": {"reduce_range": True}}


@pytest.mark.parametrize(
    ("source", "submodel", "begin", "quantize", "kind", "most"),
    [
        ("synthetic:sd35-tiny", "text_encoder_3", CONVERTED, INT4, "int4", 0.2),  # T5
        ("synthetic:sd35-tiny", "text_encoder_3", CONVERTED, INT8, "int8", 0.05),
        ("synthetic:flux2-tiny", "text_encoder", CONVERTED, INT4, "int4", 0.2),  # Qwen3
        ("synthetic:flux2-tiny", "text_encoder", CONVERTED, INT8, "int8", 0.05),
        ("synthetic:flux2-tiny", "transformer", FUSED, INT4, "int4", 0.2),
        ("synthetic:flux2-tiny", "transformer", FUSED, INT8, "int8", 0.05),
    ],
)
def test_it_is_proved_and_near(
    source: str, submodel: str, begin: Any, quantize: Any, kind: str, most: float, tmp_path: Path
) -> None:
    built = build(tmp_path, "cpu", quantize, source, submodel, begin)
    bound = built.bound(tmp_path / "bound")
    proof = built.proof(bound)
    assert (proof.findings, proof.problems, proof.missing) == ([], (), "") and proof.outputs
    verdict = built.verdict(bound, most)
    assert verdict.precision == kind
    assert verdict.passed, [(each.name, each.distance) for each in verdict.outputs]
    assert all(each.distance > 1e-4 for each in verdict.outputs)
