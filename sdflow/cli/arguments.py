"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Workflows = Annotated[
    list[Path], typer.Argument(help="Workflow files (YAML), or names of shipped ones: sd15.", metavar="WORKFLOW...")
]
OneWorkflow = Annotated[
    Path, typer.Argument(help="Workflow file (YAML), or the name of a shipped one: sd15.", metavar="WORKFLOW")
]
PipelineFolder = Annotated[Path, typer.Argument(help="Pipeline folder.", metavar="PIPELINE")]
Targets = Annotated[
    list[str] | None, typer.Option("--target", help="Target to build for, instead of the workflow's. Repeatable.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Override a value: unet.passes.2.opt_level=0, model=synthetic:sd15. Repeatable.",
        metavar="KEY=VALUE",
    ),
]
CacheDir = Annotated[
    Path | None, typer.Option("--cache", envvar="SDFLOW_CACHE", help="Cache folder. Default: the user's cache.")
]
Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        min=1,
        help="Maximum number of steps to run in parallel, memory permitting. Default: 2, and 1 for steps that carry weights.",
    ),
]
Rehash = Annotated[
    bool,
    typer.Option("--rehash", help="Hash every file again instead of trusting digests recorded for unchanged files."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress; print only the result.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show every step, output and column.")]
Url = Annotated[
    str | None,
    typer.Option("--url", help="Remote cache: a URL or a folder. Default: $SDFLOW_REMOTE_CACHE.", metavar="URL"),
]
Trust = Annotated[
    list[str] | None,
    typer.Option(
        "--trust",
        help="Whose signature to require: a public key, a PEM file, or 'sigstore:IDENTITY ISSUER'. Repeatable.",
        metavar="KEY",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
