"""Map the original UNet's module names to diffusers', with diffusers' own checkpoint conversion.

diffusers' conversion of LoRAs uses other code, which mistakes `input_blocks_10` for a part of `input_blocks_1` and
fails on complete files. Its checkpoint conversion has no such defect, and is independent of sdflow's own table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

KOHYA = ("lora_unet_", "lora_transformer_", "lora_te_", "lora_te1_", "lora_te2_")
"""kohya's prefixes of module names: the denoiser's, then the text encoders'."""
KOHYA_DENOISER, KOHYA_TEXT = "lora_unet_", "lora_te_"
"""Prefixes of a model's denoiser and of its only text encoder."""
ORIGINAL = "diffusion_model."
"""ComfyUI's prefix of the original UNet's modules."""
_BEGINNING = re.compile(r"(input_blocks|middle_block|output_blocks|time_embed|label_emb|out)_\d")
_WORDS = re.compile(
    r"\b(input|output|transformer|middle|time|label|in|out|emb|skip|proj|to)"
    r"\.(blocks?|embed|emb|layers|connection|in|out|q|k|v)\b"
)
"""Names that contain an underscore, in a name whose underscores became dots."""
_BLOCK = re.compile(r"(input_blocks|middle_block|output_blocks)\.(\d+)")
_FILLER = "filler"


def is_original(stem: str) -> bool:
    """Whether a module name (kohya's form, with underscores for dots, without prefix) is in the original layout."""
    return _BEGINNING.match(stem) is not None


def diffusers_names(stems: Iterable[str], denoiser: Mapping[str, Any]) -> dict[str, str]:
    """Return the name in diffusers' UNet for each stem; stems without one are omitted.

    denoiser: the UNet's config.
    """
    from diffusers.loaders.single_file_utils import DIFFUSERS_TO_LDM_MAPPING, LDM_UNET_KEY, convert_ldm_unet_checkpoint

    stems = list(stems)
    if not stems:
        return {}
    modules = {_WORDS.sub(r"\1_\2", stem.replace("_", ".")): stem for stem in stems}
    # The converter counts blocks and requires some names to exist, so missing ones are filled in.
    embeddings = DIFFUSERS_TO_LDM_MAPPING["unet"]["addition_embed_type"].values()
    filled: dict[str, str | None] = dict.fromkeys(embeddings)
    for module, stem in modules.items():
        if found := _BLOCK.match(module):
            filled |= {f"{found[1]}.{number}.{_FILLER}": None for number in range(int(found[2]) + 1)}
        filled |= {f"{module}.weight": stem, f"{module}.bias": None}
    config = {"layers_per_block": denoiser["layers_per_block"], "addition_embed_type": "text_time"}
    converted = convert_ldm_unet_checkpoint({f"{LDM_UNET_KEY}{name}": stem for name, stem in filled.items()}, config)
    return {stem: name.removesuffix(".weight") for name, stem in converted.items() if stem is not None}
