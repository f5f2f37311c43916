"""Limits on requests."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sdflow.serve.api_error import invalid

MOST_SENT = 2048 * 2048
"""Default maximum pixels of an uploaded image."""


@dataclass(frozen=True)
class Limits:
    """Limits of the server, each per request unless noted."""

    images: int = 10
    pixels: int | None = None  # per generated image; None: as the worker measures
    steps: int = 150  # per image
    prompt: int = 4000  # characters
    body: int = 32 << 20  # bytes
    queue: int = 64  # running and queued images of all requests
    seconds: float = 600.0  # including time in the queue
    previews: int = 10  # per image
    loras: int = 8
    lora_bytes: int = 1 << 30  # per uploaded LoRA
    uploads: int = 32  # uploaded LoRAs in all
    upload_bytes: int = 8 * 10**9  # of all uploaded LoRAs
    conditioning_images: int = 8  # each for ControlNets, IP-Adapters and references
    connections: int = 512  # open at a time
    chunks: int = 16  # of 75 tokens per prompt
    cost: float | None = None  # images x steps x megapixels x prompt sections between BREAKs; None: no limit

    @property
    def sent_pixels(self) -> int:
        return MOST_SENT if self.pixels is None else self.pixels

    def require_size(self, height: int, width: int, granularity: int, most: int | None) -> None:
        """Raise ApiError if the image has more than `most` pixels or a size that the model does not support."""
        if height < granularity or width < granularity or height % granularity or width % granularity:
            raise invalid("size", f"width and height must be multiples of {granularity}, not {width}x{height}.")
        if most is not None and height * width > most:
            words = f"{width}x{height} has {height * width} pixels; this pipeline generates at most {most}"
            raise invalid("size", f"{words} (max_pixels in /v1/models).")

    def require_at_most(self, param: str, value: float | None, most: float, of: str | None = None) -> None:
        """Raise ApiError for a value above `most`. of: the counted unit; None: the value itself."""
        if value is not None and value > most:
            said = f"is {value}" if of is None else f"has {value} {of}"
            raise invalid(param, f"{param} {said}; the maximum is {most}.")

    def require_cost(self, images: int, steps: int, pixels: int, chunks: int) -> None:
        """Raise ApiError if the request exceeds the cost limit."""
        self.require_at_most("prompt", chunks, self.chunks, "chunks of 75 tokens (BREAK begins a new one)")
        found = images * steps * pixels * chunks / 1e6
        if self.cost is not None and found > self.cost:
            words = f"{images} x {steps} steps x {pixels / 1e6:.3g} megapixels x {chunks} prompt sections"
            said = f"the request costs {found:.4g} ({words}); the maximum is {self.cost:g}."
            raise invalid(None, said, code="too_costly")


_SIZE = re.compile(r"(\d{1,5})x(\d{1,5})")


def read_size(text: str | None) -> tuple[int, int] | None:
    """Return (height, width) of "512x768", which puts the width first; None for "auto". Raises ApiError."""
    if text is None or text == "auto":
        return None
    found = _SIZE.fullmatch(text)
    if found is None:
        raise invalid("size", f'{text!r} is not a size; write "auto", or width and height as "512x768".')
    return int(found[2]), int(found[1])
