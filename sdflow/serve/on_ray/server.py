"""`sdflow serve --on ray`: deploy the application on a cluster, watch it and take it down."""

from __future__ import annotations

import http.client
import logging
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from sdflow.errors import UsageError
from sdflow.machine.packages import how_to_install
from sdflow.processes.on_ray.cluster import connect
from sdflow.serve.keys import LOOPBACK
from sdflow.serve.on_ray.spread import NAME, QUIET, Spread

if TYPE_CHECKING:
    from sdflow.serve.http.settings import Settings

LOGGER = "ray.serve"
LOOK_SECONDS, WATCH_SECONDS = 0.3, 2.0
ANSWER_SECONDS = 30.0
"""Timeout for the proxy's first answer once the application runs."""
SERVE_FAILS = "The replicas' logs, on their nodes: /tmp/ray/session_latest/logs/serve."


def serve_on_ray(
    settings: Settings,
    host: str,
    port: int,
    spread: Spread,
    started: Callable[[str, int], None] = lambda url, port: None,
) -> None:
    """Serve on a cluster until SIGTERM or Ctrl-C, then finish current requests and take the application down.

    host, port: of Ray Serve's proxy on the head node. started: see `serve`. Raises UsageError if Ray Serve is not
    installed, there is no cluster, the address is taken, or the replicas cannot start.
    """
    ray = connect(spread.address)
    try:
        serve = _ray_serve()
        _make_room(serve, spread)
        ended = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: ended.set())
        head = _head(ray)
        listens = head if host in ("0.0.0.0", "::") else host
        url = f"http://[{listens}]:{port}" if ":" in listens else f"http://{listens}:{port}"
        settings.log("serving", url=url, pipelines=list(settings.models), pid=os.getpid(), on=spread.address)
        if lacking := _lacking(ray, settings.worker.threads or 1, spread):
            settings.log("waiting", what=lacking)
        ours = None
        try:
            ours = _put(serve, settings, host, port, spread)
            if _wait_until_running(serve, ended):
                if host not in LOOPBACK or ray.util.get_node_ip_address() == head:
                    _require_answer(url)
                settings.log("ready", url=url, replicas=[spread.least, spread.most])
                started(url, port)
                while not ended.wait(WATCH_SECONDS) and _deployed(serve) == ours:
                    continue
        finally:
            settings.log("ended" if _take_down(serve, ours) else "taken over")
    finally:
        ray.shutdown()


def _ray_serve() -> Any:
    try:
        from ray import serve
    except ImportError as error:
        raise UsageError(f"Ray Serve is not installed: {error}", where="--on", remedy=how_to_install("ray")) from error
    logging.getLogger(LOGGER).setLevel(logging.WARNING)
    return serve


def _make_room(serve: Any, spread: Spread) -> None:
    """Delete a running application if `spread.take_over`, otherwise raise UsageError."""
    if NAME not in _applications(serve):
        return
    if not spread.take_over:
        raise UsageError(
            f"an application {NAME} is already running on this cluster",
            where="--on",
            remedy="Stop it where it was started, or replace it with --take-over.",
        )
    _delete(serve)


def _delete(serve: Any) -> None:
    """Delete the application and wait until it has finished current requests, for as long as its replicas may take."""
    serve.delete(NAME, _blocking=False)  # blocking, Ray Serve gives up after 60 s
    while (found := _applications(serve).get(NAME)) is not None and found.status == "DELETING":
        time.sleep(LOOK_SECONDS)


def _applications(serve: Any) -> Any:
    """Return Ray Serve's applications by name. Raises UsageError if the cluster is gone."""
    from ray.exceptions import RayError

    try:
        return serve.status().applications
    except (RayError, RuntimeError, OSError) as error:
        raise UsageError(
            f"the cluster no longer answers ({type(error).__name__})",
            where="--on",
            remedy="Run `ray status` on its head node.",
        ) from error


def _head(ray: Any) -> str:
    for node in ray.nodes():
        if node["Alive"] and "node:__internal_head__" in node["Resources"]:
            return str(node["NodeManagerAddress"])
    return str(ray.util.get_node_ip_address())


def _lacking(ray: Any, cores: int, spread: Spread) -> str | None:
    """Return a message if no current node has the resources of a replica. Nodes may still join."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if any(node.get("GPU", 0) >= spread.gpus and node.get("CPU", 0) >= cores for node in nodes):
        return None
    gpus = f" and {spread.gpus:g} GPUs" if spread.gpus else ""
    return f"no node has {cores} CPU cores{gpus}; the replicas wait for such a node"


def _put(serve: Any, settings: Settings, host: str, port: int, spread: Spread) -> float | None:
    """Deploy the application and return its deployment time. Raises UsageError if Ray Serve rejects it."""
    from ray.exceptions import RayError

    from sdflow.serve.on_ray.application import application

    try:
        serve.start(proxy_location="HeadOnly", http_options={"host": host, "port": port}, logging_config=QUIET)
        with _errors_only():  # it compares its default HTTP options with those given above
            serve.run_many(
                [serve.RunTarget(application(settings, spread), name=NAME, route_prefix="/")],
                wait_for_ingress_deployment_creation=False,
                wait_for_applications_running=False,
            )
    except (RayError, RuntimeError, ValueError, OSError) as error:
        last = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        raise UsageError(f"Ray Serve cannot start it: {last[0]}", where="--on", remedy=SERVE_FAILS) from error
    return _deployed(serve)


@contextmanager
def _errors_only() -> Iterator[None]:
    """Hide Ray Serve's warnings."""
    logger = logging.getLogger(LOGGER)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _deployed(serve: Any) -> float | None:
    """Return the deployment time of the running application, which identifies it; None without one."""
    found = _applications(serve).get(NAME)
    return None if found is None or found.status == "DELETING" else found.last_deployed_time_s


def _wait_until_running(serve: Any, ended: threading.Event) -> bool:
    """Wait until the application runs; False if `ended` is set first. Raises UsageError if it fails."""
    while not ended.wait(LOOK_SECONDS):
        found = _applications(serve).get(NAME)
        if found is None:
            raise UsageError(
                "the application was deleted while it was starting", where="--on", remedy="Start it again."
            )
        if found.status in ("RUNNING", "UNHEALTHY"):
            return True
        if found.status == "DEPLOY_FAILED":
            messages = [each.message for each in found.deployments.values() if each.message] or [found.message]
            raise UsageError(f"the replicas cannot start: {_reason(messages[0])}", where="--on", remedy=SERVE_FAILS)
    return False


def _reason(message: str) -> str:
    """Return the last line that names an error."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    named = [line for line in lines if "Error: " in line]
    return (named or lines or ["Ray Serve gives no reason"])[-1]


def _require_answer(url: str) -> None:
    """Raise UsageError if the cluster's proxy listens elsewhere: its address is fixed by the first application."""
    from sdflow.serve.http.guard import HEADERS

    name, ours = (each.decode() for each in HEADERS[0])
    end, other = time.monotonic() + ANSWER_SECONDS, False
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{url}/healthz", timeout=LOOK_SECONDS * 10) as answer:
                found = answer.headers
        except urllib.error.HTTPError as error:  # it answers, but rejects this Host
            found = error.headers
        except http.client.HTTPException:  # it does not speak HTTP
            other = True
            time.sleep(LOOK_SECONDS)
            continue
        except OSError:
            time.sleep(LOOK_SECONDS)
            continue
        if found.get(name) == ours:
            return
        other = True  # or the proxy, which does not know the application yet
        time.sleep(LOOK_SECONDS)
    what = "another server" if other else "nothing"
    raise UsageError(
        f"{what} answers at {url}: Ray Serve listens elsewhere on this cluster, or the port is taken",
        where="--port",
        remedy="Use Ray Serve's own port or a free one, or stop its other applications: `serve shutdown`.",
    )


def _take_down(serve: Any, ours: float | None) -> bool:
    """Delete the application after current requests finish, and shut Ray Serve down if it serves nothing else. Return
    False if the application was replaced or deleted before."""
    from ray.exceptions import RayError

    with suppress(RayError, RuntimeError, TimeoutError, UsageError):  # the cluster and the application are gone
        if ours is not None and _deployed(serve) != ours:
            return False
        _delete(serve)
        if not _applications(serve):
            serve.shutdown()
    return True
