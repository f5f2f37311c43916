"""`sdflow sign`: sign a pipeline, or check who signed it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sdflow.cli.arguments import AsJson


def sign(
    pipeline: Annotated[Path, typer.Argument(help="Pipeline folder.", metavar="PIPELINE")],
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
        Path | None,
        typer.Option("--trust-config", help="Trust configuration of a private Sigstore.", metavar="FILE"),
    ] = None,
    signature: Annotated[
        Path | None, typer.Option("--signature", help="Signature file. Default: PIPELINE.sig.", metavar="FILE")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check the signature instead of signing; requires --trust.")
    ] = False,
    trust: Annotated[
        list[str] | None,
        typer.Option(
            "--trust",
            help="With --check: a public key, a PEM file, or 'sigstore:IDENTITY ISSUER'. Repeatable.",
            metavar="KEY",
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Sign a pipeline, or check who signed it.

    By OpenSSF Model Signing: `model_signing verify` accepts the signatures, and `--check` those of `model_signing sign`.
    """
    from sdflow.errors import UsageError
    from sdflow.report.output import print_json, put
    from sdflow.run.sign import check_signature, sign_pipeline, signature_of
    from sdflow.store.signing import Signer, signer_from_environment

    place = signature or signature_of(pipeline)
    if check:
        signed_by = check_signature(pipeline, place, trust or (), trust_config)
    else:
        if sigstore and key is not None:
            raise UsageError("--key and --sigstore exclude each other", where="sdflow sign", remedy="Give one of them.")
        signer = Signer(None, None, identity_token, trust_config) if sigstore else signer_from_environment()
        signer = signer if key is None else Signer(key, certificate)
        if signer is None:
            raise UsageError(
                "nothing to sign with",
                where="sdflow sign",
                remedy="Give --key FILE (`sdflow cache key FILE` makes one), or --sigstore.",
            )
        sign_pipeline(pipeline, place, signer)
        signed_by = signer.public
    if json:
        print_json("signature", {"pipeline": str(pipeline), "signature": str(place), "signer": signed_by})
    else:
        put(f"{place}: {'the signature holds, ' if check else ''}signed by {signed_by}", wrap=False)
