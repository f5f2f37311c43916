"""`sdflow generate`: images from a built pipeline."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from sdflow.cli.needs import needs
from sdflow.cli.quiet import quiet_libraries

Folder = Annotated[Path, typer.Argument(help="A pipeline folder that sdflow built.", metavar="PIPELINE")]


@needs("DRAWS")
def generate(
    context: typer.Context,
    pipeline: Folder,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="What to draw. Repeatable.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="A text file with a prompt a line.", metavar="FILE")] = None,
    negative_prompt: Annotated[str | None, typer.Option(help="What not to draw.", show_default=False)] = None,
    prompt_2: Annotated[
        str | None, typer.Option(help="SDXL: another prompt for the second text encoder.", show_default=False)
    ] = None,
    negative_prompt_2: Annotated[
        str | None, typer.Option(help="SDXL: the same for what not to draw.", show_default=False)
    ] = None,
    original_size: Annotated[
        str | None, typer.Option(help="SDXL: HEIGHTxWIDTH that the image seems to come from.", show_default=False)
    ] = None,
    crop: Annotated[
        str | None, typer.Option(help="SDXL: TOPxLEFT that it seems to be cropped at.", show_default=False)
    ] = None,
    target_size: Annotated[
        str | None, typer.Option(help="SDXL: HEIGHTxWIDTH that it seems to be for.", show_default=False)
    ] = None,
    prompt_syntax: Annotated[
        str,
        typer.Option(
            help="How prompts are read. plain: all of it is text, 75 tokens of it. a1111: (word:1.3), ((word)), [word], BREAK, "
            "any length.",
            metavar="plain|a1111",
        ),
    ] = "plain",
    clip_skip: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Last layers of the text encoders to leave out for the prompt, not for the negative one. Counted as in "
            "diffusers: 1 is what others call clip skip 2.",
            show_default=False,
        ),
    ] = None,
    reuse: Annotated[
        str | None,
        typer.Option(
            help="An approximation: of so many steps one is whole, and its deep features serve the others. Also layers=1: how "
            "many of the outermost run in every step. Default: the workflow's, else off.",
            metavar="every=2,from=0.1,to=0.9|off",
            show_default=False,
        ),
    ] = None,
    guidance_interval: Annotated[
        str | None,
        typer.Option(
            help="An approximation: the part of the steps that have guidance. Default: the workflow's, else all.",
            metavar="from=0.1,to=0.8|off",
            show_default=False,
        ),
    ] = None,
    embedding: Annotated[
        list[str] | None,
        typer.Option(
            help="A textual inversion file; its word, else its name, stands for it in prompts. Repeatable.",
            metavar="FILE[:WORD]",
        ),
    ] = None,
    allow_pickle: Annotated[
        bool,
        typer.Option("--allow-pickle", help="Read embeddings that are pickled (.pt, .bin), running nothing in them."),
    ] = False,
    aesthetic_score: Annotated[
        float | None, typer.Option(help="SDXL's refiner: of what to draw. Default: 6.", show_default=False)
    ] = None,
    negative_aesthetic_score: Annotated[
        float | None, typer.Option(help="SDXL's refiner: of what not to draw. Default: 2.5.", show_default=False)
    ] = None,
    image: Annotated[Path | None, typer.Option(help="Start from this image.", metavar="FILE")] = None,
    mask: Annotated[Path | None, typer.Option(help="Draw only where this image is white.", metavar="FILE")] = None,
    mask_blur: Annotated[
        float, typer.Option(help="Pixels over which what is drawn fades into what the mask keeps.", metavar="PIXELS")
    ] = 0.0,
    whole: Annotated[
        bool,
        typer.Option(
            "--whole", help="Leave what the mask keeps as it comes out of the VAE, a little changed: as diffusers does."
        ),
    ] = False,
    control: Annotated[
        list[str] | None,
        typer.Option(
            help="An image for a ControlNet of the pipeline, how much it counts, and the part of the steps. Repeatable.",
            metavar="NAME=FILE[:SCALE[:START:END]]",
            show_default=False,
        ),
    ] = None,
    ip_image: Annotated[
        list[str] | None,
        typer.Option(
            help="An image prompt for the pipeline's IP-Adapter, and how much it counts. Repeatable: more images of one "
            "adapter, or one for each of several.",
            metavar="FILE[:SCALE]",
            show_default=False,
        ),
    ] = None,
    guess_mode: Annotated[
        bool, typer.Option("--guess-mode", help="ControlNets guess what the image shows; the prompt may be empty.")
    ] = False,
    strength: Annotated[
        float | None,
        typer.Option(
            help="Part of the steps that the image goes through. Default: the model's, 0.8 or for SDXL 0.3; 1 with a mask.",
            show_default=False,
        ),
    ] = None,
    eta: Annotated[
        float | None,
        typer.Option(
            help="How much noise DDIM and TCD add in a step, from 0 to 1. Default: the model's.", show_default=False
        ),
    ] = None,
    refiner: Annotated[
        Path | None,
        typer.Option(
            help="Another pipeline that goes the rest of the way. Default: its workflow's.", metavar="PIPELINE"
        ),
    ] = None,
    refiner_start: Annotated[
        float | None,
        typer.Option(
            help="The part of the way at which that takes over; 1: not at all. Default: 0.8.", show_default=False
        ),
    ] = None,
    images: Annotated[int, typer.Option(min=1, help="Images per prompt.")] = 1,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0, max=2**63, help="Of the first image; counts up. Default: a random one.", show_default=False
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1, help="Steps per image. Default: the model's, 50, or 1 to 8 of few-step models.", show_default=False
        ),
    ] = None,
    guidance_scale: Annotated[
        float | None,
        typer.Option(
            help="How much the prompt counts; 1 switches guidance off. Default: the model's, 7.5 or for SDXL 5.",
            show_default=False,
        ),
    ] = None,
    height: Annotated[int | None, typer.Option(min=1, help="Pixels. Default: the model's own.")] = None,
    width: Annotated[int | None, typer.Option(min=1, help="Pixels. Default: the model's own.")] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(
            help="ddim, euler, euler_a, each also as ..._trailing, dpm++_2m, unipc, lcm, tcd, pndm. Default: the pipeline's."
        ),
    ] = None,
    checker: Annotated[
        bool, typer.Option("--safety-checker/--no-safety-checker", help="Blacken what it flags, if there is one.")
    ] = True,
    out: Annotated[Path, typer.Option(help="Folder for the images.", metavar="DIR")] = Path("images"),
    preview: Annotated[
        bool,
        typer.Option(
            "--preview", help="Write what the image is becoming after every step, into the folder `previews`."
        ),
    ] = False,
    preview_with: Annotated[
        Path | None,
        typer.Option(
            help="A pipeline with TAESD, which draws the previews. Default: its own, else a pixel for each of the latents.",
            metavar="PIPELINE",
        ),
    ] = None,
    sheet: Annotated[bool, typer.Option("--sheet/--no-sheet", help="A contact sheet of several images.")] = True,
    batch: Annotated[int, typer.Option(min=1, help="Images drawn at once.")] = 1,
    target: Annotated[str | None, typer.Option(help="Default: the one that the pipeline was built for.")] = None,
    low_memory: Annotated[
        bool, typer.Option("--low-memory", help="One submodel in memory at a time, the VAE in tiles. Slower.")
    ] = False,
    vae_tiles: Annotated[
        bool | None,
        typer.Option(
            "--vae-tiles/--no-vae-tiles",
            help="Run the VAE in tiles, which changes the image a little. Default: where memory is short, and with --low-memory.",
            show_default=False,
        ),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Of the CPU.", show_default=False)] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check/--no-check",
            help="Hold the pipeline's files to their digests; what did not change is not read again.",
        ),
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")] = False,
    interactive: Annotated[
        bool, typer.Option("--interactive", help="Draw on a page in the browser instead; a server runs until Ctrl-C.")
    ] = False,
) -> None:
    """Draw images from text, from an image, or into the white part of a mask."""
    if interactive:
        _on_a_page(context, pipeline)
        return
    quiet_libraries()
    from sdflow.cli.image_progress import image_progress
    from sdflow.families.approximation import parse
    from sdflow.report.generate import print_generate
    from sdflow.runtime.draw_request import GenerateRequest, read_prompts
    from sdflow.runtime.files.control_files import parse_controls
    from sdflow.runtime.files.image_prompt_files import parse_image_prompts
    from sdflow.runtime.generate import generate as draw

    wanted = [*(prompt or ()), *(read_prompts(prompts) if prompts is not None else ())]
    more = {
        "prompt_2": prompt_2,
        "negative_prompt_2": negative_prompt_2,
        "original_size": _pair("--original-size", original_size),
        "crops_coords_top_left": _pair("--crop", crop),
        "target_size": _pair("--target-size", target_size),
        "aesthetic_score": aesthetic_score,
        "negative_aesthetic_score": negative_aesthetic_score,
    }
    request = GenerateRequest(
        folder=pipeline,
        prompts=wanted,
        out=out,
        negative_prompt=negative_prompt,
        seed=seed,
        images=images,
        height=height,
        width=width,
        steps=steps,
        guidance_scale=guidance_scale,
        strength=strength,
        eta=eta,
        image=image,
        mask=mask,
        mask_blur=mask_blur,
        whole=whole,
        controls=parse_controls(control or ()),
        guess_mode=guess_mode,
        image_prompts=parse_image_prompts(ip_image or ()),
        scheduler=scheduler,
        checker=checker,
        target=target,
        batch=batch,
        sheet=sheet,
        low_memory=low_memory,
        vae_tiles=vae_tiles,
        threads=threads,
        refiner=refiner,
        refiner_start=refiner_start,
        prompt_syntax=prompt_syntax,
        clip_skip=clip_skip,
        reuse=None if reuse is None else parse("--reuse", reuse),
        guidance_interval=None if guidance_interval is None else parse("--guidance-interval", guidance_interval),
        embeddings=embedding or (),
        allow_pickle=allow_pickle,
        preview=preview,
        previews=preview_with,
        check=check,
        more={name: value for name, value in more.items() if value is not None},
    )
    with _as_typed(), image_progress() as progress:
        result = draw(request, progress)
    print_generate(result, as_json=json)


_TYPED = {
    "prompt_syntax": "--prompt-syntax",
    "clip_skip": "--clip-skip",
    "reuse": "--reuse",
    "guidance_interval": "--guidance-interval",
    "ip_adapter_image": "--ip-image",
    "ip_adapter_scale": "--ip-image",
    "prompt_2": "--prompt-2",
    "negative_prompt_2": "--negative-prompt-2",
    "original_size": "--original-size",
    "crops_coords_top_left": "--crop",
    "target_size": "--target-size",
    "aesthetic_score": "--aesthetic-score",
    "negative_aesthetic_score": "--negative-aesthetic-score",
}
"""The arguments of a call in Python, and the options that they are here."""


@contextmanager
def _as_typed() -> Iterator[None]:
    """What is wrong with an argument is said of the option that the user typed."""
    from sdflow.errors import UsageError

    try:
        yield
    except UsageError as error:
        if error.where not in _TYPED:
            raise
        what, remedy = (
            re.sub(r"\w+", lambda word: _TYPED.get(word[0], word[0]), text) for text in (error.what, error.remedy or "")
        )
        raise UsageError(what, where=_TYPED[error.where], remedy=remedy or None) from error


def _pair(option: str, text: str | None) -> tuple[int, int] | None:
    """Two whole numbers, written 1024x768."""
    from sdflow.errors import UsageError

    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,6})x(\d{1,6})", text)
    if found is None:
        raise UsageError(f"{text!r} is not of the form 1024x768", where=option, remedy="Two whole numbers, in pixels.")
    return int(found[1]), int(found[2])


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
            f"--interactive takes no other option, and there is --{given[0].replace('_', '-')}",
            remedy="Set it on the page. `sdflow serve --open` has the options of a server.",
        )
    serve([pipeline], port=0, open_page=True)
