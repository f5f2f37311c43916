"""Inputs of a graph from `sdflow export --one-file` for an image, from a prompt and the pipeline's own tokenizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


def graph_feeds(
    session: Any,
    told: Mapping[str, Any],
    tokenizer: Callable[[str], Any],
    noise: Any,
    prompt: str,
    negative: str = "",
    guidance_scale: float | None = None,
) -> dict[str, Any]:
    """The inputs that the graph has. told: the JSON beside it. tokenizer: gives that of a name, "tokenizer_2". noise: the
    latents, as many as images. guidance_scale: None: the one that the JSON tells."""
    inputs = {each.name for each in session.get_inputs()}
    feeds: dict[str, Any] = {"latents": noise}
    for name in told["tokenizers"]:
        tokenize = tokenizer(f"tokenizer{name.removeprefix('input_ids')}")
        for given, text in ((name, prompt), (f"negative_{name}", negative)):
            if given in inputs:
                ids = tokenize([text], padding="max_length", truncation=True, return_tensors="np").input_ids
                feeds[given] = np.repeat(ids.astype(np.int32), noise.shape[0], 0)
    if "guidance_scale" in inputs:
        scale = told["guidance_scale"] if guidance_scale is None else guidance_scale
        feeds["guidance_scale"] = np.array([scale], np.float32)
    return feeds
