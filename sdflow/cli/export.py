"""`sdflow export`: a built pipeline for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sdflow.cli.arguments import AsJson, PipelineFolder
from sdflow.cli.needs import needs


@needs("DRAWS")
def export(
    pipeline: PipelineFolder,
    one_file: Annotated[
        Path | None, typer.Option("--one-file", help="Write the whole pipeline as one ONNX graph.", metavar="OUT.onnx")
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            help="Scheduler and number of steps, such as ddim,50. Default: the pipeline's.", metavar="NAME[,STEPS]"
        ),
    ] = None,
    schedule_file: Annotated[
        Path | None,
        typer.Option(
            help="Write the scheduler's table, for graphs exported with --open-schedule.", metavar="FILE.json"
        ),
    ] = None,
    open_schedule: Annotated[
        bool,
        typer.Option(
            "--open-schedule", help="Make the scheduler's table an input of the graph instead of baking it in."
        ),
    ] = False,
    guidance_scale: Annotated[
        float | None,
        typer.Option(
            help="At most 1 exports a graph without guidance, twice as fast; otherwise it is an input. Default: the model's."
        ),
    ] = None,
    negative: Annotated[
        bool,
        typer.Option("--negative/--no-negative", help="Make the negative prompt an input, where there is guidance."),
    ] = True,
    checker: Annotated[
        bool, typer.Option("--checker/--no-checker", help="Include the safety checker, if there is one.")
    ] = True,
    text: Annotated[
        bool, typer.Option("--text", help="Take text instead of token ids; programs need onnxruntime-extensions.")
    ] = False,
    height: Annotated[int | None, typer.Option(help="Fixed height in pixels; a fixed size is faster on a GPU.")] = None,
    width: Annotated[int | None, typer.Option(help="Fixed width in pixels. Default: the model's native size.")] = None,
    images: Annotated[int | None, typer.Option(help="Batch size, for a fixed size.")] = None,
    embed: Annotated[
        bool, typer.Option("--embed", help="Store the weights inside the graph, for browsers. At most 2 GB.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Export a pipeline as one ONNX file.

    Its inputs are token ids, latents and the guidance scale; its output is pixels.
    """
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
            "this is the name of the file that describes the graph",
            where="--schedule-file",
            remedy="Name another file.",
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
