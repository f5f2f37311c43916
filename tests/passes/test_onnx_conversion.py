"""OnnxConversion: what it writes computes what the PyTorch module computes, and every weight is known by its key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from submodels import SUBMODELS, dummy_inputs, model_of, ports_of

from sdflow.errors import CheckpointError, PassError
from sdflow.passes.onnx_conversion import OnnxConversionConfig
from sdflow.passes.tracing import traced_module, weights_kept_apart
from sdflow.passes.weight_names import read_weight_names
from sdflow.sources import Checkpoint, PlainDigests, load_module, open_checkpoint, submodel_config

from .conversion import config_of, convert, initializers, session


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint("synthetic:sd15-tiny", digests=PlainDigests(), download=False)


@pytest.fixture(scope="module")
def converted(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """Submodel -> the artifact's directory and its facts."""
    folder = tmp_path_factory.mktemp("converted")
    return {name: (folder / name, convert(name, checkpoint.submodels[name].load, folder / name)) for name in SUBMODELS}


@pytest.fixture(scope="module")
def modules(checkpoint: Checkpoint) -> dict[str, Any]:
    """The modules as their libraries run them: nothing is patched for tracing."""
    return {name: load_module(name, checkpoint.submodels[name].load) for name in SUBMODELS}


def torch_outputs(submodel: str, module: Any, inputs: dict[str, Any]) -> list[Any]:
    import torch

    given = {name: torch.from_numpy(value.copy()) for name, value in inputs.items()}
    with torch.no_grad():
        if submodel == "text_encoder":
            output = module(given["input_ids"].long())
            return [output.last_hidden_state.numpy(), output.pooler_output.numpy()]
        if submodel == "unet":
            return [module(**given).sample.numpy()]
        if submodel == "vae_encoder":
            return [module.encode(given["sample"]).latent_dist.mean.numpy()]
        if submodel == "vae_decoder":
            return [module.decode(given["latent_sample"]).sample.numpy()]
        images, flagged = module(given["clip_input"], given["images"])
        return [images.numpy(), np.array(flagged)]


@pytest.mark.parametrize("submodel", SUBMODELS)
def test_computes_what_torch_computes_at_other_sizes_than_traced(
    submodel: str, modules: dict[str, Any], converted: dict[str, tuple[Path, Any]]
) -> None:
    model, _ = converted[submodel]
    sequence = 50 if submodel == "text_encoder" else 77
    inputs = dummy_inputs(submodel, config_of(model), batch=3, height=64, width=128, sequence=sequence, seed=3)
    outputs = session(model).run(None, inputs)
    for computed, expected in zip(outputs, torch_outputs(submodel, modules[submodel], inputs), strict=True):
        assert computed.shape == expected.shape
        np.testing.assert_allclose(computed, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("submodel", SUBMODELS)
def test_has_the_inputs_and_outputs_that_pipelines_feed_and_read(
    submodel: str, converted: dict[str, tuple[Path, Any]]
) -> None:
    model, _ = converted[submodel]
    io = ports_of(submodel, config_of(model))
    types = {"float32": "tensor(float)", "int32": "tensor(int32)", "bool": "tensor(bool)"}
    running = session(model)
    for ports, values in ((io.inputs, running.get_inputs()), (io.outputs, running.get_outputs())):
        assert [(value.name, value.type, tuple(value.shape)) for value in values] == [
            (port.name, types[port.dtype], port.axes) for port in ports
        ]


@pytest.mark.parametrize("submodel", SUBMODELS)
def test_every_parameter_is_an_initializer_known_by_its_key(
    submodel: str, checkpoint: Checkpoint, converted: dict[str, tuple[Path, Any]]
) -> None:
    model, facts = converted[submodel]
    module = traced_module(model_of(submodel), load_module(submodel, checkpoint.submodels[submodel].load))
    weights = {key: value.numpy() for key, value in module.state_dict().items()}
    stored, names = initializers(model), read_weight_names(model)
    assert facts["unmapped"] == []
    assert {name.key for name in names.values()} == weights.keys()
    for initializer, name in names.items():
        assert name.shape == weights[name.key].shape
        assert name.stored_shape == stored[initializer].shape
        np.testing.assert_array_equal(stored[initializer], name.apply(weights[name.key]))


@pytest.mark.parametrize("submodel", SUBMODELS)
def test_onnx_finds_every_shape_consistent(submodel: str, converted: dict[str, tuple[Path, Any]]) -> None:
    import onnx

    onnx.checker.check_model(str(converted[submodel][0] / "model.onnx"), full_check=True)


def test_weights_before_a_matmul_are_stored_transposed(
    modules: dict[str, Any], converted: dict[str, tuple[Path, Any]]
) -> None:
    """As the exporter would have folded them: ORT's fusions look for MatMul with an initializer."""
    import onnx
    import torch

    model, facts = converted["unet"]
    names = read_weight_names(model)
    proto = onnx.load(str(model / "model.onnx"), load_external_data=False)
    multiplied = {node.input[1] for node in proto.graph.node if node.op_type == "MatMul"} & names.keys()
    attention = [key for key in modules["unet"].state_dict() if ".to_" in key and key.endswith(".weight")]
    assert {names[name].key for name in multiplied} >= set(attention) > set()
    assert {
        each for each, name in names.items() if any(step.kind == "transpose" for step in name.transform)
    } == multiplied
    groups = [name for name, each in modules["unet"].named_modules() if isinstance(each, torch.nn.GroupNorm)]
    in_shape = {name.key for name in names.values() if any(step.kind == "reshape" for step in name.transform)}
    assert in_shape == {f"{name}.{kind}" for name in groups for kind in ("weight", "bias")}, (
        "they lie along the channels"
    )
    assert not [node.name for node in proto.graph.node if node.op_type == "Transpose" and node.input[0] in names]
    assert "Identity" not in facts["operators"]


def test_equal_weights_stay_apart(tmp_path: Path) -> None:
    """Which initializers there are must not depend on coincidences among the weights."""
    import onnx
    import torch

    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    module.load_state_dict({key: torch.ones_like(value) for key, value in module.state_dict().items()})
    exported: dict[str, set[str]] = {}
    for kind in ("exporter's own", "kept apart"):
        path = str(tmp_path / f"{kind}.onnx")
        if kind == "kept apart":
            with weights_kept_apart():
                torch.onnx.export(module, (torch.ones(1, 2, 8),), path, dynamo=False, opset_version=17)
        else:
            torch.onnx.export(module, (torch.ones(1, 2, 8),), path, dynamo=False, opset_version=17)
        exported[kind] = {tensor.name for tensor in onnx.load(path).graph.initializer}
    assert exported["kept apart"] == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert len(exported["exporter's own"]) == 2


def test_the_exporter_is_as_before_after_a_failure() -> None:
    import torch

    before = torch._C._jit_pass_onnx_constant_fold, torch._C._jit_pass_onnx_deduplicate_initializers
    with pytest.raises(ZeroDivisionError), weights_kept_apart():
        assert torch._C._jit_pass_onnx_constant_fold is not before[0]
        raise ZeroDivisionError
    assert (torch._C._jit_pass_onnx_constant_fold, torch._C._jit_pass_onnx_deduplicate_initializers) == before


def test_fractional_timesteps_survive(modules: dict[str, Any], converted: dict[str, tuple[Path, Any]]) -> None:
    """Euler's and DPM's timesteps are not integers."""
    model, _ = converted["unet"]
    inputs = dummy_inputs("unet", config_of(model), batch=2, height=64, width=64)
    running = session(model)
    outputs = {}
    for timestep in (10.0, 10.6, 11.0):
        inputs["timestep"] = np.array([timestep], np.float32)
        outputs[timestep] = running.run(None, inputs)[0]
        np.testing.assert_allclose(
            outputs[timestep], torch_outputs("unet", modules["unet"], inputs)[0], rtol=0, atol=2e-5
        )
    assert np.abs(outputs[10.6] - outputs[10.0]).max() > 1e-4
    assert np.abs(outputs[10.6] - outputs[11.0]).max() > 1e-4


def fuse(model: Path, model_type: str, **sizes: int) -> Any:
    from onnxruntime.transformers import optimizer
    from onnxruntime.transformers.fusion_options import FusionOptions

    options = FusionOptions(model_type)
    return optimizer.optimize_model(
        str(model / "model.onnx"), model_type, opt_level=0, optimization_options=options, use_gpu=True, **sizes
    )


def test_clip_attention_fuses_and_stays_right(
    modules: dict[str, Any], converted: dict[str, tuple[Path, Any]], tmp_path: Path
) -> None:
    """With the mask of transformers 5 none of them would: the causal mask is traced in the older form."""
    model, _ = converted["text_encoder"]
    config = config_of(model)
    fused = fuse(model, "clip", num_heads=config["num_attention_heads"], hidden_size=config["hidden_size"])
    counts = fused.get_fused_operator_statistics()
    assert counts["Attention"] == config["num_hidden_layers"]
    assert counts["QuickGelu"] == config["num_hidden_layers"]
    fused.save_model_to_file(str(tmp_path / "model.onnx"))
    inputs = dummy_inputs("text_encoder", config, batch=2, sequence=77, seed=5)
    expected = torch_outputs("text_encoder", modules["text_encoder"], inputs)
    for computed, wanted in zip(session(tmp_path).run(None, inputs), expected, strict=True):
        np.testing.assert_allclose(computed, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("submodel", ["vae_encoder", "vae_decoder"])
def test_vae_fuses_but_for_the_attention_whose_biases_would_be_lost(
    submodel: str, converted: dict[str, tuple[Path, Any]]
) -> None:
    model, facts = converted[submodel]
    fused = fuse(model, "vae").get_fused_operator_statistics()
    assert fused["Attention"] == 0
    assert fused["NhwcConv"] == facts["operators"]["Conv"]
    assert fused["SkipGroupNorm"] > 0
    norms = facts["operators"]["InstanceNormalization"]
    assert fused["GroupNorm"] + fused["SkipGroupNorm"] == norms - 1, "all but that of the attention"


def test_writes_the_same_bytes_again(
    checkpoint: Checkpoint, converted: dict[str, tuple[Path, Any]], tmp_path: Path
) -> None:
    model, facts = converted["vae_decoder"]
    again = convert("vae_decoder", checkpoint.submodels["vae_decoder"].load, tmp_path / "again")
    assert again == facts
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    assert files.keys() == {"model.onnx", "model.onnx.data", "config.json", "weights.json"}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}
    assert b"torch" not in files["model.onnx"] and str(tmp_path.parent).encode() not in files["model.onnx"]


def test_config_says_what_the_model_is_and_not_who_saved_it(checkpoint: Checkpoint, tmp_path: Path) -> None:
    load = json.loads(json.dumps(checkpoint.submodels["text_encoder"].load))
    load["config"] |= {"_name_or_path": "/home/me/model", "transformers_version": "4.0.0"}
    convert("text_encoder", load, tmp_path / "out")
    assert config_of(tmp_path / "out") == checkpoint.submodels["text_encoder"].load["config"]


def test_facts_are_those_of_the_files(
    checkpoint: Checkpoint, modules: dict[str, Any], converted: dict[str, tuple[Path, Any]]
) -> None:
    import torch

    model, facts = converted["unet"]
    weights = modules["unet"].state_dict()
    assert facts["opset"] == 17
    assert facts["weights"] == len(weights)
    stored = sum(value.size for value in initializers(model).values())
    assert facts["parameters"] == stored == sum(value.numel() for value in weights.values())
    assert facts["bytes"] == sum((model / name).stat().st_size for name in ("model.onnx", "model.onnx.data"))
    convolutions = [each for each in modules["unet"].modules() if isinstance(each, torch.nn.Conv2d)]
    assert facts["operators"]["Conv"] == len(convolutions)
    assert config_of(model) == submodel_config(checkpoint.submodels["unet"].load)


def test_target_opset_14_is_exported(checkpoint: Checkpoint, tmp_path: Path) -> None:
    load = checkpoint.submodels["safety_checker"].load
    facts = convert("safety_checker", load, tmp_path / "out", target_opset=14)
    assert facts["opset"] == 14
    assert session(tmp_path / "out").get_inputs()[0].name == "clip_input"


def test_safety_checker_blackens_the_images_that_it_flags_and_no_others(checkpoint: Checkpoint, tmp_path: Path) -> None:
    import torch

    submodel = "safety_checker"
    load = checkpoint.submodels[submodel].load
    inputs = dummy_inputs(submodel, load["config"], batch=5, height=3, width=4)
    inputs["clip_input"] *= np.arange(1, 6, dtype=np.float32)[:, None, None, None]
    given = {name: torch.from_numpy(value) for name, value in inputs.items()}

    def strict_checker() -> Any:
        """Its first threshold lies between the scores of these images."""
        module = load_module(submodel, load)
        embeds = module.visual_projection(module.vision_model(given["clip_input"])[1])
        scores = torch.nn.functional.cosine_similarity(embeds, module.concept_embeds[:1]).sort().values
        module.concept_embeds_weights[0] = (scores[2] + scores[3]) / 2
        return module

    images, flagged = strict_checker()(given["clip_input"], given["images"].clone())
    assert sum(flagged) == 2
    ports = ports_of(submodel, load["config"])
    torch.onnx.export(
        traced_module(model_of(submodel), strict_checker()),
        tuple(given.values()),
        str(tmp_path / "model.onnx"),
        dynamo=False,
        opset_version=17,
        input_names=[port.name for port in ports.inputs],
        output_names=[port.name for port in ports.outputs],
        dynamic_axes=ports.dynamic_axes,
    )
    computed = session(tmp_path).run(None, inputs)
    np.testing.assert_array_equal(computed[1], flagged)
    np.testing.assert_array_equal(computed[0], images.numpy())


def test_img2img_of_diffusers_takes_the_mean_of_the_latents(
    checkpoint: Checkpoint, converted: dict[str, tuple[Path, Any]]
) -> None:
    from diffusers import DDIMScheduler, OnnxRuntimeModel, OnnxStableDiffusionImg2ImgPipeline
    from PIL import Image
    from transformers import CLIPTokenizer

    parts = {name: OnnxRuntimeModel(session(converted[name][0])) for name in SUBMODELS if name != "safety_checker"}
    pipeline = OnnxStableDiffusionImg2ImgPipeline(
        **parts,
        tokenizer=CLIPTokenizer.from_pretrained(checkpoint.companions["tokenizer"]),
        scheduler=DDIMScheduler.from_pretrained(checkpoint.companions["scheduler"]),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    start = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    images = [
        pipeline("", start, num_inference_steps=2, generator=np.random.RandomState(0), output_type="np").images
        for _ in range(2)
    ]
    assert images[0].shape == (1, 64, 64, 3)
    np.testing.assert_array_equal(images[0], images[1])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"use_dynamo_exporter": True}, "fusions do not match"),
        ({"device": "cuda"}, "does not depend on where it was traced"),
        ({"dynamic": False}, "a target fixes them"),
        ({"torch_dtype": "float16"}, "OnnxFloatToFloat16"),
        ({"merge_adapter_weights": True}, "LoraMerge"),
        ({"save_as_external_data": False}, "always external"),
        ({"target_opset": 9}, "greater than or equal to 14"),
        ({"target_opste": 17}, "not permitted"),
    ],
)
def test_options_that_it_does_not_follow_are_refused_with_the_reason(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        OnnxConversionConfig(**options)


def test_a_unet_with_other_inputs_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    load = json.loads(json.dumps(checkpoint.submodels["unet"].load))
    for option, value in (("class_embed_type", "timestep"), ("addition_embed_type", "text_time")):
        with pytest.raises(PassError, match=f"{option}='{value}'"):
            convert("unet", load | {"config": load["config"] | {option: value}}, tmp_path / option)


def test_a_checkpoint_that_cannot_be_loaded_is_reported_as_such(checkpoint: Checkpoint, tmp_path: Path) -> None:
    load = json.loads(json.dumps(checkpoint.submodels["unet"].load))
    load["config"]["norm_num_groups"] = 7
    with pytest.raises(CheckpointError, match="its configuration is invalid for UNet2DConditionModel"):
        convert("unet", load, tmp_path / "out")


def test_dummy_inputs_have_the_shapes_of_real_runs(checkpoint: Checkpoint) -> None:
    full = open_checkpoint("synthetic:sd15", digests=PlainDigests(), download=False)
    shapes = {
        name: {
            port: value.shape
            for port, value in dummy_inputs(name, full.submodels[name].load["config"], batch=2).items()
        }
        for name in SUBMODELS
    }
    assert shapes == {
        "text_encoder": {"input_ids": (2, 77)},
        "unet": {"sample": (2, 4, 64, 64), "timestep": (1,), "encoder_hidden_states": (2, 77, 768)},
        "vae_encoder": {"sample": (2, 3, 512, 512)},
        "vae_decoder": {"latent_sample": (2, 4, 64, 64)},
        "safety_checker": {"clip_input": (2, 3, 224, 224), "images": (2, 512, 512, 3)},
    }
