"""A loaded pipeline folder: submodels, tokenizers, scheduler and options. `parts` runs the submodels."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from sdflow.errors import UsageError
from sdflow.families.shared.base import Family
from sdflow.families.shared.defaults import Defaults, Task
from sdflow.families.shared.image_prompts import ImagePrompt, adapter_count, token_axes
from sdflow.machine.providers import onnxruntime_for
from sdflow.runtime.denoiser.denoiser import Denoiser
from sdflow.runtime.denoiser.denoisers import DenoiserRequest, Denoisers, DenoiserSource
from sdflow.runtime.denoiser.halves import HalvedDenoisers
from sdflow.runtime.denoiser.schedule import Schedule, named_scheduler
from sdflow.runtime.denoiser.start import require_size
from sdflow.runtime.drawing.devices import require_devices
from sdflow.runtime.drawing.preview import previewer, previewer_of
from sdflow.runtime.drawing.record import Record, folder_record
from sdflow.runtime.drawing.text import learned_words, with_words, without_last_layers
from sdflow.runtime.drawing.turns import Moves, moving_weights
from sdflow.runtime.files.folder import (
    SCHEDULER,
    TAKEN_APART,
    folder_defaults,
    folder_family,
    load_companions,
    load_submodel,
    onnx_submodels,
    read_options,
    target_of,
)
from sdflow.runtime.sessions.place import device_name, place
from sdflow.runtime.sessions.residency import Keep
from sdflow.runtime.sessions.session import LoadOptions
from sdflow.runtime.sessions.submodel import Submodel
from sdflow.runtime.sessions.tuning import UNTUNED, Tuning
from sdflow.sources.embedding import Embedding, require_different
from sdflow.targets import Target


class LoadedPipeline:
    """The submodels of a pipeline folder.

    low_memory: load each submodel's session on use and unload it afterwards, and run the VAE in bands.
    moving: the submodels' weights take turns on the device.
    vae_tiles: whether to run the VAE in bands of rows (`sdflow.runtime.vae`); None: only if free memory does not suffice
        for the whole image, with a TiledWarning.
    options: from model_index.json, as the family reads them. defaults: of a call, by task; None: from the configs.
    split: run the denoiser in parts, to avoid repeated work (`sdflow.runtime.denoiser.split`).
    words: textual inversion embeddings usable in prompts. record: settings written into all its images. second: the
    denoiser on a second device, which computes the negative prompts' half of guidance (`sdflow.runtime.denoiser.halves`).
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
        moving: bool = False,
        vae_tiles: bool | None = None,
        split: bool = True,
        words: Sequence[Embedding] = (),
        second: Submodel | None = None,
    ) -> None:
        configs = {name: submodel.config for name, submodel in submodels.items()}
        if missing := [name for name in family.needed(configs) if name not in submodels]:
            raise UsageError(
                f"the pipeline has no {', '.join(missing)}",
                remedy="Rebuild it from a workflow that does not leave out these submodels.",
            )
        require_different(words)
        self.family = family
        texts = {name: with_words(submodels[name], family, words) for name in family.text_of(submodels)}
        self.submodels = {**submodels, **texts}
        self.learned = words
        self.words = {word.word: word.count for word in words}
        self.most_chunks: int | None = None
        """Maximum number of chunks of a prompt; None: unlimited."""
        self.record: Record = {}
        self._shortened: dict[str, tuple[int, Submodel]] = {}
        self.companions = companions
        self.scheduler: Any = companions.get(SCHEDULER)  # not yet there while a folder is loaded
        self.options = {**family.options, **(options or {})}
        self.low_memory, self.moving = low_memory, moving
        self.vae_tiles = True if low_memory and vae_tiles is None else vae_tiles
        self.nets = {name: submodels[part] for name, part in family.nets(submodels).items()}
        self.place = submodels[family.denoiser].place
        self.configs = configs
        self.latents, self.task = family.latents(configs), family.task(configs)
        family.require_nets_fit(configs)
        if defaults is None:
            own = companions[SCHEDULER]
            defaults = family.defaults_of(self.configs, {**own.config, "_class_name": type(own).__name__}, {})
        self.defaults = defaults
        self.draw_preview = previewer(family, submodels[family.decoder], self.latents)
        self.schedules: dict[tuple[Any, ...], Schedule] = {}
        self._named: dict[tuple[str, str], Any] = {}
        denoiser = submodels[family.denoiser]
        self.referencing = _referencing(family, denoiser)
        self.text_rows = family.text_rows(configs, self.defaults["text"].guidance_scale)
        encoders = [self.submodels[name] for name in family.text_of(submodels)]
        sizes = submodels[family.decoder], self.latents.scale, family.token_sizes(configs)
        first = Denoisers(
            denoiser,
            self.nets,
            encoders,
            *sizes,
            split=split,
            text_rows=self.text_rows,
            low_memory=low_memory or moving,
            tiles=self.vae_tiles,
            referencing=self.referencing,
        )
        self.denoisers: DenoiserSource = first
        if second is not None:
            referencing = _referencing(family, second)
            other = Denoisers(second, {}, (), *sizes, split=split, low_memory=True, referencing=referencing)
            self.denoisers = HalvedDenoisers(first, other, (denoiser.place, second.place))

    @classmethod
    def load(
        cls,
        folder: Path | str,
        target: str | Target | None = None,
        *,
        scheduler: str | None = None,
        checker: bool = True,
        low_memory: bool = False,
        keep: Keep = "fit",
        device_memory: int | None = None,
        other_weights: int = 0,
        changing: bool = False,
        vae_tiles: bool | None = None,
        cuda_graphs: Container[str] | None = None,
        engine_cache: Path | None = None,
        threads: int | None = None,
        tuning: Tuning = UNTUNED,
        embeddings: Sequence[Path | str | Embedding] = (),
        shared: Mapping[str, Submodel] = MappingProxyType({}),
        previews: Path | str | None = None,
        devices: int = 1,
        first: Mapping[str, Any] | None = None,
    ) -> Self:
        """Load an assembled pipeline, creating its sessions concurrently.

        target: cpu, cuda, ...; default: the target it was built for. scheduler: replaces the folder's; one of
        `families.schedulers.SCHEDULERS`, or a name from A1111 or ComfyUI. checker: whether to run the family's checker,
        if present. keep: "all": all weights stay on a CUDA device; "fit": submodels that do not fit together take
            turns, and weights that are too large for that are streamed.
        device_memory: limit in bytes on the device memory of this process from now on, without CUDA's context; None:
        unchanged, initially all free memory. other_weights: bytes of weights that another pipeline will load there. changing:
        whether LoRAs may be chosen per request; these need weights that are not streamed. cuda_graphs: submodels that may
        be captured; None: all. tuning: result of `sdflow tune` for this machine, `recorded_tuning(folder, target).tuning`.
        embeddings: textual inversion files (FILE or FILE:WORD), or folders of files that are used by their names; their
        words can be used in prompts. shared: submodels that another pipeline loaded from the same artifacts. previews:
        pipeline folder whose tiny VAE decodes previews; None: the pipeline's own, if it is one. devices: 2: compute the
        prompts and the negative prompts on two GPUs concurrently, both with the denoiser's weights; on the CPU, in two
        threads, which is not faster. All calls then need guidance. first: arguments of `prepare`, for the image that will
        be generated first; its sessions are created meanwhile.
        Raises UsageError if the folder is not a pipeline, and TargetUnavailableError if the provider or a device is
        unavailable.
        """
        folder = Path(folder)
        target = target_of(folder, target)
        onnxruntime_for(target)
        family = folder_family(folder)
        names = [name for name in onnx_submodels(folder) if checker or name != family.checker]
        if device_memory is not None and (low_memory or keep == "all" or target.name != "cuda"):
            raise UsageError(
                "only applies to weights that may take turns on a CUDA device",
                where="device_memory",
                remedy="Remove it, or use the target cuda with keep 'fit' and without low_memory.",
            )
        own = [name for name in names if name not in shared]
        require_devices(devices, folder, target, low_memory=low_memory)
        where = device_name(target.name, devices - 1)
        if devices > 1:
            place(where)  # names a GPU that is not there, before its memory is asked for
        moves = (
            None
            if low_memory
            else moving_weights(folder, own, target, keep, device_memory, other_weights, changing=changing)
        )

        def load(name: str) -> Submodel:
            return shared[name] if name in shared else loaded(name, 0, moves)

        def loaded(name: str, device: int, moves: Moves | None) -> Submodel:
            # The encoder and the nets are loaded with the first image. A split denoiser only needs its parts.
            late = (family.encoder, *family.optional_parts(names))
            late = (*late, family.denoiser) if target.name in TAKEN_APART else late
            lazy = (
                low_memory
                or moves is not None
                or target.session.static_shapes
                or name in late
                or bool(embeddings and name in family.text)
            )
            graphs = () if low_memory else cuda_graphs
            plan = None if moves is None else moves.streams.get(name)
            # Text encoders run once per image; streaming takes longer than launching their kernels one by one.
            shrinks = name in (family.encoder, family.decoder) or (plan is not None and name in family.text)
            options = LoadOptions(engine_cache, threads, tuning)
            return load_submodel(
                folder,
                name,
                target,
                cuda_graphs=graphs,
                lazy=lazy,
                options=options,
                residency=None if moves is None else moves.residency,
                shrinks=moves is not None and shrinks,
                plan=plan,
                device=device,
            )

        second = None
        if devices > 1:
            theirs = moving_weights(
                folder, [family.denoiser], target, keep, device_memory, other_weights, where, changing
            )
            second = loaded(family.denoiser, 1, theirs)
        with ThreadPoolExecutor(max_workers=len(names) + 1) as pool:
            # Most of this is importing transformers; meanwhile ONNX Runtime creates sessions.
            beginning = pool.submit(load_companions, folder, names)
            submodels = dict(zip(names, pool.map(load, names), strict=True))
            companions: dict[str, Any] = {}
            pipeline = cls(
                family,
                submodels,
                companions,
                read_options(folder),
                defaults=folder_defaults(folder),
                low_memory=low_memory,
                moving=moves is not None,
                vae_tiles=vae_tiles,
                words=learned_words(embeddings, family, submodels),
                second=second,
            )
            if first is not None:
                pipeline.prepare(**first)
            companions |= beginning.result()
        pipeline.scheduler = companions[SCHEDULER]
        pipeline.record = folder_record(folder, target.name)
        if scheduler is not None:
            pipeline.scheduler = named_scheduler(scheduler, pipeline.scheduler.config, family.noising)
        if previews is not None:
            pipeline.draw_preview = previewer_of(Path(previews), family, pipeline.latents, target)
        return pipeline

    def prepare(
        self, *, height: int | None = None, width: int | None = None, guidance_scale: float | None = None
    ) -> None:
        """Create the sessions of text to image for one image with these settings, unless it is larger than the model's own
        size. None: the model's own."""
        own = self.defaults["text"].guidance_scale if guidance_scale is None else guidance_scale
        shape = self.latents_shape(1, height, width)
        if self.task == "text" and not self.family.texts_vary and shape[2] * shape[3] <= self.latents.size**2:
            self.denoiser(shape, 2 if self.family.guided(self.configs, own) else 1)

    def denoiser(self, shape: tuple[int, int, int, int], rows: int, **options: Any) -> Denoiser:
        """Return the denoiser for a drawing without image prompts. shape, rows, options: see `DenoiserRequest`."""
        denoised = self.configs[self.family.denoiser]
        axes = token_axes(denoised, [ImagePrompt()] * adapter_count(denoised))
        return self.denoisers.get(DenoiserRequest(shape, rows, axes, **options))

    def named_scheduler(self, name: str) -> Any:
        """Return the scheduler with this name and the noise schedule of the pipeline's own, cached. Raises UsageError
        like the function `named_scheduler`."""
        key = name, repr(self.scheduler.config)
        if key not in self._named:
            self._named[key] = named_scheduler(name, self.scheduler.config, self.family.noising)
        return self._named[key]

    def latents_shape(self, images: int, height: int | None, width: int | None) -> tuple[int, int, int, int]:
        """Return (images, channels, rows, columns) of the latents for an image size in pixels."""
        what = self.latents
        require_size(what.granularity, height, width)
        rows = what.size if height is None else height // what.scale
        columns = what.size if width is None else width // what.scale
        return images, what.channels, rows, columns

    @contextmanager
    def _using(self, name: str, clip_skip: int = 0) -> Iterator[Submodel]:
        submodel = self._shorter(name, clip_skip) if clip_skip else self.submodels[name]
        try:
            yield submodel
        finally:
            if self.low_memory:
                submodel.unload()

    def _shorter(self, name: str, clip_skip: int) -> Submodel:
        """Return a text encoder without its last layers; one per encoder is cached."""
        count, submodel = self._shortened.get(name, (0, None))
        if submodel is None or count != clip_skip:
            self._shortened[name] = clip_skip, without_last_layers(self.submodels[name], clip_skip)
        return self._shortened[name][1]


def _referencing(family: Family, denoiser: Submodel) -> Submodel | None:
    """Return the denoiser with inputs for reference images, if the family has any."""
    if family.references is None:
        return None
    return denoiser.changed(family.references.extend, family.references.config(denoiser.config))
