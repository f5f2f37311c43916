"""The weights that an engine takes: what they are in, and how much memory they want."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sdflow.artifact import MODEL_FILE
from sdflow.bench.device import Device
from sdflow.bench.engines import Engine
from sdflow.manifest import read_manifest
from sdflow.onnx_model.facts import precision_of
from sdflow.runtime.files.folder import folder_family, refiner_of

if TYPE_CHECKING:
    import torch


def dtype_of(folder: Path, engine: Engine, device: Device) -> str:
    """What the denoiser's weights are in: PyTorch's float16 on a GPU; a graph's as built; TensorRT makes its own float16."""
    if not engine.target:
        return "float16" if device.kind == "cuda" else "float32"
    if engine.target == "tensorrt":
        return "float16"
    import onnx

    graph = onnx.load(folder / folder_family(folder).denoiser / MODEL_FILE, load_external_data=False).graph
    return precision_of(graph)


def quantized_of(folder: Path, engine: Engine) -> str:
    """What weights are quantized to and in which submodels, "int8 in unet"; "" where none is. PyTorch's are as they were."""
    found: dict[str, list[str]] = {}
    for name, to in read_manifest(folder).origin.quantized.items() if engine.target else ():
        found.setdefault(to, []).append(name)
    return ", ".join(f"{to} in {' and '.join(names)}" for to, names in found.items())


def weight_bytes(folder: Path, engine: Engine, device: Device, modules: Mapping[str, torch.nn.Module]) -> int:
    """What loading an engine adds, in bytes. modules: PyTorch's, which are in memory already."""
    if engine.target:
        refiner = refiner_of(folder)
        folders = {(folder / name).resolve() for name in folder_family(folder).drawing}
        if refiner is not None:
            folders |= {(refiner / name).resolve() for name in folder_family(refiner).drawing}
        return sum(path.stat().st_size for each in folders for path in each.rglob("*"))
    if device.kind == "cpu":
        return 0  # the modules' own memory is used
    different = {id(module): module for module in modules.values()}
    return sum(2 * parameter.numel() for module in different.values() for parameter in module.parameters())
