"""An image in progress: its generator, and what it waits for."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from sdflow.runtime.drawing.drawing import Drawing
from sdflow.runtime.drawing.waits import Compute, Fetch
from sdflow.serve.engine.elsewhere import Pending, start
from sdflow.serve.engine.served_pipeline import ServedPipeline, Work, shared_steps
from sdflow.serve.engine.shared_steps import SharedSteps
from sdflow.serve.jobs import Job, Show


@dataclass(eq=False)
class Running:
    """A running image that is either ready for a denoising step or waiting for pending work."""

    job: Job
    pipeline: ServedPipeline = field(init=False)
    work: Work = field(init=False)
    drawing: Drawing | None = None
    pending: Pending | None = None
    seconds: dict[str, float] = field(default_factory=lambda: {"begin": 0.0, "steps": 0.0, "end": 0.0})  # by stage
    since: float = 0.0  # start of the wait
    show: Show | None = None  # preview requested after the next step

    def take_show(self) -> Show | None:
        """Return and clear the requested preview."""
        found, self.show = self.show, None
        return found

    @property
    def steps(self) -> SharedSteps | None:
        """The shared steps of the next run, if it can be shared."""
        return None if self.drawing is None else shared_steps(self.drawing)

    def next_step(self) -> Hashable:
        """Return a key that is equal for images that can share a run."""
        assert self.drawing is not None, "it is ready for a step"
        steps, moment = self.steps, None
        if steps is not None and steps.one_time:
            moment = id(self.drawing.inputs.schedule), self.drawing.index
        return self.job.pipeline, id(self.pipeline), id(steps or self), moment

    def advance(self) -> None:
        """Advance to the next step, the next pending work or the end. Raises StopIteration with the `Drawn` message at
        the end."""
        pending, self.drawing, self.pending = self.pending, None, None
        wanted = next(self.work) if pending is None else _sent(self.work, pending)
        while not isinstance(wanted, Drawing):
            pending = start(wanted)
            if not pending.done():
                self.pending = pending
                return
            wanted = _sent(self.work, pending)
        self.drawing = wanted


def _sent(work: Work, pending: Pending) -> Drawing | Fetch | Compute:
    """Send the result or error of the pending work to the image's generator, and return what it waits for next."""
    try:
        found = pending.result()
    except Exception as error:  # noqa: BLE001  (any error belongs to the image)
        return work.throw(error)
    return work.send(found)
