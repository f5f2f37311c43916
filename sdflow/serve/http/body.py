"""The body of a request as it comes in: how large it may be, how long it may take, and how much of all of them is in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from sdflow.serve.api_error import ApiError
from sdflow.serve.limits import Limits

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

STALL_SECONDS = 30.0
"""How long nothing may move, in either direction."""

SLOWEST = 16 << 10
"""Bytes a second: a transfer may take `STALL_SECONDS` and what its bytes take at this rate. So one that drips ends."""


def transfer_seconds(size: int) -> float:
    """How long so many bytes may take."""
    return STALL_SECONDS + size / SLOWEST


class Bodies:
    """Those that are being received or answered, of all requests."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self.held = limits, 0


class Body:
    """Of one request. refuse: answers it with an error, unless an answer has begun; returns what the application receives."""

    def __init__(
        self, all_bodies: Bodies, path: str, receive: Receive, refuse: Callable[[ApiError], Awaitable[Message]]
    ) -> None:
        self._all, self._receive, self._refuse = all_bodies, receive, refuse
        self._most = all_bodies.limits.body_of(path)
        self._in_memory = path != all_bodies.limits.UPLOAD_PATH
        self._begun, self._received, self._held, self._whole = asyncio.get_running_loop().time(), 0, 0, False

    async def receive(self) -> Message:
        """The next message; a disconnection where the request was refused."""
        try:
            async with asyncio.timeout_at(self._end()):
                message = await self._receive()
        except TimeoutError:
            return await self._refuse(ApiError(408, "the request took too long to arrive.", code="too_slow"))
        size = len(message.get("body", b""))
        self._received += size
        self._whole = not message.get("more_body", False)
        if self._received > self._most:
            return await self._refuse(too_large(self._most))
        if self._in_memory:
            self._held += size
            self._all.held += size
            if self._all.held > self._all.limits.bodies:
                words = "the requests in memory have reached their limit. Try again."
                return await self._refuse(ApiError(503, words, code="overloaded", retry_after=5))
        return message

    def release(self) -> None:
        """The request was answered."""
        self._all.held -= self._held

    def _end(self) -> float | None:
        if self._whole:
            return None
        return min(asyncio.get_running_loop().time() + STALL_SECONDS, self._begun + transfer_seconds(self._received))


def too_large(most: int) -> ApiError:
    """The refusal of a body that has more bytes."""
    return ApiError(413, f"the request has more than {most} bytes.", code="body_too_large")
