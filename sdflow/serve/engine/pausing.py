"""Denoisers for a pipeline's call that is paused at every step (`sdflow.serve.engine.paused_call`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from sdflow.errors import PassError
from sdflow.families.approximation import EXACT, Approximation
from sdflow.families.request import Conditions
from sdflow.models.base import Role
from sdflow.runtime.denoiser.control import Control
from sdflow.runtime.denoiser.denoiser import Denoiser
from sdflow.runtime.denoiser.denoisers import DenoiserSource, token_sizes
from sdflow.runtime.denoiser.loop import Start
from sdflow.runtime.denoiser.schedule import Schedule
from sdflow.runtime.pipeline import Pipeline
from sdflow.runtime.sessions.place import Place
from sdflow.serve.engine.cuts import Cuts
from sdflow.serve.engine.elsewhere import Elsewhere, OneAhead
from sdflow.serve.engine.shared_steps import SharedSteps, Step, Texts

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Shared:
    """A step that may be run with others of the same `steps`."""

    steps: SharedSteps
    step: Step


@dataclass(frozen=True)
class Alone:
    """A step that cannot."""

    run: Callable[[], torch.Tensor]


Asked = Shared | Alone | Elsewhere
Ask = Callable[[Asked], Any]
"""A step is answered by what the model makes of it."""


class StepsOfSizes:
    """The shared steps of a pipeline's denoiser, by size: made when first wanted, the last ones kept. room: rows times columns of
    all that are kept, as each holds memory; None: any. why_alone: why images of no
    size are drawn together; None where they are."""

    KEPT = 4

    def hold(self) -> None:
        """Let the next run read the weights: they are there."""

    def __init__(self, pipeline: Pipeline, cuts: Cuts) -> None:
        self._cuts = cuts
        self._model = pipeline.submodels[pipeline.family.denoiser]
        self._tokens = pipeline.family.token_sizes(pipeline.configs)
        self._made: dict[tuple[tuple[str, int], ...], SharedSteps] = {}
        self._alone: set[tuple[tuple[str, int], ...]] = set()
        self.room: int | None = None
        ports = self._model.part.ports(self._model.config).inputs
        common = [port.name for port in ports if port.axes[0] != "batch" and port.role is not Role.TIMESTEP]
        self.why_alone: str | None = None
        if pipeline.nets:
            self.why_alone = "its ControlNets are run for each image by itself"
        elif common:
            self.why_alone = f"all images of a run would share {common[0]}"

    def of(
        self,
        rows: int,
        columns: int,
        conditions: Conditions | None = None,
        axes: Mapping[str, int] = MappingProxyType({}),
    ) -> SharedSteps | None:
        """For latents of so many rows and columns; None where each image is drawn by itself. axes: the sizes of the denoiser's
        further axes."""
        if self.why_alone is not None:
            return None
        sizes: dict[str, int] = {
            **(self._tokens if conditions is None else token_sizes(self._model, conditions)),
            "latent_height": rows,
            "latent_width": columns,
            **axes,
        }
        key = tuple(sizes.items())
        if key in self._alone:
            return None
        if key not in self._made:
            try:
                made = SharedSteps(self._model, sizes, self._cuts)
            except PassError as error:
                if not self._made:  # the first is of the model's own size
                    self.why_alone = str(error)
                self._alone.add(key)
                return None
            self._made[key] = made
            while len(self._made) > self.KEPT or (len(self._made) > 1 and not self._fits()):
                self._made.pop(next(iter(self._made)))
        self._made[key] = self._made.pop(key)
        return self._made[key]

    def _fits(self) -> bool:
        sizes = [dict(key) for key in self._made]
        return self.room is None or sum(each["latent_height"] * each["latent_width"] for each in sizes) <= self.room


class HeldSteps:
    """The shared steps of a pipeline with other weights (`SharedSteps.holding`)."""

    def __init__(self, steps: StepsOfSizes | HeldSteps, hold: Callable[[], None]) -> None:
        self._steps, self.hold = steps, hold
        self._made: WeakKeyDictionary[SharedSteps, SharedSteps] = WeakKeyDictionary()

    @property
    def why_alone(self) -> str | None:
        """As of `StepsOfSizes`."""
        return self._steps.why_alone

    def of(
        self,
        rows: int,
        columns: int,
        conditions: Conditions | None = None,
        axes: Mapping[str, int] = MappingProxyType({}),
    ) -> SharedSteps | None:
        """As of `StepsOfSizes`, the same for the same."""
        found = self._steps.of(rows, columns, conditions, axes)
        if found is None:
            return None
        if found not in self._made:
            self._made[found] = found.holding(self.hold)
        return self._made[found]


class PausingDenoisers(DenoiserSource):
    """In the place of a pipeline's own, for one call that draws one image."""

    def __init__(self, steps: StepsOfSizes | HeldSteps, own: DenoiserSource, ask: Ask, place: Place) -> None:
        """own: the pipeline's. ask: gives what the model makes of a step. place: of the denoiser."""
        self._steps, self._own, self._ask, self._place = steps, own, ask, place

    def _hold(self) -> None:
        with self._place.current():
            self._steps.hold()

    def get(
        self,
        start: Start,
        rows: int,
        conditions: Conditions | None,
        controls: Mapping[str, Control],
        axes: Mapping[str, int],
        *,
        guess: bool,
        fewer: Approximation = EXACT,
    ) -> Denoiser:
        assert not fewer, "a server draws exact images"
        images, channels, height, width = start.noise.shape
        assert images == 1, "one image a call"
        channels += 0 if start.context is None else start.context.shape[1]
        steps = self._steps.of(height, width, conditions, axes)
        if steps is None:
            whole = self._own.get(start, rows, conditions, controls, axes, guess=guess)
            return _AloneDenoiser(whole, self._ask, self._hold, OneAhead(self._place))
        return _SharedDenoiser(steps, rows, (channels, height, width), start.noise.device, self._ask)

    def unload(self) -> None:
        self._own.unload()


class _SharedDenoiser:
    """`runtime.denoiser.Denoiser` of one image among others."""

    def __init__(self, steps: SharedSteps, halves: int, shape: tuple[int, ...], device: Any, ask: Ask) -> None:
        import torch

        self.sample = torch.zeros((1, 1, *shape), device=device)
        self._latents = self.sample[0, 0]
        self._steps, self._halves, self._ask = steps, halves, ask

    def begin(self, conditions: Mapping[str, torch.Tensor], schedule: Schedule) -> None:
        self._texts: Texts = self._steps.texts(conditions, self._halves)
        self._times = self._steps.times(schedule)

    def step(self, index: int) -> torch.Tensor:
        found: torch.Tensor = self._ask(Shared(self._steps, Step(self._latents, self._texts, self._times, index)))
        return found


class _AloneDenoiser:
    """`runtime.denoiser.Denoiser` that others use in between: everything is put there again before each step."""

    def __init__(self, whole: Denoiser, ask: Ask, hold: Callable[[], None], ahead: OneAhead) -> None:
        import torch

        self.sample = torch.zeros_like(whole.sample)
        self._whole, self._ask, self._hold, self._ahead = whole, ask, hold, ahead

    def begin(self, conditions: Mapping[str, torch.Tensor], schedule: Schedule) -> None:
        self._conditions, self._schedule = conditions, schedule

    def step(self, index: int) -> torch.Tensor:
        def run() -> torch.Tensor:
            self._hold()
            self._whole.begin(self._conditions, self._schedule)
            self._whole.sample.copy_(self.sample)
            found = self._whole.step(index).clone()
            self._ahead.queued()
            return found

        found: torch.Tensor = self._ask(Alone(run))
        return found
