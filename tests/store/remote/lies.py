"""A remote that lies in every way of `liar.py`, and a process that builds with it: what may come of that."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from .machines import Machine, make_action, server

ROOT = Path(__file__).parents[3]
TIMEOUT = 2.0
MEMORY = 400 << 20
"""Bytes of a process that builds with any of them: without a remote it has 80 MB, and JSON of 8 MB may become 200."""
HARMLESS = ("honest", "redirected_here")


@dataclass(frozen=True)
class Lies:
    """Where the liar is, where it finds what the test prepared, and the requests that another host got."""

    url: str
    elsewhere: list[str]


@contextmanager
def lying(folder: Path, signer: Any = None) -> Iterator[Lies]:
    """A liar with two finished actions."""
    machine = Machine(folder / "builder", str(folder / "shared"))
    if signer is not None:
        assert machine.cache.remote is not None
        machine.cache.remote._signer = signer
    for name in ("one", "two"):
        machine.build(make_action(name))
    asked: list[str] = []

    class Elsewhere(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as other:
        Thread(target=other.serve_forever, daemon=True).start()
        with server("liar.py", folder / "shared", f"localhost:{other.server_port}") as port:
            yield Lies(f"http://127.0.0.1:{port}", asked)
        other.shutdown()


def deceived(
    lies: Lies, folder: Path, cases: Sequence[tuple[str, str]], trust: Sequence[str] = (), store: str | None = None
) -> list[dict[str, Any]]:
    """What became of building with each of these lies: a kind, and what it is about. store: what stands before these in the
    remote's URL; by default the liar itself."""
    described = [
        {
            "url": f"{store or lies.url}/{kind}/{of}",
            "cache": str(folder / kind / of),
            "timeout": TIMEOUT,
            "trust": list(trust),
        }
        for kind, of in cases
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.store.remote.deceived"],
        input=json.dumps({"cases": described}),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def require_harmless(kind: str, of: str, found: dict[str, Any]) -> None:
    """Whatever the remote does, the build is right, whole and soon done, and what was wrong is told once."""
    case = f"{kind} of {of}: {found}"
    assert found["right"], case
    assert found["damaged"] == 0, case
    assert found["memory"] < MEMORY, case
    assert len(found["told"]) <= 1, case
    assert all(len(text) < 1000 for text in found["told"]), case
    if kind in HARMLESS:
        assert found["fetched"] == 2, case
        assert not found["told"], case
    else:
        assert found["fetched"] == 0, case
