"""QuantizeInt8 with a scale per row: which products it takes, what they give, and as what a session has them."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from sdflow.distance import relative_l2
from sdflow.errors import PassError, SlowerWarning, UsageError
from sdflow.onnx_model.float8 import DOMAIN
from sdflow.onnx_model.int8 import INT8_MATMUL
from sdflow.passes.base import PassInputs
from sdflow.passes.quantize_int8 import QuantizeInt8, QuantizeInt8Config
from sdflow.runtime.kernels import int8
from sdflow.runtime.kernels.int8 import int8_library, with_definition, with_int8
from sdflow.runtime.kernels.int8_proof import quantized
from sdflow.runtime.sessions.session import create_session
from sdflow.targets import TARGETS
from sdflow.verify.artifact.unsupported_nodes import fits
from sdflow.verify.lowering import lower, session_of

RANDOM = np.random.default_rng(8)
TYPES = {TensorProto.FLOAT: np.float32, TensorProto.FLOAT16: np.float16, TensorProto.BFLOAT16: ml_dtypes.bfloat16}
X = RANDOM.normal(size=(2, 5, 64)) * RANDOM.uniform(1e-3, 30, (2, 5, 1))
X[0, 1] = 0
X[1, 2] = np.linspace(-127, 127, 64)  # a scale of 1: halfway between two numbers too
X[1, 3, 7] = 400  # an outlier


def products(folder: Path, element: int) -> dict[str, np.ndarray]:
    """Writes a graph of two products of one value, one with a bias, and a Gemm of a transposed weight with a bias; three more
    that stay: of 12 rows of a weight, of 20 columns, and of one row for each image. Its inputs and outputs are float32. Returns
    its weights."""
    dtype = TYPES[element]
    shapes = {
        "a": (64, 48),
        "a_bias": (48,),
        "b": (64, 48),
        "c": (32, 48),
        "c_bias": (32,),
        "d": (12, 16),
        "e": (64, 20),
    }
    weights = {name: (RANDOM.normal(size=shape) * 2).astype(dtype) for name, shape in shapes.items()}
    weights["a"][:, 3] = 0
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["p"], "to_q"),
        helper.make_node("Add", ["a_bias", "p"], ["biased"], "to_q_bias"),
        helper.make_node("MatMul", ["x", "b"], ["q"], "to_k"),
        helper.make_node("Reshape", ["q", "shape"], ["flat"], "reshape"),
        helper.make_node("Gemm", ["flat", "c", "c_bias"], ["z"], "out", transB=1),
        helper.make_node("MatMul", ["short", "d"], ["one"], "of_twelve"),
        helper.make_node("MatMul", ["x", "e"], ["two"], "of_twenty"),
        helper.make_node("MatMul", ["pooled", "a"], ["three"], "of_image"),
    ]
    inputs = {"x": [2, 5, 64], "short": [2, 3, 12], "pooled": [2, 64]}
    outputs = {
        "biased": [2, 5, 48],
        "q": [2, 5, 48],
        "z": [10, 32],
        "one": [2, 3, 16],
        "two": [2, 5, 20],
        "three": [2, 48],
    }
    casts = [helper.make_node("Cast", [f"{name}/wide"], [name], name, to=element) for name in inputs]
    nodes = [*casts, *nodes, *(helper.make_node("Cast", [name], [f"{name}/wide"], name, to=1) for name in outputs)]
    graph = helper.make_graph(
        nodes,
        "products",
        [helper.make_tensor_value_info(f"{name}/wide", 1, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(f"{name}/wide", 1, shape) for name, shape in outputs.items()],
        [numpy_helper.from_array(each, name) for name, each in weights.items()]
        + [numpy_helper.from_array(np.array([10, 48]), "shape")],
    )
    folder.mkdir()
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "model.onnx"
    )
    return weights


def made(folder: Path, element: int, **options: Any) -> tuple[Any, dict[str, np.ndarray], Any]:
    """The pass' graph, the weights it began with, and its facts."""
    weights = products(folder / "before", element)
    (folder / "after").mkdir()
    config = QuantizeInt8Config(activations="row", **options)
    facts = QuantizeInt8().run(PassInputs("unet", folder / "before", {}), folder / "after", config)
    return onnx.load(folder / "after" / "model.onnx"), weights, facts


def by_definition(x: np.ndarray, weight: np.ndarray, rotation: int) -> np.ndarray:
    """x (..., K), weight (N, K): products of whole numbers."""
    (rows, scales), (columns, weight_scales) = quantized(x, rotation), quantized(weight.astype(np.float32), rotation)
    sums = rows.reshape(-1, x.shape[-1]).astype(np.int64) @ columns.astype(np.int64).T
    result: np.ndarray = (sums * scales[:, None].astype(np.float64) * weight_scales).reshape(*x.shape[:-1], -1)
    return result


def check(found: dict[str, np.ndarray], weights: dict[str, np.ndarray], element: int, rotation: int) -> None:
    x, most = X.astype(TYPES[element]), 1e-3 if element == TensorProto.FLOAT16 else 6e-3
    a, b = (by_definition(x, weights[name].T, rotation) for name in ("a", "b"))
    q = found["q"]
    c = by_definition(
        q.astype(TYPES[element]).reshape(10, 48), weights["c"], rotation if 48 % (rotation or 1) == 0 else 0
    )
    expected = {"biased": a + weights["a_bias"].astype(float), "q": b, "z": c + weights["c_bias"].astype(float)}
    for name, value in expected.items():
        assert relative_l2(found[name].astype(np.float64), value) < most, name
    exact = x.astype(float) @ weights["b"].astype(float)
    assert 1e-3 < relative_l2(q, exact) < 0.05


@pytest.mark.parametrize("rotation", [None, 16, 64])
@pytest.mark.parametrize("element", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_products_are_those_of_the_definition(element: int, rotation: int | None, tmp_path: Path) -> None:
    """As verification computes them; in float16 also as a session without our kernels does."""
    model, weights, facts = made(tmp_path, element, rotation=rotation)
    onnx.checker.check_model(model)
    assert facts["quantized"] == {"layers": ["to_q", "to_k", "out"], "kept": []}
    ours = [node for node in model.graph.node if node.op_type == INT8_MATMUL]
    assert [len(node.input) for node in ours] == [4, 3, 4], "with their biases"
    assert not any(node.op_type == "Add" for node in model.graph.node)
    folder = tmp_path / "after"
    feeds = {"x": X, "short": np.ones((2, 3, 12)), "pooled": np.ones((2, 64))}
    feeds = {f"{name}/wide": value.astype(np.float32) for name, value in feeds.items()}
    sessions = [session_of(lower(model), folder, threads=1)]
    if element == TensorProto.FLOAT16:
        int8_library.cache_clear()
        with pytest.warns(SlowerWarning, match="int8 products run in ONNX Runtime's operators"):
            sessions.append(create_session(folder / "model.onnx", TARGETS["cpu"]))
    names = [item.name.removesuffix("/wide") for item in model.graph.output]
    for session in sessions:
        check(dict(zip(names, session.run(None, feeds), strict=True)), weights, element, rotation or 0)


def test_a_session_has_rows_that_products_share(tmp_path: Path) -> None:
    model, _, _ = made(tmp_path, TensorProto.BFLOAT16, rotation=64)
    changed = with_int8(model)
    ours = Counter(node.op_type for node in changed.graph.node if node.domain == DOMAIN)
    assert ours == {"Int8RowsBfloat16": 2, "Int8ProductBfloat16": 3}
    rows = {node.output[0]: node for node in changed.graph.node if node.op_type == "Int8RowsBfloat16"}
    assert [node.attribute[0].i for node in rows.values()] == [64, 0], "48 channels are no multiple of 64"
    for node in changed.graph.node:
        if node.op_type == "Int8ProductBfloat16":
            assert list(node.input[:2]) == list(rows[node.input[0]].output)
    plain = Counter(node.op_type for node in with_definition(model).graph.node)
    assert (plain["MatMulInteger"], plain["Round"], plain[INT8_MATMUL]) == (3, 2, 0)


def test_a_graph_that_it_does_not_suit_is_told_what_to_do(tmp_path: Path) -> None:
    products(tmp_path / "before", TensorProto.BFLOAT16)
    with pytest.raises(PassError, match=r"bfloat16, which int8 supports with scales per row only") as raised:
        QuantizeInt8().run(PassInputs("unet", tmp_path / "before", {}), tmp_path, QuantizeInt8Config())
    assert raised.value.remedy == "Set activations: row (CUDA)."
    large = QuantizeInt8Config(activations="row", smallest=64 * 48)
    (tmp_path / "after").mkdir()
    facts = QuantizeInt8().run(PassInputs("unet", tmp_path / "before", {}), tmp_path / "after", large)
    assert facts["quantized"]["layers"] == ["to_q", "to_k"], "the third one is smaller"
    config = QuantizeInt8Config(activations="row", keep=("of_twelve",))
    with pytest.raises(PassError, match="keep names of_twelve"):
        QuantizeInt8().run(PassInputs("unet", tmp_path / "before", {}), tmp_path, config)
    products(tmp_path / "float32", TensorProto.FLOAT)
    with pytest.raises(PassError, match="neither float16 nor bfloat16") as raised:
        rows = QuantizeInt8Config(activations="row")
        QuantizeInt8().run(PassInputs("unet", tmp_path / "float32", {}), tmp_path, rows)
    assert raised.value.remedy == "Put OnnxFloatToFloat16 before it."


def test_options_that_came_later_do_not_change_earlier_cache_keys() -> None:
    """The config in a key before `smallest` and `activations` existed."""
    plain = {"limit": 0.02, "keep": ["*/to_q/*"], "reduce_range": False, "rotation": None}
    assert QuantizeInt8Config(limit=0.02, keep=("*/to_q/*",)).model_dump(mode="json") == plain
    rows = QuantizeInt8Config(limit=0.02, keep=("*/to_q/*",), smallest=9, activations="row")
    assert rows.model_dump(mode="json") == {**plain, "smallest": 9, "activations": "row"}


@pytest.mark.parametrize(("target", "kernel"), [("cuda", True), ("cpu", False), ("directml", False)])
def test_only_cuda_has_its_kernels(target: str, kernel: bool, tmp_path: Path) -> None:
    model, _, _ = made(tmp_path, TensorProto.FLOAT16)
    found = [finding for finding in fits(model, TARGETS[target]) if finding.what.startswith(INT8_MATMUL)]
    assert bool(found) is not kernel
    assert all(each.level == "error" and each.remedy.startswith("set activations: tensor") for each in found)


def test_int8_with_a_scale_for_a_tensor_is_refused_on_cuda_with_the_option_that_helps(tmp_path: Path) -> None:
    products(tmp_path / "before", TensorProto.FLOAT16)
    (tmp_path / "after").mkdir()
    QuantizeInt8().run(PassInputs("unet", tmp_path / "before", {}), tmp_path / "after", QuantizeInt8Config())
    found = fits(onnx.load(tmp_path / "after" / "model.onnx"), TARGETS["cuda"])
    assert {each.remedy for each in found if each.level == "error"} == {"set activations: row of QuantizeInt8"}


def test_without_a_device_the_fallback_is_said() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a device")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert int8_library.__wrapped__() is None
    assert "int8 products run in ONNX Runtime's operators" in str(told[0].message)


@pytest.mark.parametrize("error", [UsageError("no folder"), PermissionError("no folder")], ids=["usage", "system"])
def test_without_a_kernel_folder_the_fallback_is_said(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def unable(*_: Any) -> Path:
        raise error

    monkeypatch.setattr(int8, "build", unable)
    with pytest.warns(SlowerWarning, match="int8 products run in ONNX Runtime's operators.*no folder"):
        assert int8_library.__wrapped__() is None
