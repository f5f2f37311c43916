"""The modules of the original UNet under diffusers' names, by diffusers' own conversion of checkpoints.

diffusers converts LoRAs in these names by other code, which takes `input_blocks_10` for a part of `input_blocks_1` and fails on
complete files. Its conversion of checkpoints has no such defect and shares nothing with sdflow's own table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

KOHYA = ("lora_unet_", "lora_transformer_", "lora_te_", "lora_te1_", "lora_te2_")
"""How kohya begins the names of modules: those of the denoiser, then those of the text encoders."""
KOHYA_DENOISER, KOHYA_TEXT = "lora_unet_", "lora_te_"
"""Those of a model's denoiser, and of its only text encoder."""
ORIGINAL = "diffusion_model."
"""How ComfyUI begins the names of the original UNet's modules."""
_BEGINNING = re.compile(r"(input_blocks|middle_block|output_blocks|time_embed|label_emb|out)_\d")
_WORDS = re.compile(
    r"\b(input|output|transformer|middle|time|label|in|out|emb|skip|proj|to)"
    r"\.(blocks?|embed|emb|layers|connection|in|out|q|k|v)\b"
)
"""What has an underscore in its name, in a name whose underscores became dots."""
_BLOCK = re.compile(r"(input_blocks|middle_block|output_blocks)\.(\d+)")
_FILLER = "filler"


def is_original(stem: str) -> bool:
    """stem: the name of a module whose dots are underscores, as kohya writes it, without a prefix."""
    return _BEGINNING.match(stem) is not None


def diffusers_names(stems: Iterable[str], denoiser: Mapping[str, Any]) -> dict[str, str]:
    """The name in diffusers' UNet for each of these; what has no place in it is left out.

    denoiser: the UNet's config.
    """
    from diffusers.loaders.single_file_utils import DIFFUSERS_TO_LDM_MAPPING, LDM_UNET_KEY, convert_ldm_unet_checkpoint

    stems = list(stems)
    if not stems:
        return {}
    modules = {_WORDS.sub(r"\1_\2", stem.replace("_", ".")): stem for stem in stems}
    # It counts the blocks that it finds, and wants some names to be there: what is missing is filled in.
    embeddings = DIFFUSERS_TO_LDM_MAPPING["unet"]["addition_embed_type"].values()
    filled: dict[str, str | None] = dict.fromkeys(embeddings)
    for module, stem in modules.items():
        if found := _BLOCK.match(module):
            filled |= {f"{found[1]}.{number}.{_FILLER}": None for number in range(int(found[2]) + 1)}
        filled |= {f"{module}.weight": stem, f"{module}.bias": None}
    config = {"layers_per_block": denoiser["layers_per_block"], "addition_embed_type": "text_time"}
    converted = convert_ldm_unet_checkpoint({f"{LDM_UNET_KEY}{name}": stem for name, stem in filled.items()}, config)
    return {stem: name.removesuffix(".weight") for name, stem in converted.items() if stem is not None}
