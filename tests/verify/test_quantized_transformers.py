"""Transformers and their text encoders in int8 and int4: without quantization they are PyTorch's, and with it they are as near as
weights of random networks of few channels can be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from low_bit_files import T, by_gguf, mixed, t5_by_llama_cpp, write_gguf
from onnx import numpy_helper
from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, DefaultWeightOnlyQuantizer

from sdflow.sources import PlainDigests, load_module, open_checkpoint
from sdflow.weights.bind import BindRequest, bind
from tests.verify.quantized_chain import build

CONVERTED = {"OnnxConversion": {"target_opset": 17}}
FUSED = {**CONVERTED, "OrtTransformersOptimization": {"model_type": "mmdit", "opt_level": 0, "float16": False}}
INT4 = {"QuantizeInt4": {"smallest": 64, "block_size": 16}}
INT8 = {"QuantizeInt8": {"reduce_range": True}}
ROTATED = {"QuantizeInt8": {"reduce_range": True, "rotation": 16}}


@pytest.mark.parametrize(
    ("source", "submodel", "begin", "quantize", "kind", "most"),
    [
        ("synthetic:sd35-tiny", "text_encoder_3", CONVERTED, INT4, "int4", 0.5),  # T5
        pytest.param(
            "synthetic:z-image-tiny", "text_encoder", CONVERTED, INT4, "int4", 0.5, marks=pytest.mark.slow
        ),  # Qwen3
        ("synthetic:z-image-tiny", "text_encoder", CONVERTED, ROTATED, "int8", 0.1),
        ("synthetic:flux2-tiny", "transformer", FUSED, INT4, "int4", 0.2),
        pytest.param("synthetic:flux2-tiny", "transformer", FUSED, INT8, "int8", 0.05, marks=pytest.mark.slow),
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


def test_weights_of_a_gguf_file_are_dequantized_and_then_quantized(tmp_path: Path) -> None:
    """By the `gguf` package, and by ONNX Runtime's own quantizer."""
    name, model = "text_encoder_3", "synthetic:sd35-tiny"
    built = build(tmp_path, "cpu", {"QuantizeInt4": {"smallest": 64, "algorithm": "rtn"}}, model, name, CONVERTED)
    state = load_module(name, built.checkpoint.submodels[name].load).state_dict()
    path = write_gguf(tmp_path / "t5.gguf", t5_by_llama_cpp(state), mixed(T.Q4_0, T.Q8_0), "t5encoder")
    found = open_checkpoint(model, digests=PlainDigests(), download=False, components={name: str(path)})
    (out := tmp_path / "bound").mkdir()
    bind(BindRequest(name, built.structure, found.submodels[name].load), out)
    exact = np.ascontiguousarray(by_gguf(path)["enc.blk.0.attn_q.weight"].T)
    config = DefaultWeightOnlyQuantConfig(block_size=32, is_symmetric=False, bits=4)
    values, scales, zeros = DefaultWeightOnlyQuantizer(config).qbits_block_quant(exact)
    stored = {each.name: numpy_helper.to_array(each) for each in onnx.load(out / "model.onnx").graph.initializer}
    (weight,) = [name for name, each in stored.items() if np.array_equal(each, values)]
    np.testing.assert_array_equal(stored[f"{weight}/scales"], scales)
    np.testing.assert_array_equal(stored[f"{weight}/zeros"], zeros)
