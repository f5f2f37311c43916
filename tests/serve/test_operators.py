"""What operators of a server rely on: keys of two kinds, pipelines that come and go, aliases, limits, a proxy, traces, draining.
One real server with all of it; the tests are in the order in which it ends."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from serve.conftest import SIZE, RunningServer, running_server
from started_python import StartedPython
from until import PATIENCE, until

from sdflow.errors import UsageError
from sdflow.serve.http.app import PAGE_FOLDER
from sdflow.serve.http.models import Models
from sdflow.serve.http.served_model import read_served

NGINX = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
LARGE = "256x256"


@dataclass
class Operated:
    """A server with its key files, and the spans that it sent."""

    server: RunningServer
    keys: Path
    spans: list[Any]

    def ask(self, method: str, path: str, key: str = "ann", **more: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}", **more.pop("headers", {})}
        return httpx.request(method, f"{self.server.url}{path}", headers=headers, timeout=PATIENCE, **more)

    def draw(self, size: str = SIZE, steps: int = 1, **more: Any) -> httpx.Response:
        key, headers = more.pop("key", "ann"), more.pop("headers", {})
        body = {"prompt": "a", "size": size, "steps": steps, "seed": 1, **more}
        return self.ask("POST", "/v1/images/generations", key, json=body, headers=headers)

    def log_of(self, answer: httpx.Response) -> dict[str, Any]:
        return self.server.wait_for(lambda line: line.get("id") == answer.headers["x-request-id"])


@contextmanager
def collector(spans: list[Any]) -> Iterator[str]:
    """Takes OTLP/HTTP traces."""

    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
            assert self.path == "/v1/traces"
            for resource in body.resource_spans:
                for scope in resource.scope_spans:
                    spans.extend(scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()


@pytest.fixture(scope="module")
def operated(
    tiny_pipeline: Path, started_python: StartedPython | None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Operated]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="install the extra `traces`")
    root, spans = tmp_path_factory.mktemp("operated"), list[Any]()
    for name in ("one", "two"):
        shutil.copytree(tiny_pipeline, root / "pipelines" / name)
    size = sum(path.stat().st_size for path in (root / "pipelines" / "one").glob("*/*"))
    keys, admin = root / "keys", root / "admin"
    keys.write_text("# those who generate\nann\nbob\n")
    admin.write_text("root\n")
    with collector(spans) as url:
        arguments = {
            "--pipeline-folder": root / "pipelines",
            "--pipeline-memory": 1.5 * size / 1e9,
            "--alias": "dall-e-3=one",
            "--default": "one",
            "--api-key-file": keys,
            "--admin-key-file": admin,
            "--allowed-host": "images.example",
            "--root-path": "/images",
            "--batch-sizes": "1,2",
            "--max-queue": 4,
            "--max-chunks": 4,
            "--max-cost": 40,
            "--traces": url,
        }
        options = [str(each) for pair in arguments.items() for each in pair]
        quick = {"OTEL_BSP_SCHEDULE_DELAY": "100"}
        with running_server(
            str(root / "pipelines" / "one"), *options, environment=quick, started=started_python
        ) as server:
            yield Operated(server, keys, spans)


def test_every_answer_and_its_log_line_have_an_id_and_probes_are_not_logged(operated: Operated) -> None:
    given = operated.draw(headers={"X-Request-ID": "from-a.proxy:7"})
    assert given.headers["x-request-id"] == "from-a.proxy:7"
    line = operated.log_of(given)
    assert (line["event"], line["status"], line["pipeline"]) == ("request", 200, "one")
    made = operated.ask("GET", "/nowhere", headers={"X-Request-ID": 'a "quoted" one'})
    assert len(made.headers["x-request-id"]) == 32 and made.status_code == 404
    refused = operated.ask("GET", "/v1/models", key="nobody")
    assert refused.status_code == 401 and operated.log_of(refused)["status"] == 401
    before = len(operated.server.lines)
    for probe in ("/healthz", "/readyz", "/metrics"):
        assert operated.ask("GET", probe).status_code == 200
    operated.log_of(operated.ask("GET", "/v1/models"))
    assert [line["path"] for line in operated.server.lines[before:]] == ["/images/v1/models"]


def test_browsers_are_told_what_the_page_may_do(operated: Operated) -> None:
    answer = httpx.get(f"{operated.server.url}/", timeout=PATIENCE)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
    assert (answer.headers["x-content-type-options"], answer.headers["x-frame-options"]) == ("nosniff", "DENY")
    assert "<script>" not in answer.text and " onclick=" not in answer.text and " style=" not in answer.text


def test_the_page_names_nothing_by_an_absolute_path() -> None:
    """So it works below a prefix. Its scripts are what is served, without a build step, and few enough to be read."""
    scripts = [path.read_text() for path in PAGE_FOLDER.glob("*.js")]
    assert sum(len(text.splitlines()) for text in scripts) < 1500
    for path in PAGE_FOLDER.iterdir():
        if path.suffix in (".html", ".js"):
            text = path.read_text()
            found = re.findall(r"""(?:href|src)="/[^"]*"|from "/[^"]*"|fetch\([`"']/[^)]*""", text)
            assert found == [], path.name


def test_an_alias_is_no_name_of_a_pipeline(tiny_pipeline: Path) -> None:
    with pytest.raises(UsageError, match="'tiny' is already the name of a pipeline"):
        Models({"tiny": read_served(tiny_pipeline, check=False)}, {"tiny": "tiny"})


def test_who_generates_may_not_administer_and_keys_are_read_again(operated: Operated) -> None:
    for method, path in (
        ("POST", "/v1/loras"),
        ("DELETE", "/v1/loras/x"),
        ("POST", "/v1/models"),
        ("DELETE", "/v1/models/one"),
    ):
        refused = operated.ask(method, path, json={"id": "two"} if method == "POST" else None)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_key_required"), path
    assert operated.ask("DELETE", "/v1/loras/x", key="root").status_code == 404
    assert operated.draw(key="root").status_code == 200
    operated.keys.write_text("bob\ncleo\n")
    assert [operated.ask("GET", "/v1/models", key).status_code for key in ("ann", "bob", "cleo")] == [401, 200, 200]
    operated.keys.write_text("")  # in the middle of being written
    assert operated.ask("GET", "/v1/models", "bob").status_code == 200
    operated.keys.write_text("ann\nbob\n")
    assert operated.ask("GET", "/v1/models").status_code == 200


def test_an_owner_stops_only_its_own_requests(operated: Operated) -> None:
    body = {"prompt": "a", "steps": 60, "width": 256, "height": 256, "seed": 3}

    def begun() -> tuple[Future[httpx.Response], Any]:
        future = pool.submit(operated.ask, "POST", "/sdapi/v1/txt2img", "ann", json=body)
        until(lambda: operated.ask("GET", "/sdapi/v1/progress").json()["state"]["sampling_step"] > 0)
        return future, operated.ask("GET", "/sdapi/v1/progress").json()

    with ThreadPoolExecutor(1) as pool:
        for key, stopped in (("bob", False), ("ann", True), ("root", True)):
            future, _ = begun()
            seen = operated.ask("GET", "/sdapi/v1/progress", key).json()
            assert bool(seen["state"]["job_count"]) is stopped and (stopped or seen["current_image"] is None), key
            assert operated.ask("POST", "/sdapi/v1/interrupt", key).status_code == 200
            state = operated.ask("GET", "/sdapi/v1/progress").json()["state"]
            assert bool(state["interrupted"] or not state["job_count"]) is stopped, key
            if not stopped:
                operated.ask("POST", "/sdapi/v1/interrupt", "root")
            assert future.result(PATIENCE).status_code == 200


def test_pipelines_have_aliases_and_clients_that_cannot_be_changed_get_the_default(operated: Operated) -> None:
    assert operated.ask("GET", "/v1/models/dall-e-3").json()["id"] == "one"
    assert operated.ask("GET", "/v1/models/gpt-image-1").status_code == 404, "which the default is not"
    for name in ("one", "dall-e-3", "gpt-image-1"):
        assert operated.log_of(operated.draw(model=name))["pipeline"] == "one"


def test_pipelines_are_added_unloaded_brought_back_read_again_and_removed(operated: Operated) -> None:
    """There is memory for one and a half: each of them makes room for the other."""
    assert operated.ask("POST", "/v1/models", "root", json={"id": "../one"}).status_code == 404
    folder = operated.keys.parent / "pipelines"
    (folder / "link").symlink_to(folder / "two")
    for wrong, says in (("link", "a link to the pipeline two"), ("dall-e-3", "is an alias")):
        refused = operated.ask("POST", "/v1/models", "root", json={"id": wrong})
        assert refused.status_code == 400 and says in refused.json()["error"]["message"]
    (folder / "link").unlink()
    first = operated.draw()
    added = operated.ask("POST", "/v1/models", "root", json={"id": "two"})
    assert added.status_code == 201 and added.json()["sdflow"]["max_pixels"] > 0
    assert [each["id"] for each in operated.ask("GET", "/v1/models").json()["data"]] == ["one", "two"]
    operated.server.wait_for(lambda line: line.get("event") == "unloaded" and line["pipeline"] == "one")
    seen = len(operated.server.lines)
    assert operated.log_of(operated.draw(model="two"))["pipeline"] == "two"
    with ThreadPoolExecutor(4) as pool:  # both are wanted at once, and neither waits for ever
        drawn = list(pool.map(lambda name: operated.draw(model=name), ["one", "two", "one", "two"]))
    assert [each.status_code for each in drawn] == [200] * 4
    operated.server.wait_for(lambda line: line.get("event") == "loaded" and line["pipeline"] == "one", seen)
    assert drawn[0].json()["data"][0]["b64_json"] == first.json()["data"][0]["b64_json"]
    assert operated.ask("POST", "/v1/models", "root", json={"id": "one"}).status_code == 201, "it is read again"
    two, layers = {"sd_model_checkpoint": "two"}, {"CLIP_stop_at_last_layers": 2}
    for key, wanted in (("bob", two), ("ann", layers)):
        assert operated.ask("POST", "/sdapi/v1/options", key, json=wanted).status_code == 200
    assert operated.ask("DELETE", "/v1/models/two", "root").json()["deleted"] is True
    found = {key: operated.ask("GET", "/sdapi/v1/options", key).json() for key in ("ann", "bob")}
    assert [each["sd_model_checkpoint"] for each in found.values()] == ["one", "one"], "two is not there any more"
    assert [each["CLIP_stop_at_last_layers"] for each in found.values()] == [2, 1]
    assert operated.ask("POST", "/sdapi/v1/options", "ann", json={"CLIP_stop_at_last_layers": 1}).status_code == 200
    assert operated.ask("DELETE", "/v1/models/two", "root").status_code == 404
    assert operated.log_of(operated.draw(model="two"))["pipeline"] == "one", "the default"


def test_what_a_request_may_cost_is_bounded(operated: Operated) -> None:
    long = " BREAK ".join("abcd" * 2)
    for fields, param, says in (
        ({"prompt": long, "prompt_syntax": "a1111"}, "prompt", "has 8 chunks of 75 tokens"),
        ({"prompt": "word, " * 400, "prompt_syntax": "a1111"}, "prompt", "chunks of 75 tokens; at most 4 are allowed"),
        ({"size": "512x512", "steps": 100, "n": 4}, None, "the maximum is 40"),
    ):
        refused = operated.draw(**fields)
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, param), error
        assert says in error["message"]
    assert operated.draw(prompt="a BREAK b BREAK c", prompt_syntax="a1111").status_code == 200


def test_a_small_image_waits_for_steps_of_large_ones_and_not_for_all_of_them(operated: Operated) -> None:
    operated.draw(LARGE), operated.draw()  # their sessions are there
    steps: list[float] = []

    def large() -> None:
        body = {"prompt": "a", "size": LARGE, "steps": 12, "stream": True, "progress": True}
        url, headers = f"{operated.server.url}/v1/images/generations", {"Authorization": "Bearer bob"}
        with httpx.stream("POST", url, json=body, headers=headers, timeout=PATIENCE) as answer:
            for line in answer.iter_lines():
                if line == "event: image_generation.progress":
                    steps.append(time.monotonic())

    both = [threading.Thread(target=large) for _ in range(2)]
    for each in both:
        each.start()
    until(lambda: len(steps) > 0)
    begun = len(steps)
    assert operated.draw(steps=2).status_code == 200
    meanwhile = len(steps) - begun
    for each in both:
        each.join(PATIENCE)
    assert meanwhile <= 4, f"{meanwhile} of {len(steps)} steps were done before the small image"


def test_retry_after_is_what_the_queue_takes(operated: Operated) -> None:
    begun = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(operated.draw, LARGE, 12) for _ in range(4)]
        until(lambda: operated.server.metrics("sdflow_drawing_images", Authorization="Bearer ann") > 0)
        while (refused := operated.draw()).status_code == 200:
            assert time.monotonic() - begun < PATIENCE
        asked, said = time.monotonic(), int(refused.headers["retry-after"])
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        until(lambda: any(each.done() for each in running))
        needed = time.monotonic() - asked
        assert all(each.result(PATIENCE).status_code == 200 for each in running)
    assert needed / 3 - 1 <= said <= 3 * needed + 2, f"{said} s said, {needed:.1f} s needed"


def test_spans_are_sent_where_a_collector_is_named(operated: Operated) -> None:
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    operated.draw(n=2, headers={"traceparent": f"00-{trace}-{parent}-01"})

    def mine() -> list[Any]:
        return [span for span in operated.spans if span.trace_id.hex() == trace]

    until(lambda: any(span.kind == 2 for span in mine()))
    (request,) = [span for span in mine() if span.kind == 2]
    assert (request.name, request.parent_span_id.hex()) == ("POST /v1/images/generations", parent)
    below = [span for span in mine() if span.parent_span_id == request.span_id]
    assert sorted(span.name for span in below) == ["generate", "generate", "queue", "queue"]
    for span in below:
        assert request.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano


def test_metrics_tell_pipelines_statuses_and_the_queue_apart(operated: Operated) -> None:
    def count(name: str) -> float:
        return operated.server.metrics(name, Authorization="Bearer ann")

    path = 'path="/v1/images/generations"'
    assert count(f'sdflow_request_seconds_count{{{path},pipeline="one",status="200"}}') > 1
    assert count(f'sdflow_request_seconds_count{{{path},pipeline="",status="400"}}') > 0
    assert count('sdflow_queue_seconds_count{pipeline="one"}') > 1


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed: apt-get install nginx-light")
def test_nginx_in_front_limits_rates_and_passes_the_rest_on(operated: Operated, tmp_path: Path) -> None:
    """The configuration that is shipped, without TLS; and once more below a path."""
    shipped = (Path(__file__).parents[2] / "integrations" / "server" / "nginx.conf").read_text()
    port, below = free_port(), free_port()
    lines = [line for line in shipped.splitlines() if "ssl_certificate" not in line]
    made = "\n".join(lines).replace("listen 443 ssl", f"listen 127.0.0.1:{port}")
    made = made.replace("127.0.0.1:8000", operated.server.url.removeprefix("http://")).replace(
        "rate=30r/m", "rate=2r/m"
    )
    made = made.replace("burst=10", "burst=2").replace("images.example.org", "images.example")
    passed = "\n".join(line for line in lines if line.lstrip().startswith(("proxy_http", "proxy_set", "proxy_buf")))
    prefix = f"server {{ listen 127.0.0.1:{below}; {passed}\n location /images/ {{ proxy_pass http://sdflow/; }} }}"
    temporary = " ".join(
        f"{kind}_temp_path {tmp_path}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    http = f"http {{ access_log off; {temporary}\n{made}\n{prefix}\n}}"
    user = "user root;" if os.getuid() == 0 else ""
    (tmp_path / "nginx.conf").write_text(
        f"{user} daemon off; pid {tmp_path}/pid; error_log stderr; events {{}}\n{http}\n"
    )
    assert NGINX is not None
    with subprocess.Popen([NGINX, "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf")]) as process:
        try:
            headers = {"Host": "images.example", "Authorization": "Bearer bob", "X-Forwarded-For": "6.6.6.6"}
            url = f"http://127.0.0.1:{port}"
            until(lambda: reachable(port))
            models = httpx.get(f"{url}/v1/models", headers=headers, timeout=PATIENCE)
            assert models.status_code == 200 and operated.log_of(models)["client"] == "127.0.0.1", "as nginx saw it"
            own = {**headers, "Origin": "http://images.example"}
            assert httpx.get(f"{url}/v1/models", headers=own, timeout=PATIENCE).status_code == 200
            assert httpx.get(f"{url}/metrics", headers=headers, timeout=PATIENCE).status_code == 200, (
                "from this machine"
            )
            body = {"prompt": "a", "size": SIZE, "steps": 1}
            statuses = [
                httpx.post(f"{url}/v1/images/generations", json=body, headers=headers, timeout=PATIENCE).status_code
                for _ in range(4)
            ]
            assert statuses == [200, 200, 200, 429]
            page = httpx.get(f"http://127.0.0.1:{below}/images/", timeout=PATIENCE)
            assert page.status_code == 200
            document = httpx.get(f"http://127.0.0.1:{below}/images/openapi.json", headers=headers, timeout=PATIENCE)
            assert document.json()["servers"] == [{"url": "/images"}]
        finally:
            process.terminate()


def free_port() -> int:
    import socket

    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        port: int = made.getsockname()[1]
        return port


def reachable(port: int) -> bool:
    import socket

    with socket.socket() as made:
        return made.connect_ex(("127.0.0.1", port)) == 0


def test_a_server_that_is_to_end_says_so_and_finishes_what_it_has_begun(operated: Operated) -> None:
    server = operated.server
    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(operated.draw, LARGE, 24)
        until(lambda: server.metrics("sdflow_drawing_images", Authorization="Bearer ann") > 0)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for(lambda line: line["event"] == "draining")
        probe = operated.ask("GET", "/readyz")
        assert (probe.status_code, probe.json()["status"]) == (503, "draining")
        refused = operated.draw()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert operated.ask("GET", "/healthz").status_code == 200
        assert last.result(PATIENCE).status_code == 200
    assert server.process.wait(PATIENCE) == 0
    server.wait_for(lambda line: line["event"] == "ended")
    assert server.others == [], "all that it wrote is JSON"
