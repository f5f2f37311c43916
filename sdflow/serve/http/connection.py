"""HTTP/1.1 connections on uvicorn, with timeouts for stalled clients and a limit on open connections."""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from sdflow.serve.api_error import ApiError
from sdflow.serve.http.guard import transfer_seconds
from sdflow.serve.log import log_line

HEAD_SECONDS = 10.0
"""Timeout for a request head. uvicorn has none, and each waiting connection uses a file descriptor."""

REFUSED_SECONDS = 1.0
"""How long a rejected connection stays open for the client to read the reason."""

RETRY_SECONDS = 5


class Connection(H11Protocol):
    """Closes a connection if the client sends nothing, stalls within a request, keeps sending a request that was
    answered, or does not read its answer. Between requests uvicorn's keep-alive timeout applies."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        # uvicorn's limit only answers 503 to complete requests, and keeps connections whose request never completes.
        self._most, self.limit_concurrency = self.limit_concurrency, None
        self._timers: dict[str, asyncio.TimerHandle] = {}  # "head": to arrive; "answer": to be read
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._most is not None and len(self.connections) > self._most:
            self._refuse()
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            super().data_received(data)
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop("head")
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._timers["answer"] = self._abort_later()

    def resume_writing(self) -> None:
        self._stop("answer")
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._abort_later()  # closing waits until the client has read everything

    def _refuse(self) -> None:
        """Send the reason and ignore the client's data."""
        self._refused = True
        self.connections.discard(self)
        error = ApiError(503, "Too many open connections.", retry_after=RETRY_SECONDS)
        response = json.dumps(error.body())
        request = uuid.uuid4().hex
        head = f"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: {len(response)}\r\n"
        head += f"Retry-After: {RETRY_SECONDS}\r\nContent-Type: application/json\r\nX-Request-ID: {request}\r\n\r\n"
        log_line("connection_refused", id=request, client=self.client[0] if self.client else "")
        self.transport.write((head + response).encode())
        self.transport.write_eof()
        self.loop.call_later(REFUSED_SECONDS, self.transport.abort)

    def _watch(self) -> None:
        """Run the timer while a request head, or the rest of an answered request's body, is due."""
        their, answered = self.conn.their_state, self.conn.our_state in (h11.DONE, h11.MUST_CLOSE)
        if their is not h11.IDLE and not (answered and their is h11.SEND_BODY):
            self._stop("head")
        elif "head" not in self._timers:
            self._timers["head"] = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _give_up(self) -> None:
        self.transport.close()
        self._abort_later()

    def _abort_later(self) -> asyncio.TimerHandle:
        return self.loop.call_later(transfer_seconds(self.transport.get_write_buffer_size()), self.transport.abort)

    def _stop(self, name: str) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()
