"""Weights of a submodel that may be written between two runs: its sessions read them from memory of ours.

They are inputs of the graphs. What is an input is neither folded nor packed by ONNX Runtime, so what is written is what the next
run reads; in a captured CUDA graph too, whose addresses stay.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sdflow.onnx_model.files import data_span, is_external
from sdflow.onnx_model.nodes import copied
from sdflow.runtime.sessions import read_graph

if TYPE_CHECKING:
    import onnx
    import torch


class LiveWeights:
    """Some weights of one model. Not for several threads at once."""

    def __init__(self, own: Mapping[str, torch.Tensor]) -> None:
        """own: the values that the model has, by the names of its initializers, on the device. They are left as they are."""
        self._own = dict(own)
        self._slots = {name: value.clone() for name, value in own.items()}
        self._held = dict(own)

    def open(self, graph: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, torch.Tensor]]:
        """A copy of a graph, or of a part of it, that takes these as inputs; and what they are to be bound to."""
        from onnx import ModelProto, helper

        live = [tensor for tensor in graph.graph.initializer if tensor.name in self._slots]
        others = [copied(tensor) for tensor in graph.graph.initializer if tensor.name not in self._slots]
        opened = ModelProto()
        opened.CopyFrom(graph)
        del opened.graph.initializer[:]
        opened.graph.initializer.extend(others)
        opened.graph.input.extend(
            helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)) for tensor in live
        )
        return opened, {tensor.name: self._slots[tensor.name] for tensor in live}

    def hold(self, values: Mapping[str, torch.Tensor]) -> None:
        """Let the next runs read these, and the model's own where there are none. On a GPU, queued on the current stream."""
        for name, slot in self._slots.items():
            wanted = values.get(name, self._own[name])
            if self._held[name] is not wanted:
                slot.copy_(wanted)
                self._held[name] = wanted


def own_values(model: Path, names: Collection[str], device: str) -> dict[str, torch.Tensor]:
    """Weights of a model's data file by their names. On the CPU they stay in the file until they are read, which must stay as
    it is."""
    import numpy as np
    import torch
    from onnx.helper import tensor_dtype_to_np_dtype

    found = {}
    for tensor in read_graph(model).graph.initializer:
        if tensor.name in names and is_external(tensor):
            location, offset, _ = data_span(tensor)
            dtype = np.dtype(tensor_dtype_to_np_dtype(tensor.data_type))
            # Copy on write: torch wants memory that it may write to.
            data = np.memmap(model.parent / location, dtype, "c", offset, tuple(tensor.dims))
            found[tensor.name] = torch.from_numpy(data).to(device)
    return found
