"""What `/metrics` tells Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from sdflow.serve.jobs import Drawn, Failed, Lost, Message, Ready, Turned

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)


class Metrics:
    """The figures of one server."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "sdflow_requests", "Requests, by path and status.", ["path", "status"], registry=registry
        )
        self.seconds = Histogram(
            "sdflow_request_seconds", "Seconds of a request.", ["path"], buckets=SECONDS, registry=registry
        )
        self.refusals = Counter(
            "sdflow_refusals", "Requests that were refused, by reason.", ["reason"], registry=registry
        )
        self.images = Counter("sdflow_images", "Images drawn.", registry=registry)
        self.replicas = Counter(
            "sdflow_replica_images", "Images drawn, by replica of a cluster.", ["replica"], registry=registry
        )
        self.failures = Counter("sdflow_image_failures", "Images that failed.", ["kind"], registry=registry)
        self.stages = Histogram(
            "sdflow_stage_seconds", "Seconds of an image, by stage.", ["stage"], buckets=SECONDS, registry=registry
        )
        self.batches = Histogram(
            "sdflow_batch_images",
            "Images of a run of the denoiser.",
            buckets=(1, 2, 3, 4, 6, 8, 12, 16),
            registry=registry,
        )
        self.places = Counter("sdflow_batch_places", "Places of the batches that were run.", registry=registry)
        self.waiting = Gauge("sdflow_waiting_images", "Images that wait.", registry=registry)
        self.drawing = Gauge("sdflow_drawing_images", "Images that are drawn.", registry=registry)
        self.memory = Gauge("sdflow_worker_resident_bytes", "Memory of the process that draws.", registry=registry)
        self.ready = Gauge("sdflow_ready", "1 while requests are taken.", registry=registry)
        self.restarts = Counter("sdflow_worker_losses", "How often the process that draws ended.", registry=registry)

    def hear(self, message: Message) -> None:
        """What the worker says."""
        if isinstance(message, Turned):
            for images, places, _ in message.batches:
                self.batches.observe(images)
                self.places.inc(places)
            self.waiting.set(message.waiting)
            self.drawing.set(message.drawing)
            self.memory.set(message.memory)
        elif isinstance(message, Drawn):
            self.images.inc()
            if message.replica is not None:
                self.replicas.labels(message.replica).inc()
            for stage, seconds in message.seconds.items():
                self.stages.labels(stage).observe(seconds)
        elif isinstance(message, Failed):
            self.failures.labels(message.kind).inc()
        elif isinstance(message, Ready):
            self.ready.set(1)
        elif isinstance(message, Lost):
            self.ready.set(0)
            self.waiting.set(0)
            self.drawing.set(0)
            self.restarts.inc()

    def text(self) -> bytes:
        """In Prometheus' format."""
        return generate_latest(self.registry)
