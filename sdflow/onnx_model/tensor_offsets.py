"""Offsets of tensors in a model's data files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from sdflow.artifact import MODEL_FILE
from sdflow.errors import VerificationError
from sdflow.onnx_model.reading import load_graph


def tensor_offsets(folder: Path) -> Mapping[str, Sequence[int]]:
    """Return file name -> byte offsets of its tensors; empty if the folder has no model."""
    if not (folder / MODEL_FILE).is_file():
        return {}
    from sdflow.onnx_model.files import data_span, decode_errors, initializers_and_constants, is_external

    unreadable: tuple[type[Exception], ...] = (VerificationError, *decode_errors())
    try:
        model = load_graph(folder / MODEL_FILE)
    except unreadable:
        return {}
    found: defaultdict[str, list[int]] = defaultdict(list)
    for tensor, _ in initializers_and_constants(model):
        if is_external(tensor):
            location, offset, _ = data_span(tensor)
            found[location].append(offset)
    return found
