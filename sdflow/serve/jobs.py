"""Messages to and from the worker process. They are plain data because they are pickled; None ends either stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdflow.store.default import default_cache


@dataclass(frozen=True)
class Image:
    """Pixels in row-major order; mode and size as in PIL."""

    mode: str
    size: tuple[int, int]
    pixels: bytes


@dataclass(frozen=True)
class LoraFile:
    """A LoRA of the server with its scale. sha256: digest of the file, which may be replaced on disk."""

    name: str
    path: str
    sha256: str
    scale: float


@dataclass(frozen=True)
class ControlImage:
    """The image for the ControlNet of this name. scale, start, end: see `Control`."""

    name: str
    image: Image
    scale: float
    start: float
    end: float


@dataclass(frozen=True)
class ImagePrompt:
    """An image for an IP-Adapter. adapter: index of the adapter."""

    image: Image
    scale: float
    adapter: int


@dataclass(frozen=True)
class ConditioningImages:
    """Images that condition generation, apart from the start image."""

    controls: tuple[ControlImage, ...] = ()
    prompts: tuple[ImagePrompt, ...] = ()
    references: tuple[Image, ...] = ()


@dataclass(frozen=True)
class Job:
    """One image to generate."""

    request: str
    index: int  # position within the request
    pipeline: str
    prompt: str
    seed: int  # of the noise
    negative_prompt: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of the pipeline call
    image: Image | None = None  # start image
    mask: Image | None = None  # region to inpaint
    scheduler: str | None = None  # None: the pipeline's default
    loras: tuple[LoraFile, ...] = ()  # applied in order
    previews: int = 0  # number of preview images
    format: str = "PNG"  # as PIL names it
    quality: int = 90  # of lossy formats, 1 to 100
    conditioning: ConditioningImages = ConditioningImages()
    steps: int = 1  # denoiser runs, estimated from the request
    pixels: int = 1  # per image, estimated from the request


@dataclass(frozen=True)
class Cancel:
    """Stop generating the images of a request."""

    request: str


@dataclass(frozen=True)
class Load:
    """Load the pipeline in a folder, replacing one of the same name. number: identifies the order."""

    name: str
    folder: Path
    number: int = 0


@dataclass(frozen=True)
class Drop:
    """Unload this pipeline once none of its images is running or queued."""

    name: str


@dataclass(frozen=True)
class Forget:
    """Release weights that were merged with this LoRA file, which was removed."""

    path: str


@dataclass(frozen=True)
class Show:
    """Send a preview of the request's running images after their next step. end: finish them with that preview."""

    request: str
    end: bool = False


# Messages from the worker


@dataclass(frozen=True)
class Ready:
    """The worker accepts jobs. pipelines: what it measured for each, by name."""

    pipelines: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Loaded:
    """Result of a Load order. found: measurements; None if loading failed, with the reason in error."""

    name: str
    folder: Path
    found: Mapping[str, Any] | None
    error: str = ""
    number: int = 0


@dataclass(frozen=True)
class OfImage:
    """Base class of messages about one image. index: its position within the request."""

    request: str
    index: int


@dataclass(frozen=True)
class Begun(OfImage):
    """The image started."""


@dataclass(frozen=True)
class Stepped(OfImage):
    """Progress of an image in steps."""

    done: int
    total: int


@dataclass(frozen=True)
class Preview(OfImage):
    """A preview image file. number: counts up from 0."""

    number: int
    file: bytes


@dataclass(frozen=True)
class Drawn(OfImage):
    """A finished image file."""

    file: bytes
    size: tuple[int, int]
    flagged: bool | None  # by the safety checker; None without one
    seconds: Mapping[str, float]  # by stage
    replica: str | None = None  # that generated it, on a cluster
    warnings: tuple[str, ...] = ()  # what was truncated from its prompts


@dataclass(frozen=True)
class Failed(OfImage):
    """An image that failed. kind: class name of the error; other fields as in SdflowError."""

    kind: str
    what: str
    where: str | None = None
    remedy: str | None = None


@dataclass(frozen=True)
class Turned:
    """One iteration of the engine loop."""

    batches: tuple[tuple[int, int, float], ...]  # (images, batch size, seconds) of each denoiser run
    drawing: int  # images in their denoising steps
    waiting: int
    memory: int = 0  # resident bytes of the process


@dataclass(frozen=True)
class Lost:
    """The worker has ended or cannot generate. Fields as in SdflowError."""

    kind: str
    what: str
    where: str | None = None
    remedy: str | None = None


Message = Lost | Ready | Loaded | OfImage | Turned

Order = Job | Cancel | Show | Load | Drop | Forget
"""A message to the worker."""


@dataclass(frozen=True)
class WorkerOptions:
    """Options of the worker process."""

    pipelines: Mapping[str, Path]  # folders by name
    batch_sizes: tuple[int, ...] | None = None  # None: those that a measurement finds worthwhile
    threads: int | None = None  # of the CPU
    checker: bool = True  # whether safety checkers run
    cache: Path = field(default_factory=default_cache)  # the cache that the pipelines were built with
    lora_memory: int = 4 << 30  # bytes of weights with LoRAs to keep
    loras: bool = False  # whether requests will use LoRAs
    lanes: int = 1  # batches that run in parallel, each on a share of the threads
    deadline: float = 600.0  # seconds per request
    stall: float | None = None  # seconds without progress before the worker is killed; None: as measured
    embeddings: Path | None = None  # folder of textual inversion files
    memory: int | None = None  # bytes of pipeline files that may be loaded at once; None: no limit
    chunks: int | None = None  # of 75 tokens per prompt; None: no limit
    gpu_share: float | None = None  # fraction of the GPU's memory that the worker may use; None: all
