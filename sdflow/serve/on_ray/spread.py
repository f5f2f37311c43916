"""Distribution of a server over a cluster, from command-line options."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from sdflow.errors import UsageError
from sdflow.machine.memory import HOST
from sdflow.manifest import Manifest
from sdflow.processes.on_ray.cluster import ray_address
from sdflow.serve.http.server import DRAIN_SECONDS
from sdflow.targets import find_target

NAME = "sdflow"
QUIET = {"log_level": "WARNING", "enable_access_log": False}


@dataclass(frozen=True)
class Spread:
    """Cluster and replicas of a server."""

    address: str
    least: int = 1  # replicas
    most: int = 1  # replicas
    gpus: float = 0.0  # per replica; 0.5 shares one, and its memory, between two
    queue: int = 4  # images per replica above which another one starts
    take_over: bool = False  # replace a running application of the same name
    drain: float = DRAIN_SECONDS  # seconds that current requests may continue when it is taken down


def with_gpus(spread: Spread, gpus: float | None, pipelines: Iterable[Manifest]) -> Spread:
    """Set the GPUs per replica. gpus: the option's value; None: one if a pipeline's target runs on a GPU that Ray
    counts. Raises UsageError if it gets none, or for a part of a GPU whose memory the target cannot limit."""
    targets = [find_target(each.origin.target, each.origin.name) for each in pipelines]
    needy = next((each for each in targets if each.nvidia_or_amd), None)
    if gpus is None:
        gpus = 0.0 if needy is None else 1.0
    if needy is not None and not gpus:
        raise UsageError(
            f"a replica without a GPU cannot run a pipeline for the target {needy.name}",
            where="--gpus",
            remedy="Use 1, or with cuda a fraction such as 0.5; or a pipeline built for the CPU.",
        )
    unlimited = next((each for each in targets if each.name not in (HOST, "cuda")), None)
    if unlimited is not None and 0 < gpus < 1:
        raise UsageError(
            f"the target {unlimited.name} cannot limit its device memory to a part of a GPU",
            where="--gpus",
            remedy="Use 1, or a pipeline built for cuda.",
        )
    return replace(spread, gpus=gpus)


def read_spread(
    on: str | None,
    port: int,
    replicas: str | None,
    gpus: float | None,
    queue: int | None,
    take_over: bool,
    *,
    drain: float = DRAIN_SECONDS,
    tls: bool = False,
) -> Spread | None:
    """Read the options; None means this machine. gpus: see `with_gpus`. tls: whether HTTPS is wanted. Raises UsageError
    for options that conflict."""
    if on is None:
        if replicas is not None or gpus is not None or queue is not None or take_over:
            raise UsageError(
                "only available on a cluster", where="--replicas, --gpus, --queue, --take-over", remedy="Add --on ray."
            )
        return None
    address = ray_address(on)
    if address != "auto":
        raise UsageError(
            "servers can only be deployed from a node of the cluster",
            where=f"--on {on}",
            remedy="Run this command on a node, with --on ray; RAY_ADDRESS selects one of several clusters.",
        )
    if port == 0:
        raise UsageError("Ray Serve cannot pick a free port", where="--port", remedy="Name a port.")
    if tls:
        raise UsageError(
            "Ray Serve's proxy does not serve HTTPS", where="--ssl-certfile", remedy="Use a proxy in front of it."
        )
    return Spread(address, *read_replicas(replicas or "1"), gpus or 0.0, queue or 4, take_over, drain)


def read_replicas(text: str) -> tuple[int, int]:
    """Return the minimum and maximum of "2" or "1:4". Raises UsageError."""
    least, colon, most = text.partition(":")
    found = [int(each) if each.isascii() and each.isdigit() else 0 for each in (least, most if colon else least)]
    if not 0 < found[0] <= found[1]:
        raise UsageError(
            f"{text!r} is not a number of replicas",
            where="--replicas",
            remedy="Write a number such as 2, or a range such as 1:4.",
        )
    return found[0], found[1]
