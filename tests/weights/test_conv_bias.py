"""Biases that ConvBiasFusion adds up are the same bytes whether the weights are there or recipes, in either precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sdflow.passes.base import PassInputs
from sdflow.passes.chain import ChainStep, why_weights_are_carried
from sdflow.passes.conv_bias_fusion import ConvBiasFusion
from sdflow.passes.float16 import OnnxFloatToFloat16
from sdflow.passes.worker import run_pass
from sdflow.weights.bind import BindRequest, bind
from tests.weights.conftest import Builder, chain, structure_request, synthetic

FUSE, HALVE = ChainStep(ConvBiasFusion, {"group_norm": True}), ChainStep(OnnxFloatToFloat16, {})


@pytest.mark.parametrize("behind", ["OnnxFloatToFloat16", "OrtTransformersOptimization"])
def test_a_chain_with_it_gives_the_same_bytes_with_weights_and_without(
    built: Builder, tmp_path: Path, content: Callable[[Path], dict[str, bytes]], behind: str
) -> None:
    before = chain("vae_decoder", "cuda")
    assert before[-1].implementation is OnnxFloatToFloat16
    half = behind == "OnnxFloatToFloat16"
    assert why_weights_are_carried([*(before if half else before[:-1]), FUSE, HALVE]) is None
    structure, carried = built.structure("vae_decoder", "cuda"), built.carried("vae_decoder", "cuda")
    if not half:
        structure = built.root / "structure" / "vae_decoder" / "cuda" / "OnnxConversion-OrtTransformersOptimization"
        carried = carried.parent / "0"
    for step in (FUSE,) if half else (FUSE, HALVE):
        outs = [tmp_path / f"{kind}-{step.implementation.name}" for kind in ("structure", "carried")]
        for out in outs:
            out.mkdir()
        run_pass(structure_request("vae_decoder", step, structure, outs[0]), lambda phrase: None)
        inputs = PassInputs("vae_decoder", carried, {})
        facts = step.implementation().run(inputs, outs[1], step.implementation.Config(**step.config))
        structure, carried = outs
        if step is FUSE:
            assert facts["folded"]["SkipGroupNorm"] >= 3 and facts["folded"]["GroupNorm"] >= 3
    bound = tmp_path / "bound"
    bound.mkdir()
    bind(BindRequest("vae_decoder", structure, synthetic("vae_decoder")), bound)
    found, expected = content(bound), content(carried)
    for name in ("model.onnx", "model.onnx.data"):
        assert found[name] == expected[name]
    assert any(b"+" in file for name, file in expected.items() if name == "model.onnx"), "two biases were added up"
