"""A pipeline that generates many images at once. Each has its own drawing, and drawings share denoiser runs."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sdflow.families.shared.defaults import Task
from sdflow.fits.estimate import CONTEXT
from sdflow.machine.device_memory import process_bytes
from sdflow.machine.memory import device_bytes
from sdflow.manifest import MANIFEST_FILE, read_manifest
from sdflow.runtime.denoiser.control import Control
from sdflow.runtime.drawing.drawing import Drawing
from sdflow.runtime.drawing.record import with_more, with_record
from sdflow.runtime.drawing.text import with_words
from sdflow.runtime.drawing.waits import Compute, Fetch
from sdflow.runtime.ensemble import Ensemble
from sdflow.runtime.files.folder import folder_family, load_submodel
from sdflow.runtime.files.recorded_tuning import recorded_tuning
from sdflow.runtime.pipeline import Pipeline
from sdflow.runtime.sessions.live_weights import LiveWeights
from sdflow.runtime.sessions.session import LoadOptions
from sdflow.runtime.sessions.submodel import Submodel
from sdflow.runtime.sessions.working_bytes import row_bytes
from sdflow.serve.engine.cuts import Cuts
from sdflow.serve.engine.elsewhere import OneAhead
from sdflow.serve.engine.shared_denoisers import SharedDenoisers
from sdflow.serve.engine.shared_steps import SharedDenoiser, SharedSteps
from sdflow.serve.jobs import ConditioningImages, Drawn, Image, Job, Message, Preview, Show, Stepped
from sdflow.targets import find_target

if TYPE_CHECKING:
    import PIL.Image

RESTING = {"session.intra_op.allow_spinning": "0"}
"""Idle session threads would otherwise spin on cores that the next session needs: an image of 8 steps on 2 cores takes
0.39 s with spinning and 0.29 s without."""

HIDDEN = (
    "the driver does not report how much GPU memory this process uses, as in containers that hide process ids: the limit "
    "of --gpus also counts other processes; start the containers with the host's process ids (hostPID: true)"
)

Work = Generator[Drawing | Fetch | Compute, Any, Drawn]
"""Yields what an image waits for: a drawing that needs a step before the generator resumes, or work done elsewhere."""


class ServedPipeline:
    """A pipeline with its refiner, if any."""

    def __init__(
        self,
        pipeline: Pipeline | Ensemble,
        reload: Callable[..., Submodel] | None = None,
        cuts: Cuts | None = None,
    ) -> None:
        """reload: `load_submodel` with the pipeline's options. cuts: to share with a pipeline that has the same
        graphs."""
        self._reload = reload
        self.stages = [pipeline] if isinstance(pipeline, Pipeline) else [pipeline.base, pipeline.refiner]
        self._cuts = Cuts() if cuts is None else cuts
        self._denoisers = [SharedDenoisers(stage, self._cuts) for stage in self.stages]
        self._hold: Callable[[], None] = lambda: None
        self._ahead = OneAhead(self.base.place)

    @classmethod
    def load(
        cls,
        folder: Path,
        threads: int | None = None,
        checker: bool = True,
        embeddings: Path | None = None,
        gpu_share: float | None = None,
        loras: bool = False,
    ) -> ServedPipeline:
        """Load a pipeline folder for its target. embeddings: textual inversion files. gpu_share: fraction of the GPU's
        memory that this process may use, for the target cuda; None: all. loras: whether requests may choose LoRAs.
        Raises like `Pipeline.load`."""
        origin = read_manifest(folder).origin
        target = find_target(origin.target, str(folder / MANIFEST_FILE))
        recorded, family = recorded_tuning(folder, target).tuning, folder_family(folder)
        tuning = replace(recorded, session={**RESTING, **recorded.session})
        options: dict[str, Any] = {"threads": threads, "checker": checker, "tuning": tuning, "changing": loras}
        options["embeddings"] = [] if embeddings is None else [embeddings]
        if gpu_share is not None and target.name == "cuda":
            options["device_memory"] = int(gpu_share * device_bytes("cuda")) - CONTEXT
            if process_bytes("cuda") is None:
                warnings.warn(HIDDEN, stacklevel=2)

        loading = LoadOptions(threads=threads, tuning=tuning)
        reload = partial(load_submodel, target=target, family=family, lazy=True, options=loading)
        if origin.refiner is not None:
            return cls(Ensemble.load(folder, folder.resolve() / origin.refiner, target, **options), reload)
        return cls(Pipeline.load(folder, target, **options), reload)

    def with_submodels(self, folder: Path, live: Mapping[str, LiveWeights | None]) -> ServedPipeline:
        """Return this pipeline with submodels of another folder; the others and the refiner are shared. Submodels with
        live weights come from the pipeline's own folder and read those weights from memory."""
        assert self._reload is not None, "it was loaded from a folder"
        base, reload = self.base, self._reload

        def loaded(name: str, weights: LiveWeights | None) -> Submodel:
            own = base.submodels[name]
            shared = None if weights is None else own.weights
            made = reload(folder, name, live=weights, shared=shared, residency=own.residency)
            return with_words(made, base.family, base.learned) if name in base.family.text else made

        pipeline = Pipeline(
            base.family,
            {**base.submodels, **{name: loaded(name, weights) for name, weights in live.items()}},
            base.companions,
            base.options,
            defaults=base.defaults,
            moving=base.moving,
            vae_tiles=base.vae_tiles,
        )
        pipeline.scheduler, pipeline.record = base.scheduler, base.record
        pipeline.learned, pipeline.words, pipeline.most_chunks = base.learned, base.words, base.most_chunks
        whole = pipeline if len(self.stages) == 1 else Ensemble(pipeline, self.stages[1])
        return type(self)(whole, self._reload, self._cuts)

    def catch_up(self, busy: Callable[[], bool]) -> bool:
        """Create the batch sizes that images lacked. busy: whether to stop. Return whether all are created."""
        with self.base.place.current():
            return all(denoisers.catch_up(busy) for denoisers in self._denoisers)

    def keep_sizes(self, pixels: int) -> None:
        """Keep sessions for several sizes as long as their total pixels stay within this limit."""
        for stage, denoisers in zip(self.stages, self._denoisers, strict=True):
            denoisers.room = pixels // stage.latents.scale**2

    def rest(self) -> None:
        """Release what only images larger than the model's own need; it is recreated on demand."""
        for stage, denoisers in zip(self.stages, self._denoisers, strict=True):
            denoisers.forget_large(stage.latents.size**2)
            side = stage.latents.size
            for submodel in stage.submodels.values():
                if submodel.reached > row_bytes(submodel.part.model, submodel.config, (side, side), stage.place.device):
                    submodel.unload()

    def holding(self, hold: Callable[[], None]) -> ServedPipeline:
        """Return a pipeline with the same sessions and other weights. hold: sets the next runs' weights
        (`live_weights`)."""
        base = copy.copy(self.base)
        base.schedules = {}  # timestep outputs are cached by schedule and depend on the weights
        other = copy.copy(self)
        other.stages = [base, *self.stages[1:]]
        other._hold = hold
        return other

    def prepare(self, job: Job, size: int = 1) -> None:
        """Load what the first step of such a job needs, for a batch of this size. On a CPU any thread may call this
        before the pipeline is used; on a GPU not, because its only stream may be capturing a graph."""
        base = self.base
        if self.why_alone is not None or job.conditioning.references:
            return
        for name in base.family.text_of(base.submodels):
            base.submodels[name].load()
        given = job.arguments
        _, _, rows, columns = base.latents_shape(1, given.get("height"), given.get("width"))
        task: Task = "text" if job.image is None else "image" if job.mask is None else "inpaint"
        scale = given.get("guidance_scale", base.defaults[task].guidance_scale)
        steps = self.shared_steps(rows, columns)
        if steps is not None:
            steps.form(size, 2 if base.family.guided(base.configs, scale) else 1)

    @property
    def base(self) -> Pipeline:
        return self.stages[0]

    def shared_steps(self, rows: int, columns: int) -> SharedSteps | None:
        """Return the first stage's shared steps for latents of this size; None if images run alone."""
        return self._denoisers[0].of(rows, columns)

    @property
    def why_alone(self) -> str | None:
        """Why images cannot share runs, or None if they can. Known after the first image."""
        return self._denoisers[0].why_alone

    def draw(self, job: Job, tell: Callable[[Message], None], show: Callable[[], Show | None]) -> Work:
        """Generate one image as a generator that yields what it waits for. tell: receives steps and previews. show:
        returns a preview that a client requested, once. Raises UsageError like a pipeline."""
        number = 0
        truncated: list[str] = []
        for drawing in self.drawings(job):
            truncated += drawing.truncated
            previewed = preview_steps(job.previews, drawing.runs)
            while not drawing.done:
                yield drawing
                tell(Stepped(job.request, job.index, drawing.index, drawing.runs))
                wanted = show()
                if wanted is not None or drawing.index - 1 in previewed:  # the safety checker sees previews too
                    preview = drawing.preview()
                    drawn = yield from self.base.finishing(preview.latents, kept=preview.kept)
                    (image,) = drawn.images
                    if wanted is not None and wanted.end:
                        image = with_record(image, drawing.records[0]) if drawing.records else image
                        return (yield from self._finished(job, image, drawn.nsfw_content_detected, truncated))
                    file = yield Compute(partial(encoded, image, job))
                    tell(Preview(job.request, job.index, number, file))
                    number += 1
        drawn = yield from drawing.finishing()
        return (yield from self._finished(job, drawn.images[0], drawn.nsfw_content_detected, truncated))

    def _finished(self, job: Job, image: Any, flags: Sequence[bool] | None, truncated: Sequence[str]) -> Work:
        if job.loras:
            image = with_more(image, {"loras": [{"name": each.name, "scale": each.scale} for each in job.loras]})
        file = yield Compute(partial(encoded, image, job))
        flagged, warnings = None if flags is None else flags[0], tuple(dict.fromkeys(truncated))
        return Drawn(job.request, job.index, file, image.size, flagged, {}, warnings=warnings)

    def step(self, drawings: Sequence[Drawing], size: int) -> None:
        """Run the denoiser once for one drawing, or for several with the same `shared_steps`. size: of the batch. On a
        GPU the run is only queued, and the previous one has finished. Raises VerificationError on failure."""
        import torch

        with self.base.place.current(), torch.no_grad():
            self._hold()
            steps = shared_steps(drawings[0])
            if steps is None:
                drawings[0].step()
            else:
                shared = [cast(SharedDenoiser, each.denoiser) for each in drawings]
                wanted = [
                    own.at(each.inputs, each.latents(), each.index) for own, each in zip(shared, drawings, strict=True)
                ]
                for drawing, output in zip(drawings, steps.run(wanted, size), strict=True):
                    drawing.take(output)
            self._ahead.queued()

    def drawings(self, job: Job, **more: Any) -> Iterator[Drawing]:
        """Yield the drawings of the pipeline and of its refiner, if any. more: call arguments beyond those of jobs."""
        import torch

        with self.base.place.current():
            self._hold()  # for the text encoders
        stages = []
        for stage, denoisers in zip(self.stages, self._denoisers, strict=True):
            stages.append(made := copy.copy(stage))  # shares the submodels
            made.denoisers = denoisers
            if job.scheduler is not None:
                made.scheduler = stage.named_scheduler(job.scheduler)
        image = more.pop("image", None) if job.image is None else _pil(job.image)
        settings: dict[str, Any] = {
            **({} if job.mask is None else {"mask_image": _pil(job.mask)}),
            "negative_prompt": job.negative_prompt,
            "generator": [torch.Generator().manual_seed(job.seed)],
            **_conditioning_arguments(job.conditioning),
            **job.arguments,
            **more,
        }
        if len(stages) == 1:
            yield stages[0].drawing([job.prompt], image, **settings)
        else:
            yield from Ensemble(*stages).drawings([job.prompt], image, **settings)


def shared_steps(drawing: Drawing) -> SharedSteps | None:
    """Return the shared steps of a drawing, or None if it runs alone."""
    return drawing.denoiser.steps if isinstance(drawing.denoiser, SharedDenoiser) else None


def halves(drawings: Sequence[Drawing]) -> int:
    """Return the halves of guidance that a shared run of these drawings has: 2 if one of them has guidance, else 1."""
    return max(cast(SharedDenoiser, each.denoiser).halves for each in drawings)


def preview_steps(previews: int, runs: int) -> tuple[int, ...]:
    """Return the steps that are followed by a preview: evenly spaced, and never the last."""
    wanted = min(previews, runs - 1)
    return tuple((number + 1) * runs // (wanted + 1) - 1 for number in range(wanted))


def encoded(image: PIL.Image.Image, job: Job) -> bytes:
    file = io.BytesIO()
    options: dict[str, Any] = {} if job.format == "PNG" else {"quality": job.quality}
    image.save(file, job.format, **options)
    return file.getvalue()


def _conditioning_arguments(images: ConditioningImages) -> dict[str, Any]:
    """Return the call arguments for ControlNets, IP-Adapters and reference images."""
    controls = {each.name: Control(_pil(each.image), each.scale, each.start, each.end) for each in images.controls}
    given: dict[str, Any] = {"control": controls} if controls else {}
    if images.prompts:
        scales = {each.adapter: each.scale for each in images.prompts}
        shown = [[_pil(each.image) for each in images.prompts if each.adapter == adapter] for adapter in scales]
        given |= {"ip_adapter_image": shown, "ip_adapter_scale": list(scales.values())}
    if images.references:
        given["references"] = [_pil(each) for each in images.references]
    return given


def _pil(image: Image) -> PIL.Image.Image:
    import PIL.Image

    return PIL.Image.frombytes(image.mode, image.size, image.pixels)
