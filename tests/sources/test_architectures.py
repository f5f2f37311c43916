"""The shipped configurations make the published models, and their parts fit together."""

import json
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights

from sdflow.disk.shipped import family_data
from sdflow.errors import CheckpointError
from sdflow.families import (
    ADAPTER_ARCHITECTURES,
    ARCHITECTURES,
    COMPONENT_ARCHITECTURES,
    FAMILIES,
    MARKED_ARCHITECTURES,
    family_of_architecture,
)
from sdflow.sources import PlainDigests, open_checkpoint
from sdflow.sources.architectures import architecture_config, architecture_index, companion_folder

MODELS = tuple(dict.fromkeys(name for family in FAMILIES.values() for name in family.components))
TOKENIZERS = ("tokenizer", "tokenizer_2", "tokenizer_3")


def class_of(architecture: str, component: str) -> Any:
    import diffusers
    import transformers
    from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker

    library, name = architecture_index(architecture)[component]
    where = {"diffusers": diffusers, "transformers": transformers}
    return StableDiffusionSafetyChecker if library == "stable_diffusion" else getattr(where[library], name)


def module(architecture: str, component: str) -> torch.nn.Module:
    made, config = class_of(architecture, component), architecture_config(architecture, component)
    return made.from_config(config) if hasattr(made, "from_config") else made(made.config_class.from_dict(config))


def components(architecture: str) -> list[str]:
    index = architecture_index(architecture)
    return [name for name, value in index.items() if isinstance(value, list) and value[0] is not None]


@pytest.mark.parametrize(
    ("architecture", "counts"),
    [
        ("sd15", {"unet": 859_520_964, "vae": 83_653_863, "text_encoder": 123_060_480}),
        ("sd21", {"unet": 865_910_724, "vae": 83_653_863, "text_encoder": 340_387_840}),
        ("sd21-base", {"unet": 865_910_724, "vae": 83_653_863, "text_encoder": 340_387_840}),
        (
            "sdxl",
            {
                "unet": 2_567_463_684,
                "vae": 83_653_863,
                "text_encoder": 123_060_480,
                "text_encoder_2": 694_659_840,
            },
        ),
        ("flux1-schnell", {"transformer": 11_891_178_560, "vae": 83_819_683, "text_encoder": 123_060_480}),
        ("flux1-dev", {"transformer": 11_901_408_320}),
        # With the head of the language model, which shares the weights of the embeddings or has its own.
        (
            "flux2-klein-4b",
            {"transformer": 3_875_544_576, "vae": 84_046_115, "text_encoder": 4_022_468_096 + 151_936 * 2_560},
        ),
        ("flux2-klein-9b", {"transformer": 9_078_581_248, "vae": 84_046_115, "text_encoder": 8_190_735_360}),
        # Of the text encoder, Qwen3-4B without the head of the language model.
        ("z-image-turbo", {"transformer": 6_154_908_736, "vae": 83_819_683, "text_encoder": 4_022_468_096}),
    ],
)
def test_full_sizes_have_the_published_numbers_of_parameters(architecture: str, counts: dict[str, int]) -> None:
    with init_empty_weights():
        modules = {name: module(architecture, name) for name in components(architecture) if name in counts}
    assert {name: sum(tensor.numel() for tensor in made.parameters()) for name, made in modules.items()} == counts


def test_every_folder_is_a_whole_pipeline() -> None:
    places = [folder for place in family_data("architectures") for folder in place.iterdir()]
    assert len(places) == len({*ARCHITECTURES, *ADAPTER_ARCHITECTURES, *COMPONENT_ARCHITECTURES})
    folders = {place.name: place for place in places}
    for architecture, described in ARCHITECTURES.items():
        own = {path.name for path in folders[architecture].iterdir() if path.is_dir()}
        if base := described.like:
            assert own <= set(components(architecture)) <= set(components(base))
            assert MARKED_ARCHITECTURES.get(architecture) in (None, base)
            continue
        borrowed = {name for name in TOKENIZERS if companion_folder(architecture, name).parent.name != architecture}
        assert own == set(components(architecture)) - borrowed
        for name in components(architecture):
            assert class_of(architecture, name)
            if name not in (*MODELS, "scheduler"):
                assert companion_folder(architecture, name).is_dir()
        scheduler = json.loads((companion_folder(architecture, "scheduler") / "scheduler_config.json").read_text())
        assert scheduler["_class_name"] == architecture_index(architecture)["scheduler"][1]


@pytest.mark.parametrize("architecture", FAMILIES["flux2"].architectures)
def test_base_models_of_flux2_are_guided_and_distilled_ones_are_not(architecture: str) -> None:
    loaded = open_checkpoint(f"synthetic:{architecture}", digests=PlainDigests(), download=False)
    configs = {name: submodel.load["config"] for name, submodel in loaded.submodels.items()}
    family = FAMILIES["flux2"]
    assert family.guided(configs, 4.0) == ("base" in architecture)
    assert family.defaults_of(configs, {}, {})["text"].steps == (50 if "base" in architecture else 4)


@pytest.mark.parametrize("architecture", FAMILIES["stable_diffusion_3"].architectures)
def test_the_text_encoders_make_what_the_transformer_reads(architecture: str) -> None:
    """CLIP's two embeddings side by side, padded to the width of T5's; their pooled ones side by side."""
    transformer = architecture_config(architecture, "transformer")
    clips = [architecture_config(architecture, name) for name in ("text_encoder", "text_encoder_2")]
    t5 = architecture_config(architecture, "text_encoder_3")
    assert sum(clip["hidden_size"] for clip in clips) <= t5["d_model"] == transformer["joint_attention_dim"]
    assert sum(clip["projection_dim"] for clip in clips) == transformer["pooled_projection_dim"]


@pytest.mark.parametrize("architecture", FAMILIES["flux"].architectures)
def test_the_text_encoders_make_what_the_transformer_of_flux_reads(architecture: str) -> None:
    """T5's tokens and CLIP's pooled embedding; heads are as wide as the rotary embedding."""
    transformer = architecture_config(architecture, "transformer")
    assert architecture_config(architecture, "text_encoder")["hidden_size"] == transformer["pooled_projection_dim"]
    assert architecture_config(architecture, "text_encoder_2")["d_model"] == transformer["joint_attention_dim"]
    assert sum(transformer["axes_dims_rope"]) == transformer["attention_head_dim"]
    assert transformer["in_channels"] == 4 * architecture_config(architecture, "vae")["latent_channels"]
    assert transformer["guidance_embeds"] == ("dev" in architecture)
    scheduler = architecture_config(architecture, "scheduler")
    assert scheduler["use_dynamic_shifting"] == ("dev" in architecture)


@pytest.mark.parametrize("architecture", FAMILIES["flux2"].architectures)
def test_three_hidden_states_side_by_side_are_what_the_transformer_reads(architecture: str) -> None:
    transformer = architecture_config(architecture, "transformer")
    text, vae = (architecture_config(architecture, name) for name in ("text_encoder", "vae"))
    assert 3 * text["hidden_size"] == transformer["joint_attention_dim"] and text["num_hidden_layers"] > 27
    assert 4 * vae["latent_channels"] == transformer["in_channels"]


@pytest.mark.parametrize("architecture", FAMILIES["z_image"].architectures)
def test_the_hidden_state_is_what_the_transformer_reads(architecture: str) -> None:
    transformer = architecture_config(architecture, "transformer")
    text, vae = (architecture_config(architecture, name) for name in ("text_encoder", "vae"))
    assert text["hidden_size"] == transformer["cap_feat_dim"]
    assert vae["latent_channels"] == transformer["in_channels"]
    assert sum(transformer["axes_dims"]) * transformer["n_heads"] == transformer["dim"]


@pytest.mark.parametrize(
    "architecture", [name for name in ARCHITECTURES if family_of_architecture(name).denoiser == "unet"]
)
def test_the_text_encoders_make_what_the_unet_reads(architecture: str) -> None:
    unet = architecture_config(architecture, "unet")
    texts = [architecture_config(architecture, name) for name in components(architecture) if "text_encoder" in name]
    assert sum(text["hidden_size"] for text in texts) == unet["cross_attention_dim"]
    if unet.get("addition_embed_type") == "text_time":
        numbers = 6 if len(texts) == 2 else 5  # original size, crop, and target size; of the refiner a score
        wide = numbers * unet["addition_time_embed_dim"] + texts[-1]["projection_dim"]
        assert wide == unet["projection_class_embeddings_input_dim"]


@pytest.mark.parametrize(("small", "full"), [("sd15-tiny", "sd15"), ("sd21-tiny", "sd21"), ("sdxl-tiny", "sdxl")])
def test_the_small_ones_differ_from_the_full_ones_in_sizes_alone(small: str, full: str) -> None:
    sizes = {
        *("attention_head_dim", "block_out_channels", "cross_attention_dim", "sample_size", "hidden_size"),
        *("intermediate_size", "num_attention_heads", "num_hidden_layers", "projection_dim", "norm_num_groups"),
        *("text_config", "vision_config"),
    }
    if small == "sdxl-tiny":  # its UNet has two levels of one layer each
        sizes |= {"addition_time_embed_dim", "projection_class_embeddings_input_dim", "transformer_layers_per_block"}
        sizes |= {"layers_per_block", "down_block_types", "up_block_types"}
    assert architecture_index(small) == architecture_index(full)
    for name in {*components(full)} - {*TOKENIZERS, "feature_extractor"}:
        ours, theirs = architecture_config(small, name), architecture_config(full, name)
        assert ours.keys() == theirs.keys()
        assert {key for key in ours if ours[key] != theirs[key]} <= sizes


@pytest.mark.parametrize(
    ("architecture", "companion", "padding"),
    [
        ("sd15", "tokenizer", 49407),
        ("sd21", "tokenizer", 0),
        ("sd21-base", "tokenizer", 0),
        ("sdxl", "tokenizer", 49407),
        ("sdxl", "tokenizer_2", 0),
        ("sdxl-tiny", "tokenizer_2", 0),
    ],
)
def test_tokenizers_differ_in_their_padding(architecture: str, companion: str, padding: int) -> None:
    from transformers import CLIPTokenizer

    tokenizer = CLIPTokenizer.from_pretrained(companion_folder(architecture, companion))
    ids = tokenizer("a photo of a cat", padding="max_length").input_ids
    assert ids == [49406, 320, 1125, 539, 320, 2368, 49407] + [padding] * 70


@pytest.mark.parametrize("architecture", ["sd21-tiny", "sdxl-tiny"])
def test_diffusers_draws_with_the_small_ones(architecture: str) -> None:
    import diffusers
    from transformers import CLIPTokenizer

    index = architecture_index(architecture)
    torch.manual_seed(0)
    parts: dict[str, Any] = {name: module(architecture, name) for name in components(architecture) if name in MODELS}
    for name in components(architecture):
        if name in TOKENIZERS:
            parts[name] = CLIPTokenizer.from_pretrained(companion_folder(architecture, name))
    parts["scheduler"] = class_of(architecture, "scheduler").from_config(architecture_config(architecture, "scheduler"))
    if index["_class_name"] == "StableDiffusionPipeline":
        parts |= {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    else:
        parts["force_zeros_for_empty_prompt"] = index["force_zeros_for_empty_prompt"]
    pipeline = getattr(diffusers, index["_class_name"])(**parts)
    pipeline.set_progress_bar_config(disable=True)
    image = pipeline("a cat", num_inference_steps=2, output_type="np").images
    assert image.shape == (1, 128, 128, 3)
    assert image.std() > 0


def test_an_unknown_architecture_is_an_error() -> None:
    for ask in (architecture_index, lambda name: architecture_config(name, "unet")):
        with pytest.raises(CheckpointError, match="unknown architecture 'sd9'"):
            ask("sd9")
