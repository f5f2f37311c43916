"""HTTP sessions that limit the size and time of answers and restrict redirects."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urljoin, urlsplit

from sdflow import __version__

T = TypeVar("T")
REDIRECTS = 5
BLOCK = 1 << 20


@dataclass(frozen=True)
class Limits:
    """Limits on a registry's answers.

    seconds: between bytes. answer: seconds until an answer begins, and for the whole of one that is not a blob.
    manifest, other: bytes of such answers. rate: minimum bytes per second of a blob, over `window` seconds.
    """

    seconds: float = 30
    answer: float = 120
    manifest: int = 4 << 20
    other: int = 1 << 20
    rate: int = 4096
    window: float = 60


LIMITS = Limits()


class Misled(Exception):
    """The registry answers in a way that sdflow refuses to follow."""


def open_session(limits: Limits, plain: bool) -> Any:
    """Return a requests session with limits, which raises Misled. plain: allow URLs without TLS."""
    import requests

    class Bounded(requests.Session):
        """Limits size and time of answers, keeps redirects on TLS, and sends no credentials but the registry's: none of
        .netrc."""

        more = 0.0  # additional seconds for a request

        def request(self, method: Any, url: Any, *arguments: Any, stream: Any = False, **options: Any) -> Any:
            options |= {"timeout": limits.seconds, "stream": True, "allow_redirects": False}
            answer = self._answer(method, str(url), super().request, *arguments, **options)
            if not stream or answer.status_code >= 300:
                most = limits.manifest if "/manifests/" in str(url) and answer.ok else limits.other
                answer._content = _within(limits.answer, lambda: _read(answer, most))
                answer._content_consumed = True
            return answer

        def _answer(self, method: str, url: str, ask: Any, *arguments: Any, **options: Any) -> Any:
            """Follow redirects without reading their bodies or sending credentials to another host."""
            host = urlsplit(url).netloc
            for _ in range(REDIRECTS + 1):
                if not plain and not url.startswith("https://"):
                    raise Misled(f"it leads to an address without TLS, {url:.100}")
                call = partial(ask, method, url, *arguments, **options)
                answer = _within(limits.answer + self.more, call)
                target = super().get_redirect_target(answer)
                if target is None or method not in ("GET", "HEAD"):
                    return answer
                answer.close()
                url = urljoin(url, target)
                if urlsplit(url).netloc != host and "Authorization" in (headers := dict(options.get("headers") or {})):
                    del headers["Authorization"]
                    options["headers"] = headers
            raise Misled(f"it redirects more than {REDIRECTS} times")

        def get_redirect_target(self, resp: Any) -> Any:
            """Return None: for a target, requests would read the whole body even without following it."""
            return None

    session = Bounded()
    session.auth = lambda request: request
    session.headers.update({"Accept-Encoding": "identity", "User-Agent": f"sdflow/{__version__}"})
    return session


def _read(answer: Any, most: int) -> bytes:
    content = bytearray()
    while block := answer.raw.read1(BLOCK, decode_content=False):
        content += block
        if len(content) > most:
            answer.close()
            raise Misled(f"its answer is longer than {most:,} bytes")
    return bytes(content)


def _within(seconds: float, call: Callable[[], T]) -> T:
    """Return the call's result. Raises Misled after `seconds`: socket timeouts do not bound a header that drips."""
    done: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put((call(), None))
        except Exception as error:  # noqa: BLE001  # re-raised by the caller
            done.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        value, error = done.get(timeout=seconds)
    except queue.Empty:
        raise Misled(f"no answer within {seconds:.0f} seconds") from None
    if error is not None:
        raise error
    return value  # type: ignore[return-value]
