"""Synthetic checkpoints: deterministic, seeded, sane."""

import hashlib
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import T5Config, T5EncoderModel

from sdflow.errors import CheckpointError
from sdflow.models.t5_text import T5Text
from sdflow.models.unet import UNet
from sdflow.sources import Checkpoint, PlainDigests, load_module, load_pipeline, open_checkpoint, submodel_config
from sdflow.sources.architectures import architecture_config
from sdflow.sources.synthetic import synthetic_tensors


def opened(reference: str) -> Checkpoint:
    return open_checkpoint(reference, digests=PlainDigests(), download=False)


def state_digest(module: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def test_values_never_change() -> None:
    """The identity of a synthetic checkpoint has no digest of its values: they must be the same for ever."""
    tensors = synthetic_tensors(UNet(), {"conv.weight": (3, 5, 1, 1), "norm.bias": (7,)}, seed=0)
    values = b"".join(tensor.astype("<f4").tobytes() for tensor in tensors.values())
    assert hashlib.sha256(values).hexdigest() == "80cd2a9de038d4221d0d71d8b6c2bab92884502e051688e734b33512fe5bceef"


def test_another_process_makes_the_same_weights(tiny: Checkpoint) -> None:
    script = (
        "import sys, json, hashlib; from sdflow.sources import load_module\n"
        "m = load_module('unet', json.loads(sys.argv[1])); d = hashlib.sha256()\n"
        "for n, t in m.state_dict().items(): d.update(n.encode() + t.numpy().tobytes())\n"
        "print(d.hexdigest())"
    )
    load = json.dumps(tiny.submodels["unet"].load)
    done = subprocess.run([sys.executable, "-c", script, load], capture_output=True, text=True, check=True)
    torch.manual_seed(99)  # torch's generator has no part in it
    assert done.stdout.strip() == state_digest(load_module("unet", tiny.submodels["unet"].load))


def test_the_order_and_the_other_tensors_do_not_matter() -> None:
    one = synthetic_tensors(UNet(), {"a.weight": (8, 8), "b.weight": (8, 8)}, 5)
    other = synthetic_tensors(UNet(), {"b.weight": (8, 8)}, 5)
    assert np.array_equal(one["b.weight"], other["b.weight"])
    assert not np.array_equal(one["a.weight"], one["b.weight"])


def test_attention_of_t5_has_the_scores_of_its_own_initialization() -> None:
    """T5 does not scale its scores: with a larger q, random weights amplify rounding as no published model does."""
    own = T5EncoderModel(T5Config(d_model=256, d_kv=64, num_heads=4, d_ff=64, num_layers=1, vocab_size=8))
    layer = own.encoder.block[0].layer[0].SelfAttention
    for name in ("q", "k", "v"):
        expected = getattr(layer, name).weight.detach()
        key = f"encoder.block.0.layer.0.SelfAttention.{name}.weight"
        found = synthetic_tensors(T5Text(), {key: tuple(expected.shape)}, 0)[key]
        assert found.std() == pytest.approx(expected.std().item(), rel=0.05)
    assert opened("synthetic:sd35-tiny").submodels["text_encoder_3"].identity["generator"] == 2


def test_the_seed_changes_weights_and_identity(tiny: Checkpoint) -> None:
    other = opened("synthetic:sd15-tiny?seed=4")
    assert opened("synthetic:sd15-tiny").provenance["seed"] == 0
    for name, submodel in tiny.submodels.items():
        assert submodel.identity != other.submodels[name].identity
    first, second = (load_module("unet", checkpoint.submodels["unet"].load) for checkpoint in (tiny, other))
    assert state_digest(first) != state_digest(second)


def test_all_tensors_are_distinct(tiny: Checkpoint) -> None:
    """The exporter merges initializers of equal value."""
    for name in ("unet", "vae_decoder", "text_encoder", "safety_checker"):
        tensors = load_module(name, tiny.submodels[name].load).state_dict().values()
        assert len({tensor.numpy().tobytes() for tensor in tensors}) == len(tensors)


def test_modules_are_float32_in_eval_mode_without_gradients(tiny: Checkpoint) -> None:
    classes = {
        "text_encoder": "CLIPTextModel",
        "unet": "UNet2DConditionModel",
        "vae_encoder": "AutoencoderKL",
        "vae_decoder": "AutoencoderKL",
        "safety_checker": "StableDiffusionSafetyChecker",
    }
    assert tiny.submodels.keys() == classes.keys()
    for name, class_name in classes.items():
        module = load_module(name, tiny.submodels[name].load)
        assert type(module).__name__ == class_name and not module.training
        assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
        assert not any(parameter.requires_grad for parameter in module.parameters())
    assert submodel_config(tiny.submodels["unet"].load)["_class_name"] == "UNet2DConditionModel"


def test_activations_stay_sane_and_nothing_is_flagged(tiny: Checkpoint) -> None:
    pipeline = load_pipeline(tiny)
    pipeline.set_progress_bar_config(disable=True)
    unet, vae = pipeline.unet, pipeline.vae
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn((2, 4, 16, 16), generator=generator)
    with torch.no_grad():
        noise = unet(latents, 500, torch.randn((2, 77, 32), generator=generator)).sample
        image = vae.decode(latents).sample
        moments = vae.encode(image.clamp(-1, 1)).latent_dist.mean
    for tensor in (noise, image, moments):
        assert 0.05 < tensor.std() < 5 and tensor.isfinite().all()
    result = pipeline("a photo of a cat", num_inference_steps=2, generator=generator)
    assert result.images[0].size == (128, 128) == (tiny.facts["image_size"],) * 2
    assert result.nsfw_content_detected == [False]


def test_the_tiny_architecture_has_the_blocks_of_the_full_one() -> None:
    full, small = (architecture_config(name, "unet") for name in ("sd15", "sd15-tiny"))
    for key in ("down_block_types", "up_block_types", "layers_per_block", "norm_num_groups"):
        assert full[key] == small[key]
    assert opened("synthetic:sd15").facts["image_size"] == 512


def test_the_tokenizer_is_that_of_clip() -> None:
    from transformers import CLIPTokenizer

    tokenizer = CLIPTokenizer.from_pretrained(opened("synthetic:sd15").companions["tokenizer"])
    assert len(tokenizer) == 49408
    assert tokenizer("a photo of a cat")["input_ids"] == [49406, 320, 1125, 539, 320, 2368, 49407]
    assert tokenizer.model_max_length == 77 and tokenizer.pad_token_id == 49407


@pytest.mark.parametrize(
    "reference",
    ["synthetic:sd16", "synthetic:sd15?seed=-1", "synthetic:sd15?seed=", "synthetic:sd15?sed=1", "synthetic:sd15?"],
)
def test_a_wrong_spelling_is_an_error(reference: str) -> None:
    with pytest.raises(CheckpointError, match="synthetic:sd15") as caught:
        opened(reference)
    assert caught.value.remedy


def test_opening_imports_no_heavy_library() -> None:
    script = (
        "import sys; from sdflow.sources import *\n"
        "open_checkpoint('synthetic:sd15', digests=PlainDigests(), download=False)\n"
        "print([m for m in ('torch', 'numpy', 'transformers', 'diffusers', 'onnx', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
