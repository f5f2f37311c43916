"""OrtTransformersOptimization: it fuses, it says so, and what Olive and ORT get wrong does not reach an artifact."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from pydantic import ValidationError

from sdflow.errors import PassError
from sdflow.passes.base import PassInputs
from sdflow.passes.olive import SILENCE, run_olive_pass
from sdflow.passes.ort_transformers_optimization import (
    FusionSwitches,
    OrtTransformersOptimization,
    OrtTransformersOptimizationConfig,
)

CPU = dict.fromkeys(
    ("packed_qkv", "packed_kv", "nhwc_conv", "group_norm", "skip_group_norm", "bias_splitgelu", "bias_add"), False
)


def optimize(model: Path, out: Path, **options: Any) -> Any:
    config = OrtTransformersOptimizationConfig(**options)
    return OrtTransformersOptimization().run(PassInputs("unet", model, {}), out, config)


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def operators(folder: Path) -> Counter[str]:
    graph = onnx.load(folder / "model.onnx", load_external_data=False).graph
    return Counter(node.op_type for node in graph.node)


def test_every_attention_norm_gelu_and_convolution_is_fused_and_counted(tiny_unet: Any, fused_unet: Any) -> None:
    before, fused = operators(tiny_unet.path), fused_unet.facts["fused"]
    assert fused == {name: count for name, count in operators(fused_unet.path).items() if name in fused}
    assert fused["MultiHeadAttention"] == before["Softmax"] > 0
    assert fused["NhwcConv"] == before["Conv"] > 0
    assert fused["GroupNorm"] + fused["SkipGroupNorm"] == before["InstanceNormalization"] > 0
    assert fused["BiasSplitGelu"] == before["Erf"] > 0
    blocks = before["Softmax"] // 2  # a transformer block attends to itself and to the text
    assert fused["BiasAdd"] == blocks, "behind each block's last matrix"
    assert fused["SkipLayerNormalization"] == 2 * blocks, "two of a block's three: the first has nothing to skip"
    assert fused.keys() == {
        "BiasAdd", "BiasSplitGelu", "GroupNorm", "MultiHeadAttention", "NhwcConv", "SkipGroupNorm", "SkipLayerNormalization"
    }  # fmt: skip
    assert sorted(path.name for path in fused_unet.path.iterdir()) == ["config.json", "model.onnx", "model.onnx.data"]


def test_the_same_input_gives_the_same_bytes_in_another_process(
    tiny_unet: Any, fused_unet: Any, tmp_path: Path, python: Any
) -> None:
    code = (
        "from pathlib import Path\n"
        "from sdflow.passes.base import PassInputs\n"
        "from sdflow.passes.ort_transformers_optimization import *\n"
        f"inputs = PassInputs('unet', Path({str(tiny_unet.path)!r}), {{}})\n"
        "config = OrtTransformersOptimizationConfig(model_type='unet')\n"
        "OrtTransformersOptimization().run(inputs, Path('.').resolve(), config)"
    )
    python(code, cwd=tmp_path, env={**SILENCE, "HOME": str(tmp_path), "PYTHONHASHSEED": "12345"})
    assert digests(tmp_path) == digests(fused_unet.path)


def test_leaving_the_weights_on_disk_changes_no_byte(tiny_unet: Any, fused_unet: Any, tmp_path: Path) -> None:
    options = {"model_type": "unet", "opt_level": 0}
    run_olive_pass("OrtTransformersOptimization", options, tiny_unet.path, tmp_path, keep_weights_on_disk=False)
    assert digests(tmp_path) == digests(fused_unet.path)


def test_a_graph_fused_for_the_cpu_computes_what_the_export_does(tiny_unet: Any, tmp_path: Path, run_onnx: Any) -> None:
    switches = {f"enable_{name}": value for name, value in CPU.items()}
    facts = optimize(tiny_unet.path, tmp_path, model_type="unet", optimization_options=switches)
    # Without packing, self-attention becomes Attention and cross-attention stays MultiHeadAttention.
    before = operators(tiny_unet.path)
    blocks = before["Softmax"] // 2
    assert facts["fused"] == {
        "Attention": blocks, "Gelu": before["Erf"], "MultiHeadAttention": blocks, "SkipLayerNormalization": 2 * blocks
    }  # fmt: skip
    difference = run_onnx(tmp_path, tiny_unet.feeds) - run_onnx(tiny_unet.path, tiny_unet.feeds)
    assert np.abs(difference).max() < 1e-5


def test_the_biases_of_a_vae_attention_are_not_zeroed(
    vae_with_eager_attention: Any, tmp_path: Path, run_onnx: Any
) -> None:
    exported, own, ours = vae_with_eager_attention, tmp_path / "olive", tmp_path / "ours"
    own.mkdir(), ours.mkdir()
    switches = {f"enable_{name}": value for name, value in CPU.items()}
    run_olive_pass(
        "OrtTransformersOptimization",
        {"model_type": "vae", "opt_level": 0, "optimization_options": switches},
        exported.path,
        own,
    )
    facts = optimize(exported.path, ours, model_type="vae", optimization_options=switches)
    assert facts["fused"]["Attention"] == 1
    truth = run_onnx(exported.path, exported.feeds)
    assert np.abs(run_onnx(own, exported.feeds) - truth).max() > 0.01, "ORT has mended its fusion: drop ours"
    assert np.abs(run_onnx(ours, exported.feeds) - truth).max() < 1e-5


def test_a_fusion_that_fuses_nothing_is_an_error(tiny_linear: Any, tmp_path: Path) -> None:
    with pytest.raises(PassError, match="nothing was fused"):
        optimize(tiny_linear.path, tmp_path, model_type="unet")


def test_a_vae_without_anything_to_fuse_for_the_cpu_passes(
    vae_with_eager_attention: Any, tmp_path: Path, run_onnx: Any
) -> None:
    switches = {f"enable_{name}": value for name, value in CPU.items()} | {"enable_attention": False}
    exported = vae_with_eager_attention
    assert optimize(exported.path, tmp_path, model_type="vae", optimization_options=switches)["fused"] == {}
    assert np.array_equal(run_onnx(tmp_path, exported.feeds), run_onnx(exported.path, exported.feeds))


def test_with_every_fusion_off_the_graph_is_only_cleaned(tiny_linear: Any, tmp_path: Path, run_onnx: Any) -> None:
    off = {name: False for name in FusionSwitches.model_fields if name.startswith("enable_")}
    facts = optimize(
        tiny_linear.path, tmp_path, model_type="unet", optimization_options={**off, "enable_shape_inference": True}
    )
    assert facts["fused"] == {}
    assert np.array_equal(run_onnx(tmp_path, tiny_linear.feeds), run_onnx(tiny_linear.path, tiny_linear.feeds))


def test_the_switches_are_those_of_onnxruntime() -> None:
    from onnxruntime.transformers.fusion_options import FusionOptions

    for model_type in ("unet", "vae", "clip"):
        known = vars(FusionOptions(model_type))
        assert set(FusionSwitches.model_fields) == set(known)
        unused = {"enable_embed_layer_norm"}  # on by default, but these models have no such fusion
        assert {key: value for key, value in FusionSwitches() if key not in unused} == {
            key: value for key, value in known.items() if key not in unused
        }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_type": "bert"}, "clip"),
        ({"model_type": "unet", "optimisation_options": {}}, "optimisation_options"),
        ({"model_type": "unet", "optimization_options": {"enable_atention": True}}, "enable_atention"),
        ({"model_type": "unet", "optimization_options": {"enable_shape_inference": False}}, "silently disables"),
        ({"model_type": "unet", "optimization_options": {"enable_bias_splitgelu": False}}, "enable_bias_add"),
        ({"model_type": "unet", "opt_level": 3}, "opt_level"),
        ({"model_type": "unet", "only_onnxruntime": True}, "opt_level"),
        ({"model_type": "clip", "num_heads": 12, "hidden_size": 770}, "multiple"),
        ({"model_type": "unet", "force_fp32_ops": ["Softmax"]}, "float16: true"),
    ],
)
def test_options_that_would_silently_do_nothing_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        OrtTransformersOptimizationConfig(**options)


def test_heads_and_hidden_size_of_clip_come_from_its_config(tmp_path: Path) -> None:
    config = OrtTransformersOptimizationConfig(model_type="clip")
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 12, "hidden_size": 768}))
    options = OrtTransformersOptimization().olive_options(config, tmp_path)
    assert (options["num_heads"], options["hidden_size"]) == (12, 768)
    (tmp_path / "config.json").write_text(
        json.dumps({"vision_config": {"num_attention_heads": 16, "hidden_size": 1024}, "hidden_size": 768})
    )
    options = OrtTransformersOptimization().olive_options(config, tmp_path)
    assert (options["num_heads"], options["hidden_size"]) == (16, 1024)


def test_float16_in_one_pass_is_the_same_as_in_two(vae_with_eager_attention: Any, tmp_path: Path) -> None:
    from sdflow.passes.float16 import OnnxFloatToFloat16, OnnxFloatToFloat16Config

    fused, one, two = (tmp_path / name for name in ("fused", "one", "two"))
    for folder in (fused, one, two):
        folder.mkdir()
    forced = {"GroupNorm": (0, 1, 2)}
    exported = vae_with_eager_attention.path
    optimize(exported, one, model_type="vae", float16=True, force_fp16_inputs=forced)
    optimize(exported, fused, model_type="vae")
    config = OnnxFloatToFloat16Config(force_fp16_inputs=forced)
    OnnxFloatToFloat16().run(PassInputs("vae_decoder", fused, {}), two, config)
    assert digests(one) == digests(two)
