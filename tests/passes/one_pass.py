"""A pass on a small model that is in memory, and what ONNX Runtime makes of a model on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnxruntime

from sdflow.artifact import Facts
from sdflow.passes.base import Pass, PassInputs


def edited(implementation: type[Pass[Any]], model: Any, folder: Path, **options: Any) -> tuple[Any, Facts]:
    """The model after a pass, and the pass's facts. folder: empty, for the artifacts."""
    source, out = folder / "source", folder / "out"
    source.mkdir(parents=True)
    out.mkdir()
    onnx.save(model, str(source / "model.onnx"))
    (source / "config.json").write_text("{}")
    facts = implementation().run(PassInputs("unet", source, {}), out, implementation.Config(**options))
    assert (out / "config.json").read_text() == "{}"
    return onnx.load(str(out / "model.onnx")), facts


def run(model: Any, x: Any) -> Any:
    """The first output."""
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]
