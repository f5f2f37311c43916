"""`sdflow provenance`, `sdflow push` and `sdflow pull`: share pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sdflow.cli.arguments import AsJson, CacheDir, PipelineFolder, Quiet, Verbose
from sdflow.cli.opened import open_cache

OciReference = Annotated[
    str, typer.Argument(help="Registry, name and tag: oci://ghcr.io/me/fox:1.", metavar="OCI_REFERENCE")
]
PlainHttp = Annotated[
    bool, typer.Option("--plain-http", help="Use HTTP without TLS. Registries on localhost always do.")
]


def push(
    reference: OciReference,
    pipeline: PipelineFolder,
    plain_http: PlainHttp = False,
    cache: CacheDir = None,
    quiet: Quiet = False,
    json: AsJson = False,
) -> None:
    """Push a pipeline to an OCI registry.

    Sends only files that the repository lacks. Uses the credentials of docker login.
    """
    from sdflow.cli.progress import progress_view
    from sdflow.oci import parse_oci
    from sdflow.oci import push as push_pipeline
    from sdflow.report.registry import print_push

    parsed = parse_oci(reference)
    with progress_view(quiet=quiet, verbose=False) as view:
        digests = open_cache(cache).stat
        pushed = push_pipeline(
            parsed, pipeline, digests, plain=plain_http, progress=lambda text: view.doing("push", text)
        )
        view.doing("push", "")
    print_push(pushed, as_json=json, quiet=quiet)


def pull(
    reference: OciReference,
    folder: Annotated[
        Path | None, typer.Argument(help="Folder for the pipeline. Default: pipelines/NAME.", metavar="DIR")
    ] = None,
    plain_http: PlainHttp = False,
    cache: CacheDir = None,
    quiet: Quiet = False,
    json: AsJson = False,
) -> None:
    """Pull a pipeline from an OCI registry.

    Checks every file against its digest. The folder appears only once it is complete.
    """
    from sdflow.cli.progress import progress_view
    from sdflow.oci import parse_oci
    from sdflow.oci import pull as pull_pipeline
    from sdflow.report.registry import print_pull

    parsed = parse_oci(reference)
    out = folder or Path("pipelines") / parsed.name.rpartition("/")[2]
    with progress_view(quiet=quiet, verbose=False) as view:
        digests = open_cache(cache).stat
        pulled = pull_pipeline(parsed, out, digests, plain=plain_http, progress=lambda text: view.doing("pull", text))
        view.doing("pull", "")
    print_pull(pulled, as_json=json, quiet=quiet)


def provenance(pipeline: PipelineFolder, verbose: Verbose = False, json: AsJson = False) -> None:
    """Show what a pipeline was built from, and what built it.

    Prints provenance.json, an in-toto statement with SLSA's predicate. `sdflow verify` compares the files with it.
    """
    from sdflow.manifest.provenance import require_provenance
    from sdflow.report.provenance import print_provenance

    print_provenance(*require_provenance(pipeline), as_json=json, verbose=verbose)
