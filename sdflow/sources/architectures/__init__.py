"""The architectures that sdflow ships configurations of: what a single file or random weights are filled into.

Each family says which are its own (`Family.architectures`). A folder here is a whole pipeline folder but for the weights,
and for what `_LENDERS` and `_LIKE` say.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from sdflow.disk.shipped import family_folders
from sdflow.errors import CheckpointError
from sdflow.families import ADAPTER_ARCHITECTURES, ARCHITECTURES, COMPONENT_ARCHITECTURES
from sdflow.families.part import Companion
from sdflow.families.schedulers import prediction

_ROOT = Path(__file__).parent
_CONFIG_FILE = {"scheduler": "scheduler_config.json", "feature_extractor": "preprocessor_config.json"}

# Two vocabularies of 1.5 MB serve all: CLIP's tokenizer, which pads with <|endoftext|>, and OpenCLIP's, with "!".
_LENDERS = {
    ("sd15-tiny", "tokenizer"): "sd15/tokenizer",
    ("sd21-base", "tokenizer"): "sd21/tokenizer",
    ("sd21-tiny", "tokenizer"): "sd21/tokenizer",
    ("sdxl", "tokenizer"): "sd15/tokenizer",
    ("sdxl", "tokenizer_2"): "sd21/tokenizer",
    ("sdxl-tiny", "tokenizer"): "sd15/tokenizer",
    ("sdxl-tiny", "tokenizer_2"): "sd21/tokenizer",
    ("sd35-medium", "tokenizer"): "sd15/tokenizer",
    ("sd35-medium", "tokenizer_2"): "sd21/tokenizer",
    ("sd35-tiny", "tokenizer"): "sd15/tokenizer",
    ("sd35-tiny", "tokenizer_2"): "sd21/tokenizer",
    ("sd35-tiny", "tokenizer_3"): "sd35-medium/tokenizer_3",
}

# Architecture -> the one that it is like, but for the entries of the JSON files in its own folder.
_LIKE = {
    "sd-turbo": "sd21-base",
    "sd-turbo-tiny": "sd21-tiny",
    "sdxl-turbo": "sdxl",
    "sdxl-turbo-tiny": "sdxl-tiny",
    "sdxl-v": "sdxl",
    "sdxl-v-tiny": "sdxl-tiny",
    "sdxl-v-zsnr": "sdxl",
    "sdxl-v-zsnr-tiny": "sdxl-tiny",
    "lcm": "sd15",
    "lcm-tiny": "sd15-tiny",
    "lcm-sdxl": "sdxl",
    "lcm-sdxl-tiny": "sdxl-tiny",
    "sd15-inpainting": "sd15",
    "sd15-inpainting-tiny": "sd15-tiny",
    "sd2-inpainting": "sd21-base",
    "sd2-inpainting-tiny": "sd21-tiny",
    "sdxl-inpainting": "sdxl",
    "sdxl-inpainting-tiny": "sdxl-tiny",
    "sdxl-refiner": "sdxl",
    "sdxl-refiner-tiny": "sdxl-tiny",
    "sd35-large": "sd35-medium",
    "sd3-medium": "sd35-medium",
    "ip-adapter-plus": "ip-adapter",
    "ip-adapter-sdxl": "ip-adapter",
    "ip-adapter-plus-sdxl": "ip-adapter-plus",
    "ip-adapter-tiny": "ip-adapter",
    "ip-adapter-plus-tiny": "ip-adapter-tiny",
}


def _folder(architecture: str) -> Path:
    """The folder of an architecture: here, or beside a family elsewhere."""
    places = (folder / "architectures" / architecture for folder in family_folders())
    return next((place for place in places if place.is_dir()), _ROOT / architecture)


@cache
def _read(architecture: str, path: str) -> str:
    """The JSON of a file of an architecture: that of the one that it is like, if there is one, with its own entries."""
    like, own = _LIKE.get(architecture), _folder(architecture) / path
    if like is None:
        return own.read_text("utf-8")
    entries = json.loads(own.read_text("utf-8")) if own.is_file() else {}
    return json.dumps({**json.loads(_read(like, path)), **entries})


def architecture_config(architecture: str, component: str) -> dict[str, Any]:
    """The config.json of a component ("unet", "vae", "text_encoder", "safety_checker", "scheduler", ...)."""
    _check(architecture)
    file = _CONFIG_FILE.get(component, "config.json")
    config: dict[str, Any] = json.loads(_read(architecture, f"{component}/{file}"))
    return config


def prediction_of(architecture: str) -> str:
    """What its denoiser predicts: "epsilon", "v_prediction", or "flow" where its scheduler has no choice."""
    return prediction(architecture_config(architecture, "scheduler"), "flow")


def architecture_index(architecture: str) -> dict[str, Any]:
    """Its model_index.json: the pipeline's class, and for each component its library and class, or two nulls."""
    _check(architecture)
    index: dict[str, Any] = json.loads(_read(architecture, "model_index.json"))
    return index


def companion_folder(architecture: str, companion: str) -> Path:
    """The folder of "tokenizer", "tokenizer_2", "scheduler" or "feature_extractor"; of a tokenizer it may be another's."""
    _check(architecture)
    like = _LIKE.get(architecture)
    if like is not None and not (_folder(architecture) / companion).is_dir():
        return companion_folder(like, companion)
    return _ROOT / lender if (lender := _LENDERS.get((architecture, companion))) else _folder(architecture) / companion


def companion_folders(
    architecture: str, companions: Mapping[str, Companion], submodels: Collection[str]
) -> dict[str, Path]:
    """The folders of those companions that a pipeline of these submodels has."""
    return {
        name: companion_folder(architecture, name)
        for name, companion in companions.items()
        if companion.wanted(submodels)
    }


def _check(architecture: str) -> None:
    if architecture not in (*ARCHITECTURES, *COMPONENT_ARCHITECTURES, *ADAPTER_ARCHITECTURES):
        raise CheckpointError(
            f"unknown architecture {architecture!r}", remedy=f"Known ones: {', '.join(ARCHITECTURES)}."
        )
