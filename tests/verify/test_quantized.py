"""A quantized artifact: without its quantization it is PyTorch's model, its weights are what the recipe gives, and it is held to
the limit that the workflow states."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnxruntime.quantization.quant_utils import quantize_data
from safetensors.numpy import load_file

from sdflow.tolerances import EXACT_LIMIT
from sdflow.verify.result import spell_limit
from sdflow.weights.lora import LoraInput
from tests.support.int8_sums import sums_are_cut
from tests.support.small_lora import write_lora
from tests.verify.quantized_chain import LAYER, SUBMODEL, Built, build


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("quantized"), "cpu", {"QuantizeInt8": {}})


@pytest.fixture(scope="module")
def reduced(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """In a range of which no processor cuts a sum."""
    return build(tmp_path_factory.mktemp("reduced"), "cpu", {"QuantizeInt8": {"reduce_range": True}})


@pytest.fixture(scope="module")
def artifact(built: Built) -> Path:
    return built.bound(built.folder / "bound")


def test_without_quantization_it_computes_what_pytorch_computes(built: Built, artifact: Path) -> None:
    proof = built.proof(artifact)
    assert not proof.findings
    assert not proof.problems
    assert not proof.missing
    assert {each.name for each in proof.outputs} == {"last_hidden_state", "pooler_output"}
    assert all(each.distance < EXACT_LIMIT for each in proof.outputs)
    assert proof.weights > 0


@pytest.mark.parametrize("weights", ["built", "reduced"])
def test_it_is_held_to_the_limit_that_is_stated(weights: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    built: Built = request.getfixturevalue(weights)
    artifact = built.bound(tmp_path / "bound")
    far = built.verdict(artifact, 1.0)
    assert far.passed
    assert far.precision == "int8"
    assert all(output.yardstick == 0 for output in far.outputs), "fp16 PyTorch is no measure of it"
    distance = max(output.distance for output in far.outputs)
    assert distance > 1e-4, "float32's limit is not met"
    assert distance < 0.2 or (weights == "built" and sums_are_cut())
    assert spell_limit(far, far.outputs[0]) == "1.00e+00 (workflow)"
    near = built.verdict(artifact, distance / 2)
    assert not near.passed
    assert f"the workflow's limit is {distance / 2:g}" in near.problems[0][0]
    assert "keep" in near.problems[0][1]


def test_without_a_limit_it_is_refused_and_said_how_far_it_is(built: Built, artifact: Path) -> None:
    verdict = built.verdict(artifact, None)
    assert not verdict.passed
    what, remedy = verdict.problems[0]
    assert f"{verdict.outputs[0].distance:.2g} away" in what
    assert "states no limit" in what
    assert "limit: " in remedy


def copied(artifact: Path, out: Path, change: Callable[[Any, dict[str, np.ndarray]], None]) -> Path:
    """The artifact with its weights in the graph, changed."""
    shutil.copytree(artifact, out)
    model = onnx.load(out / "model.onnx")
    weights = {tensor.name: numpy_helper.to_array(tensor).copy() for tensor in model.graph.initializer}
    change(model.graph, weights)
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(weights[tensor.name], tensor.name))
    onnx.save(model, out / "model.onnx")
    return out


def one_step(_graph: Any, weights: dict[str, np.ndarray]) -> None:
    values = next(each for name, each in weights.items() if name.endswith("/int8"))
    values.reshape(-1)[7] += 1 if values.reshape(-1)[7] < 100 else -1


def other_scale(_graph: Any, weights: dict[str, np.ndarray]) -> None:
    scales = next(each for name, each in weights.items() if name.endswith("/scales"))
    scales[0] = np.nextafter(scales[0], np.float32(1))


@pytest.mark.parametrize("change", [one_step, other_scale])
def test_a_weight_or_a_scale_off_by_the_least_is_found(
    change: Callable[[Any, dict[str, np.ndarray]], None], built: Built, artifact: Path, tmp_path: Path
) -> None:
    findings = built.proof(copied(artifact, tmp_path / "changed", change)).findings
    assert [finding.what for finding in findings] == ["its recipe gives other values than the model has"]


def test_scales_of_another_weight_are_found(built: Built, artifact: Path, tmp_path: Path) -> None:
    """Two weights of one shape change their scales, in graph and structure alike."""

    def exchanged(folder: Path) -> Path:
        shutil.copytree(folder, out := tmp_path / folder.name)
        model = onnx.load(out / "model.onnx", load_external_data=False)
        products = [node for node in model.graph.node if node.op_type == "MatMulIntegerToFloat"]
        sizes = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
        first = products[0]
        other = next(node for node in products[1:] if sizes[node.input[3]] == sizes[first.input[3]])
        first.input[3], other.input[3] = other.input[3], first.input[3]
        onnx.save(model, out / "model.onnx")
        return out

    proof = built.proof(exchanged(artifact), exchanged(built.structure))
    assert any("are not those of its weight" in finding.what for finding in proof.findings)


def test_another_graph_is_found_though_quantization_hides_it(built: Built, artifact: Path, tmp_path: Path) -> None:
    """What int8 loses is a hundred times more than this."""

    def epsilon(graph: Any, _weights: dict[str, np.ndarray]) -> None:
        for node in graph.node:
            for item in node.attribute:
                if item.name == "epsilon":
                    item.CopyFrom(helper.make_attribute("epsilon", 1.2e-5))

    changed = copied(artifact, tmp_path / "changed", epsilon)
    right, wrong = (max(each.distance for each in built.verdict(each, 1.0).outputs) for each in (artifact, changed))
    assert wrong < 1.5 * right
    assert built.proof(changed).problems


def test_a_lora_is_merged_in_float32_and_then_quantized(built: Built, tmp_path: Path) -> None:
    """By the definition of a LoRA, and by onnxruntime's own quantization."""
    lora, scale = write_lora(tmp_path / "lora.safetensors", (SUBMODEL,)), 0.5
    bound = built.bound(tmp_path / "bound", LoraInput(lora, scale))
    from sdflow.sources.load import load_module

    weight = dict(load_module(SUBMODEL, built.checkpoint.submodels[SUBMODEL].load).named_parameters())
    own = next(name for name in (LAYER, LAYER.removeprefix("text_model.")) if name in weight)
    factors = load_file(lora)
    name = f"lora_te_{LAYER.removesuffix('.weight').replace('.', '_')}"
    up, down = (factors[f"{name}.lora_{each}.weight"].astype(np.float64) for each in ("up", "down"))
    alpha = float(factors[f"{name}.alpha"])
    delta = (up @ down).astype(np.float32) * np.float32(scale * alpha / len(down))
    merged = (weight[own].detach().numpy() + delta).T
    columns = [
        quantize_data(np.ascontiguousarray(column), onnx.TensorProto.INT8, symmetric=True) for column in merged.T
    ]
    model = onnx.load(bound / "model.onnx")
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    wanted = np.stack([values for _, _, values in columns], 1)
    found = [name for name, values in stored.items() if values.dtype == np.int8 and np.array_equal(values, wanted)]
    assert len(found) == 1
    np.testing.assert_array_equal(stored[f"{found[0]}/scales"], np.stack([scale for _, scale, _ in columns]))
    plain = built.bound(tmp_path / "plain")
    without = {
        tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(plain / "model.onnx").graph.initializer
    }
    assert not np.array_equal(without[found[0]], wanted)


def test_a_graph_that_is_quantized_is_told_by_itself(built: Built, artifact: Path) -> None:
    from sdflow.verify.artifact.judge import _said_otherwise

    verdict = built.verdict(artifact, 1.0)
    assert not _said_otherwise(verdict, "int8")
    ((what, _),) = _said_otherwise(verdict, None)
    assert what == "its graph is quantized to int8, and sdflow.json says that it is not quantized"
    ((what, _),) = _said_otherwise(replace(verdict, precision="float32"), "int8")
    assert what == "its graph is not quantized, and sdflow.json says that it is quantized to int8"
