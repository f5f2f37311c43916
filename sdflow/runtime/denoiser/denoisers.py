"""A pipeline's denoisers, one per size and number of images, created on demand and cached."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from sdflow.errors import PassError, SlowerWarning, UsageError
from sdflow.families.shared.approximation import EXACT, REUSE, Approximation
from sdflow.families.shared.references import REFERENCE_TOKENS, with_references
from sdflow.families.shared.request import Conditions
from sdflow.families.shared.skipped_layers import LAYERS
from sdflow.machine.memory import available_bytes
from sdflow.runtime.denoiser.control import Control, ControlledDenoiser
from sdflow.runtime.denoiser.denoiser import (
    Denoiser,
    PartedDenoiser,
    PartlyGuidedDenoiser,
    SkippingDenoiser,
    WholeDenoiser,
)
from sdflow.runtime.sessions.bound import Bound
from sdflow.runtime.sessions.submodel import Submodel
from sdflow.runtime.sessions.working_bytes import row_bytes
from sdflow.runtime.vae import tiling

SHARE = 0.5
"""Fraction of free memory (without them) for cached split denoisers of other images; each has its own scratch memory,
and on the CPU its own weights. Denoisers of the current image are always kept."""


Key = tuple[Any, ...]
"""Size, number of images, and approximations."""


@dataclass(frozen=True)
class DenoiserRequest:
    """Key properties of the denoiser that a drawing needs.

    shape: a step's input with context, (images, channels, rows, columns). rows: batch size, with guidance twice the
        images.
    axes: sizes of further axes. conditions: if already known; otherwise, texts have the usual length. controls, guess:
    for ControlNets. fewer: the approximation. skipped: blocks left out by skip-layer guidance; empty if off. With one
        row per image, the whole batch skips them.
    references: rows and columns of the latents of reference images.
    """

    shape: tuple[int, int, int, int]
    rows: int
    axes: Mapping[str, int]
    conditions: Conditions | None = None
    controls: Mapping[str, Control] = field(default_factory=dict)
    guess: bool = False
    fewer: Approximation = EXACT
    skipped: tuple[int, ...] = ()
    references: tuple[tuple[int, int], ...] = ()

    @property
    def reference_tokens(self) -> int:
        """Number of tokens of all reference images."""
        return sum(rows * columns for rows, columns in self.references)


class DenoiserSource(Protocol):
    """Source of the denoisers of a pipeline's drawings."""

    def get(self, request: DenoiserRequest) -> Denoiser:
        """Return the denoiser. Raises UsageError if it does not support the requested approximation."""

    def unload(self) -> None:
        """Free the memory of all denoisers and their graphs."""


class Denoisers:
    """Creates denoisers, and concurrently loads what else the first image needs.

    model: the denoiser's graph. nets: ControlNets by name. texts, decoder: the other submodels an image needs. text_rows:
    of each run of a text encoder. scale: image pixels per latent pixel. tokens: sizes of the text token axes at the usual
    length. split: run the denoiser in parts (`sdflow.runtime.denoiser.split`); with nets it stays whole. low_memory: load
    nothing concurrently. tiles: of the decoder, see `sdflow.runtime.vae.tiling`. referencing: the denoiser's graph with
    inputs for reference images, if any.
    """

    def __init__(
        self,
        model: Submodel,
        nets: Mapping[str, Submodel],
        texts: Sequence[Submodel],
        decoder: Submodel,
        scale: int,
        tokens: Mapping[str, int],
        *,
        split: bool,
        low_memory: bool,
        text_rows: int = 2,
        tiles: bool | None = None,
        referencing: Submodel | None = None,
    ) -> None:
        self._model, self._referencing, self._nets = model, referencing, nets
        self._texts, self._text_rows, self._decoder = texts, text_rows, decoder
        self._scale, self._split, self._low_memory, self._tiles = scale, split, low_memory, tiles
        self._tokens = tokens
        self.shares_weights = model.weights is not None
        """Whether all sessions share one copy of the weights; only then do drawings with attention masks get a second
        step."""
        self.kept: OrderedDict[Key, Denoiser] = OrderedDict()
        self._taken: dict[Key, int] = {}

    def unload(self) -> None:
        """Free the memory of all cached denoisers and the sessions of their graphs."""
        self.kept.clear()
        self._taken.clear()
        for submodel in (self._model, self._referencing, *self._nets.values()):
            if submodel is not None:
                submodel.unload()

    def get(self, request: DenoiserRequest, others: Sequence[DenoiserRequest] = ()) -> Denoiser:
        """Return a cached denoiser for this size, number of images and text length, or a new one. others: the image's
        other requests, whose denoisers are kept. Raises UsageError if it does not support the requested approximation.
        """
        shape, rows, fewer = request.shape, request.rows, request.fewer
        if fewer or request.skipped:
            self._require_parts([*fewer.settings(), *([LAYERS] if request.skipped else [])])
        sizes = self._sizes(request)
        model = self._reading(sizes)
        if self._nets:  # even without a control image, to reset the last call's residuals
            sizes |= {"height": shape[2] * self._scale, "width": shape[3] * self._scale}
            self._announce(shape, sizes)
            whole = WholeDenoiser(model, shape, sizes)
            return ControlledDenoiser(whole, self._nets, request.controls, sizes, shape[0], guess=request.guess)
        if model.path is None or not self._split:
            self._announce(shape, sizes)
            return WholeDenoiser(model, shape, sizes)
        needed = [key for each in (request, *others) for key in self._keys(each)]
        if request.skipped and rows == shape[0]:
            return self._parted(shape, sizes, 0, (), needed=needed, skipped=request.skipped)
        layers = 0 if fewer.reuse is None else fewer.reuse.layers
        texts = self._texts if request.conditions is None else ()
        half = {**sizes, "batch": rows // 2}
        denoiser = self._parted(shape, sizes, layers, texts, needed=needed)
        if fewer.guidance is not None:
            denoiser = PartlyGuidedDenoiser(denoiser, self._parted(shape, half, layers, (), needed=needed), rows)
        if request.skipped:
            without = self._parted(shape, half, 0, (), needed=needed, skipped=request.skipped)
            denoiser = SkippingDenoiser(denoiser, without, rows)
        return denoiser

    def _sizes(self, request: DenoiserRequest) -> dict[str, int]:
        """Return the sizes of the denoiser's axes."""
        shape, given = request.shape, request.conditions
        tokens = self._tokens if given is None else token_sizes(self._model, given)
        sizes = {"batch": request.rows, **tokens, "latent_height": shape[2], "latent_width": shape[3], **request.axes}
        return sizes | ({REFERENCE_TOKENS: request.reference_tokens} if request.references else {})

    def _keys(self, request: DenoiserRequest) -> list[Key]:
        """Return the keys of a request's split denoisers."""
        shape, sizes, fewer = request.shape, self._sizes(request), request.fewer
        if request.skipped and request.rows == shape[0]:
            return [_key(shape, 0, sizes, request.skipped)]
        layers = 0 if fewer.reuse is None else fewer.reuse.layers
        half = {**sizes, "batch": request.rows // 2}
        alone = [] if fewer.guidance is None else [_key(shape, layers, half)]
        skipping = [_key(shape, 0, half, request.skipped)] if request.skipped else []
        return [_key(shape, layers, sizes), *alone, *skipping]

    def _reading(self, sizes: Mapping[str, int]) -> Submodel:
        """Return the denoiser that has axes of these sizes."""
        if REFERENCE_TOKENS not in sizes:
            return self._model
        assert self._referencing is not None, "a family with reference images"
        return self._referencing

    def _require_parts(self, settings: Sequence[str]) -> None:
        """Raise UsageError if the denoiser is not split. settings: the settings that require it."""
        where = ", ".join(settings)
        if self._nets:
            raise UsageError(
                "ControlNets change all layers in every step, so no part of a step can be reused",
                where=where,
                remedy="Disable it, or use a pipeline without ControlNets.",
            )
        if self._model.path is None or not self._split:
            raise UsageError(
                "this target compiles the denoiser as a whole, so no part of it can be skipped",
                where=where,
                remedy="Disable it, or use the target cpu or cuda.",
            )

    def _parted(
        self,
        shape: tuple[int, ...],
        sizes: Mapping[str, int],
        layers: int,
        texts: Sequence[Submodel],
        *,
        needed: Container[Key],
        skipped: tuple[int, ...] = (),
    ) -> Denoiser:
        """Return a cached or new split denoiser. needed: keys of the image's other denoisers. skipped: blocks to leave
        out."""
        key = _key(shape, layers, sizes, skipped)
        if key not in self.kept:
            taken = self._bytes(shape, sizes)
            self._make_room(taken, needed)
            if self._model.residency is not None:
                self._model.residency.make_room(taken + self._data_bytes())
            reserve = partial(self._reserve, key, taken, needed) if self.shares_weights else None
            self._announce(shape, sizes)
            self.kept[key], self._taken[key] = self._made(shape, sizes, layers, texts, skipped, reserve), taken
        self.kept.move_to_end(key)
        return self.kept[key]

    def _bytes(self, shape: tuple[int, ...], sizes: Mapping[str, int]) -> int:
        """Return the memory that a split denoiser takes."""
        model = self._model
        assert model.path is not None, "only submodels of a pipeline folder are split"
        weights = 0 if model.weights is not None else self._data_bytes()
        size = with_references((shape[2], shape[3]), sizes.get(REFERENCE_TOKENS, 0))
        return weights + sizes["batch"] * row_bytes(model.part.model, model.config, size, model.place.device)

    def _announce(self, shape: tuple[int, ...], sizes: Mapping[str, int]) -> None:
        """Tell the sessions that are created next how much memory their first runs take."""
        if self._model.weights is not None and self._model.path is not None:
            self._model.weights.working = self._bytes(shape, sizes)

    def _data_bytes(self) -> int:
        """Return the size of the model's files, which are almost entirely weights; of streamed ones, that on the device."""
        if self._model.weights is not None and self._model.weights.plan is not None:
            return self._model.weights.plan.resident
        assert self._model.path is not None, "only submodels of a pipeline folder are split"
        return sum(each.stat().st_size for each in self._model.path.parent.iterdir())

    def _make_room(self, wanted: int, needed: Container[Key]) -> None:
        """Evict the least recently used denoisers until `wanted` more bytes fit within the share."""
        held = sum(self._taken.values())
        places = self._model.residency
        free = available_bytes(self._model.place.device) if places is None else places.room()
        most = SHARE * (free + held)
        for key in [key for key in self.kept if key not in needed]:
            if held + wanted <= most:
                return
            del self.kept[key]
            held -= self._taken.pop(key)

    def _reserve(self, key: Key, wanted: int, needed: Container[Key]) -> None:
        """Make room for a second step of the denoiser with this key, and account for it."""
        self._make_room(wanted, needed)
        if key in self.kept:
            self._taken[key] += wanted

    def _made(
        self,
        shape: tuple[int, ...],
        sizes: Mapping[str, int],
        layers: int,
        texts: Sequence[Submodel],
        skipped: tuple[int, ...],
        reserve: Callable[[], None] | None,
    ) -> Denoiser:
        """texts: text encoders still to run. reserve: see `PartedDenoiser`."""

        def bound(submodel: Submodel, batch: int) -> Bound:
            return submodel.bound(**submodel.shapes({**sizes, "batch": batch})).prepare()

        def denoiser() -> WholeDenoiser | PartedDenoiser:
            made = _parted_or_whole(self._reading(sizes), shape, sizes, layers, skipped, reserve)
            return made if self._low_memory else made.prepare()

        # The decoder must fit beside all this: one that does not runs in bands once the denoiser has its memory.
        taken = self._bytes(shape, sizes) + _unloaded_bytes((self._model, *texts))
        size = shape[2], shape[3]
        fits = not self._low_memory and tiling(self._decoder, *size, self._scale, self._tiles, taken) is None
        waiting = (*([self._decoder] if fits else []), *texts, self._model)

        def weights() -> None:
            # One after the other, as the device gets them: small ones first, since the decoder's first run takes longest.
            for each in waiting:
                each.load_weights()

        with ThreadPoolExecutor(max_workers=3 + len(texts)) as pool:
            parted = pool.submit(denoiser)
            others: list[Future[object]] = []
            if not self._low_memory:
                others.append(pool.submit(weights))  # while the denoiser's graph is split
                others += [pool.submit(bound, text, self._text_rows) for text in texts]
            if fits:
                others.append(pool.submit(bound, self._decoder, 1))
            made = parted.result()
            for each in others:
                each.result()
        return made


def _key(shape: tuple[int, ...], layers: int, sizes: Mapping[str, int], skipped: tuple[int, ...] = ()) -> Key:
    return (shape, layers, skipped, *sizes.values())


def _unloaded_bytes(submodels: Sequence[Submodel]) -> int:
    """Return the size of the weights that their sessions will share on a device and that are not there yet."""
    folders = [each.path.parent for each in submodels if each.path and each.weights and not each.weights.loaded]
    return sum(file.stat().st_size for folder in folders for file in folder.iterdir())


def token_sizes(denoiser: Submodel, conditions: Conditions) -> dict[str, int]:
    """Return the sizes of the text token axes in these conditions."""
    shapes = {name: tuple(value.shape) for name, value in conditions.inputs.items()}
    return denoiser.part.model.token_sizes(denoiser.config, shapes)


def _parted_or_whole(
    model: Submodel,
    shape: tuple[int, ...],
    sizes: Mapping[str, int],
    layers: int,
    skipped: tuple[int, ...],
    reserve: Callable[[], None] | None,
) -> WholeDenoiser | PartedDenoiser:
    try:
        return PartedDenoiser(model, shape, sizes, layers, skipped, reserve)
    except PassError as error:
        if layers or skipped:
            where = REUSE if layers else LAYERS
            raise UsageError(f"the denoiser cannot be split: {error}", where=where) from error
        warnings.warn(f"the denoiser runs as a whole: {error}", SlowerWarning, stacklevel=2)
        return WholeDenoiser(model, shape, sizes)
