"""`sdflow bake`: LoRAs into a pipeline that was built before."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sdflow.cli.arguments import AsJson, CacheDir, Jobs, Rehash
from sdflow.cli.opened import open_cache


def bake(
    base: Annotated[
        Path, typer.Option("--base", help="A pipeline folder that sdflow built; LoRAs that it has stay.", metavar="DIR")
    ],
    lora: Annotated[
        list[str],
        typer.Option(
            "--lora",
            help="A LoRA and its scale (default 1.0). FILE: a .safetensors file, a folder, hf:owner/name; with #NAME where a "
            "folder or repository holds several. Repeatable.",
            metavar="FILE:SCALE",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="The folder of the new pipeline.", metavar="DIR")],
    copy: Annotated[bool, typer.Option("--copy", help="Copy the models in, so that the folder stands alone.")] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Hold the result to the PyTorch model with the LoRAs merged; the report goes to --results."
        ),
    ] = False,
    results: Annotated[Path, typer.Option("--results", help="Folder for the report of --verify.")] = Path("results"),
    jobs: Jobs = None,
    rehash: Rehash = False,
    cache: CacheDir = None,
    json: AsJson = False,
) -> None:
    """Merge LoRAs into a pipeline that was built before. Needs no workflow, exports and fuses nothing again."""
    from sdflow.cli.progress import progress_view
    from sdflow.report.build import print_bake
    from sdflow.run.bake import bake as bake_pipeline

    with progress_view() as listener:
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
    print_bake(result, as_json=json)
