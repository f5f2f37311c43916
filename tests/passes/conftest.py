"""Tiny diffusers models with the structure of Stable Diffusion's, exported as `torch.onnx.export` does it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sdflow.artifact import Facts
from sdflow.onnx_model.files import store_model
from sdflow.passes.base import PassInputs
from sdflow.passes.olive import SILENCE
from sdflow.passes.ort_transformers_optimization import OrtTransformersOptimization, OrtTransformersOptimizationConfig
from sdflow.weights.faster_fusion import faster_fusion

os.environ.update(SILENCE)  # before anything imports olive


@dataclass(frozen=True)
class Exported:
    """An artifact as OnnxConversion leaves it (model.onnx, model.onnx.data, config.json), and inputs for it."""

    path: Path
    feeds: dict[str, Any]


@dataclass(frozen=True)
class Fused:
    """What OrtTransformersOptimization made of an artifact."""

    path: Path
    facts: Facts


def export(
    path: Path, module: Any, config: dict[str, Any], arguments: tuple[Any, ...], axes: dict[str, dict[int, str]]
) -> Exported:
    """Export `module`; `axes`: the dynamic axes of its inputs, in order, and of its output, the last."""
    import torch

    raw = path / "raw"
    raw.mkdir(parents=True)
    *inputs, output = axes
    with torch.no_grad():
        torch.onnx.export(
            module,
            arguments,
            str(raw / "model.onnx"),
            dynamo=False,
            opset_version=17,
            input_names=inputs,
            output_names=[output],
            dynamic_axes=axes,
        )
    store_model(raw / "model.onnx", path)
    for file in raw.iterdir():
        file.unlink()
    raw.rmdir()
    (path / "config.json").write_text(json.dumps(config, default=str))
    return Exported(path, {name: value.numpy() for name, value in zip(inputs, arguments, strict=True)})


@pytest.fixture(scope="session")
def tiny_unet(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    import torch
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        block_out_channels=(32, 64),
        layers_per_block=1,
        cross_attention_dim=32,
        attention_head_dim=2,
        norm_num_groups=8,
    ).eval()

    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unet = unet

        def forward(self, sample: Any, timestep: Any, text: Any) -> Any:
            return self.unet(sample, timestep, text, return_dict=False)[0]

    arguments = (torch.randn(2, 4, 8, 8), torch.tensor([981.25]), torch.randn(2, 77, 32))
    space = {0: "batch", 2: "latent_height", 3: "latent_width"}
    axes = {"sample": space, "timestep": {}, "encoder_hidden_states": {0: "batch", 1: "sequence"}, "out_sample": space}
    path = tmp_path_factory.mktemp("unet")
    return export(path, Wrapped().eval(), dict(unet.config), arguments, axes)


def _vae_decoder(path: Path, *, scaled_dot_product: bool) -> Exported:
    import torch
    from diffusers import AutoencoderKL
    from diffusers.models.attention_processor import AttnProcessor

    torch.manual_seed(0)
    vae = AutoencoderKL(
        block_out_channels=(32, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=16,
    ).eval()
    with torch.no_grad():
        for name, parameter in vae.named_parameters():
            if "attentions" in name and name.endswith("bias"):
                parameter.normal_()
    if not scaled_dot_product:
        vae.set_attn_processor(AttnProcessor())

    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vae = vae

        def forward(self, latent_sample: Any) -> Any:
            return self.vae.decode(latent_sample, return_dict=False)[0]

    axes = {
        "latent_sample": {0: "batch", 2: "latent_height", 3: "latent_width"},
        "sample": {0: "batch", 2: "height", 3: "width"},
    }
    return export(path, Wrapped().eval(), dict(vae.config), (torch.randn(1, 4, 8, 8),), axes)


@pytest.fixture(scope="session")
def vae_with_eager_attention(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A VAE decoder exported in the form that ORT's VAE attention fusion matches."""
    return _vae_decoder(tmp_path_factory.mktemp("vae_eager"), scaled_dot_product=False)


@pytest.fixture(scope="session")
def tiny_linear(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A graph that no fusion knows, with things for optimizers to remove."""
    import torch

    torch.manual_seed(0)

    class Linear(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(64, 64)

        def forward(self, x: Any) -> Any:
            return self.layer((x + 0.0) * 1.0).relu()

    return export(
        tmp_path_factory.mktemp("linear"),
        Linear().eval(),
        {"kind": "linear"},
        (torch.randn(2, 64),),
        {"x": {0: "batch"}, "y": {0: "batch"}},
    )


@pytest.fixture(scope="session")
def run_onnx() -> Callable[..., Any]:
    """model directory, feeds -> its first output on ONNX Runtime's CPU provider, its own graph optimizations off."""
    import onnxruntime as ort

    def run(model: Path, feeds: dict[str, Any]) -> Any:
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = 1
        session = ort.InferenceSession(str(model / "model.onnx"), options, providers=["CPUExecutionProvider"])
        return session.run(None, feeds)[0]

    return run


@pytest.fixture(scope="session")
def python() -> Callable[..., str]:
    """code, cwd, env -> standard output of a process that has exactly this environment. A failure is an assertion."""

    def run(code: str, *, cwd: Path, env: dict[str, str]) -> str:
        root = Path(__file__).parents[2]
        given = {"PATH": os.environ["PATH"], "PYTHONPATH": str(root), "OMP_NUM_THREADS": "2", **env}
        command = [sys.executable, "-c", code]
        result = subprocess.run(command, cwd=cwd, env=given, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run


@pytest.fixture(scope="session")
def fused_unet(tiny_unet: Exported, tmp_path_factory: pytest.TempPathFactory) -> Fused:
    """The tiny UNet after OrtTransformersOptimization with every fusion on."""
    out = tmp_path_factory.mktemp("fused_unet")
    config = OrtTransformersOptimizationConfig(model_type="unet")
    with faster_fusion():  # as in a build; that it gives the same: tests/weights/test_equality.py
        return Fused(out, OrtTransformersOptimization().run(PassInputs("unet", tiny_unet.path, {}), out, config))
