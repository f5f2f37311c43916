"""A submodel on a device, with torch tensors as inputs and outputs that are reused per set of shapes.

CPU and GPU use the same code. On CUDA, everything is queued on one stream shared with torch, and no run synchronizes;
runs of graphs with fixed shapes are captured (CUDA graphs) and replayed.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdflow.errors import PassError, SlowerWarning, VerificationError
from sdflow.families.shared.part import Part
from sdflow.models.ports import Role
from sdflow.runtime.sessions.bound import Bound, input_types
from sdflow.runtime.sessions.device_weights import DeviceWeights
from sdflow.runtime.sessions.dimensions import free_dimensions
from sdflow.runtime.sessions.engine_cache import Profile, Shapes
from sdflow.runtime.sessions.place import Place
from sdflow.runtime.sessions.residency import Residency
from sdflow.runtime.sessions.session import read_graph

if TYPE_CHECKING:
    import numpy as np
    import onnx
    import onnxruntime

KEPT = 4
"""Number of shape sets whose tensors a submodel keeps; on CUDA, each has its own session and captured graph."""

LoadSession = Callable[..., "onnxruntime.InferenceSession"]
"""Creates a session from shapes (for targets with static shapes, else None) and, for a part of the graph, its
ModelProto and whether it may be captured; `edits`: changes of the whole graph."""

Edit = Callable[["onnx.ModelProto"], None]
"""Changes a graph in place before a session is created from it."""


class Submodel:
    """An ONNX graph of a pipeline. The session is created on first use. Not thread-safe.

    load: creates the session. part: the family's. static_shapes: the target needs a session per set of shapes.
    profiles: the target needs the range of shapes. path: of the model. fixed: create a session per set of shapes, with
    shape arithmetic folded (`specialize`), which allows capturing. outputs: the wanted ones, None for all. weights:
    shared by its sessions on the device.
    edits: changes to the graph when it is loaded. residency: manages weights that take turns on the device; None: they
    stay.
    """

    def __init__(
        self,
        load: LoadSession,
        part: Part,
        config: Mapping[str, Any],
        place: Place,
        *,
        static_shapes: bool = False,
        profiles: bool = False,
        path: Path | None = None,
        fixed: bool = False,
        outputs: Sequence[str] | None = None,
        weights: DeviceWeights | None = None,
        edits: Sequence[Edit] = (),
        residency: Residency | None = None,
    ) -> None:
        self.part = part
        self.residency = residency
        self.config = config
        self.place = place
        self.path = path
        self.static_shapes, self.profiles = static_shapes, profiles
        self._load, self._fixed, self._outputs, self.weights = load, fixed, outputs, weights
        self.edits = tuple(edits)
        self._session: Any = None
        self._session_shapes: Shapes | None = None
        self._profile: Profile | None = None
        self._bound: OrderedDict[tuple[Any, ...], Bound] = OrderedDict()
        self.reached = 0
        """Estimated memory of the largest run so far, in bytes; its session retains it."""
        self.banded: tuple[Any, Any] | None = None
        """The size and tiling of the last run in bands, and the `Bands` made for it (`sdflow.runtime.bands`)."""
        self.blends = False
        """Whether the graph turned out to be unable to run in bands."""

    @property
    def session(self) -> onnxruntime.InferenceSession:
        """Session of the whole graph; created on first use."""
        return self.load()

    def load(self, shapes: Shapes | None = None) -> onnxruntime.InferenceSession:
        """Create the session if needed; for these shapes if the target needs static ones."""
        if self.profiles and shapes is not None:
            return self._load_profiled(shapes)
        wanted = shapes if self.static_shapes else None
        if self._session is None or (wanted is not None and wanted != self._session_shapes):
            self.unload()
            self._session, self._session_shapes = self._load(wanted, edits=self.edits), wanted
        return self._session

    def _load_profiled(self, shapes: Shapes) -> onnxruntime.InferenceSession:
        """Return a session for these shapes and all earlier ones."""
        profile = Profile.of(shapes) if self._profile is None else self._profile.with_shapes(shapes)
        if self._session is None or profile != self._profile:
            if self._profile not in (None, profile):
                warnings.warn(
                    f"{self.part.name}: building an engine for more sizes, which takes minutes the first time",
                    SlowerWarning,
                    stacklevel=3,
                )
            self.unload()
            self._session, self._profile = self._load(None, edits=self.edits, profile=profile), profile
        return self._session

    def graph(self) -> onnx.ModelProto:
        """Return the ModelProto as loaded, without external data."""
        assert self.path is not None, "only submodels of a pipeline folder have a graph"
        return read_edited(self.path, self.edits)

    def changed(self, edit: Edit | None = None, config: Mapping[str, Any] | None = None) -> Submodel:
        """Return the submodel with one more edit, or with another config; it creates its own sessions."""
        config = self.config if config is None else config
        return Submodel(
            self._load,
            self.part,
            config,
            self.place,
            static_shapes=self.static_shapes,
            profiles=self.profiles,
            path=self.path,
            fixed=self._fixed,
            outputs=None if self.part.read is None else self.part.read(config),
            weights=self.weights,
            edits=self.edits if edit is None else (*self.edits, edit),
            residency=self.residency,
        )

    def unload(self) -> None:
        """Free the sessions' memory and all bound tensors."""
        self._bound.clear()
        self._session = self.banded = None
        self.reached = 0
        if self.weights is not None:
            self.weights.release()

    def load_weights(self) -> None:
        """Copy weights that its sessions share to the device, unless they are there."""
        if self.weights is not None:
            with self.place.current():
                self.weights.load()

    def part_session(self, graph: Any, *, capture: bool = True) -> onnxruntime.InferenceSession:
        """Create a session for a part of the graph (a ModelProto) with the same options. capture: whether shapes are
        fixed."""
        return self._load(None, graph, capture)

    def port(self, role: Role) -> str:
        """Return the name of the only input or output with this role."""
        return self.part.ports(self.config).of(role)

    def shapes(self, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """Return input name -> shape for these axis sizes by name."""
        return {port.name: port.shape(sizes) for port in self.part.model.ports(self.config).inputs}

    @property
    def input_types(self) -> dict[str, str]:
        """Input name -> numpy type name."""
        if self._session is not None or self.path is None:
            return input_types(self.session)
        from onnx.helper import tensor_dtype_to_np_dtype

        inputs = read_graph(self.path).graph.input
        return {item.name: tensor_dtype_to_np_dtype(item.type.tensor_type.elem_type).name for item in inputs}

    def bound(self, **shapes: tuple[int, ...]) -> Bound:
        """Return the tensors for inputs of these shapes, initially zero.

        Raises VerificationError if the graph has other inputs.
        """
        import torch

        key = tuple(sorted(shapes.items()))
        if key in self._bound:
            self._bound.move_to_end(key)
            return self._bound[key]
        session = self._session_for(shapes)
        types = input_types(session)
        if shapes.keys() != types.keys():
            raise VerificationError(
                f"the graph takes {', '.join(types)}, not {', '.join(shapes)}",
                remedy="The graph and its config.json do not match: rebuild the pipeline with sdflow run.",
            )
        while len(self._bound) >= KEPT:
            self._bound.popitem(last=False)
        with self.place.current():
            inputs = {
                name: torch.zeros(shapes[name], dtype=getattr(torch, dtype), device=self.place.device)
                for name, dtype in types.items()
            }
            self._bound[key] = Bound(session, self.place, inputs)
        return self._bound[key]

    def _session_for(self, shapes: Shapes) -> Any:
        """Return a session of the graph for exactly these shapes, or that of the whole graph."""
        from sdflow.runtime.sessions.specialize import specialize

        if not self._fixed or self.path is None:
            return self.load(shapes)
        try:
            graph = self.graph()
            sizes = free_dimensions(graph, shapes, str(self.path))
            return self.part_session(specialize(graph, sizes, self._outputs))
        except PassError as error:
            warnings.warn(f"{self.path} runs with dynamic shapes: {error}", SlowerWarning, stacklevel=2)
            return self.load(shapes)

    def __call__(self, **inputs: np.ndarray) -> dict[str, np.ndarray]:
        """Run on arrays, cast to the graph's input types, through the bound tensors."""
        import torch

        bound = self.bound(**{name: value.shape for name, value in inputs.items()})
        with self.place.current():
            for name, value in inputs.items():
                bound.inputs[name].copy_(torch.from_numpy(value))
            outputs = bound.run()
            return {name: tensor.to("cpu", copy=True).numpy() for name, tensor in outputs.items()}


def read_edited(model: Path, edits: Sequence[Edit]) -> onnx.ModelProto:
    """Return the edited model without its external data. Raises VerificationError like `read_graph`, and the edits'
    errors."""
    graph = read_graph(model)
    for edit in edits:
        edit(graph)
    return graph
