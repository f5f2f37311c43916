"""Common parts of SDXL and its refiner: OpenCLIP's text encoder, and size conditions."""

from __future__ import annotations

from collections.abc import Mapping

from sdflow.families.shared.defaults import Defaults, Task
from sdflow.families.shared.part import CLIP_TOKENIZER, Companion, Layout, Part
from sdflow.families.shared.text import last_but_one
from sdflow.models.clip_text import ClipTextWithProjection
from sdflow.models.open_clip_names import open_clip_names, open_clip_unused
from sdflow.parameter import Parameter, pair

LAYERS = {"output_hidden_states": True}
"""As in optimum's exports of these text encoders, which expects the layers' outputs."""

SIZES: Mapping[str, Parameter] = {
    "original_size": Parameter(
        "Original size to condition on, as HEIGHTxWIDTH.",
        tuple[int, int],
        least=1,
        otherwise="the output size",
        read=pair,
    ),
    "crops_coords_top_left": Parameter(
        "Crop to condition on, as TOPxLEFT.", tuple[int, int], least=0, otherwise="0x0", options=("--crop",), read=pair
    ),
}
"""Arguments for size conditions of the denoiser, in pixels."""

EMBEDDINGS = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")
DEFAULTS: Mapping[Task, Defaults] = {
    "text": Defaults(steps=50, guidance_scale=5.0),
    "image": Defaults(steps=50, guidance_scale=5.0, strength=0.3),
    "inpaint": Defaults(steps=50, guidance_scale=7.5, strength=0.9999),
}
TOKENIZER = CLIP_TOKENIZER
SCHEDULER = Companion("diffusers", None, "scheduler_config.json")


def open_clip_part(prefix: str) -> Part:
    """Return OpenCLIP's text encoder. prefix: of its tensors in files of the original layout."""
    return Part(
        "text_encoder_2",
        ClipTextWithProjection(),
        "text_encoder_2",
        "The second text model, OpenCLIP's: token ids to token embeddings and a pooled embedding.",
        read=lambda config: ("text_embeds", last_but_one(config)),
        layouts=(Layout(prefix, open_clip_names, open_clip_unused),),
        lora=("lora_te2_", "text_encoder_2."),
        config=LAYERS,
        embedding="clip_g",
    )
