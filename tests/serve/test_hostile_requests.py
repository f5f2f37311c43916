"""Whatever a request holds, the answer is one of the API: never a 500, never an exception that reaches the server."""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sdflow.serve.http.api_document import ONE_PIXEL
from sdflow.serve.http.app import Hear, make_app
from sdflow.serve.http.loras import Loras
from sdflow.serve.http.models import Models
from sdflow.serve.http.openai_fields import Edit
from sdflow.serve.http.served_model import read_served
from sdflow.serve.http.settings import Settings
from sdflow.serve.http.webui_fields import FromImage
from sdflow.serve.jobs import Cancel, Drawn, Job, Ready, WorkerOptions
from sdflow.serve.keys import Access, Keys
from sdflow.serve.limits import Limits

Ask = Callable[..., tuple[int, dict[bytes, bytes], bytes]]
"""Method, path, headers, body -> status, headers, body."""


class DrawsAtOnce:
    """In the place of the worker: what is tested here is what comes before it."""

    def __init__(self, hear: Hear) -> None:
        self._hear = hear

    def start(self) -> None:
        self._hear(Ready({"tiny": {}}))

    def send(self, message: Job | Cancel) -> None:
        if isinstance(message, Job):
            self._hear(Drawn(message.request, message.index, b64decode(ONE_PIXEL), (1, 1), None, {}))

    def end(self) -> None: ...


@pytest.fixture(scope="module")
def ask(tiny_pipeline: Path) -> Iterator[Ask]:
    """The whole application, with a key, asked as uvicorn asks it. The log is written as in a server, and thrown away."""
    loras, log = Loras(None), list[str]()

    def write(event: str, **fields: Any) -> None:
        log[:] = [json.dumps({"event": event, **fields}, ensure_ascii=False)]

    options = Settings(
        Models({"tiny": read_served(tiny_pipeline)}),
        WorkerOptions({}),
        Access(Keys(("kéy",))),
        Limits(),
        loras,
        log_prompts=True,
        log=write,
    )
    loop = asyncio.new_event_loop()
    app = make_app(options, DrawsAtOnce)
    # The lifespan's messages come from queues, as a server's do.
    coming: asyncio.Queue[Any] = asyncio.Queue()
    said: asyncio.Queue[Any] = asyncio.Queue()
    living = loop.create_task(app({"type": "lifespan", "state": {}}, coming.get, said.put))

    async def passed(kind: str) -> None:
        await coming.put({"type": f"lifespan.{kind}"})
        assert (await said.get())["type"] == f"lifespan.{kind}.complete"

    loop.run_until_complete(passed("startup"))

    def asked(
        method: str, target: str, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> tuple[int, dict[bytes, bytes], bytes]:
        path, _, query = target.partition("?")
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(path),  # as uvicorn does
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": query.encode(),
            "headers": [(b"host", b"localhost"), *headers],
            "server": ("localhost", 80),
            "client": ("127.0.0.1", 1),
        }
        sent: list[Any] = []
        pieces = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if not pieces:
                await asyncio.sleep(60)
            return pieces.pop()

        async def send(message: Any) -> None:
            sent.append(message)

        loop.run_until_complete(app(scope, receive, send))
        answer = b"".join(each.get("body", b"") for each in sent[1:])
        return sent[0]["status"], dict(sent[0]["headers"]), answer

    yield asked
    loop.run_until_complete(passed("shutdown"))
    loop.run_until_complete(living)
    loop.close()


KEY = (b"authorization", "Bearer kéy".encode())
JSON = (b"content-type", b"application/json")
DRAWING = ("/v1/images/generations", "/sdapi/v1/txt2img", "/sdapi/v1/img2img", "/sdapi/v1/options")
FORMS = ("/v1/images/edits", "/v1/loras")
PATHS = (
    "/",
    "/v1/models",
    "/v1/models/{}",
    "/v1/loras",
    "/v1/loras/{}",
    "/readyz",
    "/metrics",
    "/page/{}",
    "/{}",
    "/docs",
)

texts = st.one_of(
    st.text(max_size=30),
    st.text(st.characters(categories=["Cs", "Cc", "Lo"]), max_size=5),
    st.sampled_from(
        [
            "",
            "\0",
            "\ud800",
            "64x64",
            "99999x99999",
            "é",
            "../x",
            "<lora:a:nan>",
            "<lora:\ud800:1>",
            "data:,",
            ONE_PIXEL,
        ]
    ),
)
values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.sampled_from([10**400, -(10**400), 2**63, 2**64, 0, -1]),
        st.floats(),
        texts,
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
NAMES = sorted({*Edit.model_fields, *FromImage.model_fields})
bodies = st.fixed_dictionaries(
    {"prompt": st.just("a") | values, "init_images": st.just([ONE_PIXEL]) | values},
    optional={name: values for name in NAMES if name not in ("prompt", "init_images")},
) | st.dictionaries(st.sampled_from(NAMES) | texts, values, max_size=6)


def spelled(body: Any) -> bytes:
    """As JSON, with NaN and halves of characters as Python spells them."""
    return json.dumps(body).encode()


def require_answer(found: tuple[int, dict[bytes, bytes], bytes]) -> None:
    """One of the API: no 500, and every error in its form."""
    status, headers, body = found
    assert status < 500 or (status == 503 and b"retry-after" in headers), body
    if status >= 400:
        said = json.loads(body)
        assert said.get("detail") or said["error"]["message"]  # A1111's API has the webui's form


HOSTILE = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@HOSTILE
@given(path=st.sampled_from(DRAWING), body=bodies)
def test_no_field_of_a_request_breaks_the_server(ask: Ask, path: str, body: Any) -> None:
    require_answer(ask("POST", path, [KEY, JSON], spelled(body)))


@HOSTILE
@given(
    path=st.sampled_from(FORMS),
    parts=st.lists(
        st.tuples(
            st.sampled_from([*NAMES, "image", "image[]", "mask", "file", "name"]) | texts,
            texts | values,
            texts | st.none(),
        ),
        max_size=6,
    ),
    broken=st.sampled_from(
        [b"", b"\0", b"--", b"--x--", b"--x\r\n", b'--x\r\nContent-Disposition: form-data; name="a', b"\xff" * 9]
    ),
)
def test_no_form_breaks_the_server(
    ask: Ask, path: str, parts: list[tuple[str, Any, str | None]], broken: bytes
) -> None:
    body = b""
    for name, value, file in parts:
        text = value if isinstance(value, str) else json.dumps(value)
        name, text, filename = (each.encode("utf-8", "surrogatepass") for each in (name, text, file or ""))
        named = b'; filename="' + filename + b'"' if file is not None else b""
        body += b'--x\r\nContent-Disposition: form-data; name="' + name + b'"' + named + b"\r\n\r\n" + text + b"\r\n"
    kind = (b"content-type", b"multipart/form-data; boundary=x")
    require_answer(ask("POST", path, [KEY, kind], body + b"--x--\r\n"))
    require_answer(ask("POST", path, [KEY, kind], body + broken))


@HOSTILE
@given(
    method=st.sampled_from(["GET", "HEAD", "POST", "DELETE", "OPTIONS", "PUT", "X"]),
    path=st.sampled_from(PATHS + DRAWING + FORMS),
    name=texts.map(lambda text: quote(text.encode("utf-8", "surrogatepass"))) | st.binary(max_size=9).map(quote),
    query=st.text(st.characters(max_codepoint=127, min_codepoint=33), max_size=20),
    headers=st.lists(
        st.tuples(
            st.sampled_from([b"origin", b"authorization", b"content-type", b"content-length", b"accept", b"range", b"cookie",
                             b"if-none-match", b"if-modified-since", b"access-control-request-method", b"expect"]),
            st.binary(max_size=20) | st.sampled_from([b"Basic \xe9", b"Basic", b"Bearer \xff", b"9" * 5000, b"-1", b"\xb2",
                                                      b"multipart/form-data", b"multipart/form-data; boundary=\xff", b"http://["]),
        ),
        max_size=4,
    ),
    body=st.binary(max_size=50),
)  # fmt: skip
def test_no_head_breaks_the_server(
    ask: Ask, method: str, path: str, name: str, query: str, headers: list[tuple[bytes, bytes]], body: bytes
) -> None:
    target = f"{path.format(name)}?{query}"
    for sent in ([KEY, *headers], headers):
        found = ask(method, target, sent, body)
        assert found[0] < 500 or found[0] == 503, found


@pytest.mark.parametrize("kind", ["Basic é", "Basic !", "Basic w6k=", "Basic", "Bearer", "Bearer kéy\xff", "\xff \xff"])
def test_a_key_that_is_none_is_wrong(ask: Ask, kind: str) -> None:
    assert ask("GET", "/v1/models", [(b"authorization", kind.encode("latin-1"))], b"")[0] == 401


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 200_000,
        b'{"prompt":' * 50_000,
        b'{"prompt": "a", "seed": ' + b"9" * 100_000 + b"}",
        b'{"prompt": "a", "steps": 1e999999}',
        b'{"prompt": "a", "guidance_scale": NaN}',
        b'{"prompt": "a", "prompt": "b", "n": 1, "n": 2}',
        b'{"prompt": "a", "\\ud800": 1}',
        b'{"prompt": "\\u0000"}',
        b"\xff\xfe",
        b"null",
        b"",
    ],
)
def test_no_json_breaks_the_server(ask: Ask, body: bytes) -> None:
    for path in DRAWING:
        require_answer(ask("POST", path, [KEY, JSON], body))
