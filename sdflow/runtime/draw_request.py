"""Options of `sdflow generate`, derived from `GenerateRequest`. Importing this module loads no inference code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from sdflow.disk.input_file import read_input
from sdflow.errors import UsageError
from sdflow.families.settings import Settings
from sdflow.parameter import Parameter, parameters
from sdflow.runtime.files.control_files import ControlFile, parse_control
from sdflow.runtime.files.image_prompt_files import ImagePromptFile, parse_image_prompt
from sdflow.runtime.sessions.residency import Keep
from sdflow.units import parse_size


@dataclass(frozen=True)
class GenerateRequest(Settings):
    """A pipeline folder, prompts, settings and output options. Each image has its own seed."""

    folder: Path
    prompts: Sequence[str]
    out: Annotated[Path, Parameter("Folder for the images.", metavar="DIR")] = Path("images")
    images: Annotated[int, Parameter("Images per prompt.", least=1)] = 1
    image: Annotated[Path | None, Parameter("Image to start from.", metavar="FILE")] = None
    mask: Annotated[Path | None, Parameter("Mask: generate only where it is white.", metavar="FILE")] = None
    references: Annotated[
        Sequence[Path],
        Parameter(
            "Reference image that the model edits or combines (FLUX.2-klein). Repeatable.",
            options=("--reference",),
            metavar="FILE",
            read=Path,
            many=True,
        ),
    ] = ()
    controls: Annotated[
        Sequence[ControlFile],
        Parameter(
            "Image for a ControlNet of the pipeline, its scale, and the fraction of steps it applies to. Repeatable.",
            options=("--control",),
            metavar="NAME=FILE[:SCALE[:START:END]]",
            read=parse_control,
            many=True,
        ),
    ] = ()
    image_prompts: Annotated[
        Sequence[ImagePromptFile],
        Parameter(
            "Image prompt for the pipeline's IP-Adapter, and its scale. Repeatable: several images for one adapter, or one "
            "for each of several.",
            options=("--ip-image",),
            metavar="FILE[:SCALE]",
            read=parse_image_prompt,
            many=True,
        ),
    ] = ()
    embeddings: Annotated[
        Sequence[str],
        Parameter(
            "Textual inversion file; use WORD, or else the file's name, in prompts. Repeatable.",
            options=("--embedding",),
            metavar="FILE[:WORD]",
            many=True,
        ),
    ] = ()
    embedding_folder: Annotated[
        Path | None,
        Parameter(
            "Folder of textual inversion files, which prompts refer to by file name.",
            options=("--embeddings",),
            metavar="DIR",
        ),
    ] = None
    wildcards: Annotated[
        Path | None,
        Parameter(
            "Folder of text files: __NAME__ in a prompt becomes a line of NAME.txt, chosen by the image's seed.",
            metavar="DIR",
        ),
    ] = None
    allow_pickle: Annotated[bool, Parameter("Read pickled embeddings (.pt, .bin) without executing code in them.")] = (
        False
    )
    refiner: Annotated[
        Path | None,
        Parameter(
            "Pipeline that refines the image (see --refiner-start).", otherwise="its workflow's", metavar="PIPELINE"
        ),
    ] = None
    checker: Annotated[
        bool,
        Parameter(
            "Black out images that the safety checker flags, if there is one.",
            options=("--safety-checker/--no-safety-checker",),
        ),
    ] = True
    preview: Annotated[bool, Parameter("Write a preview after every step, to the folder `previews`.")] = False
    previews: Annotated[
        Path | None,
        Parameter(
            "Pipeline with TAESD that decodes the previews.",
            options=("--preview-with",),
            otherwise="the pipeline's own, else one pixel per latent",
            metavar="PIPELINE",
        ),
    ] = None
    sheet: Annotated[bool, Parameter("Write a contact sheet of several images.")] = True
    batch: Annotated[int, Parameter("Batch size.", least=1)] = 1
    target: Annotated[str | None, Parameter("Target to run on.", otherwise="the one the pipeline was built for")] = None
    low_memory: Annotated[bool, Parameter("Load one submodel at a time and run the VAE in bands. Slower.")] = False
    keep: Annotated[
        Keep,
        Parameter(
            "Weights on a CUDA device: `all` keeps all of them there; with `fit`, submodels that do not fit together take "
            "turns, waiting in host memory."
        ),
    ] = "fit"
    device_memory: Annotated[
        int | None,
        Parameter(
            "Memory limit on a CUDA device, such as 12GB; weights that do not fit are streamed.",
            otherwise="free memory",
            metavar="SIZE",
            read=partial(parse_size, where="--device-memory"),
        ),
    ] = None
    devices: Annotated[
        int,
        Parameter(
            "Number of GPUs. With 2, one computes the prompts and the other the negative prompts; both hold the denoiser's "
            "weights.",
            least=1,
        ),
    ] = 1
    vae_tiles: Annotated[
        bool | None,
        Parameter(
            "Run the VAE in bands of rows: less memory, slower.", otherwise="if memory is short, or with --low-memory"
        ),
    ] = None
    threads: Annotated[int | None, Parameter("CPU threads.", least=1)] = None
    check: Annotated[
        bool, Parameter("Verify the pipeline's files against their digests; unchanged files are not read again.")
    ] = True


PARAMETERS = parameters(GenerateRequest)
"""All parameters by name, except folder, prompts and family-specific arguments."""


def read_prompts(path: Path) -> list[str]:
    """Return the non-empty lines of a text file. Raises UsageError if there are none or it cannot be read."""
    try:
        lines = [line.strip() for line in read_input(path).decode("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot be read: {error}", where=str(path), remedy="Use a text file, one prompt per line."
        ) from error
    if not any(lines):
        raise UsageError("there are no prompts in this file", where=str(path), remedy="Write one prompt per line.")
    return [line for line in lines if line]
