"""Weights that can be overwritten between runs: a submodel's sessions read them from sdflow's memory.

They are graph inputs. ONNX Runtime neither folds nor packs inputs, so the next run reads what was written, also in
captured CUDA graphs, whose addresses are fixed.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sdflow.onnx_model.facts import dtype_name, tensor_bytes
from sdflow.onnx_model.files import data_span, is_external
from sdflow.onnx_model.nodes import attributes, refill
from sdflow.runtime.sessions.session import read_graph

if TYPE_CHECKING:
    import onnx
    import torch


class LiveWeights:
    """Some weights of one model. Not thread-safe."""

    def __init__(self, own: Mapping[str, torch.Tensor]) -> None:
        """own: the model's own values by initializer name, on the device. They are not modified."""
        self._own = dict(own)
        self._slots = {name: value.clone() for name, value in own.items()}
        self._held = {name: weakref.ref(value) for name, value in own.items()}

    @property
    def size(self) -> int:
        """Size of the writable memory in bytes."""
        return sum(slot.nbytes for slot in self._slots.values())

    def open(self, graph: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, torch.Tensor]]:
        """Return a copy of a graph, or of a part of it, with these weights as inputs, and the tensors to bind."""
        from onnx import ModelProto, helper

        live = [tensor for tensor in graph.graph.initializer if tensor.name in self._slots]
        opened = ModelProto()
        opened.CopyFrom(graph)
        refill(opened.graph.initializer, (t for t in graph.graph.initializer if t.name not in self._slots))
        matrices = _as_products(opened, {tensor.name: tuple(tensor.dims) for tensor in live})
        slots = {
            tensor.name: self._slots[tensor.name].view(matrices.get(tensor.name, tuple(tensor.dims))) for tensor in live
        }
        opened.graph.input.extend(
            helper.make_tensor_value_info(tensor.name, tensor.data_type, list(slots[tensor.name].shape))
            for tensor in live
        )
        return opened, slots

    def hold(self, values: Mapping[str, torch.Tensor]) -> None:
        """Set the values for the next runs; missing ones revert to the model's own. On a GPU, queued on the current
        stream."""
        for name, slot in self._slots.items():
            wanted = values.get(name, self._own[name])
            if self._held[name]() is not wanted:
                slot.copy_(wanted)
                self._held[name] = weakref.ref(wanted)


def _as_products(model: onnx.ModelProto, live: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, int]]:
    """Replace NhwcConv nodes with a live weight by matrix products, in place; return these weights' new shapes.

    ONNX Runtime's CUDA provider does not support NhwcConv with a weight input. For 1x1 kernels it equals (images, rows,
    columns, channels) times the transpose of (filters, 1, 1, channels).
    """
    from onnx import helper

    shapes: dict[str, tuple[int, int]] = {}
    nodes = []
    for node in model.graph.node:
        if node.op_type != "NhwcConv" or node.input[1] not in live:
            nodes.append(node)
            continue
        image, weight, *bias = node.input
        shapes[weight] = (live[weight][0], live[weight][-1])
        product = f"{node.output[0]}/product" if bias else node.output[0]
        nodes.append(
            helper.make_node("FusedMatMul", [image, weight], [product], node.name, domain="com.microsoft", transB=1)
        )
        if bias:
            nodes.append(helper.make_node("Add", [product, bias[0]], [node.output[0]], f"{node.name}/Add"))
    refill(model.graph.node, nodes)
    return shapes


def over_single_pixels(node: onnx.NodeProto) -> bool:
    """Whether a convolution equals a matrix product."""
    found = attributes(node)
    ones = {"kernel_shape": 1, "strides": 1, "dilations": 1, "pads": 0}
    return (
        found.get("kernel_shape") is not None
        and all(set(found.get(name, [])) <= {value} for name, value in ones.items())
        and found.get("group", 1) == 1
        and found.get("auto_pad", b"NOTSET") == b"NOTSET"
    )


def own_values(model: Path, names: Collection[str], device: str) -> dict[str, torch.Tensor]:
    """Return weights from a model's data file by name. On the CPU they are memory-mapped, so the file must not
    change."""
    import numpy as np
    import torch

    found = {}
    for tensor in read_graph(model).graph.initializer:
        if tensor.name in names and is_external(tensor):
            location, offset, _ = data_span(tensor)
            # Copy on write: torch requires writable memory. As bytes: numpy lacks torch's bfloat16.
            data = np.memmap(model.parent / location, np.uint8, "c", offset, (tensor_bytes(tensor),))
            values = torch.from_numpy(data).view(getattr(torch, dtype_name(tensor.data_type)))
            found[tensor.name] = values.view(tuple(tensor.dims)).to(device)
    return found
