"""An artifact with weights in 4 bits: without its quantization it is PyTorch's model, its weights are what the recipe gives,
LoRAs are merged before they are quantized, and a changed bit is found."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, DefaultWeightOnlyQuantizer
from safetensors.numpy import load_file

from sdflow.tolerances import EXACT_LIMIT
from sdflow.weights.lora import LoraInput
from tests.support.small_lora import write_lora
from tests.verify.quantized_chain import LAYER, SUBMODEL, Built, build

SMALL = {"smallest": 64, "block_size": 16}


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """For the CPU in float32; for CUDA in float16, so that it is lowered."""
    half = {"OnnxFloatToFloat16": {}} if request.param == "cuda" else {}
    folder = tmp_path_factory.mktemp(request.param)
    return build(folder, request.param, {**half, "QuantizeInt4": {**SMALL, "algorithm": "mse"}})


@pytest.fixture(scope="module")
def artifact(built: Built) -> Path:
    return built.bound(built.folder / "bound")


def test_without_quantization_it_computes_what_pytorch_computes(built: Built, artifact: Path) -> None:
    proof = built.proof(artifact)
    assert not proof.findings
    assert not proof.problems
    assert not proof.missing
    assert all(each.distance < EXACT_LIMIT for each in proof.outputs) and proof.outputs
    assert proof.weights > 0


def test_it_is_held_to_the_limit_that_is_stated(built: Built, artifact: Path) -> None:
    far = built.verdict(artifact, 1.0)
    assert far.passed and far.precision == "int4"
    distance = max(output.distance for output in far.outputs)
    assert 5e-3 < distance < 0.3
    assert not built.verdict(artifact, distance / 2).passed
    (_, remedy) = built.verdict(artifact, None).problems[0]
    assert "limit: " in remedy


def copied(artifact: Path, out: Path, change: Callable[[dict[str, np.ndarray]], None]) -> Path:
    """The artifact with its weights in the graph, changed."""
    shutil.copytree(artifact, out)
    model = onnx.load(out / "model.onnx")
    weights = {tensor.name: numpy_helper.to_array(tensor).copy() for tensor in model.graph.initializer}
    change(weights)
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(weights[tensor.name], tensor.name))
    onnx.save(model, out / "model.onnx")
    return out


def a_number(weights: dict[str, np.ndarray]) -> None:
    next(each for name, each in weights.items() if name.endswith("/int4")).reshape(-1)[7] ^= 1


def a_scale(weights: dict[str, np.ndarray]) -> None:
    scales = next(each for name, each in weights.items() if name.endswith("/scales"))
    scales[0, 0] = np.nextafter(scales[0, 0], scales.dtype.type(1))


def a_zero(weights: dict[str, np.ndarray]) -> None:
    next(each for name, each in weights.items() if name.endswith("/zeros")).reshape(-1)[0] ^= 0x10


@pytest.mark.parametrize("change", [a_number, a_scale, a_zero])
def test_a_weight_a_scale_or_a_zero_off_by_the_least_is_found(
    change: Callable[[dict[str, np.ndarray]], None], built: Built, artifact: Path, tmp_path: Path
) -> None:
    findings = built.proof(copied(artifact, tmp_path / "changed", change)).findings
    assert [finding.what for finding in findings] == ["its recipe gives other values than the model has"]


@pytest.mark.parametrize(("place", "said"), [(2, "its scales are not those"), (3, "its zeros are not those")])
def test_scales_and_zeros_of_another_weight_are_found(
    place: int, said: str, built: Built, artifact: Path, tmp_path: Path
) -> None:
    """Two weights of one shape change them, in graph and structure alike."""

    def exchanged(folder: Path) -> Path:
        shutil.copytree(folder, out := tmp_path / folder.name)
        model = onnx.load(out / "model.onnx", load_external_data=False)
        first, *others = [node for node in model.graph.node if node.op_type == "MatMulNBits"]
        sizes = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
        other = next(node for node in others if sizes[node.input[place]] == sizes[first.input[place]])
        first.input[place], other.input[place] = other.input[place], first.input[place]
        onnx.save(model, out / "model.onnx")
        return out

    proof = built.proof(exchanged(artifact), exchanged(built.structure))
    assert any(said in finding.what for finding in proof.findings)


def test_another_graph_is_found_though_quantization_hides_it(built: Built, artifact: Path, tmp_path: Path) -> None:
    shutil.copytree(artifact, changed := tmp_path / "changed")
    model = onnx.load(changed / "model.onnx", load_external_data=False)
    for node in model.graph.node:
        for item in node.attribute:
            if item.name == "epsilon":
                item.CopyFrom(helper.make_attribute("epsilon", 1.2e-5))
    onnx.save(model, changed / "model.onnx")
    assert built.proof(changed).problems


def test_a_lora_is_merged_in_float32_and_then_quantized(tmp_path: Path) -> None:
    """By the definition of a LoRA, and by ONNX Runtime's own quantizer."""
    built = build(tmp_path, "cpu", {"QuantizeInt4": {**SMALL, "algorithm": "rtn"}})
    lora, scale = write_lora(tmp_path / "lora.safetensors", (SUBMODEL,)), 0.5
    bound = built.bound(tmp_path / "bound", LoraInput(lora, scale))
    from sdflow.sources.load import load_module

    weight = dict(load_module(SUBMODEL, built.checkpoint.submodels[SUBMODEL].load).named_parameters())
    own = next(name for name in (LAYER, LAYER.removeprefix("text_model.")) if name in weight)
    factors = load_file(lora)
    name = f"lora_te_{LAYER.removesuffix('.weight').replace('.', '_')}"
    up, down = (factors[f"{name}.lora_{each}.weight"].astype(np.float64) for each in ("up", "down"))
    delta = (up @ down).astype(np.float32) * np.float32(scale * float(factors[f"{name}.alpha"]) / len(down))
    merged = np.ascontiguousarray((weight[own].detach().numpy() + delta).T)
    config = DefaultWeightOnlyQuantConfig(block_size=16, is_symmetric=False, bits=4)
    wanted = DefaultWeightOnlyQuantizer(config).qbits_block_quant(merged)
    tensors: dict[str, Any] = {
        tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(bound / "model.onnx").graph.initializer
    }
    found = [name for name, values in tensors.items() if np.array_equal(values, wanted[0])]
    assert len(found) == 1
    np.testing.assert_array_equal(tensors[f"{found[0]}/scales"], wanted[1])
    np.testing.assert_array_equal(tensors[f"{found[0]}/zeros"], wanted[2])
