"""A real registry (Debian's docker-registry) as a process on localhost, and what was uploaded to it."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

PROGRAM = "docker-registry"


@dataclass
class DockerRegistry:
    """host: localhost and its port. log: what it wrote of each request."""

    host: str
    log: Path

    def uploads(self) -> int:
        """Blobs that were sent since the last call."""
        text = self.log.read_text()
        self.log.write_text("")
        return len(re.findall(r'"PUT /v2/\S+/blobs/uploads/\S+ HTTP/1.1" 201', text))


@contextmanager
def docker_registry(folder: Path, users: str | None = None) -> Iterator[DockerRegistry]:
    """users: the content of an htpasswd file."""
    program = shutil.which(PROGRAM)
    if program is None:
        pytest.skip(f"{PROGRAM} is not installed: apt-get install docker-registry")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder.mkdir(parents=True)
    access = ""
    if users is not None:
        (folder / "users").write_text(users)
        access = f"auth: {{htpasswd: {{realm: tests, path: {folder / 'users'}}}}}\n"
    (folder / "config.yml").write_text(
        f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {folder / 'data'}}}}}\n"
        f"http: {{addr: 127.0.0.1:{port}}}\n{access}"
    )
    log = folder / "log"
    with log.open("ab") as stream:
        process = subprocess.Popen([program, "serve", folder / "config.yml"], stdout=stream, stderr=stream)
    try:
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield DockerRegistry(f"127.0.0.1:{port}", log)
    finally:
        process.terminate()
        process.wait()
