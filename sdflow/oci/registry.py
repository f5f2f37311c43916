"""Client of an OCI registry. Responses are limited in size and time and checked against their digests.

oras handles credentials and tokens: docker's configuration and its credential helpers. Transfers are implemented here,
as oras has no limits or deadlines and reads everything but files into memory whole.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import IO, Any
from urllib.parse import urljoin, urlsplit

from sdflow import stop
from sdflow.disk.input_file import parse_json
from sdflow.errors import CacheError, SdflowError, VerificationError, os_errors_as
from sdflow.machine.packages import require_packages
from sdflow.oci.reference import Reference
from sdflow.oci.session import BLOCK, LIMITS, Limits, Misled, open_session

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
ATTEMPTS = 3  # transfers of a blob, each resuming the last
MOST_OF_A_CHALLENGE = 4096  # characters: oras parses challenges with a regular expression that takes quadratic time


class RegistryError(SdflowError):
    """A registry does not answer, refuses, or lacks the requested content."""

    exit_code = 2


class Registry:
    """A repository of a registry. plain: HTTP without TLS. Raises UsageError if the extra `oci` is not installed."""

    def __init__(self, reference: Reference, *, plain: bool = False, limits: Limits = LIMITS) -> None:
        require_packages("a registry", "oras")
        import oras.auth
        import oras.container
        from oras.logger import setup_logger

        setup_logger(quiet=True)  # oras logs what we raise as errors
        self._where = str(reference)
        self._limits = limits
        self._plain = plain or reference.local
        self._host = reference.host
        self._base = f"{'http' if self._plain else 'https'}://{reference.host}/v2/{reference.name}"
        self._session = open_session(limits, self._plain)
        self._auth: Any = oras.auth.get_auth_backend("token", self._session, self._plain)
        self._authorization: dict[str, str] = {}
        with self._failing("the credentials of docker cannot be read"):
            own = [str(Path(place) / "config.json")] if (place := os.environ.get("DOCKER_CONFIG")) else None
            self._auth.load_configs(oras.container.Container(reference.name, reference.host), own)

    def manifest(self, reference: Reference) -> tuple[bytes, str]:
        """Return the manifest of a tag or digest, and its digest. Raises VerificationError if the digest is wrong."""
        url = f"{self._base}/manifests/{reference.digest or reference.tag}"
        answer = self._send("GET", url, {"Accept": MANIFEST_TYPE})
        self._require(answer, f"{reference} does not exist")
        content = bytes(answer.content)
        digest = f"sha256:{sha256(content).hexdigest()}"
        for named in (reference.digest, answer.headers.get("Docker-Content-Digest")):
            if named is not None and named != digest:
                raise VerificationError(
                    f"the registry sent another manifest: its digest is {digest}, not {named:.100}", where=self._where
                )
        return content, digest

    def has(self, digest: str) -> bool:
        """Return whether the repository has a blob."""
        answer = self._send("HEAD", f"{self._base}/blobs/{digest}")
        if answer.status_code == 404:
            return False
        self._require(answer, "the registry cannot be asked for its blobs")
        return True

    def fetch(self, digest: str, size: int, out: Path, check: Callable[[int], None] = lambda done: None) -> None:
        """Download a blob to a new file, resuming broken transfers. check: called with the bytes downloaded so far.

        Raises VerificationError for a wrong size or digest, RegistryError if the transfer fails.
        """
        done, content = 0, sha256()
        with out.open("xb") as stream:
            for attempt in range(ATTEMPTS):
                ranged = {"Range": f"bytes={done}-"} if done else {}
                with self._failing(f"{digest} was not received", last=attempt == ATTEMPTS - 1):
                    answer = self._send("GET", f"{self._base}/blobs/{digest}", ranged, stream=True)
                    self._require(answer, f"{digest} does not exist")
                    if done and answer.status_code != 206:
                        done, content = 0, sha256()
                        stream.seek(0)
                        stream.truncate()
                    for block in self._blocks(answer):
                        done += len(block)
                        if done > size:
                            raise self._lies(f"{digest} is longer than its {size:,} bytes")
                        content.update(block)
                        with os_errors_as("cannot be written", out, "Free space, then pull again.", CacheError):
                            stream.write(block)
                        stop.check()
                        check(done)
                if done == size:
                    break
        if done != size:
            raise self._lies(f"{digest} ends after {done:,} of its {size:,} bytes")
        if f"sha256:{content.hexdigest()}" != digest:
            raise self._lies(f"what came as {digest} has the digest sha256:{content.hexdigest()}")

    def upload(self, stream: IO[bytes], digest: str, size: int) -> None:
        """Upload a blob of `size` bytes from a stream. Raises RegistryError if the registry rejects it."""
        refused = "the registry rejected a blob"
        begun = self._send("POST", f"{self._base}/blobs/uploads/")
        self._require(begun, refused)
        place = urljoin(begun.url, begun.headers.get("Location", ""))
        if urlsplit(place).netloc != self._host:  # the other host would receive the token
            raise RegistryError(
                f"it redirects the upload to another host, {urlsplit(place).netloc:.100}", where=self._where
            )
        place += f"{'&' if '?' in place else '?'}digest={digest}"
        headers = {"Content-Type": "application/octet-stream"}
        self._session.more = size / self._limits.rate
        try:
            self._require(self._send("PUT", place, headers, stream if size else b""), refused)
        finally:
            self._session.more = 0

    def put_manifest(self, content: bytes, reference: Reference) -> None:
        """Upload a manifest under a tag."""
        answer = self._send("PUT", f"{self._base}/manifests/{reference.tag}", {"Content-Type": MANIFEST_TYPE}, content)
        self._require(answer, "the registry rejected the manifest")

    def _send(
        self, method: str, url: str, headers: Mapping[str, str] | None = None, data: Any = None, stream: bool = False
    ) -> Any:
        """Send a request and return the answer. On status 401, send it again with credentials."""
        with self._failing("the registry cannot be reached"):
            for _ in range(2):
                sent = {**(headers or {}), **self._authorization}
                answer = self._session.request(method, url, headers=sent, data=data, stream=stream)
                if answer.status_code != 401:
                    break
                if (
                    host := urlsplit(str(answer.url)).netloc.lower()
                ) != self._host.lower():  # its realm would get the credentials
                    raise Misled(f"it redirects to {host:.100}, which asks for credentials")
                self._authorize(answer)
                if hasattr(data, "seek"):
                    data.seek(0)
        return answer

    def _authorize(self, answer: Any) -> None:
        """Set the credentials that the challenge asks for: user and password, or a token for the refused scope."""
        challenge = answer.headers.get("Www-Authenticate", "")
        if len(challenge) > MOST_OF_A_CHALLENGE:
            raise Misled(f"it asks for credentials with {len(challenge):,} characters")
        if challenge.lower().startswith("basic"):
            if (known := getattr(self._auth, "_basic_auth", None)) is not None:
                self._authorization = {"Authorization": f"Basic {known}"}
            return
        self._auth.token = None  # a token for reading does not allow writing
        try:
            found, _ = self._auth.authenticate_request(answer, {})
        except (AttributeError, TypeError, LookupError) as error:
            raise Misled("it asks for credentials in a form that oras does not support") from error
        self._authorization = {name: value for name, value in found.items() if name == "Authorization"}

    def _require(self, answer: Any, what: str) -> None:
        """Raise RegistryError if the answer is an error."""
        status = answer.status_code
        if status < 300:
            return
        if status in (401, 403):
            what = f"{what}: access is denied"
            remedy = f"Log in: docker login {self._host}, or oras login {self._host}."
        else:
            remedy = "Check the name and the tag." if status == 404 else "Try again later."
        said = _message(answer)
        raise RegistryError(f"{what} (status {status}{said and f': {said}'})", where=self._where, remedy=remedy)

    def _blocks(self, answer: Any) -> Iterator[bytes]:
        """Yield the body in blocks. Raises RegistryError if it is compressed or too slow."""
        encoding = answer.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            raise RegistryError(
                f"it compresses a response that was requested uncompressed ({encoding:.40})", where=self._where
            )
        begun, came = time.monotonic(), 0
        while block := answer.raw.read1(BLOCK, decode_content=False):
            came += len(block)
            if (took := time.monotonic() - begun) > self._limits.window:
                if came < self._limits.rate * took:
                    raise RegistryError(f"it sends {came:,} bytes in {took:.0f} seconds: too slow", where=self._where)
                begun, came = time.monotonic(), 0
            yield block

    def _lies(self, what: str) -> VerificationError:
        return VerificationError(
            what, where=self._where, remedy="Nothing was changed here. Report this to the registry's operator."
        )

    @contextmanager
    def _failing(self, what: str, *, last: bool = True) -> Iterator[None]:
        """Turn the libraries' errors into RegistryError. last: without it, only Misled raises; the caller retries."""
        from requests import RequestException
        from urllib3.exceptions import HTTPError

        try:
            yield
        except (RequestException, HTTPError, OSError, ValueError, Misled) as error:
            if last or isinstance(error, Misled):
                said = str(error) if isinstance(error, Misled) else _reason(error)
                remedy = f"Check the network and the name {self._host}."
                if not self._plain:
                    remedy = f"{remedy} For a registry without TLS: --plain-http."
                raise RegistryError(f"{what}: {said:.300}", where=self._where, remedy=remedy) from error


def _reason(error: BaseException) -> str:
    """Return the innermost message: three libraries wrap the system's error."""
    inner: BaseException | None = error
    while inner is not None:
        error, inner = inner, inner.__cause__ or inner.__context__
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error).strip()
    return (said or type(error).__name__).splitlines()[0]


def _message(answer: Any) -> str:
    """Return the registry's error message, or ""."""
    try:
        errors = parse_json(answer.content)["errors"]
        return f"{errors[0].get('message') or errors[0].get('code')}"[:200]
    except (ValueError, LookupError, TypeError, AttributeError):
        return ""
