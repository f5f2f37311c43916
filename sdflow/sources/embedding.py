"""Textual inversion files: words with learned vectors (Gal et al. 2022, https://arxiv.org/abs/2208.01618).

Supported are files of AUTOMATIC1111's webui and kohya's sd-scripts (`emb_params`, `string_to_param`; for Stable
Diffusion XL `clip_l` and `clip_g`), and diffusers' learned_embeds, whose single tensor is named after the word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdflow.errors import CheckpointError, UsageError
from sdflow.families import ARCHITECTURES, FAMILIES, family_of_architecture
from sdflow.families.shared.part import Part
from sdflow.models.base import Shapes
from sdflow.models.clip_text import MOST_VECTORS, WIDTHS
from sdflow.sources.architectures import architecture_config
from sdflow.sources.reference import PICKLE_SUFFIXES
from sdflow.sources.safetensors_file import read_float_tensors, read_header

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

ONLY = "emb_params"
"""The tensor's name in webui's files with a single one for all text encoders."""
_IN_PICKLES = "string_to_param"
_REMEDY = "Supported are files of AUTOMATIC1111's webui, kohya's sd-scripts and diffusers (learned_embeds)."


@dataclass(frozen=True)
class Embedding:
    """A word and its vectors: text encoder's name in the file, or ONLY -> (vectors, width) float32."""

    word: str
    path: Path
    tensors: Mapping[str, Floats]

    @property
    def count(self) -> int:
        """Number of vectors of the word."""
        return len(next(iter(self.tensors.values())))


def embedding_names() -> tuple[str, ...]:
    """Tensor names in files with one tensor per text encoder, in the encoders' order."""
    return tuple(
        dict.fromkeys(part.embedding for family in FAMILIES.values() for part in family.parts if part.embedding)
    )


def embedding_shapes(shapes: Shapes) -> dict[str, tuple[int, int]] | None:
    """Number and width of the vectors in a textual inversion file, by name; None for any other file."""
    found = {name: (1, *shape) if len(shape) == 1 else shape for name, shape in shapes.items()}
    if len(found) != 1 and found.keys() != set(embedding_names()):
        return None
    if any(len(shape) != 2 or not 0 < shape[0] <= MOST_VECTORS or shape[1] < 2 for shape in found.values()):
        return None
    # A tensor with another name may be anything, unless a text encoder reads vectors of its width.
    known = not found.keys().isdisjoint((ONLY, *embedding_names()))
    if not known and not architectures_reading([shape[1] for shape in found.values()]):
        return None
    return {name: (shape[0], shape[1]) for name, shape in found.items()}


def architectures_reading(widths: Sequence[int]) -> tuple[str, ...]:
    """The shipped architectures whose text encoders read vectors of these widths."""
    found = []
    for architecture in ARCHITECTURES:
        family = family_of_architecture(architecture)
        configs = [architecture_config(architecture, family.part(name).component) for name in family.text]
        own = [config["hidden_size"] for config in configs if "hidden_size" in config]
        # Models with text encoders other than CLIP do not support learned words.
        if len(own) == len(configs) and sorted(own) == sorted(widths):
            found.append(architecture)
    return tuple(found)


def split_word(text: str) -> tuple[Path, str | None]:
    """Split `FILE:WORD`; the word is None if there is none."""
    path, colon, word = text.rpartition(":")
    if not colon or Path(text).is_file() or not Path(path).suffix:
        return Path(text).expanduser(), None
    return Path(path).expanduser(), word


def read_embedding(path: Path, word: str | None = None, *, allow_pickle: bool = False) -> Embedding:
    """Read the vectors of a file. word: for use in prompts; None: from the file, otherwise the file's name.

    Raises CheckpointError for a file that cannot be read, is not an embedding, or is pickled without permission.
    """
    if not path.is_file():
        raise CheckpointError("no such file", where=str(path), remedy="Check the path of the embedding.")
    if path.suffix.lower() in PICKLE_SUFFIXES:
        if not allow_pickle:
            raise CheckpointError(
                "is pickled, and pickles can run any code when they are loaded",
                where=str(path),
                remedy="Use a .safetensors version; or, if you trust the file, add --allow-pickle: it is then loaded "
                "with weights_only=True.",
            )
        tensors, said = _from_pickle(path)
    elif path.suffix.lower() == ".safetensors":
        tensors, said = _named(path, {name: entry.shape for name, entry in read_header(path).items()})
        found = read_float_tensors(path, tensors.values())
        tensors = {name: found[stored] for name, stored in tensors.items()}
    else:
        raise CheckpointError(f"the file type {path.suffix!r} is unknown", where=str(path), remedy=_REMEDY)
    return Embedding(_word(path, word or said), path, _checked(path, tensors))


def require_different(words: Sequence[Embedding]) -> None:
    """Raises UsageError if two embeddings have one word; case is ignored."""
    seen: dict[str, Embedding] = {}
    for each in words:
        if (other := seen.setdefault(each.word.lower(), each)) is not each:
            raise UsageError(
                f"its word {each.word!r} already stands for {other.path}",
                where=str(each.path),
                remedy=f"Give it another: {each.path.name}:WORD.",
            )


def _named(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, Any], str | None]:
    """Our name of each tensor -> its name in the file; and the word, if the file has it."""
    if shapes.keys() == set(embedding_names()):
        return {name: name for name in shapes}, None
    if len(shapes) == 1:
        (name,) = shapes
        return {ONLY: name}, None if name in (ONLY, "*") else name
    raise CheckpointError(f"holds {len(shapes)} tensors: this is not an embedding", where=str(path), remedy=_REMEDY)


def _from_pickle(path: Path) -> tuple[dict[str, Any], str | None]:
    import torch

    from sdflow.sources.load import unpickled

    value = unpickled(path, "cpu")
    value = value.get(_IN_PICKLES, value) if isinstance(value, dict) else value
    if not isinstance(value, dict) or not all(isinstance(each, torch.Tensor) for each in value.values()):
        raise CheckpointError("holds no vectors of a word", where=str(path), remedy=_REMEDY)
    tensors = {str(name): tensor.detach().float().numpy() for name, tensor in value.items()}
    named, said = _named(path, {name: tensor.shape for name, tensor in tensors.items()})
    return {name: tensors[stored] for name, stored in named.items()}, said


def _word(path: Path, said: str | None) -> str:
    word = path.stem if said is None else said
    if not word.strip() or word != word.strip():
        raise CheckpointError(
            f"{word!r} is not a word",
            where=str(path),
            remedy=f"Name one: {path.name}:WORD. Prompts use it for the file.",
        )
    return word


def _checked(path: Path, tensors: Mapping[str, Any]) -> dict[str, Floats]:
    """The vectors as (vectors, width), equally many for each text encoder."""
    import numpy as np

    found: dict[str, Floats] = {}
    for name, tensor in tensors.items():
        rows = tensor[None] if tensor.ndim == 1 else tensor
        if rows.ndim != 2 or not rows.size or len(rows) > MOST_VECTORS or not np.isfinite(rows).all():
            raise CheckpointError(
                f"{name} is {list(tensor.shape)} or has values that are not finite, so it does not hold the vectors of a word",
                where=str(path),
                remedy=_REMEDY,
            )
        found[name] = rows
    if len({len(rows) for rows in found.values()}) != 1:
        raise CheckpointError("has more vectors for one text encoder than for another", where=str(path), remedy=_REMEDY)
    return found


def vectors_for(word: Embedding, part: Part, parts: Sequence[Part], width: int) -> Floats:
    """The vectors of this width for one of a family's text encoders.

    Raises UsageError if they are for another family.
    """
    name = ONLY if part.embedding is None else part.embedding
    found = word.tensors.get(name)
    if found is None or found.shape[1] != width:
        there = ", ".join(f"{key} {rows.shape[1]} wide" for key, rows in word.tensors.items())
        wanted = " and ".join(each.embedding or ONLY for each in parts)
        raise UsageError(
            f"holds {there}; this pipeline's {part.name.replace('_', ' ')} reads vectors {width} wide"
            + ("" if found is not None else f", its text encoders {wanted}"),
            where=str(word.path),
            remedy=f"Use an embedding for this kind of model: {WIDTHS}.",
        )
    return found


SUFFIXES = (".pt", ".bin", ".safetensors")
"""In ascending priority for one name: safetensors needs no pickle."""


def embeddings_in(folder: Path) -> dict[str, Path]:
    """The files in a folder and its subfolders, by word. Raises UsageError if it is not a folder, and for two files of
    one word, ignoring case."""
    if not folder.is_dir():
        raise UsageError("this is not a folder", where=str(folder), remedy="Name a folder of textual inversion files.")
    found: dict[str, Path] = {}
    for suffix in SUFFIXES:
        words: dict[str, Path] = {}
        for path in sorted(folder.rglob("*")):
            if path.suffix.lower() != suffix or not path.is_file():
                continue
            if (other := words.setdefault(path.stem.lower(), path)) is not path:
                raise UsageError(
                    f"its word {path.stem!r} already stands for {other}", where=str(path), remedy="Rename one of them."
                )
        found |= words
    return {path.stem: path for path in found.values()}
