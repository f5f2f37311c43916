"""An HTTP proxy before a server that does harm, as a process: prints its port.

Its second argument is a file with JSON, read at each request: {"kind": …, "of": part of the path, "first": how many requests
of these pass before, "times": how many are harmed}. Kinds: drop (the line breaks in the middle), delay (of `seconds`),
truncate (a shorter body that says it is whole), flip (a bit), and a status such as 403.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

UPSTREAM, FAULT = int(sys.argv[1]), Path(sys.argv[2])
counts: dict[str, int] = {}
lock = threading.Lock()


def fault_of(method: str, path: str) -> dict:
    fault = json.loads(FAULT.read_text())
    if not fault or fault.get("of", "") not in path or fault.get("method", method) != method:
        return {}
    with lock:
        key = json.dumps(fault)
        counts[key] = counts.get(key, 0) + 1
        first = fault.get("first", 0)
        return fault if first < counts[key] <= first + fault.get("times", 10**9) else {}


class Line(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def forward(self) -> None:
        sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = fault_of(self.command, self.path)
        kind = fault.get("kind")
        if isinstance(kind, int):
            self.send_response(kind)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if kind == "delay":
            time.sleep(fault["seconds"])
        upstream = http.client.HTTPConnection("127.0.0.1", UPSTREAM)
        upstream.request(self.command, self.path, sent, dict(self.headers))
        answer = upstream.getresponse()
        body = answer.read()
        length = len(body)
        if kind == "truncate":
            body = body[: len(body) // 2]
            length = len(body)
        if kind == "flip" and body:
            body = body[:-1] + bytes([body[-1] ^ 4])
        if kind == "drop":
            body = body[: len(body) // 2]
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        self.send_header(
            "Content-Length", answer.getheader("Content-Length", "0") if self.command == "HEAD" else str(length)
        )
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        if kind == "drop":
            self.close_connection = True

    do_GET = do_HEAD = do_PUT = do_DELETE = do_POST = forward

    def log_message(self, *args: object) -> None:
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Line)
    print(server.server_port, flush=True)
    server.serve_forever()
