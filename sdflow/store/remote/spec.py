"""Settings of a remote cache, from the workflow or the environment."""

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
_STORES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs"}
"""Scheme -> distribution that implements it, each in an extra of its own."""
_ARCHIVE, _ARCHIVES = "zip://", (".zip", ".sdflow")  # prefix, suffixes; any existing file is taken for an archive
_LINKS = re.compile(r"::(?=[A-Za-z][A-Za-z0-9+.-]*://)")


@dataclass(frozen=True)
class RemoteSpec:
    """A remote cache as configured.

    url: for fsspec. push: upload results. timeout: seconds without an answer until the run gives the remote up.
    trust: signers, one of whom must have signed each entry, unless empty. name: shown instead of the URL.
    """

    url: str
    push: bool = False
    timeout: float = TIMEOUT
    trust: tuple[str, ...] = ()
    name: str = ""

    @property
    def shown(self) -> str:
        """The URL to print and store, without credentials."""
        return self.name or (str(self.archive) if self.archive else without_secrets(self.url))

    @property
    def archive(self) -> Path | None:
        return Path(self.url.removeprefix(_ARCHIVE)) if self.url.startswith(_ARCHIVE) else None


def is_url(text: str) -> bool:
    return bool(_SCHEME.match(text))


def without_secrets(url: str) -> str:
    """Strip user, password, query and fragment from a URL, in each link of a chain (simplecache::https://…)."""
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
    """Return the workflow's remote, replaced by $SDFLOW_REMOTE_CACHE if set; None if that is empty. The replacement
    keeps the workflow's trust and pushes only if $SDFLOW_REMOTE_CACHE_PUSH is 1. Raises UsageError."""
    url = environment.get(URL_VARIABLE)
    if url is None:
        return said
    if not url.strip():
        return None
    where = at(url, URL_VARIABLE)
    push = environment.get(PUSH_VARIABLE, "")
    if push not in ("", "0", "1"):
        raise UsageError(f"{push!r} is neither 0 nor 1", where=PUSH_VARIABLE, remedy="Use 1 to push, or omit it.")
    return replace(said or RemoteSpec(where), url=where, push=push == "1")


def at(url: str, said: str) -> str:
    """Make the path of a folder or archive absolute, the latter with zip://. said: source of the URL, for errors.
    Raises UsageError if fsspec lacks the scheme."""
    if (remedy := unknown_scheme(url)) is not None:
        raise UsageError(f"{without_secrets(url)!r} is not the URL of a remote cache", where=said, remedy=remedy)
    if is_url(url) and not url.startswith(_ARCHIVE):
        return url
    path = Path(url.removeprefix(_ARCHIVE)).expanduser().absolute()
    is_archive = url.startswith(_ARCHIVE) or path.suffix in _ARCHIVES or (path.exists() and not path.is_dir())
    return f"{_ARCHIVE if is_archive else ''}{path}"


def scheme_of(url: str) -> str:
    return re.split("::|://", url, maxsplit=1)[0].lower()


def packages_of(url: str) -> tuple[str, ...]:
    """Return the distributions that a remote at this URL needs and sdflow has an extra for."""
    if not is_url(url) or scheme_of(url) in ("zip", "file", "local"):
        return ()
    store = _STORES.get(scheme_of(url))
    return (*EXTRAS["remote"], *([store] if store else []))


def unknown_scheme(url: str) -> str | None:
    """Return None if fsspec knows the scheme, else a remedy. Raises UsageError if a package for it is missing."""
    if not is_url(url):
        return None
    if packages_of(url) and missing(*EXTRAS["remote"]):
        raise lacks(f"the remote cache {without_secrets(url)}", missing(*packages_of(url)))
    from fsspec.registry import available_protocols

    if scheme_of(url) in available_protocols():
        return None
    return (
        "s3://BUCKET/PREFIX, gs://, az://, https:// (for reading), a folder, or a .zip file; any URL that fsspec knows"
    )
