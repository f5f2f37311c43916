"""The architectures that sdflow ships configurations of: what a single file or random weights are filled into.

Each family says which are its own (`Family.architectures`). A folder here is a whole pipeline folder but for the weights,
and for what `_LENDERS` says.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from sdflow.errors import CheckpointError
from sdflow.families import ARCHITECTURES

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
}


@cache
def _read(path: str) -> str:
    return (_ROOT / path).read_text("utf-8")


def architecture_config(architecture: str, component: str) -> dict[str, Any]:
    """The config.json of a component ("unet", "vae", "text_encoder", "safety_checker", "scheduler", ...)."""
    _check(architecture)
    config: dict[str, Any] = json.loads(
        _read(f"{architecture}/{component}/{_CONFIG_FILE.get(component, 'config.json')}")
    )
    return config


def architecture_index(architecture: str) -> dict[str, Any]:
    """Its model_index.json: the pipeline's class, and for each component its library and class, or two nulls."""
    _check(architecture)
    index: dict[str, Any] = json.loads(_read(f"{architecture}/model_index.json"))
    return index


def companion_folder(architecture: str, companion: str) -> Path:
    """The folder of "tokenizer", "tokenizer_2", "scheduler" or "feature_extractor"; of a tokenizer it may be another's."""
    _check(architecture)
    return _ROOT / _LENDERS.get((architecture, companion), f"{architecture}/{companion}")


def _check(architecture: str) -> None:
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"unknown architecture {architecture!r}", remedy=f"Known ones: {', '.join(ARCHITECTURES)}."
        )
