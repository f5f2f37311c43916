"""Providers as plugins. OpenVINO's is the real one, where it is installed (`pip install onnxruntime-ep-openvino`): it offers the
CPU where that is Intel's, and no device elsewhere. Windows ML's catalogue is a stand-in: its package is for Windows alone."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sdflow.errors import TargetUnavailableError
from sdflow.machine.device import nvidia_gpu
from sdflow.machine.plugins import CATALOGUE, device_title, display_drivers
from sdflow.machine.providers import choose_provider, require_package
from sdflow.targets import TARGETS, Target

ROOT = Path(__file__).parents[2]

ASK = """
import json, sys
from sdflow.machine.onnx_runtime import import_onnxruntime
from sdflow.machine.plugins import device_facts, plugins_of
from sdflow.targets import Target

ort = import_onnxruntime()
plugins = json.loads(sys.argv[1])
target = Target("t", "T", tuple((name, None, None) for name in plugins), "the-package", plugins=plugins)
for again in range(2):
    found = plugins_of(ort, target)
devices = {name: [device_facts(each) for each in those] for name, those in found.devices.items()}
print(json.dumps({"devices": devices, "missing": dict(found.missing), "registered": ort.get_available_providers()}))
"""


def asked(plugins: dict[str, str], path: Path | None = None) -> dict[str, Any]:
    """What a process of its own finds: libraries are registered for a whole process."""
    paths = [str(ROOT), *([str(path)] if path else []), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(plugins)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_packages_that_are_missing_or_broken_are_told_and_the_others_tried(tmp_path: Path) -> None:
    (tmp_path / "broken_plugin.py").write_text("def get_library_path():\n    return __file__\n")
    (tmp_path / "empty_plugin.py").write_text(
        "def get_library_path():\n    raise FileNotFoundError('it is not there')\n"
    )
    found = asked({"AProvider": "no_such_plugin", "BProvider": "broken_plugin", "CProvider": "empty_plugin"}, tmp_path)
    assert found["devices"] == {}
    assert found["missing"]["AProvider"].startswith("the package the-package is not installed")
    assert found["missing"]["BProvider"].startswith("its library cannot be loaded: ")
    assert found["missing"]["CProvider"] == "the package the-package cannot be loaded: it is not there"


STAND_IN = """
import enum

class EpReadyState(enum.IntEnum):
    Ready = 0
    NotReady = 1
    NotPresent = 2

class Provider:
    def __init__(self, name, state):
        self.name, self.ready_state, self.library_path = name, state, __file__
    def ensure_ready(self):
        assert self.ready_state != EpReadyState.NotPresent, "this would download it"
        if self.name.startswith("QNN"):
            raise OSError("its files are damaged")

class EpCatalog:
    def find_all_providers(self):
        return [
            Provider("NvTensorRtRtxExecutionProvider", EpReadyState.NotPresent),
            Provider("QNNExecutionProvider", EpReadyState.NotReady),
            Provider("OpenVINOExecutionProvider", EpReadyState.NotReady),
            Provider("SomebodysExecutionProvider", EpReadyState.Ready),
        ]
"""


def test_of_windows_mls_catalogue_what_is_there_is_taken_and_nothing_is_downloaded(tmp_path: Path) -> None:
    (tmp_path / "windowsml.py").write_text(STAND_IN)
    missing = asked(dict(TARGETS["windowsml"].plugins), tmp_path)["missing"]
    assert list(missing) == [provider for provider, _, _ in TARGETS["windowsml"].providers]
    rtx, migraphx, openvino, *_ = missing.values()
    assert rtx.endswith("is not downloaded; python -m sdflow.machine.windows_ml does that")
    assert migraphx == "Windows ML's catalogue does not offer it for this machine"
    assert openvino.startswith("its library cannot be loaded: "), "it was tried, whatever its state"
    assert missing["QNNExecutionProvider"] == "Windows ML cannot make it ready: its files are damaged"


@pytest.mark.skipif(
    importlib.util.find_spec("onnxruntime_ep_openvino") is None, reason="pip install onnxruntime-ep-openvino"
)
def test_a_real_plugin_is_registered_once_and_offers_its_devices_or_says_that_it_has_none() -> None:
    found = asked({"OpenVINOExecutionProvider": "onnxruntime_ep_openvino"})
    devices = found["devices"].get("OpenVINOExecutionProvider", [])
    if not devices:
        assert found["missing"] == {"OpenVINOExecutionProvider": "it finds no device on this machine"}
    for each in devices:
        assert each["vendor"] and each["version"] and each["kind"] in ("CPU", "GPU", "NPU")
        assert not {"library_path", "LUID"} & each.keys(), "what differs from boot to boot is in no key"


def test_a_target_of_plugins_says_what_to_install_and_why_each_provider_is_missing() -> None:
    target = TARGETS["nv_tensorrt_rtx"]
    provider = target.providers[0][0]
    with pytest.raises(TargetUnavailableError) as raised:
        choose_provider(target, "1.31.1", [], {provider: "it finds no device on this machine"})
    assert str(raised.value).startswith(f"nv_tensorrt_rtx: {provider}: it finds no device on this machine")
    assert "sdflow[nv-tensorrt-rtx]" in str(raised.value)
    assert choose_provider(target, "1.31.1", [provider]) == provider
    with pytest.raises(TargetUnavailableError, match=r"needs ONNX Runtime 1\.24 or later"):
        choose_provider(target, "1.23.2", [provider])


@pytest.mark.parametrize(
    ("vendor", "number", "metadata", "title"),
    [
        ("", 0x10DE, {"Discrete": "1", "pci_bus_id": "0000:00:06.0"}, "NVIDIA GPU 0x2330"),  # an H100 on Linux
        ("", 0x1002, {"card_idx": "0"}, "AMD GPU 0x2330"),
        ("", 0x1AE0, {}, "vendor 0x1ae0 GPU 0x2330"),
        ("Intel", 0x8086, {"Description": "Intel(R) Arc(TM) A770", "LUID": "7"}, "Intel(R) Arc(TM) A770"),
    ],
)
@pytest.mark.skipif(nvidia_gpu() is not None, reason="NVIDIA's driver names it there")
def test_a_device_has_a_title(vendor: str, number: int, metadata: dict[str, str], title: str) -> None:
    """By what ONNX Runtime says of a device, on Linux and on Windows."""
    kind = "OrtHardwareDeviceType.GPU"
    hardware = SimpleNamespace(vendor=vendor, vendor_id=number, device_id=0x2330, type=kind, metadata=metadata)
    assert device_title(SimpleNamespace(device=hardware, ep_metadata={"version": "0.4.0"})) == title


def test_the_first_provider_that_the_machine_has_is_taken() -> None:
    names = [provider for provider, _, _ in TARGETS["windowsml"].providers]
    target = Target("w", "W", TARGETS["windowsml"].providers, "windowsml", plugins=dict.fromkeys(names, CATALOGUE))
    missing = dict.fromkeys(names[:2], "not here")
    assert choose_provider(target, "1.28.3", names[2:], missing) == "OpenVINOExecutionProvider"


@pytest.mark.skipif(sys.platform == "win32", reason="there it runs")
def test_windows_ml_is_told_to_be_on_windows_only() -> None:
    with pytest.raises(TargetUnavailableError, match="it runs on Windows only"):
        require_package(TARGETS["windowsml"])
    assert display_drivers() == []
    done = subprocess.run([sys.executable, "-m", "sdflow.machine.windows_ml"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (5, "Windows ML is on Windows only\n")


def test_a_plugins_package_is_no_second_onnx_runtime(tmp_path: Path) -> None:
    """Two of ONNX Runtime's packages overwrite each other's files; a plugin lies beside them."""
    for name in ("onnxruntime_ep_nv_tensorrt_rtx_cu13", "onnxruntime_qnn", "onnxruntime_directml"):
        (folder := tmp_path / f"{name}-9.9.dist-info").mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\n")
    code = (
        "import json; from sdflow.machine import packages as p;"
        "print(json.dumps([list(p.onnxruntime_packages()), list(p.plugin_packages()), list(p.versions())]))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    runtimes, plugins, versions = json.loads(done.stdout)
    assert "onnxruntime-directml" in runtimes
    assert {"onnxruntime-ep-nv-tensorrt-rtx-cu13", "onnxruntime-qnn"} <= set(plugins)
    assert not set(plugins) & set(runtimes)
    assert {*plugins, *runtimes} <= set(versions), "a report tells both"
