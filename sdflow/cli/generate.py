"""`sdflow generate`: images from a built pipeline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from sdflow.cli.arguments import AsJson
from sdflow.cli.needs import needs
from sdflow.cli.options import errors_name_options, read_options, takes
from sdflow.cli.quiet import quiet_libraries
from sdflow.families.settings import FAMILY_ARGUMENTS, settings_of
from sdflow.runtime.draw_request import PARAMETERS, GenerateRequest, read_prompts

OPTIONS = {**PARAMETERS, **FAMILY_ARGUMENTS}


@needs("DRAWS")
@takes(OPTIONS)
def generate(
    context: typer.Context,
    pipeline: Annotated[Path, typer.Argument(help="Pipeline folder.", metavar="PIPELINE")],
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="Prompt. Repeatable.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="Text file with one prompt per line.", metavar="FILE")] = None,
    settings_from: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="Image by sdflow, A1111's webui, or InvokeAI whose prompt and settings to use; options override them.",
            metavar="IMAGE",
            show_default=False,
        ),
    ] = None,
    json: AsJson = False,
    interactive: Annotated[
        bool, typer.Option("--interactive", help="Use a page in the browser instead; the server runs until Ctrl-C.")
    ] = False,
    **given: Any,
) -> None:
    """Generate images from a prompt, an image, or a mask."""
    if interactive:
        _on_a_page(context, pipeline)
        return
    quiet_libraries()
    from sdflow.cli.image_progress import image_progress
    from sdflow.cli.settings_from import with_settings_of
    from sdflow.manifest import read_manifest
    from sdflow.report.generate import print_generate
    from sdflow.runtime.generate import generate as draw

    read_manifest(pipeline)  # a folder that is none is told before a bar is drawn
    wanted = [*(prompt or ()), *(read_prompts(prompts) if prompts is not None else ())]
    values, notes = read_options(OPTIONS, given), tuple[str, ...]()
    if settings_from is not None:
        wanted, values, notes = with_settings_of(settings_from, context, OPTIONS, values, wanted)
    request = GenerateRequest(pipeline, wanted, **settings_of(values.items()))
    with errors_name_options(OPTIONS), image_progress() as progress:
        result = draw(request, progress)
    if notes:
        result = replace(result, notes=(*notes, *result.notes))
    print_generate(result, as_json=json)


def _on_a_page(context: typer.Context, pipeline: Path) -> None:
    """Serve the pipeline to this machine alone, and open the page. Raises UsageError for options that the page has."""
    from sdflow.cli.serve import serve
    from sdflow.errors import UsageError

    given = [
        name
        for name in context.params
        if name not in ("pipeline", "interactive")
        and (source := context.get_parameter_source(name)) is not None
        and source.name == "COMMANDLINE"
    ]
    if given:
        raise UsageError(
            f"--interactive cannot be combined with --{given[0].replace('_', '-')}",
            remedy="Set it on the page. `sdflow serve --open` has the options of a server.",
        )
    serve([pipeline], port=0, open_page=True)
