"""Tiny checkpoints, and their submodels converted by OnnxConversion."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdflow.artifact import Facts
from sdflow.passes.base import PassInputs
from sdflow.passes.olive import SILENCE
from sdflow.passes.onnx_conversion import OnnxConversion, OnnxConversionConfig

os.environ.update(SILENCE)  # before anything imports olive


def convert(submodel: str, load: Mapping[str, Any], out: Path, **options: Any) -> Facts:
    """Run OnnxConversion into the new directory `out`."""
    out.mkdir(parents=True)
    return OnnxConversion().run(PassInputs(submodel, None, load), out, OnnxConversionConfig(**options))


def session(model: Path) -> Any:
    """A session of the model in the directory `model` on the CPU."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(str(model / "model.onnx"), options, providers=["CPUExecutionProvider"])


def initializers(model: Path) -> dict[str, Any]:
    """All initializers of the model in the directory `model`, as numpy arrays."""
    import onnx

    proto = onnx.load(str(model / "model.onnx"))
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}


def config_of(model: Path) -> dict[str, Any]:
    return dict(json.loads((model / "config.json").read_text()))
