"""Which files of a component's folder hold its weights, as the library of the component decides.

Where a folder holds weights more than once, diffusers and transformers choose differently:

- diffusers (`ModelMixin.from_pretrained`): an index of shards, then a single file, then a pickle.
- transformers (`_get_resolved_checkpoint_files`): a single file, then an index of shards, then the same among pickles.

A folder without plain weights is read as `from_pretrained(..., variant=NAME)` reads it, and the user is told. What the
choice gives is verified against `from_pretrained` itself (`sdflow.verify.pretrained`), which shares no code with this one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdflow.disk.input_file import is_regular, is_there, read_json
from sdflow.errors import CheckpointError
from sdflow.models.base import Model
from sdflow.sources.checkpoint import MissingFile

VARIANTS = ("fp16", "bf16", "fp32", "non_ema")
"""Where a folder has no weights without a variant, the first of these that it has is taken."""
ADAPTER_CONFIG = "adapter_config.json"
"""PEFT's. transformers loads the adapter that it describes along with the model."""
_EXPLICIT = "transformers_weights"
"""The entry of transformers' config.json that names the file of the weights."""


@dataclass(frozen=True)
class Weights:
    """The files that hold a component's weights; `variant` is "" for the plain ones."""

    files: tuple[Path, ...]
    variant: str
    pickled: bool


def choose_weights(names: Collection[str], model: Model) -> tuple[str, str] | None:
    """The file (or index of shards) to take among the file names of a component's folder, and its variant."""
    spellings = _of_transformers if model.of_transformers else _of_diffusers
    return next(((name, variant) for name, variant in spellings(model.weights_stem) if name in names), None)


def _of_diffusers(stem: str) -> Iterator[tuple[str, str]]:
    for variant in ("", *VARIANTS):
        dotted = f".{variant}" if variant else ""
        yield f"{stem}.safetensors.index{dotted}.json", variant
        if variant:
            yield f"{stem}.safetensors{dotted}.index.json", variant  # deprecated, and still read
        yield f"{stem}{dotted}.safetensors", variant
        yield f"{stem}{dotted}.bin", variant
    for variant in ("", *VARIANTS):  # read with use_safetensors=False alone
        yield f"{stem}.bin.index{f'.{variant}' if variant else ''}.json", variant


def _of_transformers(stem: str) -> Iterator[tuple[str, str]]:
    for variant in ("", *VARIANTS):
        dotted = f".{variant}" if variant else ""
        for name, suffix in ((stem, ".safetensors"), ("pytorch_model", ".bin")):
            yield f"{name}{dotted}{suffix}", variant
            yield f"{name}{suffix}.index{dotted}.json", variant


def is_shard(name: str, index: str, variant: str) -> bool:
    """`model-00001-of-00002.safetensors`, with the variant before or after the numbers."""
    stem, suffix = index.split(".")[0], ".bin" if ".bin" in index else ".safetensors"
    dotted = re.escape(f".{variant}") if variant else ""
    return re.fullmatch(rf"{stem}({dotted}-\d+-of-\d+|-\d+-of-\d+{dotted}){re.escape(suffix)}", name) is not None


def find_weights(folder: Path, model: Model, config: Mapping[str, Any], *, allow_pickle: bool) -> Weights:
    """The component's weights as `choose_weights` chooses them; pickles only when they are allowed.

    config: the folder's config.json. Raises CheckpointError, also where the library would read something else besides.
    """
    names = [path.name for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []
    chosen = choose_weights(names, model)
    if chosen is None:
        raise MissingFile(
            f"no weights: {model.weights_stem}.safetensors is not there",
            where=str(folder),
            remedy="Download the checkpoint again, or write it with save_pretrained(..., safe_serialization=True).",
        )
    name, variant = chosen
    if model.of_transformers:
        _require_nothing_else(folder, name, config)
    pickled = ".bin" in name
    if pickled:
        refuse_pickle(folder / name, allow_pickle)
    files = _shards(folder / name) if name.endswith(".json") else (folder / name,)
    return Weights(files, variant, pickled)


def _require_nothing_else(folder: Path, chosen: str, config: Mapping[str, Any]) -> None:
    """Raises CheckpointError where transformers would read another file than the chosen one, or an adapter with it."""
    if is_there(folder / ADAPTER_CONFIG):
        raise CheckpointError(
            "transformers loads this folder with the adapter that it describes; sdflow reads no adapters here",
            where=str(folder / ADAPTER_CONFIG),
            remedy="Remove it with its adapter's weights, or merge the adapter: merge_and_unload(), then save_pretrained.",
        )
    if (named := config.get(_EXPLICIT)) not in (None, chosen):
        raise CheckpointError(
            f"its {_EXPLICIT} names {named!r:.60}, which transformers reads in place of {chosen}",
            where=str(folder / "config.json"),
            remedy=f"Load it with transformers and save it again, or remove {_EXPLICIT} from config.json.",
        )


def refuse_pickle(path: Path, allow_pickle: bool) -> None:
    """Raise CheckpointError for a pickled file unless the workflow allows pickles."""
    if not allow_pickle:
        raise CheckpointError(
            "pickled weights can run any code when they are loaded",
            where=str(path),
            remedy="Convert them: safetensors.torch.save_file(torch.load(file, weights_only=True), 'x.safetensors'); "
            "or, if you trust the file, write allow_pickle: true in the workflow (it is then loaded with "
            "weights_only=True).",
        )


def _shards(index: Path) -> tuple[Path, ...]:
    content = read_config(index)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("an index without a weight_map", where=str(index), remedy="Download it again.")
    if not isinstance(content.get("metadata"), dict):
        raise CheckpointError(
            "an index without metadata, which neither diffusers nor transformers reads",
            where=str(index),
            remedy='Download it again, or add "metadata": {}.',
        )
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"the shard {name[:60]!r} is not a file name", where=str(index))
        if not is_regular(index.parent / name):
            raise MissingFile(
                f"the shard {name[:60]} is not there", where=str(index), remedy="Download the missing file."
            )
    return tuple(index.parent / name for name in names)


def read_config(path: Path, *, finite: bool = True) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError when it is missing or something else."""
    try:
        value = read_json(path, finite=finite)
    except FileNotFoundError as error:
        raise MissingFile(
            "no such file", where=str(path), remedy="A checkpoint folder has the layout of diffusers' save_pretrained."
        ) from error
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", where=str(path)) from error
    except ValueError as error:
        raise CheckpointError(f"not valid JSON: {error}", where=str(path), remedy="Download it again.") from error
    if not isinstance(value, dict):
        raise CheckpointError("not a JSON object", where=str(path), remedy="Download it again.")
    return value
