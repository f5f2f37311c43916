"""Images on their way from noise to pixels: prepared by `Pipeline.drawing`, stepped, finished.

    drawing = pipeline.drawing("a horse")
    while not drawing.done:
        drawing.step()
    image = drawing.finish().images[0]

The latents before any step are a sum of terms (`sdflow.runtime.denoiser.schedule`), so a step is a run of the denoiser and three
small kernels beside it, and nothing waits. Drawings of one pipeline may take turns, on one thread, step by step.
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
    """One call's images. `runs` of the denoiser are to be made, `index` of them are done."""

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
        """kept: what a mask keeps of the image to start from. records: the settings of each image, which its file will have.
        truncated: what was cut off of the prompts, a message each."""
        import torch

        self.denoiser, self.inputs, self.index = denoiser, inputs, 0
        self._pipeline, self._start, self._kept, self.records = pipeline, start, kept, records
        self.truncated = tuple(truncated)
        schedule = inputs.schedule
        self.runs = schedule.runs
        with pipeline.place.current():
            # A column per value, a row per term: those that are there from the start, then the outputs as they come.
            self._terms = torch.zeros(schedule.known(self.runs), start.noise.numel(), device=start.noise.device)
            for row, term in zip(self._terms, (start.noise, start.image, *start.drawn), strict=False):
                if term is not None:
                    row.copy_(term.reshape(-1))

    @property
    def done(self) -> bool:
        """Whether all runs are made."""
        return self.index == self.runs

    def step(self) -> None:
        """Run the denoiser once more. On CUDA that is queued."""
        import torch

        with self._pipeline.place.current(), torch.no_grad():
            self.take(self.denoiser.run(self.inputs, self.latents(), self.index))

    def latents(self) -> torch.Tensor:
        """What the denoiser reads next, scaled as its scheduler wants it; behind the last run the finished latents. float32
        (images, channels, rows, columns)."""
        import torch

        schedule, start = self.inputs.schedule, self._start
        known = schedule.known(self.index)
        with self._pipeline.place.current():
            # A product of matrix and vector: on a GPU it is always computed in full float32.
            drawn = torch.mv(self._terms[:known].T, schedule.inputs[self.index, :known]).view(start.noise.shape)
            if start.mask is None:
                return drawn
            kept = torch.mv(self._terms[:FIRST_DRAWN].T, schedule.kept[self.index]).view(start.noise.shape)
            return torch.where(start.mask, drawn, kept)

    def take(self, output: torch.Tensor) -> None:
        """Go on with what the denoiser made of `latents`, as `step` does; for a run that several drawings share. output: (rows of
        the batch, channels, rows, columns), with guidance the negative prompts' first."""
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
        """What the images are becoming, after a step: the latents without the noise that the model says is in them."""
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
        """Step to the end. on_step: called with index, timestep and number of all runs when one is computed (on CUDA: queued).
        on_preview: called behind it."""
        while not self.done:
            self.step()
            if on_step is not None:
                on_step(self.index - 1, self.inputs.schedule.numbers[self.index - 1], self.runs)
            if on_preview is not None:
                on_preview(self.preview())

    def finish(self, output_type: OutputType = "pil") -> Images:
        """The images of finished latents, as the safety checker leaves them. Raises VerificationError when what is to be a PIL
        image has values that are NaN or infinite."""
        return complete(self.finishing(output_type))

    def finishing(self, output_type: OutputType = "pil") -> Waits[Images]:
        """The same, by a generator that says what it waits for."""
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
    """What the denoiser made, scaled for each image so that the norm of its guided prediction is at most `most` times that of the
    prompt's. output: (rows of the batch, channels, rows, columns). weights: of its halves."""
    import torch

    halves = output.float().unflatten(0, (len(weights), -1))
    guided = torch.einsum("h,hi...->i...", weights, halves)
    norm, own = (torch.linalg.vector_norm(each.flatten(1), dim=1) for each in (guided, halves[-1]))
    factor = torch.where(norm > most * own, most * own / norm, 1.0)
    return (halves * factor.view(1, -1, 1, 1, 1)).flatten(0, 1)
