"""A worker that dies, a server that is told to end, requests that take too long; a server with a certificate."""

from __future__ import annotations

import datetime
import ipaddress
import json
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from serve.conftest import SIZE, RunningServer, running_server
from started_python import StartedPython
from until import PATIENCE, until

from sdflow.cli.serve import serve
from sdflow.errors import UsageError
from sdflow.families.shared.approximation import EXACT
from sdflow.manifest import MANIFEST_FILE
from sdflow.serve.http.served_model import read_served
from sdflow.serve.http.server import listen

LONG = {"prompt": "a", "steps": 150, "n": 4, "stream": True, "progress": True, "size": "256x256"}
DRAWN = "sdflow_images_total"


@pytest.fixture(scope="module")
def own(tiny_pipeline: Path, started_python: StartedPython | None) -> Iterator[RunningServer]:
    """A server that these tests may hurt, over HTTPS. One image at a time, with a key."""
    key, certificate, certificate_key = (tiny_pipeline.parent / name for name in ("key", "cert.pem", "cert_key.pem"))
    key.write_text("secret\n")
    write_certificate(certificate, certificate_key)
    options = ("--batch-sizes", "1", "--api-key-file", str(key), "--log-prompts")
    tls = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(certificate_key))
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("SSL_CERT_FILE", str(certificate))  # what httpx trusts
        with running_server(str(tiny_pipeline), *options, *tls, started=started_python) as made:
            assert made.url.startswith("https://127.0.0.1:")
            yield made


def write_certificate(path: Path, key_path: Path) -> None:
    """Of 127.0.0.1, signed by itself."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    made = made.not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    signed = made.add_extension(address, critical=False).sign(key, hashes.SHA256())
    path.write_bytes(signed.public_bytes(Encoding.PEM))
    key_path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def post(server: RunningServer, **fields: object) -> httpx.Response:
    body = {"prompt": "a", "size": SIZE, "steps": 1, **fields}
    headers = {"Authorization": "Bearer secret"}
    return httpx.post(f"{server.url}/v1/images/generations", json=body, headers=headers, timeout=PATIENCE)


def ask(url: str, **options: Any) -> httpx.Response:
    return httpx.get(url, timeout=PATIENCE, **options)


def test_only_who_has_the_key_is_answered(own: RunningServer) -> None:
    url = f"{own.url}/v1/models"
    assert ask(url, headers={"Authorization": "Bearer secret"}).status_code == 200
    assert ask(url, auth=("any", "secret")).status_code == 200
    for headers in ({}, {"Authorization": "Bearer secre"}, {"Authorization": "Basic !"}, {"Authorization": "Bearer é"}):
        refused = ask(url, headers=[(k.encode(), v.encode()) for k, v in headers.items()])
        assert refused.status_code == 401
        assert refused.json()["error"]["type"] == "authentication_error"
    assert ask(f"{own.url}/healthz").status_code == 200
    assert ask(f"{own.url}/metrics").status_code == 401


def test_prompts_are_logged_where_that_is_asked_for(own: RunningServer) -> None:
    assert post(own, prompt="a green square").status_code == 200
    own.wait_for(lambda line: line["event"] == "request" and line.get("prompt") == "a green square")


def test_a_crash_is_answered_and_the_worker_comes_back(own: RunningServer) -> None:
    """To a request that is being streamed. One that waits behind it is drawn by the next worker, which is held up, so that it is
    not ready before it is asked. Both are of one size: another size has places of its own and would be begun beside it."""
    begun, losses = len(own.lines), "sdflow_worker_losses_total"
    headers = {"Authorization": "Bearer secret"}
    before = own.metrics(losses, **headers)
    url = f"{own.url}/v1/images/generations"
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(post(own, size=LONG["size"])))
    server, drawn = psutil.Process(own.process.pid), own.metrics(DRAWN, **headers)

    def taken() -> float:
        """Images that wait, are drawn, or are there by now."""
        at_work = own.metrics("sdflow_waiting_images", **headers) + own.metrics("sdflow_drawing_images", **headers)
        return at_work + own.metrics(DRAWN, **headers) - drawn

    with httpx.stream("POST", url, json=LONG, headers=headers, timeout=PATIENCE) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "event: image_generation.progress"
        asking.start()
        until(lambda: taken() == LONG["n"] + 1)
        known = server.children()
        own.worker().kill()
        until(lambda: any(each not in known for each in server.children()))
        (held,) = (each for each in server.children() if each not in known)
        held.suspend()
        assert "event: error" in list(lines)
    own.wait_for(lambda line: line["event"] == "worker_lost", begun)
    unready = post(own)
    assert (unready.status_code, unready.json()["error"]["code"]) == (503, "not_ready")
    assert int(unready.headers["retry-after"]) > 0
    assert ask(f"{own.url}/readyz").status_code == 503
    held.resume()
    own.wait_until_ready(begun)
    asking.join(PATIENCE)
    assert [answer.status_code for answer in answers] == [200]
    assert post(own).status_code == 200
    assert own.metrics(losses, **headers) == before + 1


@pytest.mark.slow  # `terminate` does the same (test_deploy)
def test_sigterm_finishes_what_was_begun(tiny_pipeline: Path) -> None:
    arguments = (str(tiny_pipeline), "--batch-sizes", "1", "--deadline", "200")
    with running_server(*arguments) as server:
        body = {**LONG, "n": 1, "size": SIZE, "steps": 40, "scheduler": "ddim"}
        with httpx.stream("POST", f"{server.url}/v1/images/generations", json=body, timeout=PATIENCE) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            assert "event: image_generation.completed" in list(lines)
        assert server.process.wait(PATIENCE) == 0
        assert server.lines[-1]["event"] == "ended"


@pytest.mark.slow  # a server of its own; the deadline itself is in test_drawing
def test_what_takes_too_long_is_given_up(tiny_pipeline: Path) -> None:
    with running_server(str(tiny_pipeline), "--batch-sizes", "1", "--deadline", "1") as server:
        body = {"prompt": "a", "n": 10, "steps": 150}
        answer = httpx.post(f"{server.url}/v1/images/generations", json=body, timeout=PATIENCE)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline")
        until(lambda: server.metrics("sdflow_drawing_images") == 0)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"host": "0.0.0.0"}, "anyone who can reach this machine could generate images"),
        ({"require_verified": True}, "it was not verified when built"),
        ({"pipeline": 2}, "another pipeline has the name tiny"),
        ({"batch_sizes": "1,x"}, "is not a list of batch sizes"),
        ({"ssl_keyfile": Path(__file__)}, "requires a certificate"),
        ({"ssl_certfile": Path(__file__)}, "is not a certificate that matches its key"),
    ],
)
def test_what_cannot_be_served_is_told_at_once(tiny_pipeline: Path, options: dict[str, Any], says: str) -> None:
    folders = [tiny_pipeline] * options.pop("pipeline", 1)
    with pytest.raises(UsageError, match=says):
        serve(folders, port=0, **options)


def test_a_file_without_a_key_is_told_at_once(tiny_pipeline: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("\n")
    with pytest.raises(UsageError, match="contains no key"):
        serve([tiny_pipeline], port=0, api_key_file=key)


def test_what_is_no_pipeline_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not an sdflow pipeline"):
        serve([tmp_path], port=0)


def test_a_port_in_use_is_told(tiny_pipeline: Path) -> None:
    with listen("127.0.0.1", 0) as used:
        port = used.getsockname()[1]
        with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1 port {port}"):
            serve([tiny_pipeline], port=port)


def test_what_a_workflow_says_of_less_work_is_left_aside_and_told(
    tiny_pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the start, of the pipeline that it is said of; and in `/v1/models`."""
    folder = shutil.copytree(tiny_pipeline, tmp_path / "hasty", symlinks=True)
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    (folder / MANIFEST_FILE).write_text(json.dumps({**manifest, "generate": {"reuse": {"every": 2}}}))
    with listen("127.0.0.1", 0) as used, pytest.raises(UsageError, match="cannot listen"):
        serve([tiny_pipeline, folder], port=used.getsockname()[1])
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    (told,) = (line for line in lines if line["event"] == "exact")
    assert told["pipeline"] == "hasty" and "reuse every=2" in told["what"]
    found: Any = read_served(folder).to_json()["sdflow"]
    assert found["left_aside"]["reuse"]["every"] == 2
    assert read_served(tiny_pipeline).left_aside == EXACT
