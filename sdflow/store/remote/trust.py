"""Who is believed: entries are signed with Ed25519 (RFC 8032), and where keys are named, others are no entries.

What is signed is the body of an action's file. It names the object by its tree digest, and so every byte of it.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdflow.digest import canonical_json, digest_json
from sdflow.disk.input_file import read_input
from sdflow.errors import UsageError, os_errors_as
from sdflow.store.records import BadRecord, dump, load
from sdflow.store.remote.parallel import Lines
from sdflow.store.remote.share import Absent, Found, Share

FOLDER = "verified"
_NAME = re.compile(r"[0-9a-f]{2}/([0-9a-f]{64})\.[0-9a-f]{16}\.json")
_MOST = 64
"""Claims of one object that are read, and versions of one claim."""
MOST_OF_CLAIM = 64 << 10
"""Bytes of a claim's file at most."""

KEY_VARIABLE = "SDFLOW_SIGNING_KEY"
SIGNATURES = "signatures"
MOST_SIGNATURES = 16
"""Of one record. Each takes its time to check, and whoever can write to a remote can add some."""
_MISSING = "pip install 'sdflow[remote]'"


class Untrusted(Exception):
    """An entry is not signed by any of the keys that are trusted."""


def make_key(path: Path) -> str:
    """Make a private key and write it to a new file that only its owner reads. Returns the public one."""
    serialization, ed25519 = require_cryptography()
    key = ed25519.Ed25519PrivateKey.generate()
    data = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with os_errors_as("the key cannot be written", path, "Name a new file."):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as stream:  # noqa: PTH123
            stream.write(data)
    return _spell(key.public_key())


class Signer:
    """Signs with the private key in a PEM file. Raises UsageError when that is none."""

    def __init__(self, path: Path) -> None:
        serialization, ed25519 = require_cryptography()
        remedy = f"{KEY_VARIABLE} names a PEM file with an Ed25519 private key; `sdflow cache key FILE` makes one."
        try:
            key = serialization.load_pem_private_key(read_input(path.expanduser()), None)
        except OSError as error:
            raise UsageError(f"cannot be read ({error.strerror})", where=str(path), remedy=remedy) from error
        except (ValueError, TypeError) as error:
            raise UsageError("holds no private key without a password", where=str(path), remedy=remedy) from error
        if not isinstance(key, ed25519.Ed25519PrivateKey):
            raise UsageError("holds a key of another kind", where=str(path), remedy=remedy)
        self._key = key
        self.public = _spell(key.public_key())

    def signed(self, data: bytes) -> bytes:
        """The record with a signature of its body."""
        outer = json.loads(data)
        signature = self._key.sign(canonical_json(outer["record"])).hex()
        return canonical_json({**outer, SIGNATURES: [{"key": self.public, "signature": signature}]})


def signer_from_environment(environment: Mapping[str, str] = os.environ) -> Signer | None:
    """What signs what is pushed, if $SDFLOW_SIGNING_KEY names a key. Raises UsageError."""
    path = environment.get(KEY_VARIABLE)
    return Signer(Path(path)) if path else None


def signatures(data: bytes) -> list[tuple[str, str]]:
    """The keys and signatures that a sound record carries, checked or not. Raises BadRecord when there are too many."""
    given = json.loads(data).get(SIGNATURES)
    if not isinstance(given, list):
        return []
    if len(given) > MOST_SIGNATURES:
        raise BadRecord(f"it has {len(given):,} signatures, and {MOST_SIGNATURES} at most are checked")
    pairs = [(each.get("key"), each.get("signature")) for each in given if isinstance(each, dict)]
    return [(key, signature) for key, signature in pairs if isinstance(key, str) and isinstance(signature, str)]


def require_signed(data: bytes, trusted: Sequence[str]) -> None:
    """Raises Untrusted unless one of the keys has signed the record, BadRecord for what is none."""
    _, ed25519 = require_cryptography()
    from cryptography.exceptions import InvalidSignature

    content = canonical_json(load(data))
    for key, signature in signatures(data):
        if key not in trusted:
            continue
        try:
            ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(bytes.fromhex(signature), content)
        except (InvalidSignature, ValueError):
            continue
        return
    raise Untrusted("no key that is trusted has signed it")


def is_signed(data: bytes, trusted: Sequence[str]) -> bool:
    """Whether a record is sound and signed by one of the keys; where none are named, by any. Where signatures cannot be checked,
    one that is there counts."""
    try:
        load(data)
        keys = [key for key, _ in signatures(data)]
        if not keys:
            return False
        require_signed(data, trusted or keys)
    except UsageError:
        return True
    except (BadRecord, Untrusted):
        return False
    return True


def require_cryptography() -> tuple[Any, Any]:
    """What serializes keys, and what signs. Raises UsageError where signatures cannot be made or checked."""
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise UsageError("signatures cannot be made or checked", where="remote cache", remedy=_MISSING) from error
    return serialization, ed25519


def _spell(public: Any) -> str:
    return str(public.public_bytes_raw().hex())


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
