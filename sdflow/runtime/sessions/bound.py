"""Input and output tensors bound to a session by address, so runs copy nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sdflow.machine.memory import HOST
from sdflow.machine.onnx_runtime import numpy_type, onnxruntime_errors
from sdflow.runtime.sessions.cannot_run import cannot_run
from sdflow.runtime.sessions.cublas import small_workspaces
from sdflow.runtime.sessions.place import Place
from sdflow.runtime.sessions.residency import Resident
from sdflow.targets import CPU_PROVIDER

if TYPE_CHECKING:
    import onnxruntime
    import torch

BFLOAT16 = 16
"""onnx.TensorProto.BFLOAT16. ONNX Runtime accepts numpy's type names or ONNX's numbers, and numpy has no bfloat16."""


class Bound:
    """A session's tensors for one set of shapes. Fill `inputs` in place, then `run`.

    If the session allows it and all its shapes are fixed, the first run is captured in a CUDA graph, the session's only
    one; later runs replay it.

    holds: owner of the values last written to `inputs`, for callers that share it.
    prepared: whether another Bound of the session has already run with these shapes.
    """

    holds: object = None

    def __init__(
        self, session: Any, place: Place, inputs: Mapping[str, torch.Tensor], *, prepared: bool = False
    ) -> None:
        import onnxruntime

        axes = [size for value in (*session.get_inputs(), *session.get_outputs()) for size in value.shape]
        fixed = all(isinstance(size, int) for size in axes)
        self.inputs = inputs
        self.outputs: dict[str, torch.Tensor] = {}
        self._session: onnxruntime.InferenceSession = session
        self._place = place
        self._resident: Resident | None = getattr(session, "resident", None)
        self._working: int = getattr(session, "working", 0)
        self._shrinks: bool = getattr(session, "shrinks", False)
        self._options = onnxruntime.RunOptions()
        # With nodes on the CPU, ONNX Runtime must wait for the device: queued runs gave wrong results on an H200.
        self._waits = place.stream is not None and not getattr(session, "whole", True)
        if place.stream is not None and not self._waits:
            self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        if place.stream is not None:
            self._options.add_run_config_entry("gpu_graph_id", "0" if fixed and not self._shrinks else "-1")
            if self._shrinks:
                self._options.add_run_config_entry("memory.enable_memory_arena_shrinkage", f"gpu:{place.index}")
        self._unprepared = place.stream is not None and not prepared
        self._io = session.io_binding()
        # ONNX Runtime copies inputs from another device at binding time.
        self._copied = place.device == HOST and session.get_providers()[0] != CPU_PROVIDER
        self._bind_inputs()
        if fixed:
            self._bind_outputs({value.name: value.shape for value in session.get_outputs()})

    @property
    def session(self) -> onnxruntime.InferenceSession:
        """The bound session."""
        return self._session

    def run(self) -> dict[str, torch.Tensor]:
        """Compute the outputs; on CUDA, queue the run. The tensors are reused: copy results that must last."""
        if self.outputs:
            self._run()
        else:
            self._find_outputs()
        return self.outputs

    def prepare(self) -> Bound:
        """On a GPU, do everything that precedes the first run, unless shapes vary; return self. Several sessions may do this
        concurrently, each in its own thread, as long as no run is being captured."""
        if self._unprepared and self.outputs:
            with self._place.current(), self._ready():
                pass
        return self

    def _run(self) -> None:
        with self._ready():
            if self._copied:
                self._bind_inputs()
            if self._waits:
                self._place.stream.synchronize()
            self._session.run_with_iobinding(self._io, self._options)

    @contextmanager
    def _ready(self) -> Iterator[None]:
        """Keep the weights and working memory on the device within this context, with the session prepared."""
        import onnxruntime

        try:
            # The arena keeps the memory of the first run, unless it shrinks.
            working = self._working if self._unprepared or self._shrinks else None
            with nullcontext() if self._resident is None else self._resident.using(working):
                if self._unprepared:
                    self._prepare()
                yield
        except onnxruntime_errors(onnxruntime) as error:
            target, built_for = (getattr(self._session, name, None) for name in ("loaded_on", "built_for"))
            provider = self._session.get_providers()[0]
            raise cannot_run(provider, error, target=target, built_for=built_for) from error

    def _bind_inputs(self) -> None:
        for name, tensor in (*self.inputs.items(), *_live(self._session).items()):
            self._io.bind_input(name, *self._described(tensor))

    def _prepare(self) -> None:
        """Run once before the first real run on a device, so that cuDNN tries its algorithms, and return their workspaces to
        the device: memory that the arena holds during a capture would stay allocated."""
        import onnxruntime

        self._unprepared = False
        trial = onnxruntime.RunOptions()
        trial.add_run_config_entry("gpu_graph_id", "-1")
        trial.add_run_config_entry("memory.enable_memory_arena_shrinkage", f"gpu:{self._place.index}")
        with small_workspaces():  # cuBLAS may create its handles here
            self._session.run_with_iobinding(self._io, trial)

    def _find_outputs(self) -> None:
        """Run with outputs allocated by ONNX Runtime to learn their shapes; on the CPU, keep these results."""
        import torch

        names = [value.name for value in self._session.get_outputs()]
        for name in names:
            self._io.bind_output(name, self._place.kind, self._place.index)
        self._run()
        found = dict(zip(names, self._io.get_outputs(), strict=True))
        self._bind_outputs({name: value.shape() for name, value in found.items()})
        if self._place.stream is not None:
            self._run()
            return
        for name, value in found.items():
            self.outputs[name].copy_(torch.from_numpy(value.numpy()))

    def _bind_outputs(self, shapes: Mapping[str, Sequence[int]]) -> None:
        import torch

        for value in self._session.get_outputs():
            dtype = getattr(torch, numpy_type(value))
            tensor = torch.empty(tuple(shapes[value.name]), dtype=dtype, device=self._place.device)
            self.outputs[value.name] = tensor
            self._io.bind_output(value.name, *self._described(tensor))

    def _described(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        import numpy as np

        name = str(tensor.dtype).removeprefix("torch.")
        dtype = BFLOAT16 if name == "bfloat16" else np.dtype(name)
        return self._place.kind, self._place.index, dtype, tuple(tensor.shape), tensor.data_ptr()


def data_inputs(session: Any) -> list[Any]:
    """Return a session's inputs without live weights."""
    return [value for value in session.get_inputs() if value.name not in _live(session)]


def empty_inputs(
    session: Any, device: str, known: Mapping[str, torch.Tensor] = MappingProxyType({})
) -> dict[str, torch.Tensor]:
    """Return the inputs of a session of fixed shapes: known tensors, zeros for others."""
    import torch

    return {
        value.name: known[value.name]
        if value.name in known
        else torch.zeros(tuple(value.shape), dtype=getattr(torch, numpy_type(value)), device=device)
        for value in data_inputs(session)
    }


def _live(session: Any) -> Mapping[str, torch.Tensor]:
    live: Mapping[str, torch.Tensor] = getattr(session, "live", {})
    return live


def input_types(session: Any) -> dict[str, str]:
    """Return input name -> numpy type name, without live weights."""
    return {value.name: numpy_type(value) for value in data_inputs(session)}
