"""A small server on localhost that speaks the part of the hub's API that downloads use.

The API: https://huggingface.co/docs/hub/api; what the headers mean: huggingface_hub's file_download.py.
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LARGE = 100_000  # bytes; larger files are served as LFS files are: by a redirect to another path


@dataclass
class Hub:
    """Repositories by name: commit -> path -> content; refs: name -> commit. `requests` are "METHOD path"."""

    repositories: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    cut_after: int | None = None  # close the connection once, after so many bytes of a large file
    requests: list[str] = field(default_factory=list)
    url: str = ""
    cdn: str = ""  # another host name, as the hub has it: the client does not follow redirects to it for HEAD


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    taking = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:
            path = self.path.split("?")[0]
            hub.requests.append(f"{self.command} {path}")
            if match := re.fullmatch(r"/cdn/([^/]+/[^/]+)/(\w+)/(.+)", path):
                return self.content(hub.repositories[match[1]][match[2]][match[3]], {}, body)
            api = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/([^/]+)", path)
            file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
            match = api or file
            if match is None or match[1] not in hub.repositories:
                return self.fail(404 if match else 400, "RepoNotFound")
            if match[1] in hub.gated and self.headers.get("Authorization") != "Bearer secret" and file:
                return self.fail(401, "GatedRepo")
            revision = match[3] if api else match[2]
            commit = hub.refs.get(revision, revision)
            files = hub.repositories[match[1]].get(commit)
            if files is None:
                return self.fail(404, "RevisionNotFound")
            if api:
                return self.json(self.info(match[1], commit, files) if match[2] == "revision" else self.tree(files))
            if match[3] not in files:
                return self.fail(404, "EntryNotFound")
            content = files[match[3]]
            etag = hashlib.sha256(content).hexdigest() if len(content) > LARGE else hashlib.sha1(content).hexdigest()
            headers = {"X-Repo-Commit": commit, "ETag": f'"{etag}"'}
            if len(content) <= LARGE:
                return self.content(content, headers, body)
            headers |= {"X-Linked-Size": str(len(content)), "X-Linked-Etag": f'"{etag}"'}
            self.send_response(302)
            headers |= {"Location": f"{hub.cdn}/cdn/{match[1]}/{commit}/{match[3]}", "Content-Length": "0"}
            for name, value in headers.items():
                self.send_header(name, value)
            return self.end_headers()

        def info(self, name: str, commit: str, files: dict[str, bytes]) -> dict[str, object]:
            return {"id": name, "modelId": name, "sha": commit, "siblings": [{"rfilename": path} for path in files]}

        def tree(self, files: dict[str, bytes]) -> list[dict[str, object]]:
            return [
                {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                | (
                    {"lfs": {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}}
                    if len(content) > LARGE
                    else {}
                )
                for path, content in files.items()
            ]

        def json(self, value: object) -> None:
            self.content(json.dumps(value).encode(), {"Content-Type": "application/json"}, body=True)

        def fail(self, status: int, code: str) -> None:
            self.send_response(status)
            if code:
                self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def content(self, content: bytes, headers: dict[str, str], body: bool) -> None:
            begin = 0
            if wanted := re.fullmatch(r"bytes=(\d+)-\d*", self.headers.get("Range", "")):
                begin = int(wanted[1])
                headers = headers | {"Content-Range": f"bytes {begin}-{len(content) - 1}/{len(content)}"}
            self.send_response(206 if wanted else 200)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content) - begin))
            self.end_headers()
            if not body:
                return
            with taking:  # requests come side by side, and one of them is cut
                after = hub.cut_after if len(content) > LARGE else None
                if after is not None:
                    hub.cut_after = None
            if after is not None:
                self.wfile.write(content[begin : begin + after])
                self.close_connection = True
                return
            self.wfile.write(content[begin:])

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    hub.cdn = f"http://localhost:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
