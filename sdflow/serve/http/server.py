"""`sdflow serve`: the application on uvicorn, from the port to the last request."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sdflow.errors import UsageError
from sdflow.serve.deployments import read_key
from sdflow.serve.http.guard import LOOPBACK, Access

if TYPE_CHECKING:
    from sdflow.serve.http.app import Settings

DRAIN_SECONDS = 60
"""How long requests that are being drawn may take when the server is told to end."""

SILENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "ORT_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",  # torch's work is small here, and each call is a thread that would start threads of its own
}


def serve(
    settings: Settings, host: str, port: int, started: Callable[[str, int], None] = lambda url, port: None
) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish what was begun.

    port: 0: a free one. started: called with the URL and the port. Raises UsageError for a port in use.
    """
    import uvicorn

    from sdflow.serve.http.app import make_app
    from sdflow.serve.http.connection import Connection

    listening = listen(host, port)
    found = listening.getsockname()[1]
    os.environ.update({name: os.environ.get(name, value) for name, value in SILENT.items()})
    app = make_app(settings)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,  # the guard writes it
        timeout_graceful_shutdown=DRAIN_SECONDS,
        server_header=False,
        http=Connection,
        ws="none",
        h11_max_incomplete_event_size=64 << 10,
        limit_concurrency=settings.limits.connections,
    )
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn's stand before them, and raise them again at the end
        signal.signal(number, lambda *_: None)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # its terminal is closed
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    url = f"http://{f'[{host}]' if ':' in host else host}:{found}"
    settings.log("serving", url=url, pipelines=list(settings.models), pid=os.getpid())
    started(url, found)
    uvicorn.Server(config).run(sockets=[listening])
    settings.log("ended")


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there. Raises UsageError."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind)
        if sys.platform != "win32":
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(2048)
    except OSError as error:
        raise UsageError(
            f"cannot listen at {host} port {port}: {error.strerror or error}",
            where="--port",
            remedy="Take another port; --port 0 finds a free one.",
        ) from error
    return made


def access_of(host: str, key_file: Path | None, origins: Sequence[str], *, no_auth: bool) -> Access:
    """Who may ask. Raises UsageError for an address beyond this machine without a key, unless that is meant."""
    key = None if key_file is None else read_key(key_file)
    own = host in LOOPBACK
    if key is None and not own and not no_auth:
        raise UsageError(
            f"at {host}, everyone who reaches this machine could generate images",
            where="--host",
            remedy="Add --api-key-file FILE, or --no-auth.",
        )
    return Access(key, tuple(origin.rstrip("/") for origin in origins), LOOPBACK if own else None)
