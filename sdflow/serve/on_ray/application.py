"""The application of Ray Serve: a front, which is the server's own application behind Ray Serve's proxy, and the replicas.

All that requests share is the front's: the queue, LoRAs that were sent, metrics. So there is one, which needs no core of its own.
How many replicas there are follows the images that are drawn or wait. Imports Ray.
"""

from __future__ import annotations

from typing import Any

from ray import serve

from sdflow.serve.http.app import Settings, make_app
from sdflow.serve.http.server import DRAIN_SECONDS
from sdflow.serve.on_ray.replica import Replica
from sdflow.serve.on_ray.replica_line import ReplicaLine
from sdflow.serve.on_ray.spread import NAME, QUIET, Spread

REPLICAS = "Replica"
REQUESTS = 1000
"""That the front has under way at most: beside those that draw, the page's and a monitor's."""
UPSCALE_SECONDS = 5.0


def application(settings: Settings, spread: Spread) -> Any:
    """What Ray Serve runs. All of it is read on the nodes under the same paths as here."""

    def front() -> Any:
        """In the front's process."""
        handle = serve.get_deployment_handle(REPLICAS, NAME)
        return make_app(settings, lambda hear: ReplicaLine(handle, hear))

    options: dict[str, Any] = {"num_replicas": spread.least}
    if spread.most > spread.least:
        options = {
            "autoscaling_config": {
                "min_replicas": spread.least,
                "max_replicas": spread.most,
                "target_ongoing_requests": spread.queue,
                "upscale_delay_s": UPSCALE_SECONDS,
            }
        }
    replicas = serve.deployment(
        Replica,
        name=REPLICAS,
        max_ongoing_requests=2 * spread.queue,
        graceful_shutdown_timeout_s=DRAIN_SECONDS,
        health_check_period_s=5,
        ray_actor_options={"num_cpus": settings.worker.threads or 1, "num_gpus": spread.gpus},
        logging_config=QUIET,
        **options,
    ).bind(settings.worker)
    return serve.deployment(
        serve.ingress(front)(),
        name="Front",
        num_replicas=1,
        max_ongoing_requests=REQUESTS,
        graceful_shutdown_timeout_s=DRAIN_SECONDS,
        ray_actor_options={"num_cpus": 0},
        logging_config=QUIET,
    ).bind(replicas)
