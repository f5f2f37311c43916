"""A graph for fixed sizes computes the same, and has no shape arithmetic left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from sdflow.errors import PassError
from sdflow.onnx_model.nodes import in_order
from sdflow.passes.base import PassInputs
from sdflow.passes.onnx_conversion import OnnxConversion, OnnxConversionConfig
from sdflow.passes.ort_transformers_optimization import (
    OrtTransformersOptimization,
    OrtTransformersOptimizationConfig,
)
from sdflow.runtime.sessions.specialize import specialize
from sdflow.sources import Checkpoint

SHAPE_ARITHMETIC = {"Shape", "Size", "Range", "ConstantOfShape", "Constant", "Where", "Equal", "Less", "CumSum", "Tile"}
SIZES = {"batch": 2, "latent_height": 8, "latent_width": 8, "sequence": 77}


def load(folder: Path) -> Any:
    return onnx.load(str(folder / "model.onnx"), load_external_data=False)


def run(model: Any, folder: Path, feeds: dict[str, Any]) -> list[Any]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder.resolve()))
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


def feeds_of(model: Any) -> dict[str, Any]:
    """Random inputs for a model with static shapes."""
    random = np.random.default_rng(0)
    feeds = {}
    for item in model.graph.input:
        kind = onnx.helper.tensor_dtype_to_np_dtype(item.type.tensor_type.elem_type)
        shape = [axis.dim_value for axis in item.type.tensor_type.shape.dim]
        values = random.standard_normal(shape) if kind.kind == "f" else random.integers(0, 500, shape)
        feeds[item.name] = np.asarray(values).astype(kind)
    return feeds


@pytest.mark.parametrize("submodel", ["text_encoder", "unet", "vae_decoder"])
def test_a_submodel_for_fixed_sizes_gives_the_same_bits(tiny_pipeline: Path, submodel: str) -> None:
    folder = tiny_pipeline / submodel
    model = load(folder)
    fixed = specialize(model, SIZES)
    feeds = feeds_of(fixed)
    for old, new in zip(run(model, folder, feeds), run(fixed, folder, feeds), strict=True):
        np.testing.assert_array_equal(new, old)
    left = {node.op_type for node in fixed.graph.node}
    assert not left & SHAPE_ARITHMETIC
    known = {info.name: info.type for info in (*fixed.graph.value_info, *fixed.graph.output)}
    for node in fixed.graph.node:
        for name in filter(None, node.output):
            assert all(axis.dim_value > 0 for axis in known[name].tensor_type.shape.dim), name


@pytest.mark.parametrize(
    ("ends", "order", "left"),
    [
        ((3, 8), (0, 1), []),
        ((3, 8), (1, 0), ["Slice", "Slice", "Concat"]),
        ((3, 7), (0, 1), ["Slice", "Slice", "Concat"]),
        ((3, (1 << 63) - 1), (0, 1), []),
    ],
)
def test_parts_that_are_put_together_again_are_what_was_cut(
    ends: tuple[int, int], order: tuple[int, int], left: list[str], tmp_path: Path
) -> None:
    helper, tensor = onnx.helper, onnx.numpy_helper.from_array
    ranges = {"zero": 0, "middle": ends[0], "end": ends[1], "axis": -2}
    nodes = [
        helper.make_node("Relu", ["x"], ["whole"]),
        helper.make_node("Slice", ["whole", "zero", "middle", "axis"], ["part0"]),
        helper.make_node("Slice", ["whole", "middle", "end", "axis"], ["part1"]),
        helper.make_node("Concat", [f"part{place}" for place in order], ["joined"], axis=1),
        helper.make_node("Neg", ["joined"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "parts",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", 8, 4])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [tensor(np.array([value]), name) for name, value in ranges.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    fixed = specialize(model, {"batch": 2})
    assert [node.op_type for node in fixed.graph.node] == ["Relu", *left, "Neg"]
    feeds = feeds_of(fixed)
    for old, new in zip(run(model, tmp_path, feeds), run(fixed, tmp_path, feeds), strict=True):
        np.testing.assert_array_equal(old, new)


def test_the_graph_of_the_artifact_stays_as_it_is(tiny_pipeline: Path) -> None:
    model = load(tiny_pipeline / "vae_decoder")
    before = model.SerializeToString(deterministic=True)
    specialize(model, SIZES)
    assert model.SerializeToString(deterministic=True) == before


def test_a_text_encoder_without_its_pooled_output_has_nothing_that_only_a_cpu_computes(tiny_pipeline: Path) -> None:
    model = load(tiny_pipeline / "text_encoder")
    assert "ArgMax" in {node.op_type for node in specialize(model, SIZES).graph.node}
    fixed = specialize(model, SIZES, ["last_hidden_state"])
    assert "ArgMax" not in {node.op_type for node in fixed.graph.node}
    assert [item.name for item in fixed.graph.output] == ["last_hidden_state"]
    feeds = feeds_of(fixed)
    folder = tiny_pipeline / "text_encoder"
    np.testing.assert_array_equal(run(fixed, folder, feeds)[0], run(model, folder, feeds)[0])


def test_what_is_missing_is_named(tiny_pipeline: Path) -> None:
    model = load(tiny_pipeline / "vae_decoder")
    with pytest.raises(PassError, match="'latent_width' of latent_sample has no size"):
        specialize(model, {"batch": 1, "latent_height": 8})
    with pytest.raises(PassError, match="no output 'images'"):
        specialize(model, SIZES, ["images"])
    next(node for node in model.graph.node if node.op_type == "Conv").domain = "com.example"
    with pytest.raises(PassError, match="of Conv .* is not known"):
        specialize(model, SIZES)


def _sizes_beyond_all_bounds(graph: Any) -> None:
    graph.initializer[0].dims[:] = [2**62, 2**62]


def _a_value_that_nothing_gives(graph: Any) -> None:
    graph.node[-1].input[0] = "nothing"


def _an_output_that_nothing_gives(graph: Any) -> None:
    graph.output[0].name = "nothing"


def _a_constant_without_its_bytes(graph: Any) -> None:
    graph.initializer.append(onnx.TensorProto(name="short", data_type=1, dims=[5], raw_data=b"ab"))


@pytest.mark.parametrize(
    "damage",
    [
        _sizes_beyond_all_bounds,
        _a_value_that_nothing_gives,
        _an_output_that_nothing_gives,
        _a_constant_without_its_bytes,
    ],
)
def test_a_graph_that_is_none_is_refused_in_words(tiny_pipeline: Path, damage: Callable[[Any], None]) -> None:
    model = load(tiny_pipeline / "vae_decoder")
    damage(model.graph)
    with pytest.raises(PassError, match="cannot be inferred"):
        specialize(model, SIZES)


def test_a_circle_of_nodes_is_refused_at_once() -> None:
    nodes = [onnx.helper.make_node("Relu", [one], [other]) for one, other in ("ab", "bc", "ca")]
    with pytest.raises(PassError, match="form a cycle"):
        in_order(nodes)
    assert in_order([nodes[1], nodes[0]]) == nodes[:2]


def test_a_fused_safety_checker_whose_opset_has_no_layer_normalization_gives_the_same(
    tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Its opset is 14; the fusion writes LayerNormalization into it all the same, as ONNX Runtime takes it."""
    converted, fused = tmp_path / "converted", tmp_path / "fused"
    converted.mkdir(), fused.mkdir()
    module = PassInputs("safety_checker", None, tiny_checkpoint.submodels["safety_checker"].load)
    OnnxConversion().run(module, converted, OnnxConversionConfig(target_opset=14))
    config = OrtTransformersOptimizationConfig(model_type="clip")
    OrtTransformersOptimization().run(PassInputs("safety_checker", converted, {}), fused, config)
    model = load(fused)
    sizes = {axis.dim_param: 32 for item in model.graph.input for axis in item.type.tensor_type.shape.dim}
    fixed = specialize(model, {**sizes, "batch": 1})
    assert {entry.domain: entry.version for entry in model.opset_import}[""] == 14
    assert "LayerNormalization" in {node.op_type for node in fixed.graph.node}
    feeds = feeds_of(fixed)
    for old, new in zip(run(model, fused, feeds), run(fixed, fused, feeds), strict=True):
        np.testing.assert_array_equal(new, old)
