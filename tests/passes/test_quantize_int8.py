"""QuantizeInt8 computes what onnxruntime's quantize_dynamic computes, and leaves alone what it is told to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic

from sdflow.distance import relative_l2
from sdflow.errors import PassError
from sdflow.passes.base import PassInputs
from sdflow.passes.float16 import OnnxFloatToFloat16, OnnxFloatToFloat16Config
from sdflow.passes.quantize_int8 import QuantizeInt8, QuantizeInt8Config
from sdflow.targets import TARGETS
from sdflow.verify.artifact.unsupported_nodes import fits
from sdflow.verify.lowering import lower, session_of
from tests.support.int8_sums import sums_are_cut

RANDOM = np.random.default_rng(0)
X = {"x": RANDOM.standard_normal((2, 5, 64)).astype(np.float32)}


def some(name: str, *shape: int) -> Any:
    return numpy_helper.from_array(RANDOM.standard_normal(shape).astype(np.float32), name)


@pytest.fixture(scope="module")
def products(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two products of one value, one of them with a bias; a Gemm of a transposed weight, one channel of which is 0; a product of
    two values."""
    zero_row = numpy_helper.to_array(some("c", 32, 48)).copy()
    zero_row[3] = 0
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["p"], "to_q"),
        helper.make_node("Add", ["a_bias", "p"], ["biased"], "to_q_bias"),
        helper.make_node("MatMul", ["x", "b"], ["q"], "to_k"),
        helper.make_node("Mul", ["biased", "q"], ["r"], "mul"),
        helper.make_node("Reshape", ["r", "shape"], ["flat"], "reshape"),
        helper.make_node("Gemm", ["flat", "c", "c_bias"], ["y"], "out", transB=1),
        helper.make_node("Transpose", ["y"], ["turned"], "transpose", perm=[1, 0]),
        helper.make_node("MatMul", ["y", "turned"], ["z"], "of_values"),
    ]
    weights = [
        *(some("a", 64, 48), some("a_bias", 48), some("b", 64, 48), numpy_helper.from_array(zero_row, "c")),
        *(some("c_bias", 32), numpy_helper.from_array(np.array([10, 48]), "shape")),
    ]
    graph = helper.make_graph(
        nodes,
        "products",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 5, 64])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, [10, 10])],
        weights,
    )
    folder = tmp_path_factory.mktemp("products")
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "model.onnx"
    )
    return folder


def quantized(model: Path, out: Path, **options: Any) -> Mapping[str, Any]:
    return QuantizeInt8().run(PassInputs("unet", model, {}), out, QuantizeInt8Config(**options))


def run(model: Path) -> Any:
    return onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"]).run(None, X)[0]


def test_the_result_is_that_of_quantize_dynamic(products: Path, tmp_path: Path) -> None:
    quantize_dynamic(
        products / "model.onnx",
        tmp_path / "reference.onnx",
        ["MatMul", "Gemm"],
        per_channel=True,
        weight_type=QuantType.QInt8,
        extra_options={"MatMulConstBOnly": True},
    )
    out = tmp_path / "out"
    out.mkdir()
    facts = quantized(products, out)
    assert facts["quantized"] == {"layers": ["to_q", "to_k", "out"], "kept": []}
    assert facts["operators"]["DynamicQuantizeLinear"] == 2, "one for the two products of x"
    assert facts["operators"]["MatMul"] == 1, "that of two values"
    ours, theirs = run(out / "model.onnx"), run(tmp_path / "reference.onnx")
    np.testing.assert_array_equal(ours, theirs)
    far = relative_l2(ours, run(products / "model.onnx"))
    assert far > 0.001
    assert far < 0.05 or sums_are_cut(), "onnxruntime's own is then as far"
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(out / "model.onnx").graph.initializer}
    wanted = onnx.load(tmp_path / "reference.onnx").graph.initializer
    for name, values in {tensor.name: numpy_helper.to_array(tensor) for tensor in wanted}.items():
        own = {"a_quantized": "a/int8", "a_scale": "a/int8/scales", "c_scale": "c/transposed/int8/scales"}.get(name)
        if own is not None:
            np.testing.assert_array_equal(stored[own], values)


def test_a_reduced_range_is_that_of_quantize_dynamic_too(products: Path, tmp_path: Path) -> None:
    quantize_dynamic(
        products / "model.onnx",
        tmp_path / "reference.onnx",
        ["MatMul"],
        per_channel=True,
        reduce_range=True,
        weight_type=QuantType.QInt8,
        extra_options={"MatMulConstBOnly": True},
    )
    out = tmp_path / "out"
    out.mkdir()
    quantized(products, out, reduce_range=True)
    ours = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(out / "model.onnx").graph.initializer}
    theirs = onnx.load(tmp_path / "reference.onnx").graph.initializer
    (wanted,) = [numpy_helper.to_array(tensor) for tensor in theirs if tensor.name == "a_quantized"]
    assert abs(wanted.astype(int)).max() == 64
    np.testing.assert_array_equal(ours["a/int8_reduced"], wanted)
    far = relative_l2(run(out / "model.onnx"), run(products / "model.onnx"))
    assert 0.001 < far < 0.05, "on every processor: no sum is cut"


def test_layers_that_are_kept_stay_float32(products: Path, tmp_path: Path) -> None:
    facts = quantized(products, tmp_path, keep=("to_*",))
    assert facts["quantized"] == {"layers": ["out"], "kept": ["to_q", "to_k"]}
    assert facts["operators"]["MatMul"] == 3
    assert facts["operators"]["MatMulIntegerToFloat"] == 1


@pytest.mark.parametrize(
    ("keep", "said"), [(("to_v",), "keep names to_v, which matches no layer"), (("*",), "keep names every layer")]
)
def test_a_keep_that_does_not_fit_is_said(keep: tuple[str, ...], said: str, products: Path, tmp_path: Path) -> None:
    with pytest.raises(PassError, match=said):
        quantized(products, tmp_path, keep=keep)


def test_a_graph_without_products_is_refused(products: Path, tmp_path: Path) -> None:
    model = onnx.load(products / "model.onnx")
    (of_values,) = [node for node in model.graph.node if node.name == "of_values"]
    kept = [node for node in model.graph.node if node.op_type in ("Transpose",)] + [of_values]
    del model.graph.node[:], model.graph.initializer[:], model.graph.input[:]
    model.graph.node.extend(kept)
    model.graph.input.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, [10, 32]))
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(PassError, match="no layer that can be quantized"):
        quantized(tmp_path, tmp_path / "out")


def outliers(folder: Path, out: Path) -> Path:
    """The same graph for inputs that are a hundred times as large in one channel: its rows of the weights are as much smaller."""
    model = onnx.load(folder / "model.onnx")
    for tensor in model.graph.initializer:
        if tensor.name in ("a", "b"):
            values = numpy_helper.to_array(tensor).copy()
            values[7] /= 100
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    out.mkdir()
    onnx.save(model, out / "model.onnx")
    return out


def test_rotated_inputs_and_weights_lose_less_to_single_large_values(products: Path, tmp_path: Path) -> None:
    folder, feeds = outliers(products, tmp_path / "outliers"), {"x": X["x"].copy()}
    feeds["x"][..., 7] *= 100

    def compute(model: Path) -> Any:
        return onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"]).run(None, feeds)[0]

    expected, far = compute(folder / "model.onnx"), {}
    for rotation in (None, 64):
        out = tmp_path / str(rotation)
        out.mkdir()
        facts = quantized(folder, out, rotation=rotation, reduce_range=True, keep=("out",))
        far[rotation] = relative_l2(compute(out / "model.onnx"), expected)
    assert facts["operators"]["DynamicQuantizeLinear"] == 1, "one rotation for both products of x"
    assert facts["operators"]["Reshape"] == 3
    assert far[64] < 0.5 * far[None]


def test_products_whose_size_no_matrix_divides_are_not_rotated(products: Path, tmp_path: Path) -> None:
    facts = quantized(products, tmp_path, rotation=64)
    assert facts["operators"]["MatMulIntegerToFloat"] == 3
    names = {tensor.name for tensor in onnx.load(tmp_path / "model.onnx").graph.initializer}
    assert {"a/rotated/int8", "b/rotated/int8", "c/transposed/int8"} < names, "c's inner size is 48"


@pytest.mark.parametrize("rotation", [None, 16])
def test_a_graph_in_float16_is_quantized_between_casts_and_fits_directml(
    rotation: int | None, products: Path, tmp_path: Path
) -> None:
    (half := tmp_path / "half").mkdir(), (out := tmp_path / "out").mkdir()
    OnnxFloatToFloat16().run(PassInputs("unet", products, {}), half, OnnxFloatToFloat16Config())
    facts = quantized(half, out, rotation=rotation)
    assert facts["quantized"]["layers"] == ["to_q", "to_k", "out"]
    model = onnx.load(out / "model.onnx")
    errors = [each for each in fits(model, TARGETS["directml"], "transformer") if each.level == "error"]
    assert not errors
    assert any(each.check == "kernel" and each.level == "error" for each in fits(model, TARGETS["cuda"], "transformer"))
    feeds = {"x": 0.05 * X["x"]}  # float16 does not hold what comes of more
    exact = onnxruntime.InferenceSession(str(products / "model.onnx"), providers=["CPUExecutionProvider"])
    (found,) = session_of(lower(model), out, threads=1).run(None, {"x": feeds["x"].astype(np.float16)})
    assert 1e-3 < relative_l2(found, exact.run(None, feeds)[0]) < 0.05
