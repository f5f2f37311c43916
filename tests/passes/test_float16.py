"""OnnxFloatToFloat16: what becomes float16, what stays, and how well the timestep keeps its value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from pydantic import ValidationError

from sdflow.errors import PassError
from sdflow.onnx_model.files import store_proto
from sdflow.passes.base import PassInputs
from sdflow.passes.float16 import OnnxFloatToFloat16, OnnxFloatToFloat16Config


def convert(model: Path, out: Path, **options: Any) -> Any:
    out.mkdir(exist_ok=True)
    return OnnxFloatToFloat16().run(PassInputs("unet", model, {}), out, OnnxFloatToFloat16Config(**options))


def graph_of(model: Path) -> Any:
    return onnx.load(str(model / "model.onnx"), load_external_data=False).graph


def linear(folder: Path, weight: np.ndarray, *, unused: bool = False) -> Path:
    weights = [numpy_helper.from_array(weight, "w")]
    if unused:
        weights.append(numpy_helper.from_array(np.ones(3, np.float32), "unused"))
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="matmul")],
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", weight.shape[0]])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", weight.shape[1]])],
        weights,
    )
    folder.mkdir()
    store_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), folder, folder)
    return folder


def test_all_inputs_and_outputs_are_float16_but_the_timestep(fused_unet: Any, tmp_path: Path) -> None:
    facts = convert(fused_unet.path, tmp_path)
    graph = graph_of(tmp_path)
    types = {item.name: item.type.tensor_type.elem_type for item in (*graph.input, *graph.output)}
    half = TensorProto.FLOAT16
    assert types == {
        "sample": half,
        "timestep": TensorProto.FLOAT,
        "encoder_hidden_states": half,
        "out_sample": half,
    }
    for name, count in fused_unet.facts["fused"].items():
        assert facts["operators"][name] == count, "fused operators survive"
    casts = [node for node in graph.node if node.op_type == "Cast"]
    # One in front of the first time embedding layer, one for the scales of the one Resize.
    assert len(casts) == 2


def test_gamma_and_beta_of_group_norms_stay_float32_unless_forced(fused_unet: Any, tmp_path: Path) -> None:
    norms = fused_unet.facts["fused"]["GroupNorm"] + fused_unet.facts["fused"]["SkipGroupNorm"]
    assert convert(fused_unet.path, tmp_path / "cuda")["dtypes"]["float32"]["count"] == 2 * norms
    forced = {"GroupNorm": (0, 1, 2), "SkipGroupNorm": (0, 1, 2)}
    assert "float32" not in convert(fused_unet.path, tmp_path / "directml", force_fp16_inputs=forced)["dtypes"]


def test_a_fractional_timestep_keeps_its_precision(tiny_unet: Any, tmp_path: Path, run_onnx: Any) -> None:
    truth = run_onnx(tiny_unet.path, tiny_unet.feeds)
    half = {name: value.astype(np.float16) for name, value in tiny_unet.feeds.items()}
    convert(tiny_unet.path, tmp_path / "kept")
    kept = run_onnx(tmp_path / "kept", {**half, "timestep": tiny_unet.feeds["timestep"]})
    convert(tiny_unet.path, tmp_path / "all", keep_io_types=False)
    rounded = run_onnx(tmp_path / "all", half)
    error, without = (float(np.abs(result - truth).mean()) for result in (kept, rounded))
    assert error < 0.25 * without


def test_weights_at_the_limits_of_float16_are_counted(tmp_path: Path) -> None:
    weight = np.ones((32, 32), np.float32)
    weight[0, :3] = (1e6, -1e9, 7e4)
    weight[1, :2] = (1e-9, -1e-12)
    facts = convert(linear(tmp_path / "model", weight), tmp_path / "half")
    assert facts["at_limit"] == {"largest": 3, "smallest": 2}


def test_a_weight_left_in_float32_is_an_error(tmp_path: Path) -> None:
    model = linear(tmp_path / "model", np.ones((4, 4), np.float32), unused=True)
    with pytest.raises(PassError, match="1 weights stayed float32: unused"):
        convert(model, tmp_path / "half")


def test_a_node_of_the_block_list_keeps_its_weights(tmp_path: Path) -> None:
    model = linear(tmp_path / "model", np.ones((4, 4), np.float32))
    assert set(convert(model, tmp_path / "half", node_block_list=["matmul"])["dtypes"]) == {"float32"}


def test_nodes_that_a_pattern_names_hand_their_values_over_in_float32(tmp_path: Path) -> None:
    """Two of them read one value in float16: it is widened once, and what ONNX Runtime makes of the graph loads."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="/in/MatMul"),
        helper.make_node("Mul", ["a", "a2"], ["square"], name="/block.0/norm/Mul"),
        helper.make_node("Add", ["a", "square"], ["sum"], name="/block.0/Add"),
        helper.make_node("MatMul", ["sum", "w2"], ["y"], name="/out/MatMul"),
    ]
    weights = [numpy_helper.from_array(np.eye(4, dtype=np.float32), name) for name in ("w", "w2")]
    weights.append(numpy_helper.from_array(np.full(4, 3, np.float32), "a2"))
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "two", [value("x", TensorProto.FLOAT, ["n", 4])], [value("y", TensorProto.FLOAT, ["n", 4])], weights
    )
    (tmp_path / "model").mkdir()
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    store_proto(model, tmp_path / "model", tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "half", node_block_list=["/block.*"])
    found = graph_of(tmp_path / "half")
    types = {tensor.name: tensor.data_type for tensor in found.initializer}
    assert types == {"w": TensorProto.FLOAT16, "w2": TensorProto.FLOAT16, "a2": TensorProto.FLOAT}
    casts = [node.attribute[0].i for node in found.node if node.op_type == "Cast"]
    assert sorted(casts) == [TensorProto.FLOAT, TensorProto.FLOAT16], "into the two nodes and out of them"
    session = onnxruntime.InferenceSession(tmp_path / "half/model.onnx", providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {"x": np.full((1, 4), 20, np.float16)})
    assert np.array_equal(y, np.full((1, 4), 80, np.float16))


def test_a_model_without_float32_weights_is_an_error(tmp_path: Path) -> None:
    model = linear(tmp_path / "model", np.ones((4, 4), np.float16))
    with pytest.raises(PassError, match="no float32 weights"):
        convert(model, tmp_path / "half")


@pytest.mark.parametrize(
    "options",
    [
        {"min_positive_val": 1e-9},
        {"max_finite_val": 1e6},
        {"op_block_list": ["Softmax"], "op_include_list": ["MatMul"]},
        {"disable_shape_infer": True},
    ],
)
def test_options_beyond_float16_or_unknown_are_errors(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        OnnxFloatToFloat16Config(**options)
