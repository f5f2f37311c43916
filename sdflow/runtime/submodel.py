"""A submodel on a device: its inputs and outputs are torch tensors that stay where they are, one set for each shape.

The CPU and the GPU run the same code. On CUDA everything is queued on one stream, shared with torch, and no run waits;
a graph of the run (CUDA graph) is captured for each shape and replayed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from sdflow.errors import VerificationError
from sdflow.runtime.sessions import Shapes, numpy_type, onnxruntime_errors
from sdflow.targets import CUDA_PROVIDER

if TYPE_CHECKING:
    import numpy as np
    import onnxruntime
    import torch

KEPT = 8
"""For how many shapes a submodel keeps its bound tensors. On CUDA the first ones of a session are captured, no more."""

LoadSession = Callable[["Shapes | None"], "onnxruntime.InferenceSession"]


@dataclass(frozen=True)
class Place:
    """Where tensors lie. device: "cpu" or "cuda". stream: the one stream of all work on it, None on the CPU."""

    device: str
    stream: Any = None

    @contextmanager
    def current(self) -> Iterator[None]:
        """Torch queues its work on the stream in here."""
        import torch

        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            yield


@cache
def place(device: str) -> Place:
    """The place of this name; there is one of each in a process."""
    import torch

    return Place(device, torch.cuda.Stream() if device == "cuda" else None)


class Bound:
    """The tensors of a submodel for one set of shapes. Fill `inputs` in place, then `run`."""

    def __init__(self, session: Any, place: Place, inputs: Mapping[str, torch.Tensor], graph: int) -> None:
        import onnxruntime

        self.inputs = inputs
        self.outputs: dict[str, torch.Tensor] = {}
        self.captured = graph >= 0
        self._session, self._place = session, place
        self._options = onnxruntime.RunOptions()
        self._once = onnxruntime.RunOptions()
        for options, number in ((self._options, graph), (self._once, -1)):
            if place.stream is not None:
                options.add_run_config_entry("disable_synchronize_execution_providers", "1")
                options.add_run_config_entry("gpu_graph_id", str(number))
        self._io = session.io_binding()
        for name, tensor in inputs.items():
            self._io.bind_input(name, place.device, 0, _numpy_dtype(tensor), tuple(tensor.shape), tensor.data_ptr())

    def run(self) -> dict[str, torch.Tensor]:
        """Compute the outputs; on CUDA, queue that. The tensors are the same every time: copy what must last."""
        if self.outputs:
            self._run(self._options)
        else:
            self._first_run()
        return self.outputs

    def _run(self, options: Any) -> None:
        import onnxruntime

        try:
            self._session.run_with_iobinding(self._io, options)
        except onnxruntime_errors(onnxruntime) as error:
            raise VerificationError(f"{self._session.get_providers()[0]} cannot run this graph: {error}") from error

    def _first_run(self) -> None:
        """A run whose outputs ONNX Runtime allocates tells their shapes; what it computed is taken over."""
        import torch

        values = self._session.get_outputs()
        for value in values:
            self._io.bind_output(value.name, self._place.device, 0)
        self._run(self._once)
        outputs = {}
        for value, result in zip(values, self._io.get_outputs(), strict=True):
            shape, dtype = result.shape(), getattr(torch, numpy_type(value))
            outputs[value.name] = torch.empty(shape, dtype=dtype, device=self._place.device)
            if self._place.stream is None:
                outputs[value.name].copy_(torch.from_numpy(result.numpy()))
        for name, tensor in outputs.items():
            self._io.bind_output(
                name, self._place.device, 0, _numpy_dtype(tensor), tuple(tensor.shape), tensor.data_ptr()
            )
        self.outputs = outputs
        if self._place.stream is not None:
            self._run(self._options)


class Submodel:
    """One ONNX graph of a pipeline. The session is loaded when it is first needed.

    load: makes the session, for these shapes where the target wants them static. Not for several threads at once.
    """

    def __init__(
        self,
        load: LoadSession,
        config: Mapping[str, Any],
        place: Place,
        static_shapes: bool = False,
    ) -> None:
        self.config = config
        self.place = place
        self._load, self._static_shapes = load, static_shapes
        self._session: Any = None
        self._session_shapes: Shapes | None = None
        self._bound: OrderedDict[tuple[Any, ...], Bound] = OrderedDict()
        self._graphs = 0

    @property
    def session(self) -> onnxruntime.InferenceSession:
        """The session; loaded if it is not."""
        return self.load()

    def load(self, shapes: Shapes | None = None) -> onnxruntime.InferenceSession:
        """Load the session unless it is there; for these shapes, where the target wants them static."""
        wanted = shapes if self._static_shapes else None
        if self._session is None or (wanted is not None and wanted != self._session_shapes):
            self.unload()
            self._session, self._session_shapes = self._load(wanted), wanted
        return self._session

    def unload(self) -> None:
        """Give the session's memory and all bound tensors back."""
        self._bound.clear()
        self._session, self._graphs = None, 0

    @property
    def input_types(self) -> dict[str, str]:
        """Input name -> numpy type name."""
        return {value.name: numpy_type(value) for value in self.session.get_inputs()}

    def bound(self, **shapes: tuple[int, ...]) -> Bound:
        """The tensors for inputs of these shapes, zero at first.

        Raises VerificationError when the graph has other inputs.
        """
        import torch

        session = self.load(shapes)
        key = tuple(sorted(shapes.items()))
        if key in self._bound:
            self._bound.move_to_end(key)
            return self._bound[key]
        types = self.input_types
        if shapes.keys() != types.keys():
            raise VerificationError(
                f"the graph takes {', '.join(types)}, not {', '.join(shapes)}",
                remedy="Only the architectures of Stable Diffusion 1.x and 2.x are supported.",
            )
        graph = -1
        provider = session.get_provider_options().get(CUDA_PROVIDER, {})
        if provider.get("enable_cuda_graph") == "1" and self._graphs < KEPT:
            graph, self._graphs = self._graphs, self._graphs + 1
        elif len(self._bound) >= KEPT + self._graphs:  # those that are captured stay: a graph cannot be captured again
            self._bound.pop(next(old for old, each in self._bound.items() if not each.captured))
        with self.place.current():
            inputs = {
                name: torch.zeros(shapes[name], dtype=getattr(torch, dtype), device=self.place.device)
                for name, dtype in types.items()
            }
            self._bound[key] = Bound(session, self.place, inputs, graph)
        return self._bound[key]

    def __call__(self, **inputs: np.ndarray) -> dict[str, np.ndarray]:
        """Arrays to arrays, cast to the types that the graph declares, by way of the bound tensors."""
        import torch

        bound = self.bound(**{name: value.shape for name, value in inputs.items()})
        with self.place.current():
            for name, value in inputs.items():
                bound.inputs[name].copy_(torch.from_numpy(value))
            outputs = bound.run()
            return {name: tensor.to("cpu", copy=True).numpy() for name, tensor in outputs.items()}


def _numpy_dtype(tensor: torch.Tensor) -> Any:
    import numpy as np

    return np.dtype(str(tensor.dtype).removeprefix("torch."))
