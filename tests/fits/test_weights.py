"""Bytes and parameters by arithmetic, beside those of classes of diffusers and transformers and of graphs that were built."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from shell import Shell
from started_python import StartedPython

from sdflow.fits.low_bits import LOW_BITS, is_named, node_path
from sdflow.fits.weights import parameter_count, weight_bytes
from sdflow.sources import PlainDigests, open_checkpoint
from tests.fits.fitting import FULL_SIZE, planned

WITH_NETS: dict[str, Any] = {"nets": {"edges": "synthetic:sd15"}, "components": {"vae": "synthetic:taesd"}}


@pytest.mark.parametrize(
    ("shape", "taken"), [((64, 20480), True), ((64, 20496), False), ((64, 24), False), ((20, 64), False)]
)
def test_int8_rows_take_the_sizes_that_the_operator_has(shape: tuple[int, int], taken: bool) -> None:
    assert LOW_BITS["QuantizeInt8"].taken("ff.weight", shape, {"activations": "row"}) is taken


@pytest.mark.parametrize(
    ("shape", "taken"), [((64, 20480), True), ((64, 20496), False), ((64, 24), False), ((24, 64), False)]
)
def test_float8_takes_the_sizes_that_the_operator_has(shape: tuple[int, int], taken: bool) -> None:
    assert LOW_BITS["QuantizeFp8"].taken("ff.weight", shape, {"smallest": 1}) is taken


@pytest.mark.parametrize("architecture", [*FULL_SIZE.values(), "sd15 with nets"])
def test_full_size_architectures_have_the_parameters_of_their_classes(architecture: str) -> None:
    """Of the module as it is traced: without the layers that nothing reads."""
    name, _, nets = architecture.partition(" with ")
    checkpoint = open_checkpoint(
        f"synthetic:{name}", digests=PlainDigests(), download=False, **(WITH_NETS if nets else {})
    )
    for submodel, source in checkpoint.submodels.items():
        config = source.load["config"]
        model = checkpoint.family.part(submodel).of(config).model
        with torch.device("meta"):
            module = model.empty(config)
        module.eval()
        model.traced(module)
        stored = module.state_dict().keys()
        tables = {name: each for name, each in module.named_buffers() if name in stored}
        own = sum(each.numel() for each in (*module.parameters(), *tables.values()))
        counted = parameter_count(model, config)
        assert counted is not None
        assert abs(counted / own - 1) < 2e-3, submodel


def held(folder: Path) -> int:
    """Bytes of the weights of a graph."""
    graph = onnx.load(str(folder / "model.onnx"), load_external_data=False).graph
    sizes = [
        prod(tensor.dims) * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        for tensor in graph.initializer
    ]
    return sum(sizes)


def require_near(base: str, target: str, folder: Path, *overrides: str, within: float = 0.02) -> None:
    pipeline, checkpoint = planned(base, target, overrides)
    for submodel, chain in pipeline.submodels.items():
        config = checkpoint.submodels[submodel].load["config"]
        model = checkpoint.family.part(submodel).of(config).model
        counted = weight_bytes(model, config, chain)
        built = held(folder / submodel)
        assert counted is not None
        assert abs(counted / built - 1) < within, (submodel, counted, built)


FLOAT8 = (
    "transformer.passes.QuantizeFp8.insert_after=OnnxFloatToFloat16",
    "transformer.passes.QuantizeFp8.smallest=1024",
    "transformer.passes.QuantizeFp8.limit=1",
)


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory, started_python: StartedPython | None) -> Shell:
    return Shell(tmp_path_factory.mktemp("fits"), started_python)


def build(shell: Shell, base: str, target: str, *overrides: str) -> Path:
    sets = [argument for each in (*overrides, "verify=false", "evaluate=null") for argument in ("--set", each)]
    (pipeline,) = shell.json("run", base, "--target", target, *sets)["pipelines"]
    return shell.folder / pipeline["folder"]


def test_a_built_pipeline_with_float8_products_has_the_bytes(shell: Shell) -> None:
    only = (*FLOAT8, *(f"submodels.{name}=null" for name in ("text_encoder", "vae_encoder", "vae_decoder")))
    require_near("flux2_tiny", "cuda", build(shell, "flux2_tiny", "cuda", *only), *only)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cuda", "cpu", "directml"])
@pytest.mark.parametrize("base", ["tiny", "sdxl_tiny", "flux1_schnell_tiny", "flux2_tiny", "sd35_tiny", "z_image_tiny"])
def test_built_pipelines_have_the_bytes(base: str, target: str, shell: Shell) -> None:
    require_near(base, target, build(shell, base, target))


@pytest.mark.parametrize(
    ("parameter", "path"),
    [
        ("conv_in.weight", "/conv_in"),
        ("up_blocks.2.resnets.0.conv1.weight", "/up_blocks.2/resnets.0/conv1"),
        ("transformer_blocks.0.attn.to_out.0.weight", "/transformer_blocks.0/attn/to_out.0"),
        ("encoder.block.3.layer.1.DenseReluDense.wo.weight", "/encoder/block.3/layer.1/DenseReluDense/wo"),
    ],
)
def test_nodes_are_named_as_the_exporter_names_them(parameter: str, path: str) -> None:
    assert node_path(parameter) == path
    assert is_named(parameter, [f"{path}/*"]) and not is_named(parameter, ["/nothing/*"])
