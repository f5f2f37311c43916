"""The denoisers of a pipeline: one for each size and number of images, made when it is first wanted, and kept."""

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
from sdflow.runtime.vae import tile_side

SHARE = 0.5
"""Of the memory that is free but for them, what denoisers in parts may take that are kept for further images: each has its
scratch, on the CPU weights too. Those of the present image are kept in any case."""


Key = tuple[Any, ...]
"""A size, a number of images, and what is left out."""


@dataclass(frozen=True)
class DenoiserRequest:
    """The denoiser that a drawing wants.

    shape: of what it reads in a step, latents and context: (images, channels, rows, columns). rows: of the batch, with guidance
    twice the images. axes: the sizes of the denoiser's further axes. conditions: where they are known already; without them, the
    texts are as long as the model reads at once. controls, guess: for the nets. fewer: what is left out.
    skipped: the blocks that skip-layer guidance leaves out; none: there is no such guidance. references: rows and columns of the
    latents of reference images.
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
        """Of all reference images together."""
        return sum(rows * columns for rows, columns in self.references)


class DenoiserSource(Protocol):
    """What a pipeline's drawings get their denoisers from."""

    def get(self, request: DenoiserRequest) -> Denoiser:
        """Raises UsageError where what the request leaves out cannot be left out."""

    def unload(self) -> None:
        """Give the memory of all of them back, and of the graphs that they are made of."""


class Denoisers:
    """Makes them, and side by side with each what else its first image needs and is not there.

    model: the denoiser's graph. nets: the ControlNets by name. texts, decoder: what an image needs besides. scale: image pixels
    per latent pixel. tokens: the sizes of the axes of text tokens, for texts of the usual length. split: take it apart
    (`sdflow.runtime.denoiser.split`); with nets it stays whole. low_memory: make nothing beside it. tiles: of the decoder, as of
    `sdflow.runtime.vae.tile_side`. referencing: the denoiser's graph with inputs for reference images; None: it takes none.
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
        tiles: bool | None = None,
        referencing: Submodel | None = None,
    ) -> None:
        self._model, self._referencing, self._nets = model, referencing, nets
        self._texts, self._decoder = texts, decoder
        self._scale, self._split, self._low_memory, self._tiles = scale, split, low_memory, tiles
        self._tokens = tokens
        self.shares_weights = model.weights is not None
        """Whether all sessions have one copy of the weights: only then is there a further step for drawings that hide tokens."""
        self.kept: OrderedDict[Key, Denoiser] = OrderedDict()
        self._taken: dict[Key, int] = {}

    def unload(self) -> None:
        """Give back the memory of all that are kept, and the sessions of the graphs that they are made of."""
        self.kept.clear()
        self._taken.clear()
        for submodel in (self._model, self._referencing, *self._nets.values()):
            if submodel is not None:
                submodel.unload()

    def get(self, request: DenoiserRequest) -> Denoiser:
        """That of an earlier image of this size, number and text length, or a new one: whole or in parts, with nets, with
        fewer guided steps, with skip-layer guidance. Raises UsageError where what is left out cannot be."""
        shape, rows, conditions, fewer = request.shape, request.rows, request.conditions, request.fewer
        if fewer or request.skipped:
            self._require_parts([*fewer.settings(), *([LAYERS] if request.skipped else [])])
        tokens = self._tokens if conditions is None else token_sizes(self._model, conditions)
        sizes = {"batch": rows, **tokens, "latent_height": shape[2], "latent_width": shape[3], **request.axes}
        if request.references:
            sizes[REFERENCE_TOKENS] = request.reference_tokens
        model = self._reading(sizes)
        if self._nets:  # also without an image for any: what the last call added is there still
            sizes |= {"height": shape[2] * self._scale, "width": shape[3] * self._scale}
            whole = WholeDenoiser(model, shape, sizes)
            return ControlledDenoiser(whole, self._nets, request.controls, sizes, shape[0], guess=request.guess)
        if model.path is None or not self._split:
            return WholeDenoiser(model, shape, sizes)
        layers = 0 if fewer.reuse is None else fewer.reuse.layers
        texts = self._texts if conditions is None else ()
        half = {**sizes, "batch": rows // 2}
        alone = () if fewer.guidance is None else (_key(shape, layers, half),)
        skipping = (_key(shape, 0, half, request.skipped),) if request.skipped else ()
        needed = (_key(shape, layers, sizes), *alone, *skipping)
        denoiser = self._parted(shape, sizes, layers, texts, needed=needed)
        if alone:
            denoiser = PartlyGuidedDenoiser(denoiser, self._parted(shape, half, layers, (), needed=needed), rows)
        if skipping:
            without = self._parted(shape, half, 0, (), needed=needed, skipped=request.skipped)
            denoiser = SkippingDenoiser(denoiser, without, rows)
        return denoiser

    def _reading(self, sizes: Mapping[str, int]) -> Submodel:
        """The denoiser that has the axes of these sizes."""
        if REFERENCE_TOKENS not in sizes:
            return self._model
        assert self._referencing is not None, "a family with reference images"
        return self._referencing

    def _require_parts(self, settings: Sequence[str]) -> None:
        """Raises UsageError where the denoiser is not taken apart. settings: what needs it."""
        where = ", ".join(settings)
        if self._nets:
            raise UsageError(
                "what ControlNets add is new in every step, in all layers: there a step is not cut short",
                where=where,
                remedy="Draw without it, or with a pipeline without ControlNets.",
            )
        if self._model.path is None or not self._split:
            raise UsageError(
                "this target compiles the denoiser as a whole, so that no part of it can be left out",
                where=where,
                remedy="Draw without it, or on the target cpu or cuda.",
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
        """needed: those that the present image takes besides. skipped: the blocks that this one is without."""
        key = _key(shape, layers, sizes, skipped)
        if key not in self.kept:
            taken = self._bytes(shape, sizes)
            self._make_room(taken, needed)
            if self._model.residency is not None:
                self._model.residency.make_room(taken + self._data_bytes())
            reserve = partial(self._reserve, key, taken, needed) if self.shares_weights else None
            self.kept[key], self._taken[key] = self._made(shape, sizes, layers, texts, skipped, reserve), taken
        self.kept.move_to_end(key)
        return self.kept[key]

    def _bytes(self, shape: tuple[int, ...], sizes: Mapping[str, int]) -> int:
        """What a denoiser in parts takes."""
        model = self._model
        assert model.path is not None, "only a submodel of a pipeline folder is taken apart"
        weights = 0 if model.weights is not None else self._data_bytes()
        size = with_references((shape[2], shape[3]), sizes.get(REFERENCE_TOKENS, 0))
        return weights + sizes["batch"] * row_bytes(model.part.model, model.config, size, model.place.device)

    def _data_bytes(self) -> int:
        """Of the model's files: its weights, but for a little."""
        assert self._model.path is not None, "only a submodel of a pipeline folder is taken apart"
        return sum(each.stat().st_size for each in self._model.path.parent.iterdir())

    def _make_room(self, wanted: int, needed: Container[Key]) -> None:
        """Let those go that were not used for the longest time, until so many bytes are within the share."""
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
        """Make room for a further step of the denoiser with this key, and count what it takes."""
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
        """texts: that are not encoded yet. reserve: as of `PartedDenoiser`."""
        with ThreadPoolExecutor(max_workers=2 + len(texts)) as pool:
            parted = pool.submit(_parted_or_whole, self._reading(sizes), shape, sizes, layers, skipped, reserve)
            others: list[Future[Bound]] = []
            if not self._low_memory:
                others += [pool.submit(text.bound, **text.shapes({**sizes, "batch": 2})) for text in texts]
                if tile_side(self._decoder, shape[2], shape[3], self._scale, self._tiles) is None:
                    others.append(pool.submit(self._decoder.bound, **self._decoder.shapes({**sizes, "batch": 1})))
            made = parted.result()
            for each in others:
                each.result()
        return made


def _key(shape: tuple[int, ...], layers: int, sizes: Mapping[str, int], skipped: tuple[int, ...] = ()) -> Key:
    return (shape, layers, skipped, *sizes.values())


def token_sizes(denoiser: Submodel, conditions: Conditions) -> dict[str, int]:
    """The sizes of the axes of text tokens, by name, in these conditions."""
    shapes = {name: tuple(value.shape) for name, value in conditions.inputs.items()}
    return denoiser.part.model.token_sizes(denoiser.config, shapes)


def _parted_or_whole(
    model: Submodel,
    shape: tuple[int, ...],
    sizes: Mapping[str, int],
    layers: int,
    skipped: tuple[int, ...],
    reserve: Callable[[], None] | None,
) -> Denoiser:
    try:
        return PartedDenoiser(model, shape, sizes, layers, skipped, reserve)
    except PassError as error:
        if layers or skipped:
            where = REUSE if layers else LAYERS
            raise UsageError(f"the denoiser cannot be taken apart: {error}", where=where) from error
        warnings.warn(f"the denoiser runs as a whole: {error}", SlowerWarning, stacklevel=2)
        return WholeDenoiser(model, shape, sizes)
