"""QuantizeInt4: the graph and the bytes of ONNX Runtime's and Olive's quantizers, and what sessions then compute."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization.matmul_nbits_quantizer import (
    DefaultWeightOnlyQuantConfig,
    HQQWeightOnlyQuantConfig,
    HQQWeightOnlyQuantizer,
    MatMulNBitsQuantizer,
)

from sdflow.distance import relative_l2
from sdflow.errors import PassError
from sdflow.onnx_model.quantized import quantized_graph
from sdflow.passes.base import PassInputs
from sdflow.passes.quantize_int4 import QuantizeInt4, QuantizeInt4Config
from sdflow.verify.lowering import lower, session_of

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((2, 5, 96)).astype(np.float32)


def some(name: str, *shape: int) -> Any:
    return numpy_helper.from_array(RANDOM.standard_normal(shape).astype(np.float32), name)


@pytest.fixture(scope="module")
def products(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A product with an odd number of blocks, a Gemm with a bias and a transposed weight, one whose inner size is no multiple of
    a block, and one of two values."""
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["p"], "to_q"),
        helper.make_node("Reshape", ["p", "shape"], ["flat"], "reshape"),
        helper.make_node("Gemm", ["flat", "b", "b_bias"], ["q"], "out", transB=1),
        helper.make_node("MatMul", ["q", "c"], ["r"], "narrow"),
        helper.make_node("Transpose", ["r"], ["turned"], "transpose", perm=[1, 0]),
        helper.make_node("MatMul", ["r", "turned"], ["z"], "of_values"),
    ]
    tensors = [some("a", 96, 64), some("b", 40, 64), some("b_bias", 40), some("c", 40, 32)]
    graph = helper.make_graph(
        nodes,
        "products",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 5, 96])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, [10, 10])],
        [*tensors, numpy_helper.from_array(np.array([10, 64]), "shape")],
    )
    folder = tmp_path_factory.mktemp("products")
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, folder / "model.onnx")
    return folder


def quantized(model: Path, out: Path, **options: Any) -> Mapping[str, Any]:
    out.mkdir(exist_ok=True)
    return QuantizeInt4().run(PassInputs("unet", model, {}), out, QuantizeInt4Config(smallest=64, **options))


def stored(path: Path) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}


def run(model: Any) -> np.ndarray:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    result: np.ndarray = session.run(None, {"x": X})[0]
    return result


def exactly(folder: Path, bits: int) -> np.ndarray:
    """What PyTorch computes with the weights dequantized by torch from what is stored in the folder's graph."""
    tensors = {name: torch.from_numpy(values.copy()) for name, values in stored(folder / "model.onnx").items()}

    def weight(name: str) -> torch.Tensor:
        base = f"{name}/int{bits}"
        values, scales = tensors[base], tensors[f"{base}/scales"].double()
        zeros = tensors.get(f"{base}/zeros")
        if bits == 4:
            values = torch.stack([values & 15, values >> 4], -1).flatten(-2)
            zeros = None if zeros is None else torch.stack([zeros & 15, zeros >> 4], -1).flatten(-2)
        middle = torch.full_like(scales, 1 << (bits - 1)) if zeros is None else zeros[:, : scales.shape[1]].double()
        return ((values.double() - middle[..., None]) * scales[..., None]).flatten(1)

    x = torch.nn.functional.linear(torch.from_numpy(X).double(), weight("a/transposed")).reshape(10, 64)
    r = torch.nn.functional.linear(x, weight("b"), tensors["b_bias"].double()) @ tensors["c"].double()
    result: np.ndarray = (r @ r.T).numpy()
    return result


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [False, True])
def test_by_range_it_is_the_graph_of_onnx_runtimes_quantizer(
    symmetric: bool, bits: int, products: Path, tmp_path: Path
) -> None:
    facts = quantized(products, tmp_path / "ours", algorithm="rtn", bits=bits, is_symmetric=symmetric)
    assert facts["quantized"] == {"layers": ["to_q", "out"], "kept": []}
    reference = onnx.load(products / "model.onnx")
    config = DefaultWeightOnlyQuantConfig(block_size=32, is_symmetric=symmetric, bits=bits)
    quantizer = MatMulNBitsQuantizer(reference, nodes_to_exclude=["narrow"], algo_config=config)
    quantizer.process()
    theirs = {tensor.name: numpy_helper.to_array(tensor) for tensor in quantizer.model.model.graph.initializer}
    found = stored(tmp_path / "ours/model.onnx")
    names = {f"a_Q{bits}": "", "a_scales": "/scales", "a_zero_points": "/zeros"}
    compared = [name for name in names if name in theirs]
    assert len(compared) == (2 if symmetric else 3)
    for name in compared:
        np.testing.assert_array_equal(found[f"a/transposed/int{bits}{names[name]}"], theirs[name])
    (node,) = [each for each in quantizer.model.model.graph.node if each.op_type == "MatMulNBits"]
    ours = next(each for each in onnx.load(tmp_path / "ours/model.onnx").graph.node if each.name == "to_q")
    assert {item.name: item.i for item in ours.attribute} == {item.name: item.i for item in node.attribute}


@pytest.mark.slow
def test_olives_pass_gives_the_same_bytes(products: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "1")  # no telemetry
    from olive.passes.onnx.rtn_quantization import OnnxBlockWiseRtnQuantization

    quantized(products, tmp_path / "ours", algorithm="rtn")
    found, weight = stored(tmp_path / "ours/model.onnx"), stored(products / "model.onnx")["a"]
    packed, scales, zeros = OnnxBlockWiseRtnQuantization._qbits_block_quant(None, weight, 4, 32, False)
    np.testing.assert_array_equal(found["a/transposed/int4"], packed)
    np.testing.assert_array_equal(found["a/transposed/int4/scales"].reshape(-1), scales)
    np.testing.assert_array_equal(found["a/transposed/int4/zeros"].reshape(-1), zeros)


def test_scales_by_error_are_nearly_as_near_as_those_of_hqq_though_zeros_are_whole(
    products: Path, tmp_path: Path
) -> None:
    """HQQ has zeros in float32, which not every provider takes."""
    weight = torch.from_numpy(stored(products / "model.onnx")["a"].T.copy())
    hqq = HQQWeightOnlyQuantizer(HQQWeightOnlyQuantConfig(block_size=32, bits=4))
    values, scales, zeros = hqq.quantize_internal(weight, bits=4, group_size=32)
    theirs = (values.reshape(64, 3, 32) - zeros[..., None]) * scales[..., None]
    quantized(products, tmp_path, bits=4)
    found = {name: torch.from_numpy(each.copy()) for name, each in stored(tmp_path / "model.onnx").items()}
    numbers = torch.stack([found["a/transposed/int4"] & 15, found["a/transposed/int4"] >> 4], -1).flatten(-2)
    middle = torch.stack([found["a/transposed/int4/zeros"] & 15, found["a/transposed/int4/zeros"] >> 4], -1).flatten(1)
    ours = (numbers.float() - middle[:, :3, None]) * found["a/transposed/int4/scales"][..., None]
    far, of_hqq = (relative_l2(each.flatten(1).numpy(), weight.numpy()) for each in (ours, theirs))
    assert far < 1.05 * of_hqq < 0.1


@pytest.mark.parametrize("options", [{}, {"is_symmetric": True}, {"block_size": 16}, {"algorithm": "rtn"}], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_session_and_the_lowered_graph_compute_with_the_stored_weights(
    bits: int, options: dict[str, Any], products: Path, tmp_path: Path
) -> None:
    facts = quantized(products, tmp_path, bits=bits, **options)
    assert facts["operators"]["MatMulNBits"] == 2
    assert ("uint4" in facts["dtypes"]) == (bits == 4)
    expected, model = exactly(tmp_path, bits), onnx.load(tmp_path / "model.onnx")
    assert quantized_graph(model) == f"int{bits}"
    assert relative_l2(run(str(tmp_path / "model.onnx")), expected) < 1e-6
    (found,) = session_of(lower(model), tmp_path, threads=1).run(None, {"x": X})
    assert relative_l2(found, expected) < 1e-6
    far = relative_l2(expected, run(str(products / "model.onnx")))
    assert 0.02 < far < 0.4 if bits == 4 else 1e-4 < far < 0.02


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_scales_have_the_type_of_the_values_around(kind: int, tmp_path: Path) -> None:
    weight = helper.make_tensor("w", kind, [64, 32], RANDOM.standard_normal(64 * 32))
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], "product")],
        "half",
        [helper.make_tensor_value_info("x", kind, ["rows", 64])],
        [helper.make_tensor_value_info("y", kind, ["rows", 32])],
        [weight],
    )
    (tmp_path / "before").mkdir()
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "before/model.onnx")
    quantized(tmp_path / "before", tmp_path / "after")
    made = onnx.load(tmp_path / "after/model.onnx")
    kinds = {tensor.name: tensor.data_type for tensor in made.graph.initializer}
    assert kinds["w/transposed/int4/scales"] == kind
    from sdflow.targets import TARGETS
    from sdflow.verify.artifact.unsupported_nodes import fits

    takers = ["cuda"] if kind == TensorProto.BFLOAT16 else ["cuda", "directml"]
    assert all(not fits(made, TARGETS[target], "transformer") for target in takers)
    assert fits(made, TARGETS["tensorrt"], "transformer"), "it has no such operator"
    x = RANDOM.standard_normal((3, 64)).astype(np.float32)
    lowered = lower(made, round_fp16=False, exact={"x"})
    (found,) = session_of(lowered, tmp_path / "after", threads=1).run(None, {"x": x})
    assert 0.01 < relative_l2(found, x @ numpy_helper.to_array(weight).astype(np.float32)) < 0.15


def test_layers_that_are_kept_or_small_stay(products: Path, tmp_path: Path) -> None:
    facts = quantized(products, tmp_path / "kept", keep=("to_*",))
    assert facts["quantized"] == {"layers": ["out"], "kept": ["to_q"]}
    (tmp_path / "large").mkdir()
    config = QuantizeInt4Config(smallest=3000)
    facts = QuantizeInt4().run(PassInputs("unet", products, {}), tmp_path / "large", config)
    assert facts["quantized"]["layers"] == ["to_q"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"keep": ("to_v",)}, "keep names to_v, which matches no layer"),
        ({"keep": ("*",)}, "keep names every layer"),
        ({"block_size": 256}, "no layer that can be quantized"),
    ],
)
def test_options_that_fit_nothing_are_errors(options: Any, said: str, products: Path, tmp_path: Path) -> None:
    with pytest.raises(PassError, match=said):
        quantized(products, tmp_path, **options)


def test_with_accuracy_level_4_the_cpu_rounds_the_values_too(products: Path, tmp_path: Path) -> None:
    quantized(products, tmp_path, bits=8, accuracy_level=4)
    expected = exactly(tmp_path, 8)
    assert 1e-4 < relative_l2(run(str(tmp_path / "model.onnx")), expected) < 0.03


def test_a_chain_is_called_by_the_fewest_bits_of_its_passes() -> None:
    from sdflow.onnx_model.quantized import quantized_to
    from sdflow.passes.quantize_fp8 import QuantizeFp8
    from sdflow.passes.quantize_int8 import QuantizeInt8
    from sdflow.passes.quantizing import quantization_of

    facts = {"quantized": {"layers": ["to_q"], "kept": ["out"]}}
    int8 = (QuantizeInt8, {"limit": 0.1}, facts)
    for bits, to, by in ((4, "int4", "QuantizeInt4"), (8, "int8", "QuantizeInt8")):
        found = quantization_of([int8, (QuantizeInt4, {"limit": 0.2, "bits": bits}, facts)])
        assert found is not None
        assert (found.to, found.by, found.layers, found.kept) == (to, by, 1, ("out",))
    float8 = (QuantizeFp8, {"limit": 0.3}, facts)
    for chain in permutations([float8, (QuantizeInt4, {"limit": 0.2, "bits": 8}, facts)]):
        found = quantization_of(chain)
        assert found is not None and found.to == quantized_to((), ("int8", "float8e4m3fn")) == "float8_e4m3"
    alone = quantization_of([(QuantizeInt4, {"limit": 0.2, "bits": 8}, facts)])
    assert alone is not None and (alone.to, alone.limit) == ("int8", 0.2)
