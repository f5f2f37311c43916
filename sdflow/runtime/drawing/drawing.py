"""A call in progress: prepared by `Pipeline.drawing`, stepped, finished.

    drawing = pipeline.drawing("a horse")
    while not drawing.done:
        drawing.step()
    image = drawing.finish().images[0]

The latents before any step are a linear combination of terms (`sdflow.runtime.denoiser.schedule`), so a step is one run
of the denoiser and three small kernels, without synchronization. Drawings of one pipeline may alternate step by step on
one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from sdflow.runtime.denoiser.denoiser import Denoiser, DenoiserInputs
from sdflow.runtime.denoiser.scheduler_walk import FIRST_DRAWN
from sdflow.runtime.denoiser.start import Start
from sdflow.runtime.drawing.kept import Kept
from sdflow.runtime.drawing.parts import Images, PipelineParts
from sdflow.runtime.drawing.preview import Preview
from sdflow.runtime.drawing.record import Record, with_record
from sdflow.runtime.drawing.waits import Fetch, Waits, complete

if TYPE_CHECKING:
    import torch

OutputType = Literal["pil", "np", "latent"]


class Drawing:
    """The images of one call: `runs` denoiser runs in total, `index` of them done."""

    def __init__(
        self,
        pipeline: PipelineParts,
        denoiser: Denoiser,
        inputs: DenoiserInputs,
        start: Start,
        kept: Kept | None = None,
        records: Sequence[Record] = (),
        truncated: Sequence[str] = (),
    ) -> None:
        """kept: the area that a mask keeps of the start image. records: settings of each image, for its file.
        truncated: one message per truncated prompt."""
        import torch

        self.denoiser, self.inputs, self.index = denoiser, inputs, 0
        self._pipeline, self._start, self._kept, self.records = pipeline, start, kept, records
        self.truncated = tuple(truncated)
        schedule = inputs.schedule
        self.runs = schedule.runs
        with pipeline.place.current():
            # One column per value and one row per term: first the initial terms, then the outputs.
            self._terms = torch.zeros(schedule.known(self.runs), start.noise.numel(), device=start.noise.device)
            for row, term in zip(self._terms, (start.noise, start.image, *start.drawn), strict=False):
                if term is not None:
                    row.copy_(term.reshape(-1))

    @property
    def done(self) -> bool:
        """Whether all runs are done."""
        return self.index == self.runs

    def step(self) -> None:
        """Run the denoiser once; on CUDA, the run is only queued."""
        import torch

        with self._pipeline.place.current(), torch.no_grad():
            self.take(self.denoiser.run(self.inputs, self.latents(), self.index))

    def latents(self) -> torch.Tensor:
        """Return the denoiser's next input, scaled by the scheduler, or the finished latents after the last run:
        float32 (images, channels, rows, columns)."""
        import torch

        schedule, start = self.inputs.schedule, self._start
        known = schedule.known(self.index)
        with self._pipeline.place.current():
            # Matrix-vector products are always computed in full float32 on a GPU.
            drawn = torch.mv(self._terms[:known].T, schedule.inputs[self.index, :known]).view(start.noise.shape)
            if start.mask is None:
                return drawn
            kept = torch.mv(self._terms[:FIRST_DRAWN].T, schedule.kept[self.index]).view(start.noise.shape)
            return torch.where(start.mask, drawn, kept)

    def take(self, output: torch.Tensor) -> None:
        """Accept the denoiser's output for `latents`, as `step` does; for runs that several drawings share. output:
        (batch rows, channels, rows, columns), with guidance the negative prompts' first."""
        schedule = self.inputs.schedule
        halves = schedule.made[self.index] if schedule.made else schedule.halves
        end = schedule.known(self.index + 1)
        if schedule.norms and schedule.norms[self.index]:
            output = _limited(output, schedule.weights[self.index], schedule.norms[self.index])
        self._terms[end - halves : end].copy_(output.reshape(halves, -1))
        self.index += 1
        if self.done and self._pipeline.low_memory:
            self._pipeline.denoisers.unload()

    def preview(self) -> Preview:
        """Return a preview of the images after a step: the latents without their predicted noise."""
        import torch

        start = self._start
        with self._pipeline.place.current():
            row = self.inputs.schedule.clean_row(self.index - 1)
            clean = torch.mv(self._terms[: len(row)].T, row).view(start.noise.shape)
            if start.mask is not None and start.image is not None:
                clean = torch.where(start.mask, clean, start.image)
        return Preview(self.index - 1, self.runs, clean, self._pipeline.preview, self._kept)

    def run(
        self,
        on_step: Callable[[int, int, int], None] | None = None,
        on_preview: Callable[[Preview], None] | None = None,
    ) -> None:
        """Run all remaining steps. on_step: called after each (on CUDA: when queued) with index, timestep and number of
        runs.
        on_preview: called after it."""
        while not self.done:
            self.step()
            if on_step is not None:
                on_step(self.index - 1, self.inputs.schedule.numbers[self.index - 1], self.runs)
            if on_preview is not None:
                on_preview(self.preview())

    def finish(self, output_type: OutputType = "pil") -> Images:
        """Return the finished images, after the safety checker. Raises VerificationError if PIL images are requested
        and contain NaN or infinite values."""
        return complete(self.finishing(output_type))

    def finishing(self, output_type: OutputType = "pil") -> Waits[Images]:
        """Like `finish`, as a generator that yields what it waits for."""
        latents = self.latents()
        if output_type == "latent":
            (found,) = yield Fetch(self._pipeline.place, [latents])
            return Images(found.numpy(), None)
        made = yield from self._pipeline.finishing(latents, output_type, finite=output_type == "pil", kept=self._kept)
        if output_type == "pil":
            for image, record in zip(made.images, self.records, strict=False):
                with_record(image, record)
        return made


def _limited(output: torch.Tensor, weights: torch.Tensor, most: float) -> torch.Tensor:
    """Scale each image's output so that the norm of its guided prediction is at most `most` times the conditional
    one's.
    output: (batch rows, channels, rows, columns). weights: of its halves."""
    import torch

    halves = output.float().unflatten(0, (len(weights), -1))
    guided = torch.einsum("h,hi...->i...", weights, halves)
    norm, own = (torch.linalg.vector_norm(each.flatten(1), dim=1) for each in (guided, halves[-1]))
    factor = torch.where(norm > most * own, most * own / norm, 1.0)
    return (halves * factor.view(1, -1, 1, 1, 1)).flatten(0, 1)
