"""Read a component's tensors with diffusers or transformers, as the reference for a proof.

`from_pretrained` selects the files, so that a wrong choice by a build (`sdflow.sources.weight_files`) shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdflow.disk.file_stamp import check_stamps
from sdflow.errors import CheckpointError
from sdflow.families.shared.part import Part
from sdflow.machine.memory import let_go
from sdflow.models.base import Model, Shapes
from sdflow.sources.checkpoint import files_of, listing
from sdflow.sources.fitting import apart
from sdflow.sources.formats import open_weights
from sdflow.sources.load import loaded, rejections
from sdflow.sources.safetensors_file import read_header
from sdflow.sources.weight_files import VARIANTS
from sdflow.verify.low_bits import low_bit_reader
from sdflow.weights.tensors import open_tensors

if TYPE_CHECKING:
    import torch


def read_by_library(part: Part, load: Mapping[str, Any], expected: Shapes) -> Mapping[str, torch.Tensor]:
    """Return these parameters in float32.

    A component's folder is loaded by its library, files in low bits by `sdflow.verify.low_bits`, and other single files
    by sdflow.

    Raises CheckpointError if the library cannot load the folder, or finds other parameters there.
    """
    import torch

    if "folder" in load:
        return _of_library(part, load, expected, torch.float32)
    if in_low_bits(load):
        check_stamps(load["files"])
        read = low_bit_reader(part, load, expected)
        tensors = {name: read(name) for name in expected}
        check_stamps(load["files"])
        return tensors
    return loaded(part, load, expected)


def reader(submodel: str, part: Part, load: Mapping[str, Any], expected: Shapes) -> Callable[[str], torch.Tensor]:
    """Return a function that reads one of these parameters in float32, from the same source as `read_by_library`.

    Parameters that a library loads are mapped from the files, in their stored type. Raises CheckpointError as
    `read_by_library` does.
    """
    import torch

    mapped: dict[str, torch.Tensor] = {}
    low_bits: dict[str, Callable[[str], torch.Tensor]] = {}
    for each, how, shapes in apart(part, load, expected):
        if "folder" in how:
            mapped |= _of_library(each, how, shapes, _stored_type(how["files"]))
        elif in_low_bits(how):
            low_bits |= dict.fromkeys(shapes, low_bit_reader(each, how, shapes))
    others = (
        None
        if expected.keys() == mapped.keys() | low_bits.keys()
        else ExitStack().enter_context(open_tensors(submodel, load, expected))
    )

    def read(name: str) -> torch.Tensor:
        if name in low_bits:
            return low_bits[name](name)
        if name not in mapped:
            assert others is not None
            return torch.from_numpy(others.read(name)).float()
        values = mapped[name].to(torch.float32, copy=True)
        let_go(mapped[name])
        return values

    return read


def in_low_bits(load: Mapping[str, Any]) -> bool:
    """Whether a submodel's files hold quantized weights, or are not safetensors."""
    if load["kind"] != "files" or load["pickled"]:
        return False
    return any(open_weights(file).format is not None for file, _ in files_of(load))


def _of_library(
    part: Part, load: Mapping[str, Any], expected: Shapes, dtype: torch.dtype
) -> Mapping[str, torch.Tensor]:
    check_stamps(load["files"])
    tensors = pretrained(part.model, Path(load["folder"]), dtype)
    check_stamps(load["files"])
    if expected.keys() != tensors.keys():
        raise CheckpointError(
            f"{part.model.class_name}.from_pretrained loads other parameters from it: "
            f"{listing(sorted(expected.keys() ^ tensors.keys()))}",
            where=load["folder"],
            remedy="Save it again with the installed diffusers and transformers.",
        )
    return tensors


def _stored_type(files: Iterable[Mapping[str, Any]]) -> torch.dtype:
    """The common type of all tensors of these files; float32 if they have several, or are pickled."""
    import torch

    paths = [Path(each["path"]) for each in files]
    if any(path.suffix != ".safetensors" for path in paths):
        return torch.float32
    stored = {entry.dtype for path in paths for entry in read_header(path).values()}
    return (
        {"F16": torch.float16, "BF16": torch.bfloat16}.get(stored.pop(), torch.float32)
        if len(stored) == 1
        else torch.float32
    )


def pretrained(model: Model, folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The state_dict, in this type, of what `from_pretrained` loads from a component's folder.

    If the plain call finds no weights, each variant is tried, then pickled files.
    """
    import torch

    cls, argument = model.library_class(), "dtype" if model.of_transformers else "torch_dtype"
    if dtype != torch.float32:  # some classes keep modules in float32, which would copy weights that should stay mapped
        cls = type(model.class_name, (cls,), {"_keep_in_fp32_modules": None})
    refusals = []
    variants: list[dict[str, Any]] = [{}, *({"variant": variant} for variant in VARIANTS)]
    for options in (*variants, *({**each, "use_safetensors": False} for each in variants)):
        try:
            with _quiet(), _refusals(model, folder):
                module, found = cls.from_pretrained(
                    str(folder), local_files_only=True, output_loading_info=True, **{argument: dtype}, **options
                )
        except _NotThere as error:
            refusals.append(error)
            continue
        if lacking := sorted(map(str, found["missing_keys"])):
            raise CheckpointError(
                f"{model.class_name}.from_pretrained finds no values for {listing(lacking)}", where=str(folder)
            )
        return dict(module.state_dict())
    raise CheckpointError(
        f"{model.class_name}.from_pretrained finds no weights: {refusals[0]}", where=str(folder)
    ) from refusals[0]


class _NotThere(Exception):
    """The library finds no file, or cannot read it."""


@contextmanager
def _refusals(model: Model, folder: Path) -> Iterator[None]:
    with rejections(str(folder), f"{model.class_name}.from_pretrained rejects it"):
        try:
            yield
        except OSError as error:
            raise _NotThere(str(error)) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence progress bars and the libraries' warnings about missing files."""
    from diffusers.utils import logging as of_diffusers
    from transformers.utils import logging as of_transformers

    before = [library.get_verbosity() for library in (of_diffusers, of_transformers)]
    bars = of_transformers.is_progress_bar_enabled()
    try:
        for library in (of_diffusers, of_transformers):
            library.set_verbosity(library.CRITICAL)
        of_transformers.disable_progress_bar()
        yield
    finally:
        for library, verbosity in zip((of_diffusers, of_transformers), before, strict=True):
            library.set_verbosity(verbosity)
        if bars:
            of_transformers.enable_progress_bar()
