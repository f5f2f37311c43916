"""LoRAs that clients send take a bounded room on the disk, and none once they are refused."""

from __future__ import annotations

import asyncio
import errno
import io
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from sdflow.errors import CheckpointError, PassError
from sdflow.serve.api_error import ApiError
from sdflow.serve.http.app import make_app
from sdflow.serve.http.loras import AT_ONCE, Loras
from sdflow.serve.http.models import Models
from sdflow.serve.http.settings import Settings
from sdflow.serve.jobs import WorkerOptions
from sdflow.serve.keys import Access
from sdflow.serve.limits import Limits

FILE = Path(__file__).parents[2] / "samples/loras/stripes.safetensors"
STRIPES = FILE.read_bytes()


class FullDisk(io.BytesIO):
    """Where copying ends as it does on a full disk."""

    def read(self, size: int | None = -1, /) -> bytes:
        raise OSError(errno.ENOSPC, "No space left on device")


def raising(error: Exception) -> Callable[[Path], None]:
    def require(path: Path) -> None:
        assert path.read_bytes() == STRIPES
        raise error

    return require


@pytest.mark.parametrize(
    ("content", "fit", "raised"),
    [
        (io.BytesIO(b"no LoRA at all"), None, "not a LoRA"),
        (io.BytesIO(STRIPES), CheckpointError("it fits nothing"), "it fits nothing"),
        (io.BytesIO(STRIPES), PassError("nobody foresaw it"), "nobody foresaw it"),
        (io.BytesIO(STRIPES), RuntimeError("nor this"), "nor this"),
        (FullDisk(), None, "the server's disk is full"),
    ],
)
def test_nothing_is_left_of_one_that_is_refused(
    tmp_path: Path, content: io.BytesIO, fit: Exception | None, raised: str
) -> None:
    loras = Loras(None, tmp_path)
    if fit is not None:
        loras.require_fit = raising(fit)
    for _ in range(2):
        with pytest.raises(Exception, match=raised):
            loras.add("ink", content)
        content.seek(0)
    (own,) = tmp_path.iterdir()
    assert list(own.iterdir()) == [] and loras.files() == {}
    loras.close()
    assert list(tmp_path.iterdir()) == []


def sent(client: httpx.AsyncClient, name: str, content: bytes = STRIPES) -> Any:
    return client.post("/v1/loras", files={"file": (f"{name}.safetensors", content)})


def with_server(work: Callable[[httpx.AsyncClient], Any], folder: Path, **limits: int) -> None:
    """A client of the application, with LoRAs in a folder of their own."""
    most = Limits(**limits)
    loras = Loras(None, folder, limits=most)
    settings = Settings(Models({}), WorkerOptions({}), Access(), most, loras, log=lambda event, **fields: None)
    transport = httpx.ASGITransport(app=make_app(settings))

    async def run() -> None:
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            await work(client)

    asyncio.run(run())
    loras.close()


def test_number_and_size_of_all_that_were_sent_are_bounded(tmp_path: Path) -> None:
    async def too_many(client: httpx.AsyncClient) -> None:
        for name in ("a", "b"):
            assert (await sent(client, name)).status_code == 201
        refused = await sent(client, "c")
        assert (refused.status_code, refused.json()["error"]["code"]) == (507, "no_room")
        assert "at most 2" in refused.json()["error"]["message"]
        assert (await client.delete("/v1/loras/a")).status_code == 200
        assert (await sent(client, "c")).status_code == 201

    async def too_large(client: httpx.AsyncClient) -> None:
        assert (await sent(client, "a")).status_code == 201
        assert (await sent(client, "b")).json()["error"]["code"] == "no_room"

        async def pieces() -> AsyncIterator[bytes]:  # without a length: as large as one may be
            raise AssertionError("it is refused before anything of it is read")
            yield b""

        headers = {"Content-Type": "multipart/form-data; boundary=x", "Transfer-Encoding": "chunked"}
        refused = await client.post("/v1/loras", content=pieces(), headers=headers)
        assert refused.status_code == 507

    with_server(too_many, tmp_path, uploads=2)
    with_server(too_large, tmp_path, upload_bytes=len(STRIPES) * 3 // 2)


def test_only_so_many_are_sent_at_a_time(tmp_path: Path) -> None:
    loras = Loras(None, tmp_path)
    with loras.receiving(10), loras.receiving(10):
        assert AT_ONCE == 2
        with pytest.raises(ApiError, match="Try again") as refused, loras.receiving(10):
            pass
        assert (refused.value.status, refused.value.headers) == (503, {"Retry-After": "5"})
    with loras.receiving(10):
        pass
    loras.close()


KILLED = """
import io, os, signal, sys
from pathlib import Path
from sdflow.serve.http.loras import Loras

def wait(path):
    print("looking", flush=True)
    signal.pause()

Loras(None, Path(sys.argv[1]), wait).add("ink", io.BytesIO(Path(sys.argv[2]).read_bytes()))
"""


def test_what_a_killed_server_left_is_removed_by_the_next(tmp_path: Path) -> None:
    """It is killed while it looks at one."""
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(FILE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"looking\n"
        process.kill()
    assert [path.suffix for path in tmp_path.glob("*/*")] == [".part"]
    Loras(None, tmp_path).close()
    assert list(tmp_path.iterdir()) == []
