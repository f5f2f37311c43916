"""Text encoders of a pipeline: batching, textual inversion, skipped last layers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdflow.errors import CheckpointError, UsageError
from sdflow.families.shared.base import Family
from sdflow.onnx_model.nodes import copied, in_order, refill
from sdflow.runtime.sessions.submodel import Submodel
from sdflow.sources.embedding import Embedding, embeddings_in, read_embedding, split_word, vectors_for

if TYPE_CHECKING:
    import numpy as np
    import onnx
    import torch


def with_words(submodel: Submodel, family: Family, words: Sequence[Embedding]) -> Submodel:
    """Add the words' vectors to a text encoder of the family. Raises UsageError for vectors of another model."""
    import numpy as np

    if not words:
        return submodel
    width, parts = submodel.config["hidden_size"], [family.part(name) for name in family.text]
    vectors = np.concatenate([vectors_for(word, submodel.part, parts, width) for word in words])
    return submodel.changed(partial(add_vectors, vectors=vectors, config=submodel.config))


def learned_words(
    given: Sequence[Path | str | Embedding], family: Family, submodels: Mapping[str, Submodel]
) -> list[Embedding]:
    """Read embeddings given as objects, files (FILE or FILE:WORD) or folders. Embeddings of a folder that do not fit
    the model are skipped with a warning. Raises CheckpointError and UsageError for files."""
    found = []
    for each in given:
        if isinstance(each, Embedding):
            found.append(each)
        elif Path(each).is_dir():
            found += _fitting(Path(each), family, submodels)
        else:
            found.append(read_embedding(*split_word(str(each))))
    return found


def _fitting(folder: Path, family: Family, submodels: Mapping[str, Submodel]) -> Iterator[Embedding]:
    names = family.text_of(submodels)
    parts = [family.part(name) for name in names]
    widths = [submodels[name].config.get("hidden_size") for name in names]
    for word, path in embeddings_in(folder).items():
        try:
            if not names or None in widths:  # T5 does not support textual inversion
                raise UsageError(f"{family.title} takes no textual inversion", where=str(path))
            read = read_embedding(path, word)
            for part, width in zip(parts, widths, strict=True):
                vectors_for(read, part, parts, int(width or 0))
        except (CheckpointError, UsageError) as error:
            warnings.warn(f"skipped: {error}", stacklevel=2)
        else:
            yield read


def without_last_layers(submodel: Submodel, count: int) -> Submodel:
    """Return a text encoder that is read `count` layers earlier than usual, like `clip_skip` in diffusers' pipelines.

    Raises UsageError if it has too few layers.
    """
    config, part = submodel.config, submodel.part
    layers = config["num_hidden_layers"]
    if not 0 <= count < layers:
        raise UsageError(
            f"{count} of {layers} layers of the {part.name.replace('_', ' ')} cannot be skipped",
            where="clip_skip",
            remedy=f"Use 0 to {layers - 1}; 1 equals a clip skip of 2 in other programs.",
        )
    if count == 0:
        return submodel
    fewer = {**config, "num_hidden_layers": layers - count}
    if part.read is not None and part.read(fewer) != part.read(config):  # the graph outputs each layer's input
        return submodel.changed(config=fewer)
    return submodel.changed(partial(leave_out_layers, count=count, config=config), fewer)


def run_rows(submodel: Submodel, inputs: Mapping[str, torch.Tensor], at_once: int = 2) -> dict[str, torch.Tensor]:
    """Run a submodel on any number of rows, computing equal rows once. at_once: rows of each run, so one shape serves any
    number."""
    import torch

    columns = list(inputs.values())
    rows = [b"".join(column[index].numpy().tobytes() for column in columns) for index in range(len(columns[0]))]
    once = list(dict.fromkeys(rows))
    wanted = [rows.index(row) for row in once]
    found: dict[str, list[torch.Tensor]] = {}
    bound = submodel.bound(**{port: (at_once, *value.shape[1:]) for port, value in inputs.items()})
    read = submodel.part.read(submodel.config) if submodel.part.read else None
    for begin in range(0, len(wanted), at_once):
        taken = wanted[begin : begin + at_once]
        for port, value in inputs.items():
            submodel.place.put(bound.inputs[port], value[taken])  # a single row fills all places
        for output, value in bound.run().items():
            if read is None or output in read:
                found.setdefault(output, []).extend(value[: len(taken)].clone())
    order = [once.index(row) for row in rows]
    return {output: torch.stack([values[index] for index in order]) for output, values in found.items()}


_NORMS = {"LayerNormalization": 1, "SkipLayerNormalization": 2}
"""Normalization operator -> index of its scale input; the bias follows."""


def add_vectors(model: onnx.ModelProto, vectors: np.ndarray, config: Mapping[str, Any]) -> None:
    """Append `vectors` (float32, (vectors, width)) to the token embedding table, in the table's type.

    Raises UsageError if the graph has no such table.
    """
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    graph = model.graph
    wanted = [config["vocab_size"], config["hidden_size"]]
    tables = {tensor.name: tensor for tensor in graph.initializer if list(tensor.dims) == wanted}
    lookups = [node for node in graph.node if node.op_type == "Gather" and node.input[0] in tables]
    if len(lookups) != 1 or tables[lookups[0].input[0]].data_type not in (TensorProto.FLOAT, TensorProto.FLOAT16):
        raise UsageError(
            "the text encoder's graph has no plain embedding table to add words to",
            where="embeddings",
            remedy="Remove passes that quantize or replace its token embeddings, and rebuild the pipeline.",
        )
    (lookup,) = lookups
    table = tables[lookup.input[0]]
    dtype: Any = helper.tensor_dtype_to_np_dtype(table.data_type)
    graph.initializer.append(numpy_helper.from_array(np.asarray(vectors, dtype), "learned_vectors"))
    joined = helper.make_node("Concat", [table.name, "learned_vectors"], ["all_vectors"], axis=0)
    graph.node.insert(0, joined)
    lookup.input[0] = "all_vectors"


def leave_out_layers(model: onnx.ModelProto, count: int, config: Mapping[str, Any]) -> None:
    """Remove the last layers of a text encoder whose final norm reads the last layer's output.

    Each layer has two norms; the first reads the layer's input. For the first removed layer, this norm gets the final
    norm's scale and bias and replaces it.
    Raises UsageError unless the graph has two norms per layer, plus one.
    """
    nodes = [copied(node) for node in in_order(model.graph.node)]
    norms = [node for node in nodes if node.op_type in _NORMS]
    layers = config["num_hidden_layers"]
    if len(norms) != 2 * layers + 1:
        raise UsageError(
            f"the graph of the text encoder has {len(norms)} norms, but {layers} layers have {2 * layers + 1}, "
            "so none of them can be skipped",
            where="clip_skip",
            remedy="Remove passes that fuse or replace its norms, and rebuild the pipeline.",
        )
    last, norm = norms[-1], norms[2 * (layers - count)]
    taking_over = copied(norm)
    for offset in range(2):
        taking_over.input[_NORMS[norm.op_type] + offset] = last.input[_NORMS[last.op_type] + offset]
    taking_over.output[:] = last.output[:1]
    taking_over.name, last.output[0] = "last_norm_of_fewer_layers", "last_norm_of_all_layers"
    nodes.insert(nodes.index(norm) + 1, taking_over)
    refill(model.graph.node, nodes)
