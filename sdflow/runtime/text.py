"""The text encoders of a pipeline, on any number of texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sdflow.runtime.submodel import Submodel

if TYPE_CHECKING:
    import torch


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
            bound.inputs[port].copy_(value[pair])  # a single one goes to both places
        for output, value in bound.run().items():
            if read is None or output in read:
                found.setdefault(output, []).extend(value[: len(pair)].clone())
    order = [once.index(row) for row in rows]
    return {output: torch.stack([values[index] for index in order]) for output, values in found.items()}
