"""OpenTelemetry traces of requests, where an operator names a collector: a span of each request, below it one for the time in
which each of its images waits and one in which it is generated. They are sent as JSON (OTLP/HTTP), and nothing else is."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from sdflow import __version__
from sdflow.machine.packages import require_packages

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import Span

SEND_SECONDS = 10.0

RECORD: ContextVar[Callable[[str, float, Mapping[str, Any]], None] | None] = ContextVar("record", default=None)
"""Adds what is over to the request that is being answered: a name, how many seconds ago it began, and what is said of it."""


class Tracing:
    """endpoint: of a collector, as http://localhost:4318."""

    def __init__(self, endpoint: str) -> None:
        """Raises UsageError where OpenTelemetry is not installed."""
        require_packages("--traces", "opentelemetry-sdk")
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.name": "sdflow", "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(_exporter(f"{endpoint.rstrip('/')}/v1/traces")))
        self._tracer = self._provider.get_tracer("sdflow", __version__)

    def begin(
        self, method: str, path: str, headers: Mapping[bytes, bytes], state: MutableMapping[str, Any]
    ) -> RequestSpan:
        """Of a request; below that of the client, if it names one (traceparent)."""
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()}
        above = TraceContextTextMapPropagator().extract(carrier)
        span = self._tracer.start_span(method, above, SpanKind.SERVER, {"url.path": path, "request.id": state["id"]})
        below = set_span_in_context(span)

        def record(name: str, ago: float, said: Mapping[str, Any]) -> None:
            now = time.time_ns()
            child = self._tracer.start_span(name, below, attributes=dict(said), start_time=now - int(ago * 1e9))
            child.end(now)

        RECORD.set(record)
        return RequestSpan(span, method)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


class RequestSpan:
    """The span of a request."""

    def __init__(self, span: Span, method: str) -> None:
        self._span, self._method = span, method

    def end(self, route: str, status: int, said: Mapping[str, Any]) -> None:
        """said: what the log says of it."""
        from opentelemetry.trace import StatusCode

        self._span.update_name(f"{self._method} {route}")
        self._span.set_attribute("http.response.status_code", status)
        for name in ("pipeline", "images"):
            if name in said:
                self._span.set_attribute(name, said[name])
        if status >= 500:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


def _exporter(url: str) -> Any:
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class OtlpJson(SpanExporter):
        """Sends spans; those that the collector does not take are lost."""

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            body = json.dumps({"resourceSpans": [_resource_spans(spans)]}).encode()
            request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=SEND_SECONDS):
                    return SpanExportResult.SUCCESS
            except OSError:
                return SpanExportResult.FAILURE

    return OtlpJson()


def _resource_spans(spans: Sequence[ReadableSpan]) -> dict[str, Any]:
    made = [
        {
            "traceId": f"{span.context.trace_id:032x}",
            "spanId": f"{span.context.span_id:016x}",
            **({} if span.parent is None else {"parentSpanId": f"{span.parent.span_id:016x}"}),
            "name": span.name,
            "kind": span.kind.value + 1,
            "startTimeUnixNano": str(span.start_time),
            "endTimeUnixNano": str(span.end_time),
            "attributes": _attributes(span.attributes or {}),
            "status": {"code": span.status.status_code.value},
        }
        for span in spans
    ]
    resource = {"attributes": _attributes(spans[0].resource.attributes)}
    return {"resource": resource, "scopeSpans": [{"scope": {"name": "sdflow", "version": __version__}, "spans": made}]}


def _attributes(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    def value(of: Any) -> dict[str, Any]:
        if isinstance(of, int):
            return {"intValue": str(of)}
        return {"doubleValue": of} if isinstance(of, float) else {"stringValue": str(of)}

    return [{"key": name, "value": value(of)} for name, of in given.items()]
