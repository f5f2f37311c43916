"""OpenTelemetry traces of requests, sent over OTLP/HTTP if the operator configures a collector. Each request has a
span, with child spans for each image's time in the queue and in generation. Nothing else is sent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from sdflow import __version__
from sdflow.machine.packages import EXTRAS, require_packages

CLOSE_SECONDS = 2.0
"""For a collector that does not answer, the exporter would retry longer."""
RECORD: ContextVar[Callable[[str, float, Mapping[str, Any]], None] | None] = ContextVar("record", default=None)
"""Records a finished child span of the current request: name, seconds since it began, attributes."""


class Tracing:
    """Sends spans of requests to a collector.

    endpoint: the collector's URL, such as http://localhost:4318.
    """

    def __init__(self, endpoint: str) -> None:
        """Raises UsageError if OpenTelemetry is not installed."""
        require_packages("--traces", *EXTRAS["traces"])
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.name": "sdflow", "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        self._exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces")
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("sdflow", __version__)

    def begin(
        self, method: str, path: str, headers: Mapping[bytes, bytes], request: str
    ) -> Callable[[str, int, Mapping[str, Any]], None]:
        """Start the span of a request, as a child of the client's if it sent a traceparent header. Return a function
        that ends it, given the route, the status and the log fields."""
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()}
        above = TraceContextTextMapPropagator().extract(carrier)
        span = self._tracer.start_span(method, above, SpanKind.SERVER, {"url.path": path, "request.id": request})
        below = set_span_in_context(span)

        def record(name: str, ago: float, said: Mapping[str, Any]) -> None:
            now = time.time_ns()
            child = self._tracer.start_span(name, below, attributes=dict(said), start_time=now - int(ago * 1e9))
            child.end(now)

        def end(route: str, status: int, said: Mapping[str, Any]) -> None:
            span.update_name(f"{method} {route}")
            span.set_attribute("http.response.status_code", status)
            span.set_attributes({name: said[name] for name in ("pipeline", "images") if name in said})
            if status >= 500:
                span.set_status(StatusCode.ERROR)
            span.end()

        RECORD.set(record)
        return end

    def close(self) -> None:
        """Send the remaining spans, within CLOSE_SECONDS."""
        timer = threading.Timer(CLOSE_SECONDS, self._exporter.shutdown)
        timer.daemon = True
        timer.start()
        self._provider.shutdown()
        timer.cancel()
