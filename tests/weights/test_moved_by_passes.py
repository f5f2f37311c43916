"""Weights that passes behind the fusions move are the same bytes whether the weights are there or recipes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from safetensors.numpy import save_file

from sdflow.passes.activation_scaling import ActivationScaling
from sdflow.passes.base import PassInputs
from sdflow.passes.chain import ChainStep, why_weights_are_carried
from sdflow.passes.conv_bias_fusion import ConvBiasFusion
from sdflow.passes.float16 import OnnxFloatToFloat16
from sdflow.passes.separate_qkv import SeparateQkv
from sdflow.passes.subpixel_conv import SubpixelConv
from sdflow.passes.worker import run_pass
from sdflow.sources.load import parameter_shapes
from sdflow.verify.artifact.recipes import check_recipes
from sdflow.verify.artifact.stored import BoundModel
from sdflow.weights.bind import BindRequest, bind
from sdflow.weights.lora import LoraInput
from sdflow.weights.stubs import make_stub, stub_recipe
from tests.weights.conftest import Builder, chain, config_of, structure_request, synthetic

STEPS = (ChainStep(ConvBiasFusion, {}), ChainStep(SeparateQkv, {"widest": 32}))
MOVED = ("/skip", "/query", "/key", "/value")


def test_a_unet_has_the_same_bytes_with_weights_and_without(
    built: Builder, tmp_path: Path, content: Callable[[Path], dict[str, bytes]]
) -> None:
    assert why_weights_are_carried([*chain("unet", "cuda"), *STEPS]) is None
    structure, carried = built.structure("unet", "cuda"), built.carried("unet", "cuda")
    for step in STEPS:
        outs = [tmp_path / f"{kind}-{step.implementation.name}" for kind in ("structure", "carried")]
        for out in outs:
            out.mkdir()
        run_pass(structure_request("unet", step, structure, outs[0]), lambda phrase: None)
        step.implementation().run(PassInputs("unet", carried, {}), outs[1], step.implementation.Config(**step.config))
        structure, carried = outs
    bound = tmp_path / "bound"
    bound.mkdir()
    bind(BindRequest("unet", structure, synthetic("unet")), bound)
    found, expected = content(bound), content(carried)
    for name in ("model.onnx", "model.onnx.data"):
        assert found[name] == expected[name]
    for part in MOVED:
        assert part.encode() in expected["model.onnx"]


@pytest.fixture(scope="module")
def convolution_lora(tmp_path_factory: pytest.TempPathFactory) -> LoraInput:
    """Of every 3x3 convolution that upsamples in the small UNet."""
    random, tensors = np.random.default_rng(0), {}
    for key, shape in parameter_shapes("unet", {"config": config_of("unet")}).items():
        if ".upsamplers." in key and len(shape) == 4:
            name = f"lora_unet_{key.removesuffix('.weight').replace('.', '_')}"
            tensors[f"{name}.lora_up.weight"] = random.standard_normal((shape[0], 2, 1, 1)).astype(np.float32)
            tensors[f"{name}.lora_down.weight"] = random.standard_normal((2, *shape[1:])).astype(np.float32)
    path = tmp_path_factory.mktemp("loras") / "upsampling.safetensors"
    save_file(tensors, path)
    return LoraInput(path, 0.7)


@pytest.mark.parametrize("submodel", ["unet", "vae_decoder"])
def test_all_four_kernels_in_one_have_the_same_bytes_with_weights_and_without(
    submodel: str,
    convolution_lora: LoraInput,
    built: Builder,
    tmp_path: Path,
    content: Callable[[Path], dict[str, bytes]],
) -> None:
    """In float16: sums in float32, then rounded. With a LoRA on the convolutions of the UNet."""
    loras = [convolution_lora] if submodel == "unet" else []
    steps = (ChainStep(SubpixelConv, {}), ChainStep(OnnxFloatToFloat16, {}))
    before = chain(submodel, "cuda")[:-1]
    assert why_weights_are_carried([*before, *steps]) is None
    structure = built.structure(submodel, "cuda").parent / "OnnxConversion-OrtTransformersOptimization"
    half = built.carried(submodel, "cuda", loras)
    carried = half.parent / str(int(half.name) - 1)
    for step in steps:
        outs = [tmp_path / f"{kind}-{step.implementation.name}" for kind in ("structure", "carried")]
        for out in outs:
            out.mkdir()
        run_pass(structure_request(submodel, step, structure, outs[0]), lambda phrase: None)
        facts = step.implementation().run(PassInputs(submodel, carried, {}), outs[1], step.implementation.Config())
        structure, carried = outs
        assert step.implementation is not SubpixelConv or facts["replaced"] > 0
    plain, bound = tmp_path / "plain", tmp_path / "bound"
    for given, out in (([], plain), (loras, bound)):
        out.mkdir()
        told = bind(BindRequest(submodel, structure, synthetic(submodel), given), out)
    assert not loras or told["touched"] == facts["operators"]["Slice"] // 4 > 0
    for name in ("model.onnx", "model.onnx.data"):
        assert content(bound)[name] == content(carried)[name]
    assert not loras or content(plain)["model.onnx.data"] != content(carried)["model.onnx.data"]
    assert check_recipes(structure, submodel, BoundModel(plain, synthetic(submodel))).findings == []


def test_kernels_of_sums_and_scaled_weights_have_the_same_bytes_with_weights_and_without(
    built: Builder, tmp_path: Path, content: Callable[[Path], dict[str, bytes]]
) -> None:
    """In float16, where scaled weights may be subnormal."""
    steps = [ChainStep(each, {}) for each in (ActivationScaling, SubpixelConv, OnnxFloatToFloat16)]
    assert why_weights_are_carried([*chain("vae_decoder", "cpu"), *steps]) is None
    found, carried = (kind("vae_decoder", "cpu") for kind in (built.structure, built.carried))
    for step in steps:
        outs = [tmp_path / f"{kind}-{step.implementation.name}" for kind in ("structure", "carried")]
        for out in outs:
            out.mkdir()
        run_pass(structure_request("vae_decoder", step, found, outs[0]), lambda phrase: None)
        facts = step.implementation().run(PassInputs("vae_decoder", carried, {}), outs[1], step.implementation.Config())
        found, carried = outs
        assert step.implementation is not SubpixelConv or (facts["replaced"] > 0 and "Resize" not in facts["operators"])
    (bound := tmp_path / "bound").mkdir()
    bind(BindRequest("vae_decoder", found, synthetic("vae_decoder")), bound)
    for name in ("model.onnx", "model.onnx.data"):
        assert content(bound)[name] == content(carried)[name]
    assert check_recipes(found, "vae_decoder", BoundModel(bound, synthetic("vae_decoder"))).findings == []

    path = found / "model.onnx"
    model = onnx.load(path, load_external_data=False)
    kernels = [tensor for tensor in model.graph.initializer if "/subpixel" in tensor.name]
    make_stub(kernels[1], stub_recipe(kernels[0]))
    path.write_bytes(model.SerializeToString())
    told = [finding.what for finding in check_recipes(found, "vae_decoder").findings]
    assert len(told) == 1 and f"goes into it and into {kernels[0].name}" in told[0], "two of the four are one"
