"""A session is on the target's provider or it is an error; what a provider needs is said in words."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from sdflow.errors import TargetUnavailableError, VerificationError
from sdflow.machine.packages import onnxruntime_packages
from sdflow.machine.providers import choose_provider
from sdflow.processes.workers import clean_environment, python_command
from sdflow.runtime.sessions.availability import loader_errors, target_availability, try_target
from sdflow.runtime.sessions.dimensions import free_dimensions
from sdflow.runtime.sessions.session import LoadOptions, create_session, has_planar_bias, read_graph
from sdflow.runtime.sessions.tuning import Tuning
from sdflow.targets import TARGETS


def save_model(path: Path, nodes: list[onnx.NodeProto], domain: str = "") -> Path:
    """A model of x (batch, 4, rows, columns) and y (batch, 4) to z."""
    values = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4, "rows", "columns"]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4]),
    ]
    result = helper.make_tensor_value_info("z", TensorProto.FLOAT, None)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph(nodes, "test", values, [result])
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


def test_rocm_means_migraphx_with_a_current_onnxruntime_and_the_rocm_ep_with_an_old_one() -> None:
    rocm = TARGETS["rocm"]
    built = ["MIGraphXExecutionProvider", "ROCMExecutionProvider", "CPUExecutionProvider"]
    assert choose_provider(rocm, "1.27.1", built) == "MIGraphXExecutionProvider"
    assert choose_provider(rocm, "1.22.2", built) == "ROCMExecutionProvider"
    assert choose_provider(rocm, "1.22.2.post3", built) == "ROCMExecutionProvider"
    with pytest.raises(TargetUnavailableError, match=r"MIGraphXExecutionProvider needs ONNX Runtime 1.23 or later"):
        choose_provider(rocm, "1.22.0", ["MIGraphXExecutionProvider", "CPUExecutionProvider"])
    with pytest.raises(TargetUnavailableError, match=r"ROCMExecutionProvider needs ONNX Runtime 1.22 or earlier"):
        choose_provider(rocm, "1.31.1", ["CPUExecutionProvider"])


def test_a_missing_provider_is_an_error_and_never_the_cpu(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model.onnx", [helper.make_node("Neg", ["x"], ["z"])])
    with pytest.raises(TargetUnavailableError, match="built without CUDAExecutionProvider") as raised:
        create_session(model, TARGETS["cuda"])
    assert raised.value.exit_code == 5
    assert "onnxruntime-gpu" in str(raised.value)


def test_a_graph_without_a_kernel_on_the_provider_is_a_verification_error(tmp_path: Path) -> None:
    """GroupNorm of com.microsoft has no CPU kernel: what is fused for a GPU does not run on a CPU."""
    node = helper.make_node("GroupNorm", ["x", "y", "y"], ["z"], domain="com.microsoft", groups=2, epsilon=1e-5)
    node.attribute.append(helper.make_attribute("activation", 0))
    model = save_model(tmp_path / "model.onnx", [node])
    with pytest.raises(VerificationError, match=r"CPUExecutionProvider cannot run this graph.*GroupNorm"):
        create_session(model, TARGETS["cpu"])


@pytest.mark.parametrize(
    ("built_for", "says"),
    [
        ("directml", "built for directml: run it there, or build it for the CPU (sdflow run --target cpu)"),
        ("cpu", "remove the pass that creates this operator"),
        (None, "CPUExecutionProvider cannot run this graph: it has no kernel for"),
    ],
)
def test_a_kernel_that_is_missing_is_said_in_words(tmp_path: Path, built_for: str | None, says: str) -> None:
    node = helper.make_node(
        "GroupNorm", ["x", "y", "y"], ["z"], "norm_7", domain="com.microsoft", groups=2, epsilon=1e-5, activation=0
    )
    model = save_model(tmp_path / "model.onnx", [node])
    with pytest.raises(VerificationError) as raised:
        create_session(model, TARGETS["cpu"], LoadOptions(built_for=built_for))
    assert says in str(raised.value)
    assert re.search(r"no kernel for (com\.microsoft\.)?GroupNorm \(node norm_7\)", raised.value.what)
    assert "NOT_IMPLEMENTED" not in str(raised.value) and "ONNXRuntimeError" not in str(raised.value)


def test_named_dimensions_get_the_sizes_of_the_inputs(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model.onnx", [helper.make_node("Neg", ["x"], ["z"])])
    shapes = {"x": (2, 4, 8, 16), "y": (2, 4)}
    assert free_dimensions(read_graph(model), shapes, str(model)) == {"batch": 2, "rows": 8, "columns": 16}
    with pytest.raises(VerificationError, match="dimension batch has conflicting sizes 2 and 3"):
        free_dimensions(read_graph(model), {**shapes, "y": (3, 4)}, str(model))
    with pytest.raises(VerificationError, match="x has size 4, not 5"):
        free_dimensions(read_graph(model), {**shapes, "x": (2, 5, 8, 16)}, str(model))
    with pytest.raises(VerificationError, match="no shape is given for its input y"):
        free_dimensions(read_graph(model), {"x": (2, 4, 8, 16)}, str(model))


def test_a_target_with_static_shapes_fixes_them_in_the_session(tmp_path: Path) -> None:
    """What DirectML's settings do, seen on the provider that is here."""
    from dataclasses import replace

    model = save_model(tmp_path / "model.onnx", [helper.make_node("Neg", ["x"], ["z"])])
    target = replace(TARGETS["cpu"], session=TARGETS["directml"].session)
    session = create_session(model, target, shapes={"x": (2, 4, 8, 16), "y": (2, 4)})
    assert [value.shape for value in session.get_inputs()] == [[2, 4, 8, 16], [2, 4]]
    assert session.get_session_options().enable_mem_pattern is False


def test_availability_is_what_really_ran() -> None:
    assert try_target(TARGETS["cpu"]) == "CPUExecutionProvider"
    found = {one.target: one for one in target_availability()}
    assert list(found) == list(TARGETS)
    assert found["cpu"].available
    assert found["cpu"].provider == "CPUExecutionProvider"
    for name, one in found.items():
        built_in = set(onnxruntime.get_available_providers()) & {p for p, _, _ in TARGETS[name].providers}
        if not built_in:
            assert not one.available
            assert one.reason
            assert one.remedy
    assert "Windows only" in str(found["directml"].reason)


def test_the_installed_onnxruntime_is_found_without_importing_it() -> None:
    packages = onnxruntime_packages()
    assert len(packages) == 1
    assert next(iter(packages.values())) == onnxruntime.__version__


def test_what_the_loader_printed_becomes_the_reason() -> None:
    """As onnxruntime-gpu 1.31.1 prints it on a machine without CUDA's libraries."""
    printed = (
        "\x1b[1;31m2026-11-21 12:44:57.701569914 [E:onnxruntime:Default, provider_bridge_ort.cc:2458 operator()] "
        "provider_bridge_ort.cc:2043 onnxruntime::ProviderLibrary::Get() [ONNXRuntimeError] : 1 : "
        "FAIL : Failed to load library /env/onnxruntime/capi/libonnxruntime_providers_cuda.so with error: "
        "libcublasLt.so.13: cannot open shared object file: No such file or directory\n\x1b[m\n"
        "[W:onnxruntime:Default] Failed to create CUDAExecutionProvider. Require cuDNN 9.* and CUDA 13.*. Please"
    )
    found = loader_errors(printed)
    for name in ("libonnxruntime_providers_cuda.so", "libcublasLt.so.13", "No such file", "cuDNN 9.*", "CUDA 13"):
        assert name in found
    assert not re.search(r"\x1b|2026|provider_bridge|FAIL|/env/", found), "nothing of the loader's frame"


def test_onnxruntime_writes_nothing_at_home(tmp_path: Path) -> None:
    """It writes a device id under HOME on import unless its telemetry is off before."""
    environment = clean_environment(tmp_path)
    finished = subprocess.run(
        python_command("sdflow.runtime.sessions.availability", "cpu"), env=environment, capture_output=True, check=True
    )
    assert b'"available": true' in finished.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: data.write_bytes(data.read_bytes()[:-1]), r"w ends at byte 16 of model.onnx.data, which has 15"),
        (lambda data: data.unlink(), "its data file model.onnx.data is missing"),
        (lambda data: data.with_name("model.onnx").write_bytes(b"\xff" * 9), "is not an ONNX model"),
        (lambda data: data.with_name("model.onnx").unlink(), "there is no such file"),
    ],
)
def test_a_damaged_model_is_told_in_words_that_say_what_to_do(
    tmp_path: Path, damage: Callable[[Path], object], said: str
) -> None:
    model = save_model(tmp_path / "model.onnx", [helper.make_node("Add", ["y", "w"], ["z"])])
    loaded = onnx.load(model)
    loaded.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(4, np.float32), "w"))
    onnx.save(loaded, model, save_as_external_data=True, location="model.onnx.data", size_threshold=0)
    damage(model.with_name("model.onnx.data"))
    with pytest.raises(VerificationError, match=said) as raised:
        create_session(model, TARGETS["cpu"])
    assert "rebuild the pipeline" in str(raised.value)


def test_a_graph_on_which_onnxruntime_crashes_is_refused(tmp_path: Path) -> None:
    """It would end the process, with nothing said."""
    node = helper.make_node("LayerNormalization", ["x", "w", ""], ["z"], "norm", axis=-1)
    model = save_model(tmp_path / "model.onnx", [node])
    loaded = onnx.load(model)
    loaded.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(1, np.float32), "w"))
    onnx.save(loaded, model)
    with pytest.raises(VerificationError, match="ONNX Runtime crashes on norm: its bias has an empty name"):
        create_session(model, TARGETS["cpu"])
    del loaded.graph.node[0].input[2]
    onnx.save(loaded, model)
    assert create_session(model, TARGETS["cpu"]).get_outputs()[0].name == "z"


def test_threads_of_a_session_on_the_cpu_do_not_spin_once_a_run_is_done(tmp_path: Path) -> None:
    """Else they take the cores from the next submodel's threads."""
    model = save_model(tmp_path / "m.onnx", [helper.make_node("GlobalAveragePool", ["x"], ["z"])])
    options = create_session(model, TARGETS["cpu"]).get_session_options()
    assert options.get_session_config_entry("session.force_spinning_stop") == "1"
    again = LoadOptions(tuning=Tuning(session={"session.force_spinning_stop": "0"}))
    options = create_session(model, TARGETS["cpu"], again).get_session_options()
    assert options.get_session_config_entry("session.force_spinning_stop") == "0", "tuning has the last word"


@pytest.mark.parametrize(
    ("operator", "domain", "inputs", "expected"),
    [
        ("Conv", "", ["x", "y", "b"], True),
        ("Conv", "", ["x", "y"], False),
        ("Conv", "", ["x", "y", ""], False),
        ("NhwcConv", "com.microsoft", ["x", "y", "b"], False),
    ],
)
def test_cudnn_is_not_asked_to_fuse_the_bias_of_a_channels_first_convolution(
    operator: str, domain: str, inputs: list[str], expected: bool, tmp_path: Path
) -> None:
    model = save_model(tmp_path / "model.onnx", [helper.make_node(operator, inputs, ["z"], domain=domain)])
    assert has_planar_bias(onnx.load(model)) is expected


@pytest.mark.gpu
def test_a_patch_embedding_with_a_bias_runs_in_float16_on_cuda(tmp_path: Path) -> None:
    import torch

    random = np.random.default_rng(0)
    values = {"x": (2, 16, 128, 128), "w": (1536, 16, 2, 2), "b": (1536,)}
    made = {name: random.standard_normal(shape).astype(np.float16) for name, shape in values.items()}
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "w", "b"], ["z"], kernel_shape=[2, 2], strides=[2, 2])],
        "patches",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT16, values["x"])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT16, (2, 1536, 64, 64))],
        [onnx.numpy_helper.from_array(made[name], name) for name in ("w", "b")],
    )
    model = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), model)
    found = create_session(model, TARGETS["cuda"]).run(None, {"x": made["x"]})[0]
    x, w, b = (torch.from_numpy(made[name]).float() for name in ("x", "w", "b"))
    expected = torch.nn.functional.conv2d(x, w, b, stride=2)
    assert torch.allclose(torch.from_numpy(found).float(), expected, atol=0.05)
