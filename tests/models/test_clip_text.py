"""The text model with a projection finds a text's end in float16 too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from sdflow.families import FAMILIES
from sdflow.families.shared.text import token_ids
from sdflow.passes.base import PassInputs
from sdflow.passes.float16 import OnnxFloatToFloat16
from sdflow.passes.onnx_conversion import OnnxConversion, OnnxConversionConfig
from sdflow.sources import PlainDigests, load_module, open_checkpoint
from sdflow.sources.load import load_companion

FAMILY = FAMILIES["stable_diffusion_xl"]
TEXTS = ["", "a horse", "a horse on the moon, oil on canvas " * 20]


@pytest.mark.parametrize("end", [2, 49407])
def test_the_whole_text_is_read_at_its_end_in_float16(end: int, tmp_path: Path) -> None:
    """Ids are exact only to 32 there: the first token must not be taken for the end."""
    checkpoint = open_checkpoint("synthetic:sdxl-tiny", digests=PlainDigests(), download=False)
    load = dict(checkpoint.submodels["text_encoder_2"].load)
    load["config"] = {**load["config"], "eos_token_id": end}
    for name in ("float32", "float16"):
        (tmp_path / name).mkdir()
    inputs = PassInputs("text_encoder_2", None, load, FAMILY.name)
    OnnxConversion().run(inputs, tmp_path / "float32", OnnxConversionConfig())
    inputs = PassInputs("text_encoder_2", tmp_path / "float32", {}, FAMILY.name)
    OnnxFloatToFloat16().run(inputs, tmp_path / "float16", OnnxFloatToFloat16.Config())
    tokenizer = load_companion(FAMILY.companions["tokenizer_2"], checkpoint.companions["tokenizer_2"], "")
    ids = token_ids(tokenizer, TEXTS)
    with torch.no_grad():
        expected = load_module("text_encoder_2", load)(input_ids=ids).text_embeds.numpy()
    session = onnxruntime.InferenceSession(str(tmp_path / "float16" / "model.onnx"), providers=["CPUExecutionProvider"])
    (found,) = session.run(["text_embeds"], {"input_ids": ids.numpy().astype(np.int32)})
    distance = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert distance.max() < 0.01
