"""A registry of our own that may lie: it serves one pipeline, and a test answers in its place where it wants to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from sdflow.manifest import read_manifest
from sdflow.oci.artifact import manifest_of
from tests.oci.pipelines import content_of

MANIFEST = "application/vnd.oci.image.manifest.v1+json"


@dataclass
class LyingRegistry:
    """manifest: what the tag has. blobs: digest -> content. answer: returns whether it has answered itself. sent: bytes of
    bodies. requests: their paths; authorizations: what came with them."""

    manifest: bytes
    blobs: dict[str, bytes]
    answer: Callable[[Handler], bool] = lambda handler: False
    sent: int = 0
    host: str = ""
    requests: list[str] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)

    @classmethod
    def of(cls, folder: Path) -> LyingRegistry:
        """An honest one that serves a pipeline."""
        files = content_of(folder)
        layers = {name: (sha256(content).hexdigest(), len(content)) for name, content in files.items()}
        manifest, config = manifest_of(read_manifest(folder), layers)
        return cls(manifest, {f"sha256:{sha256(each).hexdigest()}": each for each in (*files.values(), config)})

    @property
    def digest(self) -> str:
        return f"sha256:{sha256(self.manifest).hexdigest()}"


class Handler(BaseHTTPRequestHandler):
    """A request. registry: that it came to."""

    protocol_version = "HTTP/1.1"
    registry: LyingRegistry

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.registry.requests.append(self.path)
        self.registry.authorizations.append(self.headers.get("Authorization"))
        try:
            if self.registry.answer(self):
                return
            kind, _, name = self.path.rpartition("/")
            if kind.endswith("/manifests"):
                self.send(self.registry.manifest, {"Content-Type": MANIFEST})
            elif name in self.registry.blobs:
                self.send(self.registry.blobs[name])
            else:
                self.send(b'{"errors": [{"code": "BLOB_UNKNOWN", "message": "unknown"}]}', status=404)
        except OSError:  # the client has enough
            self.close_connection = True

    def send(self, body: bytes, headers: dict[str, str] | None = None, status: int = 200) -> None:
        self.begin({"Content-Length": str(len(body)), **(headers or {})}, status)
        if self.command != "HEAD":
            self.put(body)

    def begin(self, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def put(self, body: bytes) -> None:
        self.wfile.write(body)
        self.registry.sent += len(body)

    def cut(self) -> None:
        """Close the connection."""
        self.wfile.flush()
        self.close_connection = True


@contextmanager
def serving(registry: LyingRegistry) -> Iterator[LyingRegistry]:
    class Own(Handler):
        pass

    Own.registry = registry
    server = ThreadingHTTPServer(("127.0.0.1", 0), Own)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    registry.host = f"127.0.0.1:{server.server_port}"
    try:
        yield registry
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
