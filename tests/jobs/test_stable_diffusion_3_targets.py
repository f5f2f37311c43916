"""Stable Diffusion 3.5, a few channels wide, for every target: built, and verified by what the target would compute."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import pytest
from shell import Shell

from sdflow.runtime.denoiser.skipped_blocks import without_blocks
from sdflow.runtime.sessions.session import read_graph

WORKFLOW = """
extends: base/stable_diffusion_3.yaml
model: synthetic:sd35-tiny
target: cuda
evaluate: null
"""
FUSED = {"MultiHeadAttention": 5, "SimplifiedLayerNormalization": 16, "FastGelu": 5}
"""In the transformer: of three blocks, two have attention of the image alone beside that of image and text; the last block's
text goes no further."""


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory, started_python: Any) -> Shell:
    shell = Shell(tmp_path_factory.mktemp("stable_diffusion_3_targets"), started_python)
    (shell.folder / "sd3.yaml").write_text(WORKFLOW)
    return shell


@pytest.mark.parametrize("target", ["cuda", *(pytest.param(t, marks=pytest.mark.slow) for t in ("directml", "rocm"))])
def test_what_is_fused_for_a_gpu_is_verified(shell: Shell, target: str) -> None:
    folder = _verified(shell, target)
    transformer, text = _graph(folder, "transformer"), _graph(folder, "text_encoder_3")
    counts = Counter(node.op_type for node in transformer.node)
    assert {name: counts[name] for name in FUSED} == FUSED
    _require_that_blocks_can_be_left_out(folder)
    assert _types(transformer) == {
        "sample": "FLOAT16",
        "timestep": "FLOAT",
        "encoder_hidden_states": "FLOAT16",
        "pooled_projections": "FLOAT16",
        "out_sample": "FLOAT16",
    }
    assert {tensor.name.removesuffix("_transposed") for tensor in _wide(transformer) if len(tensor.dims) > 1} == set()
    if target == "cuda":
        assert {tensor.data_type for tensor in text.initializer} == {onnx.TensorProto.BFLOAT16}
        assert sum(node.op_type == "SkipSimplifiedLayerNormalization" for node in text.node) == 4
        assert _types(text) == {"input_ids": "INT32", "last_hidden_state": "FLOAT"}
    else:
        _require_t5_as_transformers_keeps_it(text, fused=True)


@pytest.mark.slow  # FLUX's and Z-Image's are by default
def test_the_transformer_in_bfloat16_is_verified(shell: Shell) -> None:
    """By plain bfloat16 PyTorch: its distance to float32 is eight times that of float16."""
    folder = _verified(shell, "cuda", "--set", "transformer.precision=bfloat16")
    transformer = _graph(folder, "transformer")
    _require_that_blocks_can_be_left_out(folder)
    assert set(_types(transformer).values()) == {"FLOAT"}
    assert {tensor.name for tensor in _wide(transformer)} == {"pos_embed.proj.weight", "pos_embed.proj.bias"}
    report = json.loads((shell.folder / "results" / f"{folder.name}.verify.json").read_text())
    (output,) = report["submodels"]["transformer"]["outputs"]
    assert report["submodels"]["transformer"]["precision"] == "bfloat16"
    assert output["yardstick"] > 2**-8 and output["ratio"] < 1.2


@pytest.mark.slow
def test_what_tensorrt_fuses_itself_is_verified(shell: Shell) -> None:
    folder = _verified(shell, "tensorrt")
    transformer = _graph(folder, "transformer")
    assert not {node.domain for node in transformer.node} - {"", "ai.onnx"}
    norms = {tensor.name for tensor in _wide(transformer) if "norm_q" in tensor.name or "norm_k" in tensor.name}
    assert norms, "the weights of the norms of q and k are float32"
    _require_t5_as_transformers_keeps_it(_graph(folder, "text_encoder_3"), fused=False)


def _require_that_blocks_can_be_left_out(folder: Path) -> None:
    """Of the first and the last of three nothing is left, and the other has attention twice."""
    rest = without_blocks(read_graph(folder / "transformer/model.onnx"), "transformer_blocks", (0, 2), "").graph
    weights = [tensor.name for tensor in rest.initializer]
    assert not [name for name in weights if "blocks.0." in name or "blocks.2." in name]
    assert [name for name in weights if "blocks.1." in name]
    assert sum(node.op_type == "MultiHeadAttention" for node in rest.node) == 2


def _verified(shell: Shell, target: str, *more: str) -> Path:
    (pipeline,) = shell.json("run", "sd3.yaml", "--target", target, "--no-evaluate", *more)["pipelines"]
    assert pipeline["verification"]["passed"]
    return Path(shell.folder / "pipelines" / pipeline["name"])


def _graph(folder: Path, submodel: str) -> Any:
    return onnx.load(str(folder / submodel / "model.onnx"), load_external_data=False).graph


def _types(graph: Any) -> dict[str, str]:
    name = onnx.TensorProto.DataType.Name
    return {item.name: name(item.type.tensor_type.elem_type) for item in (*graph.input, *graph.output)}


def _wide(graph: Any) -> list[Any]:
    return [tensor for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT]


def _require_t5_as_transformers_keeps_it(graph: Any, *, fused: bool) -> None:
    """`wo` alone of the matrices is float32, and the residual goes from norm to norm without a Cast to float16."""
    matrices = [tensor.name for tensor in _wide(graph) if len(tensor.dims) == 2]
    assert matrices == [f"encoder.block.{block}.layer.1.DenseReluDense.wo.weight" for block in range(2)]
    residuals = {node.output[0] for node in graph.node if node.op_type == "Add" and "/SelfAttention/" not in node.name}
    read_by = Counter(node.op_type for node in graph.node if residuals.intersection(node.input))
    assert read_by["Cast"] == 0 and read_by["Add"] >= 3
    assert sum(node.op_type == "SimplifiedLayerNormalization" for node in graph.node) == (5 if fused else 0)
