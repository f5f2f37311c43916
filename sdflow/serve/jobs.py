"""What goes to the process that draws, and what comes back. Plain data, as it is pickled on the way; a None ends either."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdflow.store.default import default_cache


@dataclass(frozen=True)
class Image:
    """Pixels: of a mode and a size as PIL names them, row by row."""

    mode: str
    size: tuple[int, int]
    pixels: bytes


@dataclass(frozen=True)
class LoraFile:
    """A LoRA of the server, and how much it counts. sha256: of the file, which may be exchanged for another."""

    name: str
    path: str
    sha256: str
    scale: float


@dataclass(frozen=True)
class ControlImage:
    """An image for the ControlNet of this name. scale, start, end: as of `runtime.control.Control`."""

    name: str
    image: Image
    scale: float
    start: float
    end: float


@dataclass(frozen=True)
class ImagePrompt:
    """An image for an IP-Adapter, and how much it counts. adapter: which, from 0 on."""

    image: Image
    scale: float
    adapter: int


@dataclass(frozen=True)
class ConditioningImages:
    """Images that condition a drawing, beside the one to start from."""

    controls: tuple[ControlImage, ...] = ()
    prompts: tuple[ImagePrompt, ...] = ()
    references: tuple[Image, ...] = ()


@dataclass(frozen=True)
class Job:
    """One image to draw. request: which it belongs to; index: the how-manieth of it.

    pipeline: by name. prompt, negative_prompt: texts. seed: of its noise. arguments: of the pipeline's call. image, mask: to
    start from, to draw into. scheduler: by name; None: the pipeline's. loras: in order. previews: how many unfinished
    images are wanted on the way. format: as PIL names it; quality: of one that loses something, 1 to 100. conditioning:
    further images. steps, pixels: that it takes and has, as far as the request tells.
    """

    request: str
    index: int
    pipeline: str
    prompt: str
    seed: int
    negative_prompt: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    image: Image | None = None
    mask: Image | None = None
    scheduler: str | None = None
    loras: tuple[LoraFile, ...] = ()
    previews: int = 0
    format: str = "PNG"
    quality: int = 90
    conditioning: ConditioningImages = ConditioningImages()
    steps: int = 1
    pixels: int = 1


@dataclass(frozen=True)
class Cancel:
    """Draw no more of a request."""

    request: str


@dataclass(frozen=True)
class Load:
    """Load the pipeline of a folder, in the place of one of this name if there is one. number: tells orders apart."""

    name: str
    folder: Path
    number: int = 0


@dataclass(frozen=True)
class Drop:
    """Unload this pipeline once no image of it is drawn or waits."""

    name: str


@dataclass(frozen=True)
class Forget:
    """Release the memory of weights with the LoRA of this file, which was removed."""

    path: str


@dataclass(frozen=True)
class Show:
    """Send a preview of the images of a request that are being drawn, after their next step. end: they are finished with that."""

    request: str
    end: bool = False


# What comes back


@dataclass(frozen=True)
class Ready:
    """The process draws from now on. pipelines: what it found out about each, by name."""

    pipelines: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Loaded:
    """What was found out about a pipeline that was to be loaded; None: it cannot be, and error says why. number: of the order."""

    name: str
    folder: Path
    found: Mapping[str, Any] | None
    error: str = ""
    number: int = 0


@dataclass(frozen=True)
class Measured:
    """What was found out anew about a pipeline that is there."""

    name: str
    found: Mapping[str, Any]


@dataclass(frozen=True)
class OfImage:
    """Of an image: the request that it belongs to, and the how-manieth of that it is."""

    request: str
    index: int


@dataclass(frozen=True)
class Begun(OfImage):
    """It is being drawn."""


@dataclass(frozen=True)
class Stepped(OfImage):
    """Steps of an image that are done, and in all."""

    done: int
    total: int


@dataclass(frozen=True)
class Preview(OfImage):
    """What an image will be like, as a file. number: counts up from 0."""

    number: int
    file: bytes


@dataclass(frozen=True)
class Drawn(OfImage):
    """An image, as a file. flagged: what the safety checker said; None without one. seconds: by stage. replica: which drew
    it, where there are several. warnings: what was cut off of its prompts."""

    file: bytes
    size: tuple[int, int]
    flagged: bool | None
    seconds: Mapping[str, float]
    replica: str | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Failed(OfImage):
    """An image that was not drawn. kind: the class of the error; the rest as of SdflowError."""

    kind: str
    what: str
    where: str | None = None
    remedy: str | None = None


@dataclass(frozen=True)
class Turned:
    """One turn of the loop. batches: (images, places, seconds) of each run of the denoiser. drawing: images that go through their
    steps. memory: resident bytes of the process."""

    batches: tuple[tuple[int, int, float], ...]
    drawing: int
    waiting: int
    memory: int = 0


@dataclass(frozen=True)
class Lost:
    """The process cannot draw, now or ever. As of SdflowError."""

    kind: str
    what: str
    where: str | None = None
    remedy: str | None = None


Message = Lost | Ready | Loaded | Measured | OfImage | Turned

Order = Job | Cancel | Show | Load | Drop | Forget
"""What the process that draws is told."""


@dataclass(frozen=True)
class WorkerOptions:
    """pipelines: folders by name. batch_sizes: images of a batch; None: those that a measurement finds worth it. threads: of
    the CPU. checker: whether the safety checkers see the images. cache: that the pipelines were built with; lora_memory: bytes
    of weights with LoRAs that are kept; loras: whether requests will name some. lanes: how many images are drawn side by side,
    each by its part of the CPU's threads; None: as a measurement finds best. deadline: seconds of a request. stall: seconds after
    which an image that does not go on is given up, and the process with it; None: as follows from a measurement. embeddings: a
    folder of textual inversion files."""

    pipelines: Mapping[str, Path]
    batch_sizes: tuple[int, ...] | None = None
    threads: int | None = None
    checker: bool = True
    cache: Path = field(default_factory=default_cache)
    lora_memory: int = 4 << 30
    loras: bool = False
    lanes: int | None = None
    deadline: float = 600.0
    stall: float | None = None
    embeddings: Path | None = None
    memory: int | None = None
    chunks: int | None = None
