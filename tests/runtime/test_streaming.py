"""Weights that are copied to the device while the model runs: the images are bit for bit those of weights that stay.

The CPU's operator copies in a thread of its own, which begins late, so that a reader that does not wait reads old values.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from beside_diffusers import put_together
from converted import Converted
from cuda_on_cpu import Gpu
from cuda_on_cpu import run as run_emulated
from onnx import TensorProto, helper

from sdflow.errors import UsageError
from sdflow.models.ports import Role
from sdflow.onnx_model.nodes import in_order
from sdflow.runtime.files.folder import (
    folder_defaults,
    folder_family,
    load_companions,
    load_submodel,
    onnx_submodels,
    read_options,
)
from sdflow.runtime.kernels.library import operator_library
from sdflow.runtime.pipeline import Pipeline
from sdflow.runtime.sessions.device_weights import DeviceWeights
from sdflow.runtime.sessions.session import LoadOptions, read_graph
from sdflow.runtime.sessions.spans import aligned
from sdflow.runtime.sessions.stream_plan import StreamBuffers, StreamPlan, buffer_size, stream_plan
from sdflow.runtime.sessions.streamed_graph import STREAM, Copy, Placed, with_streaming
from sdflow.runtime.sessions.tuning import Tuning
from sdflow.sources import PlainDigests, open_checkpoint
from sdflow.targets import TARGETS

SHARES = {"sd35-tiny": 0.5, "flux2-tiny": 0.4, "z-image-tiny": 0.3, "sdxl-tiny": 0.6}
"""Architecture -> how much of the denoiser's weights stays, so that some are streamed in every step."""
ALIKE = ("sd35-tiny", "z-image-tiny")
"""A transformer with its text encoders, as FLUX.2 is, which has blocks of both kinds."""
LEAST, SEGMENT = 1 << 10, 1 << 15
DELAY = 200
PLAIN = "ORT_DISABLE_ALL"


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, marks=pytest.mark.slow) if each in ALIKE else each for each in SHARES],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, converted: Converted) -> Path:
    checkpoint = open_checkpoint(f"synthetic:{request.param}", digests=PlainDigests(), download=False)
    return put_together(checkpoint, converted, tmp_path_factory.mktemp("streams") / request.param)


def plan_of(folder: Path, name: str, latents: str | None, share: float) -> StreamPlan:
    """Of a submodel, keeping this share of its weights."""
    path = folder / name / "model.onnx"
    graph = read_graph(path)
    buffers = StreamBuffers(buffer_size(graph, least=LEAST, segment=SEGMENT))
    room = int(share * path.with_name("model.onnx.data").stat().st_size)
    plan = stream_plan(graph, room, buffers, latents, least=LEAST)
    assert plan is not None and plan.resident <= room
    return plan


def drawn(folder: Path, plans: dict[str, StreamPlan]) -> np.ndarray:
    family, target = folder_family(folder), TARGETS["cpu"]
    # What ONNX Runtime does to constants alone on the CPU, and fuses in graphs that were not fused, changes the last bits.
    options = LoadOptions(threads=1, tuning=Tuning(session={"session.disable_prepacking": "1"}, optimization=PLAIN))
    loaded = {
        name: load_submodel(folder, name, target, lazy=True, options=options, plan=plans.get(name), delay=DELAY)
        for name in onnx_submodels(folder)
    }
    pipeline = Pipeline(family, loaded, load_companions(folder), read_options(folder), defaults=folder_defaults(folder))
    random = torch.Generator().manual_seed(1)
    return np.asarray(pipeline("a fox", num_inference_steps=3, generator=random, output_type="latent").images)


def test_an_image_with_streamed_weights_has_the_same_bits(folder: Path) -> None:
    """The denoiser in parts, and the text encoders, each beside a session of the same fixed shapes."""
    family = folder_family(folder)
    names = (family.denoiser, *family.text_of(onnx_submodels(folder)))
    resident = drawn(folder, dict.fromkeys(names, StreamPlan((), 0, 0, StreamBuffers(0))))
    denoiser = load_submodel(folder, family.denoiser, TARGETS["cpu"], lazy=True)
    plans = {family.denoiser: plan_of(folder, family.denoiser, denoiser.port(Role.LATENTS), SHARES[folder.name])}
    plans |= {name: plan_of(folder, name, None, 1.0) for name in names[1:]}
    assert all(len(plan.streamed) > 4 for plan in plans.values()) and plans[family.denoiser].per_run
    moved = ctypes.CDLL(str(operator_library())).sdflow_moved_bytes
    before = moved()
    np.testing.assert_array_equal(drawn(folder, plans), resident)
    assert resident.std() > 0.1
    assert moved() == before, "values pass in place"


COUNT, WIDTH = 9, 64
ROW = WIDTH * WIDTH * 4


def chain() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """x -> products one after another; every third also has a branch of its own, which joins at the end."""
    random = np.random.default_rng(0)
    weights = {f"w{i}": random.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 8 for i in range(COUNT)}
    nodes, value, branches = [], "x", []
    for i in range(COUNT):
        if i % 3 == 2:
            nodes.append(helper.make_node("MatMul", ["x", f"w{i}"], [f"branch{i}"], f"n{i}"))
            branches.append(f"branch{i}")
            continue
        nodes.append(helper.make_node("MatMul", [value, f"w{i}"], [f"v{i}"], f"n{i}"))
        value = f"v{i}"
    nodes.append(helper.make_node("Sum", [value, *branches], ["y"]))
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, WIDTH]) for name in ("x", "y")]
    constants = [onnx.numpy_helper.from_array(each, name) for name, each in weights.items()]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), weights


Change = Callable[[onnx.ModelProto], None]


def run_chain(change: Change = lambda model: None, gpu: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """What the streamed chain gives after a change of its graph in three runs, and what it must give. gpu: whose library
    it runs with."""
    model, weights = chain()
    buffers = np.zeros((2, 2 * ROW), np.uint8)

    def copies(placed: Sequence[Placed]) -> Iterable[Copy]:
        for each in placed:
            yield Copy(weights[each.weight].ctypes.data, buffers[each.buffer].ctypes.data + each.offset, ROW)

    streamed, placed = with_streaming(model, dict.fromkeys(weights, ROW), 2 * ROW, copies, delay=5000)
    assert len(placed) == COUNT and not streamed.graph.initializer
    change(streamed)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.register_custom_ops_library(str(operator_library(gpu)))
    session = onnxruntime.InferenceSession(streamed.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found = []
    for number in range(3):
        x = np.random.default_rng(number).standard_normal((2, WIDTH)).astype(np.float32)
        binding = session.io_binding()
        binding.bind_cpu_input("x", x)
        for each in placed:
            at = buffers[each.buffer].ctypes.data + each.offset
            binding.bind_input(each.name, "cpu", 0, np.float32, [WIDTH, WIDTH], at)
        binding.bind_output("y")
        session.run_with_iobinding(binding)
        inner = [i for i in range(COUNT) if i % 3 != 2]
        expected = np.linalg.multi_dot([x, *(weights[f"w{i}"] for i in inner)]) + x @ sum(
            weights[f"w{i}"] for i in range(2, COUNT, 3)
        )
        found.append((binding.copy_outputs_to_cpu()[0], expected))
    return found


def streams(model: onnx.ModelProto) -> list[Any]:
    return [node for node in model.graph.node if node.op_type == STREAM]


def set_attribute(node: Any, name: str, value: int) -> None:
    next(item for item in node.attribute if item.name == name).i = value


def attribute(node: Any, name: str) -> int:
    return int(next(item.i for item in node.attribute if item.name == name))


def test_readers_read_their_own_weights_also_while_another_gpus_library_streams() -> None:
    with ThreadPoolExecutor() as pool:
        both = list(pool.map(lambda gpu: run_chain(gpu=gpu), (0, 1)))
    for found, expected in (*both[0], *both[1]):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def without_waiting(model: onnx.ModelProto) -> None:
    set_attribute(streams(model)[2], "waits", 0)


def of_another_segment(model: onnx.ModelProto) -> None:
    first, second = streams(model)[1:3]
    set_attribute(first, "from0", attribute(second, "from0"))


def into_the_buffer_in_use(model: onnx.ModelProto) -> None:
    first, second = streams(model)[1:3]
    set_attribute(first, "to0", attribute(second, "to0"))
    set_attribute(first, "delay", 0)


def one_too_few(model: onnx.ModelProto) -> None:
    node = streams(model)[1]
    set_attribute(node, "count", attribute(node, "count") - 1)


@pytest.mark.parametrize("fault", [without_waiting, of_another_segment, into_the_buffer_in_use, one_too_few])
def test_a_fault_in_the_copies_shows(fault: Change) -> None:
    differ = [not np.allclose(found, expected, rtol=1e-2, atol=1e-2) for found, expected in run_chain(fault)]
    assert any(differ)


def test_readers_come_between_their_copies_in_any_order_of_the_nodes() -> None:
    """Along the graph's edges alone: each after the node that waits for its weights, and before the one that lets the next
    segment but one overwrite them."""
    model, _ = chain()
    weights = {tensor.name: ROW for tensor in model.graph.initializer}
    made, placed = with_streaming(model, weights, 2 * ROW, lambda placed: [])
    producers = {name: node for node in made.graph.node for name in node.output}

    def before(node: Any) -> set[str]:
        nodes = {producers[name].name: producers[name] for name in node.input if name in producers}
        return set(nodes).union(*(before(each) for each in nodes.values()))

    order = [node.name for node in streams(made)]
    assert order == [f"/stream/{i}" for i in range(len(order))] and len(order) == 1 + -(-COUNT // 2)
    segments = [placed[i : i + 2] for i in range(0, COUNT, 2)]
    for number, segment in enumerate(segments, 1):
        for each in segment:
            reader = next(node for node in made.graph.node if each.name in node.input)
            assert order[number] in before(reader)
            assert number == len(segments) or reader.name in before(streams(made)[number + 1])
            assert each.buffer == number % 2
    assert order[0] in before(streams(made)[1])


def test_onnx_runtime_fuses_what_it_fuses_without_streaming(tmp_path: Path) -> None:
    """Products with their biases, also where a branch ends in a later segment."""
    model, weights = chain()
    bias = onnx.numpy_helper.from_array(np.ones(WIDTH, np.float32), "bias")
    nodes = [node for node in model.graph.node if node.op_type == "MatMul"]
    for node in nodes:
        model.graph.node.append(helper.make_node("Add", [f"{node.output[0]}/product", "bias"], [node.output[0]]))
        node.output[0] += "/product"
    model.graph.initializer.append(bias)
    ordered = [type(node).FromString(node.SerializeToString()) for node in in_order(model.graph.node)]
    del model.graph.node[:]
    model.graph.node.extend(ordered)
    streamed, _ = with_streaming(model, dict.fromkeys(weights, ROW), 2 * ROW, lambda placed: [])
    made = []
    for number, each in enumerate((model, streamed)):
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / f"{number}.onnx")
        options.register_custom_ops_library(str(operator_library()))
        onnxruntime.InferenceSession(each.SerializeToString(), options, providers=["CPUExecutionProvider"])
        optimized = onnx.load(options.optimized_model_filepath)
        made.append(Counter(node.op_type for node in optimized.graph.node if node.op_type != STREAM))
    assert made[0] == made[1] and made[0]["Gemm"] == COUNT


def test_as_few_weights_as_necessary_are_streamed_evenly_and_those_of_the_text_first(tmp_path: Path) -> None:
    sizes = {"text": 3 << 20, "bias": 4 << 10, **{f"w{i}": 2 << 20 for i in range(20)}}
    tensors, offset = [], 0
    for name, size in sizes.items():
        tensor = TensorProto(name=name, data_type=TensorProto.FLOAT16, dims=[size // 2], data_location=1)
        for key, value in (("location", "data"), ("offset", offset), ("length", size)):
            tensor.external_data.add(key=key, value=str(value))
        tensors.append(tensor)
        offset += size
    nodes = [helper.make_node("MatMul", ["prompt", "text"], ["condition"])]
    nodes += [helper.make_node("MatMul", [f"v{i}", f"w{i}"], [f"v{i + 1}"]) for i in range(20)]
    nodes += [helper.make_node("Sum", ["v20", "condition", "bias"], ["y"])]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, None) for name in ("v0", "prompt")]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT16, None)]
    model = helper.make_model(helper.make_graph(nodes, "g", inputs, outputs, tensors))
    buffers, total = StreamBuffers(buffer_size(model)), sum(sizes.values())
    assert buffers.size == 43 << 20
    number = {
        offset: name for (name, _), offset in zip(sizes.items(), np.cumsum([0, *sizes.values()]).tolist(), strict=False)
    }

    def streamed(room: int, latents: str | None = "v0") -> list[str] | None:
        plan = stream_plan(model, room, buffers, latents)
        return None if plan is None else [number[offset] for _, offset, _ in plan.streamed]

    assert streamed(total - 1) == ["text"]
    assert streamed(total - (7 << 20)) == ["text", "w9", "w19"]
    found = streamed(total - (3 << 20) - (10 << 20))
    assert found is not None and found[0] == "text"
    places = [int(name[1:]) for name in found[1:]]
    assert len(places) == 5 and max(np.diff([-1, *places])) - min(np.diff([-1, *places])) <= 1
    assert streamed(total, None) == ["text", *(f"w{i}" for i in range(20))]
    assert streamed(aligned(sizes["bias"]) - 1) is None


def test_loras_per_request_are_refused(folder: Path) -> None:
    name = folder_family(folder).denoiser
    weights = DeviceWeights(folder / name / "model.onnx", "cpu", plan=plan_of(folder, name, None, 1.0))
    with pytest.raises(UsageError, match="LoRAs cannot be chosen per request"):
        weights.tensors(["any"])


ONE = {"from0": 1 << 40, "to0": 1 << 41, "bytes0": 1 << 33}


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        (
            {"waits": 0, "count": 1, **ONE},
            [
                "session: record event 0",
                "copies: wait for event 0",
                f"copies: copy {1 << 33} bytes from {1 << 40} to {1 << 41}",
            ],
        ),
        (
            {"waits": 1, "count": 1, **ONE},
            [
                "copies: record event 1",
                "session: wait for event 1",
                "session: record event 0",
                "copies: wait for event 0",
                f"copies: copy {1 << 33} bytes from {1 << 40} to {1 << 41}",
            ],
        ),
        ({"waits": 1, "count": 0}, ["copies: record event 1", "session: wait for event 1"]),
    ],
)
def test_on_cuda_events_order_the_copies_with_the_session(
    program: Path, tmp_path: Path, attributes: dict[str, float], expected: list[str]
) -> None:
    """What is queued, with an emulated driver."""
    values = [np.arange(6, dtype=np.float16).reshape(2, 3), np.ones(5, np.float32)]
    queued, outputs = run_emulated(program, tmp_path, Gpu(132), STREAM, [*values], 1, {"delay": 0, **attributes})
    assert queued == [*expected, "session: pass 12 bytes"]
    assert outputs == [values[0].tobytes()]
