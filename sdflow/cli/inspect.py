"""`sdflow inspect`: what a file or folder is; `sdflow init`: a workflow for it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from sdflow.cli.arguments import AsJson


def inspect(
    paths: Annotated[
        list[Path],
        typer.Argument(
            help="A checkpoint, a LoRA, a VAE, an embedding, ...: a file, a folder, or a folder of files.",
            metavar="FILE_OR_FOLDER...",
        ),
    ],
    json: AsJson = False,
) -> None:
    """Say what files are, what they are for, and print the lines of a workflow that takes them. Reads headers only."""
    from sdflow.inspection import inspect as look
    from sdflow.report.inspect import print_inspection

    print_inspection([each for path in paths for each in look(path)], as_json=json)


def init(
    model: Annotated[
        str | None,
        typer.Option(
            help="As a workflow names one: a file, a folder, hf:owner/name, ... Default: the LoRA's, or SD 1.5."
        ),
    ] = None,
    target: Annotated[str, typer.Option(help="What to build for.")] = "cpu",
    lora: Annotated[
        list[str] | None, typer.Option("--lora", help="A LoRA and its scale. Repeatable.", metavar="FILE[:SCALE]")
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(help="The workflow to extend, as sdxl. Default: what the model is.", show_default=False),
    ] = None,
    out: Annotated[Path, typer.Option(help="The file to write.", metavar="FILE")] = Path("workflow.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
) -> None:
    """Write a workflow for a model, a target and LoRAs, complete and commented."""
    from sdflow.report.output import put
    from sdflow.run.init import InitRequest, write_workflow

    written = write_workflow(InitRequest(out, model, target, lora or (), base, force))
    put(f"{written}: written. Next: sdflow run {shlex.quote(str(written))}", wrap=False)
