"""A pipeline that draws many images at once, each by a call of its own that is paused at every step."""

from __future__ import annotations

import copy
import io
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from sdflow.errors import VerificationError
from sdflow.families.defaults import Task
from sdflow.manifest import MANIFEST_FILE, read_manifest
from sdflow.runtime.denoiser.control import Control
from sdflow.runtime.denoiser.schedule import named_scheduler
from sdflow.runtime.drawing.loaded import Images
from sdflow.runtime.drawing.preview import Preview
from sdflow.runtime.ensemble import Ensemble
from sdflow.runtime.files.folder import folder_family, load_submodel
from sdflow.runtime.files.recorded_tuning import recorded_tuning
from sdflow.runtime.pipeline import Pipeline
from sdflow.runtime.sessions.device_weights import DeviceWeights
from sdflow.runtime.sessions.live_weights import LiveWeights
from sdflow.runtime.sessions.session import LoadOptions
from sdflow.runtime.sessions.submodel import Submodel
from sdflow.serve.engine.batch_plan import worthwhile_sizes
from sdflow.serve.engine.cuts import Cuts
from sdflow.serve.engine.elsewhere import PausingHost
from sdflow.serve.engine.pausing import Ask, HeldSteps, PausingDenoisers, StepsOfSizes
from sdflow.serve.engine.shared_steps import Step
from sdflow.serve.jobs import Beside, Image, Job
from sdflow.targets import find_target

if TYPE_CHECKING:
    import PIL.Image

MEASURED_RUNS = 5
QUEUED_RUNS = 4

RESTING = {"session.intra_op.allow_spinning": "0"}
"""The threads of a session that has nothing to do would go round for a while, on the cores that the next session's need:
an image of 8 steps takes 0.29 s without that, and 0.39 with, on 2 cores."""

Reload = Callable[[Path, str, LiveWeights | None, DeviceWeights | None], Submodel]
"""Loads the submodel of a folder, of this name; with weights that it reads from memory, and the others on the device where they
are there."""


@dataclass(frozen=True)
class Callbacks:
    """What a call tells on the way. step: steps done and in all. preview: its number, and the image as a file."""

    step: Callable[[int, int], None] = lambda done, total: None
    preview: Callable[[int, bytes], None] = lambda number, file: None


@dataclass(frozen=True)
class Finished:
    """A finished image."""

    file: bytes
    size: tuple[int, int]
    flagged: bool | None


class ServedPipeline:
    """A pipeline, with its refiner if it has one."""

    output_type: ClassVar[Literal["pil", "np"]] = "pil"

    def __init__(
        self,
        pipeline: Pipeline | Ensemble,
        reload: Reload | None = None,
        cuts: Cuts | None = None,
    ) -> None:
        """reload: loads a submodel as those of the pipeline were. cuts: of one with the same graphs."""
        self.pipeline, self._reload = pipeline, reload
        self.stages = [pipeline] if isinstance(pipeline, Pipeline) else [pipeline.base, pipeline.refiner]
        self._cuts = Cuts() if cuts is None else cuts
        self._steps: list[StepsOfSizes | HeldSteps] = [StepsOfSizes(stage, self._cuts) for stage in self.stages]
        self._hold: Callable[[], None] = lambda: None

    @classmethod
    def load(cls, folder: Path, threads: int | None = None, checker: bool = True) -> ServedPipeline:
        """Load a pipeline folder on the target that it was built for. Raises as `Pipeline.load`."""
        origin = read_manifest(folder).origin
        target = find_target(origin.target, str(folder / MANIFEST_FILE))
        recorded, family = recorded_tuning(folder, target).tuning, folder_family(folder)
        tuning = replace(recorded, session={**RESTING, **recorded.session})
        options: dict[str, Any] = {"threads": threads, "checker": checker, "tuning": tuning}

        def reload(other: Path, name: str, live: LiveWeights | None, shared: DeviceWeights | None) -> Submodel:
            how = LoadOptions(threads=threads, tuning=tuning)
            return load_submodel(other, name, target, family=family, lazy=True, options=how, live=live, shared=shared)

        if origin.refiner is not None:
            return cls(Ensemble.load(folder, folder.resolve() / origin.refiner, target, **options), reload)
        return cls(Pipeline.load(folder, target, **options), reload)

    def with_submodels(self, folder: Path, live: Mapping[str, LiveWeights | None]) -> ServedPipeline:
        """The same pipeline with these submodels of another folder, by name, each with the weights that it reads from memory:
        then of the pipeline's own folder. All others are shared. A refiner stays as it is."""
        assert self._reload is not None, "it was loaded from a folder"
        base, reload = self.base, self._reload

        def loaded(name: str, weights: LiveWeights | None) -> Submodel:
            return reload(folder, name, weights, None if weights is None else base.submodels[name].weights)

        pipeline = Pipeline(
            base.family,
            {**base.submodels, **{name: loaded(name, weights) for name, weights in live.items()}},
            base.companions,
            base.options,
            defaults=base.defaults,
        )
        pipeline.scheduler = base.scheduler
        whole = pipeline if isinstance(self.pipeline, Pipeline) else Ensemble(pipeline, self.pipeline.refiner)
        return type(self)(whole, self._reload, self._cuts)

    def keep_sizes(self, pixels: int) -> None:
        """What was made for several sizes stays as long as these have no more pixels than this together."""
        for stage, steps in zip(self.stages, self._steps, strict=True):
            if isinstance(steps, StepsOfSizes):
                steps.room = pixels // stage.latents.scale**2

    def holding(self, hold: Callable[[], None]) -> ServedPipeline:
        """The same sessions with other weights. hold: lets the next runs read them (`sdflow.runtime.sessions.live_weights`)."""
        other = copy.copy(self)
        other._hold = hold
        other._steps = [HeldSteps(self._steps[0], hold), *self._steps[1:]]
        return other

    def prepare(self, job: Job, size: int = 1) -> None:
        """Load what the first step of a job like this waits for, in a batch of this size. May be in another thread than the one
        that draws, before that has this pipeline; on a GPU not: its one stream may be captured meanwhile."""
        base = self.base
        if self.why_alone is not None:
            return
        for name in base.family.text_of(base.submodels):
            base.submodels[name].load()
        given = job.arguments
        _, _, rows, columns = base.latents_shape(1, given.get("height"), given.get("width"))
        task: Task = "text" if job.image is None else "image" if job.mask is None else "inpaint"
        scale = given.get("guidance_scale", base.defaults[task].guidance_scale)
        steps = self._steps[0].of(rows, columns)
        if steps is not None:
            steps.form(size, 2 if base.family.guided(base.configs, scale) else 1)

    @property
    def base(self) -> Pipeline:
        """That which begins."""
        return self.stages[0]

    @property
    def why_alone(self) -> str | None:
        """Why images are not drawn together; None where they are. Known when one was drawn."""
        return self._steps[0].why_alone

    def draw(self, job: Job, ask: Ask, told: Callbacks = Callbacks()) -> Finished:
        """One image. ask: gives what the model makes of a step. Raises UsageError as a call of a pipeline."""
        import torch

        with self.base.place.current():
            self._hold()  # for the text encoders, which run before the first pause
        stages = [
            self._for_one_call(stage, steps, job, ask) for stage, steps in zip(self.stages, self._steps, strict=True)
        ]
        call = stages[0] if isinstance(self.pipeline, Pipeline) else Ensemble(*stages)
        given: dict[str, Any] = {} if job.mask is None else {"mask_image": _pil(job.mask)}
        if job.previews:
            given["callback_on_preview"] = self._previewing(stages[0], job, told)
        result = call(
            [job.prompt],
            None if job.image is None else _pil(job.image),
            negative_prompt=job.negative_prompt,
            generator=[torch.Generator().manual_seed(job.seed)],
            callback_on_step_end=lambda index, timestep, total: told.step(index + 1, total),
            output_type=self.output_type,
            **given,
            **_beside(job.beside),
            **job.arguments,
        )
        return stages[0].host.compute(partial(self.finished, job, result))

    def finished(self, job: Job, drawn: Images) -> Finished:
        """What is drawn, as a file."""
        (image,), flags = drawn.images, drawn.nsfw_content_detected
        return Finished(encoded(image, job), image.size, None if flags is None else flags[0])

    def _for_one_call(self, stage: Pipeline, steps: StepsOfSizes | HeldSteps, job: Job, ask: Ask) -> Pipeline:
        """The pipeline with the same submodels, its scheduler as the job has it, and denoisers that pause."""
        made = copy.copy(stage)
        if job.scheduler is not None:
            made.scheduler = named_scheduler(job.scheduler, stage.scheduler.config, stage.family.noising)
        made.denoisers = PausingDenoisers(steps, stage.denoisers, ask, stage.place)
        made.host = PausingHost(ask, stage.place)
        return made

    def _previewing(self, pausing: Pipeline, job: Job, told: Callbacks) -> Callable[[Preview], None]:
        """Decodes what a drawing is becoming, as often as the job wants it; the safety checker sees that too."""
        number = 0

        def show(preview: Preview) -> None:
            nonlocal number
            if preview.index in preview_steps(job.previews, preview.total):
                (image,) = pausing.finish(preview.latents, kept=preview.kept).images
                told.preview(number, pausing.host.compute(lambda: encoded(image, job)))
                number += 1

        return show

    def measure(self, sizes: Sequence[int] | None = None) -> dict[int, float]:
        """Seconds of a run of the denoiser by size of the batch, at the model's own size: of these sizes, or of those that are
        worth it."""
        latents, stage = self.base.latents, self.base
        steps = self._steps[0].of(latents.size, latents.size)
        if steps is None:
            return {1: 1.0}
        own = stage.defaults["text"]
        halves = 2 if stage.family.guided(stage.configs, own.guidance_scale) else 1
        schedule = stage.schedule(own.steps, (latents.size, latents.size), guidance_scale=None)
        denoiser = stage.submodels[stage.family.denoiser]
        in_a_row = 1 if stage.place.stream is None else QUEUED_RUNS  # what queues one is done while another is computed

        def measured(size: int) -> float | None:
            import torch

            shapes = denoiser.shapes({**steps.sizes, "batch": halves})
            with stage.place.current(), torch.no_grad():
                latents = shapes.pop(steps.moving.latents)
                given = {name: torch.zeros(shape) for name, shape in shapes.items() if name != steps.moving.timestep}
                texts = [steps.texts(given, halves) for _ in range(size)]
                sample = torch.randn(latents[1:])
                batch = [Step(sample, text, steps.times(schedule), 0) for text in texts]
                try:
                    steps.run(batch, size)
                except (VerificationError, RuntimeError, MemoryError):  # no room
                    steps.forget(size)
                    return None
                seconds = []
                for _ in range(MEASURED_RUNS):
                    begun = time.perf_counter()
                    for _ in range(in_a_row):
                        found = steps.run(batch, size)
                    found[0].cpu()
                    seconds.append((time.perf_counter() - begun) / in_a_row)
            return min(seconds)

        if sizes is None:
            return worthwhile_sizes(measured)
        found = {size: measured(size) for size in sizes}
        return {size: taken for size, taken in found.items() if taken is not None}


def preview_steps(previews: int, runs: int) -> tuple[int, ...]:
    """Behind which steps there is one: spread evenly, none behind the last."""
    wanted = min(previews, runs - 1)
    return tuple((number + 1) * runs // (wanted + 1) - 1 for number in range(wanted))


def encoded(image: PIL.Image.Image, job: Job) -> bytes:
    """The image as a file, as the job wants it."""
    file = io.BytesIO()
    options: dict[str, Any] = {} if job.format == "PNG" else {"quality": job.quality}
    image.save(file, job.format, **options)
    return file.getvalue()


def _beside(images: Beside) -> dict[str, Any]:
    """The arguments of a call: an image for each ControlNet, and for each IP-Adapter its images."""
    controls = {each.name: Control(_pil(each.image), each.scale, each.start, each.end) for each in images.controls}
    given: dict[str, Any] = {"control": controls} if controls else {}
    if images.prompts:
        scales = {each.adapter: each.scale for each in images.prompts}
        shown = [[_pil(each.image) for each in images.prompts if each.adapter == adapter] for adapter in scales]
        given |= {"ip_adapter_image": shown, "ip_adapter_scale": list(scales.values())}
    return given


def _pil(image: Image) -> PIL.Image.Image:
    import PIL.Image

    return PIL.Image.frombytes(image.mode, image.size, image.pixels)
