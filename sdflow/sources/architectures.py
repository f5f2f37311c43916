"""Read the architectures shipped with sdflow: of families (`Family.architectures`), single components, and adapters."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from sdflow.disk.shipped import family_data
from sdflow.errors import CheckpointError
from sdflow.families import ADAPTER_ARCHITECTURES, ARCHITECTURES, COMPONENT_ARCHITECTURES
from sdflow.families.shared.architecture import Architecture
from sdflow.families.shared.part import Companion
from sdflow.families.shared.schedulers import VELOCITY, prediction

_CONFIG_FILE = {"scheduler": "scheduler_config.json", "feature_extractor": "preprocessor_config.json"}


def _of(architecture: str) -> Architecture:
    """The architecture's entry. Raises CheckpointError if sdflow does not ship it."""
    if architecture in COMPONENT_ARCHITECTURES:
        return Architecture()
    found = ARCHITECTURES.get(architecture) or ADAPTER_ARCHITECTURES.get(architecture)
    if found is None:
        raise CheckpointError(
            f"unknown architecture {architecture!r}", remedy=f"Known ones: {', '.join(ARCHITECTURES)}."
        )
    return found


@cache
def _folder(architecture: str) -> Path:
    """The architecture's folder, within its family's."""
    return next(place / architecture for place in family_data("architectures") if (place / architecture).is_dir())


@cache
def _read(architecture: str, path: str) -> str:
    """The JSON of an architecture's file: its own entries over those of the architecture that it is `like`, if any."""
    like, own = _of(architecture).like, _folder(architecture) / path
    if not like:
        return own.read_text("utf-8")
    entries = json.loads(own.read_text("utf-8")) if own.is_file() else {}
    return json.dumps({**json.loads(_read(like, path)), **entries})


def architecture_config(architecture: str, component: str) -> dict[str, Any]:
    """The config.json of a component ("unet", "vae", "text_encoder", "safety_checker", "scheduler", ...)."""
    file = _CONFIG_FILE.get(component, "config.json")
    config: dict[str, Any] = json.loads(_read(architecture, f"{component}/{file}"))
    return config


def prediction_of(architecture: str) -> str:
    """What its denoiser predicts: "epsilon", "v_prediction", or "flow" if its scheduler has no choice."""
    return prediction(architecture_config(architecture, "scheduler"), VELOCITY)


def architecture_index(architecture: str) -> dict[str, Any]:
    """Its model_index.json: the pipeline's class, and each component's library and class, or two nulls."""
    index: dict[str, Any] = json.loads(_read(architecture, "model_index.json"))
    return index


def companion_folder(architecture: str, companion: str) -> Path:
    """The folder of "tokenizer", "tokenizer_2", "scheduler" or "feature_extractor"; tokenizers may be borrowed."""
    of = _of(architecture)
    if of.like and not (_folder(architecture) / companion).is_dir():
        return companion_folder(of.like, companion)
    lender, _, folder = of.borrowed.get(companion, f"{architecture}/{companion}").partition("/")
    return _folder(lender) / folder


def companion_folders(
    architecture: str, companions: Mapping[str, Companion], submodels: Collection[str]
) -> dict[str, Path]:
    """The folders of the companions that a pipeline of these submodels needs."""
    return {
        name: companion_folder(architecture, name)
        for name, companion in companions.items()
        if companion.wanted(submodels)
    }
