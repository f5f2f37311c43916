"""A text encoder in float8: without its quantization it is PyTorch's model, its weights are what the recipe gives, and it is held
to the workflow's limit; lowered for a CPU, as no GPU is asked. The frame's own tests are in test_quantized.py."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from safetensors.numpy import load_file

from sdflow.onnx_model.float8 import FLOAT8_MATMUL
from sdflow.onnx_model.quantized import quantized_graph
from sdflow.sources.load import load_module
from sdflow.targets import TARGETS
from sdflow.tolerances import EXACT_LIMIT
from sdflow.verify.artifact.unsupported_nodes import fits
from sdflow.weights.lora import LoraInput
from sdflow.weights.quantized import float8_bits
from tests.support.small_lora import write_lora
from tests.verify.quantized_chain import LAYER, SUBMODEL, Built, build


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    passes = {"OnnxFloatToFloat16": {}, "QuantizeFp8": {"smallest": 256}}
    return build(tmp_path_factory.mktemp("float8"), "cuda", passes)


@pytest.fixture(scope="module")
def artifact(built: Built) -> Path:
    return built.bound(built.folder / "bound")


def read(folder: Path) -> Any:
    return onnx.load(folder / "model.onnx", load_external_data=False)


def test_without_quantization_it_computes_what_pytorch_computes(built: Built, artifact: Path) -> None:
    proof = built.proof(artifact)
    assert not proof.findings
    assert not proof.problems
    assert not proof.missing
    assert all(each.distance < EXACT_LIMIT for each in proof.outputs)
    assert quantized_graph(read(artifact)) == "float8_e4m3"


def test_it_is_held_to_the_limit_that_is_stated(built: Built, artifact: Path) -> None:
    far = built.verdict(artifact, 1.0)
    assert far.passed
    assert far.precision == "float8_e4m3"
    distance = max(output.distance for output in far.outputs)
    assert 1e-3 < distance < 0.2
    assert not built.verdict(artifact, distance / 2).passed
    assert not built.verdict(artifact, None).passed


def test_a_weight_off_by_one_bit_is_found(built: Built, artifact: Path, tmp_path: Path) -> None:
    shutil.copytree(artifact, changed := tmp_path / "changed")
    model = onnx.load(changed / "model.onnx")
    tensor = next(each for each in model.graph.initializer if each.data_type == onnx.TensorProto.FLOAT8E4M3FN)
    raw = bytearray(tensor.raw_data)
    raw[7] ^= 1
    tensor.raw_data = bytes(raw)
    onnx.save(model, changed / "model.onnx")
    found = [finding.what for finding in built.proof(changed).findings]
    assert found == ["its recipe gives other values than the model has"]


def test_a_lora_is_merged_in_float32_and_then_quantized_as_torch_does(built: Built, tmp_path: Path) -> None:
    lora, scale = write_lora(tmp_path / "lora.safetensors", (SUBMODEL,)), 0.5
    bound = built.bound(tmp_path / "bound", LoraInput(lora, scale))
    parameters = dict(load_module(SUBMODEL, built.checkpoint.submodels[SUBMODEL].load).named_parameters())
    own = next(name for name in (LAYER, LAYER.removeprefix("text_model.")) if name in parameters)
    factors = load_file(lora)
    name = f"lora_te_{LAYER.removesuffix('.weight').replace('.', '_')}"
    up, down = (torch.from_numpy(factors[f"{name}.lora_{each}.weight"]).double() for each in ("up", "down"))
    delta = (up @ down).float() * (scale * float(factors[f"{name}.alpha"]) / len(down))
    merged = parameters[own].detach() + delta
    scales = merged.abs().amax(1) / 448
    expected = (merged / scales[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    weights = {
        each.name: onnx.numpy_helper.to_array(each) for each in onnx.load(bound / "model.onnx").graph.initializer
    }
    products = [node for node in read(bound).graph.node if node.op_type == FLOAT8_MATMUL]
    found = [
        (weights[node.input[1]], weights[node.input[2]])
        for node in products
        if weights[node.input[1]].shape == tuple(merged.shape)
    ]
    exact = (expected * scales[:, None]).numpy()
    nearest = min(float(np.abs(bits.astype(np.float32) * s[:, None] - exact).max()) for bits, s in found)
    assert nearest < 1e-3 * float(merged.abs().max())


def test_float8_is_rounded_as_ml_dtypes_rounds_it() -> None:
    numbers = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    numbers = np.sort(numbers[np.isfinite(numbers)])
    halfway = (numbers[1:] + numbers[:-1]) / 2
    beside = [np.nextafter(halfway, np.float32(end)) for end in (-1e9, 1e9)]
    random = np.random.default_rng(0).normal(size=5000) * np.geomspace(1e-6, 100, 5000)
    values = np.concatenate([numbers, halfway, *beside, random]).astype(np.float32)
    expected = np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(float8_bits(values), expected)
    assert set(float8_bits(np.float32([-1e9, 500])).tolist()) == {0xFE, 0x7E}


@pytest.mark.parametrize(
    ("target", "kernel"), [("cuda", True), ("cpu", False), ("directml", False), ("tensorrt", False)]
)
def test_only_cuda_has_float8(target: str, kernel: bool, artifact: Path) -> None:
    found = [finding for finding in fits(read(artifact), TARGETS[target]) if finding.what.startswith(FLOAT8_MATMUL)]
    assert bool(found) is not kernel
    assert all(finding.level == "error" and finding.remedy == "leave QuantizeFp8 out" for finding in found)
