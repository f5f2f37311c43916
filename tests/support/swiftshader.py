"""SwiftShader, the Vulkan device that the processor emulates: what the tests of WebGPU run on, without a GPU.

Debian's chromium brings it, and Vulkan's loader. Where it lies elsewhere, VULKAN_FOLDER names the folder of
vk_swiftshader_icd.json, libvk_swiftshader.so and, unless the system has one, libvulkan.so.1.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

FOLDERS = ("/usr/lib/chromium", "/usr/lib/chromium-browser", "/opt/google/chrome")
ICD = "vk_swiftshader_icd.json"
INSTALL = "apt-get install chromium libvulkan1, and pip install onnxruntime-ep-webgpu==0.4.0"


def missing() -> str | None:
    """What is not here, and how to get it; None where all is."""
    if find_spec("onnxruntime_ep_webgpu") is None:
        return f"ONNX Runtime's WebGPU provider is not installed: {INSTALL}"
    if _folder() is None:
        return f"SwiftShader is not installed (no {ICD} in {', '.join(FOLDERS)}, nor in VULKAN_FOLDER): {INSTALL}"
    if _loader() is None:
        return f"Vulkan's loader is not installed (no libvulkan.so.1): {INSTALL}"
    return None


@contextmanager
def swiftshader() -> Iterator[None]:
    """In here, this process and those that it starts find SwiftShader, and WebGPU takes it."""
    folder, loader = _folder(), _loader()
    assert folder is not None and loader is not None, missing()
    ctypes.CDLL(loader, mode=ctypes.RTLD_GLOBAL)  # it is found by its name from now on
    paths = [str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    changed = {
        "VK_ICD_FILENAMES": str(folder / ICD),
        "VK_DRIVER_FILES": str(folder / ICD),
        "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER": "1",
        "LD_LIBRARY_PATH": os.pathsep.join(paths),  # processes that start find the loader
    }
    with mock.patch.dict(os.environ, changed):
        yield


def _folder() -> Path | None:
    named = [os.environ["VULKAN_FOLDER"]] if "VULKAN_FOLDER" in os.environ else []
    return next((Path(each) for each in (*named, *FOLDERS) if (Path(each) / ICD).is_file()), None)


def _loader() -> str | None:
    folder = _folder()
    for name in ("libvulkan.so.1", *([str(folder / "libvulkan.so.1")] if folder else [])):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return name
    return None
