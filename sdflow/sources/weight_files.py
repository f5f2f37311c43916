"""Choose the weight files of a component's folder like the component's library does.

If a folder has weights more than once, diffusers and transformers choose differently:

- diffusers (`ModelMixin.from_pretrained`): an index of shards, then a single file, then a pickle.
- transformers (`_get_resolved_checkpoint_files`): a single file, then an index of shards, then the same among pickles.

A folder without plain weights is read like `from_pretrained(..., variant=NAME)`, with a note for the user. The choice
is verified against `from_pretrained` itself (`sdflow.verify.pretrained`), which shares no code with this module.
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
"""Variants in order of preference, for folders without plain weights."""
ADAPTER_CONFIG = "adapter_config.json"
"""PEFT's configuration. transformers loads the adapter that it describes together with the model."""
_EXPLICIT = "transformers_weights"
"""The entry of transformers' config.json that names the weight file."""


@dataclass(frozen=True)
class Weights:
    """The weight files of a component; `variant` is "" for the plain ones."""

    files: tuple[Path, ...]
    variant: str
    pickled: bool


def choose_weights(names: Collection[str], model: Model) -> tuple[str, str] | None:
    """Choose among the file names of a component's folder. Returns the file (or index of shards) and its variant."""
    spellings = _of_transformers if model.of_transformers else _of_diffusers
    return next(((name, variant) for name, variant in spellings(model.weights_stem) if name in names), None)


def _of_diffusers(stem: str) -> Iterator[tuple[str, str]]:
    for variant in ("", *VARIANTS):
        dotted = f".{variant}" if variant else ""
        yield f"{stem}.safetensors.index{dotted}.json", variant
        if variant:
            yield f"{stem}.safetensors{dotted}.index.json", variant  # deprecated, but still supported
        yield f"{stem}{dotted}.safetensors", variant
        yield f"{stem}{dotted}.bin", variant
    for variant in ("", *VARIANTS):  # only with use_safetensors=False
        yield f"{stem}.bin.index{f'.{variant}' if variant else ''}.json", variant


def _of_transformers(stem: str) -> Iterator[tuple[str, str]]:
    for variant in ("", *VARIANTS):
        dotted = f".{variant}" if variant else ""
        for name, suffix in ((stem, ".safetensors"), ("pytorch_model", ".bin")):
            yield f"{name}{dotted}{suffix}", variant
            yield f"{name}{suffix}.index{dotted}.json", variant


def is_shard(name: str, index: str, variant: str) -> bool:
    """Matches `model-00001-of-00002.safetensors`, with the variant before or after the numbers."""
    stem, suffix = index.split(".")[0], ".bin" if ".bin" in index else ".safetensors"
    dotted = re.escape(f".{variant}") if variant else ""
    return re.fullmatch(rf"{stem}({dotted}-\d+-of-\d+|-\d+-of-\d+{dotted}){re.escape(suffix)}", name) is not None


def find_weights(folder: Path, model: Model, config: Mapping[str, Any], *, allow_pickle: bool) -> Weights:
    """The component's weights according to `choose_weights`; pickles only if permitted.

    config: the folder's config.json. Raises CheckpointError, also if the library would read something in addition.
    """
    names = [path.name for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []
    chosen = choose_weights(names, model)
    if chosen is None:
        raise MissingFile(
            f"no weights: {model.weights_stem}.safetensors is missing",
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
    """Raises CheckpointError if transformers would read another file than the chosen one, or an adapter as well."""
    if is_there(folder / ADAPTER_CONFIG):
        raise CheckpointError(
            "transformers would also load the adapter described here, which sdflow does not support",
            where=str(folder / ADAPTER_CONFIG),
            remedy="Remove it with its adapter's weights, or merge the adapter: merge_and_unload(), then save_pretrained.",
        )
    if (named := config.get(_EXPLICIT)) not in (None, chosen):
        raise CheckpointError(
            f"its {_EXPLICIT} names {named!r:.60}, which transformers reads instead of {chosen}",
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
            "an index without metadata, which neither diffusers nor transformers supports",
            where=str(index),
            remedy='Download it again, or add "metadata": {}.',
        )
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(
                f"the shard {name[:60]!r} is not a file name", where=str(index), remedy="Download it again."
            )
        if not is_regular(index.parent / name):
            raise MissingFile(
                f"the shard {name[:60]} is missing", where=str(index), remedy="Download the missing file."
            )
    return tuple(index.parent / name for name in names)


def read_config(path: Path, *, finite: bool = True) -> dict[str, Any]:
    """Read a JSON object from a file. Raises CheckpointError if it is missing or something else."""
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
