"""Graphs as the workflows build them for each target, lowered, against the PyTorch model that they come from."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from submodels import SUBMODELS, dummy_inputs, ports_of

from sdflow.sources import Checkpoint, load_module
from sdflow.verify.lowering import lower, session_of
from tests.weights.conftest import Builder, shared_builder, synthetic

REPOSITORY = Path(__file__).parents[3]
TARGETS = ["cuda", "rocm", "directml", "cpu"]

AT_MOST = 1.2
"""Of the distance that float16 in PyTorch has."""

PIXELS = 128
"""Of the tiny pipeline's image. With 64 its deepest level is 1x1 with two channels in a group: normalizing two values turns
the roundings before it around, and two runs in float16 differ by twice their distance to float32."""

CONTRIB = {
    "cuda": {"MultiHeadAttention", "GroupNorm", "SkipGroupNorm", "NhwcConv", "BiasSplitGelu", "BiasAdd"},
    "rocm": {"MultiHeadAttention", "GroupNorm", "NhwcConv"},
    "directml": {"MultiHeadAttention", "GroupNorm"},
    "cpu": {"Attention", "MultiHeadAttention"},
    "tensorrt": set(),
}


def torch_outputs(submodel: str, module: Any, inputs: dict[str, np.ndarray], dtype: Any) -> list[np.ndarray]:
    import torch

    given = {name: torch.from_numpy(value.copy()) for name, value in inputs.items()}
    for name, value in given.items():
        if value.is_floating_point() and name not in ("timestep", "images"):
            given[name] = value.to(dtype)
    with torch.no_grad():
        if submodel == "text_encoder":
            output = module(given["input_ids"].long())
            outputs = [output.last_hidden_state, output.pooler_output]
        elif submodel == "unet":
            outputs = [module(**given).sample]
        elif submodel == "vae_encoder":
            outputs = [module.encode(given["sample"]).latent_dist.mean]
        elif submodel == "vae_decoder":
            outputs = [module.decode(given["latent_sample"]).sample]
        else:
            images, _ = module(given["clip_input"], given["images"].numpy())
            return [images.astype(np.float64)]
    return [output.double().numpy() for output in outputs]


def lowered_outputs(folder: Path, inputs: dict[str, np.ndarray]) -> tuple[list[np.ndarray], Any]:
    import onnxruntime

    lowered = lower(onnx.load(str(folder / "model.onnx"), load_external_data=False))
    session: onnxruntime.InferenceSession = session_of(lowered, folder, threads=1)
    types = {"tensor(float16)": np.float16, "tensor(float)": np.float32, "tensor(int32)": np.int32}
    feeds = {item.name: inputs[item.name].astype(types[item.type]) for item in session.get_inputs()}
    return session.run(None, feeds), lowered


def distance(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(actual.astype(np.float64) - expected) / np.linalg.norm(expected))


def check(submodel: str, folder: Path, load: dict[str, Any], module: Any, target: str, pixels: int) -> Any:
    import torch

    inputs = dummy_inputs(submodel, load["config"], batch=2, height=pixels, width=pixels)
    for port in ports_of(submodel, load["config"]).inputs:  # what the target is fed, exactly representable
        if port.dtype == "float32" and port.name != "timestep":
            inputs[port.name] = inputs[port.name].astype(np.float16).astype(np.float32)
    exact = torch_outputs(submodel, module, inputs, torch.float32)
    half = torch_outputs(submodel, copy.deepcopy(module).half(), inputs, torch.float16)
    outputs, lowered = lowered_outputs(folder, inputs)
    for actual, expected, rounded in zip(outputs, exact, half, strict=False):
        if target == "cpu":
            assert distance(actual, expected) < 1e-4
        else:
            assert distance(actual, expected) <= AT_MOST * distance(rounded, expected) + 1e-6
            assert actual.dtype == np.float16
    return lowered


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    return shared_builder(tmp_path_factory, kept=True)


@pytest.mark.parametrize(
    "target", [pytest.param(each, marks=pytest.mark.slow) if each == "rocm" else each for each in TARGETS]
)
def test_a_small_unet_of_each_target_computes_what_pytorch_computes(target: str, built: Builder) -> None:
    load = synthetic("unet")
    lowered = check("unet", built.carried("unet", target), load, load_module("unet", load), target, 64)
    assert set(lowered.operators) >= CONTRIB[target]


@pytest.mark.slow
@pytest.mark.parametrize("target", [*TARGETS, "tensorrt"])
def test_the_tiny_pipeline_of_each_target_computes_what_pytorch_computes(
    target: str, tiny_checkpoint: Checkpoint, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    cache = request.config.cache.mkdir("lowering-pipelines")
    command = [sys.executable, "-m", "sdflow", "run", "workflows/tiny_cpu.yaml", "--target", target, "--no-evaluate"]
    command += ["--cache", str(cache), "--out", str(tmp_path), "--results", str(tmp_path / "results")]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    (pipeline,) = [folder for folder in tmp_path.iterdir() if (folder / "model_index.json").exists()]
    operators: set[str] = set()
    for submodel in SUBMODELS:
        load = dict(tiny_checkpoint.submodels[submodel].load)
        operators |= set(
            check(submodel, pipeline / submodel, load, load_module(submodel, load), target, PIXELS).operators
        )
    assert operators >= CONTRIB[target]
