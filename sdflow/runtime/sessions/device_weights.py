"""A model's weights on a CUDA device, shared by all sessions of the model.

Sessions that load weights themselves each hold a copy, for each size and part of a graph (`specialize`, `split`), and
request every weight from the driver, which allocates in units of 2 MB: 0.5 GB of overhead for Stable Diffusion 1.5.
Instead, sessions use these values (`SessionOptions.add_initializer`); values that ONNX Runtime changes while loading
are still read from the file.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from sdflow.errors import UsageError
from sdflow.onnx_model.files import is_external
from sdflow.runtime.sessions.moving_memory import MovingMemory
from sdflow.runtime.sessions.residency import Residency, Resident
from sdflow.runtime.sessions.session import read_graph
from sdflow.runtime.sessions.spans import Span, aligned, span_of
from sdflow.runtime.sessions.stream_plan import StreamPlan
from sdflow.runtime.sessions.streamed_weights import StreamedWeights

if TYPE_CHECKING:
    import onnx
    import onnxruntime
    import torch


class DeviceWeights:
    """A model's external data in one block of device memory, copied on first use.

    model: path of the ModelProto; its data file is in the same folder and must not change. residency: manages weights
    that take turns; None: they stay. plan: weights that are streamed instead of being in the block. delay: see
    `StreamedWeights`.
    """

    def __init__(
        self,
        model: Path,
        device: str,
        residency: Residency | None = None,
        plan: StreamPlan | None = None,
        *,
        delay: int = 0,
    ) -> None:
        self._model, self._device = model, device
        self.plan, self._delay = plan, delay
        self._lock = threading.Lock()
        self._values: dict[Span, torch.Tensor] | None = None
        self._residency = residency
        self.resident: Resident | None = None
        """Sessions must use the weights through this; None if the weights stay on the device."""
        self._streams: StreamedWeights | None = None
        self.working = 0
        """Working memory (`row_bytes`, in float32) to keep free for the first runs of sessions created from now on, in
        bytes."""

    @property
    def loaded(self) -> bool:
        """Whether the weights have been copied to the device."""
        return self._values is not None

    def load(self) -> None:
        """Copy the weights to the device, unless they are there. Raises VerificationError like `of`."""
        self._loaded()

    def _loaded(self) -> dict[Span, torch.Tensor]:
        with self._lock:
            if self._values is None:
                self._values = self._copied()
            return self._values

    def of(self, graph: onnx.ModelProto) -> dict[str, onnxruntime.OrtValue]:
        """Return initializer name -> device value, for a graph whose initializers are in the model's data file.

        Raises VerificationError if the data file is missing or too short.
        """
        import onnxruntime

        return {name: onnxruntime.OrtValue.from_dlpack(value) for name, value in self._of(graph).items()}

    def streams(self) -> StreamedWeights | None:
        """Return the weights that sessions must take as inputs because they are streamed, if any. Raises
        TargetUnavailableError without a C compiler."""
        if self.plan is None:
            return None
        self.load()
        return self._streams

    def tensors(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Return the same memory as read-only tensors, by the model's names. The weights stay on the device from now
        on.

        Raises UsageError if weights are streamed.
        """
        if self.plan is not None:
            raise UsageError(
                "its weights are streamed to the device, so LoRAs cannot be chosen per request",
                where=str(self._model.parent),
                remedy="Merge the LoRAs when the pipeline is built (loras: in the workflow), or allow more memory "
                "(--device-memory).",
            )
        found = {name: value for name, value in self._of(read_graph(self._model)).items() if name in names}
        if self.resident is not None:
            self.resident.residency.stay(self.resident.weights)
        return found

    def _of(self, graph: onnx.ModelProto) -> dict[str, torch.Tensor]:
        values = self._loaded()
        wanted = {tensor.name: span_of(tensor) for tensor in graph.graph.initializer if is_external(tensor)}
        return {name: values[span] for name, span in wanted.items() if span in values}

    def release(self) -> None:
        """Release the memory, which is freed once its sessions are gone too."""
        with self._lock:
            self._values = self._streams = None
            if self.resident is not None:
                self.resident.residency.forget(self.resident.weights)
                self.resident = None

    def _copied(self) -> dict[Span, torch.Tensor]:
        import numpy as np
        import torch
        from onnx import TensorProto
        from onnx.helper import tensor_dtype_to_np_dtype

        tensors = read_graph(self._model).graph.initializer
        streamed: set[Span] = set() if self.plan is None else set(self.plan.streamed)
        found = {span_of(tensor): tensor for tensor in tensors if is_external(tensor) and span_of(tensor)[2]}
        found = {span: tensor for span, tensor in found.items() if span not in streamed}
        sizes = [aligned(length) for _, _, length in found]
        size = sum(sizes)

        def read(memory: torch.Tensor, begin: int = 0) -> None:
            """Read the values that do not end before `begin`."""
            # Copy on write: torch requires writable memory. Mapping a file for each value would take as long as copying.
            files = {name: np.memmap(self._model.parent / name, np.uint8, "c") for name in {span[0] for span in found}}
            end, slots, values = 0, list[torch.Tensor](), list[torch.Tensor]()
            for (location, offset, length), slot in zip(found, memory.split(sizes), strict=True):
                end += len(slot)
                if end <= begin:
                    continue
                slots.append(slot[:length])
                values.append(torch.from_numpy(files[location][offset : offset + length]))
            # In one call: between calls, Python's threads take turns, which took longer than copying.
            if slots:
                torch._foreach_copy_(slots, values)

        if self._residency is None:
            memory = torch.empty(size, dtype=torch.uint8, device=self._device)
            read(memory)
        else:
            moving = MovingMemory(size, self._device, read)
            self.resident = Resident(self._residency, moving)
            weakref.finalize(self, self._residency.forget, moving).atexit = False
            with self.resident.using():
                memory = moving.bytes()
        if self.plan is not None:
            self._streams = StreamedWeights(self._model.parent, self.plan, self._device, delay=self._delay)
        values = {}
        for span, slot in zip(found, memory.split(sizes), strict=True):
            length = span[2]
            element = found[span].data_type
            if element == TensorProto.FLOAT8E4M3FN:  # sessions read it as bytes (`sdflow.runtime.kernels.float8`)
                element = TensorProto.UINT8
            dtype = getattr(torch, str(np.dtype(tensor_dtype_to_np_dtype(element))))
            values[span] = slot[:length].view(dtype).view(tuple(found[span].dims))
        return values
