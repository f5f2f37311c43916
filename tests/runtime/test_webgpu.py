"""What is built for WebGPU draws on it, on SwiftShader, what diffusers draws: every family, float32, fused as its workflow says.

The provider runs every node, and attention is right although SwiftShader is one of the adapters that the provider's own kernel is
wrong on.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import swiftshader
import torch
from beside_diffusers import PROMPT, generator, pattern
from converted import Converted
from on_webgpu import TOLERANCE, Built, assert_on_webgpu
from onnx import helper

from sdflow.artifact import MODEL_FILE
from sdflow.errors import SlowerWarning, VerificationError
from sdflow.machine.device import processor
from sdflow.runtime.files.folder import load_submodel
from sdflow.runtime.pipeline import Pipeline
from sdflow.runtime.sessions.availability import target_availability
from sdflow.runtime.sessions.bound import Bound
from sdflow.runtime.sessions.place import place
from sdflow.runtime.sessions.session import create_session
from sdflow.targets import TARGETS
from sdflow.verify.artifact.unsupported_nodes import fits
from sdflow.verify.finding import errors

MISSING = swiftshader.missing()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=MISSING or "")

WEBGPU = TARGETS["webgpu"]
SIZE: dict[str, Any] = {"height": 64, "width": 64, "num_inference_steps": 1, "output_type": "np"}
SLOW = pytest.mark.slow
FAMILIES: dict[str, dict[str, Any]] = {
    "tiny": {"guidance_scale": 1.0},
    "sdxl_tiny": {"guidance_scale": 5.0},
    "sd35_tiny": {"guidance_scale": 5.0, "max_sequence_length": 32},
    "flux1_schnell_tiny": {"max_sequence_length": 32},
    "flux2_tiny": {"max_sequence_length": 64},
    "z_image_tiny": {"guidance_scale": 0.0},
}
"""Shipped workflow -> what drawing with it is told besides. `tests/bench/test_bench_on_webgpu.py` draws with guidance."""
OF_A_KIND = ("sdxl_tiny", "flux1_schnell_tiny", "flux2_tiny", "z_image_tiny")
"""SwiftShader is slow. The others have every operator of XL and FLUX.1, and all but a few of FLUX.2 and Z-Image."""
FUSED = {
    "tiny": {
        "Attention": 16,
        "MultiHeadAttention": 16,
        "LayerNormalization": 16,
        "SkipLayerNormalization": 32,
        "Gelu": 16,
        "BiasSplitGelu": 0,
        "BiasAdd": 0,
        "GroupNorm": 0,
        "NhwcConv": 0,
    },
}
"""What the denoiser has, of an architecture that is at full size a base workflow's."""


@pytest.fixture(scope="module", autouse=True)
def emulated() -> Iterator[None]:
    with swiftshader.swiftshader():
        yield


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=SLOW) if name in OF_A_KIND else name for name in FAMILIES]
)
def built(request: pytest.FixtureRequest, converted: Converted, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(request.param, tmp_path_factory.mktemp(request.param), converted)


@pytest.mark.once("built", list(FAMILIES).index("sd35_tiny"))
@pytest.mark.filterwarnings("ignore::sdflow.errors.SlowerWarning")
def test_a_family_draws_what_diffusers_draws(built: Built) -> None:
    """Stable Diffusion by default in `tests/bench/test_bench_on_webgpu.py`, with fewer blocks: its image is held to PyTorch's."""
    settings = {**SIZE, **FAMILIES[built.workflow]}
    ours = Pipeline.load(built.folder, "webgpu")
    drawn = ours(PROMPT, generator=generator(), **settings).images
    expected = built.theirs(PROMPT, generator=generator(), **settings).images
    assert expected.std() > 0.05, "an image of one colour would prove nothing"
    assert drawn.shape == expected.shape
    assert np.abs(drawn - expected).max() < TOLERANCE
    assert_on_webgpu(ours, built.folder)


def test_its_graphs_are_fused_and_fit_the_table_of_kernels(built: Built) -> None:
    denoiser = built.checkpoint.family.denoiser
    operators = Counter(node.op_type for node in built.graph(denoiser).graph.node)
    assert operators["MultiHeadAttention"] > 0
    assert {name: operators[name] for name in FUSED.get(built.workflow, {})} == FUSED.get(built.workflow, {})
    for name in (path.parent.name for path in built.folder.glob(f"*/{MODEL_FILE}")):
        part = built.checkpoint.family.part(name)
        config = json.loads((built.folder / name / "config.json").read_text())
        read = None if part.read is None else part.read(config)
        assert errors(fits(built.graph(name), WEBGPU, name, read=read)) == [], name


@pytest.mark.filterwarnings("ignore::sdflow.errors.SlowerWarning")
def test_the_vaes_encoder_gives_what_diffusers_gives(built: Built) -> None:
    if built.workflow != "tiny":
        pytest.skip("one family is enough: the class is the same")
    pixels = np.asarray(pattern(1, 32, 32), np.float32)[None].transpose(0, 3, 1, 2) / 127.5 - 1
    encoder = load_submodel(built.folder, "vae_encoder", WEBGPU, lazy=True)
    (found,) = encoder(sample=pixels).values()
    with torch.no_grad():
        expected = built.theirs.vae.encode(torch.from_numpy(pixels)).latent_dist.mode().numpy()
    np.testing.assert_allclose(found, expected, atol=TOLERANCE * np.abs(expected).max())


def test_attention_that_the_adapter_computes_wrongly_is_told(built: Built) -> None:
    if built.workflow != "tiny":
        pytest.skip("one family is enough")
    shapes = {"sample": (1, 4, 8, 8), "timestep": (1,), "encoder_hidden_states": (1, 77, 32)}
    with pytest.warns(SlowerWarning, match="this adapter computes fused attention wrongly"):
        load_submodel(built.folder, "unet", WEBGPU, shapes=shapes)


def test_a_float16_graph_on_an_adapter_without_float16_is_told_in_words(tmp_path: Path) -> None:
    half = onnx.TensorProto.FLOAT16
    infos = [helper.make_tensor_value_info(name, half, [4, 4]) for name in "xyz"]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "y"], ["z"])], "g", infos[:2], infos[2:])
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    session = create_session(path, WEBGPU, shapes={"x": (4, 4), "y": (4, 4)})
    bound = Bound(session, place("cpu"), {name: torch.zeros(4, 4, dtype=torch.float16) for name in "xy"})
    with pytest.raises(VerificationError, match="the GPU adapter does not support float16") as told:
        bound.run()
    assert "precision: float32" in str(told.value.remedy)


def test_it_is_available_and_what_is_missing_is_told_in_words() -> None:
    (found,) = target_availability(("webgpu",))
    assert (found.available, found.provider) == (True, "WebGpuExecutionProvider"), found.reason
    assert found.accelerator == f"GPU emulated by {processor()}"
    told = try_elsewhere({"VK_ICD_FILENAMES": "/nonexistent.json", "VK_DRIVER_FILES": "/nonexistent.json"})
    assert "no WebGPU adapter" in told
    assert "on Linux, Vulkan with its loader libvulkan.so.1" in told
    told = try_elsewhere({"ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER": "0"})
    assert "finds no GPU" in told
    assert "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER=1" in told


def try_elsewhere(changed: dict[str, str]) -> str:
    """What `sdflow targets` would say of WebGPU with these variables."""
    import os

    done = subprocess.run(
        [sys.executable, "-m", "sdflow.runtime.sessions.availability", "webgpu"],
        env={**os.environ, **changed},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["available"]
    return f"{found['reason']} {found['remedy']}"
