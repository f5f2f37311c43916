"""Denoisers that run step by step: whole, or split into parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from sdflow.families.shared.skipped_layers import LAYERS
from sdflow.models.ports import Role
from sdflow.runtime.denoiser.moving import Moving
from sdflow.runtime.denoiser.schedule import Schedule
from sdflow.runtime.denoiser.time_values import TimeValues, table
from sdflow.runtime.sessions.bound import Bound, empty_inputs
from sdflow.runtime.sessions.submodel import Submodel

if TYPE_CHECKING:
    import torch

    from sdflow.runtime.denoiser.split import Parts


@dataclass(frozen=True, eq=False)
class DenoiserInputs:
    """A drawing's denoiser inputs besides the latents.

    conditions: by input, one row per image; with guidance twice as many, negative prompts first. schedule: on the
        device.
    context: additional input channels of inpainting models, (images, channels, rows, columns).
    """

    conditions: Mapping[str, torch.Tensor]
    schedule: Schedule
    context: torch.Tensor | None = None


class Denoiser(Protocol):
    """A network at fixed sizes. Drawings may take turns with it; it holds the inputs of the one that ran last."""

    def run(self, inputs: DenoiserInputs, latents: torch.Tensor, index: int) -> torch.Tensor:
        """Return the prediction for latents (images, channels, rows, columns) at the timestep of this index: (batch
        rows, channels, rows, columns) in the graph's type, valid until the next run."""


class WholeDenoiser:
    """Runs the whole graph."""

    def __init__(self, model: Submodel, shape: tuple[int, ...], sizes: Mapping[str, int]) -> None:
        """shape: (images, channels, rows, columns) of the latents with context. sizes: of the graph's axes, including
        `batch`."""
        rows = sizes["batch"]
        ports = model.part.ports(model.config)
        self.moving, self._prediction = Moving.of(ports), ports.of(Role.PREDICTION)
        self._bound = model.bound(**{**model.shapes(sizes), self.moving.latents: (rows, *shape[1:])})
        self._sample = self._bound.inputs[self.moving.latents].view(rows // shape[0], *shape)

    def prepare(self) -> WholeDenoiser:
        """See `Bound.prepare`."""
        self._bound.prepare()
        return self

    @property
    def inputs(self) -> Mapping[str, torch.Tensor]:
        """The graph's input tensors by name."""
        return self._bound.inputs

    def run(self, inputs: DenoiserInputs, latents: torch.Tensor, index: int) -> torch.Tensor:
        """See `Denoiser.run`. Latents are repeated for a batch with guidance."""
        self.put(inputs, latents, index)
        return self.predict()

    def put(self, inputs: DenoiserInputs, latents: torch.Tensor, index: int) -> None:
        """Fill the graph's input tensors. latents: (images, channels, rows, columns). index: of the timestep."""
        if self._bound.holds is not inputs:
            for name, value in inputs.conditions.items():
                self._bound.inputs[name].copy_(value)
            _put_context(self._sample, inputs)
            self._bound.holds = inputs
        self._sample[:, :, : latents.shape[1]].copy_(latents)
        self._bound.inputs[self.moving.timestep].copy_(inputs.schedule.timesteps[index])

    def predict(self) -> torch.Tensor:
        """Run the graph on its input tensors; returns the prediction, (batch rows, channels, rows, columns)."""
        return self._bound.run()[self._prediction]


class PartedDenoiser:
    """Runs the graph in parts (`sdflow.runtime.denoiser.split`): what only depends on the text or the timestep is not
    computed in every step, and what does not depend on the text is not computed twice."""

    def __init__(
        self,
        model: Submodel,
        shape: tuple[int, ...],
        sizes: Mapping[str, int],
        layers: int = 0,
        skipped: Sequence[int] = (),
        reserve: Callable[[], None] | None = None,
    ) -> None:
        """shape, sizes: as for `WholeDenoiser`. layers: number of outermost layers that run in steps reusing deep
        features (`sdflow.runtime.denoiser.shallow`); 0: no such steps. skipped: blocks to leave out
        (`sdflow.runtime.denoiser.skipped_blocks`). reserve: if given, the step is built without attention masks
        (`sdflow.runtime.denoiser.score_biases`); the first drawing that masks anything calls this to make room and
        builds a second step with masks. Raises PassError if the graph cannot be split, and UsageError if it lacks the
        layers or blocks."""
        from sdflow.runtime.denoiser.score_biases import score_biases, without_biases
        from sdflow.runtime.denoiser.skipped_blocks import without_blocks
        from sdflow.runtime.denoiser.split import split

        ports = model.part.ports(model.config)
        self._moving, self._prediction = Moving.of(ports), ports.of(Role.PREDICTION)
        guidance = sizes["batch"] == 2 * shape[0]
        graph = model.graph()
        if skipped:
            graph = without_blocks(graph, model.part.model.blocks or "", skipped, LAYERS)
        parts = split(graph, sizes, moving=self._moving, guidance=guidance)
        self._biases = () if reserve is None else score_biases(parts)
        self._model, self._layers, self._reserve = model, layers, reserve
        self._whole_parts = parts if self._biases else None
        with ThreadPoolExecutor(max_workers=4) as pool:
            text = pool.submit(model.part_session, parts.text)
            timestep = pool.submit(model.part_session, parts.timestep, capture=False)  # the number of steps varies
            sessions = _StepSessions(pool, model, without_biases(parts, self._biases), layers)
        text_session, self._timestep_session = text.result(), timestep.result()
        self._place = model.place
        with self._place.current():
            self._text = _bind(text_session, model)
            inputs = empty_inputs(sessions.whole, model.place.device)
            self._time_names = parts.time_values
            self._time_values = TimeValues({name: inputs[name] for name in parts.time_values}, 1)
            given = {**self._text.inputs, **self._text.outputs, **self._time_values.tensors}
            self._step = self._unmasked = sessions.bound(model, given)
        self._masked: _Step | None = None
        self._inputs = {**self._step.whole.inputs, **self._text.inputs}
        self._sample = self._inputs[self._moving.latents].view(-1, *shape)
        self._left: WeakKeyDictionary[DenoiserInputs, torch.Tensor] = WeakKeyDictionary()
        self._hides: WeakKeyDictionary[DenoiserInputs, bool] = WeakKeyDictionary()
        self._held: DenoiserInputs | None = None
        self._schedule: Schedule | None = None

    def prepare(self) -> PartedDenoiser:
        """See `Bound.prepare`."""
        for bound in (self._text, self._step.whole, self._step.shallow):
            if bound is not None:
                bound.prepare()
        return self

    def run(self, inputs: DenoiserInputs, latents: torch.Tensor, index: int) -> torch.Tensor:
        """See `Denoiser.run`. Latents are given once for both halves of a batch with guidance; the output has both."""
        if inputs is not self._held:
            self._hold(inputs)
        self._sample[:, :, : latents.shape[1]].copy_(latents)
        self._time_values.put(self._times[index : index + 1])
        reused = inputs.schedule.reused[index : index + 1] == (True,)
        bound = self._step.shallow if reused and self._step.shallow is not None else self._step.whole
        return bound.run()[self._prediction]

    def _hold(self, inputs: DenoiserInputs) -> None:
        before, self._held = self._held, None  # a failure below leaves mixed inputs
        if self._step.features is not None and before is not None:  # its next step may reuse its last features
            self._left[before] = self._step.features.clone()
        for name, value in inputs.conditions.items():
            self._inputs[name].copy_(value)
        self._text.run()
        _put_context(self._sample, inputs)
        if inputs.schedule is not self._schedule:
            timesteps = inputs.schedule.timesteps.reshape(-1)
            times = Bound(self._timestep_session, self._place, {self._moving.timestep: timesteps})
            self._times, self._schedule = table(times.run(), self._time_names), inputs.schedule
        self._step = self._step_for(inputs)
        if self._step.features is not None and inputs in self._left:
            self._step.features.copy_(self._left.pop(inputs))
        self._held = inputs

    def _step_for(self, inputs: DenoiserInputs) -> _Step:
        """Return the step with attention masks if any of this drawing's are nonzero, which is checked once per
        drawing."""
        if self._whole_parts is None or self._reserve is None:
            return self._unmasked
        if inputs not in self._hides:
            self._hides[inputs] = any(bool(self._text.outputs[name].any()) for name in self._biases)
        if not self._hides[inputs]:
            return self._unmasked
        if self._masked is None:
            self._reserve()
            with ThreadPoolExecutor(max_workers=2) as pool:
                sessions = _StepSessions(pool, self._model, self._whole_parts, self._layers)
            self._masked = sessions.bound(self._model, {**self._text.outputs, **self._unmasked.whole.inputs})
        return self._masked


@dataclass(frozen=True)
class _Step:
    """A step. shallow: variant that reuses an earlier step's features, stored in `features`."""

    whole: Bound
    shallow: Bound | None = None
    features: torch.Tensor | None = None


class _StepSessions:
    """Sessions of a step: the whole step and, if layers are reused, its outer layers."""

    def __init__(self, pool: ThreadPoolExecutor, model: Submodel, parts: Parts, layers: int) -> None:
        from sdflow.runtime.denoiser.shallow import depths

        self._cut = depths(parts, layers) if layers else None
        self._whole = pool.submit(model.part_session, parts.step if self._cut is None else self._cut.whole)
        self._shallow = None if self._cut is None else pool.submit(model.part_session, self._cut.shallow)

    @property
    def whole(self) -> Any:
        """Session of the whole step."""
        return self._whole.result()

    def bound(self, model: Submodel, given: Mapping[str, torch.Tensor]) -> _Step:
        """Bind the step to the given tensors, and to new ones for all other inputs."""
        whole = _bind(self.whole, model, given)
        if self._cut is None or self._shallow is None:
            return _Step(whole)
        features = whole.outputs[self._cut.features]
        inputs = {**given, **whole.inputs, self._cut.features: features}
        return _Step(whole, _bind(self._shallow.result(), model, inputs), features)


class PartlyGuidedDenoiser:
    """Combines a denoiser with guidance and one of half the batch for steps without (`Schedule.made`)."""

    def __init__(self, guided: Denoiser, alone: Denoiser, rows: int) -> None:
        """rows: batch size with guidance."""
        self._guided, self._alone, self._prompted = guided, alone, _PromptedRows(rows)

    def run(self, inputs: DenoiserInputs, latents: torch.Tensor, index: int) -> torch.Tensor:
        """See `Denoiser.run`. Steps without guidance return (images, channels, rows, columns), for the prompts only."""
        if inputs.schedule.made[index] > 1:
            return self._guided.run(inputs, latents, index)
        return self._alone.run(self._prompted.of(inputs), latents, index)


class SkippingDenoiser:
    """Combines a denoiser with guidance and, for steps of skip-layer guidance, one with skipped blocks that only reads
    the prompts (`Schedule.made`)."""

    def __init__(self, guided: Denoiser, skipping: Denoiser, rows: int) -> None:
        """rows: batch size with guidance."""
        self._guided, self._skipping, self._prompted = guided, skipping, _PromptedRows(rows)

    def run(self, inputs: DenoiserInputs, latents: torch.Tensor, index: int) -> torch.Tensor:
        """See `Denoiser.run`. Steps of skip-layer guidance return (3 * images, channels, rows, columns): with skipped
        blocks, for the negative prompts, for the prompts."""
        import torch

        output = self._guided.run(inputs, latents, index)
        if inputs.schedule.made[index] < 3:
            return output
        return torch.cat([self._skipping.run(self._prompted.of(inputs), latents, index), output])


class _PromptedRows:
    """Inputs reduced to the prompts' rows, without the negative ones; the same object in every step of a drawing."""

    def __init__(self, rows: int) -> None:
        """rows: batch size with guidance."""
        self._rows = rows
        self._made: WeakKeyDictionary[DenoiserInputs, DenoiserInputs] = WeakKeyDictionary()

    def of(self, inputs: DenoiserInputs) -> DenoiserInputs:
        if inputs not in self._made:
            self._made[inputs] = of_prompts(inputs, self._rows)
        return self._made[inputs]


def of_prompts(inputs: DenoiserInputs, rows: int) -> DenoiserInputs:
    """Return inputs reduced to the prompts' rows, the second half. rows: batch size with guidance."""
    conditions = inputs.conditions.items()
    half = {name: value[rows // 2 :] if len(value) == rows else value for name, value in conditions}
    return replace(inputs, conditions=half)


def _put_context(sample: torch.Tensor, inputs: DenoiserInputs) -> None:
    """Fill the last channels with the context. sample: a step's input, (copies, images, channels, rows, columns)."""
    if inputs.context is not None:
        sample[:, :, -inputs.context.shape[1] :].copy_(inputs.context)


def _bind(session: Any, model: Submodel, given: Mapping[str, torch.Tensor] | None = None) -> Bound:
    """Bind a session of fixed shapes to the given tensors, and to new ones for all other inputs."""
    inputs = empty_inputs(session, model.place.device, given or {})
    return Bound(session, model.place, inputs)
