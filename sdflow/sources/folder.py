"""A checkpoint in a diffusers folder: `model_index.json` and one folder per component."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sdflow.errors import CheckpointError
from sdflow.sources.checkpoint import (
    CLASS_OF,
    COMPONENT_OF,
    Checkpoint,
    FileDigests,
    MissingFile,
    SubmodelCheckpoint,
    config_digest,
    file_stamp,
    pipeline_facts,
    side_by_side,
)
from sdflow.sources.safetensors_file import read_header

PIPELINES = ("StableDiffusionPipeline", "StableDiffusionImg2ImgPipeline")
# Where the wanted file has no copy without a variant, the first of these that exists is taken.
_VARIANTS = ("fp16", "bf16", "fp32", "non_ema")
# transformers' classes use other stems: see choose_weights.
_STEM = {"unet": "diffusion_pytorch_model", "vae": "diffusion_pytorch_model"}


@dataclass(frozen=True)
class Weights:
    """The files that hold a component's weights; `variant` is "" for the plain ones."""

    files: tuple[Path, ...]
    variant: str
    pickled: bool


def open_folder(
    folder: Path,
    *,
    reference: str,
    digests: FileDigests,
    allow_pickle: bool,
    origin: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """The checkpoint in a diffusers folder.

    origin: JSON that joins the provenance and, but for "kind" and "repository", every identity (the hub's commit).
    Raises CheckpointError naming the file for whatever is missing, damaged or of a kind that is not supported.
    """
    origin = {"kind": "folder", "path": str(folder.absolute())} if origin is None else dict(origin)
    pinned = {key: value for key, value in origin.items() if key == "commit"}
    index = _pipeline_index(folder)
    components = [name for name in CLASS_OF if name != "safety_checker" or index.get(name, [None])[0] is not None]
    notes: list[str] = []
    loads: dict[str, SubmodelCheckpoint] = {}
    found: dict[str, Weights] = {}
    stamps: dict[str, list[dict[str, Any]]] = {}
    configs: dict[str, Any] = {"scheduler": read_config(folder / "scheduler" / "scheduler_config.json")}
    files: dict[str, str] = {}
    for component in components:
        configs[component] = component_config(folder, component)
        found[component] = weights = find_weights(folder / component, component, allow_pickle=allow_pickle)
        if weights.variant:
            notes.append(f"{component}: only weights of the variant {weights.variant} are there; they are used.")
        if weights.pickled:
            notes.append(f"{component}: the weights are pickled; they are loaded with weights_only=True.")
        else:
            for file in weights.files:
                read_header(file)
        # Before the digests: a file that changes in between is then refused when it is loaded.
        stamps[component] = [file_stamp(file) for file in weights.files]
    every = [file for weights in found.values() for file in weights.files]
    sum_of = dict(zip(every, side_by_side([partial(digests.digest, file) for file in every]), strict=True))
    for component, weights in found.items():
        config = configs[component]
        sums = [sum_of[file] for file in weights.files]
        files |= {file.relative_to(folder).as_posix(): sha for file, sha in zip(weights.files, sums, strict=True)}
        loads[component] = SubmodelCheckpoint(
            identity={
                "kind": "files",
                "class": CLASS_OF[component],
                "config": config_digest(config),
                "weights": sorted(sums),
                **pinned,
            },
            load={
                "kind": "files",
                "config": config,
                "files": stamps[component],
                "pickled": weights.pickled,
            },
        )
    companions = _companions(folder, "safety_checker" in components)
    for path in sorted(path for companion in companions.values() for path in companion.iterdir() if path.is_file()):
        files[path.relative_to(folder).as_posix()] = digests.digest(path)
    return Checkpoint(
        reference=reference,
        provenance={**origin, "files": files},
        submodels={name: loads[component] for name, component in COMPONENT_OF.items() if component in loads},
        companions=companions,
        facts={
            **_facts(folder, configs),
            "requires_safety_checker": bool(index.get("requires_safety_checker", "safety_checker" in components)),
        },
        notes=tuple(notes),
    )


def read_config(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError when it is missing or something else."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise MissingFile(
            "no such file", where=str(path), remedy="A checkpoint folder has the layout of diffusers' save_pretrained."
        ) from error
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", where=str(path)) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"not valid JSON: {error}", where=str(path), remedy="Download it again.") from error
    if not isinstance(value, dict):
        raise CheckpointError("not a JSON object", where=str(path), remedy="Download it again.")
    return value


def _pipeline_index(folder: Path) -> dict[str, Any]:
    index = read_config(folder / "model_index.json")
    pipeline = index.get("_class_name")
    if pipeline not in PIPELINES:
        raise CheckpointError(
            f"a pipeline of class {pipeline!r} is not supported",
            where=str(folder / "model_index.json"),
            remedy=f"Supported: {', '.join(PIPELINES)}.",
        )
    if not isinstance(index.get("safety_checker", []), list) or index.get("safety_checker") == []:
        index.pop("safety_checker", None)
    return index


def component_config(folder: Path, component: str) -> dict[str, Any]:
    """The component's config.json, checked to be of the class that sdflow loads it as."""
    path = folder / component / "config.json"
    config = read_config(path)
    named = [config["_class_name"]] if "_class_name" in config else config.get("architectures") or []
    if CLASS_OF[component] not in named:
        said = f"of {', '.join(map(str, named))}" if named else "of no class that it names"
        raise CheckpointError(
            f"a configuration {said}, not of {CLASS_OF[component]}",
            where=str(path),
            remedy="Use a Stable Diffusion 1.x checkpoint, or one with the same submodels.",
        )
    return config


def _facts(folder: Path, configs: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return pipeline_facts(configs)
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"the configurations of unet, vae and scheduler lack something: {error}",
            where=str(folder),
            remedy="Save the checkpoint again with a current diffusers.",
        ) from error


def _companions(folder: Path, has_safety_checker: bool) -> dict[str, Path]:
    wanted = {"tokenizer": "tokenizer_config.json", "scheduler": "scheduler_config.json"}
    if has_safety_checker:
        wanted["feature_extractor"] = "preprocessor_config.json"
    for name, file in wanted.items():
        read_config(folder / name / file)
    return {name: folder / name for name in wanted}


def choose_weights(names: Collection[str], component: str) -> tuple[str, str] | None:
    """The file (or index of shards) to take among the file names of a component's folder, and its variant.

    Safetensors come before pickles, then weights without a variant before those with one.
    diffusers writes `model.fp16.safetensors` and `model.safetensors.index.fp16.json`.
    """
    for suffix, stem in ((".safetensors", "model"), (".bin", "pytorch_model")):
        stem = _STEM.get(component, stem)
        for variant in ("", *_VARIANTS):
            dotted = f".{variant}" if variant else ""
            spellings = (f"{stem}{dotted}{suffix}", f"{stem}{suffix}.index{dotted}.json")
            for name in (*spellings, f"{stem}{dotted}{suffix}.index.json"):
                if name in names:
                    return name, variant
    return None


def find_weights(folder: Path, component: str, *, allow_pickle: bool) -> Weights:
    """The component's weights as `choose_weights` chooses them; pickles only when they are allowed."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    chosen = choose_weights(names, component)
    if chosen is None:
        raise MissingFile(
            f"no weights: {_STEM.get(component, 'model')}.safetensors is not there",
            where=str(folder),
            remedy="Download the checkpoint again, or write it with save_pretrained(..., safe_serialization=True).",
        )
    name, variant = chosen
    pickled = ".bin" in name
    if pickled:
        refuse_pickle(folder / name, allow_pickle)
    files = _shards(folder / name) if name.endswith(".json") else (folder / name,)
    return Weights(files, variant, pickled)


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
    weight_map = read_config(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("an index without a weight_map", where=str(index), remedy="Download it again.")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"the shard {name!r} is not a file name", where=str(index))
        if not (index.parent / name).is_file():
            raise MissingFile(f"the shard {name} is not there", where=str(index), remedy="Download the missing file.")
    return tuple(index.parent / name for name in names)
