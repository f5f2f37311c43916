"""`sdflow generate`: generate images with a built pipeline."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sdflow.cli.arguments import AsJson, PipelineFolder
from sdflow.cli.needs import needs
from sdflow.cli.options import errors_name_options, read_options, takes
from sdflow.cli.quiet import quiet_libraries, say
from sdflow.cli.terminal import live_console
from sdflow.errors import UsageError
from sdflow.families.settings import FAMILY_ARGUMENTS, settings_of
from sdflow.parameter import Parameter
from sdflow.runtime.draw_request import PARAMETERS, GenerateRequest, read_prompts

if TYPE_CHECKING:
    from sdflow.runtime.files.image_text_reading import ImageSettings
    from sdflow.runtime.generate import Progress

OPTIONS = {**PARAMETERS, **FAMILY_ARGUMENTS}


@needs("DRAWS")
@takes(OPTIONS)
def generate(
    context: typer.Context,
    pipeline: PipelineFolder,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="Prompt. Repeatable.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="Text file with one prompt per line.", metavar="FILE")] = None,
    settings_from: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="Image by sdflow, A1111's webui, or InvokeAI whose prompt and settings to use; options override them.",
            metavar="IMAGE",
        ),
    ] = None,
    json: AsJson = False,
    interactive: Annotated[
        bool, typer.Option("--interactive", help="Open a page in the browser instead; its server runs until Ctrl-C.")
    ] = False,
    **given: Any,
) -> None:
    """Generate images from a prompt, an image, or a mask."""
    if interactive:
        _on_a_page(context, pipeline)
        return
    quiet_libraries()
    from sdflow.manifest import read_manifest
    from sdflow.report.generate import print_generate
    from sdflow.runtime.generate import generate as draw

    read_manifest(pipeline)  # report an invalid folder before the progress bar appears
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
    """Serve the pipeline on this machine only, and open the page. Raises UsageError for options set on the page."""
    from sdflow.cli.serve import serve

    given = [name for name in context.params if name not in ("pipeline", "interactive") and _is_said(context, name)]
    if given:
        raise UsageError(
            f"--interactive cannot be combined with --{given[0].replace('_', '-')}",
            remedy="Set it on the page. `sdflow serve --open` has the options of a server.",
        )
    serve([pipeline], port=0, open_page=True)


@contextmanager
def image_progress() -> Iterator[Progress]:
    """Yield a progress display for this standard error."""
    from sdflow.runtime.generate import Progress

    console = live_console()
    if console is None:
        yield Progress(say, _Lines().step)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bars(*columns, console=console, transient=True) as bars:
        bar = bars.add_task("loading", total=None)

        def step(label: str, done: int, total: int) -> None:
            bars.update(bar, description=f"image {label}", completed=done, total=total)

        yield Progress(lambda text: bars.update(bar, description=text), step)


class _Lines:
    SECONDS_BETWEEN = 1.0

    def __init__(self) -> None:
        self._said = 0.0

    def step(self, label: str, done: int, total: int) -> None:
        """Print a step at most once per SECONDS_BETWEEN, and always an image's last one."""
        now = time.perf_counter()
        if done == total or now - self._said >= self.SECONDS_BETWEEN:
            self._said = now
            say(f"image {label}: step {done} of {total}")


ANY_OF: Mapping[str, tuple[str, ...]] = {"embeddings": ("embeddings", "embedding_folder")}
"""Options that provide an input, where several do."""


def with_settings_of(
    path: Path, context: typer.Context, options: Mapping[str, Parameter], given: Mapping[str, Any], prompts: list[str]
) -> tuple[list[str], dict[str, Any], tuple[str, ...]]:
    """Return prompts and option values, taken from an image unless the command line sets them, and notes on the rest.

    Raises UsageError if the image was generated from files that the command line does not name.
    """
    from sdflow.runtime.files.image_text_reading import read_image_settings

    found = read_image_settings(path)
    said = {name for name in context.params if _is_said(context, name)}
    _require_inputs(path, found, said, options)
    taken = {name: value for name, value in found.settings.items() if name in given and name not in said}
    notes = tuple(f"{path.name}, written by {found.program}: {note}" for note in found.notes)
    return prompts or [found.prompt], {**given, **taken}, notes


def _is_said(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _require_inputs(path: Path, found: ImageSettings, said: set[str], options: Mapping[str, Parameter]) -> None:
    missing = [each for each in found.inputs if said.isdisjoint(ANY_OF.get(each, (each,)))]
    if missing:
        spelled = ", ".join(f"{options[each].option(each)} {options[each].metavar}" for each in missing)
        raise UsageError(
            f"the image was also generated from: {', '.join(each.replace('_', ' ') for each in missing)}",
            where=f"--from {path}",
            remedy=f"Pass the same files: {spelled}.",
        )
