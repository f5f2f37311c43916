"""What `sdflow generate` draws. Its options are derived from `GenerateRequest`; importing this loads nothing that draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from sdflow.disk.input_file import read_input
from sdflow.errors import UsageError
from sdflow.families.settings import Settings
from sdflow.parameter import Parameter, parameters
from sdflow.runtime.files.control_files import ControlFile, parse_control
from sdflow.runtime.files.image_prompt_files import ImagePromptFile, parse_image_prompt


@dataclass(frozen=True)
class GenerateRequest(Settings):
    """A pipeline folder, prompts, settings, and what becomes of the images. Each image has a seed of its own."""

    folder: Path
    prompts: Sequence[str]
    out: Annotated[Path, Parameter("Folder for the images.", metavar="DIR")] = Path("images")
    images: Annotated[int, Parameter("Images per prompt.", least=1)] = 1
    image: Annotated[Path | None, Parameter("Start from this image.", metavar="FILE")] = None
    mask: Annotated[Path | None, Parameter("Draw only where this image is white.", metavar="FILE")] = None
    controls: Annotated[
        Sequence[ControlFile],
        Parameter(
            "An image for a ControlNet of the pipeline, its scale, and the part of the steps in which it applies. Repeatable.",
            options=("--control",),
            metavar="NAME=FILE[:SCALE[:START:END]]",
            read=parse_control,
            many=True,
        ),
    ] = ()
    image_prompts: Annotated[
        Sequence[ImagePromptFile],
        Parameter(
            "An image prompt for the pipeline's IP-Adapter, and its scale. Repeatable: more images of one adapter, or one for "
            "each of several.",
            options=("--ip-image",),
            metavar="FILE[:SCALE]",
            read=parse_image_prompt,
            many=True,
        ),
    ] = ()
    embeddings: Annotated[
        Sequence[str],
        Parameter(
            "A textual inversion file; its word, else its name, stands for it in prompts. Repeatable.",
            options=("--embedding",),
            metavar="FILE[:WORD]",
            many=True,
        ),
    ] = ()
    allow_pickle: Annotated[
        bool, Parameter("Read embeddings that are pickled (.pt, .bin), running nothing in them.")
    ] = False
    refiner: Annotated[
        Path | None,
        Parameter(
            "Another pipeline that finishes the denoising (see --refiner-start).",
            otherwise="its workflow's",
            metavar="PIPELINE",
        ),
    ] = None
    checker: Annotated[
        bool,
        Parameter(
            "Blacken what the safety checker flags, if there is one.", options=("--safety-checker/--no-safety-checker",)
        ),
    ] = True
    preview: Annotated[
        bool, Parameter("Write a preview of the image after every step, into the folder `previews`.")
    ] = False
    previews: Annotated[
        Path | None,
        Parameter(
            "A pipeline with TAESD, which draws the previews.",
            options=("--preview-with",),
            otherwise="its own, else a pixel for each of the latents",
            metavar="PIPELINE",
        ),
    ] = None
    sheet: Annotated[bool, Parameter("A contact sheet of several images.")] = True
    batch: Annotated[int, Parameter("Images drawn at once.", least=1)] = 1
    target: Annotated[
        str | None, Parameter("The target to run on.", otherwise="the one that the pipeline was built for")
    ] = None
    low_memory: Annotated[bool, Parameter("One submodel in memory at a time, the VAE in tiles. Slower.")] = False
    vae_tiles: Annotated[
        bool | None,
        Parameter(
            "Run the VAE in tiles, which changes the image a little.",
            otherwise="where memory is short, and with --low-memory",
        ),
    ] = None
    threads: Annotated[int | None, Parameter("Threads of the CPU.", least=1)] = None
    check: Annotated[
        bool,
        Parameter("Verify the pipeline's files against their digests; files that did not change are not read again."),
    ] = True


PARAMETERS = parameters(GenerateRequest)
"""Everything that may be said of it, by name, but for folder, prompts and the arguments of single families."""


def read_prompts(path: Path) -> list[str]:
    """The lines of a text file that are not empty. Raises UsageError when there are none or it cannot be read."""
    try:
        lines = [line.strip() for line in read_input(path).decode("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot be read: {error}", where=str(path), remedy="A text file, a prompt a line.") from error
    if not any(lines):
        raise UsageError("there is no prompt in this file", where=str(path), remedy="Write one a line.")
    return [line for line in lines if line]
