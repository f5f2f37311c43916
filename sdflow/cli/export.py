"""`sdflow export`: a built pipeline for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sdflow.cli.arguments import AsJson
from sdflow.cli.needs import needs


@needs("DRAWS")
def export(
    pipeline: Annotated[Path, typer.Argument(help="A pipeline folder that sdflow built.", metavar="PIPELINE")],
    one_file: Annotated[
        Path | None,
        typer.Option("--one-file", help="Write the whole pipeline as one ONNX graph.", metavar="OUT.onnx"),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            help="The scheduler and its steps: ddim,50. Default: the pipeline's.",
            metavar="NAME[,STEPS]",
            show_default=False,
        ),
    ] = None,
    schedule_file: Annotated[
        Path | None,
        typer.Option(help="Write the scheduler's table, for graphs with --open-schedule.", metavar="FILE.json"),
    ] = None,
    open_schedule: Annotated[
        bool, typer.Option("--open-schedule", help="The scheduler's table is an input of the graph, not baked in.")
    ] = False,
    guidance_scale: Annotated[
        float | None,
        typer.Option(
            help="Up to 1: a graph without guidance, twice as fast. Above, it is an input anyway. Default: the model's.",
            show_default=False,
        ),
    ] = None,
    negative: Annotated[
        bool,
        typer.Option(
            "--negative/--no-negative", help="Whether negative prompts are an input, where there is guidance."
        ),
    ] = True,
    checker: Annotated[
        bool, typer.Option("--checker/--no-checker", help="Whether the safety checker goes in, where there is one.")
    ] = True,
    text: Annotated[
        bool, typer.Option("--text", help="Texts go in, not token ids: for programs with onnxruntime-extensions.")
    ] = False,
    height: Annotated[
        int | None, typer.Option(help="Pixels. With a size, the graph draws this one alone, and faster on a GPU.")
    ] = None,
    width: Annotated[int | None, typer.Option(help="Pixels. Default: the model's own size.")] = None,
    images: Annotated[int | None, typer.Option(help="How many at once, where the size is one alone.")] = None,
    embed: Annotated[
        bool, typer.Option("--embed", help="The weights in the graph, not beside it: for browsers. Up to 2 GB.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Write a pipeline as one ONNX file: token ids, latents and guidance scale in, pixels out."""
    from sdflow.errors import UsageError
    from sdflow.export.one_file import Wanted, export_one_file, folder_schedule
    from sdflow.export.schedule import parse_schedule
    from sdflow.report.export import print_export, print_schedule

    if one_file is None and schedule_file is None:
        raise UsageError("there is nothing to write", where="export", remedy="Add --one-file OUT.onnx.")
    if one_file is not None and one_file.suffix != ".onnx":
        raise UsageError(f"{one_file} does not end in .onnx", where="--one-file", remedy=f"Write {one_file}.onnx.")
    if one_file is not None and schedule_file is not None and schedule_file.name == f"{one_file.name}.json":
        raise UsageError(
            "the file that tells of the graph has this name", where="--schedule-file", remedy="Name another file."
        )
    name, steps = (None, None) if schedule is None else parse_schedule(schedule)
    wanted = Wanted(
        scheduler=name,
        steps=steps,
        guidance_scale=guidance_scale,
        negative=negative,
        open_schedule=open_schedule,
        checker=checker,
        text=text,
        height=height,
        width=width,
        images=images,
        embed=embed,
    )
    if schedule_file is not None:
        table = folder_schedule(pipeline, wanted)
        table.write(schedule_file)
        if one_file is None:
            print_schedule(table, schedule_file, as_json=json)
    if one_file is not None:
        print_export(export_one_file(pipeline, one_file, wanted), as_json=json)
