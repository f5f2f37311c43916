"""FLUX.1-dev, a few channels wide, for every target: built, and verified by what the target would compute."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import pytest
from shell import Shell

WORKFLOW = """
extends: base/flux1.yaml
model: synthetic:flux1-dev-tiny
target: cuda
evaluate: null
"""
FUSED = {"MultiHeadAttention": 4, "SimplifiedLayerNormalization": 12, "LayerNormalization": 11, "FastGelu": 6}
"""In the transformer: two double blocks, with norms of q and k for image and text and two feed-forward networks each, and two
single ones."""
PORTS = {"sample", "timestep", "encoder_hidden_states", "pooled_projections", "guidance", "out_sample"}


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory, started_python: Any) -> Shell:
    shell = Shell(tmp_path_factory.mktemp("flux_targets"), started_python)
    (shell.folder / "flux.yaml").write_text(WORKFLOW)
    return shell


def test_what_is_fused_for_cuda_is_verified_in_bfloat16_and_the_vae_in_float16(shell: Shell) -> None:
    folder = _verified(shell, "cuda")
    transformer = _graph(folder, "transformer")
    _require_fused(transformer)
    assert _types(transformer) == dict.fromkeys(PORTS, "FLOAT")
    assert not _wide(transformer), "all weights are bfloat16"
    report = json.loads((shell.folder / "results" / f"{folder.name}.verify.json").read_text())
    found = report["submodels"]["transformer"]
    assert found["precision"] == "bfloat16"
    assert found["outputs"][0]["yardstick"] < 2**-6, "the class's rounding of timestep and guidance is none of it"
    assert _types(decoder := _graph(folder, "vae_decoder")) == {"latent_sample": "FLOAT", "sample": "FLOAT16"}
    assert any("/scaled" in tensor.name for tensor in decoder.initializer)
    assert [report["submodels"][name]["precision"] for name in ("vae_encoder", "vae_decoder")] == ["float16"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cuda", "directml", "rocm"])
def test_what_is_fused_in_float16_is_verified(shell: Shell, target: str) -> None:
    transformer = _graph(_verified(shell, target, "--set", "transformer.precision=float16"), "transformer")
    _require_fused(transformer)
    exact = {"timestep", "guidance"}
    assert _types(transformer) == {**dict.fromkeys(PORTS - exact, "FLOAT16"), **dict.fromkeys(exact, "FLOAT")}
    assert not [tensor.name for tensor in _wide(transformer) if len(tensor.dims) > 1]


@pytest.mark.slow
def test_what_tensorrt_fuses_itself_is_verified(shell: Shell) -> None:
    transformer = _graph(_verified(shell, "tensorrt"), "transformer")
    assert not {node.domain for node in transformer.node} - {"", "ai.onnx"}
    assert {tensor.name for tensor in _wide(transformer) if "norm_q" in tensor.name or "norm_k" in tensor.name}


def _verified(shell: Shell, target: str, *more: str) -> Path:
    (pipeline,) = shell.json("run", "flux.yaml", "--target", target, "--no-evaluate", *more)["pipelines"]
    assert pipeline["verification"]["passed"]
    return Path(shell.folder / "pipelines" / pipeline["name"])


def _require_fused(graph: Any) -> None:
    counts = Counter(node.op_type for node in graph.node)
    assert {name: counts[name] for name in FUSED} == FUSED
    assert counts["Softmax"] == 0


def _graph(folder: Path, submodel: str) -> Any:
    return onnx.load(str(folder / submodel / "model.onnx"), load_external_data=False).graph


def _types(graph: Any) -> dict[str, str]:
    name = onnx.TensorProto.DataType.Name
    return {item.name: name(item.type.tensor_type.elem_type) for item in (*graph.input, *graph.output)}


def _wide(graph: Any) -> list[Any]:
    return [tensor for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT]
