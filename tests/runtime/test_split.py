"""The parts of a UNet give what the UNet gives, each computing its own share only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from sdflow.errors import PassError
from sdflow.passes.base import PassInputs
from sdflow.passes.quantize_int8 import QuantizeInt8, QuantizeInt8Config
from sdflow.runtime.denoiser.moving import Moving
from sdflow.runtime.denoiser.split import Parts
from sdflow.runtime.denoiser.split import split as take_apart
from sdflow.runtime.sessions.specialize import FOLDED_ELEMENTS
from sdflow.sources.architectures import architecture_config
from sdflow.sources.load import parameter_shapes
from sdflow.verify.lowering import lower
from tests.passes.conftest import fused_unet, tiny_unet  # noqa: F401

MOVING = Moving("sample", "timestep")
SIZES = {"batch": 4, "latent_height": 8, "latent_width": 8, "sequence": 77}
TIMESTEPS = (981.25, 500.0, 1.0)


def load(folder: Path) -> Any:
    return onnx.load(str(folder / "model.onnx"), load_external_data=False)


def session(model: Any, folder: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    # What ONNX Runtime fuses differs between the whole and its parts, and so does the rounding.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder.resolve()))
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def lowered(model: Any, folder: Path) -> Any:
    return session(lower(model).model, folder)


def steps(model: Any, parts: Parts) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Inputs for the whole UNet and for its parts: other latents in every step, equal in both halves of a batch."""
    random = np.random.default_rng(0)
    names = [item.name for item in model.graph.input]
    width = model.graph.input[2].type.tensor_type.shape.dim[2].dim_value
    text = random.standard_normal((4, 77, width)).astype(np.float32)
    whole, split = [], []
    for timestep in TIMESTEPS:
        sample = random.standard_normal((2, 4, 8, 8)).astype(np.float32)
        both = np.concatenate([sample, sample])
        values = [both, np.array([timestep], np.float32), text]
        whole.append(dict(zip(names, values, strict=True)))
        split.append({**whole[-1], "sample": both[: parts.latents]})
    return whole, split


def run_split(parts: Parts, sessions: Sequence[Any], feeds: Sequence[Mapping[str, Any]]) -> list[Any]:
    """What the whole UNet gives for each of `feeds`, computed by the parts.

    sessions: ONNX Runtime sessions of the text, timestep and step part. feeds: the UNet's inputs as arrays, one entry
    per step, `timestep` of shape [1]; the text's inputs are those of the first. With guidance, `sample` has `latents`
    rows.
    """
    text, timestep, step = sessions
    known = {item.name for item in text.get_inputs()}
    texts = text.run(list(parts.text_values), {k: v for k, v in feeds[0].items() if k in known})
    timesteps = np.concatenate([feed["timestep"] for feed in feeds])
    times = timestep.run(list(parts.time_values), {"timestep": timesteps})
    shapes = {item.name: item.shape for item in step.get_inputs()}
    results = []
    for index, feed in enumerate(feeds):
        given = dict(zip(parts.text_values, texts, strict=True))
        for name, value in zip(parts.time_values, times, strict=True):
            given[name] = np.repeat(value[index : index + 1], shapes[name][0], axis=0)
        given |= {name: value for name, value in feed.items() if name in shapes}
        results.append(step.run(["out_sample"], given)[0])
    return results


def assert_same(model: Any, folder: Path, open_session: Any, *, guidance: bool) -> Parts:
    parts = take_apart(model, SIZES, moving=MOVING, guidance=guidance)
    assert (parts.rows, parts.latents) == (4, 2 if guidance else 4)
    whole, split = steps(model, parts)
    reference = open_session(model, folder)
    sessions = [open_session(part, folder) for part in (parts.text, parts.timestep, parts.step)]
    results = run_split(parts, sessions, split)
    for feed, result in zip(whole, results, strict=True):
        expected = reference.run(None, feed)[0]
        assert expected.std() > 0.1
        np.testing.assert_allclose(result, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
    return parts


@pytest.mark.parametrize("guidance", [False, True])
def test_the_parts_give_what_the_unet_gives(tiny_pipeline: Path, guidance: bool) -> None:
    folder = tiny_pipeline / "unet"
    parts = assert_same(load(folder), folder, session, guidance=guidance)
    weights = parameter_shapes("unet", {"config": architecture_config("sd15-tiny", "unet")})
    assert len(parts.text_values) >= 2 * sum(name.endswith("attn2.to_k.weight") for name in weights), "K and V of each"
    assert len(parts.time_values) == sum(name.endswith("time_emb_proj.weight") for name in weights)


@pytest.mark.parametrize("guidance", [False, True])
def test_the_parts_of_a_graph_for_cuda_give_what_it_gives(fused_unet: Any, guidance: bool) -> None:  # noqa: F811
    model = load(fused_unet.path)
    parts = assert_same(model, fused_unet.path, lowered, guidance=guidance)
    attention = [node for node in parts.step.graph.node if node.op_type == "MultiHeadAttention"]
    crossed = [node for node in attention if node.input[1:2] and node.input[1] in parts.text_values]
    assert crossed and all(len(node.input) == 3 for node in crossed), "keys and values come unpacked"
    assert len(crossed) * 2 == len(parts.text_values)


def test_each_part_has_its_share_and_no_more(fused_unet: Any) -> None:  # noqa: F811
    model = load(fused_unet.path)
    parts = take_apart(model, SIZES, moving=MOVING, guidance=True)

    def weights(graph: Any) -> set[str]:
        return {tensor.name for tensor in graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL}

    text, timestep, step = (weights(part.graph) for part in (parts.text, parts.timestep, parts.step))
    assert text and timestep and not text & step and not timestep & step
    assert text | timestep | step == weights(model.graph)
    assert {item.name for item in parts.text.graph.input} == {"encoder_hidden_states"}
    assert {item.name for item in parts.timestep.graph.input} == {"timestep"}
    assert {item.name for item in parts.step.graph.input} == {"sample", *parts.text_values, *parts.time_values}
    first = next(node for node in parts.step.graph.node if node.op_type == "NhwcConv")
    shapes = {item.name: item.type.tensor_type.shape.dim[0].dim_value for item in parts.step.graph.input}
    assert shapes["sample"] == 2 and first.output[0].endswith("conv_in/Conv_output_0")


def test_a_batch_without_two_halves_is_an_error(fused_unet: Any) -> None:  # noqa: F811
    with pytest.raises(PassError, match="a batch of 3 cannot be halved"):
        take_apart(load(fused_unet.path), {**SIZES, "batch": 3}, moving=MOVING, guidance=True)


def test_a_scale_that_all_timesteps_would_share_is_refused(fused_unet: Any, tmp_path: Path) -> None:  # noqa: F811
    """A product that is quantized keeps the parts; not where all timesteps are computed at once."""

    def quantized(folder: Path, *keep: str) -> Any:
        folder.mkdir()
        QuantizeInt8().run(PassInputs("unet", fused_unet.path, {}), folder, QuantizeInt8Config(keep=keep))
        return load(folder)

    with pytest.raises(PassError, match="with one scale for all timesteps"):
        take_apart(quantized(tmp_path / "all"), SIZES, moving=MOVING, guidance=True)
    parts = take_apart(
        quantized(tmp_path / "kept", "*/time_embedding/*", "*/time_emb_proj/*"), SIZES, moving=MOVING, guidance=True
    )
    products = {
        part: [node.op_type for node in getattr(parts, part).graph.node] for part in ("text", "timestep", "step")
    }
    assert "MatMulIntegerToFloat" in products["step"] and "MatMulIntegerToFloat" not in products["timestep"]


@pytest.mark.parametrize("size", [FOLDED_ELEMENTS + 8, FOLDED_ELEMENTS // 3])
@pytest.mark.parametrize("guidance", [False, True])
def test_a_large_value_that_depends_on_no_input_is_computed_where_it_is_read(
    guidance: bool, size: int, tmp_path: Path
) -> None:
    """A table of cosines, larger than what is folded, that text, timestep, latents and all of them together read; and one that
    has a row for each image of the batch, which may be too large to be folded only for the whole batch."""
    whole = tabled(size)
    onnx.checker.check_model(whole, full_check=True)
    parts = take_apart(whole, {"batch": 4}, moving=MOVING, guidance=guidance)
    for part in (parts.text, parts.timestep, parts.step):
        onnx.checker.check_model(part)
    random = np.random.default_rng(0)
    text = random.standard_normal((4, size)).astype(np.float32)
    sessions = [session(part, tmp_path) for part in (parts.text, parts.timestep, parts.step)]
    for timestep in TIMESTEPS:
        sample = random.standard_normal((2, 1, 1, size)).astype(np.float32)
        feed = {"sample": np.concatenate([sample, sample]), "timestep": np.array([timestep], np.float32), "text": text}
        (result,) = run_split(parts, sessions, [{**feed, "sample": feed["sample"][: parts.latents]}])
        np.testing.assert_allclose(result, session(whole, tmp_path).run(None, feed)[0], rtol=2e-6, atol=1e-6)
    joined = [name for part in (parts.text, parts.step) for node in part.graph.node for name in node.output]
    assert len(joined) == len(set(joined)), "one file holds both"


def tabled(size: int) -> Any:
    """out_sample = (sample * table + timestep * table + text * table) * table + table, the last with a row for each image."""
    graph = f"""
        <ir_version: 8, opset_import: ["" : 17]>
        tables (float[batch, 1, 1, {size}] sample, float[1] timestep, float[batch, {size}] text)
        => (float[batch, 1, 1, {size}] out_sample)
        <float start = {{0}}, float end = {{{size}}}, float one = {{1}}, int64[2] row = {{1, {size}}}, int64[1] size = {{{size}}},
         int64[4] flat = {{0, 1, 1, {size}}}, int64[2] column = {{-1, 1}}, int64[1] first = {{0}}>
        {{
            numbers = Range(start, end, one)
            table = Cos(numbers)
            times = Reshape(timestep, column)
            timed = Mul(times, table)
            of_time = Reshape(timed, flat)
            scaled = Mul(sample, table)
            of_text = Mul(text, table)
            wide = Reshape(of_text, flat)
            shape = Shape(sample)
            batch = Gather(shape, first)
            both = Concat<axis = 0>(batch, size)
            lines = Reshape(table, row)
            rows = Expand(lines, both)
            all = Reshape(rows, flat)
            with_time = Add(scaled, of_time)
            with_text = Add(with_time, wide)
            again = Mul(with_text, table)
            out_sample = Add(again, all)
        }}
    """
    return onnx.parser.parse_model(graph)
