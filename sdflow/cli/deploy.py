"""`sdflow deploy`, `query`, `status`, `terminate`: servers that run in the background."""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from sdflow.cli.arguments import AsJson
from sdflow.cli.needs import needs
from sdflow.cli.options import takes, with_options_of
from sdflow.cli.serve import read_sizes, serve
from sdflow.families.settings import SERVED

Name = Annotated[str, typer.Argument(help="Name of the deployment.", metavar="NAME")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 picks a free one.")]

OWN = ("name", "pipeline", "api_key_file", "json")
"""Options that `deploy` handles itself; all others are passed to the server."""

TEXTS = {name: each if each.read is None else replace(each, kind=str, read=None) for name, each in SERVED.items()}
"""The settings of `query`, passed as text; the server parses them."""


@needs("DRAWS", "SERVES")
@with_options_of(
    serve, port=inspect.Parameter("port", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=0, annotation=Port)
)
def deploy(context: typer.Context, name: Name, json: AsJson = False, **said: Any) -> None:
    """Start a server in the background.

    It outlives the terminal. Its log is in your cache folder.
    """
    from sdflow.report.deployments import print_deployments
    from sdflow.serve.deployments import deploy as start
    from sdflow.serve.http.models import Models, read_aliases
    from sdflow.serve.http.served_model import read_all_served
    from sdflow.serve.http.server import access_of
    from sdflow.serve.on_ray.spread import read_spread, with_gpus

    # Check early, so that mistakes show here instead of in the log.
    access_of(said["host"], said["api_key_file"], (), no_auth=said["no_auth"], admin_key_file=said["admin_key_file"])
    # The server checks the files.
    served = read_all_served(said["pipeline"], require_verified=said["require_verified"], check=False)
    Models(served, read_aliases(said["alias"] or []), said["default"])
    spread = read_spread(
        *(said[each] for each in ("on", "port", "replicas", "gpus", "queue", "take_over")),
        tls=bool(said["ssl_certfile"] or said["ssl_keyfile"]),
    )
    if spread is not None:
        with_gpus(spread, said["gpus"], [model.manifest for model in served.values()])
    read_sizes(said["batch_sizes"])
    print_deployments(
        [
            start(
                name,
                said["pipeline"],
                ["--port", str(said["port"]), *_given_options(context)],
                key_file=said["api_key_file"],
            )
        ],
        as_json=json,
    )


def _given_options(context: typer.Context) -> list[str]:
    """Options set on the command line or in the environment, as arguments for `serve`, with absolute paths."""
    spelled = []
    for option in context.command.params:
        name = option.name or ""
        source = context.get_parameter_source(name)
        if name in (*OWN, "port") or source is None or source.name in ("DEFAULT", "DEFAULT_MAP"):
            continue
        value = context.params[name]
        if isinstance(value, bool):
            spelled.append((option.opts if value else option.secondary_opts)[0])
        else:
            for each in value if isinstance(value, list | tuple) else [value]:
                spelled += [option.opts[0], str(each.absolute() if isinstance(each, Path) else each)]
    return spelled


@takes(TEXTS)
def query(
    name: Name,
    prompt: Annotated[str, typer.Argument(help="Prompt.", metavar="PROMPT")],
    images: Annotated[int, typer.Option("--images", "-n", min=1, help="Number of images.")] = 1,
    size: Annotated[str | None, typer.Option(help="WIDTHxHEIGHT in pixels. Default: the model's native size.")] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(help="A LoRA on the server and its scale (default 1.0). Repeatable.", metavar="NAME[:SCALE]"),
    ] = None,
    image: Annotated[Path | None, typer.Option(help="Image to start from.", metavar="FILE")] = None,
    mask: Annotated[
        Path | None,
        typer.Option(
            help="Mask: repaint where it is transparent, or white if it has no alpha channel.", metavar="FILE"
        ),
    ] = None,
    reference: Annotated[
        list[Path] | None,
        typer.Option(help="Reference image that the model edits or combines. Repeatable.", metavar="FILE"),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Pipeline to use, if the server has several.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the images.", metavar="DIR")] = Path("images"),
    **given: Any,
) -> None:
    """Generate images with a deployed server."""
    from sdflow.errors import UsageError
    from sdflow.report.output import put
    from sdflow.serve.client import query_answers

    said = {each: value for each, value in given.items() if value != SERVED[each].default}
    needing = [SERVED[each].option(each) for each in said if SERVED[each].needs is not None]
    if image is None and (mask is not None or needing):
        where = needing[0] if needing else "--mask"
        raise UsageError("needs an image to start from", where=where, remedy="Add --image FILE.")
    fields = {
        "n": images,
        "size": size,
        "loras": [_lora(each) for each in lora or ()] or None,
        "image": image,
        "mask": mask,
        "references": reference or None,
        "model": model,
        **said,
    }
    drawn = query_answers(name, prompt, **{key: value for key, value in fields.items() if value is not None})
    for number, each in enumerate(drawn, 1):
        put(_written(out / f"{number:03d}-{each.seed}.png", each.file), wrap=False)
    for warning in dict.fromkeys(warning for each in drawn for warning in each.warnings):
        print(f"warning: {warning}", file=sys.stderr)


def _lora(text: str) -> dict[str, Any]:
    """Parse NAME or NAME:SCALE into a request's form. Raises UsageError."""
    from sdflow.errors import UsageError

    name, scale = text.rsplit(":", 1) if ":" in text else (text, "1")
    try:
        return {"name": name, "scale": float(scale)}
    except ValueError as error:
        raise UsageError(
            f"{scale!r} is not a scale", where=f"--lora {text}", remedy="Write NAME or NAME:SCALE, such as ink:0.8."
        ) from error


def _written(path: Path, content: bytes) -> Path:
    from sdflow.disk.atomic_write import write_whole
    from sdflow.errors import os_errors_as

    with os_errors_as("cannot be written", path):
        write_whole(path, content)
    return path


def status(json: AsJson = False) -> None:
    """List deployed servers and their state."""
    from sdflow.report.deployments import print_deployments
    from sdflow.serve.deployments import deployments

    print_deployments(deployments(), as_json=json)


def terminate(name: Name) -> None:
    """Stop a server after current requests finish."""
    from sdflow.report.output import put
    from sdflow.serve.deployments import terminate as end

    ended = end(name)
    put(f"{ended.name}: stopped (process {ended.pid}, at {ended.url})")
