"""`sdflow serve`: run the application on uvicorn, from binding the port to draining the last request."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from sdflow.errors import UsageError, os_errors_as
from sdflow.serve.keys import LOOPBACK, Access, Keys, read_keys
from sdflow.serve.log import log_as_json

if TYPE_CHECKING:
    from sdflow.serve.http.settings import Settings

DRAIN_SECONDS = 60.0
"""How long current requests may continue after a termination signal."""

SILENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "ORT_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",  # torch does little work here, and each calling thread would start its own pool
}


@dataclass(frozen=True)
class Listening:
    """Address and TLS of the server."""

    host: str
    port: int  # 0: a free one
    forwarded: str = "127.0.0.1"  # proxies whose X-Forwarded-For and -Proto headers are trusted, as in uvicorn
    drain: float = DRAIN_SECONDS  # seconds that current requests may continue after a termination signal
    certificate: Path | None = None  # TLS certificate file
    certificate_key: Path | None = None  # TLS key file


def serve(settings: Settings, where: Listening, started: Callable[[str, int], None] = lambda url, port: None) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish current requests.

    started: called with the URL and the port. Raises UsageError if the port is in use or the TLS files cannot be used.
    """
    import uvicorn

    from sdflow.serve.http.app import make_app
    from sdflow.serve.http.connection import Connection

    if where.certificate is None and where.certificate_key is not None:
        raise UsageError("requires a certificate", where="--ssl-keyfile", remedy="Add --ssl-certfile.")
    listening = listen(where.host, where.port)
    found = listening.getsockname()[1]
    os.environ.update({name: os.environ.get(name, value) for name, value in SILENT.items()})
    log_as_json()
    app = make_app(settings)
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,  # the guard writes it
        timeout_graceful_shutdown=round(where.drain),
        server_header=False,
        http=Connection,
        ws="none",
        h11_max_incomplete_event_size=64 << 10,
        limit_concurrency=settings.limits.connections,
        proxy_headers=True,
        forwarded_allow_ips=where.forwarded,
        root_path=settings.root_path,
        ssl_certfile=where.certificate,
        ssl_keyfile=where.certificate_key,
    )
    if where.certificate is not None:
        with os_errors_as("is not a certificate that matches its key", where.certificate):
            config.load()  # reads the TLS files

    class Server(uvicorn.Server):
        """Drains on the first signal: rejects new requests and exits when current ones finish or the drain time is
        over. The second signal cancels current requests, the third exits at once."""

        end = float("inf")

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if app.drawing.draining:
                self.end, self.force_exit = 0.0, self.should_exit
                return
            app.drawing.draining, self.end = True, time.monotonic() + where.drain
            settings.log("draining", images=app.drawing.images, seconds=where.drain)

        async def on_tick(self, counter: int) -> bool:
            if app.drawing.draining and (not app.drawing.images or time.monotonic() > self.end):
                self.should_exit = True
                config.timeout_graceful_shutdown = max(1, round(self.end - time.monotonic()))
            return await super().on_tick(counter)

    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn re-raises captured signals when it ends
        signal.signal(number, lambda *_: None)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # the terminal was closed
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    scheme = "http" if where.certificate is None else "https"
    url = f"{scheme}://{f'[{where.host}]' if ':' in where.host else where.host}:{found}"
    settings.log("serving", url=url, pipelines=list(settings.models), pid=os.getpid())
    started(url, found)
    Server(config).run(sockets=[listening])
    settings.log("ended")


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises UsageError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(address, family=family, backlog=2048, dualstack_ipv6=both)
    except OSError as error:
        words, remedy = f"cannot listen on {host} port {port}", "Use another port; --port 0 picks a free one."
        why = (error.strerror or str(error)).partition(" (while ")[0]  # where create_server repeats the address
        raise UsageError(f"{words}: {why}", where="--port", remedy=remedy) from error


def access_of(
    host: str,
    key_file: Path | None,
    origins: Sequence[str],
    *,
    no_auth: bool,
    admin_key_file: Path | None = None,
    hosts: Sequence[str] = (),
) -> Access:
    """Return the access control. hosts: additional names of this server. Raises UsageError for a non-loopback address
    without a key, unless `no_auth` is set."""
    keys, admin_keys = (None if file is None else Keys(read_keys(file), file) for file in (key_file, admin_key_file))
    own = host in LOOPBACK
    if keys is None and not own and not no_auth:
        words = f"on {host}, anyone who can reach this machine could generate images"
        raise UsageError(words, where="--host", remedy="Add --api-key-file FILE, or --no-auth.")
    names = (*LOOPBACK, *(name.lower() for name in hosts)) if own or hosts else None
    return Access(keys, tuple(origin.rstrip("/") for origin in origins), names, admin_keys)
