"""Denoiser runs shared by images at different steps, with different schedules, prompts and guidance.

The denoiser is split (`sdflow.runtime.denoiser.split`): the text part runs once per image, the timestep part once per
schedule. The step part reads one row of both for each image. In a batch with guidance, an image without guidance takes
both rows, and only the second output is used.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sdflow.errors import PassError, VerificationError
from sdflow.models.ports import Role
from sdflow.onnx_model.nodes import in_order
from sdflow.runtime.denoiser.denoiser import DenoiserInputs
from sdflow.runtime.denoiser.moving import Moving
from sdflow.runtime.denoiser.schedule import Schedule
from sdflow.runtime.denoiser.time_values import TimeValues, table
from sdflow.runtime.sessions.bound import Bound, empty_inputs
from sdflow.runtime.sessions.submodel import Submodel
from sdflow.serve.engine.cuts import Cuts
from sdflow.serve.log import log_line

if TYPE_CHECKING:
    import torch

    from sdflow.runtime.denoiser.split import Parts

TABLES_KEPT = 16
QUEUED_RUNS = 4

LACKED_RUNS = 64
"""Runs that lacked a batch size before it is created while images wait, as on a server that is never idle."""

NO_MEMORY = VerificationError, RuntimeError, MemoryError
"""What a run that does not fit in memory raises."""


@dataclass(frozen=True, eq=False)
class Texts:
    """Outputs of the text part for one image's prompt and reference images. values: by name, (halves, rows, ...), the
    negative prompt first if there is guidance. common: values that are equal for all images."""

    values: Mapping[str, torch.Tensor]
    common: Mapping[str, torch.Tensor]
    halves: int


@dataclass(frozen=True)
class Step:
    """One image of a run. sample: latents, (channels, rows, columns). times: a row per step. index: of the row."""

    sample: torch.Tensor
    texts: Texts
    times: torch.Tensor
    index: int

    @property
    def moment(self) -> tuple[int, int]:
        """Key that is equal for images at the same timestep of the same schedule."""
        return id(self.times), self.index


class SharedSteps:
    """Runs of one denoiser for images of one size."""

    def __init__(self, model: Submodel, sizes: Mapping[str, int], cuts: Cuts) -> None:
        """sizes: of the graph's axes by name, without `batch`. Inputs without a batch axis must be equal for all
        images. Raises PassError for a graph that cannot be split."""
        if model.path is None:
            raise PassError("this target runs whole graphs only")
        self._model, self.sizes = model, dict(sizes)
        self._path, self._cuts = model.path, cuts
        ports = model.part.ports(model.config)
        self.moving, self._prediction = Moving.of(ports), ports.of(Role.PREDICTION)
        parts = self._cut(2, guidance=True)
        text, timestep = model.part_session(parts.text), model.part_session(parts.timestep, capture=False)
        self._timestep_session = timestep
        self._time_values, self._text_values = parts.time_values, parts.text_values
        with model.place.current():
            self._text = Bound(text, model.place, empty_inputs(text, model.place.device))
        self._common = _of_these_alone(parts.text, common_inputs(model))
        self.alone = False
        """Whether a batch of several images did not fit in memory."""
        self.one_time = False
        """Whether the graph has a single timestep for the batch. Known after the first batch of several images."""
        self._tables: list[tuple[Schedule, torch.Tensor]] = []
        self._forms: dict[tuple[int, int], _Form] = {}
        self._lacked: Counter[tuple[int, int]] = Counter()
        self._impossible: set[tuple[int, int]] = set()

    def texts(self, conditions: Mapping[str, torch.Tensor], halves: int) -> Texts:
        """Run the text part for the conditions of one image with `halves` rows."""
        with self._model.place.current():
            for name, value in conditions.items():
                self._text.inputs[name].copy_(value)  # broadcasts a single row to both halves
            found: dict[str, torch.Tensor] = {
                **self._text.inputs,
                **self._text.run(),
            }  # a step may read both
            rows = {name: value for name, value in found.items() if name not in self._common}
            return Texts(
                {name: value.unflatten(0, (2, -1))[-halves:].clone() for name, value in rows.items()},
                {name: found[name].clone() for name in self._common & found.keys()},
                halves,
            )

    def times(self, schedule: Schedule) -> torch.Tensor:
        """Return the timestep part's outputs for each step of a schedule, (steps, width)."""
        if (found := next((made for known, made in self._tables if known is schedule), None)) is not None:
            return found
        with self._model.place.current():
            given = {self.moving.timestep: schedule.timesteps.reshape(-1)}
            made = table(Bound(self._timestep_session, self._model.place, given).run(), self._time_values)
        self._tables = [*self._tables[-TABLES_KEPT + 1 :], (schedule, made)]
        return made

    def run(self, steps: Sequence[Step], size: int) -> list[torch.Tensor]:
        """Return the predictions, (halves, channels, rows, columns), valid until the next run. size: of the batch,
        which may exceed the number of steps. Raises VerificationError if the provider fails."""
        return self.form(size, max(step.texts.halves for step in steps)).run(steps)

    def form(self, size: int, halves: int) -> _Form:
        """Return the session for a batch size, created on first use."""
        if (found := self._forms.get((size, halves))) is not None:
            return found
        parts = self._cut(size * halves, guidance=halves == 2)
        if set(parts.time_values) != set(self._time_values) or set(parts.text_values) != set(self._text_values):
            raise PassError("a batch of another size is taken apart in another way", where="split")
        session = self._model.part_session(parts.step)
        with self._model.place.current():
            names = self.moving.latents, self._prediction
            made = self._forms[size, halves] = _Form(session, self._model, self._time_values, names, size, halves)
        self._lacked.pop((size, halves), None)
        self.one_time |= made.one_time
        return made

    def usable(self, size: int, halves: int) -> bool:
        """Whether a batch of this size runs without creating a session, which takes seconds on a GPU. If not, note that
        it is lacking, for `catch_up`."""
        if size == 1 or (size, halves) in self._forms:
            return True
        if (size, halves) in self._impossible:
            return False
        self._lacked[size, halves] += 1
        return self._lacked[size, halves] > LACKED_RUNS

    def catch_up(self, busy: Callable[[], bool]) -> bool:
        """Create the batch sizes that were lacking, as far as they fit in memory. busy: whether to stop. Return whether
        none is lacking."""
        import torch

        while self._lacked and self._tables and not busy():
            (size, halves), _ = self._lacked.popitem()
            try:
                with torch.no_grad():
                    self.run(self._blank_steps(size, halves, self._tables[-1][1]), size)
            except Exception as error:  # noqa: BLE001  (of the cut, the provider or torch: these images run alone)
                log_line("batch_failed", images=size, kind=type(error).__name__, message=str(error))
                self._forms.pop((size, halves), None)
                self._impossible.add((size, halves))
        return not (self._lacked and self._tables)

    def _cut(self, batch: int, *, guidance: bool) -> Parts:
        sizes = {**self.sizes, "batch": batch}
        return self._cuts.of(self._path, sizes, moving=self.moving, guidance=guidance, edits=self._model.edits)

    def seconds(
        self, size: int, *, runs: int, halves: int, schedule: Schedule, busy: Callable[[], bool] = lambda: False
    ) -> float:
        """Return the fastest of several runs of a batch of this size, in seconds. busy: whether to stop early. Raises
        like `run`."""
        import torch

        # On a device, the next run is queued while one executes.
        in_a_row = 1 if self._model.place.stream is None else QUEUED_RUNS
        with torch.no_grad():
            batch = self._blank_steps(size, halves, self.times(schedule))
            self.run(batch, size)
            taken = list[float]()
            while not taken or (len(taken) < runs and not busy()):
                begun = time.perf_counter()
                for _ in range(in_a_row):
                    found = self.run(batch, size)
                found[0].cpu()
                taken.append((time.perf_counter() - begun) / in_a_row)
        return min(taken)

    def _blank_steps(self, size: int, halves: int, times: torch.Tensor) -> list[Step]:
        import torch

        shapes = self._model.shapes({**self.sizes, "batch": halves})
        latents, _ = shapes.pop(self.moving.latents), shapes.pop(self.moving.timestep)
        given = {name: torch.zeros(shape) for name, shape in shapes.items()}
        sample = torch.randn(latents[1:], device=self._model.place.device)
        return [Step(sample, self.texts(given, halves), times, 0) for _ in range(size)]

    def keep(self, sizes: Collection[int]) -> None:
        """Release the memory of batches of other sizes."""
        self._forms = {key: form for key, form in self._forms.items() if key[0] in sizes}


class SharedDenoiser:
    """The denoiser of one image that shares runs, with its text and timestep values
    (`sdflow.runtime.denoiser.denoiser`)."""

    def __init__(self, steps: SharedSteps, halves: int) -> None:
        """halves: 2 with guidance, else 1."""
        self.steps, self.halves = steps, halves
        self._held: tuple[DenoiserInputs, Texts, torch.Tensor] | None = None

    def run(self, inputs: DenoiserInputs, latents: torch.Tensor, index: int) -> torch.Tensor:
        return self.steps.run([self.at(inputs, latents, index)], 1)[0]

    def at(self, inputs: DenoiserInputs, latents: torch.Tensor, index: int) -> Step:
        """Return the step of these latents, (1, channels, rows, columns), at this index, for a shared run."""
        import torch

        if self._held is None or self._held[0] is not inputs:
            texts = self.steps.texts(inputs.conditions, self.halves)
            self._held = inputs, texts, self.steps.times(inputs.schedule)
        _, texts, times = self._held
        sample = latents if inputs.context is None else torch.cat([latents, inputs.context], dim=1)
        return Step(sample[0], texts, times, index)


class _Form:
    """The step for one batch size. An image keeps its place between runs, so that its texts are copied only once."""

    def __init__(
        self, session: Any, model: Submodel, times: Sequence[str], names: tuple[str, str], size: int, halves: int
    ) -> None:
        """times: inputs with timestep values, in the order of the table's columns. names: latents input and output."""
        latents, self._prediction = names
        self._size, self._halves, self._place = size, halves, model.place
        inputs = empty_inputs(session, model.place.device)
        self.one_time = any(len(inputs[name]) % size for name in times)
        self._times = TimeValues({name: inputs[name] for name in times}, size)
        self._bound = Bound(session, model.place, {**inputs, **self._times.tensors})
        self._sample = inputs[latents]
        self._texts = {name: value for name, value in inputs.items() if name not in times and name != latents}
        self._placed: list[Texts | None] = [None] * size

    def run(self, steps: Sequence[Step]) -> list[torch.Tensor]:
        """If the graph has a single timestep for the batch, images at other timesteps run separately."""
        moments = [step.moment for step in steps]
        if not self.one_time or len({*moments}) == 1:
            return self._run(steps)
        found: dict[int, torch.Tensor] = {}
        for moment in dict.fromkeys(moments):
            chosen = [index for index, each in enumerate(moments) if each == moment]
            outputs = self._run([steps[index] for index in chosen])
            found |= {index: output.clone() for index, output in zip(chosen, outputs, strict=True)}
        return [found[index] for index in range(len(steps))]

    def _run(self, steps: Sequence[Step]) -> list[torch.Tensor]:
        import torch

        with self._place.current():
            places = self._places([step.texts for step in steps])
            rows: list[torch.Tensor] = [steps[0].times[steps[0].index]] * self._size
            samples = [steps[0].sample] * self._size
            for place, step in zip(places, steps, strict=True):
                samples[place], rows[place] = step.sample, step.times[step.index]
            self._sample.copy_(torch.stack(samples))
            self._times.put(torch.stack(rows))
            found = self._bound.run()[self._prediction].unflatten(0, (self._halves, self._size))
            return [found[-step.texts.halves :, place] for place, step in zip(places, steps, strict=True)]

    def _places(self, wanted: Sequence[Texts]) -> list[int]:
        """Return the place of each image; new images replace ones that are not in this run."""
        here = {id(texts): place for place, texts in enumerate(self._placed) if texts is not None}
        kept = {here[id(texts)] for texts in wanted if id(texts) in here}
        free = iter(place for place in range(self._size) if place not in kept)
        for texts in wanted:
            if id(texts) not in here:
                here[id(texts)] = next(free)
                self._put(texts, here[id(texts)])
        return [here[id(texts)] for texts in wanted]

    def _put(self, texts: Texts, place: int) -> None:
        for name, target in self._texts.items():
            if name in texts.common:
                target.copy_(texts.common[name])
            else:
                target.unflatten(0, (self._halves, self._size, -1))[:, place].copy_(texts.values[name])
        self._placed[place] = texts


def common_inputs(model: Submodel) -> list[str]:
    """Return the inputs, apart from the timestep, that all images of a run share."""
    inputs = model.part.ports(model.config).inputs
    return [port.name for port in inputs if port.axes[0] != "batch" and port.role is not Role.TIMESTEP]


def _of_these_alone(graph: Any, inputs: Collection[str]) -> frozenset[str]:
    """Return the values of a graph that depend on no other inputs than these, including the inputs themselves."""
    given = {item.name for item in graph.graph.input}
    found, others = set(inputs) & given, given - set(inputs)
    for node in in_order(graph.graph.node):
        if not others.isdisjoint(node.input):
            others.update(node.output)
        elif not found.isdisjoint(node.input):
            found.update(node.output)
    return frozenset(found)
