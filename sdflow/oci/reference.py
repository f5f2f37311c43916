"""Parses `oci://REGISTRY/NAME:TAG` and `oci://REGISTRY/NAME@sha256:DIGEST` (OCI distribution specification)."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from sdflow.errors import UsageError

_HOST = r"(?:\[[0-9a-fA-F:]+\]|[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?)(?::\d{1,5})?"
_NAME = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REFERENCE = re.compile(
    rf"oci://(?P<host>{_HOST})/(?P<name>{_NAME}(?:/{_NAME})*)(?::(?P<tag>\w[\w.-]{{0,127}}))?(?:@(?P<digest>sha256:[0-9a-f]{{64}}))?",
    re.ASCII,
)
_LOCAL = re.compile(r"(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?")


@dataclass(frozen=True)
class Reference:
    """A tag of a repository, or the artifact with `digest` if given."""

    host: str
    name: str
    tag: str = "latest"
    digest: str | None = None

    def __str__(self) -> str:
        return f"oci://{self.host}/{self.name}" + (f"@{self.digest}" if self.digest else f":{self.tag}")

    @property
    def local(self) -> bool:
        """Whether the registry runs on this machine and is used without TLS."""
        return _LOCAL.fullmatch(self.host) is not None

    def at(self, digest: str) -> Reference:
        """Return the same repository's artifact with this digest."""
        return replace(self, digest=digest)


def parse_oci(text: str) -> Reference:
    """Parse a reference. Raises UsageError if it is invalid."""
    found = _REFERENCE.fullmatch(text)
    if found is None or len(found["name"]) > 255:
        raise UsageError(
            "not a reference to a registry",
            where=text,
            remedy="Write oci://REGISTRY/NAME:TAG, such as oci://ghcr.io/me/fox:1, or oci://REGISTRY/NAME@sha256:DIGEST. "
            "NAME is in lower case.",
        )
    return Reference(found["host"], found["name"], found["tag"] or "latest", found["digest"])
