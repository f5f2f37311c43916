"""`sdflow export`: export a built pipeline for other programs."""

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
    browser: Annotated[
        Path | None,
        typer.Option(
            "--browser", help="Write a folder with a page that generates images in browsers.", metavar="FOLDER"
        ),
    ] = None,
    ort: Annotated[
        str | None,
        typer.Option(
            help="For --browser: the npm package onnxruntime-web, or cdn. Default: ./node_modules/onnxruntime-web.",
            metavar="DIR|cdn",
            show_default=False,
        ),
    ] = None,
    file_size: Annotated[
        str | None,
        typer.Option(
            help="For --browser: maximum size of a file with weights. Default: 64MB.",
            metavar="SIZE",
            show_default=False,
        ),
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
            help="1 or less exports a graph without guidance, which is twice as fast; otherwise the scale is an input. "
            "Default: the model's."
        ),
    ] = None,
    negative: Annotated[
        bool,
        typer.Option("--negative/--no-negative", help="Make the negative prompt an input of graphs with guidance."),
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
    embed: Annotated[bool, typer.Option("--embed", help="Store the weights inside the graph. At most 2 GB.")] = False,
    json: AsJson = False,
) -> None:
    """Export a pipeline as one ONNX file or as a page for browsers.

    The file's inputs are token ids, latents and the guidance scale; its output is pixels.
    """
    from sdflow.errors import UsageError
    from sdflow.export.one_file import Wanted, export_one_file, folder_schedule
    from sdflow.export.schedule import parse_schedule
    from sdflow.report.export import print_browser, print_export, print_schedule

    if one_file is None and schedule_file is None and browser is None:
        raise UsageError("no output is named", where="export", remedy="Add --one-file OUT.onnx, or --browser FOLDER.")
    if one_file is not None and one_file.suffix != ".onnx":
        raise UsageError(f"{one_file} does not end in .onnx", where="--one-file", remedy=f"Write {one_file}.onnx.")
    if one_file is not None and schedule_file is not None and schedule_file.name == f"{one_file.name}.json":
        raise UsageError(
            "this name is reserved for the file that describes the graph",
            where="--schedule-file",
            remedy="Choose another name.",
        )
    others = {
        "--open-schedule": open_schedule,
        "--no-negative": not negative,
        "--text": text,
        "--images": images is not None,
        "--embed": embed,
    }
    if browser is not None and (one_file is not None or schedule_file is not None):
        option = "--schedule-file" if one_file is None else "--one-file"
        raise UsageError(f"cannot be combined with {option}", where="--browser", remedy="Run sdflow export twice.")
    if browser is not None and (given := [option for option, on in others.items() if on]):
        raise UsageError(f"cannot be combined with {given[0]}", where="--browser", remedy=f"Leave out {given[0]}.")
    if browser is None and (ort is not None or file_size is not None):
        option = "--file-size" if ort is None else "--ort"
        raise UsageError("requires --browser", where=option, remedy="Add --browser FOLDER.")
    name, steps = (None, None) if schedule is None else parse_schedule(schedule)
    if browser is not None:
        from sdflow.export.browser import FILE_BYTES, BrowserWanted, export_browser
        from sdflow.export.web_runtime import find_runtime
        from sdflow.units import parse_size

        page = BrowserWanted(
            runtime=find_runtime(ort, Path()),
            scheduler=name,
            steps=steps,
            guidance_scale=guidance_scale,
            checker=checker,
            height=height,
            width=width,
            file_bytes=FILE_BYTES if file_size is None else parse_size(file_size, "--file-size"),
        )
        print_browser(export_browser(pipeline, browser, page), as_json=json)
        return
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
