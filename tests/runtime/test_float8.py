"""Where float8 cannot be computed, it is said what it takes; on a GPU, it is what its definition says, captured too."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from sdflow.distance import relative_l2
from sdflow.errors import TargetUnavailableError
from sdflow.onnx_model.float8 import DOMAIN, FLOAT8_MATMUL
from sdflow.runtime.kernels.float8 import float8_library
from sdflow.runtime.kernels.float8_proof import dequantized, quantized


def test_without_a_device_it_is_said_what_float8_takes() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a device")
    with pytest.raises(
        TargetUnavailableError, match=r"float8 requires sdflow's own kernels.*(no CUDA device|Linux)"
    ) as raised:
        float8_library.__wrapped__()
    assert raised.value.where == "cuda"


def test_a_gpu_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    device = SimpleNamespace(name="NVIDIA A100-SXM4-80GB", major=8, minor=0, multi_processor_count=108)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    with pytest.raises(TargetUnavailableError, match=r"compute capability 8\.9.*A100-SXM4-80GB has 8\.0") as raised:
        float8_library.__wrapped__()
    assert raised.value.where == "cuda"
    assert "float16" in str(raised.value.remedy)


@pytest.mark.skipif(sys.platform != "linux", reason="sdflow's kernels are for Linux")
def test_a_user_without_a_folder_for_kernels_is_told_that_float8_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    device = SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    for name in ("SDFLOW_KERNELS", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)  # not in passwd
    with pytest.raises(TargetUnavailableError, match="float8 requires sdflow's own kernels: no folder for kernels"):
        float8_library.__wrapped__()


@pytest.mark.gpu
def test_float8_is_right_on_this_gpu_and_captured(tmp_path: Path) -> None:
    import torch

    from sdflow.runtime.sessions.session import create_session
    from sdflow.targets import TARGETS

    library = float8_library()
    assert library.exists()
    random = np.random.default_rng(0)
    x = random.normal(size=(2, 40, 640)).astype(np.float16)
    weight, scales = quantized(random.normal(size=(1280, 640)))
    stored = onnx.TensorProto(
        name="w", data_type=TensorProto.FLOAT8E4M3FN, dims=weight.shape, raw_data=weight.tobytes()
    )
    graph = helper.make_graph(
        [helper.make_node(FLOAT8_MATMUL, ["x", "w", "s"], ["y"], "product", domain=DOMAIN)],
        "test",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT16, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT16, (2, 40, 1280))],
        [stored, numpy_helper.from_array(scales, "s")],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), tmp_path / "model.onnx")
    session = create_session(tmp_path / "model.onnx", TARGETS["cuda"], capture=True)
    assert session.get_provider_options()["CUDAExecutionProvider"]["enable_cuda_graph"] == "1"
    given, made = torch.from_numpy(x).cuda(), torch.empty(2, 40, 1280, dtype=torch.float16, device="cuda")
    binding = session.io_binding()
    binding.bind_input("x", "cuda", 0, np.float16, x.shape, given.data_ptr())
    binding.bind_output("y", "cuda", 0, np.float16, made.shape, made.data_ptr())
    expected = dequantized(*quantized(x)) @ dequantized(weight, scales).T
    for _ in range(3):  # the first run is captured
        made.zero_()
        torch.cuda.synchronize()
        session.run_with_iobinding(binding)
        torch.cuda.synchronize()
        assert relative_l2(made.cpu().numpy(), expected) < 2e-3
