"""Which remote, and what may be done there: as a workflow says it, or the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from sdflow.errors import UsageError
from sdflow.machine.packages import EXTRAS, lacks, missing

URL_VARIABLE = "SDFLOW_REMOTE_CACHE"
PUSH_VARIABLE = "SDFLOW_REMOTE_CACHE_PUSH"
TIMEOUT = 30.0
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(::|://)")
_STORES = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs",
}  # fmt: skip
"""Scheme -> the distribution that knows it, each in an extra of sdflow's own."""
_LINKS = re.compile(r"::(?=[A-Za-z][A-Za-z0-9+.-]*://)")


@dataclass(frozen=True)
class RemoteSpec:
    """url: where, as fsspec reads it. push: what is built here goes there. timeout: seconds without any answer after which
    it counts as gone for this run. trust: public keys of which one must have signed what is fetched; empty: none must."""

    url: str
    push: bool = False
    timeout: float = TIMEOUT
    trust: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        """The URL for eyes and files: without a user, a password, a token."""
        return without_secrets(self.url)


def is_url(text: str) -> bool:
    """Whether it is written as a URL. Else it is a folder."""
    return bool(_SCHEME.match(text))


def without_secrets(url: str) -> str:
    """A URL without what may be a credential: user and password, query, fragment; of a chain, as simplecache::https://…, of
    each link."""
    return "::".join(_plain(link) for link in _LINKS.split(url))


def _plain(url: str) -> str:
    if not is_url(url):
        return url
    try:
        parts = urlsplit(url)
    except ValueError:
        return url.partition("://")[0] + "://…"
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def remote_from_environment(said: RemoteSpec | None, environment: Mapping[str, str] = os.environ) -> RemoteSpec | None:
    """The remote of the workflow, or the one that the environment names in its place; an empty variable: none.

    To another place nothing is pushed but where the environment asks for that too; the keys that the workflow trusts stay.
    Raises UsageError for a URL that fsspec does not know.
    """
    url = environment.get(URL_VARIABLE)
    if url is None:
        return said
    if not url.strip():
        return None
    where = at(url, URL_VARIABLE)
    push = environment.get(PUSH_VARIABLE, "")
    if push not in ("", "0", "1"):
        raise UsageError(
            f"{push!r} is neither 0 nor 1", where=PUSH_VARIABLE, remedy="Write 1 to push, or leave it out."
        )
    return replace(said or RemoteSpec(where), url=where, push=push == "1")


def at(url: str, said: str) -> str:
    """The URL, or the folder's absolute path. said: by what it was named. Raises UsageError for a scheme that fsspec lacks."""
    if (remedy := unknown_scheme(url)) is not None:
        raise UsageError(f"{without_secrets(url)!r} is no URL of a remote cache", where=said, remedy=remedy)
    return url if is_url(url) else str(Path(url).expanduser().absolute())


def scheme_of(url: str) -> str:
    return re.split("::|://", url, maxsplit=1)[0].lower()


def packages_of(url: str) -> tuple[str, ...]:
    """The distributions that a remote at this URL or in this folder needs, as far as sdflow has an extra for them."""
    store = _STORES.get(scheme_of(url)) if is_url(url) else None
    return (*EXTRAS["remote"], *([store] if store else []))


def unknown_scheme(url: str) -> str | None:
    """None if fsspec has the URL's scheme; else what to write. Raises UsageError where fsspec is not installed."""
    if not is_url(url):
        return None
    if missing("fsspec"):
        raise lacks(f"the remote cache {without_secrets(url)}", missing(*packages_of(url)))
    from fsspec.registry import available_protocols

    if scheme_of(url) in available_protocols():
        return None
    return "s3://BUCKET/PREFIX, gs://, az://, https:// (for reading), or a shared folder; any URL that fsspec knows"
