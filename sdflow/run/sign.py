"""`sdflow sign`: sign a pipeline folder with OpenSSF Model Signing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sdflow.disk.atomic_write import write_whole
from sdflow.disk.input_file import no_file, read_input
from sdflow.errors import UsageError, VerificationError, os_errors_as
from sdflow.store.signing import Signer, Untrusted, require_signers, verify


def signature_of(pipeline: Path) -> Path:
    """The default signature file: next to the folder, which contains only sdflow's files."""
    pipeline = pipeline.absolute()
    return pipeline.with_name(f"{pipeline.name}.sig")


def sign_pipeline(pipeline: Path, signature: Path, signer: Signer) -> None:
    """Write the signature of a folder or a file. Raises UsageError."""
    _require_there(pipeline)
    inside = signature.absolute().is_relative_to(pipeline.absolute())
    data = signer.sign(pipeline, [signature.absolute().relative_to(pipeline.absolute())] if inside else [])
    with os_errors_as("cannot be written", signature, "Name another file with --signature."):
        write_whole(signature, data)


def check_signature(pipeline: Path, signature: Path, trust: Sequence[str], trust_config: Path | None = None) -> str:
    """Return which trusted signer signed the current folder or file. Raises VerificationError if none did."""
    _require_there(pipeline)
    if not trust:
        raise UsageError("no trusted keys", where="--check", remedy="Name a public key with --trust.")
    require_signers(trust)
    if not signature.is_file():
        raise UsageError(
            "there is no such signature", where=str(signature), remedy="Name it with --signature, or sign: sdflow sign."
        )
    with os_errors_as("cannot be read", signature, "Name a signature file with --signature."):
        bundle = read_input(signature)
    try:
        return verify(pipeline, bundle, trust, trust_config)
    except Untrusted as error:
        raise VerificationError(
            f"the signature is not valid: {error}",
            where=str(pipeline),
            remedy="The files changed, or somebody else signed them: get them again from the signer.",
        ) from error


def _require_there(pipeline: Path) -> None:
    if not pipeline.is_dir() and not pipeline.is_file():
        raise UsageError(no_file(pipeline), where=str(pipeline), remedy="Name a pipeline folder.")
