"""Weights that wait in host memory and are copied to the GPU in every run (`sdflow.runtime.sessions.stream_plan`)."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sdflow.errors import SlowerWarning
from sdflow.machine.memory import HOST, available_bytes
from sdflow.onnx_model.facts import dtype_name
from sdflow.onnx_model.files import is_external
from sdflow.runtime.kernels.library import operator_library
from sdflow.runtime.sessions.moving_memory import HOST_SHARE, page_locked, unlock
from sdflow.runtime.sessions.spans import Span, aligned, span_of
from sdflow.runtime.sessions.stream_plan import StreamPlan
from sdflow.runtime.sessions.streamed_graph import Copy, Placed, with_streaming
from sdflow.units import spell_bytes

if TYPE_CHECKING:
    import numpy as np
    import onnx
    import torch


class StreamedWeights:
    """The streamed weights of one model, shared by its sessions, which must run on one stream.

    folder: of the data files, which must not change. plan: what is streamed. delay: see `with_streaming`.
    """

    def __init__(self, folder: Path, plan: StreamPlan, device: str, *, delay: int = 0) -> None:
        self._folder, self._plan, self._device, self._delay = folder, plan, device, delay
        self._buffers = plan.buffers.on(device)
        self.memory: torch.Tensor | None = None
        """Host memory that holds them; None if their files are mapped instead."""
        self._locked = False
        self._files: dict[str, np.ndarray] = {}
        self.library = operator_library(int(device.partition(":")[2] or 0))
        self._at = self._read()

    @property
    def captures(self) -> bool:
        """Whether runs can be captured in a CUDA graph, which requires page-locked memory."""
        return self._locked or self._buffers[0].device.type == "cpu"

    def open(self, model: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, torch.Tensor]]:
        """Return a copy of a graph that takes its streamed weights as inputs, and the tensors to bind to these. The graph must
        not be edited afterwards, because its nodes contain addresses. Raises PassError like `with_streaming`."""
        import torch

        tensors = {tensor.name: tensor for tensor in model.graph.initializer if is_external(tensor)}
        spans = {name: span_of(tensor) for name, tensor in tensors.items() if span_of(tensor) in self._at}

        def copies(placed: Sequence[Placed]) -> Iterator[Copy]:
            whole: Copy | None = None
            for each in placed:
                span = spans[each.weight]
                target = self._buffers[each.buffer].data_ptr() + each.offset
                size = aligned(span[2]) if self.memory is not None else span[2]
                if whole is not None and (whole.source + whole.size, whole.target + whole.size) == (
                    self._at[span],
                    target,
                ):
                    whole = Copy(whole.source, whole.target, whole.size + size)
                    continue
                if whole is not None:
                    yield whole
                whole = Copy(self._at[span], target, size)
            if whole is not None:
                yield whole

        sizes = {name: aligned(span[2]) for name, span in spans.items()}
        opened, placed = with_streaming(model, sizes, self._plan.buffers.size, copies, delay=self._delay)
        inputs = {}
        for each in placed:
            tensor, length = tensors[each.weight], spans[each.weight][2]
            values = self._buffers[each.buffer][each.offset : each.offset + length]
            dtype = getattr(torch, dtype_name(tensor.data_type))
            inputs[each.name] = values.view(dtype).view(tuple(tensor.dims))
        return opened, inputs

    def _read(self) -> dict[Span, int]:
        """Read the weights into page-locked memory, or into pageable memory if the driver cannot lock any. If host memory is
        short, map the files instead. Return the weights' addresses."""
        import numpy as np
        import torch

        size = sum(aligned(length) for _, _, length in self._plan.streamed)
        free = available_bytes(HOST)
        files: dict[str, np.ndarray] = {
            location: np.memmap(self._folder / location, np.uint8, "c")
            for location in {location for location, _, _ in self._plan.streamed}
        }
        if size >= HOST_SHARE * free:
            warnings.warn(
                f"{self._folder.name} reads {spell_bytes(size)} of weights from the disk in every step, because only "
                f"{spell_bytes(free)} of this computer's memory is free",
                SlowerWarning,
                stacklevel=2,
            )
            self._files = files
            return {span: int(files[span[0]].ctypes.data) + span[1] for span in self._plan.streamed}
        if self._buffers[0].device.type != "cpu":
            self.memory = page_locked(size)
            self._locked = self.memory is not None
            if not self._locked:
                warnings.warn(
                    f"{self._folder.name} streams {spell_bytes(size)} of weights from memory that the driver could not lock, "
                    "so steps wait for their copies",
                    SlowerWarning,
                    stacklevel=2,
                )
        if self.memory is None:
            self.memory = torch.empty(size, dtype=torch.uint8)
        found: dict[Span, int] = {}
        at = 0
        for span in self._plan.streamed:
            location, offset, length = span
            self.memory[at : at + length].copy_(torch.from_numpy(files[location][offset : offset + length]))
            found[span] = self.memory.data_ptr() + at
            at += aligned(length)
        return found

    def __del__(self) -> None:
        if getattr(self, "_locked", False) and self.memory is not None and not sys.is_finalizing():
            unlock(self.memory, self._device)
