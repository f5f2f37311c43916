"""A program that has a pipeline as one ONNX file, the JSON beside it, and the tokenizers library: nothing of sdflow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from tokenizers import Tokenizer


def draw_by_one_file(
    graph: Path, prompt: str, latents: np.ndarray, negative: str | None = None, scale: float | None = None
) -> np.ndarray:
    """An image of a graph whose texts are chats."""
    known = json.loads(Path(f"{graph}.json").read_bytes())
    table = known["tokenizers"]["input_ids"]
    given: dict[str, Any] = {"input_ids": _ids(table, prompt), "latents": latents}
    if negative is not None:
        given["negative_input_ids"] = _ids(table, negative)
    if scale is not None:
        given["guidance_scale"] = np.array([scale], np.float32)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # it takes longer than to run
    session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    (images,) = session.run(None, given)
    return np.asarray(images)


def _ids(table: dict[str, Any], text: str) -> np.ndarray:
    tokenizer = Tokenizer.from_str(json.dumps(table["tokenizer"]))
    found = tokenizer.encode(f"{table['before']}{text}{table['behind']}", add_special_tokens=False).ids
    found = found[: table["length"]]
    return np.array([[*found, *[table["pad"]] * (table["length"] - len(found))]], np.int32)
