"""A submodel on a device: its inputs and outputs are torch tensors that stay where they are, one set for each shape.

The CPU and the GPU run the same code. On CUDA everything is queued on one stream, shared with torch, and no run waits;
a graph of the run (CUDA graph) is captured for each shape and replayed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
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

LoadSession = Callable[..., "onnxruntime.InferenceSession"]
"""Shapes (for targets that want them static, else None) and, for a part of the graph, its ModelProto, to a session."""


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


def captures(session: Any) -> bool:
    """Whether the session's runs may be captured in CUDA graphs."""
    return bool(session.get_provider_options().get(CUDA_PROVIDER, {}).get("enable_cuda_graph") == "1")


class Bound:
    """The tensors of a session for one set of shapes. Fill `inputs` in place, then `run`.

    graph: the number of its CUDA graph, captured at the first run; -1 for none.
    """

    def __init__(self, session: Any, place: Place, inputs: Mapping[str, torch.Tensor], graph: int = -1) -> None:
        import onnxruntime

        self.inputs = inputs
        self.outputs: dict[str, torch.Tensor] = {}
        self.captured = graph >= 0
        self._session, self._place = session, place
        self._options, self._uncaptured = onnxruntime.RunOptions(), onnxruntime.RunOptions()
        if place.stream is not None:
            for options, number in ((self._options, graph), (self._uncaptured, -1)):
                options.add_run_config_entry("disable_synchronize_execution_providers", "1")
                options.add_run_config_entry("gpu_graph_id", str(number))
        self._io = session.io_binding()
        for name, tensor in inputs.items():
            self._io.bind_input(name, *self._described(tensor))
        shapes = {value.name: value.shape for value in session.get_outputs()}
        if all(isinstance(size, int) for shape in shapes.values() for size in shape):
            self._bind_outputs(shapes)

    def run(self) -> dict[str, torch.Tensor]:
        """Compute the outputs; on CUDA, queue that. The tensors are the same every time: copy what must last."""
        if not self.outputs:
            self._find_outputs()
        self._run(self._options)
        return self.outputs

    def _run(self, options: Any) -> None:
        import onnxruntime

        try:
            self._session.run_with_iobinding(self._io, options)
        except onnxruntime_errors(onnxruntime) as error:
            raise VerificationError(f"{self._session.get_providers()[0]} cannot run this graph: {error}") from error

    def _find_outputs(self) -> None:
        """A run whose outputs ONNX Runtime allocates tells their shapes."""
        names = [value.name for value in self._session.get_outputs()]
        for name in names:
            self._io.bind_output(name, self._place.device, 0)
        self._run(self._uncaptured)
        self._bind_outputs(dict(zip(names, (value.shape() for value in self._io.get_outputs()), strict=True)))

    def _bind_outputs(self, shapes: Mapping[str, Sequence[int]]) -> None:
        import torch

        for value in self._session.get_outputs():
            dtype = getattr(torch, numpy_type(value))
            tensor = torch.empty(tuple(shapes[value.name]), dtype=dtype, device=self._place.device)
            self.outputs[value.name] = tensor
            self._io.bind_output(value.name, *self._described(tensor))

    def _described(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        import numpy as np

        dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
        return self._place.device, 0, dtype, tuple(tensor.shape), tensor.data_ptr()


class Submodel:
    """One ONNX graph of a pipeline. The session is loaded when it is first needed.

    static_shapes: the target wants a session for each set of shapes. path: of the model. Not for several threads at once.
    """

    def __init__(
        self,
        load: LoadSession,
        config: Mapping[str, Any],
        place: Place,
        static_shapes: bool = False,
        path: Path | None = None,
    ) -> None:
        self.config = config
        self.place = place
        self.path = path
        self.static_shapes = static_shapes
        self._load = load
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
        wanted = shapes if self.static_shapes else None
        if self._session is None or (wanted is not None and wanted != self._session_shapes):
            self.unload()
            self._session, self._session_shapes = self._load(wanted), wanted
        return self._session

    def unload(self) -> None:
        """Give the session's memory and all bound tensors back."""
        self._bound.clear()
        self._session, self._graphs = None, 0

    def part(self, graph: Any) -> onnxruntime.InferenceSession:
        """A session for a part of the graph, a ModelProto, with the same options."""
        return self._load(None, graph)

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
        if captures(session) and self._graphs < KEPT:
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
