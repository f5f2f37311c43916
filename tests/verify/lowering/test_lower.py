"""What `lower` promises of whole graphs: roundings, names, exposed values, weights left where they are, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from sdflow.errors import VerificationError
from sdflow.verify.lowering import lower, session_of
from tests.verify.lowering.run_node import CONTRIB, initializer, model_of

SHAPE = (2, 6, 64)


def chain(opset: int = 17) -> Any:
    """y = BiasAdd(QuickGelu(x * x), bias, x * x), all in float16; the weights are initializers; nodes out of order."""
    nodes = [
        helper.make_node("BiasAdd", ["gelu", "bias", "square"], ["y"], "add", domain=CONTRIB),
        helper.make_node("QuickGelu", ["square"], ["gelu"], "quick", domain=CONTRIB, alpha=1.0),
        helper.make_node("Mul", ["x", "x"], ["square"], "mul"),
    ]
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT16, ["n", "s", 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT16, ["n", "s", 64])],
        [initializer("bias", np.linspace(-1, 1, 64).astype(np.float16))],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(CONTRIB, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def some_x(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float16)


def rounded_chain(x: np.ndarray) -> dict[str, np.ndarray]:
    """The chain as a GPU stores it: each result computed in float32 and rounded."""
    square = (x.astype(np.float32) ** 2).astype(np.float16)
    wide = square.astype(np.float64)
    gelu = (wide / (1 + np.exp(-wide))).astype(np.float16)
    bias = np.linspace(-1, 1, 64).astype(np.float16)
    y = (gelu.astype(np.float32) + bias.astype(np.float32) + square.astype(np.float32)).astype(np.float16)
    return {"square": square, "gelu": gelu, "y": y}


def run(lowered: Any, x: np.ndarray, folder: Path = Path()) -> dict[str, np.ndarray]:
    session = session_of(lowered, folder, threads=1)
    names = [item.name for item in session.get_outputs()]
    return dict(zip(names, session.run(names, {"x": x}), strict=True))


def test_every_result_is_rounded_to_float16_and_the_optimizer_leaves_it_so() -> None:
    """With other values exposed or not: bit for bit the roundings of each operator, but for a last bit of exp."""
    x = some_x()
    expected = rounded_chain(x)
    for expose in ([], ["square", "gelu"]):
        outputs = run(lower(chain(), expose=expose), x)
        assert list(outputs) == ["y", *expose]
        for name, value in outputs.items():
            assert value.dtype == np.float16
            different = value != expected[name]
            assert np.mean(different) < 0.002, name


def test_a_graph_without_the_roundings_differs() -> None:
    """The measure of the test above can tell: unrounded intermediate values change many results."""
    x = some_x()
    (y,) = run(lower(chain(), round_fp16=False), x).values()
    assert y.dtype == np.float32
    assert np.mean(y.astype(np.float16) != rounded_chain(x)["y"]) > 0.1
    wide = x.astype(np.float64) ** 2
    exact = wide / (1 + np.exp(-wide)) + np.linspace(-1, 1, 64).astype(np.float16) + wide
    np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-6)


def test_onnxruntime_alone_merges_the_roundings_away() -> None:
    """Why the Casts are explicit: the same graph in standard operators, as ONNX Runtime runs it itself on a CPU."""
    import onnxruntime

    nodes = [helper.make_node("Mul", ["x", "x"], ["square"]), helper.make_node("Add", ["square", "x"], ["y"])]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, SHAPE) for name in "xy"]
    opsets = [helper.make_opsetid("", 17)]
    model = helper.make_model(helper.make_graph(nodes, "g", ends[:1], ends[1:]), opset_imports=opsets, ir_version=8)
    x = some_x()
    alone = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    square = (x.astype(np.float32) ** 2).astype(np.float16)
    rounded = (square.astype(np.float32) + x.astype(np.float32)).astype(np.float16)
    assert np.mean(alone.run(None, {"x": x})[0] != rounded) > 0.01
    assert np.array_equal(run(lower(model), x)["y"], rounded)


def test_overflow_becomes_infinity_as_on_a_gpu() -> None:
    x = np.full(SHAPE, 300, np.float16)
    outputs = run(lower(chain(), expose=["square"]), x)
    assert np.all(np.isinf(outputs["square"]))
    assert not np.any(np.isfinite(outputs["y"]))


def test_values_and_nodes_keep_the_artifacts_names() -> None:
    lowered = lower(chain())
    assert lowered.operators == {"BiasAdd": 1, "QuickGelu": 1}
    assert lowered.values == dict.fromkeys(["square", "gelu", "y"], TensorProto.FLOAT16)
    assert [lowered.node_of[name] for name in ("square", "gelu", "y")] == ["mul", "quick", "add"]
    produced = {name for node in lowered.model.graph.node for name in node.output}
    assert produced == set(lowered.node_of)
    assert set(lowered.node_of.values()) == {"", "mul", "quick", "add"}
    onnx.checker.check_model(lowered.model)


def test_weights_stay_in_the_artifacts_file_and_the_artifact_is_untouched(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(chain(), path, save_as_external_data=True, location="model.onnx.data", size_threshold=0)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    loaded = onnx.load(str(path), load_external_data=False)
    as_loaded = loaded.SerializeToString()
    lowered = lower(loaded)
    (bias,) = [tensor for tensor in lowered.model.graph.initializer if tensor.name == "bias"]
    assert bias.data_location == TensorProto.EXTERNAL
    x = some_x()
    assert np.array_equal(run(lowered, x, tmp_path)["y"], run(lower(chain()), x)["y"])
    assert loaded.SerializeToString() == as_loaded
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def refused(model: Any, *words: str) -> None:
    with pytest.raises(VerificationError) as caught:
        lower(model)
    for word in words:
        assert word in str(caught.value)


def test_an_operator_that_is_not_known_is_an_error_that_names_the_node() -> None:
    x = some_x()
    refused(model_of("Inverse", {"x": x}, ["y"]), "node the_node", "Inverse", "com.microsoft")
    standard = model_of("NoSuchOperator", {"x": x}, ["y"])
    standard.graph.node[0].domain = ""
    refused(standard, "node the_node", "NoSuchOperator")


@pytest.mark.parametrize(
    ("op_type", "inputs", "outputs", "attributes", "word"),
    [
        ("QuickGelu", 1, 1, {"beta": 2.0}, "beta"),
        ("GroupNorm", 3, 1, {"groups": 2, "activation": 2}, "activation 2"),
        ("GroupNorm", 3, 1, {"activation": 1}, "groups"),
        ("MultiHeadAttention", 8, 1, {"num_heads": 2}, "past_key"),
        ("MultiHeadAttention", 3, 3, {"num_heads": 2}, "output"),
        ("Attention", 3, 2, {"num_heads": 2}, "output"),
        ("Attention", 3, 1, {"num_heads": 2, "do_rotary": 1}, "rotary"),
        ("SkipLayerNormalization", 3, 2, {}, "training"),
        ("BiasAdd", 2, 1, {}, "input 2"),
    ],
)
def test_a_use_that_is_not_known_is_an_error_that_names_the_node(
    op_type: str, inputs: int, outputs: int, attributes: dict[str, Any], word: str
) -> None:
    given = {f"x{index}": some_x() for index in range(inputs)}
    refused(
        model_of(op_type, given, [f"y{index}" for index in range(outputs)], **attributes),
        "node the_node",
        op_type,
        word,
    )


def test_control_flow_old_operator_sets_cycles_and_unknown_values_are_errors() -> None:
    branch = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["n"])], "b", [], [helper.make_empty_tensor_value_info("n")]
    )
    conditional = chain()
    conditional.graph.node.append(helper.make_node("If", ["c"], ["z"], "if", then_branch=branch, else_branch=branch))
    refused(conditional, "node if", "control flow")
    refused(chain(opset=12), "operator set 12")
    cycle = chain()
    cycle.graph.node.append(helper.make_node("Neg", ["b"], ["a"], "first"))
    cycle.graph.node.append(helper.make_node("Neg", ["a"], ["b"], "second"))
    refused(cycle, "cycle")
    with pytest.raises(VerificationError, match="no_such_value"):
        lower(chain(), expose=["no_such_value"])


def test_an_unknown_number_of_dimensions_is_an_error_where_it_matters() -> None:
    x = np.ones((1, 2, 4), np.float32)
    model = model_of("SimplifiedLayerNormalization", {"x": x, "g": x[0, 0]}, ["y"], axis=2)
    lower(model)
    model.graph.input[0].type.tensor_type.ClearField("shape")
    refused(model, "the_node", "'x'", "dimensions")


def test_a_skip_of_unknown_dimensions_is_added_as_its_values_are() -> None:
    """As a timestep's embedding from a product in 4 bits: ONNX knows that a Gemm's result has two, and nothing of MatMulNBits."""
    x, c = np.random.default_rng(0).standard_normal((2, 3, 5, 4)).astype(np.float16), np.ones(4, np.float16)
    for skip in (x, x[:, :1, :1], x[:, 0, 0]):
        inputs = {"x": x, "g": c, "b": c, "skip": skip}
        model = model_of("SkipGroupNorm", inputs, ["y"], groups=2, activation=0)
        (expected,) = session_of(lower(model), Path(), threads=1).run(None, inputs)
        model.graph.input[3].type.tensor_type.ClearField("shape")
        (actual,) = session_of(lower(model), Path(), threads=1).run(None, inputs)
        assert np.array_equal(actual, expected)


@pytest.mark.parametrize("opset", [13, 14, 18, 21])
def test_every_operator_set_gives_the_same(opset: int) -> None:
    """Operators whose form changed between the sets (Split, ReduceMax, LayerNormalization) are written in one that fits."""
    x, c = np.random.default_rng(0).standard_normal((2, 4, 4, 8)).astype(np.float16), np.ones(8, np.float16)
    q, mask = x.reshape(2, 4, 2, 2, 8)[:, :, :, [0, 1, 0]], np.array([3, 4], np.int32)
    half_x = x.reshape(2, 16, 8)
    nodes: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("SkipGroupNorm", {"x": x, "g": c, "b": c, "skip": x, "bias": c}, {"groups": 4, "activation": 1}),
        ("SkipLayerNormalization", {"x": half_x, "skip": half_x, "g": c, "b": c}, {}),
        ("BiasSplitGelu", {"x": half_x, "b": c}, {}),
        ("MultiHeadAttention", {"q": q}, {"num_heads": 2}),
        ("Attention", {"x": half_x, "w": np.ones((8, 24), np.float16), "b": None, "mask": mask}, {"num_heads": 2}),
    ]
    for op_type, inputs, attributes in nodes:
        model = model_of(op_type, inputs, ["y"], **attributes)
        given = {name: value for name, value in inputs.items() if value is not None}
        (expected,) = session_of(lower(model), Path(), threads=1).run(None, given)
        model.opset_import[0].version = opset
        (actual,) = session_of(lower(model), Path(), threads=1).run(None, given)
        assert np.array_equal(actual, expected), op_type


def test_an_output_that_no_node_makes_is_said() -> None:
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2]) for name in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["z"])], "g", [x], [y])
    with pytest.raises(VerificationError, match="no node of the model outputs 'y', which it promises"):
        lower(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)]))
