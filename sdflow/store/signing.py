"""Signs files and folders and verifies signatures, compatible with OpenSSF Model Signing (`model_signing`).

A signature is a Sigstore bundle in its own file. Signing and verifying use the network with Sigstore, not with keys and
certificates. Functions import `model_signing` on first use: the import takes a second.
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
"""As a key: the environment's identity, as in GitHub Actions. `sigstore:IDENTITY ISSUER` names a trusted signer."""
POINT = re.compile("0[23]([0-9a-f]{64}|[0-9a-f]{96}|[0-9a-f]{132})")
SIGNER = re.compile(rf"{POINT.pattern}|sigstore:\S+ https?://\S+|.+\.(pem|pub|crt|cer)")
"""Spelling of a trusted signer: public key, Sigstore identity and issuer, or PEM file (a key, or root certificates)."""
_CURVES = {33: "SECP256R1", 49: "SECP384R1", 67: "SECP521R1"}  # bytes of a compressed point -> curve
MOST_FILES = 1_000  # of a folder with links, which may form a loop
_DIGESTS = re.compile(r": Expected 'Digest\(.*?\)', Actual 'Digest\(.*?\)'(?=\"|$)")  # raw bytes in library errors
_CERTIFICATE = b"BEGIN CERTIFICATE"
_NEW_KEY = "`sdflow cache key FILE` creates one."


class Untrusted(Exception):
    """No trusted signer has signed the content."""


def require_signers(trust: Sequence[str]) -> None:
    """Raise UsageError if the key or certificate of a trusted signer cannot be read, or the packages are missing."""
    require_packages("checking signatures", *EXTRAS["sign"])
    for each in trust:
        if POINT.fullmatch(each) or is_file(each):
            _pem_of(each)


def is_public_key(key: str) -> bool:
    """Return whether the text is a public key, that is, a point on its curve."""
    with suppress(UsageError):
        return bool(POINT.fullmatch(key) and _pem_of(key))
    return False


def is_file(trusted: str) -> bool:
    return not (POINT.fullmatch(trusted) or trusted.startswith(f"{SIGSTORE}:"))


def make_key(path: Path) -> str:
    """Create a private key (P-256) in a new file that only its owner can read, and its public key in FILE.pub. Returns
    the public key as `trust` takes it. Raises UsageError if the file exists or cannot be written."""
    require_packages("making a key", *EXTRAS["sign"])
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = ec.generate_private_key(ec.SECP256R1())
    data = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    with os_errors_as("the key cannot be written", path, "Use a new file."):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as stream:  # noqa: PTH123
            stream.write(data)
        path.with_name(f"{path.name}.pub").write_bytes(_pem(key.public_key()))
    return _spell(key.public_key())


@dataclass(frozen=True)
class Signer:
    """Signs with a private key (PEM), optionally with its certificate, or with Sigstore if there is no key.

    certificates: PEM, the key's first, then intermediates. identity_token: for Sigstore; default: the environment's, or
    a browser login. trust_config: for a private Sigstore. Raises UsageError for an invalid key or missing packages.
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
        """The public key as `trust` takes it, or "sigstore"."""
        if self.key is None:
            return SIGSTORE
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        where, remedy = str(self.key), f"Pass a PEM file with a P-256 private key; {_NEW_KEY}"
        try:
            with os_errors_as("cannot be read", where, remedy):
                key = serialization.load_pem_private_key(read_input(self.key.expanduser()), None)
        except (ValueError, TypeError) as error:
            raise UsageError("contains no unencrypted private key", where=where, remedy=remedy) from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name not in map(str.lower, _CURVES.values()):
            raise UsageError("contains a key of another type", where=where, remedy=remedy)
        return _spell(key.public_key())

    def sign(self, model: Path, ignore: Sequence[Path] = ()) -> bytes:
        """Sign a file, or a folder except the ignored paths. Raises UsageError if signing fails."""
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
        with _written(data) as model:
            return self.sign(model)


def signer_from_environment(environment: Mapping[str, str] = os.environ) -> Signer | None:
    """Return the signer of uploads if $SDFLOW_SIGNING_KEY names a key or Sigstore. Raises UsageError."""
    key = environment.get(KEY_VARIABLE)
    if not key:
        return None
    return Signer(None if key == SIGSTORE else Path(key), certificates_from_environment(environment))


def certificates_from_environment(environment: Mapping[str, str] = os.environ) -> Path | None:
    certificates = environment.get(CERTIFICATE_VARIABLE)
    return Path(certificates) if certificates else None


def verify(model: Path, signature: bytes, trust: Sequence[str], trust_config: Path | None = None) -> str:
    """Return the trusted signer that signed a file or folder in its current state. Raises Untrusted with the reason, or
    UsageError if a trusted key or certificate cannot be read."""
    why = "it is not signed with a trusted key"
    try:
        bundle = parse_json(signature)
        material = bundle["verificationMaterial"]
        by_key = "publicKey" in material
        hint = by_key and (material["publicKey"] or {}).get("hint")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Untrusted(f"its signature is not a Sigstore bundle ({error})") from error
    for trusted in trust:
        pem = None if trusted.startswith(f"{SIGSTORE}:") else _pem_of(trusted)
        is_key = pem is not None and _CERTIFICATE not in pem
        own_hint = hashlib.sha256(pem).hexdigest() if pem is not None and is_key else None
        if is_key is not by_key or (hint and own_hint != hint):
            continue
        if is_key and not hint:  # without a hint, the library prints a warning to stdout
            material["publicKey"] = {"hint": own_hint}
            signature = json.dumps(bundle).encode()
        try:
            with _without_links(model) as (place, linked), _written(signature) as file:
                _verifier(trusted, pem, trust_config).set_hashing_config(linked).verify(place, file)
        except Exception as error:  # noqa: BLE001  (an untrusted bundle can make the library raise anything)
            why = _DIGESTS.sub("", " ".join(f"{error}".split()))[:1000] or type(error).__name__
            continue
        return trusted
    raise Untrusted(why)


def verify_data(data: bytes, signature: bytes, trust: Sequence[str]) -> str:
    with _written(data) as model:
        return verify(model, signature, trust)


def _verifier(trusted: str, pem: bytes | None, trust_config: Path | None) -> Any:
    """Return the library's verifier for one trusted signer. Sigstore needs the network."""
    from model_signing.verifying import Config

    config = Config()
    if pem is None:
        identity, _, issuer = trusted.partition(":")[2].partition(" ")
        with _failing("Sigstore signatures cannot be checked"):
            return config.use_sigstore_verifier(identity=identity, oidc_issuer=issuer, trust_config=trust_config)
    with _written(pem) as file:
        if _CERTIFICATE in pem:
            return config.use_certificate_verifier(certificate_chain=[file])
        return config.use_elliptic_key_verifier(public_key=file)


@contextmanager
def _written(data: bytes) -> Iterator[Path]:
    """Yield a temporary file, the only input the library takes. Signatures cover its name."""
    with tempfile.TemporaryDirectory(prefix="sdflow-") as folder:
        file = Path(folder, "signed")
        file.write_bytes(data)
        yield file


def _pem_of(trusted: str) -> bytes:
    """Return the public key or certificates of a trusted signer in PEM. Raises UsageError."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    remedy = "Pass a public key, or a PEM file with a public key or certificates."
    what = "is not a public key for signing models"
    with os_errors_as("cannot be read", trusted, remedy):
        try:
            if not POINT.fullmatch(trusted):
                content = read_input(Path(trusted).expanduser())
                if _CERTIFICATE not in content:
                    return _pem(serialization.load_pem_public_key(content))
                what = "contains an unreadable certificate"
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
    """Yield the path to hash and the hashing config (None: the signature's own). Files behind links to folders are
    hashed as files of the model itself, as in every copy of it."""
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
    """Turn any exception into a UsageError: the library has no error classes of its own."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{what}: {' '.join(str(error).split())[:1000] or type(error).__name__}") from error
