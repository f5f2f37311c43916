"""Weights that passes behind the fusions move are the same bytes whether the weights are there or recipes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sdflow.passes.base import PassInputs
from sdflow.passes.chain import ChainStep, why_weights_are_carried
from sdflow.passes.conv_bias_fusion import ConvBiasFusion
from sdflow.passes.separate_qkv import SeparateQkv
from sdflow.passes.worker import run_pass
from sdflow.weights.bind import BindRequest, bind
from tests.weights.conftest import Builder, chain, structure_request, synthetic

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
