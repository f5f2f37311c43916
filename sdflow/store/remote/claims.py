"""Who says to have verified an object, how, and on which versions: small records beside the entries.

PREFIX/sdflow-v1/verified/ab/<object>.<digest of what is said>.json

They are signed as entries are, and shown. Nothing rests on them: what counts here was verified here.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from sdflow.digest import digest_json
from sdflow.errors import UsageError
from sdflow.store.records import BadRecord, dump, load
from sdflow.store.remote.parallel import Lines
from sdflow.store.remote.share import Absent, Found, Share
from sdflow.store.remote.trust import Signer, Untrusted, require_signed, signatures

FOLDER = "verified"
_NAME = re.compile(r"[0-9a-f]{2}/([0-9a-f]{64})\.[0-9a-f]{16}\.json")
_MOST = 64
"""Claims of one object that are read, and versions of one claim."""
MOST_OF_CLAIM = 64 << 10
"""Bytes of a claim's file at most."""


@dataclass(frozen=True)
class Claim:
    """level, target: as of a verification. versions: of the packages that it ran with. key: that has signed it; None: nobody.
    trusted: whether that key is."""

    level: str
    target: str
    versions: Mapping[str, str]
    key: str | None = None
    trusted: bool = False

    @property
    def words(self) -> str:
        """In one line."""
        who = "nobody signed it" if self.key is None else f"signed by {self.key[:16]}…"
        doubt = "" if self.key is None or self.trusted else ", whom this machine does not name in trust"
        versions = ", ".join(f"{name} {version}" for name, version in sorted(self.versions.items()))
        return f"verified elsewhere ({self.level}, for {self.target}; {who}{doubt}): {versions}"


def claim(share: Share, objects: Iterable[str], said: Claim, signer: Signer | None) -> None:
    """Write that these were verified. What is said already is not said again. Raises Unusable."""
    for object_digest in objects:
        body = {
            "format": 1,
            "object": object_digest,
            "level": said.level,
            "target": said.target,
            "versions": dict(said.versions),
        }
        name = digest_json({**body, "key": signer.public if signer else None})[:16]
        path = f"{FOLDER}/{object_digest[:2]}/{object_digest}.{name}.json"
        data = dump({**body, "verified": time.time()})

        def write(path: str = path, data: bytes = signer.signed(data) if signer else data) -> None:
            if share.size(path) is None:
                share.write(path, data)

        Lines(share).one(write)


def claims(
    share: Share, trust: Sequence[str], objects: Iterable[str], meanwhile: Callable[[], None] = lambda: None
) -> dict[str, list[Claim]]:
    """What is said of these objects. A claim that is none, or whose signature does not hold, is left out. Raises Unusable."""
    wanted, lines = set(objects), Lines(share, meanwhile)

    def read(file: Found) -> tuple[str, Claim] | None:
        object_digest = named(file)
        with suppress(Absent, BadRecord, Untrusted):
            return str(object_digest), read_claim(share.read(file.path, MOST_OF_CLAIM), str(object_digest), trust)
        return None

    counts: dict[str | None, int] = defaultdict(int)
    chosen = []
    for file in lines.listed(FOLDER):
        if (digest := named(file)) in wanted and counts[digest] < _MOST:
            counts[digest] += 1
            chosen.append(file)
    by_object = defaultdict(list)
    for object_digest, each in lines.found(chosen, read):
        by_object[object_digest].append(each)
    return {digest: sorted(each, key=lambda claim: claim.words) for digest, each in by_object.items()}


def named(file: Found) -> str | None:
    """The object that a claim's file is of; None for what is no claim."""
    match = _NAME.fullmatch(file.path.partition("/")[2])
    return None if match is None else match[1]


def read_claim(data: bytes, object_digest: str, trust: Sequence[str]) -> Claim:
    """Raises BadRecord for what is no claim of this object, Untrusted for a signature that does not hold."""
    body = load(data)
    level, target, versions = (body.get(name) for name in ("level", "target", "versions"))
    if body.get("object") != object_digest or not isinstance(versions, dict) or len(versions) > _MOST:
        raise BadRecord("it is no claim of this object")
    texts = [level, target, *versions, *versions.values()]
    if not all(isinstance(text, str) and len(text) < 100 and text.isprintable() for text in texts):
        raise BadRecord("it says nothing that can be shown")
    keys = {key for key, _ in signatures(data)}
    if not keys:
        return Claim(str(level), str(target), versions)
    for key in sorted(keys, key=lambda key: key not in trust):
        with suppress(Untrusted, UsageError):  # without the package nobody's signature can be told
            require_signed(data, [key])
            return Claim(str(level), str(target), versions, key, key in trust)
    raise Untrusted("its signature does not hold")
