"""A connection to a client: HTTP/1.1 as uvicorn has it, for clients that say what they want."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0
"""In which the head of a request must have come. uvicorn waits for ever, and each that waits takes a file descriptor."""


class Connection(H11Protocol):
    """It is closed when a client opens it and sends nothing, or begins a request and does not go on. Between two requests
    uvicorn's own limit counts."""

    _giving_up: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Wait for a head from now on, or no more once it is there."""
        if self.conn.their_state is not h11.IDLE:
            self._stop_watching()
        elif self._giving_up is None:
            self._giving_up = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop_watching(self) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None
