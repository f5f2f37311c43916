"""Submodels in int8 with a scale per row: without quantization they are PyTorch's, their weights are what the recipe gives,
and they are held to the workflow's limit; lowered for a CPU, as no GPU is asked. See test_quantized.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest

from sdflow.onnx_model.int8 import INT8_MATMUL, rotation_of
from tests.verify.quantized_chain import FUSED, build

CONVERTED = {"OnnxConversion": {"target_opset": 17}}
TRANSFORMER = {**CONVERTED, "OrtTransformersOptimization": {"model_type": "mmdit", "opt_level": 0, "float16": False}}
UNET = {**CONVERTED, "OrtTransformersOptimization": {"model_type": "unet", "opt_level": 0, "float16": False}}


HALF, BRAIN = {"precision": "float16"}, {"precision": "bfloat16", "node_block_list": ["/pos_embed*"]}


@pytest.mark.parametrize(
    ("source", "submodel", "begin", "converted", "rotation", "most"),
    [
        ("synthetic:flux2-tiny", "transformer", TRANSFORMER, BRAIN, 16, 0.1),
        ("synthetic:sd15-tiny", "text_encoder", FUSED, HALF, None, 0.05),
        pytest.param("synthetic:sd15-tiny", "unet", UNET, HALF, None, 0.05, marks=pytest.mark.slow),
        pytest.param("synthetic:sd35-tiny", "transformer", TRANSFORMER, HALF, 16, 0.1, marks=pytest.mark.slow),
        pytest.param("synthetic:flux2-tiny", "transformer", TRANSFORMER, BRAIN, None, 0.1, marks=pytest.mark.slow),
    ],
)
def test_it_is_proved_and_near(
    source: str, submodel: str, begin: Any, converted: Any, rotation: int | None, most: float, tmp_path: Path
) -> None:
    passes = {
        "OnnxFloatToFloat16": converted,
        "QuantizeInt8": {"activations": "row", "rotation": rotation},
    }
    built = build(tmp_path, "cuda", passes, source, submodel, begin)
    bound = built.bound(tmp_path / "bound")
    model = onnx.load(bound / "model.onnx", load_external_data=False)
    products = [node for node in model.graph.node if node.op_type == INT8_MATMUL]
    assert products and bool(rotation) == any(rotation_of(node) for node in products)
    proof = built.proof(bound)
    assert (proof.findings, proof.problems, proof.missing) == ([], (), "") and proof.outputs
    verdict = built.verdict(bound, most)
    assert verdict.precision == "int8"
    assert verdict.passed, [(each.name, each.distance) for each in verdict.outputs]
    assert all(each.distance > 1e-4 for each in verdict.outputs)
    assert not built.verdict(bound, None).passed, "no limit is stated"
