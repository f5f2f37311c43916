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
        self.seconds = histogram("sdflow_request_seconds", "Duration of a request in seconds.", about, buckets=SECONDS)
        self.queued = histogram(
            "sdflow_queue_seconds", "Time of an image in the queue in seconds.", ["pipeline"], buckets=SECONDS
        )
        self.refusals = counter("sdflow_refusals", "Rejected requests, by reason.", ["reason"])
        self.images = counter("sdflow_images", "Generated images.")
        self.replicas = counter("sdflow_replica_images", "Generated images, by replica of a cluster.", ["replica"])
        self.failures = counter("sdflow_image_failures", "Failed images.", ["kind"])
        self.stages = histogram(
            "sdflow_stage_seconds", "Duration of an image's stages in seconds.", ["stage"], buckets=SECONDS
        )
        self.batches = histogram("sdflow_batch_images", "Images per denoiser run.", buckets=BATCHES)
        self.places = counter("sdflow_batch_places", "Total capacity of the batches that ran.")
        self.waiting = gauge("sdflow_waiting_images", "Queued images.")
        self.drawing = gauge("sdflow_drawing_images", "Images in their denoising steps.")
        self.memory = gauge("sdflow_worker_resident_bytes", "Resident memory of the worker process.")
        self.ready = gauge("sdflow_ready", "1 while requests are accepted, otherwise 0.")
        self.restarts = counter("sdflow_worker_losses", "Number of times that the worker process ended.")

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
