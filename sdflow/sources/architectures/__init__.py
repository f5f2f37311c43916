"""The architectures that sdflow ships configurations of: what a single file or random weights are filled into."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from sdflow.errors import CheckpointError

ARCHITECTURES = ("sd15", "sd15-tiny")
UNETS = ("sdxl", "sdxl-tiny")
"""Architectures of which only the UNet is here."""
_ROOT = Path(__file__).parent
_CONFIG_FILE = {"scheduler": "scheduler_config.json", "feature_extractor": "preprocessor_config.json"}


@cache
def _read(architecture: str, component: str) -> str:
    return (_ROOT / architecture / component / _CONFIG_FILE.get(component, "config.json")).read_text("utf-8")


def architecture_config(architecture: str, component: str) -> dict[str, Any]:
    """The config.json of a component ("unet", "vae", "text_encoder", "safety_checker", "scheduler", ...)."""
    if architecture not in (*ARCHITECTURES, *UNETS):
        raise CheckpointError(
            f"unknown architecture {architecture!r}", remedy=f"Known ones: {', '.join((*ARCHITECTURES, *UNETS))}."
        )
    config: dict[str, Any] = json.loads(_read(architecture, component))
    return config


def companion_folder(architecture: str, companion: str) -> Path:
    """The folder of "tokenizer", "scheduler" or "feature_extractor". All share the tokenizer of sd15."""
    own = _ROOT / architecture / companion
    return own if own.is_dir() else _ROOT / "sd15" / companion
