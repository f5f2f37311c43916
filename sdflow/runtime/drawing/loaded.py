"""A pipeline folder, loaded: the submodels with all that stands beside them. What they do for images is in `parts` beside it."""

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
from sdflow.machine.providers import onnxruntime_for
from sdflow.runtime.denoiser.denoisers import Denoisers, DenoiserSource
from sdflow.runtime.denoiser.schedule import Schedule, named_scheduler
from sdflow.runtime.denoiser.start import require_size
from sdflow.runtime.drawing.preview import previewer, previewer_of
from sdflow.runtime.drawing.record import Record, folder_record
from sdflow.runtime.drawing.text import learned_words, with_words, without_last_layers
from sdflow.runtime.drawing.turns import moving_weights
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
from sdflow.runtime.sessions.residency import Keep
from sdflow.runtime.sessions.session import LoadOptions
from sdflow.runtime.sessions.submodel import Submodel
from sdflow.runtime.sessions.tuning import UNTUNED, Tuning
from sdflow.sources.embedding import Embedding, require_different
from sdflow.targets import Target


class LoadedPipeline:
    """The submodels of a pipeline folder.

    low_memory: a submodel's session is loaded when its turn comes and let go after it, and the VAE works in tiles.
    moving: the submodels' weights take turns on the device.
    vae_tiles: whether it does; None: where the memory that is free would not do for the whole image, which TiledWarning tells.
    options: of model_index.json, as the family reads them. defaults: of a call, for each task; None: what the configs say.
    split: take the denoiser apart, so that nothing is computed twice (`sdflow.runtime.denoiser.split`).
    words: that stand in prompts for learned vectors. record: what the text of all its images says of it.
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
    ) -> None:
        configs = {name: submodel.config for name, submodel in submodels.items()}
        if missing := [name for name in family.needed(configs) if name not in submodels]:
            raise UsageError(f"the pipeline has no {', '.join(missing)}")
        require_different(words)
        self.family = family
        texts = {name: with_words(submodels[name], family, words) for name in family.text_of(submodels)}
        self.submodels = {**submodels, **texts}
        self.learned = words
        self.words = {word.word: word.count for word in words}
        self.most_chunks: int | None = None
        """That a prompt may have; None: any."""
        self.record: Record = {}
        self._shortened: dict[str, tuple[int, Submodel]] = {}
        self.companions = companions
        self.scheduler = companions[SCHEDULER]
        self.options = {**family.options, **(options or {})}
        self.low_memory, self.moving = low_memory, moving
        self.vae_tiles = True if low_memory and vae_tiles is None else vae_tiles
        self.nets = {name: submodels[part] for name, part in family.nets(submodels).items()}
        self.place = submodels[family.denoiser].place
        self.configs = configs
        self.latents, self.task = family.latents(configs), family.task(configs)
        family.require_nets_fit(configs)
        scheduler = {**self.scheduler.config, "_class_name": type(self.scheduler).__name__}
        self.defaults = family.defaults_of(self.configs, scheduler, {}) if defaults is None else defaults
        self.draw_preview = previewer(family, submodels[family.decoder], self.latents)
        self.schedules: dict[tuple[Any, ...], Schedule] = {}
        self._named: dict[tuple[str, str], Any] = {}
        denoiser, referencing = submodels[family.denoiser], None
        if family.references is not None:
            referencing = denoiser.changed(family.references.extend, family.references.config(denoiser.config))
        self.referencing = referencing
        self.denoisers: DenoiserSource = Denoisers(
            denoiser,
            self.nets,
            [self.submodels[name] for name in family.text_of(submodels)],
            submodels[family.decoder],
            self.latents.scale,
            family.token_sizes(configs),
            split=split,
            low_memory=low_memory or moving,
            tiles=self.vae_tiles,
            referencing=referencing,
        )

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
        beside: int = 0,
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

        target: cpu, cuda, ...; None: the one that it was built for. scheduler: one of `families.schedulers.SCHEDULERS`
        instead of the folder's, or what A1111 or ComfyUI calls it. checker: whether the family's checker, if it is there,
        sees the images. keep: "all": the weights of all submodels stay on a CUDA device; "fit": where they do not fit
        together, they take turns. device_memory: bytes of the device that this process may take, from now on; None: as before,
        at first all that is free. beside: bytes of weights that another pipeline will put there.
        cuda_graphs: the submodels that may be captured, None: all. tuning: what `sdflow tune` chose for this machine:
        `recorded_tuning(folder, target).tuning`. embeddings: files of textual inversion, FILE or FILE:WORD, and folders of
        them, whose files go by their names; their words may stand in prompts. shared: submodels that another pipeline has
        loaded of the same artifacts. previews: a pipeline folder whose tiny VAE decodes previews; None: the pipeline's own, if
        it is one.
        Raises UsageError when the folder is no pipeline, TargetUnavailableError when the provider is not there.
        """
        folder = Path(folder)
        target = target_of(folder, target)
        onnxruntime_for(target)
        family = folder_family(folder)
        names = [name for name in onnx_submodels(folder) if checker or name != family.checker]
        if device_memory is not None and (low_memory or keep == "all" or target.name != "cuda"):
            raise UsageError(
                "only limits weights that may take turns on a CUDA device",
                where="device_memory",
                remedy="Leave it out, or draw on the target cuda with keep 'fit' and without low_memory.",
            )
        own = [name for name in names if name not in shared]
        moves = None if low_memory else moving_weights(folder, own, target, keep, device_memory, beside)

        def load(name: str) -> Submodel:
            if name in shared:
                return shared[name]
            # The encoder and the nets are for images: loaded when the first one comes. The denoiser is taken apart then.
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
            options = LoadOptions(engine_cache, threads, tuning)
            return load_submodel(
                folder,
                name,
                target,
                cuda_graphs=graphs,
                lazy=lazy,
                options=options,
                residency=moves,
                shrinks=moves is not None and name in (family.encoder, family.decoder),
            )

        with ThreadPoolExecutor(max_workers=len(names)) as pool:
            submodels = dict(zip(names, pool.map(load, names), strict=True))
        pipeline = cls(
            family,
            submodels,
            load_companions(folder),
            read_options(folder),
            defaults=folder_defaults(folder),
            low_memory=low_memory,
            moving=moves is not None,
            vae_tiles=vae_tiles,
            words=learned_words(embeddings, family, submodels),
        )
        pipeline.record = folder_record(folder, target.name)
        if scheduler is not None:
            pipeline.scheduler = named_scheduler(scheduler, pipeline.scheduler.config, family.noising)
        if previews is not None:
            pipeline.draw_preview = previewer_of(Path(previews), family, pipeline.latents, target)
        return pipeline

    def named_scheduler(self, name: str) -> Any:
        """The scheduler of this name with the noise schedule of the pipeline's own; each is made once. Raises UsageError as the
        function of this name."""
        key = name, repr(self.scheduler.config)
        if key not in self._named:
            self._named[key] = named_scheduler(name, self.scheduler.config, self.family.noising)
        return self._named[key]

    def latents_shape(self, images: int, height: int | None, width: int | None) -> tuple[int, int, int, int]:
        """(images, channels, rows, columns) of the latents for an image size in pixels."""
        what = self.latents
        require_size(what.granularity, height, width)
        rows = what.size if height is None else height // what.scale
        columns = what.size if width is None else width // what.scale
        return images, what.channels, rows, columns

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
