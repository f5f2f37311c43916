"""Prometheus metrics for `/metrics`."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from sdflow.serve.jobs import Drawn, Failed, Lost, Message, Ready, Turned

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16)


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.requests = counter("sdflow_requests", "Requests, by path and status.", ["path", "status"])
        about = ["path", "pipeline", "status"]
        self.seconds = histogram("sdflow_request_seconds", "Seconds of a request.", about, buckets=SECONDS)
        self.queued = histogram(
            "sdflow_queue_seconds", "Seconds that an image waits before it begins.", ["pipeline"], buckets=SECONDS
        )
        self.refusals = counter("sdflow_refusals", "Requests that were refused, by reason.", ["reason"])
        self.images = counter("sdflow_images", "Images drawn.")
        self.replicas = counter("sdflow_replica_images", "Images drawn, by replica of a cluster.", ["replica"])
        self.failures = counter("sdflow_image_failures", "Images that failed.", ["kind"])
        self.stages = histogram("sdflow_stage_seconds", "Seconds of an image, by stage.", ["stage"], buckets=SECONDS)
        self.batches = histogram("sdflow_batch_images", "Images of a run of the denoiser.", buckets=BATCHES)
        self.places = counter("sdflow_batch_places", "Places of the batches that were run.")
        self.waiting = gauge("sdflow_waiting_images", "Images that wait.")
        self.drawing = gauge("sdflow_drawing_images", "Images that are drawn.")
        self.memory = gauge("sdflow_worker_resident_bytes", "Memory of the process that draws.")
        self.ready = gauge("sdflow_ready", "1 while requests are taken.")
        self.restarts = counter("sdflow_worker_losses", "How often the process that draws ended.")

    def hear(self, message: Message) -> None:
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
        return generate_latest(self.registry)
