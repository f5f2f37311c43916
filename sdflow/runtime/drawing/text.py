"""The text encoders of a pipeline: on any number of texts, with learned words, without their last layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from sdflow.errors import UsageError
from sdflow.families.shared.base import Family
from sdflow.runtime.drawing.text_graph import add_vectors, leave_out_layers
from sdflow.runtime.sessions.submodel import Submodel
from sdflow.sources.embedding import Embedding, vectors_for

if TYPE_CHECKING:
    import torch


def with_words(submodel: Submodel, family: Family, words: Sequence[Embedding]) -> Submodel:
    """A text encoder of the family that knows the words' vectors. Raises UsageError for vectors of another model's."""
    import numpy as np

    if not words:
        return submodel
    width, parts = submodel.config["hidden_size"], [family.part(name) for name in family.text]
    vectors = np.concatenate([vectors_for(word, submodel.part, parts, width) for word in words])
    return submodel.changed(partial(add_vectors, vectors=vectors, config=submodel.config))


def without_last_layers(submodel: Submodel, count: int) -> Submodel:
    """A text encoder that is read so many layers earlier than the family reads it, as `clip_skip` of diffusers' pipelines.

    Raises UsageError where it has not so many.
    """
    config, part = submodel.config, submodel.part
    layers = config["num_hidden_layers"]
    if not 0 <= count < layers:
        raise UsageError(
            f"{count} of {layers} layers of the {part.name.replace('_', ' ')} cannot be left out",
            where="clip_skip",
            remedy=f"From 0 to {layers - 1}; 1 is what other programs call a clip skip of 2.",
        )
    if count == 0:
        return submodel
    fewer = {**config, "num_hidden_layers": layers - count}
    if part.read is not None and part.read(fewer) != part.read(config):  # the graph has what goes into each layer
        return submodel.changed(config=fewer)
    return submodel.changed(partial(leave_out_layers, count=count, config=config), fewer)


def run_rows(submodel: Submodel, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A submodel on any number of rows, equal ones computed once. Two at a time, as with guidance: one shape for any
    number."""
    import torch

    columns = list(inputs.values())
    rows = [b"".join(column[index].numpy().tobytes() for column in columns) for index in range(len(columns[0]))]
    once = list(dict.fromkeys(rows))
    wanted = [rows.index(row) for row in once]
    found: dict[str, list[torch.Tensor]] = {}
    bound = submodel.bound(**{port: (2, *value.shape[1:]) for port, value in inputs.items()})
    read = submodel.part.read(submodel.config) if submodel.part.read else None
    for begin in range(0, len(wanted), 2):
        pair = wanted[begin : begin + 2]
        for port, value in inputs.items():
            submodel.place.put(bound.inputs[port], value[pair])  # a single one goes to both places
        for output, value in bound.run().items():
            if read is None or output in read:
                found.setdefault(output, []).extend(value[: len(pair)].clone())
    order = [once.index(row) for row in rows]
    return {output: torch.stack([values[index] for index in order]) for output, values in found.items()}
