"""A server of static files that answers ranges, and fails in the ways that servers and connections do."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".mjs": "text/javascript"}
TYPES |= {".wasm": "application/wasm", ".json": "application/json"}
OTHER = "application/octet-stream"
BLOCK = 1 << 16


@dataclass
class FileServer:
    """cut: file -> how often its connection still ends in the middle. replaced: file -> its content instead; None: it is not
    there. slow: files that take a moment for each block. headers: of all answers. asked: the files that were asked for, and
    from which byte, in order."""

    folder: Path
    url: str = ""
    cut: dict[str, int] = field(default_factory=dict)
    replaced: dict[str, bytes | None] = field(default_factory=dict)
    slow: set[str] = field(default_factory=set)
    headers: dict[str, str] = field(default_factory=dict)
    asked: list[tuple[str, int]] = field(default_factory=list)

    def content(self, name: str) -> bytes | None:
        path = self.folder / name
        if name in self.replaced:
            return self.replaced[name]
        return path.read_bytes() if path.is_file() and path.parent == self.folder else None

    def healthy(self) -> None:
        """Nothing fails from now on, and nothing was asked for."""
        for each in (self.cut, self.replaced, self.slow, self.headers, self.asked):
            each.clear()


@contextmanager
def serving(folder: Path) -> Iterator[FileServer]:
    """On a port that the system chooses."""
    server = FileServer(folder)

    class Handler(_Handler):
        files = server

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        server.url = f"http://127.0.0.1:{listening.server_address[1]}/"
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield server
        listening.shutdown()


class _Handler(BaseHTTPRequestHandler):
    files: ClassVar[FileServer]

    def do_GET(self) -> None:
        name = self.path.partition("?")[0].strip("/") or "index.html"
        content = self.files.content(name)
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        begin = int(asked[1]) if asked else 0
        self.files.asked.append((name, begin))
        if content is None:
            return self._answer(404, {}, b"")
        if asked and begin >= len(content):
            return self._answer(416, {"Content-Range": f"bytes */{len(content)}"}, b"")
        head = {"Content-Type": TYPES.get(Path(name).suffix, OTHER)}
        if asked:
            head["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        if self.files.cut.get(name, 0):
            self.files.cut[name] -= 1
            return self._answer(206 if asked else 200, head, content[begin:], (len(content) - begin) // 2)
        return self._answer(206 if asked else 200, head, content[begin:], slow=name in self.files.slow)

    def _answer(
        self, status: int, head: Mapping[str, str], body: bytes, sent: int | None = None, *, slow: bool = False
    ) -> None:
        """sent: bytes after which the connection ends; None: all."""
        self.send_response(status)
        for key, value in {**head, **self.files.headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        try:
            for begin in range(0, len(body[:sent]), BLOCK):
                self.wfile.write(body[:sent][begin : begin + BLOCK])
                if slow:
                    self.wfile.flush()
                    time.sleep(0.1)
        except OSError:  # the browser went away
            pass
        self.close_connection = True

    def log_message(self, *given: object) -> None: ...
