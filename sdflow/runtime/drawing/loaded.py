"""A pipeline folder, loaded: the submodels with all that stands beside them, and what each of them does for an image.

How the parts make an image is in `sdflow.runtime.pipeline`.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Self

from sdflow.errors import UsageError
from sdflow.families.approximation import EXACT, Approximation
from sdflow.families.base import Family
from sdflow.families.defaults import Defaults, Task
from sdflow.families.image_prompts import ImagePrompt, adapter_count, image_conditions, token_axes
from sdflow.families.request import Conditions, Request, Tensors
from sdflow.machine.providers import onnxruntime_for
from sdflow.models.base import Role
from sdflow.runtime.denoiser.control import Control
from sdflow.runtime.denoiser.denoiser import Denoiser
from sdflow.runtime.denoiser.denoisers import Denoisers, DenoiserSource
from sdflow.runtime.denoiser.loop import Start
from sdflow.runtime.denoiser.schedule import Schedule, named_scheduler, trace
from sdflow.runtime.denoiser.start import require_size
from sdflow.runtime.drawing.host import Host
from sdflow.runtime.drawing.kept import Kept
from sdflow.runtime.drawing.preview import previewer, previewer_of
from sdflow.runtime.drawing.text import run_rows, with_words, without_last_layers
from sdflow.runtime.files.folder import (
    SCHEDULER,
    TAKEN_APART,
    folder_defaults,
    folder_family,
    load_companions,
    load_submodel,
    onnx_submodels,
    read_options,
)
from sdflow.runtime.files.images import pil_of, require_finite, rounded, unfinite
from sdflow.runtime.sessions.session import LoadOptions
from sdflow.runtime.sessions.submodel import Submodel
from sdflow.runtime.sessions.tuning import UNTUNED, Tuning
from sdflow.runtime.vae import decode, encode, tile_side
from sdflow.sources.embedding import Embedding, read_embedding, require_different, split_word
from sdflow.targets import TARGETS, Target

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL.Image import Image

SCHEDULES_KEPT = 16


@dataclass(frozen=True)
class Images:
    """What a pipeline draws. images: PIL images, or float32 NHWC in [0, 1]; nsfw_content_detected: one per image. vae_tiles:
    pixels of the tiles' side where they were decoded in tiles."""

    images: list[Image] | np.ndarray
    nsfw_content_detected: list[bool] | None
    vae_tiles: int | None = None


class LoadedPipeline:
    """The submodels of a pipeline folder, and their parts in a call.

    low_memory: a submodel's session is loaded when its turn comes and let go after it, and the VAE works in tiles.
    vae_tiles: whether it does; None: where the memory that is free would not do for the whole image, which TiledWarning tells.
    options: of model_index.json, as the family reads them. defaults: of a call, for each task; None: what the configs say.
    split: take the denoiser apart, so that nothing is computed twice (`sdflow.runtime.denoiser.split`).
    words: that stand in prompts for learned vectors. host: what a call waits with behind its last step.
    """

    def __init__(
        self,
        family: Family,
        submodels: Mapping[str, Submodel],
        companions: Mapping[str, Any],
        options: Mapping[str, Any] | None = None,
        *,
        defaults: Mapping[Task, Defaults] | None = None,
        low_memory: bool = False,
        vae_tiles: bool | None = None,
        split: bool = True,
        words: Sequence[Embedding] = (),
    ) -> None:
        configs = {name: submodel.config for name, submodel in submodels.items()}
        if missing := [name for name in family.needed(configs) if name not in submodels]:
            raise UsageError(f"the pipeline has no {', '.join(missing)}")
        require_different(words)
        self.family = family
        texts = {name: with_words(submodels[name], family, words) for name in family.text_of(submodels)}
        self.submodels = {**submodels, **texts}
        self.words = {word.word: word.count for word in words}
        self._shortened: dict[str, tuple[int, Submodel]] = {}
        self.companions = companions
        self.scheduler = companions[SCHEDULER]
        self.options = {**family.options, **(options or {})}
        self.low_memory = low_memory
        self.vae_tiles = True if low_memory and vae_tiles is None else vae_tiles
        self.nets = {name: submodels[part] for name, part in family.nets(submodels).items()}
        self.place = submodels[family.denoiser].place
        self.configs = configs
        self.latents, self.task = family.latents(configs), family.task(configs)
        family.require_nets_fit(configs)
        told = {**self.scheduler.config, "_class_name": type(self.scheduler).__name__}
        self.defaults = family.defaults_of(self.configs, told, {}) if defaults is None else defaults
        self.draw_preview = previewer(family, submodels[family.decoder], self.latents)
        self.host = Host()
        self._schedules: dict[tuple[Any, ...], Schedule] = {}
        self.denoisers: DenoiserSource = Denoisers(
            submodels[family.denoiser],
            self.nets,
            [self.submodels[name] for name in family.text_of(submodels)],
            submodels[family.decoder],
            self.latents.scale,
            family.token_sizes(configs),
            split=split,
            low_memory=low_memory,
            tiles=self.vae_tiles,
        )

    @classmethod
    def load(
        cls,
        folder: Path | str,
        target: str | Target,
        *,
        scheduler: str | None = None,
        checker: bool = True,
        low_memory: bool = False,
        vae_tiles: bool | None = None,
        cuda_graphs: Container[str] | None = None,
        engine_cache: Path | None = None,
        threads: int | None = None,
        tuning: Tuning = UNTUNED,
        embeddings: Sequence[Path | str | Embedding] = (),
        shared: Mapping[str, Submodel] = MappingProxyType({}),
        previews: Path | str | None = None,
    ) -> Self:
        """Load an assembled pipeline, its sessions side by side.

        scheduler: one of `families.schedulers.SCHEDULERS` instead of the folder's. checker: whether the family's checker, if
        it is there, sees the images. cuda_graphs: the submodels that may be captured, None: all. tuning: what `sdflow tune`
        chose for this machine: `recorded_tuning(folder, target).tuning`. embeddings: files of textual inversion, FILE or
        FILE:WORD; their words may stand in prompts. shared: submodels that another pipeline has loaded of the same artifacts.
        previews: a pipeline folder whose tiny VAE decodes previews; None: the pipeline's own, if it is one.
        Raises UsageError when the folder is no pipeline, TargetUnavailableError when the provider is not there.
        """
        target = TARGETS[target] if isinstance(target, str) else target
        onnxruntime_for(target)
        folder = Path(folder)
        family = folder_family(folder)
        names = [name for name in onnx_submodels(folder) if checker or name != family.checker]
        words = [each if isinstance(each, Embedding) else read_embedding(*split_word(str(each))) for each in embeddings]

        def load(name: str) -> Submodel:
            if name in shared:
                return shared[name]
            # The encoder and the nets are for images: loaded when the first one comes. The denoiser is taken apart then.
            late = (family.encoder, *family.optional_parts(names))
            late = (*late, family.denoiser) if target.name in TAKEN_APART else late
            lazy = low_memory or target.session.static_shapes or name in late or bool(words and name in family.text)
            graphs = () if low_memory else cuda_graphs
            options = LoadOptions(engine_cache, threads, tuning)
            return load_submodel(folder, name, target, cuda_graphs=graphs, lazy=lazy, options=options)

        with ThreadPoolExecutor(max_workers=len(names)) as pool:
            submodels = dict(zip(names, pool.map(load, names), strict=True))
        pipeline = cls(
            family,
            submodels,
            load_companions(folder),
            read_options(folder),
            defaults=folder_defaults(folder),
            low_memory=low_memory,
            vae_tiles=vae_tiles,
            words=words,
        )
        if scheduler is not None:
            pipeline.scheduler = named_scheduler(scheduler, pipeline.scheduler.config, family.noising)
        if previews is not None:
            pipeline.draw_preview = previewer_of(Path(previews), family, pipeline.latents, target)
        return pipeline

    def condition(self, request: Request, clip_skip: int = 0) -> Conditions:
        """What the denoiser reads for these prompts, on the device.

        clip_skip: of the text encoders' last layers, for the prompts alone: diffusers' `encode_prompt` reads negative prompts
        with all of them (0.42, Stable Diffusion and XL).
        """
        skipped = self._conditioned(request, clip_skip)
        if not clip_skip or skipped.halves == 1:
            return skipped
        return skipped.with_negatives_of(self._conditioned(request, 0))

    def _conditioned(self, request: Request, clip_skip: int) -> Conditions:
        """With all prompts read alike."""

        def run(name: str, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            with self._using(name, 0 if self.family.part(name).whole else clip_skip) as submodel:
                return run_rows(submodel, inputs)

        with self.place.current():
            return self.family.condition(run, self.companions, self.options, request)

    def _image_conditions(self, shown: Sequence[ImagePrompt], rows: int, guided: bool) -> Tensors:
        """What the denoiser reads for image prompts, on the device; nothing without IP-Adapters."""
        if not shown:
            return {}

        def run(name: str, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            with self._using(name) as submodel:
                return run_rows(submodel, inputs)

        assert self.family.prompter is not None, "a family with IP-Adapters"
        config, processor = self.configs[self.family.denoiser], self.companions["feature_extractor"]
        return image_conditions(run, self.family.prompter.name, processor, config, shown, rows, guided=guided)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Images, float32 NHWC in [0, 1], from latents."""
        return self._decoded(latents)[0]

    def _decoded(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Images from latents, and how many values are not finite: of the latents, then of each image. Nothing waits."""
        import torch

        images = []
        with self.place.current(), self._using(self.family.decoder) as decoder:
            counts = [unfinite(latents)]
            for image in decode(decoder, latents, self.latents, tiles=self.vae_tiles):
                counts.append(unfinite(image))
                images.append((image.float() / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1))
            return torch.cat(images), torch.stack(counts)

    def finish(
        self,
        latents: torch.Tensor,
        output_type: Literal["pil", "np"] = "pil",
        *,
        finite: bool = False,
        kept: Kept | None = None,
    ) -> Images:
        """Images of latents, as the safety checker leaves them, if there is one. finite: raise VerificationError for what is no
        image. kept: put over what is decoded; the checker sees both."""
        rows, columns = latents.shape[2:]
        decoder = self.submodels[self.family.decoder]
        tiles = tile_side(decoder, rows, columns, self.latents.scale, self.vae_tiles)
        drawn, counts = self._decoded(latents)
        if kept is not None:
            with self.place.current():
                drawn = kept.over(drawn)
        floats, checked = output_type == "np", self.family.checker in self.submodels
        pixels, counts = self.host.fetch([drawn if floats and not checked else rounded(drawn), counts])
        if finite:
            (first, *others), each = counts.tolist(), drawn[0].numel()
            require_finite(first, latents.numel(), self.family.denoiser)
            for count in others:
                require_finite(count, each, self.family.decoder)
        flags = None
        if checked:
            seen = self.host.compute(partial(self._seen_by_checker, pixels))
            drawn, found = self._checked(drawn, seen)
            pixels, found = self.host.fetch([drawn if floats else rounded(drawn), found])
            flags = found.tolist()
        return Images(pixels.numpy() if floats else pil_of(pixels), flags, tiles)

    def preview(self, latents: torch.Tensor) -> torch.Tensor:
        """Images, float32 NHWC in [0, 1], from latents, at once: by the tiny VAE at full size, else a pixel for each."""
        with self.place.current():
            return self.draw_preview(latents)

    def _seen_by_checker(self, pixels: torch.Tensor) -> torch.Tensor:
        """What the safety checker reads of images."""
        seen: torch.Tensor = self.companions["feature_extractor"](pil_of(pixels), return_tensors="pt").pixel_values
        return seen

    def _checked(self, images: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The images with the flagged ones blackened, and the flags; both on the device. Nothing waits."""
        import torch

        assert self.family.checker is not None, "only a family that has one"
        checked, flags = [], []
        with self.place.current(), self._using(self.family.checker) as checker:
            read, pixels = checker.port(Role.SEEN), checker.port(Role.PIXELS)
            for crop, image in zip(seen.split(1), images.split(1), strict=True):
                bound = checker.bound(**{read: tuple(crop.shape), pixels: tuple(image.shape)})
                self.place.put(bound.inputs[read], crop)
                bound.inputs[pixels].copy_(image)
                result = bound.run()
                flags.append(result[checker.port(Role.FLAGS)].any())
                checked.append(result[checker.port(Role.CHECKED)].to(torch.float32, copy=True))
            return torch.cat(checked), torch.stack(flags)

    def latents_shape(self, images: int, height: int | None, width: int | None) -> tuple[int, int, int, int]:
        """(images, channels, rows, columns) of the latents for an image size in pixels."""
        what = self.latents
        require_size(what.granularity, height, width)
        rows = what.size if height is None else height // what.scale
        columns = what.size if width is None else width // what.scale
        return images, what.channels, rows, columns

    # Steps of a call

    @contextmanager
    def _using(self, name: str, clip_skip: int = 0) -> Iterator[Submodel]:
        submodel = self._shorter(name, clip_skip) if clip_skip else self.submodels[name]
        yield submodel
        if self.low_memory:
            submodel.unload()

    def _shorter(self, name: str, clip_skip: int) -> Submodel:
        """A text encoder without its last layers; one of each is kept."""
        count, submodel = self._shortened.get(name, (0, None))
        if submodel is None or count != clip_skip:
            self._shortened[name] = clip_skip, without_last_layers(self.submodels[name], clip_skip)
        return self._shortened[name][1]

    def denoiser(
        self,
        start: Start,
        rows: int,
        conditions: Conditions | None = None,
        *,
        controls: Mapping[str, Control] | None = None,
        guess: bool = False,
        axes: Mapping[str, int] | None = None,
        fewer: Approximation = EXACT,
    ) -> Denoiser:
        """The denoiser for these sizes; with it, side by side, what else this image needs and is not there. conditions:
        where they are known already; without them, the texts are as long as the model reads at once. controls: for the nets.
        axes: the sizes of the axes of image tokens, None: without images. fewer: what is left out."""
        denoised = self.configs[self.family.denoiser]
        if axes is None:
            axes = token_axes(denoised, [ImagePrompt()] * adapter_count(denoised))
        return self.denoisers.get(start, rows, conditions, controls or {}, axes, guess=guess, fewer=fewer)

    def schedule(
        self,
        steps: int,
        shape: Sequence[int],
        *,
        guidance_scale: float | None,
        fewer: Approximation = EXACT,
        **options: Any,
    ) -> Schedule:
        """The factors of the scheduler for so many steps, on the device. shape: of the latents. guidance_scale: None without
        guidance. fewer: what is left out. options: as of `schedule.trace`."""
        noising, tokens = self.family.noising, self.latents.tokens(*shape[-2:])
        own = (type(self.scheduler), repr(self.scheduler.config), noising.key(self.scheduler, tokens))
        key = (*own, steps, guidance_scale, fewer, *options.items())
        if key not in self._schedules:
            schedule = trace(
                self.scheduler,
                steps,
                self.family.scheduler_config,
                spread=self.family.strength_spreads,
                noising=noising,
                tokens=tokens,
                **options,
            )
            guided = schedule if guidance_scale is None else schedule.guided(guidance_scale, fewer.guidance)
            guided = guided if fewer.reuse is None else guided.reusing(fewer.reuse)
            while len(self._schedules) >= SCHEDULES_KEPT:
                self._schedules.pop(next(iter(self._schedules)))
            self._schedules[key] = guided.to(self.place.device)
        self._schedules[key] = self._schedules.pop(key)  # the latest used is the last to go
        return self._schedules[key]

    def _encoded(self, images: torch.Tensor) -> torch.Tensor:
        with self._using(self.family.encoder) as encoder:
            return encode(encoder, images, self.latents, tiles=self.vae_tiles)
