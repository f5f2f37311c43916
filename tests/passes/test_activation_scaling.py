"""ActivationScaling changes no bit in float32, and keeps a VAE finite in float16 whose activations reach a million."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from diffusers import AutoencoderKL
from onnx import helper, numpy_helper

from sdflow.distance import relative_l2
from sdflow.errors import PassError
from sdflow.passes.activation_scaling import ActivationScaling
from sdflow.passes.base import PassInputs
from sdflow.passes.float16 import OnnxFloatToFloat16
from sdflow.passes.onnx_conversion import OnnxConversion
from sdflow.sources import load_module
from sdflow.sources.architectures import architecture_config
from sdflow.tolerances import WITHOUT_YARDSTICK
from sdflow.verify.lowering import lower, session_of
from tests.passes.conftest import export
from tests.passes.one_pass import edited, run

RNG = np.random.default_rng(0)
FACTOR = 2.0**21
TINY = {
    "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D"),
    "up_block_types": ("UpDecoderBlock2D", "UpDecoderBlock2D"),
    "block_out_channels": (16, 32),
    "norm_num_groups": 8,
    "latent_channels": 4,
}


def changed(model: Path, out: Path, *passes: Any, **options: Any) -> Path:
    """An artifact after passes. options: of the first one."""
    for implementation in passes:
        (to := out / implementation.name).mkdir(parents=True)
        implementation().run(PassInputs("vae_decoder", model, {}), to, implementation.Config(**options))
        model, options = to, {}
    return model


def on_cpu(model: Path, x: Any) -> Any:
    """An artifact's output, with 16-bit values rounded as a GPU rounds them."""
    graph = onnx.load(str(model / "model.onnx"), load_external_data=False)
    name, kind = graph.graph.input[0].name, graph.graph.input[0].type.tensor_type.elem_type
    given = {name: x.astype(helper.tensor_dtype_to_np_dtype(kind))}
    return session_of(lower(graph), model, threads=1).run(None, given)[0].astype(np.float32)


@pytest.mark.parametrize(
    ("family", "architecture", "submodel"),
    [("flux2", "flux2-tiny", "vae_encoder"), ("flux", "flux1-schnell-tiny", "vae_decoder")],
)
def test_in_float32_its_output_has_the_same_bits(
    family: str, architecture: str, submodel: str, tmp_path: Path, run_onnx: Any
) -> None:
    """FLUX.1's VAE has no convolutions next to the latents; FLUX.2's has, and folds its latents."""
    load = {"kind": "synthetic", "config": architecture_config(architecture, "vae"), "seed": 0, "family": family}
    (plain := tmp_path / "plain").mkdir()
    OnnxConversion().run(PassInputs(submodel, None, load, family=family), plain, OnnxConversion.Config())
    scaled = changed(plain, tmp_path, ActivationScaling, power=6)
    made = onnx.load(str(scaled / "model.onnx"), load_external_data=False).graph
    (port,), channels = made.input, made.input[0].type.tensor_type.shape.dim[1].dim_value
    x = RNG.standard_normal((2, channels, 16, 16)).astype(np.float32)
    before, after = (run_onnx(each, {port.name: x}) for each in (plain, scaled))
    assert before.tobytes() == after.tobytes()
    if submodel == "vae_decoder":
        with torch.no_grad():
            wanted = load_module(submodel, load).decode(torch.from_numpy(x)).sample
        assert relative_l2(after, wanted.numpy()) < 1e-5
    weights = [item.name for item in made.initializer if item.name.endswith(".weight/scaled")]
    normalizations = [node for node in made.node if node.op_type == "InstanceNormalization"]
    assert len(weights) == len(normalizations), "every normalization follows a layer"
    assert not [name for name in weights if "conv_out" in name or "shortcut" in name or "sampler" in name]


def planted() -> Any:
    """A VAE whose residual stream, and what is normalized between its convolutions, is FACTOR times as large.

    Its images are those of a usual one, but for the normalizations' epsilon.
    """
    torch.manual_seed(0)
    vae = AutoencoderKL(**TINY).eval()
    for name, parameter in vae.named_parameters():
        layer, _, kind = name.rpartition(".")
        linear = ("conv_shortcut", "samplers.0.conv")  # in the stream: the bias alone has a scale
        if layer.endswith(("conv_in", "conv1", "conv2", "to_out.0")) or (layer.endswith(linear) and kind == "bias"):
            parameter.data *= FACTOR
    return vae


@pytest.mark.parametrize("half", ["encoder", "decoder"])
def test_a_vae_that_overflows_float16_is_as_exact_as_others_with_it(half: str, tmp_path: Path) -> None:
    vae = planted()
    largest = []
    for module in vae.modules():
        if isinstance(module, torch.nn.GroupNorm):
            module.register_forward_pre_hook(lambda _, given: largest.append(float(given[0].abs().max())))
    x = torch.from_numpy(RNG.standard_normal((1, 4 if half == "decoder" else 3, 32, 32)).astype(np.float32))

    class Half(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vae = vae

        def forward(self, x: Any) -> Any:
            return self.vae.decode(x).sample if half == "decoder" else self.vae.encode(x).latent_dist.mode()

    with torch.no_grad():
        wanted = Half()(x).numpy()
    assert min(largest) > 1e6
    exported = export(tmp_path / "exported", Half(), {}, (x,), {"x": {0: "batch"}, "y": {0: "batch"}}).path
    overflowing = on_cpu(changed(exported, tmp_path / "without", OnnxFloatToFloat16), x.numpy())
    assert not np.isfinite(overflowing).all()
    found = on_cpu(changed(exported, tmp_path / "with", ActivationScaling, OnnxFloatToFloat16, power=9), x.numpy())
    assert relative_l2(found, wanted) < WITHOUT_YARDSTICK / 2


def graph(*nodes: Any, weight: Any = None) -> Any:
    """A graph of these nodes, from x to y, with a convolution's weight `w`, its bias `b`, and a normalization's `s` and `z`."""
    values = {
        "w": RNG.standard_normal((4, 4, 1, 1)).astype(np.float32) if weight is None else weight,
        "b": RNG.standard_normal(4).astype(np.float32),
        "s": np.ones(4, np.float32),
        "z": np.zeros(4, np.float32),
        "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64),
        "one": np.ones((), np.float32),
    }
    x, y = (helper.make_tensor_value_info(name, 1, ["n", 4, "h", "w"]) for name in "xy")
    tensors = [numpy_helper.from_array(value, name) for name, value in values.items()]
    made = helper.make_graph(nodes, "test", [x], [y], tensors)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def node(kind: str, inputs: str, output: str) -> Any:
    return helper.make_node(kind, inputs.split(), [output], f"{kind.lower()}_{output}")


def normalized(value: str) -> Any:
    return node("InstanceNormalization", f"{value} s z", "y")


CONV, NORM = node("Conv", "x w b", "c"), normalized("c")


@pytest.mark.parametrize(
    "nodes",
    [
        [CONV, NORM],
        [CONV, node("Pad", "c pads", "p"), normalized("p")],
        [CONV, node("Add", "b4 c", "a"), normalized("a")],
        [CONV, node("Mul", "one c", "m"), node("Conv", "m w b", "d"), node("Add", "m d", "a"), normalized("a")],
    ],
    ids=["convolution", "zeros around it", "a bias added to it", "a layer in the stream"],
)
def test_linear_operators_keep_the_scale(nodes: list[Any], tmp_path: Path) -> None:
    model = graph(*nodes)
    model.graph.initializer.append(numpy_helper.from_array(RNG.standard_normal((4, 1, 1)).astype(np.float32), "b4"))
    found, facts = edited(ActivationScaling, model, tmp_path, power=3)
    (norm,) = (node for node in found.graph.node if node.op_type == "InstanceNormalization")
    assert norm.attribute[0].f == np.float32(1e-5) / 64, "ONNX's default was written down"
    assert (facts["normalizations"], facts["layers"]) == (1, 1)
    x = RNG.standard_normal((1, 4, 3, 5)).astype(np.float32)
    assert run(found, x).tobytes() == run(model, x).tobytes()


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([CONV, node("Relu", "c", "y")], "no group normalization as OnnxConversion exports it"),
        ([CONV, node("Sin", "c", "r"), normalized("r")], "Sin sin_r: r would have to be scaled"),
        ([normalized("x")], "x, an input or a constant of the graph, would have to be scaled"),
        ([CONV, node("Pad", "c pads one", "p"), normalized("p")], "Pad pad_p: p would have to be scaled"),
        ([CONV, NORM, node("Exp", "c", "e")], "Exp exp_e: it reads c, which would have to be scaled"),
    ],
    ids=["nothing to scale", "not linear", "an input", "ones around it", "another reader"],
)
def test_what_it_does_not_know_is_refused(nodes: list[Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(PassError, match="ActivationScaling") as refused:
        edited(ActivationScaling, graph(*nodes), tmp_path)
    assert message in str(refused.value)


def test_float16_weights_are_refused(tmp_path: Path) -> None:
    model = graph(CONV, NORM, weight=np.ones((4, 4, 1, 1), np.float16))
    with pytest.raises(PassError, match="w is not float32"):
        edited(ActivationScaling, model, tmp_path)
