"""OpenSSF Model Signing: signatures of a file or a folder that `model_signing verify` checks, and checks of what it signed.

A signature is a Sigstore bundle in a file of its own. With a key or a certificate, neither signing nor checking uses the network;
with Sigstore both do. `model_signing` takes a second to import: it is imported when the first signature is made or checked.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sdflow.disk.input_file import parse_json, read_input
from sdflow.errors import UsageError, os_errors_as
from sdflow.machine.packages import EXTRAS, require_packages

KEY_VARIABLE = "SDFLOW_SIGNING_KEY"
CERTIFICATE_VARIABLE = "SDFLOW_SIGNING_CERTIFICATE"
SIGSTORE = "sigstore"
"""In place of a key: the identity that the environment has, as GitHub's actions do. With a colon, identity and issuer of
who is trusted."""
EARLIER = re.compile("[0-9a-f]{64}")
"""A public key of an earlier sdflow (Ed25519). What it signed is read by this release for the last time."""
POINT = re.compile("0[23]([0-9a-f]{64}|[0-9a-f]{96}|[0-9a-f]{132})")
SIGNER = re.compile(rf"{EARLIER.pattern}|{POINT.pattern}|sigstore:\S+ https?://\S+|.+\.(pem|pub|crt|cer)")
"""How who is trusted is written: a public key, the identity and issuer of Sigstore, or a PEM file of a key or of root
certificates."""
_CURVES = {33: "SECP256R1", 49: "SECP384R1", 67: "SECP521R1"}
"""Bytes of a point, compressed -> its curve."""
MOST_FILES = 1_000
"""Of a folder with links: some may lead in a circle."""
_DIGESTS = re.compile(r": Expected 'Digest\(.*?\)', Actual 'Digest\(.*?\)'(?=\"|$)")
"""Of a file that was changed: the bytes of both digests, unreadably."""
_CERTIFICATE = b"BEGIN CERTIFICATE"
_NEW_KEY = "`sdflow cache key FILE` makes one."


class Untrusted(Exception):
    """Something is signed by none of those who are trusted."""


def require_signers(trust: Sequence[str]) -> None:
    """Raises UsageError for one who is trusted whose key or certificate cannot be read."""
    require_packages("checking signatures", *EXTRAS["sign"])
    for each in trust:
        if POINT.fullmatch(each) or is_file(each):
            _pem_of(each)


def is_public_key(key: str) -> bool:
    """Whether it is a public key: what looks like one need not be a point of its curve."""
    with suppress(UsageError):
        return bool(POINT.fullmatch(key) and _pem_of(key))
    return False


def is_file(trusted: str) -> bool:
    """Whether who is trusted is named by a PEM file."""
    return not (EARLIER.fullmatch(trusted) or POINT.fullmatch(trusted) or trusted.startswith(f"{SIGSTORE}:"))


def make_key(path: Path) -> str:
    """Make a private key (P-256) in a new file that only its owner reads, and the public one in another beside it, `.pub`.

    Returns the public key as `trust` takes it.
    """
    require_packages("making a key", *EXTRAS["sign"])
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = ec.generate_private_key(ec.SECP256R1())
    data = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    with os_errors_as("the key cannot be written", path, "Name a new file."):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as stream:  # noqa: PTH123
            stream.write(data)
        path.with_name(f"{path.name}.pub").write_bytes(_pem(key.public_key()))
    return _spell(key.public_key())


@dataclass(frozen=True)
class Signer:
    """Signs with a private key in a PEM file, for which a certificate may stand; without a key, with Sigstore.

    certificates: a PEM file, the key's own first, then those between it and the root. identity_token: for Sigstore; by default
    the environment's, or a browser asks for it. trust_config: of another Sigstore than the public one.
    Raises UsageError for a key that is none, and where the packages are missing.
    """

    key: Path | None
    certificates: Path | None = None
    identity_token: str | None = None
    trust_config: Path | None = None

    def __post_init__(self) -> None:
        require_packages("signing", *EXTRAS["sign"])
        _ = self.public

    @cached_property
    def public(self) -> str:
        """The public key as `trust` takes it; of Sigstore just that."""
        if self.key is None:
            return SIGSTORE
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec, ed25519

        where, remedy = str(self.key), f"Name a PEM file with a private key of the curve P-256; {_NEW_KEY}"
        try:
            with os_errors_as("cannot be read", where, remedy):
                key = serialization.load_pem_private_key(read_input(self.key.expanduser()), None)
        except (ValueError, TypeError) as error:
            raise UsageError("holds no private key without a password", where=where, remedy=remedy) from error
        if isinstance(key, ed25519.Ed25519PrivateKey):
            raise UsageError(
                "holds a key of an earlier sdflow (Ed25519), which OpenSSF Model Signing does not have",
                where=where,
                remedy=f"{_NEW_KEY.capitalize()} Those who trust the old one must name the new one too.",
            )
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name not in map(str.lower, _CURVES.values()):
            raise UsageError("holds a key of another kind", where=where, remedy=remedy)
        return _spell(key.public_key())

    def sign(self, model: Path, ignore: Sequence[Path] = ()) -> bytes:
        """The signature of a file, or of a folder with all files in it but these. Raises UsageError for what cannot be signed."""
        from model_signing import hashing, signing

        with (
            _failing(f"{model} cannot be signed"),
            _without_links(model) as (place, linked),
            tempfile.TemporaryDirectory(prefix="sdflow-") as folder,
        ):
            hashed = (linked or hashing.Config()).set_ignored_paths(paths=ignore, ignore_git_paths=False)
            config = signing.Config().set_hashing_config(hashed)
            if self.key is None:
                config.use_sigstore_signer(
                    use_ambient_credentials=True, identity_token=self.identity_token, trust_config=self.trust_config
                )
            elif self.certificates is None:
                config.use_elliptic_key_signer(private_key=self.key.expanduser())
            else:
                chain = self.certificates.expanduser()
                config.use_certificate_signer(
                    private_key=self.key.expanduser(), signing_certificate=chain, certificate_chain=[chain]
                )
            signature = Path(folder, "signature")
            config.sign(place, signature)
            return signature.read_bytes()

    def signature(self, data: bytes) -> bytes:
        """Of a file with this content."""
        with _written(data) as model:
            return self.sign(model)


def signer_from_environment(environment: Mapping[str, str] = os.environ) -> Signer | None:
    """What signs what is pushed, if $SDFLOW_SIGNING_KEY names a key, or Sigstore. Raises UsageError."""
    key = environment.get(KEY_VARIABLE)
    if not key:
        return None
    return Signer(None if key == SIGSTORE else Path(key), certificates_from_environment(environment))


def certificates_from_environment(environment: Mapping[str, str] = os.environ) -> Path | None:
    certificates = environment.get(CERTIFICATE_VARIABLE)
    return Path(certificates) if certificates else None


def verify(model: Path, signature: bytes, trust: Sequence[str], trust_config: Path | None = None) -> str:
    """Check that one of those who are trusted has signed a file or folder as it is, and return which.

    Raises Untrusted, which says why; UsageError for a trusted key or certificate that cannot be read.
    """
    why = "no key that is trusted has signed it"
    try:
        bundle = parse_json(signature)
        material = bundle["verificationMaterial"]
        by_key = "publicKey" in material
        hint = by_key and (material["publicKey"] or {}).get("hint")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Untrusted(f"its signature is no bundle of Sigstore ({error})") from error
    for trusted in trust:
        if EARLIER.fullmatch(trusted):
            continue
        pem = None if trusted.startswith(f"{SIGSTORE}:") else _pem_of(trusted)
        is_key = pem is not None and _CERTIFICATE not in pem
        own_hint = hashlib.sha256(pem).hexdigest() if pem is not None and is_key else None
        if is_key is not by_key or (hint and own_hint != hint):
            continue
        if is_key and not hint:  # else the library prints a warning to standard output
            material["publicKey"] = {"hint": own_hint}
            signature = json.dumps(bundle).encode()
        try:
            with _without_links(model) as (place, linked), _written(signature) as file:
                _verifier(trusted, pem, trust_config).set_hashing_config(linked).verify(place, file)
        except Exception as error:  # noqa: BLE001  (what a bundle of a stranger makes the library raise is without end)
            why = _DIGESTS.sub("", " ".join(f"{error}".split()))[:1000] or type(error).__name__
            continue
        return trusted
    raise Untrusted(why)


def verify_data(data: bytes, signature: bytes, trust: Sequence[str]) -> str:
    """As `verify`, of a file with this content."""
    with _written(data) as model:
        return verify(model, signature, trust)


def _verifier(trusted: str, pem: bytes | None, trust_config: Path | None) -> Any:
    """The library's, for one who is trusted; for Sigstore it takes the network."""
    from model_signing.verifying import Config

    config = Config()
    if pem is None:
        identity, _, issuer = trusted.partition(":")[2].partition(" ")
        with _failing("signatures of Sigstore cannot be checked"):
            return config.use_sigstore_verifier(identity=identity, oidc_issuer=issuer, trust_config=trust_config)
    with _written(pem) as file:
        if _CERTIFICATE in pem:
            return config.use_certificate_verifier(certificate_chain=[file])
        return config.use_elliptic_key_verifier(public_key=file)


@contextmanager
def _written(data: bytes) -> Iterator[Path]:
    """A file with this content: the library takes nothing else. Its name is part of what is signed."""
    with tempfile.TemporaryDirectory(prefix="sdflow-") as folder:
        file = Path(folder, "signed")
        file.write_bytes(data)
        yield file


def _pem_of(trusted: str) -> bytes:
    """A public key, or certificates, in PEM. Raises UsageError."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    remedy = "Name a public key, or a PEM file with one or with certificates."
    what = "is no public key that signs models"
    with os_errors_as("cannot be read", trusted, remedy):
        try:
            if not POINT.fullmatch(trusted):
                content = read_input(Path(trusted).expanduser())
                if _CERTIFICATE not in content:
                    return _pem(serialization.load_pem_public_key(content))
                what = "holds a certificate that cannot be read"
                x509.load_pem_x509_certificates(content)
                return content
            point = bytes.fromhex(trusted)
            return _pem(ec.EllipticCurvePublicKey.from_encoded_point(getattr(ec, _CURVES[len(point)])(), point))
        except (ValueError, KeyError) as error:
            raise UsageError(what, where=trusted, remedy=remedy) from error


def _pem(public: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return bytes(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))


def _spell(public: Any) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return str(public.public_bytes(Encoding.X962, PublicFormat.CompressedPoint).hex())


@contextmanager
def _without_links(model: Path) -> Iterator[tuple[Path, Any]]:
    """What to hash of a model, and how, None: as its signature says. Files that links to folders lead to count as lying in the
    folder itself, as they do in every copy of it."""
    if not model.is_dir() or not any(path.is_symlink() for path in model.rglob("*")):
        yield model, None
        return
    from model_signing.hashing import Config

    found: list[str] = []

    def counted(folder: str, names: list[str]) -> list[str]:
        found.extend(names)
        if len(found) > MOST_FILES:
            raise ValueError(f"it has more than {MOST_FILES:,} files, or links in a circle")
        return []

    def link(source: str, target: str) -> None:
        Path(target).symlink_to(Path(source).resolve())

    with tempfile.TemporaryDirectory(prefix="sdflow-") as folder:
        copy = shutil.copytree(model, Path(folder, model.name), ignore=counted, copy_function=link)
        yield copy, Config().set_allow_symlinks(True)


@contextmanager
def _failing(what: str) -> Iterator[None]:
    """The library has no errors of its own: whatever it raises is raised as a UsageError."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{what}: {' '.join(str(error).split())[:1000] or type(error).__name__}") from error
