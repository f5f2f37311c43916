"""`sdflow sign`: sign a pipeline, or check who signed it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sdflow.cli.arguments import AsJson, PipelineFolder, Trust

if TYPE_CHECKING:
    from sdflow.store.signing import Signer


def sign(
    pipeline: PipelineFolder,
    key: Annotated[
        Path | None,
        typer.Option("--key", help="Private key of `sdflow cache key`. Default: $SDFLOW_SIGNING_KEY.", metavar="FILE"),
    ] = None,
    certificate: Annotated[
        Path | None,
        typer.Option(
            "--certificate",
            help="Certificate of the key and its chain. Default: $SDFLOW_SIGNING_CERTIFICATE.",
            metavar="FILE",
        ),
    ] = None,
    sigstore: Annotated[
        bool, typer.Option("--sigstore", help="Sign with Sigstore instead of a key. Uses the network.")
    ] = False,
    identity_token: Annotated[
        str | None,
        typer.Option(
            "--identity-token", help="OpenID token for Sigstore. Default: the CI's own, or a browser.", metavar="TOKEN"
        ),
    ] = None,
    trust_config: Annotated[
        Path | None, typer.Option("--trust-config", help="Trust configuration of a private Sigstore.", metavar="FILE")
    ] = None,
    signature: Annotated[
        Path | None, typer.Option("--signature", help="Signature file. Default: PIPELINE.sig.", metavar="FILE")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check the signature instead of signing; requires --trust.")
    ] = False,
    trust: Trust = None,
    json: AsJson = False,
) -> None:
    """Sign a pipeline, or check who signed it.

    Signatures follow OpenSSF Model Signing: `model_signing verify` can check them, and `--check` can check those of
    `model_signing sign`.
    """
    from sdflow.errors import UsageError
    from sdflow.report.output import print_json, put
    from sdflow.run.sign import check_signature, sign_pipeline, signature_of

    def refuse(option: str, given: object, why: str, remedy: str) -> None:
        if given:
            raise UsageError(why, where=option, remedy=remedy)

    place = signature or signature_of(pipeline)
    if check:
        for option, given in (
            ("--key", key), ("--certificate", certificate), ("--sigstore", sigstore), ("--identity-token", identity_token)
        ):  # fmt: skip
            refuse(option, given, "cannot be combined with --check, which only checks", "Leave one of them out.")
        signed_by = check_signature(pipeline, place, trust or (), trust_config)
    else:
        refuse("--trust", trust, "requires --check", "Add --check, or leave out --trust to sign.")
        signer = _signer(key, certificate, sigstore, identity_token, trust_config)
        sign_pipeline(pipeline, place, signer)
        signed_by = signer.public
    if json:
        print_json("signature", {"pipeline": str(pipeline), "signature": str(place), "signer": signed_by})
    else:
        put(f"{place}: {'valid, ' if check else ''}signed by {signed_by}", wrap=False)


def _signer(
    key: Path | None, certificate: Path | None, sigstore: bool, identity_token: str | None, trust_config: Path | None
) -> Signer:
    """Return the signer from the options, else the environment. Raises UsageError for conflicting options."""
    from sdflow.errors import UsageError
    from sdflow.store.signing import KEY_VARIABLE, SIGSTORE, Signer, certificates_from_environment

    if sigstore and key is not None:
        raise UsageError("--key and --sigstore cannot be combined", where="sdflow sign", remedy="Use one of them.")
    named = os.environ.get(KEY_VARIABLE)
    sigstore = sigstore or (key is None and named == SIGSTORE)
    if key is None and not sigstore and named:
        key = Path(named)
    for option, given, needs in (
        ("--certificate", certificate is not None and key is None, f"--key, or ${KEY_VARIABLE}"),
        ("--identity-token", identity_token is not None and not sigstore, "--sigstore"),
        ("--trust-config", trust_config is not None and not sigstore, "--sigstore"),
    ):
        if given:
            raise UsageError(f"requires {needs}", where=option, remedy=f"Add {needs}, or leave out {option}.")
    if sigstore:
        return Signer(None, None, identity_token, trust_config)
    if key is None:
        raise UsageError(
            "no signing key",
            where="sdflow sign",
            remedy="Add --key FILE (`sdflow cache key FILE` creates one), or --sigstore.",
        )
    return Signer(key, certificate or certificates_from_environment())
