"""WebGPU's provider: what is told where it or its adapter is missing, and that it is none of ONNX Runtime's own packages."""

from __future__ import annotations

import pytest

from sdflow.errors import TargetUnavailableError
from sdflow.machine import providers
from sdflow.machine.packages import installed_version, onnxruntime_packages, versions
from sdflow.machine.providers import require_package
from sdflow.machine.webgpu import adapter_failure
from sdflow.targets import TARGETS

WEBGPU = "onnxruntime-ep-webgpu"


def test_a_plugin_that_is_not_installed_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "find_spec", lambda name: None)
    with pytest.raises(TargetUnavailableError) as told:
        require_package(TARGETS["webgpu"])
    assert told.value.what == f"the package {WEBGPU} is not installed"
    assert str(told.value.remedy).startswith("pip install 'sdflow[webgpu]'; it needs a GPU")
    assert "libvulkan.so.1" in str(told.value.remedy)


def test_a_failure_for_want_of_an_adapter_is_told_from_others() -> None:
    said = "x.cc:136 Initialize() was false. Failed to get a WebGPU adapter: No supported adapters\n\n"
    told = adapter_failure(RuntimeError(said), TARGETS["webgpu"])
    assert told is not None
    assert told.what.startswith("no WebGPU adapter: No supported adapters")
    assert adapter_failure(RuntimeError("out of memory"), TARGETS["webgpu"]) is None
    assert adapter_failure(RuntimeError(said), TARGETS["windowsml"]) is None


@pytest.mark.skipif(installed_version(WEBGPU) is None, reason=f"pip install {WEBGPU}")
def test_it_stands_beside_onnxruntime_and_is_in_reports() -> None:
    assert WEBGPU not in onnxruntime_packages()
    assert versions()[WEBGPU] == installed_version(WEBGPU)
    require_package(TARGETS["webgpu"])
