"""Connect to a Ray cluster."""

from __future__ import annotations

import os
import signal
import warnings
from typing import Any

from sdflow.errors import UsageError
from sdflow.machine.packages import how_to_install

ADDRESSES = "ray, for the cluster of this machine or of RAY_ADDRESS, or ray://HOST:PORT"
NAMESPACE = "sdflow"
START = "Start one: `ray start --head` here, `ray start --address=HOST:6379` on the others."
START_FOR_CLIENTS = (
    "HOST:PORT must be the head node's client server: `ray start --head --ray-client-server-port 9100` there."
)


def ray_address(on: str) -> str:
    """The address for `ray.init` from `--on`'s value. Raises UsageError for other values."""
    if on == "ray":
        return "auto"
    if on.startswith("ray://") and on.removeprefix("ray://"):
        return on
    raise UsageError(f"{on!r} is not a Ray cluster", where="--on", remedy=f"Use {ADDRESSES}.")


def load_ray() -> Any:
    """Import Ray. Raises UsageError if it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage reports
    try:
        import ray
    except ImportError as error:
        raise UsageError("Ray is not installed", where="--on", remedy=how_to_install("ray")) from error
    return ray


def connect(address: str) -> Any:
    """Connect to the cluster at an address from `ray_address`, and return the package. Raises UsageError if there is
    none."""
    ray = load_ray()
    ours = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with warnings.catch_warnings(action="ignore"):  # warnings are reported below
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", namespace=NAMESPACE)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise UsageError(
            f"there is no Ray cluster: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            where=f"--on {'ray' if address == 'auto' else address}",
            remedy=START if address == "auto" else START_FOR_CLIENTS,
        ) from error
    finally:
        for number, action in ours.items():  # Ray replaces them
            signal.signal(number, action)
    return ray
