"""How a server is spread over a cluster, as the command line says it."""

from __future__ import annotations

from dataclasses import dataclass

from sdflow.errors import UsageError
from sdflow.processes.on_ray.cluster import ray_address

NAME = "sdflow"
"""Of the application."""
QUIET = {"log_level": "WARNING", "enable_access_log": False}


@dataclass(frozen=True)
class Spread:
    """address: of the cluster. least, most: replicas. gpus: of each, 0.5 for a half. queue: images for each, at which another one
    is started. take_over: an application of this name that runs there already gives way."""

    address: str
    least: int = 1
    most: int = 1
    gpus: float = 0.0
    queue: int = 4
    take_over: bool = False


def read_spread(
    on: str | None, port: int, replicas: str | None, gpus: float | None, queue: int | None, take_over: bool
) -> Spread | None:
    """Of the options; None: on this machine. Raises UsageError for those that do not fit together."""
    if on is None:
        if replicas is not None or gpus is not None or queue is not None or take_over:
            raise UsageError(
                "replicas are of a cluster", where="--replicas, --gpus, --queue, --take-over", remedy="Add --on ray."
            )
        return None
    address = ray_address(on)
    if address != "auto":
        raise UsageError(
            "a server is deployed from a node of the cluster",
            where=f"--on {on}",
            remedy="Run it there with --on ray; RAY_ADDRESS names the cluster where there are several.",
        )
    if port == 0:
        raise UsageError("Ray Serve finds no free port", where="--port", remedy="Name one.")
    return Spread(address, *read_replicas(replicas or "1"), gpus or 0.0, queue or 4, take_over)


def read_replicas(text: str) -> tuple[int, int]:
    """Least and most, of "2" or "1:4". Raises UsageError."""
    least, colon, most = text.partition(":")
    found = [int(each) if each.isascii() and each.isdigit() else 0 for each in (least, most if colon else least)]
    if not 0 < found[0] <= found[1]:
        raise UsageError(
            f"{text!r} are no numbers of replicas", where="--replicas", remedy="Write 2, or from and to as 1:4."
        )
    return found[0], found[1]
