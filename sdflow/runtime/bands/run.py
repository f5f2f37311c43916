"""Run a decomposed VAE half: the encoder or decoder, stage by stage and band by band."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sdflow.machine.memory import HOST, free_page_locked
from sdflow.runtime.bands.norms import Norm, Statistics
from sdflow.runtime.bands.stages import Decomposition, Stage
from sdflow.runtime.sessions.bound import Bound, empty_inputs
from sdflow.runtime.sessions.submodel import Submodel

if TYPE_CHECKING:
    import torch


class Bands:
    """A VAE half that runs in bands of rows.

    storage: device of the values between stages, in torch's notation. On the CPU, sessions are created anew for every
    stage and image: each would keep its working memory.
    """

    def __init__(self, half: Submodel, parts: Decomposition, storage: str) -> None:
        self.parts, self.storage = parts, storage
        self._half = half
        self._kept: dict[int, Any] = {}

    def __call__(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the output for an input (1, channels, rows, columns) of the size that the graph was decomposed for."""
        import torch

        result = self._through_stages(whole)
        if self._half.place.stream is not None:
            with self._half.place.selected():
                torch.cuda.empty_cache()  # the next image's bands depend on what is free
        if self._is_pinned:
            self._half.place.stream.synchronize()  # the result is still copied from there
            free_page_locked()
        return result

    def _through_stages(self, whole: torch.Tensor) -> torch.Tensor:
        import torch

        stored = {self.parts.input: whole}
        parameters: dict[str, torch.Tensor] = {}
        for place, stage in enumerate(self.parts.stages):
            made = {
                value.name: torch.empty(
                    value.shape, dtype=getattr(torch, value.dtype), device=self.storage, pin_memory=self._is_pinned
                )
                for value in stage.outputs
            }
            statistics = {norm: Statistics(norm.axis) for norm in stage.measured}
            self._run(self._bound(place), stage, stored, parameters, made, statistics)
            for norm, found in statistics.items():
                parameters |= found.parameters(norm)
            stored |= made
            for name in self.parts.drops[place]:
                del stored[name]
        return stored[self.parts.output].to(self._half.place.device, non_blocking=True)

    @property
    def _is_pinned(self) -> bool:
        return self._half.place.stream is not None and self.storage == HOST

    def _bound(self, place: int) -> Bound:
        """Bind new tensors for a stage. Keeping those of all stages would take several times the memory of one."""
        stage, device = self.parts.stages[place], self._half.place
        session = self._kept.get(place)
        prepared = session is not None
        if session is None:
            session = self._half.part_session(stage.model, capture=False)
            session.shrinks, session.working = True, stage.size
            if device.stream is not None:
                self._kept[place] = session
        return Bound(session, device, empty_inputs(session, device.device), prepared=prepared)

    def _run(
        self,
        bound: Bound,
        stage: Stage,
        stored: dict[str, torch.Tensor],
        parameters: dict[str, torch.Tensor],
        made: dict[str, torch.Tensor],
        statistics: dict[Norm, Statistics],
    ) -> None:
        for norm in stage.norms:
            for name in norm.inputs:
                bound.inputs[name].copy_(parameters[name])
        if self._is_pinned:
            self._half.place.stream.synchronize()  # the host gathers rows that are not adjacent: they must have arrived
        for name, value in stage.whole.items():
            bound.inputs[name].copy_(stored[value.name], non_blocking=True)
        for begin, first, end in stage.windows(self.parts.rows):
            for value in stage.banded:
                rows = stored[value.name].narrow(value.axis, begin * value.scale, stage.rows * value.scale)
                bound.inputs[value.name].copy_(rows, non_blocking=True)
            results = bound.run()
            for value in stage.outputs:
                at, count = value.scale * first, value.scale * (end - first)
                kept = results[value.name].narrow(value.axis, at - begin * value.scale, count)
                made[value.name].narrow(value.axis, at, count).copy_(kept, non_blocking=True)
                for norm, found in statistics.items():
                    if norm.source == value.name:
                        found.add(kept)
