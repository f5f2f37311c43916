"""`sdflow deploy`, `query`, `status`, `terminate`: servers in the background."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sdflow.cli.serve import Folders, Host, KeyFile, NoAuth, RequireVerified

Name = Annotated[str, typer.Argument(help="What it is called.", metavar="NAME")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]


def deploy(
    name: Name,
    pipeline: Folders,
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 0,
    api_key_file: KeyFile = None,
    no_auth: NoAuth = False,
    require_verified: RequireVerified = False,
    loras: Annotated[Path | None, typer.Option(help="As of `sdflow serve`.", metavar="DIR", show_default=False)] = None,
    cache: Annotated[
        Path, typer.Option("--cache", envvar="SDFLOW_CACHE", help="The cache that the pipelines were built with.")
    ] = Path("cache"),
    json: AsJson = False,
) -> None:
    """Start a server in the background. It outlives the terminal; its log lies in the user's cache folder."""
    from sdflow.machine.packages import DRAWS, require_packages

    require_packages("`sdflow deploy`", *DRAWS)
    from sdflow.report.deployments import print_deployments
    from sdflow.serve.deployments import deploy as start
    from sdflow.serve.served_model import read_all_served
    from sdflow.serve.server import access_of, require_installed

    require_installed()  # what can be told at once is told here, and not in the log
    access_of(host, api_key_file, (), no_auth=no_auth)
    read_all_served(pipeline, require_verified=require_verified)
    options = ["--host", host, "--port", str(port), "--cache", str(cache.absolute())]
    options += ["--no-auth"] if no_auth else []
    options += ["--require-verified"] if require_verified else []
    options += ["--loras", str(loras.absolute())] if loras is not None else []
    print_deployments([start(name, pipeline, options, key_file=api_key_file)], as_json=json)


def query(
    name: Name,
    prompt: Annotated[str, typer.Argument(help="What to draw.", metavar="PROMPT")],
    images: Annotated[int, typer.Option(min=1, help="How many.")] = 1,
    size: Annotated[
        str | None, typer.Option(help="WIDTHxHEIGHT. Default: the model's own.", show_default=False)
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Default: the model's.", show_default=False)] = None,
    guidance_scale: Annotated[float | None, typer.Option(help="Default: the model's.", show_default=False)] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Default: a random one.", show_default=False)] = None,
    negative_prompt: Annotated[str | None, typer.Option(help="What not to draw.", show_default=False)] = None,
    model: Annotated[str | None, typer.Option(help="Which of its pipelines.", show_default=False)] = None,
    out: Annotated[Path, typer.Option(help="Folder for the images.", metavar="DIR")] = Path("images"),
) -> None:
    """Draw with a server that was deployed."""
    from sdflow.serve.client import query_files

    fields = {
        "n": images,
        "size": size,
        "steps": steps,
        "guidance_scale": guidance_scale,
        "seed": seed,
        "negative_prompt": negative_prompt,
        "model": model,
    }
    drawn = query_files(name, prompt, **{key: value for key, value in fields.items() if value is not None})
    for number, (content, of) in enumerate(drawn, 1):
        print(_written(out / f"{number:03d}-{of}.png", content))


def _written(path: Path, content: bytes) -> Path:
    from sdflow.atomic_write import write_whole
    from sdflow.errors import telling

    with telling("cannot be written", path):
        write_whole(path, content)
    return path


def status(json: AsJson = False) -> None:
    """The servers that were deployed: where they are, and which have died."""
    from sdflow.report.deployments import print_deployments
    from sdflow.serve.deployments import deployments

    print_deployments(deployments(), as_json=json)


def terminate(name: Name) -> None:
    """End a server that was deployed, once what it draws is drawn."""
    from sdflow.serve.deployments import terminate as end

    ended = end(name)
    print(f"{ended.name}: ended (it was process {ended.pid}, at {ended.url})")
