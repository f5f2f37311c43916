"""OnnxFloatToFloat16 with `precision: bfloat16`: the bits, what stays float32, and the keys of float16."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from sdflow.onnx_model.files import store_proto
from sdflow.passes.base import PassInputs
from sdflow.passes.bfloat16 import NO_KERNEL
from sdflow.passes.float16 import OnnxFloatToFloat16, OnnxFloatToFloat16Config
from sdflow.verify.kernels import kernel_table
from sdflow.verify.lowering import lower, session_of

WEIGHT = np.random.default_rng(0).standard_normal((48, 48)).astype(np.float32) * np.float32(1e5)
"""Beyond float16's range, and beyond the size that stays in the graph's file."""
X = np.random.default_rng(1).standard_normal((2, 48)).astype(np.float32)


def converted(folder: Path) -> Path:
    """y = log(x' w) w in bfloat16, with x' = |x|. CUDA has no Log in bfloat16."""
    nodes = [
        helper.make_node("Abs", ["x"], ["size"], name="abs"),
        helper.make_node("MatMul", ["size", "w"], ["product"], name="first"),
        helper.make_node("Abs", ["product"], ["positive"], name="abs2"),
        helper.make_node("Log", ["positive"], ["logarithm"], name="log"),
        helper.make_node("MatMul", ["logarithm", "w"], ["y"], name="second"),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 48]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [numpy_helper.from_array(WEIGHT, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (folder / "model").mkdir()
    store_proto(model, folder / "model", folder / "model")
    (folder / "out").mkdir()
    config = OnnxFloatToFloat16Config(precision="bfloat16")
    facts = OnnxFloatToFloat16().run(PassInputs("unet", folder / "model", {}), folder / "out", config)
    assert facts["dtypes"] == {"bfloat16": {"count": 1, "bytes": 2 * WEIGHT.size}}
    return folder / "out"


def rounded(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).bfloat16().float().numpy()


def test_weights_are_rounded_as_torch_rounds_them_and_ports_stay_float32(tmp_path: Path) -> None:
    model = onnx.load(str(converted(tmp_path) / "model.onnx"))
    (weight,) = model.graph.initializer
    np.testing.assert_array_equal(numpy_helper.to_array(weight).astype(np.float32), rounded(WEIGHT))
    assert {item.type.tensor_type.elem_type for item in (*model.graph.input, *model.graph.output)} == {
        TensorProto.FLOAT
    }
    kinds = {item.i for node in model.graph.node for item in node.attribute if item.name == "to"}
    assert kinds == {TensorProto.BFLOAT16, TensorProto.FLOAT}, "nothing is called float16"


def test_the_lowered_graph_rounds_each_result_to_bfloat16_where_the_artifact_does(tmp_path: Path) -> None:
    out = converted(tmp_path)
    model = onnx.load(str(out / "model.onnx"), load_external_data=False)
    (y,) = session_of(lower(model), out, threads=1).run(["y"], {"x": X})
    product = rounded(rounded(np.abs(X)) @ rounded(WEIGHT))
    expected = rounded(rounded(np.log(np.abs(product))) @ rounded(WEIGHT))
    assert np.mean(y != expected) < 0.05, "but for the last bits of sums"
    np.testing.assert_allclose(y, expected, rtol=0.02, atol=abs(expected).max() * 1e-3)


def test_every_operator_without_a_cuda_kernel_in_bfloat16_stays_float32() -> None:
    """Of those that have one in float16, in operator set 17: else the node would fall to the CPU, or not load."""
    lacking = set()
    for name, kernels in kernel_table("CUDAExecutionProvider").kernels.items():
        usable = [each for each in kernels if each.first <= 17 and (each.last is None or each.last >= 17)]
        types = {kind for each in usable for kinds in each.types.values() for kind in kinds}
        if "float16" in types and "bfloat16" not in types:
            lacking.add(name.removeprefix("com.microsoft."))
    of_other_models = {
        "Affine", "BeamSearch", "BiasSoftmax", "ComplexMul", "ComplexMulConj", "Crop", "DecoderAttention",
        "DecoderMaskedMultiHeadAttention", "DecoderMaskedSelfAttention", "DequantizeLinear", "DequantizeWithOrder",
        "EmbedLayerNormalization", "GRU", "GatedRelativePositionBias", "GemmaRotaryEmbedding", "GreedySearch", "ImageScaler",
        "Inverse", "Irfft", "LSTM", "LongformerAttention", "PackedAttention", "PackedMultiHeadAttention",
        "ParametricSoftplus", "QAttention", "QOrderedLayerNormalization", "QOrderedLongformerAttention", "QuantizeLinear",
        "QuantizeWithOrder", "RNN", "RandomNormal", "RandomUniform", "RelativePositionBias", "RemovePadding",
        "RestorePadding", "Rfft", "RoiAlign", "Sampling", "ScaledTanh", "TopK", "WhisperBeamSearch",
    }  # fmt: skip
    assert lacking - set(NO_KERNEL) <= of_other_models
    assert set(NO_KERNEL) <= lacking


def test_float16_has_the_key_that_it_had_before_there_was_a_choice() -> None:
    assert "precision" not in OnnxFloatToFloat16Config().model_dump(mode="json")
    assert OnnxFloatToFloat16Config(precision="bfloat16").model_dump(mode="json")["precision"] == "bfloat16"
