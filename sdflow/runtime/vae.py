"""Encode and decode images with the VAE, one at a time, and in bands of rows if memory is short.

Bands give the same result as the whole image except for rounding (`sdflow.runtime.bands`). Graphs that cannot run in bands,
and targets that compile every graph, use overlapping tiles instead, which change the image slightly
(`sdflow.runtime.blended_tiles`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from sdflow.errors import PassError, TiledWarning
from sdflow.families.shared.latents import Latents
from sdflow.machine.memory import HOST, available_bytes
from sdflow.models.ports import Role
from sdflow.models.vae_half import DecoderHalf
from sdflow.runtime.bands.decompose import decompose
from sdflow.runtime.bands.memory import LEAST_BAND, band_bytes, stored_bytes
from sdflow.runtime.bands.run import Bands
from sdflow.runtime.blended_tiles import in_tiles
from sdflow.runtime.sessions.dimensions import free_dimensions
from sdflow.runtime.sessions.moving_memory import HOST_SHARE
from sdflow.runtime.sessions.residency import HEADROOM
from sdflow.runtime.sessions.submodel import Submodel
from sdflow.runtime.sessions.working_bytes import row_bytes
from sdflow.units import spell_bytes

if TYPE_CHECKING:
    import torch

TILE = 512
"""Default tile side in pixels, for VAEs whose config does not have their own size."""


LEAST_TILE = 256
"""Minimum tile side in pixels: smaller tiles look visibly different from each other."""

SHARE = 0.8
"""Fraction of free memory that a run's estimate may use."""

ALWAYS_THERE = 1 << 28
"""Runs with smaller estimates (in bytes) do not check free memory."""


@dataclass(frozen=True)
class Tiling:
    """How an image is divided. pixels: rows per band, or side of a square tile. storage: device of the values between the
    stages of bands, in torch's notation; None: blended tiles. no_bands: why they are not bands, if memory is the reason."""

    pixels: int
    storage: str | None
    no_bands: str | None = None


def tile_pixels(config: Mapping[str, Any]) -> int:
    """Return the tile side in pixels: the image size that the VAE was made for."""
    return int(config.get("sample_size", TILE))


def tiling(half: Submodel, rows: int, columns: int, scale: int, tiles: bool | None, others: int = 0) -> Tiling | None:
    """Return how latents of this size are divided, or None to process the whole. Weights that take turns leave the device
    as far as the run needs their room, and sessions of bands for another size are freed.

    scale: pixels per latent. tiles: None: only if the whole would exceed free memory, with bands or tiles as large as
    fit; True: bands with as many pixels as the VAE's own size, or tiles of that size; False: never. others: bytes that
    others are about to take.
    """
    if half.banded is not None and half.banded[0][:2] != (rows, columns):
        half.banded = None
    compiled = half.static_shapes or half.profiles  # each size would be compiled, and the device's memory is unknown
    wanted = _wanted(half, rows, columns)
    if tiles is None and (compiled or wanted <= max(ALWAYS_THERE, half.reached)):
        return None
    free = SHARE * (_room(half) - others)
    found, needed = None, wanted
    if tiles or (tiles is None and wanted > free):
        if compiled or half.path is None or half.blends:
            found, needed = _tile_that_fits(half, rows, columns, scale, inf if tiles else free)
        elif bands := _own_bands(half, rows, columns, scale) if tiles else _halved_bands(rows):
            found, needed = _bands_that_fit(half, rows, columns, scale, bands, free)
    if half.residency is not None and needed > ALWAYS_THERE:
        half.residency.make_room(int(needed / SHARE) + HEADROOM)
    return found


def _own_bands(half: Submodel, rows: int, columns: int, scale: int) -> list[int]:
    """Return the rows of a band with as many pixels as the VAE's own size, if the image has more."""
    band = max(LEAST_BAND, tile_pixels(half.config) ** 2 // (columns * scale) // scale)
    return [band] if band < rows else []


def _halved_bands(rows: int) -> list[int]:
    """Return the rows of bands from the largest to the smallest; none if the image is no larger than that."""
    found, band = [], rows
    while band > LEAST_BAND:
        band = max(LEAST_BAND, -(-band // 2))
        found.append(band)
    return found


def _bands_that_fit(
    half: Submodel, rows: int, columns: int, scale: int, bands: Sequence[int], free: float
) -> tuple[Tiling | None, int]:
    """Return the first of these bands that fit in the free bytes of the device, and how much they take: with all values on the
    device, else with those between stages in host memory. If nothing fits, the last, or tiles if host memory is short, too."""
    model, device = half.part.model, half.place.device
    stored = stored_bytes(half.config, rows * scale, columns * scale)
    host = available_bytes(HOST)
    no_host = device != HOST and stored >= HOST_SHARE * host
    needs = []
    for storage in (device,) if no_host or device == HOST else (device, HOST):
        for band in bands:
            needed = band_bytes(model, half.config, (rows, columns), band, scale) + (stored if storage == device else 0)
            needs.append((Tiling(band * scale, storage), needed))
    fitting = next((each for each in needs if each[1] <= free), None)
    if fitting is None and no_host:
        why = f"bands would keep {spell_bytes(stored)} in host memory, of which only {spell_bytes(host)} is free"
        return _tile_that_fits(half, rows, columns, scale, free, why)
    return fitting or needs[-1]


def _tile_that_fits(
    half: Submodel, rows: int, columns: int, scale: int, free: float, no_bands: str | None = None
) -> tuple[Tiling | None, int]:
    """Return the largest tiles that fit in the free bytes, or the smallest, and how much a tile takes. None: the image is no
    larger than a tile."""
    side = tile_pixels(half.config)
    while side // 2 >= LEAST_TILE and _wanted(half, side // scale, side // scale) > free:
        side //= 2
    if max(rows, columns) * scale <= side:
        return None, _wanted(half, rows, columns)
    return Tiling(side, None, no_bands), _wanted(half, side // scale, side // scale)


def decode(
    decoder: Submodel, latents: torch.Tensor, what: Latents, *, tiles: bool | None = None
) -> tuple[Tiling | None, Iterator[torch.Tensor]]:
    """Decode latents (images, channels, rows, columns). Return how images are divided, None: not at all, and the images
    (1, 3, height, width) in [-1, 1].

    Runs the decoder once per image: as fast as all at once, in the memory of one. Each image is valid until the next.
    tiles: see `tiling`; unrequested tiling warns with TiledWarning.
    """
    rows, columns = latents.shape[2:]
    tiled, run = _runner(decoder, Role.LATENTS, Role.PIXELS, (rows, columns, what.scale), tiles)
    return tiled, (run(latent) for latent in what.to_vae(latents).split(1))


def encode(encoder: Submodel, images: torch.Tensor, what: Latents, *, tiles: bool | None = None) -> torch.Tensor:
    """Encode images (images, 3, height, width) in [-1, 1] to float32 latents: the mean of the distribution. tiles: see
    `decode`."""
    import torch

    rows, columns = (size // what.scale for size in images.shape[2:])
    _, run = _runner(encoder, Role.PIXELS, Role.LATENTS, (rows, columns, what.scale), tiles)
    encoded = [run(image).to(torch.float32, copy=True) for image in images.split(1)]
    latents: torch.Tensor = what.from_vae(torch.cat(encoded))
    return latents


def _runner(
    half: Submodel, read: Role, written: Role, size: tuple[int, int, int], tiles: bool | None
) -> tuple[Tiling | None, Callable[[torch.Tensor], torch.Tensor]]:
    """Return how an image is divided, and the function that computes it. size: rows and columns of the latents, and pixels
    per latent."""
    given, made = half.port(read), half.port(written)
    rows, columns, scale = size
    before, after = (1 if role is Role.LATENTS else scale for role in (read, written))

    def run(part: torch.Tensor) -> torch.Tensor:
        bound = half.bound(**{given: tuple(part.shape)})
        bound.inputs[given].copy_(part)
        return bound.run()[made]

    def run_whole(image: torch.Tensor) -> torch.Tensor:
        result = run(image)
        _reached(half, rows, columns)
        return result

    chosen = tiling(half, rows, columns, scale, tiles)
    if chosen is None or chosen.storage is None:
        half.banded = None
    else:
        try:
            bands = _bands(half, given, before, size, chosen)
        except PassError as error:
            half.blends = True
            _warn(half, f"is tiled, which changes the image slightly: {error.what}")
            chosen = tiling(half, rows, columns, scale, tiles)
        else:
            if tiles is None:
                _warn(half, f"runs in bands of {chosen.pixels} pixels: {_lacking(half, rows, columns)}")
            return chosen, bands
    if chosen is None:
        return None, run_whole
    lacking = [_lacking(half, rows, columns)] if tiles is None else []
    lacking += [] if chosen.no_bands is None else [chosen.no_bands]
    if lacking:
        _warn(half, f"is tiled ({chosen.pixels} pixels), which changes the image slightly: {'; '.join(lacking)}")
    sides = tuple(chosen.pixels // scale * each for each in (before, after))
    return chosen, lambda image: in_tiles(run, image, *sides)


def _bands(half: Submodel, given: str, factor: int, size: tuple[int, int, int], chosen: Tiling) -> Bands:
    """Return the half in bands for this size; the last one is kept. given: its input. factor: input rows per latent row.
    Raises PassError like `decompose`."""
    rows, columns, scale = size
    key = rows, columns, chosen
    kept, half.banded = half.banded, None
    if kept is None or kept[0] != key:
        kept = None  # its sessions hold memory
        graph = half.graph()
        (port,) = (port for port in half.part.model.ports(half.config).inputs if port.name == given)
        channels = port.axes[1]

        def sizes(count: int) -> dict[str, int]:
            shape = (1, int(channels), count * factor, columns * factor)
            return free_dimensions(graph, {given: shape}, str(half.path))

        assert chosen.storage is not None, "blended tiles are not bands"
        parts = decompose(graph, sizes, rows, chosen.pixels // scale)
        kept = key, Bands(half, parts, chosen.storage)
    half.banded = kept
    found: Bands = kept[1]
    return found


def _lacking(half: Submodel, rows: int, columns: int) -> str:
    wanted, free = _wanted(half, rows, columns), _room(half)
    return f"the whole image needs about {spell_bytes(wanted)}, but only {spell_bytes(free)} is free"


def _warn(half: Submodel, what: str) -> None:
    warnings.warn(f"the {half.part.name.replace('_', ' ')} {what}", TiledWarning, stacklevel=4)


def _wanted(half: Submodel, rows: int, columns: int) -> int:
    """Return the working memory in bytes for latents of this size. On CUDA, decoders were measured up to the VAE's own
    size (`Model.device_factor`, in float32); for larger images and encoders, the estimate is an upper bound."""
    model, device = half.part.model, half.place.device
    whole = row_bytes(model, half.config, (rows, columns), device)
    own = tile_pixels(half.config) // (model.scale(half.config) or 1)
    measured = device.startswith("cuda") and isinstance(model, DecoderHalf) and rows * columns <= own * own
    return int(whole * model.device_factor) if measured else whole


def _room(half: Submodel) -> int:
    """Return the bytes available on the half's device once all movable weights are evicted."""
    return available_bytes(half.place.device) if half.residency is None else half.residency.reachable()


def _reached(half: Submodel, rows: int, columns: int) -> None:
    """Record that the session now retains memory for a run of this size, unless it is returned to the device."""
    if half.residency is not None:
        return
    wanted = _wanted(half, rows, columns)
    half.reached = max(half.reached, wanted)
