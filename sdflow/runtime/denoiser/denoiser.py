"""The denoiser as the loop wants it: told conditions and schedule once, then run step by step; whole, or in parts."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

from sdflow.models.base import Role
from sdflow.runtime.denoiser.moving import Moving
from sdflow.runtime.denoiser.schedule import Schedule
from sdflow.runtime.sessions.bound import Bound, data_inputs
from sdflow.runtime.sessions.session import read_graph
from sdflow.runtime.sessions.submodel import Submodel

if TYPE_CHECKING:
    import torch

ALIGNMENT = 256
"""Bytes; kernels read several values at once."""


class Denoiser(Protocol):
    """sample: what a step reads, (copies, images, channels, rows, columns); every copy holds the same latents."""

    sample: torch.Tensor

    def begin(self, conditions: Mapping[str, torch.Tensor], schedule: Schedule) -> None:
        """Take what the model reads beside latents and timestep, by input, and the schedule of the steps to come."""

    def step(self, index: int) -> torch.Tensor:
        """What the model makes of `sample` at the timestep of this index: (rows, channels, rows, columns)."""


class WholeDenoiser:
    """The graph as it is."""

    def __init__(self, model: Submodel, shape: tuple[int, ...], sizes: Mapping[str, int]) -> None:
        """shape: (images, channels, rows, columns) of the latents and their context. sizes: of the graph's axes by name,
        `batch` among them."""
        rows = sizes["batch"]
        ports = model.part.ports(model.config)
        self.moving, self._prediction = Moving.of(ports), ports.of(Role.PREDICTION)
        self._bound = model.bound(**{**model.shapes(sizes), self.moving.latents: (rows, *shape[1:])})
        self.sample = self._bound.inputs[self.moving.latents].view(rows // shape[0], *shape)

    @property
    def inputs(self) -> Mapping[str, torch.Tensor]:
        """The tensors that the graph reads, by input."""
        return self._bound.inputs

    def begin(self, conditions: Mapping[str, torch.Tensor], schedule: Schedule) -> None:
        for name, value in conditions.items():
            self._bound.inputs[name].copy_(value)
        self._timesteps = schedule.timesteps

    def step(self, index: int) -> torch.Tensor:
        self._bound.inputs[self.moving.timestep].copy_(self._timesteps[index])
        return self._bound.run()[self._prediction]


class PartedDenoiser:
    """The graph in parts (`sdflow.runtime.denoiser.split`): what depends on the text or the timestep alone is not computed in
    every step, and what does not depend on the text is not computed twice."""

    def __init__(self, model: Submodel, shape: tuple[int, ...], sizes: Mapping[str, int], layers: int = 0) -> None:
        """As of `WholeDenoiser`. layers: how many of the outermost run in the steps that take the deep features of one before
        (`sdflow.runtime.denoiser.shallow`); 0: there are no such steps. Raises PassError for a graph that cannot be taken apart,
        UsageError for one without as many layers."""
        from sdflow.runtime.denoiser.shallow import depths
        from sdflow.runtime.denoiser.split import split

        assert model.path is not None, "only a submodel of a pipeline folder is taken apart"
        ports = model.part.ports(model.config)
        self._moving, self._prediction = Moving.of(ports), ports.of(Role.PREDICTION)
        guidance = sizes["batch"] == 2 * shape[0]
        parts = split(read_graph(model.path), sizes, moving=self._moving, guidance=guidance)
        cut = depths(parts, layers) if layers else None
        with ThreadPoolExecutor(max_workers=4) as pool:
            text = pool.submit(model.part_session, parts.text)
            timestep = pool.submit(model.part_session, parts.timestep, capture=False)  # for any number of steps
            step = pool.submit(model.part_session, parts.step if cut is None else cut.whole)
            shallow = None if cut is None else pool.submit(model.part_session, cut.shallow)
        text_session, self._timestep_session, step_session = text.result(), timestep.result(), step.result()
        self._place = model.place
        with self._place.current():
            self._text = _bind(text_session, model)
            self._time_values = _Slices(step_session, parts.time_values, model.place.device)
            given = {**self._text.inputs, **self._text.outputs, **self._time_values.tensors}
            self._step = _bind(step_session, model, given)
            self._shallow = None
            if cut is not None and shallow is not None:
                kept = {cut.features: self._step.outputs[cut.features]}
                self._shallow = _bind(shallow.result(), model, {**given, **self._step.inputs, **kept})
        self.sample = self._step.inputs[self._moving.latents].view(-1, *shape)
        self._schedule: Schedule | None = None

    def begin(self, conditions: Mapping[str, torch.Tensor], schedule: Schedule) -> None:
        for name, value in conditions.items():
            (self._text if name in self._text.inputs else self._step).inputs[name].copy_(value)
        self._text.run()
        if schedule is not self._schedule:
            times = Bound(self._timestep_session, self._place, {self._moving.timestep: schedule.timesteps.reshape(-1)})
            self._rows = self._time_values.table(times.run())
            self._schedule = schedule

    def step(self, index: int) -> torch.Tensor:
        self._time_values.memory.copy_(self._rows[index])
        reused = self._schedule is not None and self._schedule.reused[index : index + 1] == (True,)
        bound = self._shallow if reused and self._shallow is not None else self._step
        return bound.run()[self._prediction]


class PartlyGuidedDenoiser:
    """One with guidance, and one of half the batch for the steps without (`Schedule.made`)."""

    def __init__(self, guided: Denoiser, alone: Denoiser, rows: int) -> None:
        """rows: of the batch with guidance."""
        self._guided, self._alone, self._rows = guided, alone, rows
        self.sample = guided.sample

    def begin(self, conditions: Mapping[str, torch.Tensor], schedule: Schedule) -> None:
        self._made = schedule.made
        if 2 in self._made:
            self._guided.begin(conditions, schedule)
        half = {
            name: value[self._rows // 2 :] if len(value) == self._rows else value for name, value in conditions.items()
        }
        if 1 in self._made:
            self._alone.begin(half, schedule)

    def step(self, index: int) -> torch.Tensor:
        if self._made[index] == 2:
            return self._guided.step(index)
        self._alone.sample.copy_(self.sample[:1])
        return self._alone.step(index)


class _Slices:
    """Some inputs of a session as slices of one piece of memory, so that one copy sets them all."""

    def __init__(self, session: Any, names: tuple[str, ...], device: str) -> None:
        import torch

        shapes = {value.name: tuple(value.shape) for value in data_inputs(session)}
        dtypes = {_dtype(value) for value in data_inputs(session) if value.name in names}
        (dtype,) = dtypes or {torch.float32}
        self._names, step = names, ALIGNMENT // dtype.itemsize
        sizes = [torch.Size(shapes[name]).numel() for name in names]
        self._padded = [-(-size // step) * step for size in sizes]
        self.memory = torch.zeros(sum(self._padded), dtype=dtype, device=device)
        self.tensors = {
            name: slot[:size].view(shapes[name])
            for name, size, slot in zip(names, sizes, self.memory.split(self._padded), strict=True)
        }

    def table(self, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """(steps, all) from (steps, ...) of each input; a step's value is repeated for every row of the batch."""
        import torch

        columns = []
        for name, padded in zip(self._names, self._padded, strict=True):
            rows = self.tensors[name].shape[0]
            repeated = values[name].flatten(1).repeat(1, rows)
            columns.append(torch.nn.functional.pad(repeated, (0, padded - repeated.shape[1])))
        return torch.cat(columns, dim=1)


def _bind(session: Any, model: Submodel, given: Mapping[str, torch.Tensor] | None = None) -> Bound:
    """A session of fixed shapes with its tensors: those given, new ones for the other inputs."""
    import torch

    inputs = {}
    for value in data_inputs(session):
        known = (given or {}).get(value.name)
        inputs[value.name] = (
            torch.zeros(tuple(value.shape), dtype=_dtype(value), device=model.place.device) if known is None else known
        )
    return Bound(session, model.place, inputs)


def _dtype(value: Any) -> torch.dtype:
    import torch

    from sdflow.machine.onnx_runtime import numpy_type

    dtype: torch.dtype = getattr(torch, numpy_type(value))
    return dtype
