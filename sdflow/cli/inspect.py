"""`sdflow inspect`: what a file or folder is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def inspect(
    paths: Annotated[
        list[Path],
        typer.Argument(
            help="A checkpoint, a LoRA, a VAE, an embedding, ...: a file, a folder, or a folder of files.",
            metavar="FILE_OR_FOLDER...",
        ),
    ],
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")] = False,
) -> None:
    """Say what files are, what they are for, and print the lines of a workflow that takes them. Reads headers only."""
    from sdflow.inspection import inspect as look
    from sdflow.report.inspect import print_findings

    print_findings([finding for path in paths for finding in look(path)], as_json=json)
