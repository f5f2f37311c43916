"""Who is believed: entries are signed with Ed25519 (RFC 8032), and where keys are named, others are no entries.

What is signed is the body of an action's file. It names the object by its tree digest, and so every byte of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sdflow.digest import canonical_json
from sdflow.disk.input_file import read_input
from sdflow.errors import UsageError, os_errors_as
from sdflow.store.records import BadRecord, load

KEY_VARIABLE = "SDFLOW_SIGNING_KEY"
SIGNATURES = "signatures"
MOST_SIGNATURES = 16
"""Of one record. Each takes its time to check, and whoever can write to a remote can add some."""
_MISSING = "pip install 'sdflow[remote]'"


class Untrusted(Exception):
    """An entry is not signed by any of the keys that are trusted."""


def make_key(path: Path) -> str:
    """Make a private key and write it to a new file that only its owner reads. Returns the public one."""
    serialization, ed25519 = _cryptography()
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
        serialization, ed25519 = _cryptography()
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
    _, ed25519 = _cryptography()
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


def require_cryptography() -> None:
    """Raises UsageError where signatures cannot be checked."""
    _cryptography()


def _cryptography() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise UsageError("signatures cannot be made or checked", where="remote cache", remedy=_MISSING) from error
    return serialization, ed25519


def _spell(public: Any) -> str:
    return str(public.public_bytes_raw().hex())
