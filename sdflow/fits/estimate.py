"""Estimate the device memory for one image of a pipeline's native size, before it is built.

    weights of the submodels   by architecture and passes (`sdflow.fits.weights`)
    working memory of runs     `Model.working_values` in the graph's own type, times the measured `Model.device_factor`
    LIBRARIES                  measured: cuBLAS, cuDNN, captured graphs, running text encoders
    CONTEXT                    CUDA's context: an assumption, since it varies by card and driver

Compared with measured peaks in tests/fits/test_measured_peaks.py; see docs/device_memory.md.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Literal

from sdflow.config.workflow import PipelineSpec
from sdflow.families.shared.base import Family
from sdflow.fits.weights import FLOAT32, HALF, is_half, scores_are_float32, streamable_bytes, weight_bytes
from sdflow.machine.memory import HOST
from sdflow.manifest import REFINER
from sdflow.models.base import Config
from sdflow.runtime.memory_limit import drawing_bytes, working_bytes
from sdflow.runtime.sessions.residency import HEADROOM, reserved
from sdflow.runtime.sessions.stream_plan import SEGMENT
from sdflow.runtime.vae import SHARE as VAE_SHARE
from sdflow.sources import Checkpoint
from sdflow.units import spell_bytes

LIBRARIES = 430_000_000
CONTEXT = 500_000_000
HOST_PROCESS = 700_000_000
"""Host memory of Python, torch and ONNX Runtime."""
ERROR = 0.05
"""Maximum relative error of the estimate compared with measurements; that much more must be available."""

Way = Literal["resident", "turns", "streamed"]
"""How weights share the device. resident: all stay. turns: one submodel's at a time, with `--keep fit` on CUDA and
`--low-memory` elsewhere. streamed: as turns, but submodels too large for that have weights copied to the device in every
run."""
WAYS: tuple[Way, ...] = ("resident", "turns", "streamed")
STREAMS = sys.platform.startswith("linux")
"""Whether sdflow can stream weights on this system."""


@dataclass(frozen=True)
class SubmodelMemory:
    """Bytes of a submodel's weights, and of one run's working memory. streamable: bytes of the weights that can be streamed;
    largest: of the largest of these."""

    weights: int
    working: int
    streamable: int = 0
    largest: int = 0


@dataclass(frozen=True)
class MemoryNeed:
    """Memory for one text-to-image generation. submodels: those it needs. unknown: submodels of unknown size, counted
    as zero.
    size: height and width of the image. planned: memory that `--keep fit` counts besides the weights. whole_decoder:
    expected working memory of the untiled VAE decoder. nets: the ControlNets among the submodels."""

    target: str
    submodels: dict[str, SubmodelMemory]
    denoiser: str
    decoder: str
    size: int
    planned: int
    unknown: tuple[str, ...] = ()
    whole_decoder: int = 0
    nets: tuple[str, ...] = ()

    @property
    def outside(self) -> int:
        """Bytes outside the pipeline: of libraries and the context, or of the process."""
        return HOST_PROCESS if self.target == HOST else CONTEXT + LIBRARIES

    @property
    def weights(self) -> int:
        """Bytes of all weights together."""
        return sum(each.weights for each in self.submodels.values())

    def peak(self, way: Way) -> int:
        """Peak in bytes; for "streamed", the smallest possible one."""
        found = self.submodels
        if way == "resident":
            return self.outside + self.weights + sum(each.working for each in found.values())
        if way == "streamed":
            most = max(each.weights - each.streamable for each in found.values())
            return CONTEXT + self._planned_to_stream + most
        kept = 0 if self.low_memory else self._kept
        return self.outside + max(
            each.weights + kept + (0 if kept and name in (self.denoiser, *self.nets) else each.working)
            for name, each in found.items()
            if self.low_memory or name != self.decoder  # the decoder works in bands if necessary
        )

    @property
    def low_memory(self) -> bool:
        """Whether weights take turns with `--low-memory`, which ends each session after use, instead of `--keep fit`."""
        return self.target != "cuda"

    @property
    def _kept(self) -> int:
        """Working memory that sessions of the denoiser and its ControlNets keep between runs."""
        return sum(self.submodels[name].working for name in (self.denoiser, *self.nets))

    @property
    def _retained(self) -> int:
        """Bytes that `--keep fit` keeps free besides a submodel's weights; submodels that leave less are streamed
        (`sdflow.runtime.drawing.turns`)."""
        return reserved(self._kept)

    @property
    def _planned_to_stream(self) -> int:
        """Bytes that `--keep fit` keeps free besides the resident weights of a streamed submodel."""
        return self._retained + 2 * max(SEGMENT, *(each.largest for each in self.submodels.values()))

    @property
    def ways(self) -> tuple[Way, ...]:
        """The ways that the target supports on this operating system."""
        return WAYS if STREAMS and not self.low_memory else WAYS[:2]

    def streamed(self, available: int) -> int:
        """Bytes of the denoiser's weights that are streamed if this many bytes are available."""
        weights, room = self.submodels[self.denoiser].weights, available - CONTEXT
        return max(0, weights - room + self._planned_to_stream) if weights + self._retained > room else 0

    def streaming_in_words(self, available: int) -> str:
        """What is streamed, as a verb phrase."""
        streamed = self.streamed(available)
        if not streamed:
            return "streams the text encoder"
        return f"streams {spell_bytes(streamed)} of the {self.denoiser}'s {spell_bytes(self.submodels[self.denoiser].weights)}"

    def needed(self, way: Way) -> int:
        """Device bytes, including CUDA's context, that this way needs: the peak plus the estimate's error; for "turns" on
        CUDA, what `--keep fit` requires, since it streams if there is less."""
        if way == "turns" and not self.low_memory:
            return max(self.peak(way), CONTEXT + self._retained + max(each.weights for each in self.submodels.values()))
        return int(self.peak(way) * (1 + ERROR))

    def fits(self, way: Way, available: int) -> bool:
        """Whether the pipeline fits in this way. available: bytes of the device, including CUDA's context."""
        return self.needed(way) <= available

    def way(self, available: int) -> Way | None:
        """The first way that fits; None if none does."""
        return next((way for way in self.ways if self.fits(way, available)), None)

    def keeps_all(self, available: int) -> bool:
        """Whether all weights stay by default; `--keep fit` is more cautious than the estimate."""
        return self.weights + self.planned + HEADROOM <= available - CONTEXT

    def tiled(self, way: Way, available: int) -> bool:
        """Whether the VAE would decode an image of this size in bands (`sdflow.runtime.vae`)."""
        if self.low_memory:
            return False
        others = self.weights if way == "resident" else self.submodels[self.decoder].weights
        free = available - self.outside - others - self._kept
        return self.whole_decoder > VAE_SHARE * free


def memory_need(pipeline: PipelineSpec, checkpoint: Checkpoint) -> MemoryNeed:
    """The memory of a pipeline with this checkpoint, without its refiner (`with_refiner`). Raises KeyError or TypeError
    for incomplete configs."""
    family = checkpoint.family
    configs = {
        name: source.load["config"] for name, source in checkpoint.submodels.items() if name in pipeline.submodels
    }
    drawn = [name for name in configs if name in family.needed(configs) or name != family.encoder]
    rows = 2 if family.guided(configs, checkpoint.defaults()["text"].guidance_scale) else 1
    found, unknown = {}, []
    for name in drawn:
        part = family.part(name).of(configs[name])
        weights = weight_bytes(part.model, configs[name], pipeline.submodels[name])
        if weights is None:
            unknown.append(name)
        working = _working(family, name, configs, pipeline) * (1 if name == family.decoder else rows)
        moves = name in (family.denoiser, *family.nets(configs).values(), *family.text_of(configs))
        streamable = streamable_bytes(part.model, configs[name], pipeline.submodels[name]) if moves else (0, 0)
        found[name] = SubmodelMemory(weights or 0, working, *streamable)
    device = HOST if pipeline.target == HOST else "cuda"
    side = family.latents(configs).size
    decoder = family.part(family.decoder).of(configs[family.decoder]).model
    factor = 1 if device == HOST else decoder.device_factor
    return MemoryNeed(
        pipeline.target,
        found,
        family.denoiser,
        family.decoder,
        family.latents(configs).image_size,
        drawing_bytes(family, configs, side, device=device),
        tuple(unknown),
        int(working_bytes(family, family.decoder, configs[family.decoder], side, device) * factor),
        tuple(family.nets(configs).values()),
    )


def with_refiner(need: MemoryNeed, refiner: MemoryNeed) -> MemoryNeed:
    """The memory of a base with its refiner, which shares the base's text encoder and VAE, so only its denoiser is
    added."""
    name = f"{REFINER}/{refiner.denoiser}"
    submodels = {**need.submodels, name: refiner.submodels[refiner.denoiser]}
    return replace(need, submodels=submodels, unknown=(*need.unknown, *refiner.unknown))


def _working(family: Family, name: str, configs: dict[str, Config], pipeline: PipelineSpec) -> int:
    """Working memory for one row, in bytes."""
    model, side = family.part(name).of(configs[name]).model, family.latents(configs).size
    whole = working_bytes(family, name, configs[name], side, HOST if pipeline.target == HOST else "cuda")
    if pipeline.target == HOST:
        return whole
    steps = pipeline.submodels[name]
    # Without tiles, a decoder's scores are nearly as large as all its feature maps.
    halved = is_half(steps) and not (name == family.decoder and scores_are_float32(steps))
    return int(whole * model.device_factor * (HALF / FLOAT32 if halved else 1))
