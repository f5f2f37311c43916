"""What a request may ask for."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sdflow.serve.api_error import invalid

MOST_SENT = 2048 * 2048
"""Pixels of an image that is sent, where nobody says."""


@dataclass(frozen=True)
class Limits:
    """images: of one request. pixels: of an image that is drawn; None: as the worker measures. steps: of an image. prompt:
    characters. body: bytes of a request. queue: images that are drawn or wait, of all requests. seconds: that a request may
    take, its waiting included. previews: of an image. loras: of one request; lora_bytes: of one that is sent; uploads,
    upload_bytes: of all that were sent and are there. conditioning_images: for ControlNets, and for IP-Adapters.
    connections: that are open at a time. chunks: of 75 tokens, that a prompt may have. cost: of a request, in steps times
    megapixels times sections between BREAKs, of all its images; None: any."""

    images: int = 10
    pixels: int | None = None
    steps: int = 150
    prompt: int = 4000
    body: int = 32 << 20
    queue: int = 64
    seconds: float = 600.0
    previews: int = 10
    loras: int = 8
    lora_bytes: int = 1 << 30
    uploads: int = 32
    upload_bytes: int = 8 * 10**9
    conditioning_images: int = 8
    connections: int = 512
    chunks: int = 16
    cost: float | None = None

    @property
    def sent_pixels(self) -> int:
        """Of an image that is sent."""
        return MOST_SENT if self.pixels is None else self.pixels

    def require_size(self, height: int, width: int, granularity: int, most: int | None) -> None:
        """Raises ApiError for an image with more than `most` pixels, or that the model cannot draw."""
        if height < granularity or width < granularity or height % granularity or width % granularity:
            raise invalid("size", f"width and height must be multiples of {granularity}, not {width}x{height}.")
        if most is not None and height * width > most:
            words = f"{width}x{height} has {height * width} pixels; this pipeline draws at most {most}"
            raise invalid("size", f"{words} (max_pixels in /v1/models).")

    def require_at_most(self, param: str, value: float | None, most: float, of: str | None = None) -> None:
        """Raises ApiError for a value beyond `most`. of: what it counts; None: itself."""
        if value is not None and value > most:
            said, may = (f"is {value}", "be") if of is None else (f"has {value} {of}", "have")
            raise invalid(param, f"{param} {said}, and may {may} at most {most} here.")

    def require_cost(self, images: int, steps: int, pixels: int, chunks: int) -> None:
        """Raises ApiError for a request that costs more than it may."""
        self.require_at_most("prompt", chunks, self.chunks, "chunks of 75 tokens (BREAK begins a new one)")
        found = images * steps * pixels * chunks / 1e6
        if self.cost is not None and found > self.cost:
            words = f"{images} x {steps} steps x {pixels / 1e6:.3g} megapixels x {chunks} sections of its prompt"
            said = f"the request costs {found:.4g} ({words}), and may cost {self.cost:g} here."
            raise invalid(None, said, code="too_costly")


_SIZE = re.compile(r"(\d{1,5})x(\d{1,5})")


def read_size(text: str | None) -> tuple[int, int] | None:
    """Height and width of "512x768" (the width is first); None of "auto". Raises ApiError."""
    if text is None or text == "auto":
        return None
    found = _SIZE.fullmatch(text)
    if found is None:
        raise invalid("size", f'{text!r} is no size: write "auto", or width and height as "512x768".')
    return int(found[2]), int(found[1])
