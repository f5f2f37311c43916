"""Run classifier-free guidance on two devices: the prompts on the first, the negative prompts on the second.

Both devices hold the denoiser, for half the batch. In each step, the latents are copied to the second device, both halves
are computed concurrently, and the second half's prediction is copied back; guidance and scheduler run on the first device.
On CUDA, copies and runs are only queued; they wait for each other on the devices, not on the host.

A captured CUDA graph belongs to the thread that captured it, so one thread runs everything on the second device.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from sdflow.errors import UsageError
from sdflow.runtime.denoiser.denoiser import (
    Denoiser,
    DenoiserInputs,
    PartlyGuidedDenoiser,
    SkippingDenoiser,
    of_prompts,
)
from sdflow.runtime.denoiser.denoisers import DenoiserRequest, Denoisers, DenoiserSource
from sdflow.runtime.denoiser.schedule import Schedule
from sdflow.runtime.sessions.place import Place

if TYPE_CHECKING:
    import torch

HALVES = 2
"""Number of devices that guidance can use."""


class HalvesDenoiser:
    """Combines a denoiser of the prompts on one device with one of the negative prompts on another. Implements
    `runtime.denoiser.Denoiser`."""

    def __init__(self, first: Denoiser, second: Denoiser, rows: int, places: tuple[Place, Place], worker: Any) -> None:
        """rows: batch size with guidance. places: the devices of both denoisers. worker: executor with the single thread that
        runs the second one."""
        self._first, self._second = first, second
        self._images, (self._own, self._other), self._worker = rows // HALVES, places, worker
        self._made: WeakKeyDictionary[DenoiserInputs, tuple[DenoiserInputs, DenoiserInputs]] = WeakKeyDictionary()
        self._ran: WeakKeyDictionary[DenoiserInputs, set[bool]] = WeakKeyDictionary()
        self._schedules: tuple[Schedule, Schedule] | None = None
        self._latents: torch.Tensor | None = None
        self._both: torch.Tensor | None = None

    def run(self, inputs: DenoiserInputs, latents: torch.Tensor, index: int) -> torch.Tensor:
        """See `Denoiser.run`. The output is on the first device, the negative prompts' half first."""
        import torch

        with self._other.current(), self._own.current():  # torch copies between the current streams of both devices
            prompted, unprompted = self._inputs(inputs)
            if self._latents is None:
                self._latents = torch.empty(latents.shape, dtype=latents.dtype, device=self._other.device)
            self._latents.copy_(latents, non_blocking=True)
            own, other = self._run(inputs, prompted, unprompted, latents, index)
            if self._both is None:
                self._both = torch.empty((HALVES * self._images, *own.shape[1:]), dtype=own.dtype, device=own.device)
            self._both[self._images :].copy_(own)
            self._both[: self._images].copy_(other, non_blocking=True)
        return self._both

    def _run(
        self, inputs: DenoiserInputs, prompted: DenoiserInputs, unprompted: DenoiserInputs, latents: Any, index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queue both halves. A drawing's first runs, whole and with reused features, may be captured in CUDA graphs. Capturing
        fails if another thread allocates meanwhile, so these are queued one after the other."""
        ran = self._ran.setdefault(inputs, set())
        reused = inputs.schedule.reused[index : index + 1] == (True,)
        if reused not in ran:
            own = self._first.run(prompted, latents, index)
            other = self._worker.submit(self._run_second, unprompted, index).result()
            ran.add(reused)
            return own, other
        queued = self._worker.submit(self._run_second, unprompted, index)
        try:
            own = self._first.run(prompted, latents, index)
        finally:
            other = queued.result()
        return own, other

    def _run_second(self, inputs: DenoiserInputs, index: int) -> torch.Tensor:
        import torch

        assert self._latents is not None, "copied before"
        with self._other.current(), torch.no_grad():
            return self._second.run(inputs, self._latents, index)

    def _inputs(self, inputs: DenoiserInputs) -> tuple[DenoiserInputs, DenoiserInputs]:
        """Return both halves' inputs, each on its device; the same objects in every step of a drawing."""
        if inputs not in self._made:
            place, rows = self._other, HALVES * self._images
            negative = {
                name: place.placed(value[: self._images] if len(value) == rows else value)
                for name, value in inputs.conditions.items()
            }
            context = None if inputs.context is None else place.placed(inputs.context)
            self._made[inputs] = (
                of_prompts(inputs, rows),
                DenoiserInputs(negative, self._schedule(inputs.schedule), context),
            )
        return self._made[inputs]

    def _schedule(self, schedule: Schedule) -> Schedule:
        if self._schedules is None or self._schedules[0] is not schedule:
            self._schedules = schedule, schedule.to(self._other.device)
        return self._schedules[1]


class HalvedDenoisers(DenoiserSource):
    """Denoisers of a pipeline on two devices. first, second: those of each device; places: the devices."""

    def __init__(self, first: Denoisers, second: Denoisers, places: tuple[Place, Place]) -> None:
        self._first, self._second, self._places = first, second, places
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="second-device")

    def get(self, request: DenoiserRequest) -> Denoiser:
        """See `Denoisers.get`. Raises UsageError for a request without guidance."""
        images, fewer = request.shape[0], request.fewer
        if request.rows == images:
            raise UsageError(
                "guidance is off, so there is nothing to compute on a second device",
                where="guidance_scale",
                remedy="Use a guidance scale above 1, or one device.",
            )
        half = replace(request, rows=images, fewer=replace(fewer, guidance=None), skipped=())
        without = replace(half, skipped=request.skipped)
        # Sessions are created here side by side, and tried: none is captured before the drawing's first step.
        with ThreadPoolExecutor(max_workers=1) as pool:
            second = pool.submit(self._second.get, half)
            first = self._first.get(half, [without])
            made: Denoiser = HalvesDenoiser(first, second.result(), request.rows, self._places, self._worker)
        if fewer.guidance is not None:
            made = PartlyGuidedDenoiser(made, first, request.rows)
        if request.skipped:
            made = SkippingDenoiser(made, self._first.get(without, [half]), request.rows)
        return made

    def unload(self) -> None:
        """See `Denoisers.unload`."""
        for each in (self._first, self._second):
            each.unload()
