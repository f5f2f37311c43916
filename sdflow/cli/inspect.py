"""`sdflow inspect`: identify a file or folder; `sdflow init`: write a workflow for it."""

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
            help="Checkpoint, LoRA, VAE, embedding or another file of weights, a folder, or sample:NAME.",
            metavar="FILE_OR_FOLDER...",
        ),
    ],
    json: AsJson = False,
) -> None:
    """Identify checkpoints, LoRAs and other model files.

    Also prints the workflow lines that use them. Reads headers only.
    """
    from sdflow.disk.shipped import sample_folder
    from sdflow.inspection import inspect as look
    from sdflow.report.inspect import print_inspection

    places = [
        sample_folder(name) if (name := str(path).removeprefix("sample:")) != str(path) else path for path in paths
    ]
    print_inspection([each for place in places for each in look(place)], as_json=json)


def init(
    model: Annotated[
        str | None,
        typer.Option(help="Model: a file, a folder, or hf:owner/name. Default: the LoRA's base model, or SD 1.5."),
    ] = None,
    target: Annotated[str, typer.Option(help="Target to build for.")] = "cpu",
    lora: Annotated[
        list[str] | None, typer.Option("--lora", help="A LoRA and its scale. Repeatable.", metavar="FILE[:SCALE]")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="Base workflow to extend, such as sdxl. Default: detected from the model.")
    ] = None,
    fits: Annotated[
        str | None,
        typer.Option(
            help="Memory to fit in, such as 8GB: the device's, or the machine's for the CPU. Chooses quantization and how "
            "weights share the device.",
            metavar="SIZE",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="File to write.", metavar="FILE")] = Path("workflow.yaml"),
    overwrite: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a commented workflow for a model, target and LoRAs."""
    from sdflow.report.output import put
    from sdflow.run.init import InitRequest, write_workflow
    from sdflow.units import parse_size

    size = parse_size(fits, "--fits") if fits is not None else None
    written = write_workflow(InitRequest(out, model, target, lora or (), base, overwrite, size))
    put(f"{written}: written. Next: sdflow run {shlex.quote(str(written))}", wrap=False)
