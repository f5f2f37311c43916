"""A remote cache on stand-ins for Azure's and Google's stores, each a process: Azurite (npm) and gcp-storage-emulator (PyPI).

    pip install adlfs gcsfs gcp-storage-emulator; pytest -m slow tests/store/remote/test_clouds.py

Azurite is taken from the PATH, else npm installs it into the test's folder.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from sdflow.store.remote import catalog

from .machines import Machine, make_action, require_a_round

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ACTION = make_action("served")
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's own, which its documentation names."""


@contextmanager
def started(command: Sequence[str], listens: str, folder: Path) -> Iterator[int]:
    """A server that prints where it listens; gives its port."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder) as process:
        try:
            assert process.stdout is not None
            told = []
            for line in process.stdout:
                told.append(line)
                if found := re.search(listens, line):
                    yield int(found[1])
                    return
            raise AssertionError(f"it does not listen: {told}")
        finally:
            process.kill()


@pytest.fixture
def azure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    adlfs = pytest.importorskip("adlfs", reason="pip install 'sdflow[az]'")
    program = shutil.which("azurite-blob")
    if program is None and (npm := shutil.which("npm")) is not None:
        install = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(tmp_path), "azurite"]
        if subprocess.run(install, capture_output=True).returncode == 0:
            program = str(tmp_path / "node_modules/.bin/azurite-blob")
    if program is None:
        pytest.skip("no azurite on this machine, and npm does not bring it")
    command = [program, "--blobPort", "0", "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry"]
    with started(command, r"listen\w+ \w+ http://127\.0\.0\.1:(\d+)", tmp_path) as port:
        endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
        said = f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={endpoint};"
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", said)
        adlfs.AzureBlobFileSystem(connection_string=said, skip_instance_cache=True).mkdir("team")
        yield "az://team/some/prefix"


@pytest.fixture
def google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    gcsfs = pytest.importorskip("gcsfs", reason="pip install 'sdflow[gs]'")
    pytest.importorskip("gcp_storage_emulator", reason="pip install gcp-storage-emulator")
    code = (
        "from gcp_storage_emulator.server import create_server\n"
        "server = create_server('127.0.0.1', 0, in_memory=True, default_bucket='team')\n"
        "server.start()\n"
        "print('port', server._api._httpd.server_port, flush=True)\n"
        "import sys; sys.stdin.read()\n"
    )
    with started([sys.executable, "-c", code], r"port (\d+)", tmp_path) as port:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        gcsfs.GCSFileSystem.clear_instance_cache()
        yield "gs://team/some/prefix"
        gcsfs.GCSFileSystem.clear_instance_cache()


@pytest.mark.parametrize("store", ["azure", "google"])
def test_a_round(store: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Pushed, fetched by another machine, listed, shrunk; what is damaged there is told."""
    url = request.getfixturevalue(store)
    one, other = Machine(tmp_path / "one", url), Machine(tmp_path / "other", url)
    require_a_round(url, one, other)
    third = Machine(tmp_path / "third", url)
    piece = max(third.remote.share.list("pieces"), key=lambda each: each.size)
    third.remote.share.write(piece.path, b"\0" * piece.size)
    assert third.fetch(ACTION) is None
    assert "returned wrong content" in third.told[0]
    assert catalog.sweep(other.remote.share, 3600.0).actions == 0
    assert catalog.sweep(other.remote.share, -60.0).actions == 1
    assert catalog.listed(other.remote.share) == []
    said = " ".join((*one.told, *other.told, *third.told))
    assert KEY not in said
