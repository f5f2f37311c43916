"""Signatures of entries and claims (OpenSSF Model Signing). If signers are trusted, entries of others count as missing.

The signature covers the action file, whose tree digest covers every byte of the object. It is stored at
`signatures/ab/<digest of the file>.sig`, so replacing the action file never overwrites its signature.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from sdflow.machine.packages import EXTRAS, missing
from sdflow.store.records import BadRecord, dump, load
from sdflow.store.remote.share import Absent, Found, Lines, Share
from sdflow.store.signing import Signer, Untrusted, is_public_key, verify_data

FOLDER = "verified"
SIGNATURES = "signatures"
_NAME = re.compile(r"[0-9a-f]{2}/([0-9a-f]{64})\.[0-9a-f]{16}\.json(\.sig)?")
_MOST = 64  # claims read per object, and versions per claim
MOST_OF_CLAIM = MOST_OF_SIGNATURE = 64 << 10  # bytes; a signature with a certificate chain has a few thousand


def signature_path(data: bytes) -> str:
    digest = hashlib.sha256(data).hexdigest()
    return f"{SIGNATURES}/{digest[:2]}/{digest}.sig"


def require_signed(data: bytes, trust: Sequence[str], read: Callable[[], bytes]) -> None:
    """Raise Untrusted unless a trusted signer signed the record. read: returns its signature or raises Absent."""
    try:
        verify_data(data, read(), trust)
    except Absent as error:
        raise Untrusted("it is not signed") from error


def is_signed(data: bytes, signature: bytes | None, trust: Sequence[str]) -> bool:
    """Return whether a record is valid and signed by a trusted signer; without `trust`, by anyone, unchecked."""
    if signature is None:
        return False
    try:
        load(data)
        if trust:
            verify_data(data, signature, trust)
    except (BadRecord, Untrusted):
        return False
    return True


@dataclass(frozen=True)
class Claim:
    """A claim of verification. versions: of packages. key: signer's, None if unsigned. trusted: whether `key` is."""

    level: str
    target: str
    versions: Mapping[str, str]
    key: str | None = None
    trusted: bool = False

    @property
    def words(self) -> str:
        who = "not signed" if self.key is None else f"signed by {self.key[:16]}…"
        doubt = "" if self.key is None or self.trusted else ", which this machine does not trust"
        versions = ", ".join(f"{name} {version}" for name, version in sorted(self.versions.items()))
        return f"verified elsewhere ({self.level}, for {self.target}; {who}{doubt}): {versions}"


def claim(share: Share, objects: Iterable[str], said: Claim, signer: Signer | None) -> None:
    """Write a claim for each object, unless the same claim exists. Raises Unusable."""
    body = {"format": 2, "level": said.level, "target": said.target, "versions": dict(said.versions)}
    for digest in objects:
        data = dump({**body, "object": digest, "key": signer.public if signer else None})
        path = f"{FOLDER}/{digest[:2]}/{digest}.{hashlib.sha256(data).hexdigest()[:16]}.json"

        def write(path: str = path, data: bytes = data) -> None:
            if share.stat(path) is None:
                if signer is not None:
                    share.write(f"{path}.sig", signer.signature(data))
                share.write(path, data)

        Lines(share).one(write)


def claims(
    share: Share, trust: Sequence[str], objects: Iterable[str], meanwhile: Callable[[], None] = lambda: None
) -> dict[str, list[Claim]]:
    """Return the claims of these objects. Skips malformed ones and those with invalid signatures. Raises Unusable."""
    wanted, lines = set(objects), Lines(share, meanwhile)
    files = lines.listed(FOLDER)
    signed = {file.path for file in files if file.path.endswith(".sig")}
    chosen: dict[str, list[str]] = defaultdict(list)
    for file in files:
        if file.path not in signed and (digest := named(file)) in wanted and len(chosen[digest]) < _MOST:
            chosen[digest].append(file.path)

    def read(pair: tuple[str, str]) -> tuple[str, Claim] | None:
        (digest, path), signature = pair, f"{pair[1]}.sig"
        with suppress(Absent, BadRecord, Untrusted):
            data = share.read(path, MOST_OF_CLAIM)
            found = share.read(signature, MOST_OF_SIGNATURE) if signature in signed else None
            return digest, read_claim(data, found, digest, trust)
        return None

    by_object = defaultdict(list)
    for digest, each in lines.found([(digest, path) for digest, paths in chosen.items() for path in paths], read):
        by_object[digest].append(each)
    return {digest: sorted(each, key=lambda claim: claim.words) for digest, each in by_object.items()}


def named(file: Found) -> str | None:
    """Return the object of a claim's file or signature; None for other files."""
    match = _NAME.fullmatch(file.path.partition("/")[2])
    return None if match is None else match[1]


def read_claim(data: bytes, signature: bytes | None, object_digest: str, trust: Sequence[str]) -> Claim:
    """Parse a claim of this object and check its signature with the trusted keys and the one it names. Raises BadRecord
    if it is no such claim, Untrusted if the signature is invalid or cannot be checked."""
    body = load(data)
    level, target, versions, key = (body.get(name) for name in ("level", "target", "versions", "key"))
    if body.get("object") != object_digest or not isinstance(versions, dict) or len(versions) > _MOST:
        raise BadRecord("it is not a claim about this object")
    texts = [level, target, *versions, *versions.values()]
    if not all(isinstance(text, str) and len(text) < 100 and text.isprintable() for text in texts):
        raise BadRecord("it says nothing that can be shown")
    if signature is not None and missing(*EXTRAS["sign"]):
        raise Untrusted("its signature cannot be checked on this machine")
    signer = None
    if signature is not None:
        own = [key] if isinstance(key, str) and is_public_key(key) else []
        signer = verify_data(data, signature, [*trust, *own])
    elif key is not None:
        raise Untrusted("it names a key and has no signature")
    return Claim(str(level), str(target), versions, signer, trusted=signer in trust)
