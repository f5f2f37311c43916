"""QuantizeFp8: which products become float8, what they then give, and as which operators of ours a session has them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from sdflow.distance import relative_l2
from sdflow.errors import PassError, TargetUnavailableError
from sdflow.onnx_model.float8 import DOMAIN, FLOAT8_MATMUL
from sdflow.passes.base import PassInputs
from sdflow.passes.float16 import OnnxFloatToFloat16, OnnxFloatToFloat16Config
from sdflow.passes.quantize_fp8 import QuantizeFp8, QuantizeFp8Config
from sdflow.runtime.kernels.float8 import with_float8
from sdflow.runtime.kernels.replace import with_own_kernels
from sdflow.runtime.sessions.session import create_session
from sdflow.runtime.sessions.specialize import specialize
from sdflow.targets import TARGETS
from sdflow.verify.lowering import lower, session_of


def read(folder: Path) -> Any:
    return onnx.load(str(folder / "model.onnx"), load_external_data=False)


def lowered(folder: Path, feeds: dict[str, np.ndarray]) -> np.ndarray:
    model = read(folder)
    types = {item.name: helper.tensor_dtype_to_np_dtype(item.type.tensor_type.elem_type) for item in model.graph.input}
    given = {name: value.astype(types[name]) for name, value in feeds.items()}
    result: np.ndarray = session_of(lower(model), folder, threads=1).run(None, given)[0]
    return result


@pytest.fixture(scope="module")
def half_unet(fused_unet: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("half_unet")
    OnnxFloatToFloat16().run(PassInputs("unet", fused_unet.path, {}), out, OnnxFloatToFloat16Config())
    return out


@pytest.fixture(scope="module")
def float8_unet(half_unet: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("float8_unet")
    QuantizeFp8().run(PassInputs("unet", half_unet, {}), out, QuantizeFp8Config(smallest=256))
    return out


def test_every_product_with_a_weight_becomes_float8_and_the_unet_gives_nearly_what_it_gave(
    half_unet: Path, float8_unet: Path, tiny_unet: Any
) -> None:
    before, after = read(half_unet), read(float8_unet)
    products = [node for node in after.graph.node if node.op_type == FLOAT8_MATMUL]
    weights = {tensor.name: tensor for tensor in after.graph.initializer}
    old = {tensor.name: tensor for tensor in before.graph.initializer}
    wanted = [node for node in before.graph.node if node.op_type == "MatMul" and node.input[1] in old]
    assert [node.name for node in products] == [node.name for node in wanted]
    assert {node.domain for node in products} == {DOMAIN}
    assert {weights[node.input[1]].data_type for node in products} == {TensorProto.FLOAT8E4M3FN}
    for node, was in zip(products, wanted, strict=True):
        assert list(weights[node.input[1]].dims) == list(old[was.input[1]].dims)[::-1]
    apart = relative_l2(lowered(float8_unet, tiny_unet.feeds), lowered(half_unet, tiny_unet.feeds))
    assert 1e-3 < apart < 0.05


def one_product(x: np.ndarray, weight: np.ndarray, folder: Path) -> Path:
    """A graph of one MatMul of float16."""
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT16, x.shape)]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT16, (*x.shape[:-1], weight.shape[1]))]
    node = helper.make_node("MatMul", ["x", "w"], ["y"], "product")
    graph = helper.make_graph([node], "test", inputs, outputs, [numpy_helper.from_array(weight, "w")])
    folder.mkdir()
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "model.onnx"
    )
    return folder


def test_a_product_is_that_of_its_definition(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    x = (random.normal(size=(2, 5, 64)) * random.uniform(1e-3, 30, (2, 5, 1))).astype(np.float16)
    x[0, 1] = 0
    x[1, 2] = np.linspace(-448, 448, 64)  # a scale of 1: halfway between two numbers too
    x[1, 3, 1:] /= 1000  # below E4M3's normal numbers
    weight = (random.normal(size=(64, 32)) * random.uniform(0.1, 10, 32)).astype(np.float16)
    weight[:, 3] = 0
    folder = one_product(x, weight, tmp_path / "before")
    (tmp_path / "after").mkdir()
    facts = QuantizeFp8().run(PassInputs("unet", folder, {}), tmp_path / "after", QuantizeFp8Config(smallest=16))
    assert facts["quantized"] == {"layers": ["product"], "kept": []}

    def rounded(values: np.ndarray) -> np.ndarray:
        largest = np.abs(values).max(-1, keepdims=True).astype(np.float32)
        scales = np.where(largest > 0, largest / np.float32(448), np.float32(1))
        return (values.astype(np.float32) / scales).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scales

    expected = rounded(x) @ rounded(weight.T).T
    found = lowered(tmp_path / "after", {"x": x})
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3 * np.abs(expected).max())
    assert relative_l2(found, expected) < 1e-3 < relative_l2(found, x.astype(np.float64) @ weight) < 0.06


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (QuantizeFp8Config(), "no layer that can be quantized"),  # weights of less than 2^20 values
        (QuantizeFp8Config(smallest=256, keep=("nothing",)), "keep names nothing"),
        (QuantizeFp8Config(smallest=256, keep=("*",)), "keep names every layer"),
    ],
)
def test_options_that_fit_nothing_are_errors(
    config: QuantizeFp8Config, message: str, half_unet: Path, tmp_path: Path
) -> None:
    with pytest.raises(PassError, match=message):
        QuantizeFp8().run(PassInputs("unet", half_unet, {}), tmp_path, config)


def test_a_graph_in_float32_is_told_to_become_float16_first(fused_unet: Any, tmp_path: Path) -> None:
    with pytest.raises(PassError, match="neither float16 nor bfloat16"):
        QuantizeFp8().run(PassInputs("unet", fused_unet.path, {}), tmp_path, QuantizeFp8Config(smallest=256))


def test_what_is_kept_stays_float16(half_unet: Path, tmp_path: Path) -> None:
    config = QuantizeFp8Config(smallest=256, keep=("*/attn2/*",))
    facts = QuantizeFp8().run(PassInputs("unet", half_unet, {}), tmp_path, config)
    kept = {node.name for node in read(tmp_path).graph.node if node.op_type == "MatMul"}
    assert kept == set(facts["quantized"]["kept"]) == {name for name in kept if "/attn2/" in name}
    assert kept


def test_a_session_has_rows_that_products_share_and_that_what_is_before_them_gives(float8_unet: Path) -> None:
    sizes = {"batch": 2, "latent_height": 8, "latent_width": 8, "sequence": 77}
    fixed = specialize(read(float8_unet), sizes)
    made = with_float8(fixed)
    ours = Counter(node.op_type for node in made.graph.node if node.domain == DOMAIN)
    products = [node for node in fixed.graph.node if node.op_type == FLOAT8_MATMUL]
    assert ours["Float8Product"] == len(products)
    assert ours["Float8SplitGelu"] == sum(node.op_type == "BiasSplitGelu" for node in fixed.graph.node)
    assert ours["Float8LayerNorm"] == sum(node.op_type == "SkipLayerNormalization" for node in fixed.graph.node) > 0
    sources = {node.input[0] for node in products}
    given = {node.output[0] for node in made.graph.node if node.op_type.startswith("Float8") and len(node.output) > 1}
    assert ours["Float8Rows"] == len(sources) - ours["Float8SplitGelu"] - ours["Float8LayerNorm"] < len(products)
    assert given >= {f"{source}/float8" for source in sources}
    known = {tensor.name for tensor in made.graph.initializer} | {item.name for item in made.graph.input}
    for node in made.graph.node:
        assert {name for name in node.input if name} <= known, node.name
        known |= set(node.output)
    assert TensorProto.FLOAT8E4M3FN not in {tensor.data_type for tensor in made.graph.initializer}
    assert with_own_kernels(made) is None or DOMAIN in {entry.domain for entry in made.opset_import}


def test_products_are_computed_with_their_gates_on_hopper(float8_unet: Path) -> None:
    sizes = {"batch": 2, "latent_height": 8, "latent_width": 8, "sequence": 77}
    fixed = specialize(read(float8_unet), sizes)
    made = with_float8(fixed, hopper=True)
    ours = Counter(node.op_type for node in made.graph.node if node.domain == DOMAIN)
    gates = [node for node in fixed.graph.node if node.op_type == "BiasSplitGelu"]
    products = {node.output[0]: node for node in fixed.graph.node if node.op_type == FLOAT8_MATMUL}
    assert ours["Float8GatedProduct"] == len(gates) > 0 == ours["Float8SplitGelu"]
    assert ours["Float8Product"] == len(products) - len(gates)
    assert not any(node.op_type == "BiasSplitGelu" for node in made.graph.node)
    given = {node.output[0]: node for node in made.graph.node}
    for gate in gates:
        product = products[gate.input[0]]
        assert list(given[gate.output[0]].input[2:]) == [*product.input[1:], gate.input[1]]
        assert any(node.op_type == "Float8Rows" and node.input[0] == gate.output[0] for node in made.graph.node)
    known = {tensor.name for tensor in made.graph.initializer} | {item.name for item in made.graph.input}
    for node in made.graph.node:
        assert {name for name in node.input if name} <= known, node.name
        known |= set(node.output)


def test_other_targets_say_what_float8_needs(float8_unet: Path) -> None:
    with pytest.raises(TargetUnavailableError, match="NVIDIA GPU of compute capability 8.9"):
        create_session(float8_unet / "model.onnx", TARGETS["cpu"])
