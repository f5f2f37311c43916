"""`sdflow bake`: merge LoRAs into an existing pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sdflow.cli.arguments import AsJson, CacheDir, Jobs, Quiet, Rehash, Verbose
from sdflow.cli.opened import open_cache


def bake(
    base: Annotated[
        Path, typer.Option("--base", help="Pipeline folder to start from; LoRAs already in it are kept.", metavar="DIR")
    ],
    lora: Annotated[
        list[str],
        typer.Option(
            "--lora",
            help="A LoRA and its scale (default 1.0). FILE is a .safetensors file, a folder, or hf:owner/name; add #NAME where a "
            "folder or repository holds several. Repeatable.",
            metavar="FILE:SCALE",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder for the new pipeline.", metavar="DIR")],
    copy: Annotated[
        bool, typer.Option("--copy", help="Copy the models, so that the folder is self-contained.")
    ] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Verify the result against PyTorch with the LoRAs merged; the report goes to --results."
        ),
    ] = False,
    results: Annotated[Path, typer.Option("--results", help="Folder for the report of --verify.")] = Path("results"),
    jobs: Jobs = None,
    rehash: Rehash = False,
    cache: CacheDir = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    json: AsJson = False,
) -> None:
    """Merge LoRAs into an existing pipeline.

    Needs no workflow, and does not export or optimize anything again.
    """
    from sdflow.cli.progress import progress_view
    from sdflow.report.run import print_bake
    from sdflow.run.bake import bake as bake_pipeline

    with progress_view(quiet=quiet, verbose=verbose) as listener:
        result = bake_pipeline(
            base,
            lora,
            out,
            open_cache(cache, rehash=rehash),
            listener,
            copy=copy,
            jobs=jobs,
            verify=verify,
            results=results,
        )
    print_bake(result, as_json=json, quiet=quiet, verbose=verbose)
